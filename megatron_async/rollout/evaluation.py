"""Success on held-out tasks, with its uncertainty.

Invariants: an episode that failed (environment, engine, deadline) is no wrong answer: it is repeated, and if that does
not help it is left out and counted. Tasks are the first ones of the held-out split, so two evaluations of one run see
the same tasks. Nothing is written to the bank. With a journal, an evaluation that was interrupted goes on where it
stopped, as long as the policy and the conditions are the same, and two evaluations never share one.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron_async import training_record
from megatron_async.claim import held
from megatron_async.config.schema import RunConfig
from megatron_async.credentials import hidden_credentials
from megatron_async.errors import UserError
from megatron_async.observe import append_evaluation, read_metrics
from megatron_async.rollout import environment_calls, evaluation_files
from megatron_async.rollout.agent_loop import Chat, Sampler, run_episode
from megatron_async.rollout.blocking import Call
from megatron_async.rollout.chat import ChatFormat
from megatron_async.rollout.engines import build_pool, engine_urls, of_run, with_engines
from megatron_async.rollout.environment_calls import EpisodeFailure
from megatron_async.rollout.environments import build_task_source
from megatron_async.rollout.environments.base import Outcome, ReportingTaskSource, Task, TaskSource
from megatron_async.rollout.episode_limits import EpisodeLimits
from megatron_async.rollout.evaluation_episode import EvaluatedEpisode
from megatron_async.rollout.evaluation_journal import EvaluationJournal
from megatron_async.rollout.evaluation_statistics import EvaluationResult, summarise
from megatron_async.rollout.evaluation_subject import (
    Subject,
    checkpoint_digest,
    conditions,
    labels_of,
    write_subject,
)
from megatron_async.rollout.loop_watchdog import watched_loop
from megatron_async.rollout.recorded_tasks import compared
from megatron_async.rollout.sampling import evaluation_sampling
from megatron_async.trajectory import SamplingParams, Trajectory
from sglang_bridge.event_loop import BackgroundLoop

logger = logging.getLogger(__name__)

_TICK_S = 0.5
_QUERY_S = 30.0
_PROGRESS_S = 15.0
JOURNALS = "under_way"
JOURNAL_CLAIM = ".under_way.claim"
"""Beside the journals, which are deleted when their evaluation is whole."""

Player = Callable[[Task, str], Awaitable[EvaluatedEpisode]]
"""Plays one episode of a task; the second argument is unique among the episodes of the task."""


async def evaluate(
    play: Player,
    task_source: TaskSource,
    *,
    tasks: int,
    samples: int,
    concurrency: int,
    retries: int = 2,
    journal: EvaluationJournal | None = None,
    folder: Path | None = None,
    subject: Subject | None = None,
) -> EvaluationResult:
    """Play the first `tasks` tasks of `task_source`, `samples` times each, at most `concurrency` at once.

    play: the policy (`engine_player`, or `endpoint_policy.endpoint_player`). retries: how often a failed episode is
    repeated. journal: where finished episodes are kept until all are; those it has are not played again. folder: where
    a task source that reports by itself writes its files. subject: whom and how, for reports. Progress is logged.
    Raises UserError when the source has fewer tasks, or when every episode failed.
    """
    if task_source.size is not None and task_source.size < tasks:
        raise UserError(
            f"evaluation.tasks={tasks}, but the {task_source.split} split has {task_source.size}; lower it"
        )
    started = time.monotonic()
    failures: Counter[str] = Counter()
    failed_attempts: Counter[str] = Counter()
    episodes: dict[int, dict[int, EvaluatedEpisode]] = {index: {} for index in range(tasks)}
    work = iter([(index, sample) for index in range(tasks) for sample in range(samples)])
    progress = _Progress(tasks * samples)

    async def player() -> None:
        for index, sample in work:
            episode = await _play(play, task_source.task(index), index, sample, retries, journal)
            failed_attempts.update(episode.failures)
            if episode.failed:
                failures[episode.ending] += 1
            else:
                episodes[index][sample] = episode
            progress.add(episode)

    async with asyncio.TaskGroup() as players:
        for _ in range(min(concurrency, tasks * samples)):
            players.create_task(player())
    groups = [list(group.values()) for group in episodes.values()]
    result = summarise(groups, samples, failures, time.monotonic() - started)
    result = replace(
        result,
        failed_attempts=dict(failed_attempts),
        labels={**result.labels, **labels_of(task_source), **(subject.labels() if subject is not None else {})},
        subject=subject.as_dict() if subject is not None else {},
    )
    if folder is not None and isinstance(task_source, ReportingTaskSource):
        folder.mkdir(parents=True, exist_ok=True)
        write_subject(folder, result.stated())
        outcomes = list(_outcomes(task_source, episodes))
        result = replace(result, benchmark=task_source.report(outcomes, samples, folder))
    return result


async def _play(
    play: Player, task: Task, index: int, sample: int, retries: int, journal: EvaluationJournal | None
) -> EvaluatedEpisode:
    """The first attempt that does not fail, or the last one; what an interrupted evaluation left is gone on with."""
    episode = journal.load(index, sample, task.task_id) if journal is not None else None
    for attempt in range(retries + 1):
        if episode is not None and not episode.failed:
            break
        before = episode.failures if episode is not None else {}
        episode = replace(await play(task, f"{sample}-{attempt}"), failed_attempts=dict(before))
        if journal is not None:
            journal.save(index, sample, task.task_id, episode)
    assert episode is not None
    return episode


class _Progress:
    """Logs how far an evaluation is, now and then, and what it has seen so far."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._successes, self._failed = total, 0, 0, 0
        self._started = self._told = time.monotonic()

    def add(self, episode: EvaluatedEpisode) -> None:
        """One more episode is there."""
        self._done += 1
        self._successes += episode.succeeded
        self._failed += episode.failed
        now = time.monotonic()
        if now - self._told < _PROGRESS_S or self._done == self._total:
            return
        self._told = now
        left = (now - self._started) / self._done * (self._total - self._done)
        logger.info(
            "evaluation: %d of %d episodes, %.0f %% successful, %d failed, about %.0f s left",
            self._done,
            self._total,
            100 * self._successes / max(1, self._done - self._failed),
            self._failed,
            left,
        )


