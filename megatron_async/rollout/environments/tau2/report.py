"""Evaluation results in the benchmark's own format, and what a reader must know beside the success rate.

    <folder>/tau2-<domain>[-solo].json    the benchmark's `Results`: its viewer, metrics and leaderboard tools read it
    <folder>/tau2-<domain>[-solo].md      the same for people: pass^k, pass@k, floor, endings, costs

Invariants
- The JSON passes the benchmark's own validation, and its own `compute_metrics` gives our pass^k, also where tasks lack
  trials. Its viewer finds what was checked one by one where the benchmark writes it.
- The floor (what doing nothing scores on the same tasks), who was evaluated, what was left out, and everything that
  makes a number incomparable (own prompt, scripted user, another reward basis, trained on evaluation tasks) stand in
  the same report.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron_async.labels import TRAINED_ON, describe_labels
from megatron_async.rollout.environments.base import Outcome
from megatron_async.rollout.environments.tau2 import reward, users
from megatron_async.rollout.environments.tau2.domain import Domain
from megatron_async.rollout.environments.tau2.floor import floor
from megatron_async.rollout.environments.tau2.options import Tau2Options
from megatron_async.rollout.environments.tau2.stamp import labels
from megatron_async.rollout.estimators import (
    interval,
    intervals_over_tasks,
    over_tasks,
    pass_at_k,
    pass_hat_k,
)
from megatron_async.rollout.evaluation_statistics import describe_passes, describe_subject
from megatron_async.rollout.evaluation_subject import read_subject

SUCCESS = 1.0 - 1e-6
"""The benchmark's own threshold for success."""

ENDINGS = {"cut": "max_steps"}
"""Our endings that the benchmark has no name for: cut by the run's limits on turns, tokens or time."""


def write(
    domain: Domain,
    options: Tau2Options,
    stamp: Mapping[str, Any],
    outcomes: Sequence[Outcome],
    samples: int,
    folder: Path,
) -> dict[str, Any]:
    """Write both files; returns the summary for the evaluation's row. Who was evaluated is read from the folder."""
    name = f"tau2-{options.domain}{'-solo' if options.solo else ''}"
    stated = read_subject(folder)
    unusual = {**labels(stamp), **stated.get("labels", {})}
    noted = {**stamp, "labels": unusual}
    results = benchmark_results(domain, options, outcomes, samples, stated.get("subject", {}), noted)
    (folder / f"{name}.json").write_text(results.model_dump_json(indent=2), encoding="utf-8")
    summary = {**stamp, **summarise(domain, options, outcomes, samples)}
    summary |= _model_errors(options, outcomes, stated.get("failed_attempts", {}))
    if TRAINED_ON in unusual:
        summary[TRAINED_ON] = int(unusual[TRAINED_ON])
    page = markdown(summary, {**_lacking(outcomes, samples), **stated, "labels": unusual})
    (folder / f"{name}.md").write_text(page, encoding="utf-8")
    return {**summary, "results": f"{name}.json"}


def summarise(
    domain: Domain, options: Tau2Options, outcomes: Sequence[Outcome], samples: int
) -> dict[str, Any]:
    """The summary as JSON."""
    by_task: dict[str, list[bool]] = defaultdict(list)
    for outcome in outcomes:
        by_task[outcome.task.data["id"]].append(outcome.reward >= SUCCESS)
    rates = [fmean(group) for group in by_task.values()]
    compared = [outcome.info["official_agrees"] for outcome in outcomes if "official_agrees" in outcome.info]
    nothing = floor(domain, by_task, options.reward_basis)
    return {
        "tasks": len(by_task),
        "episodes": len(outcomes),
        "success_rate": fmean(rates),
        "confidence_95": interval(rates),
        "pass_hat": over_tasks(by_task.values(), samples, pass_hat_k),
        "pass_at": over_tasks(by_task.values(), samples, pass_at_k),
        "pass_hat_95": intervals_over_tasks(by_task.values(), samples, pass_hat_k),
        "pass_at_95": intervals_over_tasks(by_task.values(), samples, pass_at_k),
        "floor": nothing.rate,
        "terminations": dict(Counter(str(outcome.info.get("termination")) for outcome in outcomes)),
        "evaluator": options.evaluator,
        "evaluator_comparisons": len(compared),
        "evaluator_disagreements": compared.count(False),
        "user_model": _user_model(options) or "none",
        "judge_model": options.judge.model if options.judge.url else "none",
        "tokens_per_episode": fmean(outcome.tokens for outcome in outcomes),
        "turns_per_episode": fmean(outcome.turns for outcome in outcomes),
        "tool_errors_per_episode": fmean(outcome.info.get("tool_errors", 0) for outcome in outcomes),
        "user_tokens": [
            sum(outcome.info.get("user_tokens", [0, 0])[part] for outcome in outcomes) for part in (0, 1)
        ],
    }


