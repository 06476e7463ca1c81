"""Rewards: gold scores 1 in our adapter, and the cached evaluator agrees with the benchmark's."""

from __future__ import annotations

import asyncio
import copy
import json
from dataclasses import replace
from typing import Any

import pytest

from megatron_async.rollout.environments.tau2 import reward
from megatron_async.rollout.environments.tau2.domain import Domain
from megatron_async.rollout.environments.tau2.episode import Episode, Said
from megatron_async.rollout.environments.tau2.floor import Floor, floor
from megatron_async.rollout.environments.tau2.users import CLOSING, ScriptedUser
from tests.unit.tau2_support import DOMAINS, MODES, altered, domain, play, requires_tau2, sample_ids
from tests.unit.test_tau2_episode import environment_of, source_of

pytestmark = requires_tau2

SAMPLE = {"airline": 1, "retail": 1, "telecom": 3}
"""Tasks in the normal run; the official evaluator takes up to a second for each of their five endings."""


def official(episode: Episode, basis: tuple[str, ...]) -> reward.Verdict:
    return reward.official(episode.domain, episode.task, episode.messages, episode.termination, basis)


def check_agreement(name: str, solo: bool, task_ids: list[str]) -> None:
    rewards: dict[str, list[float]] = {mode: [] for mode in MODES}
    for task_id in task_ids:
        for mode in MODES:
            episode = _played(name, solo, task_id, mode)
            basis = reward.reward_basis(episode.task, "official")
            fast, slow = reward.cached(episode, basis, checks=True), official(episode, basis)
            assert fast == slow, (task_id, mode)
            assert reward.cached(episode, basis) == replace(fast, checks={})
            rewards[mode].append(fast.reward)
    assert rewards["gold"] == [1.0] * len(task_ids)
    assert sum(rewards["dropped"]) < len(task_ids)


def _played(name: str, solo: bool, task_id: str, mode: str) -> Any:
    place = domain(name, solo)
    task = place.tasks[task_id]
    episode = Episode(place, task)
    user = ScriptedUser(str(task.user_scenario))
    pending = episode.start()
    turns = iter(altered(task, mode, solo))
    while pending.turn != "done":
        if pending.turn == "user":
            pending = episode.user(asyncio.run(user.answer(pending.messages, [])))
        else:
            pending = episode.agent(next(turns, Said("###STOP###")))
    return episode


@pytest.mark.parametrize(("name", "solo"), DOMAINS)
def test_evaluators_agree_on_a_sample(name: str, solo: bool) -> None:
    check_agreement(name, solo, sample_ids(name, SAMPLE[name], solo))
    assert SAMPLE[name] > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("name", "solo"), DOMAINS)
def test_evaluators_agree_on_every_task(name: str, solo: bool) -> None:
    """All tasks of the leaderboard; tools/benchmark_tau2.py adds the gold actions of telecom's other 2171."""
    task_ids = domain(name, solo).split("base")
    check_agreement(name, solo, task_ids)
    assert len(task_ids) == {"airline": 50, "retail": 114, "telecom": 114}[name]


@pytest.mark.parametrize("tasks", [6, pytest.param(1000, marks=pytest.mark.slow)])
def test_shared_records_are_unchanged_after_gold_replays(tasks: int) -> None:
    # A tool that is marked as reading and writes, or a record handed out unprotected, would show here.
    for name in ("airline", "retail"):
        place = domain(name)
        before = place.official_constructor().get_db_hash()
        for task_id in place.split("base")[:tasks]:
            place.gold(place.tasks[task_id])
        assert place._template.get_db_hash() == before


def test_fingerprints_equal_exactly_when_the_benchmarks_hashes_are() -> None:
    place = domain("retail")
    ids = sample_ids("retail", 4)
    states = []
    for task_id in ids:
        task = place.tasks[task_id]
        environment = place.environment()
        for action in (task.evaluation_criteria.actions or [])[:-1]:
            environment.get_response(place.package.ToolCall(name=action.name, arguments=action.arguments))
        states.append((place.state(environment)[0], environment.get_db_hash()))
    for ours, theirs in states:
        for other_ours, other_theirs in states:
            assert (ours == other_ours) == (theirs == other_theirs)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        pytest.param("airline", (19, 50), marks=pytest.mark.slow),
        pytest.param("retail", (7, 114), marks=pytest.mark.slow),
        pytest.param("telecom", (0, 114), marks=pytest.mark.slow),
    ],
)
def test_nothing_done_scores_the_known_floor(name: str, expected: tuple[int, int]) -> None:
    value = floor(domain(name), domain(name).split("base"))
    assert (value.successes, value.tasks) == expected


def test_floor_is_what_the_official_evaluator_gives() -> None:
    place = domain("retail")
    for task_id, expected in (("12", 1.0), ("0", 0.0)):
        episode = nothing_done(place, place.tasks[task_id])
        basis = reward.reward_basis(episode.task, "official")
        assert official(episode, basis).reward == expected == floor(place, [task_id]).successes


ALL = {"train_split": "all", "heldout_split": "all"}
"""The domain `mock` has no splits."""


