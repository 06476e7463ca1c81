"""Mean staleness of a fully asynchronous loop in closed form (arXiv 2607.18722)."""

from __future__ import annotations


def fully_asynchronous_staleness(
    *, rollout_rate: float, trainer_rate: float, concurrency: float, batch: float, queue: float, spread: float
) -> float:
    """Mean number of versions between a trajectory's start and its training.

    With ρ = rollout_rate / trainer_rate (both in trajectories per second), q = queue / batch:
    C M / B + ρ for ρ < 1;  C M / (ρ B) + (2 q + ρ - 1) / (2 ρ) for ρ > 1.

    concurrency: C, trajectories running. batch: B. queue: Q, finished trajectories kept; the oldest are dropped beyond,
    and a batch takes the oldest kept. spread: M = E[longest of a group] / E[length].

    Where the terms come from: C M / rollout_rate is the time in flight (Little), a step lasts B / min(rates); a
    trajectory waits half a batch for its batch to fill (ρ < 1), or (Q - B/2) / rollout_rate in the queue (ρ > 1), and
    the update's own time B / trainer_rate; minus a half, as versions are counted whole.
    """
    rho = rollout_rate / trainer_rate
    if rho < 1:
        return concurrency * spread / batch + rho
    return concurrency * spread / (rho * batch) + (2 * queue / batch + rho - 1) / (2 * rho)
