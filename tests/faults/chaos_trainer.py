"""A trainer without a model, for the short chaos run: the bank's and the engines' side of training, nothing else.

Its weights are the list of what it was trained on, so that they prove by themselves what is in them. It writes them
down every `checkpoint.every` steps, resumes from the newest, and trains recorded batches again, as the trainer does.

usage: python -m tests.faults.chaos_trainer CONFIG
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import urllib.request
from typing import Any

from megatron_async.bank import Bank
from megatron_async.bank.lineage import Lineage
from megatron_async.bank.requests import PHASE, PUBLISHED, TRAINING
from megatron_async.config import load
from megatron_async.config.schema import RunConfig
from megatron_async.observe import RunFiles
from megatron_async.roster import read_roster
from megatron_async.training.stopping import StopRequest

UPDATE_VARIABLE = "CHAOS_UPDATE_S"
"""In the environment: seconds of an update."""
WEIGHTS = "weights.json"
_DEADLINE_S = 900.0


def main() -> int:
    config = load(sys.argv[1], [])
    with Bank.open(config.bank_url) as bank:
        if train(config, bank):
            bank.set_state(PHASE, "finished")
    return 0


def train(config: RunConfig, bank: Bank) -> bool:
    """`config.steps` steps, from the newest checkpoint; False when it was asked to stop before, with a checkpoint."""
    stop = StopRequest(bank)
    path = config.run_path / WEIGHTS
    state = json.loads(path.read_text()) if path.exists() else {"version": 0, "trained": []}
    first, version = len(state["trained"]), state["version"]
    bank.rollback_uncommitted(first - 1)
    bank.set_current_version(version)
    line = Lineage((found.version, found.parent) for found in bank.versions())
    again = max((step.step + 1 for step in bank.steps() if step.state == "redo"), default=0)
    for step in range(first, config.steps):
        if step >= again and bank.get_state(PHASE) != TRAINING:
            publish(config, bank, version)
            bank.set_state(PHASE, TRAINING)
        least = line.updates(version) - config.rollout.max_staleness
        if (batch := take(config, bank, step, version, least, stop)) is None:
            write(config, state)
            return False
        time.sleep(float(os.environ.get(UPDATE_VARIABLE, "0.05")))
        parent, version = version, bank.next_version()
        bank.record_version(version, parent, step)
        line.add(version, parent)
        if step >= again:
            publish(config, bank, version)
        gaps = [int(line.gaps(parent, t.versions[t.loss_mask]).max()) for t in batch]
        bank.commit_step(step, parent, version, {"version_gap/max": max(gaps)})
        state = {"version": version, "trained": [*state["trained"], sorted(t.trajectory_id for t in batch)]}
        if (step + 1) % config.checkpoint.every == 0 or step + 1 == config.steps:
            write(config, state)
    return True


def take(
    config: RunConfig, bank: Bank, step: int, version: int, least: int, stop: StopRequest
) -> list[Any] | None:
    """The batch; None once a stop is asked for."""
    limit = time.monotonic() + _DEADLINE_S
    while True:
        if stop.by():
            return None
        if batch := bank.take_batch(step, config.batch.groups, config.batch.group_size, least):
            return batch
        if not all(engine.serves for engine in read_roster(config.run_path)):
            publish(config, bank, version)
        if time.monotonic() > limit:
            raise TimeoutError(f"step {step}: no batch in {_DEADLINE_S:g} s; the bank holds {bank.counts()}")
        time.sleep(0.02)


def publish(config: RunConfig, bank: Bank, version: int) -> None:
    """Give every engine that answers the version; the others are late, and get it while a batch is waited for."""
    body = json.dumps({"new_version": str(version), "abort_all_requests": False}).encode()
    for engine in read_roster(config.run_path):
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{engine.url}/update_weight_version", body, timeout=10).close()
    bank.set_state(PUBLISHED, str(version))


def write(config: RunConfig, state: dict[str, Any]) -> None:
    """The weights, and what tells the launcher of them."""
    path = config.run_path / WEIGHTS
    aside = path.with_suffix(".tmp")
    aside.write_text(json.dumps(state))
    aside.replace(path)
    folder = RunFiles(config.run_path).checkpoints / f"step_{len(state['trained']):06d}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").touch()


if __name__ == "__main__":
    raise SystemExit(main())
