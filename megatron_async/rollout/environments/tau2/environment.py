"""tau2-bench as an environment: tasks of its splits, episodes step by step, its reward.

Invariants
- The policy sees what the benchmark's own agent sees: its system prompt, the greeting (which is not the policy's), the
  user's words and the results of its own calls, with the same tools.
- Limits, endings and rewards are the benchmark's; an ending other than a stop of the user or the agent scores 0.
- A failing user simulator or judge raises `EnvironmentFailure`; it never becomes a reward.
- Training never touches evaluation tasks unless the run says so, and then every reward of training says so too.
  Held-out tasks do not know who is evaluated on them and claim nothing about it (`training_record` does).
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_async.rollout.chat_endpoint import ChatEndpoint, EndpointError
from megatron_async.rollout.environments.base import (
    AssistantTurn,
    EnvironmentFailure,
    Message,
    Outcome,
    Split,
    Start,
    Step,
    Task,
    ToolCall,
)
from megatron_async.rollout.environments.tau2 import report, reward, workers
from megatron_async.rollout.environments.tau2.domain import Domain, DomainFiles
from megatron_async.rollout.environments.tau2.episode import ChatMessage, Episode, Limits, Pending, Said
from megatron_async.rollout.environments.tau2.options import Tau2Options, parse
from megatron_async.rollout.environments.tau2.reward import Verdict
from megatron_async.rollout.environments.tau2.stamp import labels, stamp
from megatron_async.rollout.environments.tau2.users import (
    EndpointUser,
    RecordedUser,
    ScriptedUser,
    User,
    load_recordings,
)


@dataclass(frozen=True)
class Tau2Context:
    """What the episodes of one split share."""

    options: Tau2Options
    domain: Domain
    split: Split
    user_endpoint: ChatEndpoint | None
    judge: ChatEndpoint | None
    recordings: dict[str, list[dict[str, Any]]]
    system_prompt: str

    @cached_property
    def records(self) -> bool:
        """Whether transcripts are kept."""
        recorded = self.options.record_transcript
        return self.split == "heldout" if recorded is None else recorded


class Tau2Environment:
    """One episode of one task."""

    def __init__(self, context: Tau2Context, task: Any, stamp: Mapping[str, Any]) -> None:
        options = context.options
        limits = Limits(options.max_steps, options.max_errors, options.enforce_communication_protocol)
        self.context = context
        self.episode = Episode(context.domain, task, limits)
        self._stamp = dict(stamp)
        self._user = _user(context, task)
        self._malformed: str | None = None
        self._judge_repeats = 0

    async def reset(self) -> Start:
        """The system prompt, the greeting, and the user's first words. EnvironmentFailure if the user cannot speak."""
        pending = await self._let_user_speak(self.episode.start())
        if pending.turn == "done":
            raise EnvironmentFailure(
                f"the episode ended before the agent's first turn ({pending.termination})"
            )
        return Start(
            [Message("system", self._system_prompt()), *map(_message, pending.messages)], self._tools()
        )

    async def step(self, turn: AssistantTurn) -> Step:
        """The results of the agent's calls, or the user's answer. A malformed turn ends the episode (agent_error)."""
        if turn.parse_error is not None:
            self._malformed = turn.parse_error
            return _step(self.episode.fail_agent(turn.content))
        calls = tuple((call.name, call.arguments) for call in turn.tool_calls)
        return _step(await self._let_user_speak(self.episode.agent(Said(turn.content, calls))))

    async def reward(self) -> tuple[float, dict[str, Any]]:
        """The benchmark's reward, with the parts it is made of and everything that a report must say about it."""
        options, episode = self.context.options, self.episode
        basis = reward.reward_basis(episode.task, options.reward_basis)
        verdict, check = await self._verdict(basis)
        if episode.termination in reward.STOPS and reward.needs_judge(episode.task, options.reward_basis):
            verdict = _with_judgement(verdict, await self._judged())
        info = {
            **self._stamp,
            "reward_basis": list(verdict.basis),
            "breakdown": verdict.breakdown,
            "termination": episode.termination or "cut",
            "steps": episode.steps,
            "tool_errors": episode.tool_errors,
            **check,
        }
        if self._malformed is not None:
            info["parse_error"] = self._malformed
        if isinstance(self._user, EndpointUser):
            info["user_tokens"] = [self._user.prompt_tokens, self._user.completion_tokens]
            info["user_repeats"] = self._user.repeats
        if self.context.judge is not None:
            info["judge_repeats"] = self._judge_repeats
        if self.context.records:
            info["checks"] = verdict.checks
            info["transcript"] = episode.transcript()
        return verdict.reward, info

    async def close(self) -> None:
        """Close the user's connections."""
        if self._user is not None:
            await self._user.close()

    # ------------------------------------------------------------------ inside

    async def _let_user_speak(self, pending: Pending) -> Pending:
        while pending.turn == "user":
            if self._user is None:
                raise EnvironmentFailure("the benchmark waits for a user in solo mode")
            said = await self._user.answer(pending.messages, self.episode.user_tool_schemas())
            pending = self.episode.user(said)
        return pending

    def _system_prompt(self) -> str:
        own = self.context.system_prompt
        if not own:
            return self.episode.system_prompt
        ticket = self.episode.task.ticket or ""
        return own.replace("{policy}", self.context.domain.policy).replace("{ticket}", ticket)

    def _tools(self) -> list[dict[str, Any]]:
        schemas = self.episode.tool_schemas()
        return [_shortened(schema) for schema in schemas] if self._short_tools() else schemas

    def _short_tools(self) -> bool:
        return self.context.options.tool_descriptions == "short"

    async def _verdict(self, basis: tuple[str, ...]) -> tuple[Verdict, dict[str, Any]]:
        """The verdict without judged assertions, and what was checked. The slow evaluator runs off the event loop."""
        options, episode = self.context.options, self.episode
        if options.evaluator == "official":
            verdict = await workers.official(episode, basis, options.official_processes)
            return verdict, {"evaluator": "official"}
        fast = reward.cached(episode, basis, checks=self.context.records)
        if episode.termination is None or not self._drawn(options.verify_official):
            return fast, {"evaluator": "cached"}
        slow = await workers.official(episode, basis, options.official_processes)
        agreed = reward.agreed(episode.task.id, fast, slow)
        return slow, {"evaluator": "cached", "official_reward": slow.reward, "official_agrees": agreed}

    def _drawn(self, share: float) -> bool:
        """Whether this episode is checked: by what was said, so that repeating a run checks the same episodes."""
        said = repr([(message.role, message.content) for message in self.episode.messages])
        digest = hashlib.sha256(f"{self.episode.task.id} {said}".encode()).digest()
        return int.from_bytes(digest[:8], "big") < share * 2**64

    async def _judged(self) -> list[dict[str, Any]]:
        endpoint, domain = self.context.judge, self.context.domain
        if endpoint is None:
            raise EnvironmentFailure(
                "this task's reward needs a judge: set judge.url, or reward_basis: no_judge"
            )
        asked, read = reward.judge_prompt(domain.package, self.episode.task, self.episode.messages)
        messages = [{"role": message.role, "content": message.content} for message in asked]
        async with endpoint.session() as session:
            try:
                return await endpoint.complete(
                    session, messages, [], lambda answer: read(answer.content), self._judge_repeated
                )
            except EndpointError as error:
                raise EnvironmentFailure(f"judge: {error}", reward.JUDGE_FAILED) from error

    def _judge_repeated(self) -> None:
        self._judge_repeats += 1


