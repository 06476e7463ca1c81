"""The service desk: solvable by the policy, not by luck; tools enforce nothing; splits never meet."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_async.config.schema import EnvironmentConfig
from megatron_async.rollout.environments import AssistantTurn, Step, ToolCall, build_task_source, desk_options
from megatron_async.rollout.environments.base import Environment, TaskSource
from megatron_async.rollout.environments.desk import TRAIN_TASKS, DeskEnvironment, DeskTasks
from megatron_async.rollout.environments.desk_agents import CAREFUL, Habits, Script, script
from megatron_async.rollout.environments.desk_policy import OUTCOMES, POLICIES, DeskPolicy, judge, policy_from
from megatron_async.rollout.environments.desk_world import (
    AMOUNTS,
    ORDER_IDS,
    TOOL_ARGUMENTS,
    TOOLS,
    DeskDatabase,
    DeskTask,
    draw_task,
)


def play(task: DeskTask, agent: Script) -> float:
    """The reward of one scripted episode."""
    desk = DeskEnvironment(task)
    message = next(agent)
    while True:
        step = asyncio.run(desk.step(AssistantTurn(message.content, message.tool_calls)))
        if step.done:
            return asyncio.run(desk.reward())[0]
        message = agent.send(step.messages[-1].content)


def say(desk: DeskEnvironment, text: str) -> Step:
    return asyncio.run(desk.step(AssistantTurn(text)))


def call(desk: DeskEnvironment, tool: str, **arguments: str) -> dict[str, object]:
    step = asyncio.run(desk.step(AssistantTurn("", (ToolCall(tool, dict(arguments)),))))
    answer: dict[str, object] = json.loads(step.messages[0].content)
    return answer


def find_task(policy: DeskPolicy, **wanted: object) -> DeskTask:
    """The first task whose fields have these values."""
    tasks = (draw_task(number, policy) for number in range(10_000))
    return next(task for task in tasks if all(getattr(task, field) == wanted[field] for field in wanted))


def reward_and_info(desk: DeskEnvironment) -> tuple[float, dict[str, object]]:
    return asyncio.run(desk.reward())


# -- can be solved, cannot be guessed


@pytest.mark.parametrize("name", POLICIES)
def test_careful_agent_solves_every_task(name: str) -> None:
    policy = POLICIES[name]
    tasks = [draw_task(number, policy) for number in range(400)]
    assert [task.number for task in tasks if play(task, script(task.opening, policy, CAREFUL)) != 1.0] == []


def test_sloppy_agents_lose_what_they_skip() -> None:
    policy = DeskPolicy()
    tasks = [draw_task(number, policy) for number in range(500)]

    def success(habits: Habits) -> float:
        return sum(play(task, script(task.opening, policy, habits)) for task in tasks) / len(tasks)

    # A quarter of the orders are somebody else's, and refused whatever their state. Of the own ones, without the record
    # no amount is known, except where only the status is asked (20 %); with it, a third of the others are pending.
    # Tolerances: four standard errors of 500 draws.
    assert success(Habits(skip_user=True)) == pytest.approx(0.75, abs=0.08)
    assert success(Habits(skip_order=True)) == pytest.approx(0.25 + 0.75 * 0.2, abs=0.09)
    assert success(Habits(ignore_status=True)) == pytest.approx(0.25 + 0.75 * (0.2 + 0.8 / 3), abs=0.09)


def test_no_constant_reply_reaches_two_percent() -> None:
    tasks = [draw_task(number, DeskPolicy()) for number in range(4000)]
    words = [f"{outcome} {fact}" for outcome in OUTCOMES for fact in (*AMOUNTS, *ORDER_IDS)]
    replies = [f"{opening} {word}" for word in words for opening in ("cannot,", "status is")]
    # A constant reply that does not close the case changes nothing and leaves no content user: closing ones are best.
    unchanged = [task for task in tasks if task.database.digest() == task.gold_digest]
    hits = {
        reply: sum(f"{task.outcome} {task.fact}" in reply for task in unchanged) / len(tasks)
        for reply in replies
    }
    best = max(hits, key=lambda reply: hits[reply])
    assert 0 < hits[best] < 0.02
    winner = next(task for task in unchanged if f"{task.outcome} {task.fact}" in best)
    desk = DeskEnvironment(winner)
    assert say(desk, best).done
    assert reward_and_info(desk)[0] == 1.0  # the count above is what the environment pays


def test_a_reply_that_names_everything_is_not_the_right_one() -> None:
    task = find_task(DeskPolicy(), intent="status", outcome="shipped")
    for reply, expected in (
        (f"status is shipped {task.fact}", 1.0),
        (f"status is shipped pending {task.fact}", 0.0),
        (f"status is shipped {task.fact} 48" if task.fact != "48" else "status is shipped 48 46", 0.0),
        ("status is shipped", 0.0),
    ):
        desk = DeskEnvironment(task)
        assert say(desk, reply).done
        assert reward_and_info(desk)[0] == expected, reply


def test_nothing_is_told_about_orders_of_others() -> None:
    task = find_task(DeskPolicy(), outcome="yours")
    amount = task.database.orders[task.order_id]["amount"]
    for reply, expected in (
        (f"cannot, not yours {task.order_id}", 1.0),
        (f"cannot, not yours {task.order_id} {amount}", 0.0),
    ):
        desk = DeskEnvironment(task)
        say(desk, reply)
        assert reward_and_info(desk)[0] == expected


def test_success_needs_database_words_and_a_content_user() -> None:
    task = find_task(DeskPolicy(), intent="cancel", outcome="refund")
    said_only = DeskEnvironment(task)
    say(said_only, f"done, refund {task.fact}")
    assert reward_and_info(said_only)[1] | {"intent": ""} == {
        "database": False, "said": True, "ended": True, "termination": "user_content", "intent": "",
    }  # fmt: skip
    done_only = DeskEnvironment(task)
    call(done_only, "cancel_order", order_id=task.order_id)
    assert reward_and_info(done_only)[0] == 0.0  # cut before the user heard of it
    assert reward_and_info(done_only)[1]["termination"] == "cut"
    say(done_only, f"done, refund {task.fact}")
    assert reward_and_info(done_only)[0] == 1.0


# -- user and tools


def test_user_tells_what_is_asked_and_loses_patience() -> None:
    task = find_task(DeskPolicy(), intent="resize")
    desk = DeskEnvironment(task)
    assert say(desk, "Your name and order?").messages[0].content == f"i am {task.name}, order {task.order_id}"
    assert say(desk, "which size?").messages[0].content == f"size {task.size}"
    assert say(desk, "hm").messages[0].content == "sorry?"
    step = say(desk, "hm")
    assert (step.done, step.messages) == (True, [])
    assert reward_and_info(desk)[1]["termination"] == "user_confused"


def test_tools_do_not_enforce_the_policy() -> None:
    task = find_task(DeskPolicy(), outcome="yours")
    amount = task.database.orders[task.order_id]["amount"]
    desk = DeskEnvironment(task)
    assert call(desk, "cancel_order", order_id=task.order_id) == {"refund": amount}
    assert call(desk, "get_order", order_id=task.order_id)["status"] == "cancelled"
    say(desk, f"cannot, not yours {task.fact}")
    assert reward_and_info(desk)[1]["database"] is False


def test_wrong_calls_are_answered_not_raised() -> None:
    task = draw_task(0, DeskPolicy())
    desk = DeskEnvironment(task)
    assert call(desk, "delete_shop") == {"error": "no such tool"}
    assert call(desk, "get_order") == {"error": "bad arguments"}
    assert call(desk, "get_order", order_id="Z9") == {"error": "no such order"}
    assert call(desk, "verify_owner", name="nobody", order_id=task.order_id) == {"error": "no such user"}
    assert call(desk, "resize_order", order_id=task.order_id, size="XXL") == {"error": "no such size"}
    two = AssistantTurn(
        "",
        (
            ToolCall("verify_owner", {"name": task.name, "order_id": task.order_id}),
            ToolCall("get_order", {"order_id": 3}),
        ),
    )
    step = asyncio.run(desk.step(two))
    assert [message.role for message in step.messages] == ["tool", "tool"]
    assert json.loads(step.messages[1].content) == {"error": "bad arguments"}


def test_malformed_turn_is_the_policys_failure() -> None:
    desk = DeskEnvironment(draw_task(0, DeskPolicy()))
    step = asyncio.run(desk.step(AssistantTurn("", parse_error="tool call 1: not JSON")))
    reward, info = reward_and_info(desk)
    assert (step.done, reward, info["termination"], info["parse_error"]) == (
        True, 0.0, "malformed_turn", "tool call 1: not JSON",
    )  # fmt: skip


def test_schemas_describe_the_tools_that_exist() -> None:
    database = DeskDatabase({}, {})
    assert len(TOOLS) >= 5
    for name, arguments in TOOL_ARGUMENTS.items():
        assert database.call(ToolCall(name, dict.fromkeys(arguments, "x"))) != {"error": "no such tool"}


# -- policy as data


def test_a_switch_of_policy_changes_the_gold_and_the_text() -> None:
    allowed = find_task(POLICIES["cancel_allowed"], intent="cancel", outcome="refund")
    returned = draw_task(allowed.number, POLICIES["return_only"])
    assert returned.database.digest() == allowed.database.digest()  # the same case
    assert (returned.outcome, returned.gold_digest != allowed.gold_digest) == ("returned", True)
    assert play(returned, script(allowed.opening, POLICIES["cancel_allowed"])) == 0.0
    assert len({policy.text() for policy in POLICIES.values()}) == len(POLICIES)


def test_under_ask_first_acting_unasked_fails_for_users_who_change_their_mind() -> None:
    unsure = find_task(POLICIES["ask_first"], outcome="kept")
    assert play(unsure, script(unsure.opening, POLICIES["cancel_allowed"])) == 0.0
    assert play(unsure, script(unsure.opening, POLICIES["ask_first"])) == 1.0


def test_judgement_table() -> None:
    policy = DeskPolicy()
    assert judge(policy, "cancel", "shipped", owned=True).outcome == "shipped"
    assert judge(policy, "cancel", "delivered", owned=True).action == "return_order"
    assert judge(policy, "cancel", "pending", owned=True).action == "cancel_order"
    assert judge(policy, "resize", "delivered", owned=True).action == "none"
    assert judge(policy, "resize", "pending", owned=True).action == "resize_order"
    assert judge(policy, "status", "pending", owned=False).outcome == "yours"
    assert judge(POLICIES["ask_first"], "resize", "pending", owned=True, sure=False).outcome == "kept"


def test_policy_travels_as_json() -> None:
    for policy in POLICIES.values():
        assert policy_from(json.loads(json.dumps(policy.to_json()))) == policy
    with pytest.raises(ValueError, match="did you mean 'ask_first'"):
        policy_from("ask_frist")
    with pytest.raises(ValueError, match="unknown fields of a desk policy: refunds"):
        policy_from({"refunds": True})
    with pytest.raises(ValueError, match="pending_cancellation is 'burn'"):
        policy_from({"pending_cancellation": "burn"})


# -- tasks


def test_splits_never_meet_and_heldout_is_the_same_for_every_seed() -> None:
    def cases(tasks: DeskTasks) -> list[str]:
        drawn = [tasks.environment(tasks.task(index)).task for index in range(2000)]
        return [json.dumps([t.database.digest(), t.opening, t.order_id, t.name, t.size]) for t in drawn]

    heldout, train = cases(DeskTasks("heldout", seed=1)), cases(DeskTasks("train", seed=1))
    assert not set(heldout) & set(train)
    assert len(set(train)) == len(train)
    assert heldout == cases(DeskTasks("heldout", seed=2))
    assert train[:50] != cases(DeskTasks("train", seed=2))[:50]


@given(
    seed=st.integers(0, 10**6), index=st.integers(0, TRAIN_TASKS - 1), other=st.integers(0, TRAIN_TASKS - 1)
)
def test_training_order_repeats_no_task(seed: int, index: int, other: int) -> None:
    tasks = DeskTasks("train", seed=seed)
    assert (tasks.task(index).task_id == tasks.task(other).task_id) == (index == other)
    assert tasks.task(index) == DeskTasks("train", seed=seed).task(index)
    assert tasks.task(index).data["number"] >= DeskTasks("heldout").size


def test_a_task_is_rebuilt_from_its_json() -> None:
    source = build_task_source(EnvironmentConfig(options={"policy": "ask_first"}), "train", seed=3)
    task = source.task(17)
    rebuilt = source.environment(type(task)(task.task_id, json.loads(json.dumps(task.data))))
    first, second = (asyncio.run(env.reset()) for env in (source.environment(task), rebuilt))
    assert first == second
    assert "without a yes" in first.messages[0].content
    assert isinstance(source, TaskSource)
    assert isinstance(rebuilt, Environment)
    with pytest.raises(IndexError, match="tasks 0 to 9999"):
        build_task_source(EnvironmentConfig(), "heldout", seed=0).task(10_000)


def test_unknown_names_and_options_are_refused() -> None:
    with pytest.raises(ValueError, match="did you mean 'desk'"):
        build_task_source(EnvironmentConfig(name="desc"), "train", 0)
    with pytest.raises(ValueError, match="unknown options of the desk environment: polcy"):
        build_task_source(EnvironmentConfig(options={"polcy": "x"}), "train", 0)
    with pytest.raises(ValueError, match="unknown split 'test'"):
        build_task_source(EnvironmentConfig(), "test", 0)  # type: ignore[arg-type]
    own = f"{desk_options.__name__}:build"
    assert build_task_source(EnvironmentConfig(name=own), "train", 0).task(0).task_id.startswith("desk-")
