"""Cluster recipes: what they run on each machine, what they refuse, and that their plans fit the machines they name.

A recipe runs here against a Python that only writes down how it was called; the commands are compared with the files in
recipe_commands/ (UPDATE_RECIPES=1 writes them anew). The plans are made by the code that the recipe would run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_async.config import check, load
from megatron_async.config.hf import read_shape
from megatron_async.config.plan import budgets
from megatron_async.rollout.environments.tau2.options import parse as parse_tau2

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ("qwen3_30b_a3b_tau2", "qwen3_4b_tau2", "qwen3_30b_a3b_base_math_sat", "qwen3_30b_a3b_sao")
COMMANDS = Path(__file__).with_name("recipe_commands")

RECORDER = """#!/usr/bin/env bash
{ printf 'python'; printf ' %q' "$@"; printf '\\n'; } >> "$RECORD"
exit "${RECORDER_STATUS:-0}"
"""


@pytest.fixture
def site(tmp_path: Path) -> dict[str, str]:
    """Environment of a recipe: a recording Python, a checkpoint with nothing but its configuration."""
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(RECORDER)
    python.chmod(0o755)
    return {
        "PATH": os.environ["PATH"],
        "VENV": str(tmp_path / "venv"),
        "RECORD": str(tmp_path / "record"),
        "MODEL": "/data/model",
        "RUN_DIR": "/shared/runs",
        "USER_URL": "http://user:30000/v1",
        "ENVIRONMENT": "maths.tasks:build",
    }


def run(recipe: str, site: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    script = ROOT / "recipes" / f"{recipe}.sh"
    return subprocess.run(
        ["bash", str(script), *arguments], env=site, capture_output=True, text=True, check=False, cwd="/"
    )


def recorded(site: dict[str, str]) -> list[str]:
    record = Path(site["RECORD"])
    return record.read_text().splitlines() if record.exists() else []


def readable(commands: list[str]) -> str:
    """One option a line."""
    return (
        "".join(f"{command}\n\n" for command in commands).replace(" --set ", "\n  --set ").replace("\\ ", " ")
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_commands_of_the_first_and_of_another_machine(recipe, site):
    """Machine 0 plans, then leads; the others join with the same options."""
    assert run(recipe, site, "--set", "steps=3").returncode == 0
    assert run(recipe, site, "--node", "1", "--set", "steps=3").returncode == 0
    plan, lead, join = recorded(site)
    assert plan.startswith("python -m tools.plan_cluster --ranks none --config ")
    assert lead.replace("--node 0", "--node 1") == join
    assert lead.endswith("--set steps=3"), "what the user sets comes last and wins"
    expected = COMMANDS / f"{recipe}.txt"
    if os.environ.get("UPDATE_RECIPES"):
        expected.write_text(readable([plan, lead]))
    assert readable([plan, lead]) == expected.read_text()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_dry_run_plans_and_prints_commands_but_launches_nothing(recipe, site):
    for name in ("MODEL", "USER_URL", "ENVIRONMENT"):
        del site[name]
    done = run(recipe, site, "--dry-run")
    assert done.returncode == 0, done.stderr
    (plan,) = recorded(site)
    assert re.search(
        r"-m tools\.plan_cluster --config recipes/configs/\S+ .*--model recipes/models/qwen3_\w+$", plan
    )
    machines = re.findall(r"machine (\d): \S+ -m megatron_async launch --node (\d) ", done.stdout)
    assert machines == [(str(i), str(i)) for i in range(len(machines))]
    assert machines


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_missing_is_named_and_nothing_is_run(recipe, site):
    needed = "USER_URL" if "tau2" in recipe else "ENVIRONMENT"
    for name in (needed, "MODEL"):
        done = run(recipe, {key: value for key, value in site.items() if key != name})
        assert done.returncode == 2
        assert f"{recipe}: {name} is not set: " in done.stderr
    assert run(recipe, site, "--nodes", "3").returncode == 2
    assert recorded(site) == []


def test_a_plan_that_does_not_hold_starts_nothing(site):
    done = run("qwen3_4b_tau2", {**site, "RECORDER_STATUS": "2"})
    assert done.returncode == 2
    assert [line.split()[2] for line in recorded(site)] == ["tools.plan_cluster"]


def test_under_slurm_the_node_number_is_slurms_and_the_count_is_checked(site):
    slurm = {**site, "SLURM_NODEID": "2", "SLURM_JOB_NUM_NODES": "3"}
    assert run("qwen3_30b_a3b_tau2", slurm).returncode == 0
    assert " launch --node 2 " in recorded(site)[0]
    done = run("qwen3_30b_a3b_tau2", {**slurm, "SLURM_JOB_NUM_NODES": "4"})
    assert done.returncode == 2
    assert "the job has 4 machines, but TRAINER_NODES=2 + ENGINE_NODES=1 makes 3" in done.stderr


def test_the_batch_script_runs_one_task_per_machine(tmp_path):
    srun = tmp_path / "srun"
    srun.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$*"\n')
    srun.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(tmp_path)}
    recipe = tmp_path / "recipes" / "r.sh"
    recipe.parent.mkdir()
    recipe.write_text("")
    script = str(ROOT / "recipes/slurm/run.sbatch")
    done = subprocess.run(
        ["bash", script, "recipes/r.sh", "--set", "steps=3"], env=environment, capture_output=True, text=True
    )
    assert done.stdout.strip() == "--ntasks-per-node=1 --kill-on-bad-exit=1 bash recipes/r.sh --set steps=3"
    done = subprocess.run(["bash", script, "recipes/no.sh"], env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert "recipes/no.sh is no recipe here" in done.stderr


def config_of(recipe: str, site: dict[str, str], shape: str, **environment: str):
    """The configuration that the recipe's `launch` would get, over a published shape."""
    assert run(recipe, {**site, **environment}).returncode == 0
    words = recorded(site)[-1].split()
    overrides = [word for flag, word in zip(words, words[1:], strict=False) if flag == "--set"]
    file = words[words.index("--config") + 1]
    return load(ROOT / file, [*overrides, f"model.path={ROOT / 'recipes/models' / shape}"])