def test_an_assertion_about_a_record_that_is_not_there_does_not_hold() -> None:
    """The benchmark raises there; both our evaluators give what the policy earned, and the floor is no crash."""
    place, task_id = domain("mock"), "create_task_1_with_env_assertions"
    create = Said(calls=(("create_task", {"user_id": "user_1", "title": "Important Meeting"}),))
    for turns, expected in (([create], 1.0), ([], 0.0)):
        environment = environment_of(source_of("mock", **ALL), task_id)
        value, info = asyncio.run(play(environment, [*turns, Said(CLOSING)]))
        assert (value, info["breakdown"]["ENV_ASSERTION"]) == (expected, expected)
        slow = official(environment.episode, ("DB", "ENV_ASSERTION"))
        assert (slow.reward, slow.checks) == (value, info["checks"])
    assert (floor(place, place.tasks).successes, len(place.tasks)) == (1, 9)  # the one without actions


def test_a_floor_that_cannot_be_evaluated_counts_as_not_solved(caplog: pytest.LogCaptureFixture) -> None:
    """A function that does not exist, in a task of one's own: the task is wrong, and its report still comes."""
    place = domain("mock")
    wrong = copy.deepcopy(place.tasks["create_task_1_with_env_assertions"])
    wrong.evaluation_criteria.env_assertions[0].func_name = "assert_nothing_known"
    with pytest.raises(AttributeError, match="assert_nothing_known"):
        reward.cached(nothing_done(place, wrong), ("DB", "ENV_ASSERTION"))
    own = Domain(place.package, "mock")
    own.tasks[wrong.id] = wrong
    assert floor(own, [wrong.id, "create_task_1_nl_eval"]) == Floor(1, 2)
    assert "create_task_1_with_env_assertions cannot be evaluated after doing nothing" in caplog.text


def test_the_floor_of_a_conversation_that_the_agent_continues() -> None:
    place = Domain(domain("mock").package, "mock")
    continued = copy.deepcopy(place.tasks["update_task_with_message_history"])
    user = place.package.UserMessage(role="user", content="Mark it as completed.")
    continued.initial_state.message_history.append(user)
    place.tasks["continued"] = continued.model_copy(update={"id": "continued"})
    assert floor(place, ["continued"]) == Floor(0, 1)


def nothing_done(place: Any, task: Any) -> Episode:
    episode = Episode(place, task)
    episode.start()
    episode.user(Said("hello"))
    episode.agent(Said("Goodbye."))
    episode.user(Said("###STOP###"))
    return episode


def test_sampled_check_lets_the_official_evaluator_win(monkeypatch: pytest.MonkeyPatch) -> None:
    source = source_of("telecom", verify_official=1.0)
    task_id = sample_ids("telecom", 1)[0]
    task = source.context.domain.tasks[task_id]
    wrong = reward.Verdict(0.0, {"DB": 0.0}, ("DB",))
    monkeypatch.setattr(reward, "cached", lambda episode, basis, checks: wrong)
    value, info = asyncio.run(play(environment_of(source, task_id), altered(task, "gold", False)))
    assert value == 1.0
    assert info["official_agrees"] is False
    assert info["official_reward"] == 1.0


@pytest.mark.slow
def test_official_evaluator_in_a_process_of_its_own() -> None:
    source = source_of("telecom", evaluator="official", official_processes=1)
    task_id = sample_ids("telecom", 1)[0]
    gold = altered(source.context.domain.tasks[task_id], "gold", False)

    async def both() -> list[Any]:
        runs = [play(environment_of(source, task_id), turns) for turns in (gold, gold[-1:])]
        return await asyncio.gather(*runs)

    (good, info), (bad, _) = asyncio.run(both())
    assert (good, bad, info["evaluator"]) == (1.0, 0.0, "official")


def with_basis(task: Any, basis: list[str], assertions: list[str]) -> Any:
    changed = copy.deepcopy(task)
    changed.evaluation_criteria.reward_basis = [domain("retail").package.RewardType(part) for part in basis]
    changed.evaluation_criteria.nl_assertions = assertions
    return changed


@pytest.mark.parametrize(
    ("policy", "basis"),
    [
        ("official", ("DB", "NL_ASSERTION")),
        ("no_judge", ("DB",)),
        ("communicate", ("DB", "COMMUNICATE")),
    ],
)
def test_reward_policies(policy: str, basis: tuple[str, ...]) -> None:
    task = with_basis(domain("retail").tasks["0"], ["DB", "NL_ASSERTION"], ["The agent was polite."])
    assert reward.reward_basis(task, policy) == basis
    assert reward.needs_judge(task, policy) is (policy == "official")


def test_judges_prompt_and_answer_are_the_benchmarks() -> None:
    place = domain("retail")
    task = with_basis(place.tasks["0"], ["DB", "NL_ASSERTION"], ["polite", "brief"])
    messages = [place.package.UserMessage(role="user", content="hello")]
    asked, read = reward.judge_prompt(place.package, task, messages)
    assert [message.role for message in asked] == ["system", "user"]
    assert "user: hello" in asked[1].content
    assert "polite" in asked[1].content

    def answer(*met: bool) -> str:
        results = [{"expectedOutcome": "x", "reasoning": "y", "metExpectation": value} for value in met]
        return json.dumps({"results": results})

    assert [check["met"] for check in read(answer(True, False))] == [True, False]
    assert read(answer(True, True))[1] == {"nl_assertion": "x", "met": True, "justification": "y"}
    for broken in ("no JSON", "{}", answer(True), '{"results": [{}, {}]}'):
        with pytest.raises(ValueError):
            read(broken)
