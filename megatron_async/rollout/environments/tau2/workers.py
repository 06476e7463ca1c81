"""The benchmark's own evaluator off the event loop: in a thread, or in processes of its own.

It takes up to a second of CPU per episode. A few checks are well kept in a thread; a run that evaluates every episode
officially wants processes, since threads of one interpreter share one core.

Invariant: a worker that dies fails the episode that waited for it (`EnvironmentFailure`) and is replaced.
"""

from __future__ import annotations

import asyncio
import functools
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from megatron_async.rollout.environments.base import EnvironmentFailure
from megatron_async.rollout.environments.tau2 import package, reward
from megatron_async.rollout.environments.tau2.domain import Domain, DomainFiles
from megatron_async.rollout.environments.tau2.episode import Episode
from megatron_async.rollout.environments.tau2.reward import Verdict


@functools.cache
def load_domain(name: str, solo: bool, files: DomainFiles) -> Domain:
    """The domain, loaded once per process: both splits, every source of tasks and every worker share it."""
    return Domain(package.load(), name, solo, files)


async def official(episode: Episode, basis: tuple[str, ...], processes: int) -> Verdict:
    """`reward.official` of a finished episode, in one of `processes` worker processes (0: in a thread)."""
    domain, messages, termination = episode.domain, episode.messages, episode.termination
    if processes == 0:
        return await asyncio.to_thread(reward.official, domain, episode.task, messages, termination, basis)
    key = (domain.name, domain.solo, domain.files)
    pool = _pool(processes)
    try:
        return await asyncio.get_running_loop().run_in_executor(
            pool, _evaluate, key, episode.task.id, messages, termination, basis
        )
    except BrokenProcessPool as error:
        _replace(processes, pool)
        raise EnvironmentFailure(f"a worker process of the official evaluator died ({error})") from error


_pools: dict[int, ProcessPoolExecutor] = {}


def _pool(processes: int) -> ProcessPoolExecutor:
    if processes not in _pools:
        # spawn: a fork of a process with an event loop and threads may hang
        _pools[processes] = ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"))
    return _pools[processes]


def _replace(processes: int, broken: ProcessPoolExecutor) -> None:
    """Have the next call make a new pool. Everybody who waited for the broken one comes here: the first drops it, and
    the others must not drop the one that has been made meanwhile."""
    if _pools.get(processes) is broken:
        del _pools[processes]


def _evaluate(
    key: tuple[str, bool, DomainFiles],
    task_id: str,
    messages: Sequence[Any],
    termination: str | None,
    basis: tuple[str, ...],
) -> Verdict:
    domain = load_domain(*key)
    return reward.official(domain, domain.tasks[task_id], messages, termination, basis)
