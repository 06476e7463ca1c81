"""Which part of which sequence has to be forwarded under which version. Pure NumPy.

Invariants:
- Every open token is in exactly one shard: that of its own version.
- A sequence is in a shard only if it holds an open token of that version, and is cut after the last such token, since
  no later token bears on it.
- Shards come newest first, so that a walk along the history takes each step once.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_async.engine.sequences import Sequence


@dataclass(frozen=True, slots=True)
class VersionShard:
    """The part of a batch that one version scores.

    members: indices into the batch. ends: tokens of each to forward. tokens: positions to keep, per member.
    """

    version: int
    members: tuple[int, ...]
    ends: tuple[int, ...]
    tokens: tuple[NDArray[np.int64], ...]

    @property
    def num_tokens(self) -> int:
        """Tokens that are scored for."""
        return sum(map(len, self.tokens))

    @property
    def forward_tokens(self) -> int:
        """Tokens that pass through the model for it."""
        return sum(self.ends)

    def cut(self, sequences: SequenceOf[Sequence]) -> list[Sequence]:
        """The members, each up to its last token of this version, with the experts recorded for those tokens."""
        return [
            Sequence(
                sequences[i].token_ids[:end],
                sequences[i].temperature,
                routed_experts=None if (record := sequences[i].routed_experts) is None else record[:end],
            )
            for i, end in zip(self.members, self.ends, strict=True)
        ]


def version_shards(
    versions: SequenceOf[NDArray[np.integer]], open_tokens: SequenceOf[NDArray[np.bool_]]
) -> list[VersionShard]:
    """Split a batch by version, newest first.

    Args:
        versions: version of every token, [L] per sequence; read at open tokens only.
        open_tokens: bool [L] per sequence, tokens that still need a log-prob.

    >>> shards = version_shards([np.array([0, 7, 7, 8, 0])], [np.array([False, True, True, True, False])])
    >>> [(shard.version, shard.ends) for shard in shards]
    [(8, (4,)), (7, (3,))]
    """
    found: dict[int, list[tuple[int, NDArray[np.int64]]]] = {}
    for i, (by_token, wanted) in enumerate(zip(versions, open_tokens, strict=True)):
        positions = np.flatnonzero(wanted)
        held = by_token[positions]
        for version in np.unique(held).tolist():
            found.setdefault(version, []).append((i, positions[held == version]))
    return [
        VersionShard(
            version,
            tuple(i for i, _ in parts),
            tuple(int(tokens[-1]) + 1 for _, tokens in parts),
            tuple(tokens for _, tokens in parts),
        )
        for version, parts in sorted(found.items(), reverse=True)
    ]


def token_versions(sequence: Sequence, current: int) -> NDArray[np.int64]:
    """int64 [L]: version of every action token, from its gap to the current one; meaningless elsewhere."""
    return current - sequence.arrays["version_gap"]
