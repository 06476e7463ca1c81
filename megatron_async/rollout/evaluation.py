"""Success on held-out tasks, with its uncertainty.

Invariants: an episode that failed (environment, engine, deadline) is no wrong answer: it is repeated, and if that does
not help it is left out and counted. Tasks are the first ones of the held-out split, so two evaluations of one run see
the same tasks. Nothing is written to the bank.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from megatron_async.config.schema import RunConfig
from megatron_async.errors import UserError
from megatron_async.observe import append_evaluation, read_metrics
from megatron_async.rollout.agent_loop import Chat, EpisodeLimits, Sampler, run_episode
from megatron_async.rollout.chat import ChatFormat
from megatron_async.rollout.engines import build_pool, engine_urls
from megatron_async.rollout.environments import build_task_source
from megatron_async.rollout.environments.base import TaskSource
from megatron_async.rollout.sampling import evaluation_sampling
from megatron_async.trajectory import SamplingParams, Trajectory

logger = logging.getLogger(__name__)

_SUCCESS_REWARD = 1.0 - 1e-6  # a reward of 1 is success; sums of shares may fall short by rounding


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Held-out performance of one policy version.

    success_rate: mean over tasks of the share of successful samples. stderr: its standard error over tasks (samples of
    one task are not independent). mean_reward: mean reward. pass_hat[k]: chance that k samples of a task *all*
    succeed (pass^k of τ-bench). pass_at[k]: chance that at least one of k does (pass@k). Both are the unbiased
    estimators over the samples of each task. tasks, episodes: how many were counted. tokens, turns: mean action tokens
    and policy turns per episode. truncated: episodes cut by a limit. failures: kind -> episodes left out.
    versions: [oldest, newest] policy version that sampled. seconds: wall time.
    """

    success_rate: float
    stderr: float
    mean_reward: float
    pass_hat: dict[int, float]
    pass_at: dict[int, float]
    tasks: int
    samples_per_task: int
    episodes: int
    tokens: float
    turns: float
    truncated: int
    failures: dict[str, int]
    versions: tuple[int, int]
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


async def evaluate(
    pool: Sampler,
    task_source: TaskSource,
    chat: Chat,
    *,
    tasks: int,
    samples: int,
    concurrency: int,
    sampling: SamplingParams,
    limits: EpisodeLimits,
    retries: int = 2,
) -> EvaluationResult:
    """Play the first `tasks` tasks of `task_source`, `samples` times each, at most `concurrency` at once.

    retries: how often a failed episode is repeated. Raises UserError when the source has fewer tasks, or when every
    episode failed.
    """
    if task_source.size is not None and task_source.size < tasks:
        raise UserError(
            f"evaluation.tasks={tasks}, but the {task_source.split} split has {task_source.size}; lower it"
        )
    started = time.monotonic()
    failures: Counter[str] = Counter()
    episodes: dict[int, list[Trajectory]] = {index: [] for index in range(tasks)}
    work = iter([(index, sample) for index in range(tasks) for sample in range(samples)])

    async def player() -> None:
        for index, sample in work:
            for attempt in range(retries + 1):
                trajectory = await _play(
                    pool, task_source, chat, index, f"{sample}-{attempt}", sampling, limits
                )
                if trajectory.status.trainable:
                    episodes[index].append(trajectory)
                    break
            else:
                failures[str(trajectory.info["ending"])] += 1

    async with asyncio.TaskGroup() as players:
        for _ in range(min(concurrency, tasks * samples)):
            players.create_task(player())
    return summarise(list(episodes.values()), samples, dict(failures), time.monotonic() - started)


async def _play(
    pool: Sampler,
    task_source: TaskSource,
    chat: Chat,
    index: int,
    sample: str,
    sampling: SamplingParams,
    limits: EpisodeLimits,
) -> Trajectory:
    task = task_source.task(index)
    trajectory = Trajectory(
        f"evaluation-{index}-{sample}", f"evaluation-{index}", task.task_id, sampling, task.data
    )
    return await run_episode(pool, chat, task_source.environment(task), trajectory, limits)


