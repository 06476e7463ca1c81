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
"""

from __future__ import annotations

import logging
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

JUDGE_FAILED = "judge_failure"
"""What failures are counted by where the judge gave no usable answer."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """reward in [0, 1]; breakdown: part of the basis -> its factor; basis: the parts that counted."""

    reward: float
    breakdown: dict[str, float] = field(default_factory=dict)
    basis: tuple[str, ...] = ()


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


def cached(episode: Episode, basis: tuple[str, ...]) -> Verdict:
    """The verdict from the live environment; judged assertions are left to the caller.

    The environment's assertions are run on the live environment, after its state was read.
    """
    task, package = episode.task, episode.domain.package
    criteria = task.evaluation_criteria
    if episode.termination not in STOPS:
        return Verdict(0.0, basis=basis)
    if criteria is None:
        return Verdict(1.0)
    breakdown: dict[str, float] = {}
    nothing_expected = criteria.actions is None and criteria.env_assertions is None
    if not nothing_expected:
        if "DB" in basis:
            same = episode.domain.state(episode.environment) == episode.domain.gold(task)
            breakdown["DB"] = float(same)
        if "ENV_ASSERTION" in basis:
            breakdown["ENV_ASSERTION"] = float(_assertions_hold(episode))
    for part, evaluator in (
        ("ACTION", package.ActionEvaluator),
        ("COMMUNICATE", package.CommunicateEvaluator),
    ):
        if part in basis:
            verdict = evaluator.calculate_reward(task=task, full_trajectory=episode.messages)
            breakdown[part] = float(verdict.reward)
    return Verdict(_product(breakdown), breakdown, basis)


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
    return Verdict(float(info.reward), breakdown, basis)


def judge_prompt(
    package: Package, task: Any, messages: list[Any]
) -> tuple[list[Any], Callable[[str], float]]:
    """(the benchmark's messages to its judge, a function from the judge's answer to 0 or 1).

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

    def read(answer: str) -> float:
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
        return float(all(check.met for check in checks))

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
    """Stands for the benchmark's registry inside its evaluator, so that a run's own database files count there too."""

    def __init__(self, domain: Domain) -> None:
        self._domain = domain

    def get_env_constructor(self, name: str) -> Callable[..., Any]:
        return self._domain.official_constructor


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


def _assertions_hold(episode: Episode) -> bool:
    results = [
        episode.environment.run_env_assertion(assertion, raise_assertion_error=False)
        for assertion in episode.task.evaluation_criteria.env_assertions or []
    ]
    return all(results)


def _product(breakdown: dict[str, float]) -> float:
    result = 1.0
    for factor in breakdown.values():
        result *= factor
    return result