SHAPES = {
    "qwen3_30b_a3b_tau2": "qwen3_30b_a3b",
    "qwen3_4b_tau2": "qwen3_4b",
    "qwen3_30b_a3b_base_math_sat": "qwen3_30b_a3b_base",
    "qwen3_30b_a3b_sao": "qwen3_30b_a3b",
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_plan_fits_the_machines_it_names(recipe, site):
    config = config_of(recipe, site, SHAPES[recipe])
    shape = read_shape(config.model.path)
    check(config, needs_weights=False)
    assert config.cluster.device_memory_gib == 80
    needs = {
        budget.what: budget.total / budget.capacity for budget in budgets(shape, config) if budget.capacity
    }
    assert all(0.3 < share <= 1 for share in needs.values()), needs


def test_other_numbers_of_machines_fit_too(site):
    one = {"TRAINER_NODES": "1", "ENGINE_NODES": "0", "DEVICE_MEMORY_GIB": "180"}
    check(config_of("qwen3_30b_a3b_tau2", site, "qwen3_30b_a3b", **one), needs_weights=False)
    two = {"TRAINER_NODES": "1", "ENGINE_NODES": "1"}
    check(config_of("qwen3_4b_tau2", site, "qwen3_4b", **two), needs_weights=False)
    lag = config_of("qwen3_30b_a3b_base_math_sat", site, "qwen3_30b_a3b_base", LAG="8")
    check(lag, needs_weights=False)
    assert (lag.publish.every, lag.rollout.max_staleness) == (8, 8)


@pytest.mark.parametrize("recipe", ["qwen3_30b_a3b_tau2", "qwen3_4b_tau2"])
@pytest.mark.parametrize("method", ["exact", "sao"])
def test_tau2_recipes_know_every_domain_and_both_methods(recipe, method, site):
    for domain, tasks in (("airline", 20), ("retail", 40), ("telecom", 40)):
        config = config_of(recipe, site, SHAPES[recipe], METHOD=method, DOMAIN=domain)
        assert config.environment.options["domain"] == domain
        assert (config.evaluation.tasks, config.evaluation.samples_per_task) == (tasks, 4)
        assert config.name == f"{recipe}_{domain}_{method}"
        assert parse_tau2(config.environment.options).user.endpoint.url == "http://user:30000/v1"
    check(config, needs_weights=False)
    needs = [b.total / b.capacity for b in budgets(read_shape(config.model.path), config) if b.capacity]
    assert all(0.2 < share <= 1 for share in needs)
    expected = ("dis", 0.3, 5.0, 1) if method == "sao" else ("decoupled", 0.003, 0.004, 8)
    objective = config.objective
    assert (objective.name, objective.clip_low, objective.clip_high, config.batch.group_size) == expected
    assert config.optimizer.lr == 1e-6


@pytest.mark.parametrize("wrong", [{"DOMAIN": "banking"}, {"METHOD": "ppo"}])
def test_unknown_domain_or_method_is_named(wrong, site):
    done = run("qwen3_4b_tau2", {**site, **wrong})
    ((name, value),) = wrong.items()
    assert done.returncode == 2
    assert f"qwen3_4b_tau2: {name}={value}; known: " in done.stderr
    assert recorded(site) == []


def test_hyper_parameters_of_the_papers(site):
    exact = config_of("qwen3_30b_a3b_tau2", site, "qwen3_30b_a3b")
    objective = exact.objective
    assert (objective.name, objective.anchor) == ("decoupled", "snapshot")
    assert (objective.mask_low, objective.mask_high) == (0.990, 1.010)
    assert (1 - objective.clip_low, 1 + objective.clip_high) == (0.997, 1.004)
    assert (exact.optimizer.lr, exact.batch.group_size) == (1e-6, 8)
    assert (exact.rollout.max_turns, exact.rollout.max_tokens) == (50, 32768)
    assert exact.evaluation.samples_per_task == 4
    sat = config_of("qwen3_30b_a3b_base_math_sat", site, "qwen3_30b_a3b_base")
    assert (sat.batch.groups, sat.batch.group_size) == (256, 16)
    assert (sat.objective.clip_low, sat.objective.clip_high, sat.optimizer.lr) == (0.2, 0.2, 1e-6)
    assert (sat.optimizer.adam_beta1, sat.optimizer.adam_beta2) == (0.9, 0.98)
    assert (sat.objective.options["quantile"], sat.objective.kl_coefficient) == (0.90, 1e-3)
    sao = config_of("qwen3_30b_a3b_sao", site, "qwen3_30b_a3b")
    assert (sao.batch.groups, sao.batch.group_size) == (128, 1)
    assert (sao.objective.name, sao.objective.clip_low, sao.objective.clip_high) == ("dis", 0.3, 5.0)
    assert (sao.critic.updates, sao.critic.freeze, sao.critic.lr, sao.critic.warmup_steps) == (
        2,
        "attention",
        5e-6,
        10,
    )
    assert (sao.advantage.name, sao.advantage.lambda_policy, sao.advantage.alpha) == ("gae", "adaptive", 1.5)


LENGTHS = {"rollout.max_staleness", "rollout.max_turns", "rollout.max_tokens"}
ADAM = {"optimizer.adam_beta1", "optimizer.adam_beta2"}
SPLITS = {"environment.options.train_split", "environment.options.heldout_split"}
OPEN_EVERYWHERE = {"steps", "optimizer.clip_grad", "objective.aggregation", "rollout.temperature", "evaluation.every"}
OPEN = {
    "qwen3_tau2": {
        *ADAM,
        *SPLITS,
        "optimizer.weight_decay",
        "batch.groups",
        "objective.rejected_in_denominator",
        "objective.kl_coefficient",
        "advantage.normalise_std",
        "advantage.drop_zero_variance_groups",
        "rollout.max_new_tokens",
        "rollout.chat_template_options",
    },
    "qwen3_tau2_sao": {
        *ADAM,
        *SPLITS,
        *LENGTHS,
        "optimizer.weight_decay",
        "advantage.gamma",
        "rollout.max_new_tokens",
        "rollout.chat_template_options",
        "publish.pause_mode",
    },
    "qwen3_30b_a3b_base_math_sat": {
        "optimizer.weight_decay",
        "objective.options.quantile_scope",
        "advantage.normalise_std",
        "publish.pause_mode",
        "evaluation.samples_per_task",
    },
    "qwen3_30b_a3b_sao": {
        *ADAM,
        *LENGTHS,
        "advantage.gamma",
        "rollout.max_new_tokens",
        "publish.pause_mode",
        "evaluation.samples_per_task",
    },
}
"""What the papers do not say, by configuration: what a recipe sets there is our choice, and is marked as such."""


@pytest.mark.parametrize("name", OPEN)
def test_what_a_paper_leaves_open_is_marked(name):
    marked, path = set(), []
    for line in (ROOT / "recipes/configs" / f"{name}.yaml").read_text().splitlines():
        if key := re.match(r"( *)(\w+):", line):
            path = [*path[: len(key[1]) // 2], key[2]]
        if "# open" in line:
            marked.add(".".join(path))
    assert marked == OPEN[name] | OPEN_EVERYWHERE


def test_recipes_end_no_process():
    for script in [*(ROOT / "recipes").glob("*.sh"), ROOT / "recipes/slurm/run.sbatch"]:
        words = re.sub(r"#.*", "", script.read_text())
        assert not re.search(r"(?<!--)\b(pkill|killall|kill|fuser)\b", words), script


def test_scripts_pass_shellcheck():
    linter = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if linter is None:
        pytest.skip("shellcheck is not installed (requirements/dev.txt has it)")
    scripts = [
        *sorted((ROOT / "recipes").glob("*.sh")),
        ROOT / "recipes/slurm/run.sbatch",
        ROOT / "tests/run.sh",
    ]
    done = subprocess.run(
        [linter, "-x", *map(str, scripts)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")
