"""The command line: dry run, user errors as one message, exit codes, speed of what needs no engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatron_async import cli
from megatron_async.config import dump, load
from megatron_async.errors import UserError
from megatron_async.observe import RunFiles
from megatron_async.trajectory import SamplingParams, Status, Trajectory, VersionSpan
from tests.unit.configs import make_checkpoint, write_config
from tests.unit.tau2_support import requires_tau2

COMMANDS = ["launch", "train", "rollout", "serve", "sft", "evaluate", "doctor", "inspect", "report"]


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert all(f"\n    {command} " in text for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    assert stop.value.code == 0
    assert command in capsys.readouterr().out


def test_dry_run_prints_resolved_options_ranks_batch_and_memory(tmp_path, capsys):
    file = write_config(tmp_path)
    assert cli.main(["launch", "--config", str(file), "--dry-run", "--set", "batch.groups=4"]) == 0
    printed = capsys.readouterr()
    resolved, rest = printed.out.split("\nRanks\n")
    assert yaml.safe_load(resolved)["batch"]["groups"] == 4
    assert yaml.safe_load(resolved)["objective"]["anchor"] == "start"
    assert "4 groups * 8 = 32 trajectories" in rest
    assert "optimiser" in rest
    assert "warning: objective: with one update per batch and anchor start" in printed.err
    assert not (tmp_path / "runs").exists(), "a dry run starts and writes nothing"


def test_dry_run_is_quick_and_loads_no_engine(tmp_path):
    code = (
        "import sys\nfrom megatron_async.cli import main\n"
        f"main(['launch', '--config', {str(write_config(tmp_path))!r}, '--dry-run'])\n"
        "print([m for m in ('torch', 'megatron', 'sglang', 'transformers', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["optimizer.learning_rate=1"], "optimizer.learning_rate: unknown key"),
        (["layout.world_size=3", "layout.tensor_model_parallel_size=2"], "world_size 3 is not a multiple of"),
        (["model.path=/nowhere"], "no such directory"),
    ],
)
def test_what_a_user_can_mend_is_one_message_and_exit_code_2(tmp_path, capsys, overrides, words):
    arguments = [part for override in overrides for part in ("--set", override)]
    assert cli.main(["launch", "--config", str(write_config(tmp_path)), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("megatron-async launch: ")
    assert words in error
    assert "Traceback" not in error
    assert not (tmp_path / "runs").exists()


def test_a_tokenizer_without_tools_stops_a_launch_before_anything_starts(tmp_path, capsys):
    plain = make_checkpoint(tmp_path / "plain", template="{{ messages }}")
    assert cli.main(["launch", "--config", str(write_config(tmp_path)), "--set", f"model.path={plain}"]) == 2
    assert "never mentions `tools`" in capsys.readouterr().err


def test_a_checkpoint_without_tokenizer_files_is_a_message_too(tmp_path, capsys):
    """Weights and tokenizer.json alone, as somebody copies them: the template may be right and nothing read it."""
    assert cli.main(["launch", "--config", str(write_config(tmp_path))]) == 2
    error = capsys.readouterr().err
    assert "megatron-async launch: " in error and "copy the tokenizer files of the model" in error
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("environment.name=deskk", "unknown environment 'deskk'; did you mean 'desk'?"),
        ("environment.options={colour: red}", "colour"),
        ("run_dir=/dev/null/runs", "cannot be written"),
    ],
)
def test_what_would_fail_after_the_engines_started_is_found_before(tmp_path, capsys, monkeypatch, override, words):
    monkeypatch.setattr("megatron_async.launch.ChatFormat", lambda path, options: None)
    arguments = ["launch", "--config", str(write_config(tmp_path)), "--set", "environment.name=desk"]
    assert cli.main([*arguments, "--set", override]) == 2
    assert words in capsys.readouterr().err


@requires_tau2
@pytest.mark.parametrize("command", [["launch"], ["launch", "--dry-run"], ["sft"]])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("train_split: test", "40 of 40 training tasks (train_split: test) are evaluation tasks"),
        ("exclude_splits: [train]", "no training tasks are left of train after exclude_splits"),
    ],
)
def test_training_tasks_are_refused_before_anything_starts(tmp_path, capsys, monkeypatch, command, options, words):
    monkeypatch.setattr("megatron_async.launch.ChatFormat", lambda path, options: None)
    chosen = f"environment.options={{domain: telecom, user: {{kind: scripted}}, {options}}}"
    arguments = ["--config", str(write_config(tmp_path)), "--set", "environment.name=tau2", "--set", chosen]
    assert cli.main([*command, *arguments, "--set", "evaluation.tasks=10"]) == 2
    assert f"environment: tau2: {words}" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("environment={name: not_here.tasks:build}", "needs the module not_here, which this Python does not find"),
        ("environment={name: tau2, options: {python: /not/here}}", "'/not/here': no such interpreter"),
    ],
)
def test_a_plan_is_made_where_the_environment_is_not_installed(tmp_path, capsys, monkeypatch, override, words):
    """A launch there is refused."""
    monkeypatch.setattr("megatron_async.launch.ChatFormat", lambda path, options: None)
    arguments = ["launch", "--config", str(write_config(tmp_path)), "--set", override]
    assert cli.main([*arguments, "--dry-run"]) == 0
    warning = capsys.readouterr().err
    assert "warning: environment: its tasks are not checked: " in warning and words in warning
    assert cli.main(arguments) == 2
    assert words in capsys.readouterr().err


def test_too_few_demonstrations_for_one_batch(tmp_path, capsys):
    arguments = ["sft", "--config", str(write_config(tmp_path, batch={"groups": 4, "group_size": 8}))]
    arguments += ["--set", "environment.name=desk", "--set", "warm_start.demonstrations=31"]
    assert cli.main(arguments) == 2
    assert "31 do not fill one batch of groups 4 * group_size 8 = 32" in capsys.readouterr().err


def test_defects_keep_their_traceback(monkeypatch):
    def broken(_arguments):
        raise RuntimeError("a defect")

    monkeypatch.setattr(cli, "_report", broken)
    with pytest.raises(RuntimeError, match="a defect"):
        cli.main(["report", "runs/x"])


def test_ctrl_c_is_no_traceback(monkeypatch, capsys):
    def interrupted(_arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_report", interrupted)
    assert cli.main(["report", "runs/x"]) == 130
    assert capsys.readouterr().err == "megatron-async report: interrupted\n"


def test_errors_of_the_bridge_are_messages_too(monkeypatch, capsys):
    from sglang_bridge.errors import EngineStartError

    def broken(_arguments):
        raise EngineStartError("the server died; its log ends: out of memory")

    monkeypatch.setattr(cli, "_report", broken)
    assert cli.main(["report", "runs/x"]) == 2
    assert "out of memory" in capsys.readouterr().err


def test_unknown_command_and_missing_config_are_usage_errors(capsys):
    for arguments in (["lunch"], ["launch"], []):
        with pytest.raises(SystemExit) as stop:
            cli.main(arguments)
        assert stop.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_module_and_version_from_outside():
    command = [sys.executable, "-m", "megatron_async"]
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("megatron-async 0.")
    missing = subprocess.run([*command, "report", "/nowhere"], capture_output=True, text=True, check=False)
    assert missing.returncode == 2
    assert missing.stderr.count("\n") == 1
    assert "not the folder of a run" in missing.stderr


def _run_with_a_trajectory(tmp_path: Path) -> Path:
    from megatron_async.bank import Bank

    config = load(write_config(tmp_path))
    config.run_path.mkdir(parents=True)
    RunFiles(config.run_path).config.write_text(dump(config))
    trajectory = Trajectory("t-1", "g-1", "p-1", SamplingParams(), {"goal": 1})
    with Bank.open(config.bank_url) as bank:
        bank.start_trajectory(trajectory)
        bank.record_version(1, 0, 0)
        trajectory.append_context([1, 2, 3])
        trajectory.append_action(
            [4, 5, 6], [-0.5, -1.5, -1.0], [VersionSpan(0, 0, 2), VersionSpan(1, 2, 3)], finish_reason="stop"
        )
        trajectory.finish(Status.OK, 1.0)
        bank.finish_trajectory(trajectory)
        bank.start_trajectory(Trajectory("t-2", "g-1", "p-1", SamplingParams(), {"goal": 1}))
    return config.run_path


def test_inspect_shows_the_bank_and_a_trajectory_version_by_version(tmp_path, capsys):
    run = _run_with_a_trajectory(tmp_path)
    (tmp_path / "model" / "tokenizer.json").unlink()  # ids are shown where the tokenizer is gone
    assert cli.main(["inspect", str(run)]) == 0
    text = capsys.readouterr().out
    assert "1 finished" in text
    assert text.index(" t-1 ") < text.index(" t-2 "), "one without a token comes after those to look at"
    assert cli.main(["inspect", str(run), "--trajectory", "t-1"]) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[1:] == [
        "[0, 3) context", "1 2 3",
        "[3, 5) action, version 0, mean log-prob -1.000", "4 5",
        "[5, 6) action, version 1, mean log-prob -1.000", "6",
    ]  # fmt: skip
    assert cli.main(["inspect", str(run), "--trajectory", "nope"]) == 2
    assert "'nope'" in capsys.readouterr().err


def test_inspect_shows_foreign_words_as_they_are(tmp_path, capsys):
    """A reason quotes what a policy or a tool said: brackets are no markup, escapes reach no terminal."""
    from megatron_async.bank import Bank

    run = _run_with_a_trajectory(tmp_path)
    reasons = ["KeyError: '[/INST]'", "[red]no[/red] :smile:", "a\x1b[2Jb"]
    with Bank.open(f"sqlite:///{run / 'bank.sqlite'}") as bank:
        for number, reason in enumerate(reasons):
            bank.start_trajectory(Trajectory(f"u-{number}", "g-2", "p-1", SamplingParams(), {"goal": 1}))
            bank.abandon_running(reason, [f"u-{number}"])
    assert cli.main(["inspect", str(run)]) == 0
    shown = "".join(capsys.readouterr().out.split())
    assert all("".join(reason.split()).replace("\x1b", "\ufffd")[:8] in shown for reason in reasons)


def test_inspect_of_no_run(tmp_path, capsys):
    assert cli.main(["inspect", str(tmp_path)]) == 2
    assert "not the folder of a run" in capsys.readouterr().err


def test_user_error_is_the_base_of_configuration_errors():
    from megatron_async.bank.errors import BankOpenError
    from megatron_async.config import ConfigError

    assert issubclass(ConfigError, UserError)
    assert issubclass(BankOpenError, UserError)