class Tau2Tasks:
    """Tasks of one split of one domain. The train split is shuffled by the run's seed; held-out order is the file's."""

    def __init__(self, options: Tau2Options, split: Split, seed: int) -> None:
        """Raises Tau2NotInstalled, and ValueError for options that do not fit the domain."""
        self.split: Split = split
        self.options = options
        domain = _domain(options, split)
        self._ids, shared = _task_ids(options, split)
        self._stamp = stamp(options, split, domain.package.label, shared)
        if split == "train":
            random.Random(f"tau2 order {seed}").shuffle(self._ids)
        judged = [i for i in self._ids if reward.needs_judge(domain.tasks[i], options.reward_basis)]
        if judged and not options.judge.url:
            raise ValueError(
                f"tau2: {len(judged)} of {len(self._ids)} {options.domain} tasks need a language model as judge: set "
                "judge.url, or reward_basis: no_judge (leaves those assertions out) or communicate"
            )
        prompt = options.system_prompt_file
        by_endpoint = options.user.kind == "endpoint" and not options.solo
        recorded = options.user.kind == "recorded" and not options.solo
        self.context = Tau2Context(
            options=options,
            domain=domain,
            split=split,
            user_endpoint=ChatEndpoint(options.user.endpoint) if by_endpoint else None,
            judge=ChatEndpoint(options.judge) if options.judge.url else None,
            recordings=load_recordings(options.user.transcripts) if recorded else {},
            system_prompt=Path(prompt).read_text(encoding="utf-8") if prompt else "",
        )

    @property
    def size(self) -> int:
        """Number of tasks in the split."""
        return len(self._ids)

    def task(self, index: int) -> Task:
        """Task `index`; IndexError past the end."""
        if not 0 <= index < self.size:
            raise IndexError(f"tau2 task {index}: the {self.split} split has tasks 0 to {self.size - 1}")
        task_id = self._ids[index]
        mode = "-solo" if self.options.solo else ""
        data = {"id": task_id, **self.stamp(), "identity": _identity(self.options, task_id)}
        return Task(f"tau2-{self.options.domain}{mode}-{task_id}", data)

    def environment(self, task: Task) -> Tau2Environment:
        """A fresh episode of `task`."""
        said = {name: value for name, value in task.data.items() if name not in ("id", "identity")}
        return Tau2Environment(
            self.context, self.context.domain.tasks[task.data["id"]], {"task": task.data["id"], **said}
        )

    def replayable(self, task: Task) -> bool:
        """Whether the same turns get the same answers: without a language model as user."""
        return self.options.solo or self.options.user.kind != "endpoint"

    def report(self, outcomes: Sequence[Outcome], samples: int, folder: Path) -> dict[str, Any]:
        """Results in the benchmark's own format and a page for people; needs recorded transcripts."""
        return report.write(self.context.domain, self.options, self.stamp(), outcomes, samples, folder)

    def stamp(self) -> dict[str, Any]:
        """What every report about these tasks must say."""
        return dict(self._stamp)

    def described(self) -> dict[str, Any]:
        """Which tasks these are, and how many of them are in each split of the benchmark."""
        options, chosen = self.options, set(self._ids)
        of_splits = {name: len(chosen & set(ids)) for name, ids in self.context.domain.splits().items()}
        return {
            **self.stamp(),
            "exclude_splits": list(options.exclude_splits),
            "train_on_evaluation_tasks": options.train_on_evaluation_tasks,
            "tasks_by_split": {name: count for name, count in of_splits.items() if count},
        }

    def folder_name(self) -> str:
        """Domain, mode, split, and whether prompt or tasks are own ones, e.g. "tau2-telecom-solo-test-own_prompt"."""
        said, parts = self._stamp, ["tau2", self.options.domain]
        if said["solo"]:
            parts.append("solo")
        parts.append(said["split"])
        if said["prompt"] != "benchmark":
            parts.append("own_prompt")
        if "task_file" in said or "heldout_task_file" in said:
            parts.append("own_tasks")
        return "-".join(parts)

    def labels(self) -> dict[str, str]:
        """What makes a number about these tasks incomparable with the benchmark's, in words; empty if nothing does."""
        return labels(self._stamp)


