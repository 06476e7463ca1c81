"""How long the trainer waits for a batch: as long as the rollouts show signs of life, and not for ever."""

from __future__ import annotations

import time
from collections.abc import Callable

from megatron_async.config.deadlines import longest_batch_wait_s
from megatron_async.config.schema import RunConfig

_LOOK_S = 1.0


class BatchWait:
    """Begins when it is made. signs: changes with whatever the rollouts do. clock: monotonic seconds."""

    def __init__(
        self, config: RunConfig, signs: Callable[[], object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config, self._signs, self._clock = config, signs, clock
        self._began = self._moved = self._looked = clock()
        self._seen = signs()

    def over(self) -> str:
        """Why nobody should wait any longer; empty while it is worth it."""
        now, limit_s = self._clock(), self._config.trainer.deadline_s
        if now - self._looked >= min(_LOOK_S, limit_s):
            self._looked = now
            if (seen := self._signs()) != self._seen:
                self._seen, self._moved = seen, now
        if now - self._moved > limit_s:
            return f"no sign of life of the rollouts for {now - self._moved:.0f} s (trainer.deadline_s={limit_s:g})"
        rollout = self._config.rollout
        if now - self._began > longest_batch_wait_s(rollout):
            return (
                f"the rollouts are at work, but no batch was complete after {now - self._began:.0f} s, twice what one "
                f"trajectory may take: (rollout.max_retries {rollout.max_retries} + 1) * (trajectory_deadline_s "
                f"{rollout.trajectory_deadline_s:g} + turn_deadline_s {rollout.turn_deadline_s:g})"
            )
        return ""
