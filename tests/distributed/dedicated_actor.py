"""The actor's side of a dedicated old-logit model: makes versions, fills the bank, and reads the scores.

usage: dedicated_actor.py CONFIG FINDINGS FIRST   (one of the trainer's ranks; `megatron-async score` runs beside it)
FIRST: version of the first weights; above 0 they differ from the checkpoint's, as after a resume.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch.distributed as dist

from megatron_async.bank import Bank
from megatron_async.config import load
from megatron_async.engine import platform
from megatron_async.engine.policy import Policy
from megatron_async.old_logits import build_source
from megatron_async.scorer import scoring_sequences
from megatron_async.training.control import Control
from megatron_async.training.scores import KeptScores
from megatron_async.trajectory import SamplingParams, Status, Trajectory, VersionSpan
from tests.engine_batches import VOCAB
from tests.old_logits_batches import policy_gradient, versioned_sequences

FIRST = int(sys.argv[3])
LAST = FIRST + 3


def trajectory(name: str, versions: tuple[int, ...], seed: int) -> Trajectory:
    """A prompt, then eight action tokens under each of the versions."""
    random = np.random.default_rng(seed)
    made = Trajectory(name, f"group-{name}", f"prompt-{name}", SamplingParams())
    made.append_context(random.integers(0, VOCAB, 5))
    count = 8 * len(versions)
    spans = [VersionSpan(version, 8 * i, 8 * (i + 1)) for i, version in enumerate(versions)]
    made.append_action(random.integers(0, VOCAB, count), -np.ones(count), spans, "stop")
    made.finish(Status.OK, 1.0)
    return made


def everything() -> list[Trajectory]:
    """One trajectory per pair of versions that follow one another, and one per version."""
    chains = [(v,) for v in range(FIRST, LAST + 1)] + [(v, v + 1) for v in range(FIRST, LAST)]
    return [trajectory(f"t{i}", versions, seed=i) for i, versions in enumerate(chains)]


def note(
    policy: Policy, trajectories: list[Trajectory], version: int, expected: dict[str, np.ndarray]
) -> None:
    """What the tokens of the present version get from the present weights."""
    scored = policy.logprobs(scoring_sequences(trajectories, version))
    for made, values in zip(trajectories, scored, strict=True):
        known = expected.setdefault(made.trajectory_id, np.full(len(made), np.nan, np.float32))
        known[made.versions == version] = values[made.versions == version]


def collect(bank: Bank, trajectories: list[Trajectory], version: int) -> None:
    """Record those that a rollout would finish under this version."""
    for made in trajectories:
        if made.max_version == version:
            started = Trajectory(made.trajectory_id, made.group_id, made.prompt_id, made.sampling)
            bank.start_trajectory(started)
            bank.finish_trajectory(made)


def step(policy: Policy, seed: int) -> None:
    batch = versioned_sequences(range(1), current=0, seed=seed)
    assert policy.train_step(batch, policy_gradient(batch)).skipped is None


def main() -> None:
    config = load(sys.argv[1], [])
    policy = Policy.build(config.model, config.layout, config.trainer, config.optimizer)
    control = Control(60.0)
    leads = dist.get_rank() == 0
    bank = Bank.open(config.bank_url) if leads else None
    if FIRST:
        step(policy, seed=99)  # other weights than the checkpoint's
        for version in range(1, FIRST + 1):
            if bank:
                bank.record_version(version, version - 1)
    source = build_source(config, policy, frozenset(), FIRST, KeptScores(config, control, bank).fetch)
    trajectories, expected = everything(), {}
    for version in range(FIRST, LAST + 1):
        note(policy, trajectories, version, expected)
        if bank:
            collect(bank, trajectories, version)
        if version < LAST:
            step(policy, seed=version)
            if bank:
                bank.record_version(version + 1, version)
            source.updated(version + 1, oldest_needed=0)
    if bank:
        assert bank.take_batch(0, len(trajectories), 1, 0) is not None
    began = time.monotonic()
    found = source.score(scoring_sequences(trajectories, LAST), [t.trajectory_id for t in trajectories])
    findings = {
        "worst": max(
            float(np.abs(values - expected[made.trajectory_id])[made.loss_mask & ~current].max(initial=0.0))
            for made, values, current in zip(trajectories, found.values, found.is_current, strict=True)
        ),
        "compared": sum(int((t.loss_mask & (t.versions < LAST)).sum()) for t in trajectories),
        "missing": sum(
            int((np.isnan(values) & made.loss_mask & (made.versions < LAST)).sum())
            for made, values in zip(trajectories, found.values, strict=True)
        ),
        "sent_bytes": found.metrics["old_logits/sent_bytes"],
        "waited": time.monotonic() - began,
        "moved": float(
            np.abs(expected["t0"] - policy.logprobs(scoring_sequences(trajectories[:1], 0))[0])[5:].max()
        ),
    }
    if bank:
        bank.set_state("phase", "finished")
        Path(sys.argv[2]).write_text(json.dumps(findings))
        bank.close()
    source.close()
    platform.shutdown()


if __name__ == "__main__":
    main()
