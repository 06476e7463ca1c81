"""Old log-probs that lie in the bank: kept by this run before a restart, or written by a dedicated model.

Invariant: rank 0 reads, and every rank gets the same; what goes wrong on rank 0 is raised on every rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf

import numpy as np

from megatron_async.bank import Bank
from megatron_async.config.schema import RunConfig
from megatron_async.errors import PartnerGone
from megatron_async.training.control import Control

Scores = dict[str, tuple[int, bytes]]

_LOOK_S = 0.02


class ScorerDeadline(PartnerGone):
    """The dedicated model did not score a batch in time."""


class KeptScores:
    """bank: on rank 0 only."""

    def __init__(self, config: RunConfig, control: Control, bank: Bank | None) -> None:
        self._deadline_s = config.trainer.deadline_s
        self._control = control
        self._bank = bank

    def keep(self, scores: Mapping[str, tuple[int, bytes]], oldest: int) -> None:
        """Write scores down; those with a token older than `oldest` are forgotten."""
        if self._bank and scores:
            self._bank.save_scores(scores, oldest)

    def all(self) -> Scores:
        """Everything that was kept (collective)."""
        return self._everywhere(lambda bank: bank.load_scores())

    def fetch(self, trajectory_ids: SequenceOf[str]) -> dict[str, np.ndarray]:
        """Log-probs float32 [L] of these trajectories, waited for (collective).

        Raises ScorerDeadline after `trainer.deadline_s` seconds, naming how many are missing.
        """
        scores = self._everywhere(lambda bank: self._wait(bank, trajectory_ids))
        return {key: np.frombuffer(data, "<f4").astype(np.float32) for key, (_, data) in scores.items()}

    def _wait(self, bank: Bank, trajectory_ids: SequenceOf[str]) -> Scores:
        started = time.monotonic()
        while True:
            found = bank.load_scores(trajectory_ids)
            missing = [key for key in trajectory_ids if key not in found]
            if not missing:
                return found
            if time.monotonic() - started > self._deadline_s:
                raise ScorerDeadline(
                    f"{len(missing)} of {len(trajectory_ids)} trajectories of the batch have no old log-probs after "
                    f"{self._deadline_s:g} s (trainer.deadline_s), the first is {missing[0]}; look at "
                    "status/scorer.json and logs/scorer.log"
                )
            time.sleep(_LOOK_S)

    def _everywhere(self, read: Callable[[Bank], Scores]) -> Scores:
        def produce() -> dict[str, list[object]]:
            assert self._bank is not None, "rank 0 owns the bank"
            return {key: [oldest, data.hex()] for key, (oldest, data) in read(self._bank).items()}

        found = self._control.json_from_rank_zero(produce)
        return {key: (int(oldest), bytes.fromhex(data)) for key, (oldest, data) in found.items()}
