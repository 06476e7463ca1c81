"""The loop as a discrete-event simulation: rollout, engines and trainer, coupled as in the product.

The trainer waits for a batch, recovers old log-probs, updates (the version grows), records the version, publishes, and
commits; meanwhile the engines sample. Deterministic by the seed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from megatron_async.simulation.engines import Engine
from megatron_async.simulation.errors import ScenarioError
from megatron_async.simulation.events import Clock, Work
from megatron_async.simulation.old_logits import step_cost
from megatron_async.simulation.playing import Group, Play, Players, Progress
from megatron_async.simulation.result import Result, Step
from megatron_async.simulation.scenario import Scenario


def simulate(scenario: Scenario, *, steps: int = 100, warm_up: int | None = None, seed: int = 0) -> Result:
    """Simulate `warm_up` steps that are not counted (null: enough to fill the queues) and `steps` that are.

    Raises ScenarioError for a scenario that cannot go on (nothing is left to happen), with what waits for what.
    """
    if steps < 1:
        raise ScenarioError(f"steps: {steps} is not at least 1")
    warm = max(5, 2 * (scenario.rollout.bound + 1)) if warm_up is None else warm_up
    loop = _Loop(scenario, seed)
    return loop.run(warm, steps)


@dataclass(slots=True)
class _Open:
    """The step in progress."""

    began: float
    batch: list[Group] = field(default_factory=list)
    trained: list[Play] = field(default_factory=list)
    version: int = 0
    stages: dict[str, float] = field(default_factory=dict)


class _Loop:
    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.scenario = scenario
        self.clock = Clock()
        self.progress = Progress()
        # More engines than episodes that run at once stay idle: they need not be simulated one by one.
        ever_used = min(scenario.engines.count, scenario.rollout.concurrency)
        self.engines = [Engine(self.clock, scenario.engines, self._engines_changed) for _ in range(ever_used)]
        draws = np.random.default_rng(seed)
        self.players = Players(self.clock, scenario, self.engines, self.progress, draws, self._group_ready)
        self.signals = np.random.default_rng(seed + 1)
        self.steps: list[Step] = []
        self.work: Work | None = None
        self.trainer_computes = False
        self.paused = False
        self.scored_tokens = 0.0
        self.waiting = False
        self.step = _Open(0.0)

    def run(self, warm_up: int, steps: int) -> Result:
        self.clock.after(0.0, self.players.admit)
        self.clock.after(0.0, self._begin_step)
        self._until(warm_up)
        started = self.clock.now
        before = [(engine.busy_seconds, engine.running_seconds) for engine in self.engines]
        playing, stale = self.players.running_seconds, self.progress.stale
        self._until(warm_up + steps)
        span = self.clock.now - started
        count = self.scenario.engines.count
        busy = sum(e.busy_seconds - b for e, (b, _) in zip(self.engines, before, strict=True))
        running = sum(e.running_seconds - r for e, (_, r) in zip(self.engines, before, strict=True))
        return Result(
            steps=tuple(self.steps[warm_up:]),
            engine_busy=busy / span / count,
            engine_running=running / span / count,
            episodes_running=(self.players.running_seconds - playing) / span,
            stale=self.progress.stale - stale,
        )

    def _until(self, steps: int) -> None:
        if not self.clock.run(lambda: len(self.steps) >= steps):
            raise ScenarioError(
                f"the simulated loop stands still after {len(self.steps)} steps at {self.clock.now:.1f} s: "
                f"{len(self.progress.waiting)} groups wait, {self.scenario.rollout.groups} are needed, "
                f"{self.progress.stale} trajectories were too old; raise bound or concurrency"
            )
        self.players.settle()
        for engine in self.engines:
            engine.settle()

    # ---------------------------------------------------------------- a step of the trainer

    def _begin_step(self) -> None:
        self.step = _Open(self.clock.now)
        self.waiting = True
        self._group_ready()

    def _group_ready(self) -> None:
        """The trainer looks at the bank at intervals: on average half of one later."""
        if self.waiting and self.players.ready >= self.scenario.rollout.groups:
            self.waiting = False
            self.clock.after(self.scenario.trainer.poll / 2, self._take)

    def _take(self) -> None:
        batch = self.players.take_batch()
        if batch is None:
            self.waiting = True
            self.players.admit()
            return
        step, progress, scenario = self.step, self.progress, self.scenario
        step.batch, step.version = batch, progress.version
        step.stages["wait"] = self.clock.now - step.began
        step.trained = self._with_signal(batch)
        unscored = self._unscored_tokens()
        cost = step_cost(scenario.trainer, scenario.old_logits, step.trained, progress.version, unscored)
        self._pause(cost.pausing > 0)
        # Scoring beside the update hides the shorter of the two; what shows of it is the stage `score`.
        score = cost.score + max(0.0, cost.beside - cost.update) + cost.pausing
        self._compute(
            "score",
            score,
            lambda: self._compute("update", cost.update, lambda: self._updated(cost.capture)),
        )

    def _with_signal(self, batch: list[Group]) -> list[Play]:
        share = self.scenario.trainer.trained_share
        chosen = [group for group in batch if share >= 1 or self.signals.random() < share] or batch[:1]
        return [play for group in chosen for play in group.members]

    def _unscored_tokens(self) -> float:
        """Tokens of trajectories that finished since the last update."""
        tokens = self.players.finished_tokens - self.scored_tokens
        self.scored_tokens = self.players.finished_tokens
        return tokens

    def _updated(self, capture: float) -> None:
        self._pause(False)
        self.progress.version += 1
        self._compute("capture", capture, self._publish)

    def _publish(self) -> None:
        model = self.scenario.publish
        if self.progress.version % model.every:
            self.step.stages["publish"] = 0.0
            self._finish()
            return
        before = max(0.0, model.seconds - model.paused)
        self._compute("publish", before, self._stand_still)

    def _stand_still(self) -> None:
        self._pause(True)
        self.clock.after(self.scenario.publish.paused, self._published)

    def _published(self) -> None:
        self.step.stages["publish"] += self.scenario.publish.paused
        for engine in self.engines:
            engine.set_version(self.progress.version, retract=self.scenario.publish.retract)
        self._pause(False)
        self._finish()

    def _finish(self) -> None:
        self._compute("overhead", self.scenario.trainer.overhead, self._commit)

    def _commit(self) -> None:
        step = self.step
        self.progress.outstanding -= self.scenario.rollout.batch
        gaps: dict[int, float] = {}
        for play in step.trained:
            for version, tokens in play.actions:
                gaps[step.version - version] = gaps.get(step.version - version, 0.0) + tokens
        members = [play for group in step.batch for play in group.members]
        self.steps.append(Step(
            end=self.clock.now,
            seconds=self.clock.now - step.began,
            stages=step.stages,
            gap_tokens=gaps,
            start_gaps=tuple(step.version - play.start_version for play in members),
            waited=tuple(play.waited for play in members),
            tokens=sum(gaps.values()),
        ))  # fmt: skip
        # The rollout looks at the bank at intervals, too.
        self.clock.after(self.scenario.rollout.poll / 2, self.players.admit)
        self._begin_step()

    # ---------------------------------------------------------------- processors that both sides share

    def _compute(self, stage: str, seconds: float, then: Callable[[], None]) -> None:
        began = self.clock.now

        def done() -> None:
            self.work, self.trainer_computes = None, False
            self._set_engine_speeds()
            self.step.stages[stage] = self.clock.now - began
            then()

        if seconds <= 0:
            done()
            return
        self.trainer_computes = True
        self._set_engine_speeds()
        self.work = Work(self.clock, seconds, self._trainer_speed(), done)

    def _trainer_speed(self) -> float:
        share = sum(engine.computes for engine in self.engines) / self.scenario.engines.count
        return 1.0 / (1.0 + self.scenario.trainer.interference * share)

    def _engines_changed(self) -> None:
        if self.work is not None:
            self.work.set_speed(self._trainer_speed())

    def _set_engine_speeds(self) -> None:
        speed = 1.0 / (1.0 + self.scenario.engines.interference) if self.trainer_computes else 1.0
        for engine in self.engines:
            engine.set_speed(0.0 if self.paused else speed)

    def _pause(self, paused: bool) -> None:
        self.paused = paused
        self._set_engine_speeds()