def _outcomes(
    source: TaskSource, episodes: Mapping[int, Mapping[int, EvaluatedEpisode]]
) -> Iterator[Outcome]:
    for index, group in episodes.items():
        for sample, episode in sorted(group.items()):
            yield Outcome(
                task=source.task(index),
                sample=sample,
                reward=episode.reward or 0.0,
                info=episode.info,
                tokens=episode.tokens,
                turns=episode.turns,
                seconds=episode.seconds,
            )


def engine_player(
    pool: Sampler, task_source: TaskSource, chat: Chat, sampling: SamplingParams, limits: EpisodeLimits
) -> Player:
    """Plays token in, token out on inference engines."""

    async def play(task: Task, sample: str) -> EvaluatedEpisode:
        name = f"evaluation-{task.task_id}"
        trajectory = Trajectory(f"{name}-{sample}", name, task.task_id, sampling, task.data)
        making = Call(task_source, "environment", task=task.task_id)
        try:
            environment = environment_calls.make(making, partial(task_source.environment, task))
        except EpisodeFailure as failure:
            return EvaluatedEpisode(None, failure.kind)
        return EvaluatedEpisode.of(await run_episode(pool, chat, environment, trajectory, limits))

    return play


def evaluate_engines(
    config: RunConfig, urls: Sequence[str], *ticks: Callable[[], None], folder: Path
) -> EvaluationResult:
    """Evaluate as `config.evaluation` says, on running engines; blocks until done.

    ticks: called in this thread twice a second; what they raise ends the evaluation. folder: where results and the
    journal go (`evaluation_files.results_folder`). Raises InUse when another evaluation has them there.
    """
    with hidden_credentials(config.environment):
        return run_blocking(_evaluate_engines(config, urls, folder), config.rollout.turn_deadline_s, *ticks)


class EvaluationBlocked(UserError):
    """An environment blocked the event loop of an evaluation and did not come back."""


