"""What the episodes of an evaluation say: rates with their uncertainty, endings, costs.

Invariants: the independent unit is the task. Samples of one task are not independent, so the standard error, and the
interval, are over tasks. What was left out, and what makes a number incomparable, goes wherever the number goes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron_async import training_record
from megatron_async.errors import UserError
from megatron_async.labels import TRAINED_ON, describe_labels
from megatron_async.rollout.estimators import (
    interval,
    intervals_over_tasks,
    over_tasks,
    pass_at_k,
    pass_hat_k,
    standard_error,
)
from megatron_async.rollout.evaluation_episode import EvaluatedEpisode


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Held-out performance of one policy version.

    success_rate: mean over tasks of the share of successful samples. stderr: its standard error over tasks, NaN with a
    single one; confidence_95: see `estimators.interval`; None with a single task. mean_reward: mean reward.
    pass_hat[k]: chance that k samples of a task *all* succeed (pass^k of τ-bench). pass_at[k]: chance that at least
    one of k does (pass@k). Both are the unbiased estimators over the samples of each task, up to the fewest samples of
    any task; pass_hat_95[k], pass_at_95[k]: their 95 % intervals (`estimators.intervals_over_tasks`). tasks, episodes:
    how many were counted. short_tasks: tasks with fewer samples than were asked for, or none; left_out: episodes they
    lack. tokens, turns: mean action tokens and policy turns per episode. truncated: episodes cut by a limit.
    endings: kind -> episodes. failures: kind -> episodes left out. failed_attempts: kind -> attempts at episodes that
    failed, whether another one then succeeded or not. versions: [oldest, newest] policy version that
    sampled; None for a policy without versions. seconds: wall time. benchmark: what the task source itself reports
    (its own metrics, floor, endings), empty for most. labels: what every report must state (trained on evaluation
    tasks, ...). subject: who was evaluated and how (`evaluation_subject.Subject`). unmetered: turns whose tokens the
    endpoint did not state.
    """

    success_rate: float
    stderr: float
    confidence_95: tuple[float, float] | None
    mean_reward: float
    pass_hat: dict[int, float]
    pass_at: dict[int, float]
    tasks: int
    samples_per_task: int
    episodes: int
    tokens: float
    turns: float
    truncated: int
    endings: dict[str, int]
    failures: dict[str, int]
    versions: tuple[int, int] | None
    seconds: float
    short_tasks: int = 0
    left_out: int = 0
    unmetered: int = 0
    pass_hat_95: dict[int, tuple[float, float] | None] = field(default_factory=dict)
    pass_at_95: dict[int, tuple[float, float] | None] = field(default_factory=dict)
    failed_attempts: dict[str, int] = field(default_factory=dict)
    benchmark: dict[str, Any] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    subject: dict[str, Any] = field(default_factory=dict)

    @property
    def newest_version(self) -> int | None:
        """Newest policy version that sampled; None for a policy without versions."""
        return None if self.versions is None else self.versions[1]

    def as_dict(self) -> dict[str, Any]:
        """All of it as JSON, which has no NaN: an unknown standard error is None."""
        return {**asdict(self), "stderr": None if math.isnan(self.stderr) else self.stderr}

    def stated(self) -> dict[str, Any]:
        """What a task source's own report must state too: about whom it is, what it lacks, labels."""
        kept = ("subject", "labels", "failures", "failed_attempts", "short_tasks", "left_out", "versions")
        values = asdict(self)
        return {name: values[name] for name in kept}


def summarise(
    episodes: Sequence[Sequence[EvaluatedEpisode]], samples: int, failures: Mapping[str, int], seconds: float
) -> EvaluationResult:
    """Statistics of episodes grouped by task; tasks without any are left out. UserError when there are none at all."""
    played = [list(group) for group in episodes if group]
    flat = [episode for group in played for episode in group]
    if not flat:
        raise UserError(
            f"no evaluation episode finished; failures: {dict(failures)}. Look at the rollout and engine logs."
        )
    outcomes = [[episode.succeeded for episode in group] for group in played]
    rates = [sum(outcome) / len(outcome) for outcome in outcomes]
    return EvaluationResult(
        success_rate=sum(rates) / len(rates),
        stderr=standard_error(rates),
        confidence_95=interval(rates),
        mean_reward=sum(episode.reward or 0.0 for episode in flat) / len(flat),
        pass_hat=over_tasks(outcomes, samples, pass_hat_k),
        pass_at=over_tasks(outcomes, samples, pass_at_k),
        pass_hat_95=intervals_over_tasks(outcomes, samples, pass_hat_k),
        pass_at_95=intervals_over_tasks(outcomes, samples, pass_at_k),
        tasks=len(played),
        samples_per_task=samples,
        episodes=len(flat),
        tokens=sum(episode.tokens for episode in flat) / len(flat),
        turns=sum(episode.turns for episode in flat) / len(flat),
        truncated=sum(episode.truncated for episode in flat),
        endings=dict(Counter(episode.ending for episode in flat)),
        failures=dict(failures),
        versions=_versions(flat),
        seconds=seconds,
        short_tasks=sum(len(group) < samples for group in episodes),
        left_out=len(episodes) * samples - len(flat),
        unmetered=sum(episode.unmetered for episode in flat),
        labels=_labels(flat),
    )


