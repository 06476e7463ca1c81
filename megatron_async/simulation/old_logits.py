"""What the old log-probs of a batch cost, for each source. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_async.simulation.scenario import OldLogitModel, TrainerModel


class Scored(Protocol):
    """A trajectory as scoring sees it. spans: (version, tokens up to the span's end, context included), in order."""

    @property
    def spans(self) -> Sequence[tuple[int, float]]: ...

    @property
    def tokens(self) -> float: ...


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds at full speed that one step takes on the trainer, by what they are for.

    score: recovering old log-probs before the update. beside: scoring on nodes of its own while the actor updates.
    pausing: scoring during which the engines stand still. update, capture: as in the metrics.
    """

    score: float
    update: float
    capture: float
    beside: float = 0.0
    pausing: float = 0.0


def step_cost(
    trainer: TrainerModel, model: OldLogitModel, batch: Sequence[Scored], version: int, unscored_tokens: float
) -> StepCost:
    """The cost of a step at `version` on `batch` (trained trajectories only).

    unscored_tokens: tokens, context included, of all trajectories touched since the last update; source `interrupt`
    scores them while the engines stand still.
    """
    tokens = sum(trajectory.tokens for trajectory in batch)
    nodes = float(trainer.nodes)
    update, forward = trainer.update_seconds(tokens, nodes), trainer.forward_seconds(tokens, nodes)
    source = model.source
    if source == "start_pass":
        return StepCost(forward, update, 0.0)
    if source == "ewma":
        return StepCost(2 * model.switch + forward, update, model.capture)
    if source == "snapshot":
        stale, oldest = stale_forward_tokens(batch, version)
        travel = 2 * model.travel * max(0, version - oldest)
        return StepCost(travel + trainer.forward_seconds(stale, nodes), update, model.capture)
    if source == "dedicated":
        actors = nodes - model.dedicated_nodes
        beside = trainer.forward_seconds(tokens, float(model.dedicated_nodes))
        return StepCost(0.0, trainer.update_seconds(tokens, actors), model.capture, beside=beside)
    if source == "interrupt":
        return StepCost(0.0, update, 0.0, pausing=trainer.forward_seconds(unscored_tokens, nodes))
    return StepCost(0.0, update, 0.0)


def stale_forward_tokens(batch: Iterable[Scored], version: int) -> tuple[float, int]:
    """(tokens to forward, oldest version) so that every token older than `version` is scored under its own version.

    A trajectory is forwarded once for each older version it holds, up to the last token of that version.
    """
    total, oldest = 0.0, version
    for trajectory in batch:
        ends: dict[int, float] = {}
        for span_version, end in trajectory.spans:
            ends[span_version] = max(end, ends.get(span_version, 0.0))
        for span_version, end in ends.items():
            if span_version < version:
                total += end
                oldest = min(oldest, span_version)
    return total, oldest
