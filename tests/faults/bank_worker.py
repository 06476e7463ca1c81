"""Processes for the bank's fault tests: `python -m tests.faults.bank_worker write|train|crowd URL NAME`.

`write` and `train` work until they are killed, `crowd` until it is done. `write` and `train` print one line per call
that returned, and only after it returned: what they printed, the bank has promised.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

from megatron_async.bank import Bank
from megatron_async.trajectory import VersionSpan
from tests.bank_support import collect, end, running

GROUP_SIZE = 2


def write(url: str, name: str) -> None:
    with Bank.open(url) as bank:
        for number in range(100_000):
            for member in range(GROUP_SIZE):
                trajectory = running(f"{name}.{number}.{member}", f"{name}.{number}")
                bank.start_trajectory(trajectory)
                trajectory.append_action([9] * 200, [-0.5] * 200, [VersionSpan(0, 0, 200)])
                bank.checkpoint_trajectory(trajectory)
                trajectory.append_action([], [], [], "length")
                bank.finish_trajectory(end(trajectory))
                _say("finished", trajectory.trajectory_id)


def crowd(url: str, name: str) -> None:
    """Eight writers at once, each with a connection of its own, and an end: two groups each."""

    def one(writer: int) -> None:
        with Bank.open(url) as bank:
            for number in range(2):
                for member in range(GROUP_SIZE):
                    collect(bank, f"{name}.{writer}.{number}.{member}", f"{name}.{writer}.{number}")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(8)))


def train(url: str, name: str) -> None:
    with Bank.open(url) as bank:
        bank.rollback_uncommitted()
        step = len(bank.steps())
        while True:
            batch = bank.take_batch(step, groups=1, group_size=GROUP_SIZE, min_updates=0)
            if batch is not None:
                bank.commit_step(step, 0, 0)
                _say("trained", str(step), *(t.trajectory_id for t in batch))
                step += 1


def _say(*words: str) -> None:
    sys.stdout.write(" ".join(words) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    {"write": write, "train": train, "crowd": crowd}[sys.argv[1]](sys.argv[2], sys.argv[3])