def run_blocking(
    evaluation: Coroutine[Any, Any, EvaluationResult], patience_s: float, *ticks: Callable[[], None]
) -> EvaluationResult:
    """Run to the end in an event loop with a thread of its own, calling `ticks` in this one twice a second.

    An exception that a signal handler raises inside a callback of the loop would only be logged. patience_s: longest
    time for which the loop may be blocked (`rollout.turn_deadline_s`). Raises EvaluationBlocked after it.
    """
    loop, blocked = BackgroundLoop("evaluation"), list[str]()

    async def watched() -> EvaluationResult:
        async with watched_loop(patience_s, lambda call, text: blocked.append(text)):
            return await evaluation

    try:
        result = loop.submit(watched())
        while not wait([result], timeout=_TICK_S).done:
            for tick in ticks:
                tick()
            if blocked:
                raise EvaluationBlocked(
                    f"evaluation: {blocked[0]}, longer than rollout.turn_deadline_s ({patience_s:g} s), and nothing "
                    "can end it. Await what waits, and give what computes to a thread or a process (asyncio.to_thread)"
                )
        return result.result()
    finally:
        loop.close()


async def _evaluate_engines(config: RunConfig, urls: Sequence[str], folder: Path) -> EvaluationResult:
    chat = ChatFormat(config.model.path, config.rollout.chat_template_options)
    source = build_task_source(config.environment, "heldout", config.seed)
    sampling = evaluation_sampling(config.rollout, config.evaluation.temperature)
    limits = replace(EpisodeLimits.from_config(config), routed_experts=False)
    async with build_pool(config, list(urls)) as pool:
        versions = sorted(set((await pool.versions(_QUERY_S)).values()))
        ours = of_run(config.run_path, urls)
        known = training_record.of_engines(Path(config.model.path), config.run_path if ours else None, versions)
        subject = Subject(
            kind="engines" if ours else "checkpoint",
            model=config.name if ours else config.model.path,
            place=config.model.path,
            digest=checkpoint_digest(Path(config.model.path)),
            sampling=asdict(sampling) | _template_options(config),
            limits=limits.of_policy(),
            seed=config.seed,
            training=compared(known, config.environment.name, source, config.evaluation.tasks),
        )
        same = conditions(config, source, subject, versions=versions, waits=asdict(limits))
        play = engine_player(pool, source, chat, sampling, limits)
        work = journalled(config, play, source, subject, same, folder)
        return await (with_engines(pool, config.run_path, work) if ours else work)


def _template_options(config: RunConfig) -> dict[str, Any]:
    """Whether the policy was to think, and the like, by the name that endpoints know; empty where nothing is set."""
    options = config.rollout.chat_template_options
    return {"chat_template_kwargs": dict(options)} if options else {}


async def journalled(
    config: RunConfig,
    play: Player,
    source: TaskSource,
    subject: Subject,
    same: Mapping[str, Any],
    folder: Path,
    check: Callable[[EvaluationResult], None] = lambda result: None,
) -> EvaluationResult:
    """`evaluate` as `config.evaluation` says, with a journal in `folder` that is kept until its results are there.

    same: conditions under which its episodes count. check: raises UserError for a result that says nothing of the
    policy; its episodes are forgotten then. Raises InUse when another evaluation has the folder.
    """
    instead = "give results another folder (--folder, with --checkpoint or --endpoint)"
    what = f"the folder of results {folder}"
    with held(folder / JOURNAL_CLAIM, what, f"another evaluation writes to {folder}", instead):
        journal = EvaluationJournal(folder / JOURNALS, same)
        journal.tell()
        shutil.rmtree(journal.results, ignore_errors=True)  # what an interrupted one had begun to write
        journal.results.mkdir()
        result = await evaluate(
            play,
            source,
            tasks=config.evaluation.tasks,
            samples=config.evaluation.samples_per_task,
            concurrency=config.rollout.concurrency,
            journal=journal,
            folder=journal.results,
            subject=subject,
        )
        try:
            check(result)
        except UserError:
            journal.clear()
            raise
        evaluation_files.keep(result, journal.results, folder)
        journal.clear()
        return result


def evaluate_run(config: RunConfig, folder: Path) -> EvaluationResult:
    """Evaluate on the engines of the run's folder; results go to `folder`, and a row to its `evaluations.jsonl`."""
    steps = read_metrics(config.run_path)  # before it: the engines may get further versions meanwhile
    step = steps[-1]["step"] + 1 if steps else 0
    result = evaluate_engines(config, engine_urls(config.run_path), folder=folder)
    append_evaluation(config.run_path, {"step": step, "version": result.newest_version, **result.as_dict()})
    return result
