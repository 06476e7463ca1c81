"""Routing replay on what live engines sampled: experts that differ, and |log r_d|, with native and replayed routing.

    python -m tools.benchmark_routing_replay runs/NAME [--no-rows]

RUN was made with `engines.routed_experts: true`. Its trajectories of version 0 are scored with the weights that sampled
them, so that all of log r_d = log π(trainer) − log μ(engine) is the difference between the engines.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from sqlalchemy import create_engine

from megatron_async.bank import viewing
from megatron_async.config import load
from megatron_async.config.schema import LayoutConfig, RunConfig, TrainerConfig
from megatron_async.engine import platform
from megatron_async.engine.policy import Policy
from megatron_async.engine.sequences import Sequence
from megatron_async.trajectory import Trajectory
from tools.benchmark_rows import Row, write_rows

MOST = 2000
COMMAND = "python -m tools.benchmark_routing_replay runs/NAME"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Engine against trainer. discrepancy: |log r_d| of every action token, float64 [A]."""

    tokens: int
    disagreement_native: float
    disagreement_replayed: float
    discrepancy_native: np.ndarray
    discrepancy_replayed: np.ndarray


def first_version(config: RunConfig) -> list[Trajectory]:
    """Trajectories that version 0 alone sampled, with their experts on record."""
    found = viewing.finished(create_engine(config.bank_url), MOST)
    trajectories = [entry.trajectory for entry in found]
    return [t for t in trajectories if t.max_version == 0 and t.routed_experts is not None]


def compare(config: RunConfig, trajectories: list[Trajectory]) -> Comparison:
    """Score the trajectories twice on one rank with the run's starting checkpoint."""
    tokens = max(config.trainer.micro_batch_tokens, config.rollout.max_tokens)
    trainer = TrainerConfig(micro_batch_tokens=tokens, routing_replay="rollout")
    policy = Policy.build(config.model, LayoutConfig(), trainer)
    assert policy.routing is not None, "the model has experts"
    sequences = [
        Sequence(t.token_ids, t.sampling.temperature, routed_experts=t.routed_experts) for t in trajectories
    ]
    replayed = policy.logprobs(sequences)
    metrics = policy.routing.take_metrics()
    native = policy.logprobs([replace(sequence, routed_experts=None) for sequence in sequences])

    def discrepancy(scored: list[np.ndarray]) -> np.ndarray:
        pairs = zip(scored, trajectories, strict=True)
        return np.abs(np.concatenate([(own - t.rollout_logprobs)[t.loss_mask].astype(np.float64) for own, t in pairs]))

    return Comparison(
        tokens=sum(t.num_action_tokens for t in trajectories),
        disagreement_native=metrics["routing_replay/disagreement"],
        disagreement_replayed=metrics["routing_replay/disagreement_after"],
        discrepancy_native=discrepancy(native),
        discrepancy_replayed=discrepancy(replayed),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--no-rows", action="store_true")
    options = parser.parse_args()
    config = load(options.run / "config.yaml", [])
    trajectories = first_version(config)
    found = compare(config, trajectories)
    platform.shutdown()
    setting = f"{config.model.dtype}, live SGLang, {len(trajectories)} trajectories, {found.tokens} action tokens"
    rows = [
        Row("replay_disagreement_native", found.disagreement_native, "", "", setting, COMMAND),
        Row("replay_disagreement_replayed", found.disagreement_replayed, "", "<= 0", setting, COMMAND),
    ]
    for name, values in (("native", found.discrepancy_native), ("replayed", found.discrepancy_replayed)):
        rows.append(Row(f"replay_log_discrepancy_mean_{name}", float(values.mean()), "nats", "", setting, COMMAND))
        tail = float(np.quantile(values, 0.99))
        rows.append(Row(f"replay_log_discrepancy_p99_{name}", tail, "nats", "", setting, COMMAND))
    for row in rows:
        print(f"{row.figure}: {row.value} {row.unit}  ({row.conditions})")
    if not options.no_rows:
        write_rows("megatron", rows)


if __name__ == "__main__":
    main()
