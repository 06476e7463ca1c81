"""Calls of an environment, whoever plays the policy: each has a deadline, and what goes wrong in there is named.

Invariant: environments are users' code. Whatever they raise ends their episode as a failure of the environment, and
nothing that `close` raises changes an outcome or reaches another episode.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from megatron_async.rollout.blocking import Call, Timed, report
from megatron_async.rollout.environments.base import Environment, EnvironmentFailure, Message
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
    call: Awaitable[T],
    deadline_s: float,
    blocked: Callable[[float], None] = lambda seconds: None,
) -> T:
    """Await one call of the environment; whatever goes wrong in there is EpisodeFailure (`environment_error`).

    what: says which call it is. blocked: told the seconds for which it stopped the event loop, which is logged too.
    """

    def note(seconds: float) -> None:
        blocked(seconds)
        report(what, seconds)

    try:
        async with asyncio.timeout(deadline_s) as deadline:
            return await Timed(what, call, note)
    except EnvironmentFailure as error:
        message = f"{what.method}: {error}"
        raise EpisodeFailure(Status.ENVIRONMENT_ERROR, error.kind, message) from error
    except Exception as error:  # environments are users' code: their bugs are failures of the environment
        if deadline.expired():
            message = f"{what.method} gave no answer in {deadline_s:g} s (rollout.turn_deadline_s)"
            raise EpisodeFailure(Status.ENVIRONMENT_ERROR, "environment_timeout", message) from error
        logger.exception("the environment raised in %s", what.method)
        message = f"{what.method} raised {type(error).__name__}: {error}"
        raise EpisodeFailure(Status.ENVIRONMENT_ERROR, "environment_exception", message) from error


def check_observation(messages: Sequence[Message]) -> None:
    """Raises EpisodeFailure for a step that returned neither messages nor done."""
    if not messages:
        raise EpisodeFailure(
            Status.ENVIRONMENT_ERROR,
            "no_observation",
            "step returned neither messages nor done: the policy has nothing to answer",
        )


async def close(what: Call, environment: Environment, deadline_s: float) -> None:
    """Close the environment of an episode; its outcome stands, so a failure here is only reported.

    what: says which call it is.
    """
    try:
        async with asyncio.timeout(deadline_s):
            await Timed(what, environment.close(), lambda seconds: report(what, seconds))
    except Exception:
        logger.exception("trajectory %s: the environment failed to close", what.trajectory)
