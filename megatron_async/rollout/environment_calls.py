"""Calls of an environment, whoever plays the policy: each has a deadline, and what goes wrong in there is named.

Invariants
- Environments are users' code. Whatever they raise ends their episode as a failure of the environment, and nothing that
  `close` raises changes an outcome or reaches another episode. A cancellation that nobody here asked for (of a task
  that the environment awaited) is such a failure, and so is an attempt to end the process.
- A deadline, and a cancellation that was asked for, hold whatever the environment makes of them (`blocking.LETS_GO_S`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from megatron_async.errors import UserError
from megatron_async.rollout.blocking import Call, Timed, inside, report
from megatron_async.rollout.environments.base import Environment, EnvironmentFailure
from megatron_async.trajectory import Status

logger = logging.getLogger(__name__)
T = TypeVar("T")


class EpisodeFailure(Exception):
    """Ends an episode without a reward. kind: short name that is counted; the message says what happened."""

    def __init__(self, status: Status, kind: str, message: str) -> None:
        self.status = status
        self.kind = kind
        super().__init__(message)


async def ask(
    what: Call,
    call: Callable[[], Awaitable[T]],
    deadline_s: float,
    blocked: Callable[[float], None] = lambda seconds: None,
) -> T:
    """Make one call of the environment; whatever goes wrong in there is EpisodeFailure (`environment_error`).

    what: says which call it is. blocked: told the seconds for which it stopped the event loop, which is logged too.
    Raises CancelledError only when the task that asks was cancelled, and then always.
    """

    def note(seconds: float) -> None:
        blocked(seconds)
        report(what, seconds)

    task, error = asyncio.current_task(), None
    assert task is not None
    cancelled_before = task.cancelling()
    try:
        async with asyncio.timeout(deadline_s) as deadline:
            answer = await Timed(what, call, note)
    except (Exception, asyncio.CancelledError, SystemExit, BaseExceptionGroup) as raised:  # noqa: BLE001
        error = raised
    if task.cancelling() > cancelled_before:
        raise asyncio.CancelledError
    if deadline.expired() and not isinstance(error, EnvironmentFailure):
        message = f"{what.method} gave no answer in {deadline_s:g} s (rollout.turn_deadline_s)"
        raise EpisodeFailure(Status.ENVIRONMENT_ERROR, "environment_timeout", message) from error
    if error is not None:
        raise _failure(what, error) from error
    return answer


def make(what: Call, environment: Callable[[], Environment]) -> Environment:
    """A fresh environment; whatever goes wrong in there is EpisodeFailure, but for what users have to mend.

    what: says which call it is. Raises UserError as it comes.
    """
    try:
        with inside(what):
            return environment()
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise _failure(what, error) from error


def _failure(what: Call, error: BaseException) -> EpisodeFailure:
    if isinstance(error, EnvironmentFailure):
        return EpisodeFailure(Status.ENVIRONMENT_ERROR, error.kind, f"{what.method}: {error}")
    logger.error("the environment raised in %s", what.method, exc_info=error)
    message = f"{what.method} raised {type(error).__name__}: {error}"
    return EpisodeFailure(Status.ENVIRONMENT_ERROR, "environment_exception", message)


async def close(what: Call, environment: Environment, deadline_s: float) -> None:
    """Close the environment of an episode; its outcome stands, so a failure here is only reported.

    what: says which call it is.
    """
    try:
        await ask(what, environment.close, deadline_s)
    except EpisodeFailure as failure:
        logger.error("trajectory %s: the environment failed to close: %s", what.trajectory, failure)
