"""Success on held-out tasks, with its uncertainty.

Invariants: an episode that failed (environment, engine, deadline) is no wrong answer: it is repeated, and if that does
not help it is left out and counted. Tasks are the first ones of the held-out split, so two evaluations of one run see
the same tasks. Nothing is written to the bank. With a journal, an evaluation that was interrupted goes on where it
stopped, as long as the policy and the conditions are the same.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_async.config.schema import RunConfig
from megatron_async.errors import UserError
from megatron_async.observe import RunFiles, append_evaluation, read_metrics
from megatron_async.rollout.agent_loop import Chat, EpisodeLimits, Sampler, run_episode
from megatron_async.rollout.chat import ChatFormat
from megatron_async.rollout.engines import build_pool, engine_urls
from megatron_async.rollout.environments import build_task_source
from megatron_async.rollout.environments.base import Outcome, ReportingTaskSource, TaskSource
from megatron_async.rollout.estimators import over_tasks, pass_at_k, pass_hat_k, standard_error
from megatron_async.rollout.evaluation_journal import EvaluationJournal
from megatron_async.rollout.sampling import evaluation_sampling
from megatron_async.trajectory import SamplingParams, Trajectory
from sglang_bridge.event_loop import BackgroundLoop

logger = logging.getLogger(__name__)

_TICK_S = 0.5
_SUCCESS_REWARD = 1.0 - 1e-6  # a reward of 1 is success; sums of shares may fall short by rounding


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Held-out performance of one policy version.

    success_rate: mean over tasks of the share of successful samples. stderr: its standard error over tasks (samples of
    one task are not independent). mean_reward: mean reward. pass_hat[k]: chance that k samples of a task *all*
    succeed (pass^k of τ-bench). pass_at[k]: chance that at least one of k does (pass@k). Both are the unbiased
    estimators over the samples of each task. tasks, episodes: how many were counted. tokens, turns: mean action tokens
    and policy turns per episode. truncated: episodes cut by a limit. failures: kind -> episodes left out.
    versions: [oldest, newest] policy version that sampled. seconds: wall time. benchmark: what the task source itself
    reports (its own metrics, floor, endings), empty for most.
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
    benchmark: dict[str, Any] = field(default_factory=dict)

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
    journal: EvaluationJournal | None = None,
    folder: Path | None = None,
) -> EvaluationResult:
    """Play the first `tasks` tasks of `task_source`, `samples` times each, at most `concurrency` at once.

    retries: how often a failed episode is repeated. journal: where finished episodes are kept until all are; those it
    has are not played again. folder: where a task source that reports by itself writes its files. Raises UserError
    when the source has fewer tasks, or when every episode failed.
    """
    if task_source.size is not None and task_source.size < tasks:
        raise UserError(
            f"evaluation.tasks={tasks}, but the {task_source.split} split has {task_source.size}; lower it"
        )
    started = time.monotonic()
    failures: Counter[str] = Counter()
    episodes: dict[int, dict[int, Trajectory]] = {index: {} for index in range(tasks)}
    work = iter([(index, sample) for index in range(tasks) for sample in range(samples)])

    async def player() -> None:
        for index, sample in work:
            known = journal.load(index, sample) if journal is not None else None
            if known is not None:
                episodes[index][sample] = known
                continue
            for attempt in range(retries + 1):
                trajectory = await _play(
                    pool, task_source, chat, index, f"{sample}-{attempt}", sampling, limits
                )
                if trajectory.status.trainable:
                    episodes[index][sample] = trajectory
                    if journal is not None:
                        journal.save(index, sample, trajectory)
                    break
            else:
                failures[str(trajectory.info["ending"])] += 1

    async with asyncio.TaskGroup() as players:
        for _ in range(min(concurrency, tasks * samples)):
            players.create_task(player())
    result = summarise(
        [list(group.values()) for group in episodes.values()],
        samples,
        dict(failures),
        time.monotonic() - started,
    )
    if folder is not None and isinstance(task_source, ReportingTaskSource):
        folder.mkdir(parents=True, exist_ok=True)
        outcomes = list(_outcomes(task_source, episodes))
        result = replace(result, benchmark=task_source.report(outcomes, samples, folder))
    return result


def _outcomes(source: TaskSource, episodes: Mapping[int, Mapping[int, Trajectory]]) -> Iterator[Outcome]:
    for index, group in episodes.items():
        for sample, trajectory in sorted(group.items()):
            info = trajectory.info
            yield Outcome(
                task=source.task(index),
                sample=sample,
                reward=trajectory.reward or 0.0,
                info=dict(info.get("reward") or {}),
                tokens=trajectory.num_action_tokens,
                turns=len(trajectory.turns),
                seconds=float(info.get("engine_s", 0.0)) + float(info.get("environment_s", 0.0)),
            )


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
        pass_hat=over_tasks(outcomes, samples, pass_hat_k),
        pass_at=over_tasks(outcomes, samples, pass_at_k),
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


def evaluate_engines(
    config: RunConfig, urls: Sequence[str], *ticks: Callable[[], None]
) -> EvaluationResult:
    """Evaluate as `config.evaluation` says, on running engines; blocks until done.

    ticks: called in this thread twice a second; what they raise ends the evaluation. The event loop has a thread of its
    own, since an exception that a signal handler raises inside one of its callbacks would only be logged.
    """
    loop = BackgroundLoop("evaluation")
    try:
        result = loop.submit(_evaluate_engines(config, urls))
        while not wait([result], timeout=_TICK_S).done:
            for tick in ticks:
                tick()
        return result.result()
    finally:
        loop.close()


async def _evaluate_engines(config: RunConfig, urls: Sequence[str]) -> EvaluationResult:
    chat = ChatFormat(config.model.path)
    source = build_task_source(config.environment, "heldout", config.seed)
    sampling = evaluation_sampling(config.rollout, config.evaluation.temperature)
    limits = replace(EpisodeLimits.from_config(config), routed_experts=False)
    folder = RunFiles(config.run_path).evaluation
    async with build_pool(config, list(urls)) as pool:
        versions = await asyncio.gather(*(client.version() for client in pool.clients))
        conditions = {
            "versions": list(versions),
            "sampling": asdict(sampling),
            "limits": asdict(limits),
            "environment": asdict(config.environment),
        }
        journal = EvaluationJournal(folder / "under_way", conditions)
        if len(journal):
            logger.info("going on with an evaluation that has %d episodes", len(journal))
        result = await evaluate(
            pool,
            source,
            chat,
            tasks=config.evaluation.tasks,
            samples=config.evaluation.samples_per_task,
            concurrency=config.rollout.concurrency,
            sampling=sampling,
            limits=limits,
            journal=journal,
            folder=folder,
        )
        journal.clear()
        return result


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