def build(options: Mapping[str, Any], split: Split, seed: int) -> Tau2Tasks:
    """Factory of the environment registry: see `options.Tau2Options` for the options."""
    return Tau2Tasks(parse(options), split, seed)


def _domain(options: Tau2Options, split: Split) -> Domain:
    tasks = options.task_file
    if split == "heldout" and options.heldout_task_file:
        tasks = options.heldout_task_file
    return workers.load_domain(
        options.domain, options.solo, DomainFiles(tasks, options.database_file, options.user_database_file)
    )


def _task_ids(options: Tau2Options, split: Split) -> tuple[list[str], int]:
    """(ids of the split, how many training tasks are evaluation tasks; 0 for the held-out split, which does not know
    whom it is to evaluate). ValueError if training is to use some unasked, or has none left.

    Ids are compared, whatever the splits and files that they come from are called.
    """
    heldout = _heldout_ids(options)
    if split == "heldout":
        return heldout, 0
    train = _training_ids(options)
    evaluation = set(heldout) | set(_domain(options, "train").splits().get("test", ()))
    shared = len(evaluation & set(train))
    if shared and not options.train_on_evaluation_tasks:
        raise ValueError(
            f"tau2: {shared} of {len(train)} training tasks (train_split: {options.train_split}) are evaluation tasks "
            f"(heldout_split: {options.heldout_split}{_of_file(options)}, or test): train on another split, add "
            "exclude_splits: [test], or set train_on_evaluation_tasks: true, which every report will say"
        )
    if not train:
        raise ValueError(f"tau2: no training tasks are left of {options.train_split} after exclude_splits")
    return train, shared


