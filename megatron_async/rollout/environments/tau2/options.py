"""The options of the tau2 environment: every key of `environment.options`, with its meaning and its consequence."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from megatron_async.rollout.chat_endpoint import EndpointOptions

DOMAINS = ("airline", "retail", "telecom", "telecom-workflow", "mock")
USERS = ("endpoint", "scripted", "recorded")
EVALUATORS = ("cached", "official")
BASES = ("official", "no_judge", "communicate")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class UserOptions:
    """Who plays the user.

    kind: "endpoint" (the benchmark's simulator prompt on a model), "scripted" (does what it is told, for tests and
    demonstrations; no leaderboard number) or "recorded" (replays the user messages of `transcripts`, a results file
    of the benchmark). Solo mode has no user.
    """

    kind: str = "endpoint"
    endpoint: EndpointOptions = EndpointOptions()
    transcripts: str = ""


@dataclass(frozen=True, slots=True)
class Tau2Options:
    """Options of `environment.name: tau2`.

    domain: one of DOMAINS. solo: the agent works a ticket alone with the user's tools (telecom, mock).
    train_split, heldout_split: names of the benchmark's task splits. exclude_splits: training tasks that are also in
    one of these are left out. train_on_evaluation_tasks: allow training tasks that are in `test` or in the held-out
    split; results are then stamped as such and are no benchmark numbers.
    task_file, heldout_task_file: own tasks in the benchmark's format (a `split_<name>.json` beside gives splits);
    database_file, user_database_file: own databases.
    max_steps, max_errors: the benchmark's limits on messages and on failed tool calls.
    enforce_communication_protocol: end with agent_error when a message has both text and tool calls.
    evaluator: "cached" compares the live state with the gold state; "official" runs the benchmark's evaluator.
    verify_official: share of episodes for which "cached" is checked against the official evaluator, which wins.
    official_processes: worker processes for the official evaluator; 0 uses a thread, enough for sampled checks.
    reward_basis: "official"; "no_judge" leaves out assertions that need a language model as judge; "communicate" puts
    the check for communicated information in their place.
    system_prompt_file: replaces the benchmark's system prompt ({policy} and {ticket} are filled in); recorded, since
    such a number cannot be compared with the leaderboard. tool_descriptions: "full", or "short" for small contexts.
    python: another interpreter to run the benchmark under, e.g. /opt/tau2/bin/python, in a process of its own: for
    dependencies that clash, and for releases that need a newer Python ("" runs it in this process).
    record_transcript: keep the messages, and what was checked one by one, in the trajectory's info (None: only on the
    held-out split).
    """

    domain: str = "retail"
    solo: bool = False
    train_split: str = "train"
    heldout_split: str = "test"
    exclude_splits: tuple[str, ...] = ()
    train_on_evaluation_tasks: bool = False
    task_file: str = ""
    heldout_task_file: str = ""
    database_file: str = ""
    user_database_file: str = ""
    max_steps: int = 200
    max_errors: int = 10
    enforce_communication_protocol: bool = False
    evaluator: str = "cached"
    verify_official: float = 0.02
    official_processes: int = 0
    reward_basis: str = "official"
    system_prompt_file: str = ""
    tool_descriptions: str = "full"
    python: str = ""
    record_transcript: bool | None = None
    user: UserOptions = UserOptions()
    judge: EndpointOptions = EndpointOptions()


def parse(options: Mapping[str, Any]) -> Tau2Options:
    """Options from a configuration's mapping; ValueError names an unknown key or an impossible value."""
    values = dict(options)
    user = dict(values.pop("user", {}))
    endpoint = _build(EndpointOptions, dict(user.pop("endpoint", {})), "user.endpoint.")
    values["user"] = _build(UserOptions, {**user, "endpoint": endpoint}, "user.")
    values["judge"] = _build(EndpointOptions, dict(values.pop("judge", {})), "judge.")
    values["exclude_splits"] = tuple(values.get("exclude_splits", ()))
    result = _build(Tau2Options, values, "")
    _check(result)
    return result


def _build(kind: type[T], values: dict[str, Any], prefix: str) -> T:
    known = {item.name for item in fields(kind)}  # type: ignore[arg-type]
    for name in sorted(set(values) - known):
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {prefix}{near[0]}?" if near else ""
        raise ValueError(
            f"unknown option {prefix}{name} of the tau2 environment{hint} Known: {', '.join(sorted(known))}"
        )
    return kind(**values)


def _check(options: Tau2Options) -> None:
    for name, value, known in (
        ("domain", options.domain, DOMAINS),
        ("user.kind", options.user.kind, USERS),
        ("evaluator", options.evaluator, EVALUATORS),
        ("reward_basis", options.reward_basis, BASES),
        ("tool_descriptions", options.tool_descriptions, ("full", "short")),
    ):
        if value not in known:
            raise ValueError(f"tau2: {name}={value!r}; known: {', '.join(known)}")
    if options.solo and options.domain not in ("telecom", "telecom-workflow", "mock"):
        raise ValueError(f"tau2: the {options.domain} domain has no solo mode (its tasks have no tickets)")
    if not 0.0 <= options.verify_official <= 1.0:
        raise ValueError(f"tau2: verify_official={options.verify_official} is a share between 0 and 1")
    if options.official_processes < 0:
        raise ValueError(f"tau2: official_processes={options.official_processes} must not be negative")
    if options.max_steps < 1 or options.max_errors < 1:
        raise ValueError(
            f"tau2: max_steps={options.max_steps}, max_errors={options.max_errors} must be at least 1"
        )
    if not options.solo and options.user.kind == "endpoint" and not options.user.endpoint.url:
        raise ValueError(
            "tau2: user.endpoint.url is missing: give an OpenAI-compatible endpoint for the user simulator "
            "(http://host:port/v1), or set user.kind to scripted or recorded, or solo to true"
        )
    if options.user.kind == "recorded" and not options.user.transcripts:
        raise ValueError("tau2: user.kind=recorded needs user.transcripts, a results file of the benchmark")
