"""Episodes: what is recorded, how they end, and that nothing that fails is a reward."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatron_async.rollout import blocking
from megatron_async.rollout.agent_loop import EpisodeProgress, run_episode
from megatron_async.rollout.environments.base import EnvironmentFailure, Step
from megatron_async.rollout.episode_limits import EpisodeLimits
from megatron_async.trajectory import SamplingParams, Status, Trajectory, VersionSpan
from sglang_bridge import EngineError, EngineTimeout, EngineUnreachable
from tests.unit.scripted_rollout import (
    END,
    PlainChat,
    RuleSampler,
    ScriptedEnvironment,
    continuation,
    logprob_of,
)

LIMITS = EpisodeLimits(
    max_turns=8, max_tokens=200, turn_deadline_s=5.0, trajectory_deadline_s=10.0, max_retries=2
)


def play(
    sampler: Any,
    environment: Any = None,
    limits: EpisodeLimits = LIMITS,
    max_new_tokens: int = 20,
    chat: Any = None,
    **options: Any,
) -> Trajectory:
    trajectory = Trajectory("t", "g", "p", SamplingParams(max_new_tokens=max_new_tokens))
    environment = environment or ScriptedEnvironment()
    return asyncio.run(run_episode(sampler, chat or PlainChat(), environment, trajectory, limits, **options))


def test_a_whole_episode_is_recorded_token_by_token() -> None:
    environment = ScriptedEnvironment(turns=2, outcome=0.5)
    trajectory = play(RuleSampler(turn_length=4, version=3), environment)
    first = continuation([1, 2, 3], 20, 4)
    second = continuation([1, 2, 3, *first, 4, 5], 20, 4)
    assert trajectory.token_ids.tolist() == [1, 2, 3, *first, 4, 5, *second]
    assert trajectory.loss_mask.tolist() == [False] * 3 + [True] * 4 + [False] * 2 + [True] * 4
    assert trajectory.rollout_logprobs[trajectory.loss_mask].tolist() == [
        logprob_of(t) for t in first + second
    ]
    assert (trajectory.status, trajectory.reward) == (Status.OK, 0.5)
    assert trajectory.info["ending"] == "done" and trajectory.info["reward"] == {"turns": 2}
    assert [turn.content for turn in environment.seen] == [" ".join(map(str, ids)) for ids in (first, second)]
    assert environment.closed == 1


def test_a_weight_update_inside_a_response_shows_in_the_spans() -> None:
    trajectory = play(RuleSampler(turn_length=9, version=7, cuts=(2, 5)), ScriptedEnvironment(turns=1))
    assert trajectory.spans == (VersionSpan(7, 3, 5), VersionSpan(8, 5, 8), VersionSpan(9, 8, 12))
    assert trajectory.versions.tolist() == [-1] * 3 + [7] * 2 + [8] * 3 + [9] * 4


def test_an_aborted_response_is_resubmitted_with_the_rest_of_its_budget() -> None:
    """Field bug 28: the second request must not get the whole budget again."""
    whole = play(RuleSampler(turn_length=30), ScriptedEnvironment(turns=1), max_new_tokens=12)
    plan = {0: (5, "abort"), 1: (3, "abort")}
    sampler = RuleSampler(turn_length=30, plan=plan.get)
    cut = play(sampler, ScriptedEnvironment(turns=1), max_new_tokens=12)
    assert [options.max_new_tokens for _, options in sampler.calls] == [12, 7, 4]
    assert [ids for ids, _ in sampler.calls] == [cut.token_ids[:n].tolist() for n in (3, 8, 11)]
    assert cut.token_ids.tolist() == whole.token_ids.tolist()
    assert cut.status is Status.TRUNCATED and cut.info["ending"] == "max_new_tokens"
    assert cut.info["resubmissions"] == 2
    assert [(turn.start, turn.end) for turn in cut.turns] == [(3, 15)]


def test_abort_exactly_at_the_budget_ends_the_turn_without_another_request() -> None:
    sampler = RuleSampler(turn_length=30, plan={0: (12, "abort")}.get)
    trajectory = play(sampler, ScriptedEnvironment(turns=1), max_new_tokens=12)
    assert len(sampler.calls) == 1
    assert trajectory.turns[0].finish_reason == "length" and trajectory.status is Status.TRUNCATED


def test_an_abort_with_zero_tokens_goes_on() -> None:
    """Field bug 29."""
    sampler = RuleSampler(plan={0: (0, "abort"), 1: (0, "abort")}.get)
    trajectory = play(sampler, ScriptedEnvironment(turns=1))
    assert trajectory.status is Status.OK and len(sampler.calls) == 3
    assert trajectory.token_ids.tolist() == [1, 2, 3, *continuation([1, 2, 3], 20, 4)]


def test_kv_that_survives_an_update_is_flagged() -> None:
    sampler = RuleSampler(turn_length=6, version=4, cuts=(3,))
    trajectory = play(sampler, ScriptedEnvironment(turns=2), replace(LIMITS, stale_kv=True))
    assert trajectory.spans[0] == VersionSpan(4, 3, 6)
    assert all(span.kv_version == 4 for span in trajectory.spans[1:])
    assert trajectory.kv_mismatch.sum() == 3 + 6


@pytest.mark.parametrize(
    ("limits", "max_new_tokens", "ending"),
    [
        (replace(LIMITS, max_turns=3), 20, "max_turns"),
        (replace(LIMITS, max_tokens=12), 20, "max_tokens"),  # inside the second turn: 3 + 4 + 2 + 3
        (replace(LIMITS, max_tokens=9), 20, "max_tokens"),  # the observation leaves no room for an answer
        (LIMITS, 3, "max_new_tokens"),
    ],
)
def test_limits_truncate_and_the_environment_still_rewards(
    limits: EpisodeLimits, max_new_tokens: int, ending: str
) -> None:
    environment = ScriptedEnvironment(turns=100, outcome=0.25)
    trajectory = play(RuleSampler(), environment, limits, max_new_tokens)
    assert (trajectory.status, trajectory.info["ending"]) == (Status.TRUNCATED, ending)
    assert trajectory.reward == 0.25
    assert len(trajectory) <= limits.max_tokens and environment.closed == 1


def test_the_environment_may_truncate() -> None:
    class Impatient(ScriptedEnvironment):
        async def step(self, turn: Any) -> Step:
            return Step([], done=True, truncated=True)

    trajectory = play(RuleSampler(), Impatient())
    assert (trajectory.status, trajectory.info["ending"]) == (Status.TRUNCATED, "environment_truncated")


@pytest.mark.parametrize("where", ["reset", "step0", "step1", "reward"])
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (EnvironmentFailure("tool server down"), "environment_failure"),
        (KeyError("x"), "environment_exception"),
    ],
)
def test_an_environment_that_fails_is_a_status_and_never_a_reward(
    where: str, error: Exception, kind: str
) -> None:
    """Field bug 27."""
    environment = ScriptedEnvironment(at={where: error})
    trajectory = play(RuleSampler(), environment)
    assert trajectory.status is Status.ENVIRONMENT_ERROR and trajectory.reward is None
    assert trajectory.info["ending"] == kind and environment.closed == 1


def test_an_environment_that_answers_too_late_is_named() -> None:
    trajectory = play(
        RuleSampler(), ScriptedEnvironment(at={"step1": 30.0}), replace(LIMITS, turn_deadline_s=0.05)
    )
    assert (
        trajectory.status is Status.ENVIRONMENT_ERROR and trajectory.info["ending"] == "environment_timeout"
    )
    assert "step gave no answer in 0.05 s" in trajectory.info["failure"]


def test_an_environment_without_an_answer_is_an_error() -> None:
    class Silent(ScriptedEnvironment):
        async def step(self, turn: Any) -> Step:
            return Step([], done=False)

    assert play(RuleSampler(), Silent()).info["ending"] == "no_observation"


def test_a_prompt_longer_than_the_limit_says_so() -> None:
    trajectory = play(RuleSampler(), limits=replace(LIMITS, max_tokens=3))
    assert trajectory.status is Status.ENVIRONMENT_ERROR
    assert "3 tokens" in trajectory.info["failure"] and "max_tokens=3" in trajectory.info["failure"]


def test_failing_to_close_does_not_change_the_outcome() -> None:
    trajectory = play(RuleSampler(), ScriptedEnvironment(at={"close": RuntimeError("stuck")}))
    assert (trajectory.status, trajectory.reward) == (Status.OK, 1.0)


def test_a_request_is_repeated_after_engine_failures() -> None:
    plan = {0: EngineUnreachable("refused"), 2: EngineError("boom", status=500)}
    sampler = RuleSampler(plan=plan.get)
    trajectory = play(sampler)
    assert trajectory.status is Status.OK and trajectory.info["engine_failures"] == 2
    assert trajectory.token_ids.tolist() == play(RuleSampler()).token_ids.tolist()


@pytest.mark.parametrize(
    ("error", "kind", "calls"),
    [
        (EngineError("boom", status=500), "engine_failure", 3),
        (EngineTimeout("silent"), "engine_timeout", 3),
        (EngineError("prompt too long", status=400), "engine_refused", 1),  # repeating cannot help
        (EngineError("busy", status=429), "engine_failure", 3),
    ],
)
def test_engines_that_keep_failing_are_a_status(error: EngineError, kind: str, calls: int) -> None:
    sampler = RuleSampler(plan=lambda call: error)
    trajectory = play(sampler)
    assert trajectory.status is Status.ENGINE_ERROR and trajectory.reward is None
    assert trajectory.info["ending"] == kind and len(sampler.calls) == calls
    assert str(error) in trajectory.info["failure"]


def test_an_answer_that_breaks_the_trajectory_is_refused_whole() -> None:
    """Spans that do not tile, NaN log-probs, versions that go back: an engine error, never a wrong trajectory."""

    class Broken(RuleSampler):
        async def generate(self, *args: Any, **options: Any) -> Any:
            answer = await super().generate(*args, **options)
            return replace(answer, logprobs=[float("nan")] * len(answer.logprobs))

    trajectory = play(Broken())
    assert trajectory.status is Status.ENGINE_ERROR and trajectory.num_action_tokens == 0
    assert "does not fit its trajectory" in trajectory.info["failure"]


def test_an_episode_goes_on_when_the_version_goes_back() -> None:
    """The trainer resumed at 4 after it had published 5; or a late engine got newer weights than the others."""

    class TwoEngines(RuleSampler):
        async def generate(self, *args: Any, **options: Any) -> Any:
            self.version = 5 if not self.calls else 4
            return await super().generate(*args, **options)

    trajectory = play(TwoEngines())
    assert trajectory.status is Status.OK and [span.version for span in trajectory.spans] == [5, 4]
    assert (trajectory.min_version, trajectory.max_version) == (4, 5)


def test_deadline_of_a_turn_and_of_the_whole_trajectory() -> None:
    slow = RuleSampler(delay_s=30.0)
    turn = play(slow, limits=replace(LIMITS, turn_deadline_s=0.05))
    assert turn.status is Status.ENGINE_ERROR and turn.info["ending"] == "turn_deadline"
    life = play(slow, limits=replace(LIMITS, trajectory_deadline_s=0.05))
    assert life.status is Status.ABORTED and life.info["ending"] == "trajectory_deadline"
    assert "waiting for engine" in life.info["failure"] and life.reward is None


def test_a_deadline_during_the_second_turn_keeps_the_first() -> None:
    environment = ScriptedEnvironment(at={"step1": 30.0})
    trajectory = play(RuleSampler(), environment, replace(LIMITS, trajectory_deadline_s=0.1))
    assert trajectory.status is Status.ABORTED and len(trajectory.turns) == 2 and environment.closed == 1
    assert "environment.step" in trajectory.info["failure"]


def test_ids_that_change_behind_the_policys_back_are_a_defect() -> None:
    """Field bug 25: the prefix of every request is the request before it."""
    trajectory = Trajectory("t", "g", "p", SamplingParams(max_new_tokens=20))

    class Rewriting(ScriptedEnvironment):
        async def step(self, turn: Any) -> Step:
            trajectory._ids[1] = 99
            return await super().step(turn)

    with pytest.raises(ValueError, match="ids may only be appended"):
        asyncio.run(run_episode(RuleSampler(), PlainChat(), Rewriting(), trajectory, LIMITS))


def test_defects_of_the_program_are_raised_and_the_environment_is_closed() -> None:
    class BrokenChat(PlainChat):
        def parse(self, ids: Any) -> Any:
            raise AssertionError("a bug")

    environment = ScriptedEnvironment()
    with pytest.raises(AssertionError, match="a bug"):
        play(RuleSampler(), environment, chat=BrokenChat())
    assert environment.closed == 1


def test_a_timeout_that_is_no_deadline_of_the_episode_is_a_defect_and_not_called_one() -> None:
    class Hasty(PlainChat):
        def parse(self, ids: Any) -> Any:
            raise TimeoutError("of something else")

    with pytest.raises(TimeoutError, match="of something else"):
        play(RuleSampler(), chat=Hasty())


def test_cancellation_closes_the_environment_and_leaves_the_trajectory_open() -> None:
    async def scenario() -> tuple[Trajectory, ScriptedEnvironment]:
        trajectory, environment = Trajectory("t", "g", "p", SamplingParams()), ScriptedEnvironment()
        episode = asyncio.create_task(
            run_episode(RuleSampler(delay_s=30.0), PlainChat(), environment, trajectory, LIMITS)
        )
        await asyncio.sleep(0.01)
        episode.cancel()
        with pytest.raises(asyncio.CancelledError):
            await episode
        return trajectory, environment

    trajectory, environment = asyncio.run(scenario())
    assert not trajectory.finished and environment.closed == 1


def test_an_unclosed_turn_is_closed_in_the_context() -> None:
    """A turn that ended at another stop token gets its end token as context, not as an action."""
    chat = PlainChat()
    chat.turn_end_id = 8
    trajectory = play(RuleSampler(), ScriptedEnvironment(turns=2), chat=chat)
    first = continuation([1, 2, 3], 20, 4)
    assert trajectory.token_ids[: 3 + 4 + 3].tolist() == [1, 2, 3, *first, END, 4, 5]
    assert not trajectory.loss_mask[7:10].any()


def test_progress_and_token_counts_are_reported() -> None:
    progress, counted = EpisodeProgress(), []
    trajectory = play(
        RuleSampler(), ScriptedEnvironment(turns=3), progress=progress, on_tokens=counted.append
    )
    assert sum(counted) == progress.tokens == trajectory.num_action_tokens == 12
    assert trajectory.info["engine_s"] >= 0 and trajectory.info["environment_s"] >= 0


def test_routed_experts_cover_the_sequence_once_over_a_continued_response() -> None:
    """Field bug 30: neither doubled nor shifted; length is tokens - 1 of the whole sequence."""

    class Routed(RuleSampler):
        async def generate(self, input_ids: list[int], sampling: Any, **options: Any) -> Any:
            answer = await super().generate(input_ids, sampling, **options)
            ids = np.asarray([*input_ids, *answer.output_ids])[:-1]
            return replace(
                answer, routed_experts=np.stack([ids % 8, ids % 4], 1)[:, None, :].astype(np.int32)
            )

    sampler = Routed(turn_length=9, plan={0: (3, "abort"), 1: (0, "abort")}.get)
    trajectory = play(sampler, ScriptedEnvironment(turns=2), replace(LIMITS, routed_experts=True))
    ids = trajectory.token_ids[:-1]
    expected = np.stack([ids % 8, ids % 4], 1)[:, None, :]
    assert trajectory.routed_experts is not None
    np.testing.assert_array_equal(trajectory.routed_experts, expected)


class Blocking(ScriptedEnvironment):
    """Its second step waits without an await, as a plain HTTP library does."""

    async def step(self, turn: Any) -> Step:
        await asyncio.sleep(0)
        if self.seen:
            time.sleep(blocking.BLOCKS_S + 0.01)
        return await super().step(turn)


def test_an_environment_that_blocks_the_loop_is_named(caplog: pytest.LogCaptureFixture) -> None:
    trajectory = play(RuleSampler(), Blocking())
    assert trajectory.status is Status.OK and trajectory.info["blocked_s"] >= blocking.BLOCKS_S
    (line,) = [r.getMessage() for r in caplog.records if "blocked the event loop" in r.getMessage()]
    assert "test_agent_loop.Blocking.step" in line
    assert "blocked_s" not in play(RuleSampler(), ScriptedEnvironment(at={"step0": 0.02})).info
