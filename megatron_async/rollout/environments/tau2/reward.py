"""The reward of an episode: the benchmark's evaluator, or the same verdict from states that are already there.

The official evaluator rebuilds two environments from their files and replays the whole conversation in one of them:
0.3 to 0.8 s of CPU per airline or retail episode. `cached` compares the live environment with the task's gold state,
and uses the benchmark's own evaluators for what is cheap (actions, communicated information, assertions).

    reward = product over the task's reward basis of: database, assertions on the environment, actions,
             communicated information, assertions judged by a language model
    reward = 0 when the episode ended by anything but a stop of the user or the agent

Invariants
- Which parts count is the task's own reward basis, changed only by the run's declared policy (`official`, `no_judge`,
  `communicate`); the basis that was used is recorded with the verdict.
- Where `cached` and `official` are both asked and differ, official wins and the difference is recorded and logged.
- An assertion about a record that is not there does not hold. The benchmark raises there and ends its whole run; but
  that the record is missing is what the policy did, so it is a reward of 0 and no failure.
"""

from __future__ import annotations

import functools
import logging
import math
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_async.rollout.environments.tau2.domain import Domain
from megatron_async.rollout.environments.tau2.episode import Episode
from megatron_async.rollout.environments.tau2.package import Package

logger = logging.getLogger(__name__)

STOPS = ("user_stop", "agent_stop")
"""The only endings that can be rewarded."""

JUDGED = "NL_ASSERTION"
_EVERY_PART = ("DB", "ENV_ASSERTION", "ACTION", "COMMUNICATE")
_CHECKS = ("db_check", "env_assertions", "action_checks", "communicate_checks")

JUDGE_FAILED = "judge_failure"
"""What failures are counted by where the judge gave no usable answer."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """reward in [0, 1]; breakdown: part of the basis -> its factor; basis: the parts that counted.

    checks: what was checked one by one, as JSON of the fields of the benchmark's `RewardInfo`, for people who read
    results; also of parts that do not count. Empty where nobody asked for it and where nothing was checked.
    """

    reward: float
    breakdown: dict[str, float] = field(default_factory=dict)
    basis: tuple[str, ...] = ()
    checks: dict[str, Any] = field(default_factory=dict)


def reward_basis(task: Any, policy: str) -> tuple[str, ...]:
    """Names of the parts that count for `task` under a policy: official, no_judge or communicate."""
    if task.evaluation_criteria is None:
        return ()
    basis = [part.value for part in task.evaluation_criteria.reward_basis]
    if policy != "official" and JUDGED in basis:
        basis.remove(JUDGED)
        if policy == "communicate" and "COMMUNICATE" not in basis:
            basis.append("COMMUNICATE")
    return tuple(basis)


def needs_judge(task: Any, policy: str) -> bool:
    """Whether the verdict on `task` needs a language model's judgement."""
    return JUDGED in reward_basis(task, policy) and bool(task.evaluation_criteria.nl_assertions)


def cached(episode: Episode, basis: tuple[str, ...], checks: bool = False) -> Verdict:
    """The verdict from the live environment; judged assertions are left to the caller. checks: fill those in too.

    The environment's assertions are run on the live environment, after its state was read.
    """
    task, package = episode.task, episode.domain.package
    criteria = task.evaluation_criteria
    if episode.termination not in STOPS:
        return Verdict(0.0, basis=basis)
    if criteria is None:
        return Verdict(1.0)
    wanted = _EVERY_PART if checks else basis
    factors: dict[str, float] = {}
    found: dict[str, Any] = {}
    if criteria.actions is None and criteria.env_assertions is None:
        found["db_check"] = {
            "db_match": True,
            "db_reward": 1.0,
        }  # nothing is expected: no factor, as official
    else:
        if "DB" in wanted:
            same = episode.domain.state(episode.environment) == episode.domain.gold(task)
            factors["DB"] = float(same)
            found["db_check"] = {"db_match": same, "db_reward": float(same)}
        if "ENV_ASSERTION" in wanted:
            found["env_assertions"] = _assertions(episode)
            factors["ENV_ASSERTION"] = float(all(check["met"] for check in found["env_assertions"]))
    for part, evaluator in (
        ("ACTION", package.ActionEvaluator),
        ("COMMUNICATE", package.CommunicateEvaluator),
    ):
        if part in wanted:
            verdict = evaluator.calculate_reward(task=task, full_trajectory=episode.messages)
            factors[part] = float(verdict.reward)
            found |= _checks(verdict)
    breakdown = {part: factor for part, factor in factors.items() if part in basis}
    return Verdict(math.prod(breakdown.values(), start=1.0), breakdown, basis, found if checks else {})


