"""The commands `rollout` and `evaluate` as they are run: a run folder, the real chat format and desk, signals."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_async.bank import Bank, State
from megatron_async.config.schema import (
    BatchConfig,
    EngineConfig,
    EvaluationConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
)
from megatron_async.errors import UserError
from megatron_async.observe import read_evaluations, read_status, read_timeline
from megatron_async.rollout import evaluation
from megatron_async.rollout import process as rollout
from megatron_async.trajectory import Status
from tests.unit.scripted_engine import ScriptedEngine


def make_run(folder: Path, checkpoint: Path, urls: list[str], token_budget: int = 16) -> RunConfig:
    config = RunConfig(
        name="run",
        run_dir=str(folder),
        model=ModelConfig(path=str(checkpoint)),
        batch=BatchConfig(groups=2, group_size=2),
        rollout=RolloutConfig(
            max_staleness=0, max_turns=3, max_new_tokens=token_budget, max_tokens=512, poll_s=0.02
        ),
        engines=EngineConfig(),
        evaluation=EvaluationConfig(tasks=3, samples_per_task=2),
    )
    config.run_path.mkdir(parents=True)
    (config.run_path / "engines.json").write_text(json.dumps({"engines": [{"url": url} for url in urls]}))
    return config


def test_rollout_fills_the_bank_and_ends_with_the_run(tmp_path: Path, smallest_checkpoint: Path) -> None:
    async def scenario() -> RunConfig:
        async with ScriptedEngine(6) as engine:
            config = make_run(tmp_path, smallest_checkpoint, [engine.url])
            with Bank.open(config.bank_url) as bank:
                process = asyncio.create_task(rollout.run(config))
                while bank.counts()[State.FINISHED] < 4:
                    assert not process.done(), process.exception()
                    await asyncio.sleep(0.02)
                batch = bank.take_batch(0, 2, 2, 0)
                assert batch is not None and all(t.status in (Status.OK, Status.TRUNCATED) for t in batch)
                assert len({t.group_id for t in batch}) == 2 and all(t.task for t in batch)
                bank.set_state("phase", "finished")
                assert await asyncio.wait_for(process, 60) == 0
        return config

    config = asyncio.run(scenario())
    status = read_status(config.run_path)["rollout"]
    assert status.phase == "finished" and status.counters["finished"] == 4
    assert [i.stage for i in read_timeline(config.run_path)].count("group") == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_it_at_once_and_keeps_what_there_is(
    tmp_path: Path, smallest_checkpoint: Path, number: signal.Signals
) -> None:
    async def scenario() -> None:
        async with ScriptedEngine(1000, stall_at=3) as engine:  # answers that never end are not waited for
            config = make_run(tmp_path, smallest_checkpoint, [engine.url], token_budget=400)
            with Bank.open(config.bank_url) as bank:
                process = asyncio.create_task(rollout.run(config))
                while engine.stalled < 4:
                    assert not process.done(), process.exception()
                    await asyncio.sleep(0.02)
                os.kill(os.getpid(), number)
                assert await asyncio.wait_for(process, 60) == 0
                # Written down for the next rollout to go on with.
                assert bank.counts()[State.RUNNING] == 4 and bank.counts()[State.FAILED] == 0
                assert all(len(trajectory) > 0 for trajectory in bank.list_running())

    asyncio.run(scenario())


def test_the_process_needs_no_torch() -> None:
    """It is started again after a kill, and there may be many: torch would cost each five seconds and 370 MB."""
    code = "import sys, megatron_async.rollout.process; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_engines_the_message_says_what_to_start(tmp_path: Path, smallest_checkpoint: Path) -> None:
    config = replace(make_run(tmp_path, smallest_checkpoint, []), name="other")
    with pytest.raises(UserError, match="engines.json is missing: start the run with `launch`"):
        rollout.main(config)


def test_evaluate_adds_a_row(tmp_path: Path, smallest_checkpoint: Path) -> None:
    async def scenario() -> RunConfig:
        async with ScriptedEngine(6) as engine:
            engine.version = 3
            config = make_run(tmp_path, smallest_checkpoint, [engine.url])
            played = await asyncio.to_thread(evaluation.evaluate_run, config, tmp_path / "results")
            assert played.episodes == 6  # an event loop of its own, as the command
        return config

    (row,) = read_evaluations(asyncio.run(scenario()).run_path)
    assert (row["step"], row["version"], row["tasks"], row["episodes"]) == (0, 3, 3, 6)
    assert 0.0 <= row["success_rate"] <= 1.0 and set(row["pass_hat"]) == {"1", "2"}