def _training_ids(options: Tau2Options) -> list[str]:
    domain = _domain(options, "train")
    excluded = {task_id for name in options.exclude_splits for task_id in domain.split(name)}
    chosen = [task_id for task_id in domain.split(options.train_split) if task_id not in excluded]
    return [task_id for task_id in chosen if _playable(options, domain, task_id)]


def _heldout_ids(options: Tau2Options) -> list[str]:
    domain = _domain(options, "heldout")
    return [task_id for task_id in domain.split(options.heldout_split) if _playable(options, domain, task_id)]


def _identity(options: Tau2Options, task_id: str) -> str:
    """The same for a task with and without a user, and for telecom's two ways of stating the policy."""
    return f"tau2-{options.domain.removesuffix('-workflow')}-{task_id}"


def _of_file(options: Tau2Options) -> str:
    return f" of {options.heldout_task_file}" if options.heldout_task_file else ""


def _playable(options: Tau2Options, domain: Domain, task_id: str) -> bool:
    """In solo mode the benchmark plays only tasks that have what a solo agent needs."""
    return not options.solo or bool(domain.package.LLMSoloAgent.check_valid_task(domain.tasks[task_id]))


def _user(context: Tau2Context, task: Any) -> User | None:
    options = context.options
    if options.solo:
        return None
    if context.user_endpoint is not None:
        return EndpointUser(context.user_endpoint)
    if options.user.kind == "scripted":
        return ScriptedUser(str(task.user_scenario))
    return RecordedUser(context.recordings.get(task.id, ()))


def _with_judgement(verdict: Verdict, checks: list[dict[str, Any]]) -> Verdict:
    met = float(all(check["met"] for check in checks))
    return replace(
        verdict,
        reward=verdict.reward * met,
        breakdown={**verdict.breakdown, reward.JUDGED: met},
        checks={**verdict.checks, "nl_assertions": checks},
    )


def _step(pending: Pending) -> Step:
    done = pending.turn == "done"
    return Step(list(map(_message, pending.messages)), done, truncated=pending.termination == "max_steps")


def _message(message: ChatMessage) -> Message:
    calls = tuple(
        ToolCall(call["function"]["name"], _loads(call["function"]["arguments"]), call["id"])
        for call in message.get("tool_calls", ())
    )
    return Message(message["role"], message["content"], calls)


def _loads(arguments: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(arguments)
    return value


def _shortened(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with one line of description and without descriptions of parameters."""
    function = schema["function"]
    parameters = function["parameters"]
    short = {
        name: {key: value for key, value in spec.items() if key not in ("description", "title")}
        for name, spec in parameters.get("properties", {}).items()
    }
    kept = {key: value for key, value in parameters.items() if key not in ("title", "description")}
    return {
        "type": "function",
        "function": {
            "name": function["name"],
            "description": function["description"].split("\n", 1)[0],
            "parameters": {**kept, "properties": short},
        },
    }