def summarise(
    episodes: Sequence[Sequence[Trajectory]], samples: int, failures: dict[str, int], seconds: float
) -> EvaluationResult:
    """Statistics of finished episodes grouped by task; tasks without any are left out."""
    played = [list(group) for group in episodes if group]
    flat = [trajectory for group in played for trajectory in group]
    if not flat:
        raise UserError(
            f"no evaluation episode finished; failures: {failures}. Look at the rollout and engine logs."
        )
    outcomes = [[_succeeded(trajectory) for trajectory in group] for group in played]
    rates = [sum(outcome) / len(outcome) for outcome in outcomes]
    versions = [version for t in flat for version in (t.min_version, t.max_version) if version is not None]
    return EvaluationResult(
        success_rate=sum(rates) / len(rates),
        stderr=standard_error(rates),
        mean_reward=sum(t.reward or 0.0 for t in flat) / len(flat),
        pass_hat=dict(_over_tasks(outcomes, samples, pass_hat_k)),
        pass_at=dict(_over_tasks(outcomes, samples, pass_at_k)),
        tasks=len(played),
        samples_per_task=samples,
        episodes=len(flat),
        tokens=sum(t.num_action_tokens for t in flat) / len(flat),
        turns=sum(len(t.turns) for t in flat) / len(flat),
        truncated=sum(t.status == "truncated" for t in flat),
        failures=failures,
        versions=(min(versions), max(versions)),
        seconds=seconds,
    )


def _succeeded(trajectory: Trajectory) -> bool:
    return trajectory.reward is not None and trajectory.reward >= _SUCCESS_REWARD


def _over_tasks(
    outcomes: Sequence[Sequence[bool]], samples: int, estimator: Any
) -> Iterator[tuple[int, float]]:
    """(k, mean of `estimator` over the tasks that have at least k samples)."""
    for k in range(1, samples + 1):
        values = [estimator(len(outcome), sum(outcome), k) for outcome in outcomes if len(outcome) >= k]
        if values:
            yield k, sum(values) / len(values)


def pass_hat_k(samples: int, successes: int, k: int) -> float:
    """Unbiased estimate of P(k samples all succeed): C(c, k) / C(n, k); needs n >= k."""
    return math.comb(successes, k) / math.comb(samples, k)


def pass_at_k(samples: int, successes: int, k: int) -> float:
    """Unbiased estimate of P(at least one of k samples succeeds): 1 - C(n - c, k) / C(n, k); needs n >= k."""
    return 1.0 - math.comb(samples - successes, k) / math.comb(samples, k)


def standard_error(values: Sequence[float]) -> float:
    """Of the mean of independent values: sample standard deviation / sqrt(n); NaN for a single value."""
    n = len(values)
    if n < 2:
        return math.nan
    mean = sum(values) / n
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1) / n)


def evaluate_engines(config: RunConfig, urls: Sequence[str]) -> EvaluationResult:
    """Evaluate as `config.evaluation` says, on running engines; blocks until done."""
    return asyncio.run(_evaluate_engines(config, urls))


async def _evaluate_engines(config: RunConfig, urls: Sequence[str]) -> EvaluationResult:
    chat = ChatFormat(config.model.path)
    source = build_task_source(config.environment, "heldout", config.seed)
    async with build_pool(config, list(urls)) as pool:
        return await evaluate(
            pool,
            source,
            chat,
            tasks=config.evaluation.tasks,
            samples=config.evaluation.samples_per_task,
            concurrency=config.rollout.concurrency,
            sampling=evaluation_sampling(config.rollout, config.evaluation.temperature),
            limits=replace(EpisodeLimits.from_config(config), routed_experts=False),
        )


def main(config: RunConfig) -> int:
    """`megatron-async evaluate`: evaluate on the engines of the run's folder, add a row to `evaluations.jsonl`."""
    result = evaluate_engines(config, engine_urls(config.run_path))
    steps = read_metrics(config.run_path)
    step = steps[-1]["step"] + 1 if steps else 0
    append_evaluation(config.run_path, {"step": step, "version": result.versions[1], **result.as_dict()})
    logger.info(
        "success on %d held-out tasks: %.1f %% (standard error %.1f), versions %d to %d, %.0f s; failures: %s",
        result.tasks,
        100 * result.success_rate,
        100 * result.stderr,
        *result.versions,
        result.seconds,
        result.failures or "none",
    )
    return 0
