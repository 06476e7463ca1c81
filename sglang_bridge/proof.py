"""Proofs that an engine holds what was published: log-probs of a canary, hashes of every parameter.

Invariants: a proof speaks of one engine and names it; a log-prob that is no number is a failed proof.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from sglang_bridge.checksum import EngineChecksums
from sglang_bridge.errors import PublishError


@dataclass(frozen=True, slots=True)
class Canary:
    """A token sequence and its log-probs under the weights being published.

    ``logprobs[t]`` = log p(token t | tokens < t) at temperature 1, token-aligned, ``[0]`` ignored. An engine passes
    when the largest difference is at most ``tolerance``: above engine noise (1e-5 in float32, up to 0.2 in bfloat16
    on a random tiny model), below what an update changes.
    """

    input_ids: Sequence[int]
    logprobs: Sequence[float]
    tolerance: float = 1e-4

    def __post_init__(self) -> None:
        if len(self.input_ids) != len(self.logprobs) or len(self.input_ids) < 4:
            raise ValueError(f"a canary needs at least 4 tokens and as many log-probs, got {len(self.input_ids)} and "
                             f"{len(self.logprobs)}")

    def worst(self, scores: Sequence[float], start: int) -> tuple[int, float]:
        """The token behind ``start`` whose log-prob is farthest off, and by how much."""
        at = max(range(start + 1, len(scores)), key=lambda t: abs(scores[t] - self.logprobs[t]))
        return at, abs(scores[at] - self.logprobs[at])


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with the engine at ``url``."""

    url: str
    text: str


def scores_problem(url: str, version: int, canary: Canary, scores: Sequence[float], start: int) -> Problem | None:
    """What an engine's scores of a canary are no proof for; None where they are one. ``start``: tokens before it came
    from the prefix cache."""
    at, difference = canary.worst(scores, start)
    if difference <= canary.tolerance:  # a NaN fails
        return None
    return Problem(
        url,
        f"{url} does not sample as version {version}: the canary's token {at} has log-prob {scores[at]:.6f}, "
        f"expected {canary.logprobs[at]:.6f}, tolerance {canary.tolerance:g} "
        f"({'over the prefix cache' if start else 'recomputed'}). It is paused.",
    )


def check_hashable(url: str, info: dict[str, Any]) -> None:
    """Refuse to compare hashes with an engine that hashes otherwise. ``info``: what it says of itself."""
    if info.get("device") != "cpu" or engine_processes(url, info) != 1:
        raise PublishError(
            f"{url}: checksums need an engine on a CPU without tensor parallelism, this one has device "
            f"{info.get('device')!r} and {engine_processes(url, info)} processes; verify with a canary instead"
        )


def hashes_problem(url: str, version: int, sums: EngineChecksums, answer: dict[str, Any]) -> Problem | None:
    """How an engine's hashes differ from those of what was sent: a parameter differs, is missing, or is not the
    model's. None where they are the same."""
    try:
        sums.compare(answer["ranks"][0]["checksums"])
    except (KeyError, IndexError, TypeError):
        return Problem(url, f"{url}: /weights_checker gave no checksums: {str(answer)[:200]}")
    except ValueError as error:
        return Problem(url, f"{url} does not hold version {version}: {error}. It stays paused.")
    return None


def engine_processes(url: str, info: dict[str, Any]) -> int:
    """Processes of an engine that hold a part of the weights. ``info``: what it says of itself.

    Raises:
        PublishError: it does not say that.
    """
    tensor, pipeline = info.get("tp_size", 1), info.get("pp_size", 1)
    if type(tensor) is not int or type(pipeline) is not int or min(tensor, pipeline) < 1:
        raise PublishError(f"{url}: /server_info says tp_size {tensor!r:.80} and pp_size {pipeline!r:.80}", urls=(url,))
    return tensor * pipeline


def hashed(tensors: Iterable[tuple[str, Tensor]], sums: EngineChecksums) -> Iterator[tuple[str, Tensor]]:
    """``tensors``, each counted in ``sums`` as it passes."""
    for name, tensor in tensors:
        sums.add(name, tensor)
        yield name, tensor


def read_checkpoint(path: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a safetensors checkpoint, one at a time."""
    from safetensors import safe_open

    files = sorted(Path(path).glob("*.safetensors"))
    if not files:
        raise ValueError(f"{path} holds no *.safetensors file")
    for file in files:
        with safe_open(file, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118  (not a dict: it cannot be iterated)
                yield name, shard.get_tensor(name)