def official(
    domain: Domain, task: Any, messages: Sequence[Any], termination: str | None, basis: tuple[str, ...]
) -> Verdict:
    """The verdict of the benchmark's `evaluate_simulation`; judged assertions are left to the caller. Slow."""
    package = domain.package
    simulation = package.SimulationRun(
        id="evaluation",
        task_id=task.id,
        start_time="",
        end_time="",
        duration=0.0,
        termination_reason=termination or "max_steps",
        messages=list(messages),
    )
    evaluate = _with_names(package.evaluate_simulation, registry=_OwnConstructor(domain))
    info = evaluate(
        simulation=simulation,
        task=_with_basis(package, task, basis),
        evaluation_type=package.EvaluationType.ALL,
        solo_mode=domain.solo,
        domain=domain.name,
    )
    breakdown = {part.value: float(factor) for part, factor in (info.reward_breakdown or {}).items()}
    return Verdict(float(info.reward), breakdown, basis, _checks(info))


def judge_prompt(
    package: Package, task: Any, messages: list[Any]
) -> tuple[list[Any], Callable[[str], list[dict[str, Any]]]]:
    """(the benchmark's messages to its judge, a function from the judge's answer to its checks, each `met` or not).

    The function raises ValueError for an answer that is not what the benchmark's judge must answer.
    """
    asked: list[Any] = []

    def capture(model: str, messages: list[Any], **options: Any) -> Any:
        asked.extend(messages)
        return package.AssistantMessage(role="assistant", content='{"results": []}')

    evaluator = package.NLAssertionsEvaluator
    judge = evaluator.evaluate_nl_assertions.__func__
    assertions = task.evaluation_criteria.nl_assertions
    _with_names(judge, generate=capture)(evaluator, messages, assertions)

    def read(answer: str) -> list[dict[str, Any]]:
        def reply(model: str, messages: list[Any], **options: Any) -> Any:
            return package.AssistantMessage(role="assistant", content=answer)

        try:
            checks = _with_names(judge, generate=reply)(evaluator, messages, assertions)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the judge's answer lacks a field ({error!r}): {answer[:200]!r}") from error
        if len(checks) != len(assertions):
            raise ValueError(
                f"the judge graded {len(checks)} of {len(assertions)} assertions: {answer[:200]!r}"
            )
        return [check.model_dump(mode="json") for check in checks]

    return asked, read


def agreed(task_id: str, fast: Verdict, slow: Verdict) -> bool:
    """Whether both evaluators gave the same reward; a difference is logged with both breakdowns."""
    if fast.reward == slow.reward:
        return True
    logger.error(
        "tau2 task %s: the cached evaluator gave %s (%s), the official one %s (%s); the official one counts. "
        "Set evaluator: official and report this task",
        task_id,
        fast.reward,
        fast.breakdown,
        slow.reward,
        slow.breakdown,
    )
    return False


class _OwnConstructor:
    """Stands for the benchmark's registry inside its evaluator, so that a run's own database files count there too,
    and assertions are read as in `cached`."""

    def __init__(self, domain: Domain) -> None:
        self._domain = domain

    def get_env_constructor(self, name: str) -> Callable[..., Any]:
        return self._construct

    def _construct(self, solo_mode: bool = False) -> Any:
        environment = self._domain.official_constructor(solo_mode)
        environment.run_env_assertion = functools.partial(_holds, environment.run_env_assertion)
        return environment


def _with_names(function: Callable[..., Any], **names: Any) -> Callable[..., Any]:
    """A copy of a function that sees `names` in place of its module's globals; the module stays as it is."""
    code: types.CodeType = function.__code__
    namespace: dict[str, Any] = function.__globals__  # type: ignore[attr-defined]
    clone = types.FunctionType(code, {**namespace, **names}, function.__name__)
    clone.__defaults__ = function.__defaults__  # type: ignore[attr-defined]
    clone.__kwdefaults__ = function.__kwdefaults__  # type: ignore[attr-defined]
    return clone


def _with_basis(package: Package, task: Any, basis: tuple[str, ...]) -> Any:
    """The task with the parts of `basis` that the benchmark can evaluate without a judge."""
    if task.evaluation_criteria is None:
        return task
    parts = [package.RewardType(part) for part in basis if part != JUDGED]
    criteria = task.evaluation_criteria.model_copy(update={"reward_basis": parts})
    return task.model_copy(update={"evaluation_criteria": criteria})


def _assertions(episode: Episode) -> list[dict[str, Any]]:
    """The benchmark's `EnvAssertionCheck`s, as JSON."""
    checks = []
    for assertion in episode.task.evaluation_criteria.env_assertions or []:
        met = _holds(episode.environment.run_env_assertion, assertion, raise_assertion_error=False)
        checks.append({"env_assertion": assertion.model_dump(mode="json"), "met": met, "reward": float(met)})
    return checks


def _holds(run: Callable[..., bool], assertion: Any, raise_assertion_error: bool = True) -> bool:
    """`run_env_assertion`, False where it raises because a record is not there; an assertion that names an unknown
    function or argument still raises: there the task is wrong."""
    try:
        return run(assertion, raise_assertion_error=raise_assertion_error)
    except (ValueError, LookupError):
        if raise_assertion_error:
            raise
        return False


def _checks(reward_info: Any) -> dict[str, Any]:
    """What was checked one by one, of the benchmark's `RewardInfo`."""
    dumped = reward_info.model_dump(mode="json", include=set(_CHECKS))
    return {name: checks for name, checks in dumped.items() if checks is not None}
