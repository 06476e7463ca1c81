"""The trainer alone, on one rank, on batches that lie ready in a bank; started, killed and started again by the tests.

usage: trainer_worker.py CONFIG
Everything is the product's but the engines: there are none, so nothing is published.
"""

from __future__ import annotations

import sys

from megatron_async import train
from megatron_async.config import load
from megatron_async.training import session


class Unpublished(session.Session):
    """A session without engines."""

    def _connect(self) -> None:  # type: ignore[override]
        return None

    def publish(self) -> None:
        return None


class NoPublisher:
    """Stands where engines would be given a resumed version's weights."""

    def __init__(self, *_: object) -> None: ...

    def publish(self, version: int) -> None:
        return None


def main() -> int:
    session.WeightPublisher = NoPublisher  # type: ignore[assignment,misc]
    train.Session = Unpublished  # type: ignore[misc]
    return train.main(load(sys.argv[1], []))


if __name__ == "__main__":
    raise SystemExit(main())
