"""What is simulated: engines, trainer, publishing, old log-probs, and the policy of the rollout. Times in seconds.

All classes are frozen; numbers come from `calibration` or from the user. Where trainer and engines compute on the same
processors, each slows the other down: `interference` says by how much (0: separate machines; 1: twice as long).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from megatron_async.rollout.admission import MODES, Mode
from megatron_async.simulation.errors import ScenarioError, number_problems
from megatron_async.simulation.workload import Workload

Source = Literal["start", "start_pass", "rollout", "ewma", "snapshot", "dedicated", "interrupt"]
SOURCES: tuple[Source, ...] = ("start", "start_pass", "rollout", "ewma", "snapshot", "dedicated", "interrupt")
"""Old-logit sources with a cost model. `start` reuses the training forward; `start_pass` pays a pass of its own."""


@dataclass(frozen=True, slots=True)
class EngineModel:
    """Continuous batching: with k requests running, one decoding step takes `step_base + step_per_request * k` and
    gives each of them a token. A context token costs `prefill` decoding steps' worth of its request's progress (cached
    prefixes are free until the weights change). request_seconds: what a request takes beside decoding, half
    of it before. interference: decoding takes 1 + interference times as long while the trainer computes."""

    count: int = 1
    step_base: float = 0.02
    step_per_request: float = 0.0
    prefill: float = 0.0
    request_seconds: float = 0.0
    interference: float = 0.0

    def step_seconds(self, running: int) -> float:
        """Seconds of one decoding step with `running` requests on one engine."""
        return self.step_base + self.step_per_request * running


@dataclass(frozen=True, slots=True)
class TrainerModel:
    """An update takes `update_fixed + update_per_token * tokens / nodes` at full speed; a forward-only pass the share
    `forward_share` of the part that grows with tokens. trained_share: of the groups of a batch, those that enter the
    loss (groups without a signal are left out). overhead: between two steps (commit, metrics). poll: between two looks
    at the bank. interference: all it computes takes 1 + interference times as long while all engines work."""

    nodes: int = 1
    update_fixed: float = 0.0
    update_per_token: float = 0.0
    forward_share: float = 1 / 3
    trained_share: float = 1.0
    overhead: float = 0.0
    poll: float = 0.0
    interference: float = 0.0

    def update_seconds(self, tokens: float, nodes: float) -> float:
        return self.update_fixed + self.update_per_token * tokens / nodes

    def forward_seconds(self, tokens: float, nodes: float) -> float:
        return self.forward_share * self.update_per_token * tokens / nodes


@dataclass(frozen=True, slots=True)
class PublishModel:
    """A publishing takes `seconds` of the trainer, `paused` of them with the engines standing still; every `every`
    steps. retract: running requests recompute their context under the new weights."""

    seconds: float = 0.0
    paused: float = 0.0
    every: int = 1
    retract: bool = True


@dataclass(frozen=True, slots=True)
class OldLogitModel:
    """What recovering old log-probs costs beside forward passes.

    capture: recording a version (per update). travel: one step of the history, back or forth. switch: swapping averaged
    weights in and out. dedicated_nodes: trainer nodes that only score (source `dedicated`).
    """

    source: Source = "start"
    capture: float = 0.0
    travel: float = 0.0
    switch: float = 0.0
    dedicated_nodes: int = 1


@dataclass(frozen=True, slots=True)
class RolloutPolicy:
    """Who may start, and what is thrown away.

    bound: `rollout.max_staleness`. admission, window: `rollout.admission`, `rollout.window`, and "queue", to compare
    with a closed form: start whenever there is a place, keep the newest `queue` finished trajectories in the order in
    which they ended, whatever their age. arrivals_per_second: prompts (groups) that arrive, Poisson; infinite: always
    one more. poll: between two looks at the bank for a new version. recording: from the end of an episode to its being
    in the bank. turnaround: from there to the start of what takes its place.
    """

    bound: int = 1
    concurrency: int = 32
    groups: int = 16
    group_size: int = 8
    admission: Mode | Literal["queue"] = "throttle"
    window: int = 0
    queue: int = 0
    arrivals_per_second: float = math.inf
    poll: float = 0.0
    recording: float = 0.0
    turnaround: float = 0.0

    @property
    def batch(self) -> int:
        """Trajectories per training step."""
        return self.groups * self.group_size


@dataclass(frozen=True, slots=True)
class Scenario:
    """One loop. Raises ScenarioError for numbers that describe none."""

    workload: Workload
    engines: EngineModel = EngineModel()
    trainer: TrainerModel = TrainerModel()
    publish: PublishModel = PublishModel()
    old_logits: OldLogitModel = OldLogitModel()
    rollout: RolloutPolicy = RolloutPolicy()

    def __post_init__(self) -> None:
        problems = self._wrong_numbers() or [*self._wrong_policy(), *self._wrong_source()]
        if problems:
            raise ScenarioError("scenario: " + "; ".join(problems))

    def _wrong_numbers(self) -> list[str]:
        rollout, trainer, publish = self.rollout, self.trainer, self.publish
        problems = number_problems(rollout, may_be_infinite=["arrivals_per_second"])
        for model in (self.engines, trainer, publish, self.old_logits):
            problems += number_problems(model)
        counts = (rollout.groups, rollout.group_size, rollout.concurrency, self.engines.count, trainer.nodes)
        if min(*counts, publish.every) < 1:
            problems.append("groups, group_size, concurrency, engines, nodes and publish.every must be at least 1")
        if not problems and self.engines.step_seconds(1) <= 0:
            problems.append("a decoding step must take time")
        if rollout.arrivals_per_second == 0:
            problems.append("no prompt ever arrives (arrivals_per_second is 0)")
        if trainer.trained_share > 1:
            problems.append(f"trained_share {trainer.trained_share:g} is more than all of a batch")
        if publish.paused > publish.seconds * (1 + 1e-9):
            problems.append(f"publishing takes {publish.seconds:g} s, but the engines pause {publish.paused:g} s of it")
        return problems

    def _wrong_policy(self) -> list[str]:
        rollout, every = self.rollout, self.publish.every
        if rollout.admission == "queue":
            wide_enough = rollout.queue >= rollout.batch
            return [] if wide_enough else [f"a queue of {rollout.queue} never holds a batch of {rollout.batch}"]
        if rollout.admission not in MODES:
            return [f"admission {rollout.admission!r} is none of {', '.join(MODES)}, queue"]
        if rollout.bound < every - 1:
            return [f"bound {rollout.bound} is too small for publishing every {every} steps"]
        return []

    def _wrong_source(self) -> list[str]:
        model, nodes = self.old_logits, self.trainer.nodes
        if model.source not in SOURCES:
            return [f"old-logit source {model.source!r} is none of {', '.join(SOURCES)}"]
        if model.source == "dedicated" and not 0 < model.dedicated_nodes < nodes:
            return [
                f"source dedicated takes {model.dedicated_nodes} of {nodes} trainer nodes; at least one must score and "
                "one must train"
            ]
        return []
