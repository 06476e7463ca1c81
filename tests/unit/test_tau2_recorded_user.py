"""The recorded user: an exact replay gets the recorded reward, anything else gets none."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_async.rollout.environments.base import EnvironmentFailure
from megatron_async.rollout.environments.tau2.episode import Said
from megatron_async.rollout.environments.tau2.users import STOP
from tests.unit.tau2_support import altered, play, requires_tau2, sample_ids
from tests.unit.test_tau2_episode import comparable, environment_of, source_of

pytestmark = requires_tau2

ROAMING = "[mobile_data_issue]airplane_mode_on|user_abroad_roaming_enabled_off[PERSONA:None]"
"""A telecom task that its user solves with tools of its own."""

Transcript = list[dict[str, Any]]


def gold(name: str, task_id: str) -> list[Said]:
    return altered(source_of(name).context.domain.tasks[task_id], "gold", False)


def record(name: str, task_id: str) -> tuple[float, dict[str, Any]]:
    return asyncio.run(play(environment_of(source_of(name), task_id), gold(name, task_id)))


def replay(
    folder: Path, name: str, task_id: str, messages: Transcript, turns: list[Said], **options: str
) -> tuple[float, dict[str, Any]]:
    """Play `turns` to the user of `messages`."""
    path = folder / "results.json"
    path.write_text(json.dumps({"simulations": [{"task_id": task_id, "messages": messages}]}))
    source = source_of(name, user={"kind": "recorded", "transcripts": str(path)}, **options)
    return asyncio.run(play(environment_of(source, task_id), turns))


@pytest.mark.parametrize("name", ["retail", "telecom"])
def test_an_exact_replay_is_the_recorded_episode(name: str, tmp_path: Path) -> None:
    task_id = ROAMING if name == "telecom" else sample_ids("retail", 1)[0]
    reward, info = record(name, task_id)
    again, told = replay(tmp_path, name, task_id, info["transcript"], gold(name, task_id))
    assert again == reward == 1.0
    assert [comparable(m) for m in told["transcript"]] == [comparable(m) for m in info["transcript"]]


def test_an_agent_that_says_other_words_gets_no_reward(tmp_path: Path) -> None:
    """The user's own tools solve this task: lines said to nobody would be worth 1 to any agent."""
    messages = record("telecom", ROAMING)[1]["transcript"]
    turns = gold("telecom", ROAMING)
    with pytest.raises(
        EnvironmentFailure, match=r"before its message 2 .* heard agent: 'Please do .*; now .*'blah'"
    ):
        replay(tmp_path, "telecom", ROAMING, messages, [Said("blah")] * 20)
    spoken = [index for index, said in enumerate(turns) if not said.calls]
    for index in spoken:
        changed = [*turns[:index], Said(turns[index].content + " Now."), *turns[index + 1 :]]
        with pytest.raises(EnvironmentFailure, match=r"now it heard agent: '.* Now\.'"):
            replay(tmp_path, "telecom", ROAMING, messages, changed)
    assert len(spoken) > 2


def test_a_tool_of_the_user_that_answers_otherwise_is_noticed(tmp_path: Path) -> None:
    messages = record("telecom", ROAMING)[1]["transcript"]
    results = [
        message for message in messages if message["role"] == "tool" and message["requestor"] == "user"
    ]
    results[-1]["content"] = "x" * 1000 + results[-1]["content"]
    with pytest.raises(
        EnvironmentFailure, match=r"heard tool: 'x{120}\.\.\.'; now it heard tool: '[^x]"
    ) as error:
        replay(tmp_path, "telecom", ROAMING, messages, gold("telecom", ROAMING))
    assert len(str(error.value)) < 500


def test_a_recording_that_is_shorter_or_missing_is_another_course(tmp_path: Path) -> None:
    task_id = sample_ids("retail", 1)[0]
    messages = record("retail", task_id)[1]["transcript"]
    shorter = [message for message in messages if STOP not in (message["content"] or "")]
    with pytest.raises(EnvironmentFailure, match="has 1 user messages and the conversation needs another"):
        replay(tmp_path, "retail", task_id, shorter, gold("retail", task_id))
    with pytest.raises(EnvironmentFailure, match="has 0 user messages"):
        replay(tmp_path, "retail", task_id, [], [Said("a")])


def test_lines_of_a_tasks_history_are_not_said_again(tmp_path: Path) -> None:
    task_id, splits = (
        "update_task_with_history_and_env_assertions",
        {"train_split": "all", "heldout_split": "all"},
    )
    history = source_of("mock", **splits).context.domain.tasks[task_id].initial_state.message_history
    said = [json.loads(message.model_dump_json()) for message in history]
    more = [{"role": "user", "content": "Mark it."}, {"role": "assistant", "content": "Done."}]
    messages = [*said, *more, {"role": "user", "content": STOP}]
    update = Said(calls=(("update_task_status", {"task_id": "task_2", "status": "completed"}),))
    reward, info = replay(tmp_path, "mock", task_id, messages, [update, Said("Done.")], **splits)
    assert (reward, info["termination"]) == (1.0, "user_stop")
    with pytest.raises(EnvironmentFailure, match="agent: 'Done.'; now it heard agent: 'Did it.'"):
        replay(tmp_path, "mock", task_id, messages, [update, Said("Did it.")], **splits)
