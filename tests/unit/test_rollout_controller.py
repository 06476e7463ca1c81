"""The rollout process against a scripted engine (over a real socket) and a real bank."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_async.bank import Bank, State
from megatron_async.bank.lineage import Lineage
from megatron_async.config.schema import BatchConfig, ModelConfig, PublishConfig, RolloutConfig, RunConfig
from megatron_async.observe import StatusWriter, Timeline, read_status, read_timeline
from megatron_async.rollout.controller import RolloutController
from megatron_async.rollout.environments.base import EnvironmentFailure, Task
from megatron_async.rollout.members import RolloutFailure
from megatron_async.trajectory import Status, Trajectory
from sglang_bridge import EnginePool
from tests.bank_support import end, running, states
from tests.unit.scripted_engine import ScriptedEngine
from tests.unit.scripted_rollout import PlainChat, ScriptedEnvironment, ScriptedSource

BATCH = BatchConfig(groups=2, group_size=2)


def make_config(path: Path, batch: BatchConfig = BATCH, **rollout: Any) -> RunConfig:
    defaults = RolloutConfig(
        max_staleness=1, concurrency=16, max_turns=8, max_new_tokens=32, max_tokens=400, poll_s=0.01,
        turn_deadline_s=10.0, trajectory_deadline_s=20.0, max_retries=1,
    )  # fmt: skip
    return RunConfig(
        name="run",
        run_dir=str(path),
        model=ModelConfig(path=""),
        batch=batch,
        rollout=replace(defaults, **rollout),
    )


@contextmanager
def open_bank(config: RunConfig) -> Iterator[Bank]:
    config.run_path.mkdir(parents=True, exist_ok=True)
    with Bank.open(config.bank_url) as bank:
        yield bank


class Trainer:
    """Takes batches as the trainer does, publishes to the scripted engine, and remembers what it trained on."""

    def __init__(self, config: RunConfig, bank: Bank, engine: ScriptedEngine) -> None:
        self.config, self.bank, self.engine = config, bank, engine
        self.version = bank.current_version()
        self.step = len(bank.steps())
        self.batches: list[list[Trajectory]] = []
        self.gaps: list[int] = []

    @property
    def line(self) -> Lineage:
        return Lineage((version.version, version.parent) for version in self.bank.versions())

    async def train(self, steps: int, seconds: float = 0.0, update: bool = True) -> None:
        batch, rollout = self.config.batch, self.config.rollout
        overtaking = rollout.window if rollout.admission == "window" else None
        deadline = time.monotonic() + 120  # for a machine that does much else
        while steps:
            taken = self.bank.take_batch(
                self.step, batch.groups, batch.group_size, self.line.updates(self.version) - rollout.max_staleness,
                batch.max_filtered_groups, overtaking,
            )  # fmt: skip
            assert time.monotonic() < deadline, f"no batch in 120 s; the bank holds {self.bank.counts()}"
            if taken is None:
                await asyncio.sleep(0.01)
                continue
            self.batches.append(taken)
            self.gaps += [int(self.line.gaps(self.version, t.versions).max()) for t in taken]
            await asyncio.sleep(seconds)
            before = self.version
            if update:
                self.version = self.bank.next_version()
                self.bank.record_version(self.version, before, self.step)
                if self.version % self.config.publish.every == 0:
                    self.engine.version = self.version
            self.bank.commit_step(self.step, before, self.version)
            self.step, steps = self.step + 1, steps - 1


async def play(
    config: RunConfig,
    bank: Bank,
    engine: ScriptedEngine,
    script: Callable[[RolloutController, Trainer], Any],
    source: ScriptedSource | None = None,
    **options: Any,
) -> tuple[RolloutController, Trainer]:
    """Run a controller beside `script`; the run is finished when the script ends."""
    async with EnginePool([engine.url]) as pool:
        controller = RolloutController(config, bank, pool, source or ScriptedSource(), PlainChat(), **options)
        trainer = Trainer(config, bank, engine)

        async def scripted() -> None:
            try:
                await script(controller, trainer)
            finally:
                controller.stop("the script ended")

        await asyncio.gather(controller.run(), scripted())
    return controller, trainer


def test_rollout_and_trainer_together(tmp_path: Path) -> None:
    """Asynchronous for real: versions move while trajectories run; every gap stays within the bound."""

    async def scenario() -> None:
        config = make_config(tmp_path)
        with open_bank(config) as bank:
            async with ScriptedEngine(lambda request: 3 + request % 7, token_s=0.002) as engine:
                controller, trainer = await play(config, bank, engine, lambda c, t: t.train(8, seconds=0.01))
                assert max(trainer.gaps) == config.rollout.max_staleness
                for batch in trainer.batches:
                    assert [len({t.group_id for t in batch}), len(batch)] == [2, 4]
                trained = [t.trajectory_id for batch in trainer.batches for t in batch]
                assert len(trained) == len(set(trained)) == bank.counts()[State.TRAINED] == 32
                # What still ran at the stop is written down, for the next rollout to go on with.
                assert bank.counts()[State.STALE] == bank.counts()[State.FAILED] == 0
                assert controller.counters.finished >= 32 and controller.counters.generated_tokens > 0
                assert engine.most_running <= config.rollout.concurrency

    asyncio.run(scenario())


@pytest.mark.parametrize("mode", ["retract", "abort"])
def test_partial_responses_go_on_over_a_weight_update(tmp_path: Path, mode: str) -> None:
    """retract: the same request goes on and its spans show both versions. abort: it ends, and is sent again."""

    async def scenario() -> list[Trajectory]:
        config = make_config(tmp_path)
        with open_bank(config) as bank:
            async with ScriptedEngine(30, stall_at=10) as engine:

                async def script(controller: RolloutController, trainer: Trainer) -> None:
                    while engine.stalled < 4:
                        await asyncio.sleep(0.01)
                    bank.record_version(1, 0)
                    trainer.version = engine.version = 1
                    if mode == "abort":
                        engine.abort_running()
                    engine.go_on()
                    await trainer.train(1)

                _, trainer = await play(config, bank, engine, script)
                assert (engine.aborts > 0) == (mode == "abort")
        return trainer.batches[0]

    for trajectory in asyncio.run(scenario()):
        first = trajectory.turns[0]
        assert first.end - first.start == 30
        inside = [s for s in trajectory.spans if s.start < first.end]
        assert [s.version for s in inside] == [0, 1] and first.start < inside[0].end < first.end
        assert trajectory.info["resubmissions"] == (1 if mode == "abort" else 0)


def test_lag_n_publishing_does_not_starve(tmp_path: Path) -> None:
    async def scenario() -> Trainer:
        config = replace(make_config(tmp_path, max_staleness=3), publish=PublishConfig(every=3))
        with open_bank(config) as bank:
            async with ScriptedEngine(4) as engine:
                _, trainer = await play(config, bank, engine, lambda c, t: t.train(9))
        return trainer

    trainer = asyncio.run(scenario())
    assert trainer.version == 9 and max(trainer.gaps) <= 3


def test_long_trajectories_that_went_stale_count_as_dropped(tmp_path: Path) -> None:
    """Field bug 7: the first ones are long, and too old when the first batch is built."""

    async def scenario() -> None:
        config = make_config(tmp_path)
        with open_bank(config) as bank:
            async with ScriptedEngine(30) as engine:

                async def script(controller: RolloutController, trainer: Trainer) -> None:
                    while bank.counts()[State.FINISHED] < 8:
                        await asyncio.sleep(0.01)
                    engine.turn_length = lambda request: 4
                    for version in range(1, 4):
                        bank.record_version(version, version - 1)
                    trainer.version = engine.version = 3
                    await trainer.train(2)
                    async with asyncio.timeout(60):
                        while controller.counters.lengths.dropped < 8:
                            await asyncio.sleep(0.01)

                controller, _ = await play(config, bank, engine, script)
                lengths = controller.counters.lengths
                assert bank.counts()[State.STALE] == lengths.dropped == 8 and lengths.kept >= 8
                assert lengths.ratio > 2

    asyncio.run(scenario())


def test_batches_without_an_update_do_not_use_up_the_room(tmp_path: Path) -> None:
    """Field bug 34: an endless stream of equal-reward groups, each a step without a new version."""

    async def scenario() -> Trainer:
        config = make_config(tmp_path)
        with open_bank(config) as bank:
            async with ScriptedEngine(4) as engine:
                _, trainer = await play(config, bank, engine, lambda c, t: t.train(5, update=False))
        return trainer

    assert asyncio.run(scenario()).version == 0


def test_a_failed_member_is_played_again(tmp_path: Path) -> None:
    """Every first attempt fails in the environment; groups complete all the same, and no failure becomes a reward."""
    seen: set[str] = set()

    def make(task: Task) -> ScriptedEnvironment:
        first = task.task_id not in seen
        seen.add(task.task_id)
        return ScriptedEnvironment(at={"step0": EnvironmentFailure("tool down")} if first else {})

    async def scenario() -> None:
        config = make_config(tmp_path)
        with open_bank(config) as bank:
            async with ScriptedEngine(4) as engine:
                source = ScriptedSource(make)
                controller, trainer = await play(config, bank, engine, lambda c, t: t.train(3), source)
                assert all(
                    t.status is Status.OK and t.reward == 1.0 for batch in trainer.batches for t in batch
                )
                counters = controller.counters
                assert counters.failed["environment_failure"] >= 6 and counters.groups_abandoned == 0
                assert counters.retried == counters.failed["environment_failure"]
                assert bank.counts()[State.FAILED] >= counters.failed["environment_failure"]

    asyncio.run(scenario())


def test_a_group_whose_member_keeps_failing_is_given_up_and_stops_nobody(tmp_path: Path) -> None:
    """Field bug 34: its room is free again. Every other task is broken for good."""

    def make(task: Task) -> ScriptedEnvironment:
        return ScriptedEnvironment(at={"reset": KeyError("broken task")} if task.data["index"] % 2 else {})

    async def scenario() -> None:
        config = make_config(tmp_path)
        with open_bank(config) as bank:
            async with ScriptedEngine(4) as engine:
                source = ScriptedSource(make)
                controller, trainer = await play(config, bank, engine, lambda c, t: t.train(4), source)
                assert controller.counters.groups_abandoned >= 4
                assert {t.task["index"] % 2 for batch in trainer.batches for t in batch} == {0}
                assert max(trainer.gaps) <= config.rollout.max_staleness
                assert controller.counters.lengths.dropped >= 8

    asyncio.run(scenario())


@pytest.mark.parametrize(("estimator", "fewest"), [("grpo", 2), ("batch_mean", 1)])
def test_partial_groups_are_trained_where_that_is_asked_for(tmp_path: Path, estimator: str, fewest: int) -> None:
    """Of three members, index % 4 fail for good: groups of fewer than two say nothing relative to the group."""
    made: Counter[int] = Counter()

    def make(task: Task) -> ScriptedEnvironment:
        index = task.data["index"]
        made[index] += 1
        fails = made[index] <= index % 4
        return ScriptedEnvironment(at={"reset": KeyError("broken member")} if fails else {})

    async def scenario() -> None:
        config = make_config(tmp_path, max_retries=0, partial_groups="keep")
        config = replace(
            config, batch=replace(config.batch, group_size=3), advantage=replace(config.advantage, name=estimator)
        )
        with open_bank(config) as bank:
            async with ScriptedEngine(4) as engine:
                controller, trainer = await play(config, bank, engine, lambda c, t: t.train(5), ScriptedSource(make))
                sizes = Counter((t.group_id, t.task["index"] % 4) for batch in trainer.batches for t in batch)
                assert {(failing, size) for (_, failing), size in sizes.items()} == {
                    (failing, 3 - failing) for failing in range(4) if 3 - failing >= fewest
                }
                assert all(len({t.group_id for t in batch}) == 2 for batch in trainer.batches)
                counters = controller.counters
                assert counters.groups_partial > 0 and counters.groups_abandoned > 0
                assert max(trainer.gaps) <= config.rollout.max_staleness

    asyncio.run(scenario())


@pytest.mark.parametrize("bound", [0, 1])
def test_groups_kept_without_members_take_the_place_of_whole_ones(tmp_path: Path, bound: int) -> None:
    """Every group loses two of its four: counted by members, a batch had room for as many groups again, all too old."""
    made: Counter[str] = Counter()

    def make(task: Task) -> ScriptedEnvironment:
        made[task.task_id] += 1
        return ScriptedEnvironment(at={"reset": KeyError("broken")} if made[task.task_id] <= 2 else {})

    async def scenario() -> None:
        batch = BatchConfig(groups=2, group_size=4)
        config = make_config(tmp_path, batch, max_staleness=bound, max_retries=0, partial_groups="keep")
        with open_bank(config) as bank:
            async with ScriptedEngine(4, token_s=0.002) as engine:
                source = ScriptedSource(make)
                _, trainer = await play(config, bank, engine, lambda c, t: t.train(6, seconds=0.03), source)
                assert [len(batch) for batch in trainer.batches] == [4] * 6
                assert bank.counts()[State.STALE] == 0 and max(trainer.gaps) == bound

    asyncio.run(scenario())


def test_engine_failures_are_repeated_and_never_rewards(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = make_config(tmp_path)
        with open_bank(config) as bank:
            async with ScriptedEngine(4, fail=lambda request: 500 if request % 3 == 0 else None) as engine:
                controller, trainer = await play(config, bank, engine, lambda c, t: t.train(3))
                assert all(t.reward == 1.0 for batch in trainer.batches for t in batch)
                repeated = sum(t.info["engine_failures"] for batch in trainer.batches for t in batch)
                assert repeated > 0 or controller.counters.failed["engine_failure"] > 0

    asyncio.run(scenario())


def test_an_engine_that_only_fails_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    """Field bug 36: not hours of silence."""

    async def scenario() -> None:
        config = make_config(tmp_path, max_retries=0, turn_deadline_s=1.0)
        with open_bank(config) as bank:
            async with (
                ScriptedEngine(4, fail=lambda request: 503) as engine,
                EnginePool([engine.url]) as pool,
            ):
                controller = RolloutController(config, bank, pool, ScriptedSource(), PlainChat())
                with pytest.raises(RolloutFailure, match="engine_failure.*planned 503"):
                    await asyncio.wait_for(controller.run(), 60)

    asyncio.run(scenario())


def test_a_defect_in_a_background_task_ends_the_run(tmp_path: Path) -> None:
    """Field bug 35: exceptions propagate as themselves."""

    class BrokenChat(PlainChat):
        def parse(self, ids: Any) -> Any:
            raise AssertionError("a bug in the chat format")

    async def scenario() -> None:
        config = make_config(tmp_path)
        with open_bank(config) as bank:
            async with ScriptedEngine(4) as engine, EnginePool([engine.url]) as pool:
                controller = RolloutController(config, bank, pool, ScriptedSource(), BrokenChat())
                with pytest.raises(AssertionError, match="a bug in the chat format"):
                    await asyncio.wait_for(controller.run(), 60)
                assert bank.counts()[State.FAILED] == 0  # the next rollout goes on with what was under way

    asyncio.run(scenario())


def test_the_bank_ends_the_run(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = make_config(tmp_path)
        with open_bank(config) as bank:
            async with ScriptedEngine(1000, token_s=0.1) as engine, EnginePool([engine.url]) as pool:
                controller = RolloutController(config, bank, pool, ScriptedSource(), PlainChat())
                run = asyncio.create_task(controller.run())
                async with asyncio.timeout(60):
                    while bank.counts()[State.RUNNING] != 8 or not engine.requests:  # (1 + 1) * 4
                        await asyncio.sleep(0.02)
                bank.set_state("phase", "finished")
                await asyncio.wait_for(run, 60)
                # It does not wait for the episodes that run: none of them is recorded as finished.
                assert bank.counts()[State.FINISHED] == 0
                assert bank.counts()[State.RUNNING] == 0 and engine.requests > 0

    asyncio.run(scenario())


def test_a_restart_completes_open_groups_and_goes_on_with_unused_prompts(tmp_path: Path) -> None:
    """Field bug 32: stopped in the middle, nothing finished is lost, no prompt is skipped, none is played twice."""

    def make(task: Task) -> ScriptedEnvironment:
        slow = task.data["index"] in slow_tasks and len(slow_seen.setdefault(task.task_id, [])) < 1
        slow_seen.setdefault(task.task_id, []).append(1)
        return ScriptedEnvironment(at={"step0": 30.0} if slow else {})

    slow_tasks, slow_seen = {1, 2}, {}

    async def scenario() -> None:
        config = make_config(tmp_path, turn_deadline_s=60.0, trajectory_deadline_s=60.0)
        with open_bank(config) as bank:
            async with ScriptedEngine(4) as engine:

                async def until_stuck(controller: RolloutController, trainer: Trainer) -> None:
                    while bank.counts()[State.FINISHED] < 6:
                        await asyncio.sleep(0.01)

                await play(config, bank, engine, until_stuck, ScriptedSource(make))
                kept = {t.group_id: t.waiting for t in bank.open_groups()}
                assert sorted(kept.values()) == [1, 1, 2, 2]
                slow_tasks.clear()
                _, trainer = await play(config, bank, engine, lambda c, t: t.train(4), ScriptedSource(make))
        tasks = [t.task["index"] for batch in trainer.batches for t in batch]
        assert sorted(tasks) == sorted([*range(8), *range(8)])

    asyncio.run(scenario())


def test_a_finite_source_is_shuffled_and_walked_once_per_epoch(tmp_path: Path) -> None:
    async def scenario() -> Trainer:
        config = make_config(tmp_path)
        with open_bank(config) as bank:
            async with ScriptedEngine(4) as engine:
                _, trainer = await play(config, bank, engine, lambda c, t: t.train(4), ScriptedSource(size=4))
        return trainer

    batches = asyncio.run(scenario()).batches
    groups = sorted({(t.group_id, t.task["index"]) for batch in batches for t in batch})
    indices = [index for _, index in groups]
    assert sorted(indices[:4]) == sorted(indices[4:]) == [0, 1, 2, 3]


def test_versions_that_go_back_after_a_resume_start_the_rule_afresh(tmp_path: Path) -> None:
    async def scenario() -> Trainer:
        config = make_config(tmp_path)
        with open_bank(config) as bank:
            for version in range(1, 6):
                bank.record_version(version, version - 1)
            async with ScriptedEngine(4) as engine:
                engine.version = 5

                async def script(controller: RolloutController, trainer: Trainer) -> None:
                    await trainer.train(1)
                    bank.set_current_version(3)  # the checkpoint that is resumed
                    trainer.version = engine.version = 3
                    await trainer.train(3)

                _, trainer = await play(config, bank, engine, script)
        return trainer

    assert asyncio.run(scenario()).version == 9  # ids are never used again: 6 before the resume, then 7, 8, 9


def test_status_and_timeline_say_what_happens(tmp_path: Path) -> None:
    async def scenario() -> RunConfig:
        config = make_config(tmp_path)
        with open_bank(config) as bank:
            async with ScriptedEngine(4) as engine:

                async def script(controller: RolloutController, trainer: Trainer) -> None:
                    await trainer.train(2)
                    async with asyncio.timeout(60):
                        while controller.counters.finished < 16 or "the trainer" not in (
                            status := read_status(config.run_path)["rollout"]
                        ).waiting_for:
                            await asyncio.sleep(0.1)
                    assert status.phase == "running" and "max_staleness=1" in status.waiting_for

                status = StatusWriter(config.run_path, "rollout", interval_s=0.0)
                timeline = Timeline(config.run_path, "rollout")
                await play(config, bank, engine, script, status=status, timeline=timeline)
        return config

    config = asyncio.run(scenario())
    final = read_status(config.run_path)["rollout"]
    assert final.phase == "finished" and final.counters["finished"] == 16 and final.counters["failed"] == 0
    assert final.counters["generated_tokens"] == 16 * 8 and final.counters["running"] == 0
    stages = [interval.stage for interval in read_timeline(config.run_path)]
    assert stages.count("episode") == 16 and stages.count("group") == 8


def test_a_silence_is_explained_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_async.rollout.controller._SILENCE_S", 0.1)
    monkeypatch.setattr("megatron_async.rollout.controller._STATUS_S", 0.05)
    expected = "8 wait for environment.step"

    def explained() -> list[str]:
        return [record.getMessage() for record in caplog.records if expected in record.getMessage()]

    async def scenario() -> None:
        config = make_config(tmp_path, turn_deadline_s=60.0, trajectory_deadline_s=60.0)

        async def script(controller: RolloutController, trainer: Trainer) -> None:
            deadline = time.monotonic() + 20
            while not explained() and time.monotonic() < deadline:
                await asyncio.sleep(0.02)

        with open_bank(config) as bank:
            async with ScriptedEngine(4) as engine:
                source = ScriptedSource(lambda task: ScriptedEnvironment(at={"step0": 60.0}))
                await play(config, bank, engine, script, source)

    asyncio.run(scenario())
    (line,) = explained()[:1]
    assert line.startswith("nothing happened for") and "admission: the trainer" in line


def test_concurrency_bounds_the_episodes_and_keeps_them_busy(tmp_path: Path) -> None:
    async def scenario() -> ScriptedEngine:
        config = make_config(tmp_path, batch=BatchConfig(groups=3, group_size=4), concurrency=5)
        with open_bank(config) as bank:
            async with ScriptedEngine(8, token_s=0.003) as engine:
                await play(config, bank, engine, lambda c, t: t.train(1))
        return engine

    assert asyncio.run(scenario()).most_running == 5


# ---------------------------------------------------------------- what a resume of the trainer leaves behind


def resumed_bank(bank: Bank, newest: int, at: int) -> None:
    """Versions up to `newest` were made, then the run was resumed from the checkpoint of `at`."""
    for version in range(1, newest + 1):
        bank.record_version(version, version - 1)
    bank.set_current_version(at)


@pytest.mark.parametrize("newest", [2, 10])
def test_lag_n_publishing_goes_on_after_a_resume(tmp_path: Path, newest: int) -> None:
    """With ids 3..10 lost, the next version is 11, not published, and in ids nine ahead of the engines' 2."""

    async def scenario() -> Trainer:
        config = replace(make_config(tmp_path, max_staleness=1), publish=PublishConfig(every=2))
        with open_bank(config) as bank:
            resumed_bank(bank, newest, at=2)
            async with ScriptedEngine(4) as engine:
                engine.version = 2
                _, trainer = await play(
                    config, bank, engine, lambda c, t: asyncio.wait_for(t.train(4), 60)
                )
        return trainer

    assert max(asyncio.run(scenario()).gaps) <= 1


