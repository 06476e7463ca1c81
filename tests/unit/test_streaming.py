"""Tokens reach the bank while they are sampled, and a rollout that was killed goes on with them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from megatron_async.bank import Bank, State
from megatron_async.rollout.agent_loop import EpisodeProgress, ReplayDiverged, run_episode
from megatron_async.rollout.controller import RolloutController
from megatron_async.rollout.environments.base import AssistantTurn, Message, Step, Task
from megatron_async.rollout.episode_limits import EpisodeLimits
from megatron_async.rollout.ledger import Ledger
from megatron_async.rollout.streaming import Streamed
from megatron_async.rollout.writing_down import Played, Streaming
from megatron_async.trajectory import SamplingParams, Status, Trajectory, TrajectoryError, VersionSpan
from sglang_bridge import Chunk, EngineError, EnginePool, EngineUnreachable, Generation, SamplingOptions, Span
from tests.unit.scripted_engine import ScriptedEngine
from tests.unit.scripted_rollout import (
    PlainChat,
    RuleSampler,
    ScriptedEnvironment,
    ScriptedSource,
    continuation,
    logprob_of,
)
from tests.unit.test_rollout_controller import make_config, open_bank

LIMITS = EpisodeLimits(
    max_turns=8, max_tokens=200, turn_deadline_s=20.0, trajectory_deadline_s=20.0, max_retries=2
)


def begun() -> Trajectory:
    trajectory = Trajectory("t", "g", "p", SamplingParams(max_new_tokens=20))
    trajectory.append_context([1, 2, 3])
    return trajectory


def chunk(start: int, ids: list[int], version: int) -> Chunk:
    return Chunk(start, ids, [-0.5] * len(ids), str(version))


def answer(ids: list[int], spans: list[Span]) -> Generation:
    return Generation(ids, [-0.5] * len(ids), spans, "stop")


def placed(spans: list[Span]) -> list[VersionSpan]:
    return [VersionSpan(span.version, span.start, span.end) for span in spans]


def test_chunks_of_the_floor_are_recorded_and_what_follows_an_update_waits_for_the_answer() -> None:
    trajectory = begun()
    streamed = Streamed(trajectory, floor=4)
    for part in (chunk(0, [10, 11], 4), chunk(2, [12], 4), chunk(3, [13], 5), chunk(4, [14], 5)):
        streamed.add(part)
    streamed.settle()
    assert trajectory.token_ids.tolist() == [1, 2, 3, 10, 11, 12] and streamed.taken == 3
    assert trajectory.spans == (VersionSpan(4, 3, 6),)
    # Token 13 arrived under the label 5, but was sampled under 4: only the answer knows.
    spans = [Span(4, 0, 4), Span(5, 4, 6)]
    ids, logprobs, rest = streamed.rest(answer([10, 11, 12, 13, 14, 15], spans), placed(spans))
    assert (ids, len(logprobs)) == ([13, 14, 15], 3)
    trajectory.append_action(ids, logprobs, rest, "stop")
    assert trajectory.versions.tolist() == [-1] * 3 + [4] * 4 + [5] * 2
    assert len(trajectory.turns) == 1


@pytest.mark.parametrize(("floor", "label"), [(None, 4), (3, 4), (5, 4)])
def test_a_version_that_is_not_certain_is_not_recorded(floor: int | None, label: int) -> None:
    trajectory = begun()
    streamed = Streamed(trajectory, floor)
    streamed.add(chunk(0, [10, 11], label))
    streamed.settle()
    assert len(trajectory) == 3 and streamed.taken == 0


@pytest.mark.parametrize(
    ("ids", "spans"),
    [([10, 99, 12], [Span(4, 0, 3)]), ([10, 11, 12], [Span(5, 0, 3)]), ([10], [Span(4, 0, 1)])],
)
def test_an_answer_that_contradicts_what_it_streamed_is_refused(ids: list[int], spans: list[Span]) -> None:
    streamed = Streamed(begun(), floor=4)
    streamed.add(chunk(0, [10, 11], 4))
    streamed.settle()
    with pytest.raises(EngineError, match="contradicts the 2 tokens"):
        streamed.rest(answer(ids, spans), placed(spans))


class BreaksOff(RuleSampler):
    """The first connection breaks after `delivered` tokens."""

    delivered = 5

    async def generate(self, input_ids: list[int], sampling: SamplingOptions, **options: Any) -> Generation:
        if self.calls:
            return await super().generate(input_ids, sampling, **options)
        self.calls.append((list(input_ids), sampling))
        ids = continuation(input_ids, self.delivered, self.turn_length)
        options["on_chunk"](Chunk(0, ids, [logprob_of(t) for t in ids], str(self.version)))
        raise EngineUnreachable("gone")


@pytest.mark.parametrize(("floor", "first_ids"), [(3, 3 + BreaksOff.delivered), (None, 3)])
def test_a_broken_answer_goes_on_after_its_partial_ids(floor: int | None, first_ids: int) -> None:
    """The same tokens as in one piece; the budget is not counted anew."""
    sampler = BreaksOff(turn_length=9, version=3)
    trajectory = Trajectory("t", "g", "p", SamplingParams(max_new_tokens=20))
    environment, progress = ScriptedEnvironment(turns=1), EpisodeProgress(floor=floor)
    asyncio.run(run_episode(sampler, PlainChat(), environment, trajectory, LIMITS, progress))
    assert trajectory.token_ids.tolist() == [1, 2, 3, *continuation([1, 2, 3], 20, 9)]
    assert trajectory.spans == (VersionSpan(3, 3, 12),) and trajectory.status is Status.OK
    (again, options) = sampler.calls[1]
    assert len(again) == first_ids and options.max_new_tokens == 20 - (first_ids - 3)


class TakesBack(RuleSampler):
    """The first answer streams tokens that were written down by the time it ends; then it says otherwise, or fails."""

    def __init__(self, error: EngineError | None, flush: Callable[[], Any]) -> None:
        super().__init__(turn_length=9, version=3)
        self.error, self.flush = error, flush

    async def generate(self, input_ids: list[int], sampling: SamplingOptions, **options: Any) -> Generation:
        if self.calls:
            return await super().generate(input_ids, sampling, **options)
        self.calls.append((list(input_ids), sampling))
        options["on_chunk"](chunk(0, [98, 99], 3))
        await self.flush()
        if self.error is not None:
            raise self.error
        return await super().generate(input_ids, sampling, **options)


@pytest.mark.parametrize("error", [None, EngineError("the stream's end cannot be read")])
def test_tokens_recorded_before_a_bad_answer_are_withdrawn(error: EngineError | None, tmp_path: Path) -> None:
    """From the trajectory and from what is written down: as if the first request had never been made."""
    trajectory = Trajectory("t", "g", "p", SamplingParams(max_new_tokens=20))
    progress, early = EpisodeProgress(floor=3), []

    async def scenario() -> None:
        config = make_config(tmp_path)
        with open_bank(config) as bank:
            bank.start_trajectories([trajectory])
            streaming = Streaming(Ledger(bank), {"t": Played(trajectory, progress)}, 1.0)

            async def flush() -> None:
                await streaming.flush()
                early.append(bank.list_running()[0].token_ids.tolist())

            sampler = TakesBack(error, flush)
            environment = ScriptedEnvironment(turns=1)
            await run_episode(sampler, PlainChat(), environment, trajectory, LIMITS, progress)
            assert len(sampler.calls) == (3 if error is None else 2)

    asyncio.run(scenario())
    assert early == [[1, 2, 3, 98, 99]]
    assert trajectory.token_ids.tolist() == [1, 2, 3, *continuation([1, 2, 3], 20, 9)]
    assert trajectory.spans == (VersionSpan(3, 3, 12),) and trajectory.status is Status.OK
    assert trajectory.info["withdrawn"] == 2 and trajectory.info["engine_failures"] == 1


def test_as_many_other_tokens_in_the_place_of_withdrawn_ones_are_written_down(tmp_path: Path) -> None:
    trajectory, progress = begun(), EpisodeProgress(floor=4)

    async def scenario() -> list[int]:
        with open_bank(make_config(tmp_path)) as bank:
            bank.start_trajectories([trajectory])
            streaming = Streaming(Ledger(bank), {"t": Played(trajectory, progress)}, 1.0)
            for ids in ([10, 11], [20, 21]):
                progress.streamed = streamed = Streamed(trajectory, floor=4)
                streamed.add(chunk(0, ids, 4))
                await streaming.flush()
                written = bank.list_running()[0].token_ids.tolist()
                progress.withdrawn += streamed.withdraw()
            return written

    assert asyncio.run(scenario()) == [1, 2, 3, 20, 21]


def test_long_trajectories_are_written_in_fewer_rounds_and_all_at_a_stop(tmp_path: Path) -> None:
    """Each is written whole: what a round writes must not grow with the length of what runs."""
    rounds, longest_gap = 64, {"short": 1, "long": 5, "longest": 16}
    lengths = {"short": 16_000, "long": 5 * 8192, "longest": 40 * 8192}

    async def scenario() -> dict[str, list[int]]:
        with open_bank(make_config(tmp_path)) as bank:
            playing = {}
            for name, length in lengths.items():
                trajectory = Trajectory(name, "g", "p", SamplingParams())
                trajectory.append_context([1] * length)
                playing[name] = Played(trajectory, EpisodeProgress())
            written: dict[str, list[int]] = {name: [] for name in lengths}

            class Counting(Ledger):
                async def checkpoint(self, trajectories: Sequence[Trajectory]) -> None:
                    for each in trajectories:
                        written[each.trajectory_id].append(len(each) - lengths[each.trajectory_id])

            ledger = Counting(bank)
            streaming = Streaming(ledger, playing, 1.0)
            for _ in range(rounds):
                for played in playing.values():
                    played.trajectory.append_action([2], [-0.5], [VersionSpan(0, 0, 1)])
                await streaming.round()
            assert {name: max(b - a for a, b in zip(at, at[1:])) for name, at in written.items()} == longest_gap
            await streaming.flush()
            assert {at[-1] for at in written.values()} == {rounds}
            counted = {name: len(at) for name, at in written.items()}
            playing["longest"].progress.withdrawn = 1  # a kill would go on after tokens that are wrong: not to wait for
            await streaming.round()
            assert [len(written[name]) - counted[name] for name in lengths] == [0, 0, 1]
            ledger.close()
        return written

    written = asyncio.run(scenario())
    per_round = {name: len(at) * lengths[name] / rounds for name, at in written.items()}
    assert per_round["long"] < 1.1 * 8192 and len(written["short"]) == rounds


# ---------------------------------------------------------------------- replay


def whole(turns: int = 3) -> Trajectory:
    trajectory = Trajectory("t", "g", "p", SamplingParams(max_new_tokens=20))
    asyncio.run(run_episode(RuleSampler(6), PlainChat(), ScriptedEnvironment(turns), trajectory, LIMITS))
    return trajectory


def cut(trajectory: Trajectory, length: int, *, ends: bool = True) -> Trajectory:
    """What was written down of it when it had that many tokens. ends: a turn whose tokens are all there is over."""
    part = Trajectory("t", "g", "p", trajectory.sampling)
    at = 0
    for turn in trajectory.turns:
        part.append_context(trajectory.token_ids[at : min(turn.start, length)])
        if length <= turn.start:
            return part
        end = min(turn.end, length)
        logprobs = trajectory.rollout_logprobs[turn.start : end].tolist()
        ids = trajectory.token_ids[turn.start : end].tolist()
        spans = [VersionSpan(0, 0, len(ids))]
        over = end == turn.end and (ends or length > turn.end)
        part.append_action(ids, logprobs, spans, turn.finish_reason if over else None)
        if end == length:
            return part
        at = turn.end
    return part


def test_an_episode_cut_anywhere_goes_on_to_the_same_end() -> None:
    """Cut between tokens, after a turn, after an observation: the environment hears the same, the tokens are equal."""
    reference = whole()
    between_contexts = {1, 2, reference.turns[0].end + 1, reference.turns[1].end + 1}
    for length in range(3, len(reference) + 1):
        if length in between_contexts:
            continue  # a context is appended whole
        trajectory, environment = cut(reference, length), ScriptedEnvironment(3)
        assert len(trajectory) == length
        sampler = RuleSampler(6)
        asyncio.run(run_episode(sampler, PlainChat(), environment, trajectory, LIMITS))
        assert trajectory.token_ids.tolist() == reference.token_ids.tolist(), length
        assert trajectory.turns == reference.turns and trajectory.status is Status.OK
        assert len(environment.seen) == 3 and environment.closed == 1
        sampled = sum(len(reference) - turn.start for turn in reference.turns if turn.start <= length < turn.end)
        assert len(sampler.calls) == sum(turn.end > length for turn in reference.turns), (length, sampled)


def test_nothing_is_sampled_after_the_end_of_a_turn_that_was_cut_before_it_was_over() -> None:
    """Its stop token had been streamed and written down, and the kill came before the rest of the answer."""
    reference = whole()
    for number, turn in enumerate(reference.turns, 1):
        trajectory, sampler = cut(reference, turn.end, ends=False), RuleSampler(6)
        assert trajectory.open_turn == turn.start
        asyncio.run(run_episode(sampler, PlainChat(), ScriptedEnvironment(3), trajectory, LIMITS))
        assert trajectory.token_ids.tolist() == reference.token_ids.tolist()
        assert trajectory.turns == reference.turns and len(sampler.calls) == 3 - number


@dataclass
class Forgetful(ScriptedEnvironment):
    """Ends a turn earlier than the recorded episode did."""

    async def step(self, turn: AssistantTurn) -> Step:
        step = await super().step(turn)
        return replace(step, done=True)


class OtherWords(PlainChat):
    def observation_ids(self, messages: list[Message], *, closed: bool = True) -> list[int]:  # type: ignore[override]
        return [4, 6]


@pytest.mark.parametrize(("chat", "environment"), [(PlainChat, Forgetful), (OtherWords, ScriptedEnvironment)])
def test_an_environment_that_answers_otherwise_is_not_continued(chat: Any, environment: Any) -> None:
    trajectory, fresh = cut(whole(), 12), environment(3)
    with pytest.raises(ReplayDiverged):
        asyncio.run(run_episode(RuleSampler(6), chat(), fresh, trajectory, LIMITS))
    assert fresh.closed == 1 and not trajectory.finished


# ---------------------------------------------------------------------- the rollout process


class ReplayableSource(ScriptedSource):
    def replayable(self, task: Task) -> bool:
        return True


async def until(condition: Callable[[], bool], deadline_s: float = 30.0) -> None:
    async with asyncio.timeout(deadline_s):
        while not condition():
            await asyncio.sleep(0.01)


async def kill_in_the_middle(bank: Bank, config: Any, source: ScriptedSource) -> list[Trajectory]:
    """Play until tokens were written down, then end without leave, as SIGKILL does; what the bank holds of it."""
    async with ScriptedEngine(30, stall_at=6) as engine, EnginePool([engine.url]) as pool:
        controller = RolloutController(config, bank, pool, source, PlainChat())

        async def nothing() -> None:
            controller._ledger.close()

        controller._leave = nothing  # type: ignore[method-assign]
        run = asyncio.create_task(controller.run())
        await until(lambda: sum(t.num_action_tokens == 6 for t in bank.list_running()) >= 4 or run.done())
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)
    return bank.list_running()


async def go_on(bank: Bank, config: Any, source: ScriptedSource, finished: int) -> RolloutController:
    async with ScriptedEngine(30) as engine, EnginePool([engine.url]) as pool:
        controller = RolloutController(config, bank, pool, source, PlainChat())
        run = asyncio.create_task(controller.run())
        await until(lambda: bank.counts()[State.FINISHED] >= finished or run.done())
        controller.stop("enough")
        await run
    return controller


def test_a_killed_rollout_goes_on_with_the_tokens_it_had_written_down(tmp_path: Path) -> None:
    async def scenario() -> tuple[list[Trajectory], list[Trajectory], RolloutController]:
        config = make_config(tmp_path, flush_s=0.05, max_staleness=0)
        with open_bank(config) as bank:
            left = await kill_in_the_middle(bank, config, ReplayableSource())
            controller = await go_on(bank, config, ReplayableSource(), 4)
            batch = bank.take_batch(0, 2, 2, 0)
            assert batch is not None
        return left, batch, controller

    left, batch, controller = asyncio.run(scenario())
    assert len(left) == 4 and all(trajectory.open_turn == 3 for trajectory in left)
    by_id = {trajectory.trajectory_id: trajectory for trajectory in batch}
    for before in left:
        after = by_id[before.trajectory_id]
        assert after.token_ids[: len(before)].tolist() == before.token_ids.tolist()
        assert after.turns[0].end - after.turns[0].start == 30  # as long as one that was never cut
        assert after.info["continued_at"] == len(before) and after.info["continued_turns"] == 0
    assert (controller.counters.continued, controller.counters.restarted) == (4, 0)


def test_where_the_environment_cannot_be_replayed_episodes_begin_anew(tmp_path: Path) -> None:
    async def scenario() -> tuple[list[Trajectory], list[Trajectory], RolloutController]:
        config = make_config(tmp_path, flush_s=0.05, max_staleness=0)
        with open_bank(config) as bank:
            left = await kill_in_the_middle(bank, config, ScriptedSource())
            controller = await go_on(bank, config, ScriptedSource(), 4)
            assert bank.counts()[State.FAILED] == len(left)
            batch = bank.take_batch(0, 2, 2, 0)
            assert batch is not None
        return left, batch, controller

    left, batch, controller = asyncio.run(scenario())
    lost = {trajectory.trajectory_id for trajectory in left}
    assert {trajectory.info["restarted_from"] for trajectory in batch} == lost
    assert lost.isdisjoint(trajectory.trajectory_id for trajectory in batch)
    assert (controller.counters.continued, controller.counters.restarted) == (0, len(left))


def test_tokens_too_old_to_be_trained_are_not_continued(tmp_path: Path) -> None:
    async def scenario() -> RolloutController:
        config = make_config(tmp_path, flush_s=0.05, max_staleness=0)
        with open_bank(config) as bank:
            await kill_in_the_middle(bank, config, ReplayableSource())
            bank.record_version(1, 0)
            return await go_on(bank, config, ReplayableSource(), 4)

    assert asyncio.run(scenario()).counters.restarted == 4


def test_a_snapshot_stays_as_it_was_while_the_trajectory_grows() -> None:
    trajectory = begun()
    trajectory.append_action([10], [-0.5], [VersionSpan(0, 0, 1)])
    taken, written = trajectory.snapshot(), trajectory.to_bytes()
    for version in (0, 0, 1, 1, 1, 2, 2):
        trajectory.append_action([11, 12], [-0.25, -0.125], [VersionSpan(version, 0, 2)])
    trajectory.append_action([], [], (), "stop")
    assert taken.to_bytes() == written
    assert (len(taken), taken.num_turns, len(trajectory), trajectory.num_turns) == (4, 0, 18, 1)


def test_a_snapshot_keeps_tokens_that_are_withdrawn_and_replaced() -> None:
    trajectory = begun()
    trajectory.append_action([10, 11], [-0.5] * 2, [VersionSpan(0, 0, 2)])
    taken, written = trajectory.snapshot(), trajectory.to_bytes()
    trajectory.withdraw(1)
    assert (trajectory.token_ids.tolist(), trajectory.open_turn) == ([1, 2, 3, 10], 3)
    trajectory.append_action([12], [-0.25], [VersionSpan(1, 0, 1)])
    assert taken.to_bytes() == written and trajectory.versions.tolist() == [-1] * 3 + [0, 1]
    with pytest.raises(TrajectoryError, match="3 tokens cannot be withdrawn, the open turn holds 2"):
        trajectory.withdraw(3)
    trajectory.withdraw(2)
    assert trajectory.open_turn is None and trajectory.spans == ()
