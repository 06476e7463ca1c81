"""The trainer's side of publishing: its shards stream through rank 0 to the engines, and the result is verified.

Invariant: ranks never desynchronise. The export is a collective that every rank runs to its end, also when the
engines fail; the failure is raised on all ranks afterwards.
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

from megatron_async.config.schema import PublishConfig
from megatron_async.engine.policy import Policy
from megatron_async.engine.sequences import Sequence
from megatron_async.training.control import Control
from sglang_bridge import Canary, Publisher

_CANARY_LENGTH = 48
_CANARY_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.5}
"""Largest difference of one log-prob between engines that hold the same weights: rounding of about 1e-6 in float32;
in bfloat16 up to 0.2 on a tiny random model, where a routing decision flips. Wrong weights differ by several units."""

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

    publisher: the bridge's publisher, on rank 0 only; None elsewhere.
    """

    def __init__(
        self,
        config: PublishConfig,
        policy: Policy,
        control: Control,
        publisher: Publisher | None,
        folder: Path,
    ) -> None:
        self._config = config
        self._policy = policy
        self._control = control
        self._publisher = publisher
        self._folder = folder

    def due(self, version: int) -> bool:
        """Lag-n publishing: engines get every n-th version (formulas §5, setting of C)."""
        return version % self._config.every == 0

    def publish(self, version: int) -> Published:
        """Publish the resident weights as `version`; raises PublishError on every rank when an engine fails."""
        started = time.monotonic()
        canary = self._canary(version)
        if self._config.transport == "disk":
            report = self._from_disk(version, canary)
        else:
            report = self._over_group(version, canary)
        values = self._control.json_from_rank_zero(lambda: report())
        return Published(version=version, seconds=time.monotonic() - started, **values)

    def _over_group(self, version: int, canary: Canary | None) -> Report:
        export = self._policy.export()
        if self._publisher is None:
            for _ in export:
                continue
            return dict
        publisher = self._publisher
        try:
            outcome = publisher.publish(
                version, _on_rank_zero(export), canary=canary, checksum=self._verifies("checksum", version)
            )
        except Exception as error:  # noqa: BLE001 - raised on every rank by the caller
            for _ in export:  # the other ranks are inside the same collective
                continue
            return _raiser(error)
        return lambda: _fields(outcome)

    def _from_disk(self, version: int, canary: Canary | None) -> Report:
        path = self._folder / f"version_{version:06d}"
        self._policy.save_hf(path)
        if self._publisher is None:
            return dict
        publisher = self._publisher

        def report() -> dict[str, Any]:
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