def test_an_episode_goes_on_when_the_trainer_goes_back(tmp_path: Path) -> None:
    """Version 1 was recorded and published, but its step is lost: the engines are given 0 again."""

    async def scenario() -> None:
        config = make_config(tmp_path)
        with open_bank(config) as bank:
            bank.record_version(1, 0)
            async with ScriptedEngine(30, token_s=0.01) as engine:
                engine.version = 1

                async def script(controller: RolloutController, trainer: Trainer) -> None:
                    while not controller.counters.generated_tokens > 8:
                        await asyncio.sleep(0.01)
                    bank.set_current_version(0)
                    trainer.version = engine.version = 0
                    await trainer.train(2)

                controller, trainer = await play(config, bank, engine, script)
                assert not controller.counters.failed
        held = [[span.version for span in t.spans] for t in trainer.batches[0]]
        assert any(versions[:2] == [1, 0] for versions in held), held

    asyncio.run(scenario())


def left_half_done(bank: Bank, version: int) -> None:
    """A rollout was killed when one member of a group had finished under `version` and the other was running."""
    bank.start_trajectories(
        [running("old-a", "group-000000000", "task-0"), running("old-b", "group-000000000", "task-0")]
    )
    bank.save_cursor("prompts/train", 1)
    bank.finish_trajectory(end(running("old-a", "group-000000000", "task-0"), version))


