"""Evaluation results in the benchmark's own format, and what a reader must know beside the success rate.

    <folder>/tau2-<domain>[-solo].json    the benchmark's `Results`: its viewer, metrics and leaderboard tools read it
    <folder>/tau2-<domain>[-solo].md      the same for people: pass^k, pass@k, floor, endings, costs

Invariants
- The JSON passes the benchmark's own validation, and its own `compute_metrics` gives our pass^k.
- The floor (what doing nothing scores on the same tasks) and everything that makes a number incomparable (own prompt,
  scripted user, another reward basis, trained on evaluation tasks) stand in the same report.
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

from megatron_async.rollout.environments.base import Outcome
from megatron_async.rollout.environments.tau2.domain import Domain
from megatron_async.rollout.environments.tau2.floor import floor
from megatron_async.rollout.environments.tau2.options import Tau2Options
from megatron_async.rollout.estimators import over_tasks, pass_at_k, pass_hat_k, standard_error
from megatron_async.rollout.evaluation_statistics import interval

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
    """Write both files; returns the summary for the evaluation's row."""
    name = f"tau2-{options.domain}{'-solo' if options.solo else ''}"
    results = benchmark_results(domain, options, outcomes, samples)
    (folder / f"{name}.json").write_text(results.model_dump_json(indent=2), encoding="utf-8")
    summary = {**stamp, **summarise(domain, options, outcomes, samples)}
    (folder / f"{name}.md").write_text(markdown(summary), encoding="utf-8")
    return {**summary, "results": f"{name}.json"}


def summarise(
    domain: Domain, options: Tau2Options, outcomes: Sequence[Outcome], samples: int
) -> dict[str, Any]:
    """The summary as JSON."""
    by_task: dict[str, list[bool]] = defaultdict(list)
    for outcome in outcomes:
        by_task[outcome.task.data["id"]].append(outcome.reward >= SUCCESS)
    rates = [fmean(group) for group in by_task.values()]
    mean = fmean(rates)
    nothing = floor(domain, by_task, options.reward_basis)
    return {
        "tasks": len(by_task),
        "episodes": len(outcomes),
        "success_rate": mean,
        "confidence_95": interval(mean, standard_error(rates)),
        "pass_hat": over_tasks(by_task.values(), samples, pass_hat_k),
        "pass_at": over_tasks(by_task.values(), samples, pass_at_k),
        "floor": nothing.rate,
        "terminations": dict(Counter(str(outcome.info.get("termination")) for outcome in outcomes)),
        "evaluator_disagreements": sum(outcome.info.get("official_agrees") is False for outcome in outcomes),
        "tokens_per_episode": fmean(outcome.tokens for outcome in outcomes),
        "turns_per_episode": fmean(outcome.turns for outcome in outcomes),
        "tool_errors_per_episode": fmean(outcome.info.get("tool_errors", 0) for outcome in outcomes),
        "user_tokens": [
            sum(outcome.info.get("user_tokens", [0, 0])[part] for outcome in outcomes) for part in (0, 1)
        ],
    }


def markdown(summary: Mapping[str, Any]) -> str:
    """The summary as a page."""
    mode = ", solo" if summary["solo"] else ""
    interval = summary["confidence_95"]
    lines = [
        f"# {summary['domain']}{mode}, split {summary['split']}",
        "",
        f"Success {summary['success_rate']:.1%}"
        + (f" (95 % interval {interval[0]:.1%} to {interval[1]:.1%})" if interval else "")
        + f" on {summary['tasks']} tasks, {summary['episodes']} episodes. "
        f"**Doing nothing scores {summary['floor']:.1%}.**",
        "",
        "| k | pass^k | pass@k |",
        "|---|---|---|",
        *(f"| {k} | {value:.3f} | {summary['pass_at'][k]:.3f} |" for k, value in summary["pass_hat"].items()),
        "",
        "| ending | episodes |",
        "|---|---|",
        *(f"| {ending} | {count} |" for ending, count in sorted(summary["terminations"].items())),
        "",
        f"Per episode: {summary['turns_per_episode']:.1f} turns, {summary['tokens_per_episode']:.0f} tokens, "
        f"{summary['tool_errors_per_episode']:.2f} failed tool calls.",
        f"Benchmark {summary['benchmark']}, user: {summary['user']}, prompt: {summary['prompt']}, reward basis: "
        f"{summary['reward_policy']}, evaluators disagreed on {summary['evaluator_disagreements']} episodes.",
    ]
    if "user_errors" in summary:
        errors, tokens = summary["user_errors"], summary["user_tokens"]
        lines.append(
            f"User simulator: {errors['repeated']} requests repeated, {errors['unanswered']} given up (such episodes "
            f"are not counted); {tokens[0]} prompt and {tokens[1]} completion tokens."
        )
    if "trained_on_evaluation_tasks" in summary:
        lines += [
            "",
            f"**Trained on {summary['trained_on_evaluation_tasks']} of the evaluation tasks: no benchmark number.**",
        ]
    return "\n".join(lines) + "\n"


def benchmark_results(domain: Domain, options: Tau2Options, outcomes: Sequence[Outcome], samples: int) -> Any:
    """The benchmark's `Results` object."""
    package = domain.package
    solo = options.solo
    info = package.Info(
        git_commit=package.label,
        num_trials=samples,
        max_steps=options.max_steps,
        max_errors=options.max_errors,
        user_info=package.UserInfo(
            implementation="dummy_user" if solo else f"user_simulator ({options.user.kind})",
            llm=None if solo else options.user.endpoint.model,
            llm_args=None if solo else dict(options.user.endpoint.sampling),
        ),
        agent_info=package.AgentInfo(implementation="llm_agent_solo" if solo else "llm_agent", llm="policy"),
        environment_info=domain.environment().get_info(),
    )
    chosen = dict.fromkeys(outcome.task.data["id"] for outcome in outcomes)
    return package.Results(
        info=info,
        tasks=[domain.tasks[task_id] for task_id in chosen],
        simulations=[_simulation(domain, outcome) for outcome in outcomes],
    )


def _simulation(domain: Domain, outcome: Outcome) -> Any:
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
            info={"note": json.dumps({key: info[key] for key in ("prompt", "reward_policy") if key in info})},
        ),
        messages=info.get("transcript", []),
        trial=outcome.sample,
    )
