"""A critic on ranks of its own is the critic on the actor's: same bits, same checkpoints; its end is an error."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megatron_async.observe.rows import read_rows
from megatron_async.training.checkpointing import list_generations
from tests.distributed.launch import start_world
from tests.distributed.own_critic_runs import DEADLINE_S, Job, differing, make_job
from tests.engine_reference import make_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]  # up to seven runs each
STEPS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model("moe").save_pretrained(path)
    return path


@contextmanager
def under_way(job: Job, has_come: Callable[[], Any]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Trainer and critic, once what is waited for is there; ended with the block."""
    processes = job.start()
    try:
        deadline = time.monotonic() + DEADLINE_S
        while not has_come():
            assert processes[0].poll() is None and time.monotonic() < deadline, job.log("trainer")[-3000:]
            time.sleep(0.005)
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def metrics(job: Job) -> list[dict[str, float]]:
    """What the steps say of learning; times are another matter."""
    rows = read_rows(job.folder / "metrics.jsonl")
    return [{key: value for key, value in row.items() if "critic/" in key and "seconds" not in key} for row in rows]


@pytest.mark.parametrize(("ranks", "order"), [(1, "policy_first"), (1, "critic_first"), (2, "policy_first")])
def test_policy_and_critic_get_the_bits_they_get_on_shared_ranks(
    model: Path, tmp_path: Path, ranks: int, order: str
) -> None:
    shared = make_job(tmp_path / "shared", model, STEPS, ranks=ranks, order=order)
    own = make_job(tmp_path / "own", model, STEPS, ranks=ranks, own={}, order=order)
    for job in (shared, own):
        job.run()
    assert differing(own.weights(), shared.weights()) == []
    assert metrics(own) == metrics(shared)
    assert all(row["critic/squared_error_first"] > 0 for row in metrics(own))


def test_another_layout_of_the_critic_changes_no_more_than_rounding(model: Path, tmp_path: Path) -> None:
    layout = {"world_size": 2, "tensor_model_parallel_size": 2}
    shared = make_job(tmp_path / "shared", model, STEPS)
    own = make_job(tmp_path / "own", model, STEPS, own=layout)
    for job in (shared, own):
        job.run()
    expected, found = shared.weights(), own.weights()
    for name, tensor in expected.items():
        # fp32 sums in another order; Adam's first steps lift what rounding leaves of gradients that are nearly zero.
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_a_run_goes_on_from_its_checkpoint_with_the_bits_of_one_that_was_never_stopped(
    model: Path, tmp_path: Path
) -> None:
    """Stopped after three steps and resumed; also where the other part of the run wrote the checkpoint."""
    whole = make_job(tmp_path / "whole", model, 6, own={})
    whole.run()
    for first, then in ((True, True), (True, False), (False, True)):
        kind = {"own": {}} if first else {}
        job = make_job(tmp_path / f"from_{first}_{then}", model, 6, **kind)
        limit_steps(job, 3)
        job.run()
        limit_steps(job, 6, ranks="own" if then else "shared")
        replace(job, critic=int(then)).run()
        assert differing(job.weights(), whole.weights()) == []
        (generation,) = [g for g in list_generations(job.folder / "checkpoints") if g.steps == 6]
        assert generation.states["critic"]["optimizer_steps"] == 2 * 6
        assert (generation.path / "critic" / ".metadata").is_file()


def limit_steps(job: Job, steps: int, **critic: object) -> None:
    """Make the run end after so many steps; critic: options to change."""
    config = yaml.safe_load(job.config.read_text())
    config["steps"] = steps
    config["critic"] |= critic
    job.config.write_text(yaml.safe_dump(config))


def test_a_replay_starts_the_critics_ranks_with_the_trainers(model: Path, tmp_path: Path) -> None:
    """Through the supervisor, as `launch` does."""
    recorded = make_job(tmp_path / "recorded", model, STEPS)
    recorded.run()
    arguments = ["replay", str(recorded.folder), "--name", "replayed", "--set", "critic.ranks=own"]
    replay = start_world(["-m", "megatron_async", *arguments], 1, tmp_path / "replay.log")
    try:
        assert replay.wait(timeout=DEADLINE_S) == 0, (tmp_path / "replay.log").read_text()[-3000:]
    finally:
        replay.terminate()
    again = Job(tmp_path / "replayed" / "config.yaml", 1, 1)
    assert differing(again.weights(), recorded.weights()) == []
    assert any(row["part"] == "critic" for row in read_rows(again.folder / "timeline.jsonl"))


def test_a_critic_that_is_killed_ends_the_trainer_and_both_go_on_from_the_checkpoint(
    model: Path, tmp_path: Path
) -> None:
    whole = make_job(tmp_path / "whole", model, 12)
    whole.run()
    job = make_job(tmp_path / "killed", model, 12, own={})
    with under_way(job, lambda: list_generations(job.folder / "checkpoints")) as (trainer, critic):
        critic.kill()
        assert trainer.wait(timeout=DEADLINE_S) != 0
    assert "the critic's ranks are gone" in job.log("trainer")
    assert "look at logs/critic.log" in job.log("trainer")
    job.run()
    assert differing(job.weights(), whole.weights()) == []


def test_a_trainer_that_is_killed_ends_the_critic_without_blame(model: Path, tmp_path: Path) -> None:
    job = make_job(tmp_path / "run", model, 12, own={})
    with under_way(job, lambda: read_rows(job.folder / "metrics.jsonl")) as (trainer, critic):
        trainer.kill()
        assert critic.wait(timeout=DEADLINE_S) == 0
    assert "the trainer is gone" in job.log("critic")


def test_a_batch_that_the_critic_refuses_is_told_to_the_trainer(model: Path, tmp_path: Path) -> None:
    """Its micro-batches are as long as the trainer's, but its ranks read another configuration."""
    job = make_job(tmp_path / "run", model, STEPS, own={})
    trainer = replace(job, critic=0).start()
    limit = yaml.safe_load(job.config.read_text())
    limit["trainer"]["micro_batch_tokens"] = 4
    other = job.folder / "critic.yaml"
    other.write_text(yaml.safe_dump(limit))
    critic = replace(job, config=other).start_critic()
    try:
        codes = [process.wait(timeout=DEADLINE_S) for process in (*trainer, critic)]
    finally:
        for process in (*trainer, critic):
            process.kill()
    assert all(codes)
    assert "the critic's ranks failed" in job.log("trainer")
    assert "more than one micro-batch holds" in job.log("trainer")
