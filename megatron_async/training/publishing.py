"""The trainer's side of publishing: its shards stream through rank 0 to the engines, and the result is verified.

Invariants: ranks never desynchronise (the export is a collective that every rank runs to its end, also when the
engines fail; the failure is raised on all ranks afterwards); an engine that fails costs one more export, not the run:
the version is sent again to the others, and the engine catches up when it is back. Where engines are drained, some get
a version while the others still serve the one before: it is published when all hold it.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from megatron_async import training_record
from megatron_async.config.schema import PublishConfig
from megatron_async.engine.policy import Policy
from megatron_async.engine.sequences import Sequence
from megatron_async.training.control import Control
from megatron_async.training.engine_group import EngineGroup
from sglang_bridge import Canary, Publisher, PublishError

_CANARY_LENGTH = 48
_CANARY_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.5}
"""Largest difference of one log-prob between engines that hold the same weights: rounding of about 1e-6 in float32;
in bfloat16 up to 0.2 on a tiny random model, where a routing decision flips. Wrong weights differ by several units."""

_NOTHING: dict[str, Any] = {"paused_seconds": 0.0, "bytes": 0, "aborted_tokens": 0}

Report = Callable[[], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Published:
    """What a publish cost. seconds: wall time on rank 0; paused_seconds: during which the engines stood still."""

    version: int
    seconds: float
    paused_seconds: float
    bytes: int
    aborted_tokens: int


class WeightPublisher:
    """Sends the policy's weights to every engine after each `publish.every`-th update.

    engines: on rank 0 only; None elsewhere.
    """

    def __init__(
        self,
        config: PublishConfig,
        policy: Policy,
        control: Control,
        engines: EngineGroup | None,
        folder: Path,
    ) -> None:
        self._config = config
        self._policy = policy
        self._control = control
        self._engines = engines
        self._folder = folder

    def due(self, version: int) -> bool:
        """Lag-n publishing: engines get every n-th version (the setting of arXiv 2607.18722)."""
        return version % self._config.every == 0

    def publish(self, version: int) -> Published:
        """Publish the resident weights as `version` to every engine that is there, again to the rest when one fails.

        Raises PublishError on every rank when no engine is to blame.
        """
        started = time.monotonic()
        canary = self._canary(version)
        if self._config.pause_mode == "drain":
            values = self._in_turn(version, canary)
        else:
            values = self._to_all(version, canary)
        return Published(version=version, seconds=time.monotonic() - started, **values)

    def _to_all(self, version: int, canary: Canary | None) -> dict[str, Any]:
        while (values := self._try(version, canary)) is None:
            continue
        return values

    def _in_turn(self, version: int, canary: Canary | None) -> dict[str, Any]:
        """Some engines after the others: each time drained first, while the rest serve. What it cost in all."""
        total = dict(_NOTHING)
        while self._control.json_from_rank_zero(lambda: self._drain_next(version)):
            for name, value in self._apart(version, canary).items():
                total[name] += value
        self._control.json_from_rank_zero(lambda: self._all_hold(version))
        return total

    def _drain_next(self, version: int) -> int:
        assert self._engines is not None, "rank 0 owns the engines"
        return self._engines.drain_next(version)

    def _all_hold(self, version: int) -> None:
        assert self._engines is not None, "rank 0 owns the engines"
        self._engines.published(version)

    def _try(self, version: int, canary: Canary | None) -> dict[str, Any] | None:
        if not self._control.json_from_rank_zero(self._present):
            nobody: dict[str, Any] = self._control.json_from_rank_zero(lambda: self._nobody(version))
            return nobody
        publisher = self._engines.publisher if self._engines is not None else None
        report = self._send(publisher, version, canary)
        values: dict[str, Any] | None = self._control.json_from_rank_zero(lambda: self._outcome(report, version))
        return values

    def _present(self) -> int:
        assert self._engines is not None, "rank 0 owns the engines"
        return self._engines.refresh()

    def _outcome(self, report: Report, version: int) -> dict[str, Any] | None:
        """What publishing cost, or None when it is to be done again without the engines that failed."""
        assert self._engines is not None, "rank 0 owns the engines"
        try:
            values = report()
        except PublishError as error:
            self._engines.leave_out(error)
            return None
        self._engines.published(version)
        return values

    def _nobody(self, version: int) -> dict[str, Any]:
        """No engine is there: whichever comes back is late, and gets the weights while the trainer waits."""
        self._all_hold(version)
        return dict(_NOTHING)

    def catch_up(self, version: int) -> None:
        """Publish the resident weights to the engines that are late, and to no others. Collective."""
        self._apart(version, self._canary(version))

    def _apart(self, version: int, canary: Canary | None) -> dict[str, Any]:
        """Publish to the engines that are late or drained; what it cost, nothing when it failed."""
        publisher = self._engines.to_late_ones() if self._engines is not None else None
        try:
            report = self._send(publisher, version, canary)
            values: dict[str, Any] = self._control.json_from_rank_zero(lambda: self._caught_up(report))
            return values
        finally:
            if publisher is not None:
                publisher.close()

    def _caught_up(self, report: Report) -> dict[str, Any]:
        assert self._engines is not None, "rank 0 owns the engines"
        try:
            values = report()
        except PublishError as error:
            self._engines.leave_out(error)
            return dict(_NOTHING)
        self._engines.caught_up()
        return values

    def _send(self, publisher: Publisher | None, version: int, canary: Canary | None) -> Report:
        if self._config.transport == "disk":
            return self._from_disk(publisher, version, canary)
        return self._over_group(publisher, version, canary)

    def _over_group(self, publisher: Publisher | None, version: int, canary: Canary | None) -> Report:
        export = self._policy.export()
        if publisher is None:
            for _ in export:
                continue
            return dict
        try:
            outcome = publisher.publish(
                version, _on_rank_zero(export), canary=canary, checksum=self._verifies("checksum", version)
            )
        except Exception as error:  # noqa: BLE001 - raised on every rank by the caller
            for _ in export:  # the other ranks are inside the same collective
                continue
            return _raiser(error)
        return lambda: _fields(outcome)

    def _from_disk(self, publisher: Publisher | None, version: int, canary: Canary | None) -> Report:
        path = self._folder / f"version_{version:06d}"
        self._policy.save_hf(path)
        if publisher is None:
            return dict

        def report() -> dict[str, Any]:
            training_record.carry(self._folder.parent, path)
            outcome = publisher.publish_from_disk(version, path, canary=canary)
            for other in self._folder.iterdir():  # the engines have read the newest: older ones would fill the disk
                if other != path:
                    shutil.rmtree(other)
            return _fields(outcome)

        return report

    def _canary(self, version: int) -> Canary | None:
        """A fixed prompt with the log-probs that the engines must report for it under the new weights."""
        if not self._verifies("canary", version):
            return None
        # SGLang reports the vocabulary's last id as 0 among a prompt's log-probs, so the canary does without it.
        ids = self._policy.hf_config.vocab_size - 1
        tokens = np.random.default_rng(version).integers(0, ids, _CANARY_LENGTH).astype(np.int32)
        (logprobs,) = self._policy.logprobs([Sequence(tokens)])
        tolerance = _CANARY_TOLERANCE[self._policy.model_config.dtype]
        return Canary(input_ids=tokens.tolist(), logprobs=logprobs.tolist(), tolerance=tolerance)

    def _verifies(self, how: str, version: int) -> bool:
        return self._config.verify == how and version % self._config.verify_every == 0


def _on_rank_zero(export: Iterator[tuple[str, Tensor | None]]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in export:
        assert tensor is not None, f"export yields tensors on rank 0, {name} came empty"
        yield name, tensor


def _fields(outcome: Any) -> dict[str, Any]:
    return {
        "paused_seconds": outcome.paused_seconds,
        "bytes": outcome.bytes,
        "aborted_tokens": outcome.aborted_tokens,
    }


def _raiser(error: Exception) -> Report:
    def report() -> dict[str, Any]:
        raise error

    return report