def describe(result: EvaluationResult) -> str:
    """A page for people (Markdown)."""
    spread = result.confidence_95
    lines = [
        f"Success {result.success_rate:.1%}"
        + (f" (95 % interval {spread[0]:.1%} to {spread[1]:.1%})" if spread else "")
        + f" on {result.tasks} tasks, {result.episodes} episodes.",
    ]
    if "floor" in result.benchmark:
        lines.append(f"Doing nothing scores {result.benchmark['floor']:.1%} on the same tasks.")
    lines += [*describe_labels(result.labels), "", *describe_subject(result.stated(), result.benchmark)]
    lines += ["", *describe_passes(asdict(result))]
    lines += ["", "| ending | episodes |", "|---|---|"]
    lines += [f"| {ending} | {count} |" for ending, count in sorted(result.endings.items())]
    lines += [f"| failed, not counted: {kind} | {count} |" for kind, count in sorted(result.failures.items())]
    lines += ["", f"Per episode: {result.turns:.1f} turns, {result.tokens:.0f} tokens. {result.seconds:.0f} s in all."]
    if result.failed_attempts:
        told = ", ".join(f"{kind} {count}" for kind, count in sorted(result.failed_attempts.items()))
        lines.append(f"Attempts that failed, and were repeated or left out: {told}.")
    if result.unmetered:
        lines.append(
            f"The endpoint did not say how many tokens {result.unmetered} turns took: they are missing here, and "
            "rollout.max_tokens could not cut their episodes."
        )
    return "\n".join(lines) + "\n"


def describe_passes(values: Mapping[str, Any]) -> list[str]:
    """A table of pass^k and pass@k. values: `pass_hat`, `pass_at` and their intervals, as of `EvaluationResult`."""

    def row(k: int) -> str:
        cells = [f"{values[name][k]:.3f} | {_span(values[name + '_95'][k])}" for name in ("pass_hat", "pass_at")]
        return f"| {k} | {' | '.join(cells)} |"

    head = "| k | pass^k | 95 % interval | pass@k | 95 % interval |"
    return [head, "|---|---|---|---|---|", *map(row, values["pass_hat"])]


def _span(interval: tuple[float, float] | None) -> str:
    return "unknown" if interval is None else f"{interval[0]:.3f} to {interval[1]:.3f}"


def describe_subject(stated: Mapping[str, Any], benchmark: Mapping[str, Any]) -> list[str]:
    """Lines that say who was evaluated, how, and what is left out. stated: as of `EvaluationResult.stated`."""
    lines = []
    subject = stated.get("subject")
    if subject:
        digest = f" (digest {subject['digest']})" if subject["digest"] else ""
        versions = stated.get("versions")
        version = "" if versions is None else f", policy version {'–'.join(map(str, sorted(set(versions))))}"
        lines += [
            f"Evaluated: {subject['kind']}, model {subject['model']}, from {subject['place']}{digest}{version}.",
            f"Sampling: {_listed(subject['sampling'])}. Limits: {_listed(subject['limits'])}. "
            f"Seed of tasks: {subject['seed']}.",
            training_record.describe(subject.get("training", {})),
        ]
    if "user_model" in benchmark:
        lines.append(f"User model: {benchmark['user_model']}; judge model: {benchmark.get('judge_model', 'none')}.")
    short, left_out = stated.get("short_tasks", 0), stated.get("left_out", 0)
    lines.append(f"Episodes left out: {left_out}.")
    if short:
        lines.append(f"Tasks that lack trials: {short}; pass^k and pass@k end at the fewest that a counted task has.")
    return lines


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items()) or "not stated"


def _labels(episodes: Sequence[EvaluatedEpisode]) -> dict[str, str]:
    """What rewards themselves stamp; a task source may say more."""
    trained = max(int(episode.info.get(TRAINED_ON) or 0) for episode in episodes)
    return {TRAINED_ON: str(trained)} if trained else {}


def _versions(episodes: Sequence[EvaluatedEpisode]) -> tuple[int, int] | None:
    spans = [episode.versions for episode in episodes if episode.versions is not None]
    if not spans:
        return None
    return min(oldest for oldest, _ in spans), max(newest for _, newest in spans)