def test_a_finished_member_holds_younger_groups_back_after_a_restart(tmp_path: Path) -> None:
    """It waits since version 3, and its group is slow: no more may start than fit before it is too old."""

    def make(task: Task) -> ScriptedEnvironment:
        return ScriptedEnvironment(at={"step0": 1.0} if task.task_id == "task-0" else {})

    async def scenario() -> None:
        config = make_config(tmp_path, max_staleness=1)
        with open_bank(config) as bank:
            for version in range(1, 5):
                bank.record_version(version, version - 1)
            left_half_done(bank, version=3)
            async with ScriptedEngine(4) as engine:
                engine.version = 4
                _, trainer = await play(config, bank, engine, lambda c, t: t.train(4), ScriptedSource(make))
            assert bank.counts()[State.STALE] == 0
        assert "old-a" in [t.trajectory_id for t in trainer.batches[0]]

    asyncio.run(scenario())


def test_a_group_that_is_too_old_already_is_not_played_to_its_end(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = make_config(tmp_path, max_staleness=1)
        with open_bank(config) as bank:
            for version in range(1, 5):
                bank.record_version(version, version - 1)
            left_half_done(bank, version=2)
            async with ScriptedEngine(4) as engine:
                engine.version = 4
                _, trainer = await play(config, bank, engine, lambda c, t: t.train(2))
            found = states(config.bank_url)
        assert (found["old-a"], found["old-b"]) == ("filtered", "failed")
        assert not any(name.startswith("group-000000000") for name in found)

    asyncio.run(scenario())


def test_what_was_written_down_outlives_a_defect(tmp_path: Path) -> None:
    """Say, a commit that failed: the next rollout goes on with the episodes, it does not begin them anew."""

    class Replayable(ScriptedSource):
        def replayable(self, task: Task) -> bool:
            return True

    async def scenario() -> None:
        config = make_config(tmp_path, flush_s=0.02)
        with open_bank(config) as bank:
            async with ScriptedEngine(30, token_s=0.01) as engine, EnginePool([engine.url]) as pool:
                controller = RolloutController(config, bank, pool, Replayable(), PlainChat())

                async def break_down() -> None:
                    while not any(len(t) > 8 for t in bank.list_running()):
                        await asyncio.sleep(0.02)
                    raise RuntimeError("connection lost during a commit")

                controller._watch = break_down  # type: ignore[method-assign]
                with pytest.raises(RuntimeError, match="during a commit"):
                    await asyncio.wait_for(controller.run(), 60)
                assert bank.counts()[State.FAILED] == 0 and bank.counts()[State.RUNNING] > 0
                again, _ = await play(config, bank, engine, lambda c, t: t.train(1), Replayable())
                assert again.counters.continued > 0

    asyncio.run(scenario())


# ---------------------------------------------------------------- modes of admission


@pytest.mark.parametrize("mode", ["drop", "wait", "window"])
def test_every_mode_trains_within_the_bound(tmp_path: Path, mode: str) -> None:
    async def scenario() -> tuple[RolloutController, Trainer]:
        config = make_config(tmp_path, admission=mode, concurrency=8)
        with open_bank(config) as bank:
            async with ScriptedEngine(lambda request: 3 + request % 7, token_s=0.002) as engine:
                return await play(config, bank, engine, lambda c, t: t.train(3, seconds=0.02))

    _, trainer = asyncio.run(scenario())
    assert max(trainer.gaps) <= 1


def test_a_window_of_nothing_trains_in_the_order_of_start(tmp_path: Path) -> None:
    """The first task is slow, and no batch is formed without it."""

    def make(task: Task) -> ScriptedEnvironment:
        return ScriptedEnvironment(at={"step0": 0.5} if task.data["index"] == 0 else {})

    async def scenario(**rollout: Any) -> list[int]:
        config = make_config(tmp_path / str(len(rollout)), **rollout)
        with open_bank(config) as bank:
            async with ScriptedEngine(4) as engine:
                _, trainer = await play(config, bank, engine, lambda c, t: t.train(1), ScriptedSource(make))
        return sorted({t.task["index"] for t in trainer.batches[0]})

    assert asyncio.run(scenario(admission="window")) == [0, 1]
    assert asyncio.run(scenario(admission="window", window=1, max_turns=8)) == [1, 2]


def test_over_sampling_drops_the_slowest_when_the_batch_is_full(tmp_path: Path) -> None:
    """Synchronous, three groups for a batch of two: the one that would take half a minute is never waited for."""

    def make(task: Task) -> ScriptedEnvironment:
        return ScriptedEnvironment(at={"step0": 30.0} if task.data["index"] % 3 == 0 else {})

    async def scenario() -> None:
        config = make_config(tmp_path, max_staleness=0, over_sampling=0.5, turn_deadline_s=60.0)
        with open_bank(config) as bank:
            async with ScriptedEngine(4) as engine:
                source = ScriptedSource(make)
                controller, trainer = await play(config, bank, engine, lambda c, t: t.train(3), source)
            indices = [sorted({t.task["index"] for t in batch}) for batch in trainer.batches]
            assert indices == [[1, 2], [4, 5], [7, 8]] and max(trainer.gaps) == 0
            counters = controller.counters
            assert counters.groups_dropped >= 2 and counters.groups_abandoned == 0
            assert counters.lengths.dropped >= 4  # its members' turns so far
            assert bank.counts()[State.FAILED] >= 4

    asyncio.run(scenario())