def markdown(summary: Mapping[str, Any], stated: Mapping[str, Any]) -> str:
    """The summary as a page. stated: about whom it is, what it lacks, labels; as of `EvaluationResult.stated`."""
    mode = ", solo" if summary["solo"] else ""
    interval = summary["confidence_95"]
    lines = [
        f"# {summary['domain']}{mode}, split {summary['split']}",
        "",
        f"Success {summary['success_rate']:.1%}"
        + (f" (95 % interval {interval[0]:.1%} to {interval[1]:.1%})" if interval else "")
        + f" on {summary['tasks']} tasks, {summary['episodes']} episodes. "
        f"**Doing nothing scores {summary['floor']:.1%}.**",
        *describe_labels(stated["labels"]),
        "",
        *describe_subject(stated, summary),
        "",
        *describe_passes(summary),
        "",
        "| ending | episodes |",
        "|---|---|",
        *(f"| {ending} | {count} |" for ending, count in sorted(summary["terminations"].items())),
        "",
        f"Per episode: {summary['turns_per_episode']:.1f} turns, {summary['tokens_per_episode']:.0f} tokens, "
        f"{summary['tool_errors_per_episode']:.2f} failed tool calls.",
        f"Benchmark {summary['benchmark']}, user: {summary['user']}, prompt: {summary['prompt']}, reward basis: "
        f"{summary['reward_policy']}. {_evaluators(summary)}",
    ]
    if "user_errors" in summary:
        tokens = summary["user_tokens"]
        used = f"{tokens[0]} prompt and {tokens[1]} completion tokens"
        lines.append(f"User simulator: {_told(summary['user_errors'])}; {used}.")
    if "judge_errors" in summary:
        lines.append(f"Judge: {_told(summary['judge_errors'])}.")
    return "\n".join(lines) + "\n"


def _model_errors(
    options: Tau2Options, outcomes: Sequence[Outcome], failed_attempts: Mapping[str, int]
) -> dict[str, Any]:
    """For user and judge, where a model plays them: requests of the counted episodes that were repeated, and attempts
    at an episode that ended because no usable answer came. failed_attempts: as of `EvaluationResult`."""
    asked = {
        "user": (_user_model(options) is not None, users.FAILED),
        "judge": (bool(options.judge.url), reward.JUDGE_FAILED),
    }
    return {
        f"{who}_errors": {
            "repeated": sum(outcome.info.get(f"{who}_repeats", 0) for outcome in outcomes),
            "unanswered": failed_attempts.get(kind, 0),
        }
        for who, (is_model, kind) in asked.items()
        if is_model
    }


def _told(errors: Mapping[str, int]) -> str:
    return (
        f"{errors['repeated']} requests of these episodes repeated, {errors['unanswered']} attempts at an episode "
        "given up (not counted: played again, or left out)"
    )


def _evaluators(summary: Mapping[str, Any]) -> str:
    if summary["evaluator"] == "official":
        return "The benchmark's own evaluator judged every episode."
    compared = summary["evaluator_comparisons"]
    if not compared:
        return "Our evaluator judged; on no episode was it compared with the benchmark's own."
    differed = summary["evaluator_disagreements"]
    return f"Our evaluator and the benchmark's own disagreed on {differed} of {compared} episodes compared."


def _lacking(outcomes: Sequence[Outcome], samples: int) -> dict[str, int]:
    """What the tasks with outcomes lack, where nobody has stated what was asked for."""
    trials = Counter(outcome.task.task_id for outcome in outcomes)
    return {
        "short_tasks": sum(count < samples for count in trials.values()),
        "left_out": len(trials) * samples - len(outcomes),
    }


def _user_model(options: Tau2Options) -> str | None:
    """Name of the model that plays the user; None where none does."""
    if options.solo or options.user.kind != "endpoint":
        return None
    return options.user.endpoint.model


def benchmark_results(
    domain: Domain,
    options: Tau2Options,
    outcomes: Sequence[Outcome],
    samples: int,
    subject: Mapping[str, Any],
    noted: Mapping[str, Any] | None = None,
) -> Any:
    """The benchmark's `Results` object. subject: who was evaluated (`evaluation_subject.Subject`), empty if unknown.
    noted: the stamp and the labels, which its format has no field for: they go into the note of every reward."""
    package = domain.package
    solo = options.solo
    info = package.Info(
        git_commit=package.label,
        num_trials=samples,
        max_steps=options.max_steps,
        max_errors=options.max_errors,
        user_info=package.UserInfo(
            implementation="dummy_user" if solo else f"user_simulator ({options.user.kind})",
            llm=_user_model(options),
            llm_args=None if _user_model(options) is None else dict(options.user.endpoint.sampling),
        ),
        agent_info=package.AgentInfo(
            implementation="llm_agent_solo" if solo else "llm_agent",
            llm=subject.get("model", "not stated"),
            llm_args=subject.get("sampling"),
        ),
        environment_info=domain.environment().get_info(),
    )
    chosen = dict.fromkeys(outcome.task.data["id"] for outcome in outcomes)
    return package.Results(
        info=info,
        tasks=[domain.tasks[task_id] for task_id in chosen],
        simulations=[_simulation(domain, outcome, noted or {}) for outcome in outcomes],
    )


def _simulation(domain: Domain, outcome: Outcome, noted: Mapping[str, Any]) -> Any:
    package, info = domain.package, outcome.info
    now = datetime.fromtimestamp(time.time())
    termination = str(info.get("termination", "cut"))
    return package.SimulationRun(
        id=f"{outcome.task.task_id}-{outcome.sample}",
        task_id=outcome.task.data["id"],
        start_time=(now - timedelta(seconds=outcome.seconds)).isoformat(),
        end_time=now.isoformat(),
        duration=outcome.seconds,
        termination_reason=ENDINGS.get(termination, termination),
        agent_cost=0.0,
        user_cost=0.0,
        reward_info=package.RewardInfo(
            reward=outcome.reward,
            reward_basis=info.get("reward_basis", []),
            reward_breakdown=info.get("breakdown", {}),
            **info.get("checks", {}),
            info={"note": json.dumps(noted)},
        ),
        messages=info.get("transcript", []),
        trial=outcome.sample,
    )
