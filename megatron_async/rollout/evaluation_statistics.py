"""What the episodes of an evaluation say: rates with their uncertainty, endings, costs.

Invariant: the independent unit is the task. Samples of one task are not independent, so the standard error, and the
interval made of it, are over tasks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron_async.errors import UserError
from megatron_async.rollout.estimators import over_tasks, pass_at_k, pass_hat_k, standard_error
from megatron_async.rollout.evaluation_episode import EvaluatedEpisode

_NORMAL_95 = 1.96


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Held-out performance of one policy version.

    success_rate: mean over tasks of the share of successful samples. stderr: its standard error over tasks;
    confidence_95: success_rate ± 1.96 of it, within [0, 1]; None with a single task. mean_reward: mean reward.
    pass_hat[k]: chance that k samples of a task *all* succeed (pass^k of τ-bench). pass_at[k]: chance that at least
    one of k does (pass@k). Both are the unbiased estimators over the samples of each task. tasks, episodes: how many
    were counted. tokens, turns: mean action tokens and policy turns per episode. truncated: episodes cut by a limit.
    endings: kind -> episodes. failures: kind -> episodes left out. versions: [oldest, newest] policy version that
    sampled; None for a policy without versions. seconds: wall time. benchmark: what the task source itself reports
    (its own metrics, floor, endings), empty for most.
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
    benchmark: dict[str, Any] = field(default_factory=dict)

    @property
    def newest_version(self) -> int | None:
        """Newest policy version that sampled; None for a policy without versions."""
        return None if self.versions is None else self.versions[1]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


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
    mean, error = sum(rates) / len(rates), standard_error(rates)
    return EvaluationResult(
        success_rate=mean,
        stderr=error,
        confidence_95=interval(mean, error),
        mean_reward=sum(episode.reward or 0.0 for episode in flat) / len(flat),
        pass_hat=over_tasks(outcomes, samples, pass_hat_k),
        pass_at=over_tasks(outcomes, samples, pass_at_k),
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
    )


def interval(mean: float, error: float) -> tuple[float, float] | None:
    """95 % confidence interval of a rate by the normal approximation; None where the error is unknown (one task)."""
    if math.isnan(error):
        return None
    half = _NORMAL_95 * error
    return max(0.0, mean - half), min(1.0, mean + half)


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
    lines += ["", "| k | pass^k | pass@k |", "|---|---|---|"]
    lines += [f"| {k} | {value:.3f} | {result.pass_at[k]:.3f} |" for k, value in result.pass_hat.items()]
    lines += ["", "| ending | episodes |", "|---|---|"]
    lines += [f"| {ending} | {count} |" for ending, count in sorted(result.endings.items())]
    lines += [f"| failed, not counted: {kind} | {count} |" for kind, count in sorted(result.failures.items())]
    lines += ["", f"Per episode: {result.turns:.1f} turns, {result.tokens:.0f} tokens. {result.seconds:.0f} s in all."]
    return "\n".join(lines) + "\n"


def _versions(episodes: Sequence[EvaluatedEpisode]) -> tuple[int, int] | None:
    spans = [episode.versions for episode in episodes if episode.versions is not None]
    if not spans:
        return None
    return min(oldest for oldest, _ in spans), max(newest for _, newest in spans)
