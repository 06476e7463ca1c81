"""How often a server may fail before it is given up: the same bound for engines and router (`engines.max_restarts`)."""

from __future__ import annotations

from megatron_async.config.schema import EngineConfig

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0


class RestartBudget:
    """The failures of one server. Those older than `engines.restart_window_s` are forgotten."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._failures: list[float] = []

    def failed(self, now: float) -> float | None:
        """Count a failure at `now` (monotonic seconds): the pause before the next start, which doubles with each one;
        None after more than `engines.max_restarts`."""
        window = self._config.restart_window_s
        self._failures = [at for at in self._failures if now - at <= window] + [now]
        if len(self._failures) > self._config.max_restarts:
            return None
        return float(min(FIRST_PAUSE_S * 2.0 ** (len(self._failures) - 1), LONGEST_PAUSE_S))

    def describe(self, pause_s: float | None) -> str:
        """What follows from `failed`, in words."""
        if pause_s is None:
            return f"given up after {len(self._failures)} failures in {self._config.restart_window_s:g} s"
        return f"started again in {pause_s:g} s"
