"""The training loop: take a batch, recover its old log-probs, update, publish.

Runs under torchrun on every trainer rank. Versions are the spine: the batch holds tokens of versions up to
`version`; the update makes `version + 1`, which is recorded before any engine samples with it.
"""

from __future__ import annotations

from contextlib import closing

from megatron_async.config.schema import RunConfig
from megatron_async.engine.policy import TrainStepResult
from megatron_async.engine.sequences import Sequence
from megatron_async.errors import EXIT_STOPPED
from megatron_async.objectives import build_objective
from megatron_async.old_logits import AnchorLogprobs, build_source
from megatron_async.training.batch import Batch, IdleWork, to_sequences, unrewarded_sequences
from megatron_async.training.checkpointing import Stateful
from megatron_async.training.credit import build_credit
from megatron_async.training.loss import train_in_parts
from megatron_async.training.metrics import active_fraction
from megatron_async.training.publishing import Published
from megatron_async.training.session import Session
from megatron_async.training.stopping import LAUNCHER, StopAsked
from megatron_async.trajectory import Trajectory


def main(config: RunConfig) -> int:
    """Train `config.steps` steps, or until a stop is asked for; returns the exit code.

    A stop is a success for the launcher that asked for it, and an interruption for whoever sent a signal.
    """
    with Session.open(config) as session:
        with closing(Loop(config, session)) as loop:
            session.checkpoints.restore(loop.parts)
            try:
                for step in range(session.first_step, config.steps):
                    loop.step(step)
                    session.save(step, loop.parts)
            except StopAsked as stop:
                session.save_stopped(stop, loop.parts)
                return 0 if stop.by == LAUNCHER else EXIT_STOPPED
            session.checkpoints.finish()
            loop.credit.save(session.files.critic)
        session.save_final()
    return 0


class Loop:
    """One step of asynchronous RL; the state that outlives a step is the session's."""

    def __init__(self, config: RunConfig, session: Session) -> None:
        self.config = config
        self.session = session
        self.objective = build_objective(config.objective)
        self.credit = build_credit(config, session.stage, session.control)
        self.old_logits = build_source(
            config, session.policy, self.objective.needs, session.version, session.scores.fetch
        )
        self.parts: dict[str, Stateful] = {**self.credit.parts, "old_logits": self.old_logits}
        if self.old_logits.interrupts:
            self.old_logits.restore(session.version, session.scores.all())

    def step(self, step: int) -> None:
        session, version = self.session, self.session.version
        with session.stage("wait_batch", step):
            batch = self.assemble(session.feed.take(step, session.least_updates, self.idle_work), version)
        with session.stage("old_logits", step):
            sequences = to_sequences(batch)
            anchors = self.old_logits.score(sequences, batch.trained_ids)
        if self.old_logits.interrupts and sequences and not session.catching_up:
            with session.stage("interrupt", step):
                self.interrupt()
        sequences = self.credit.assign(step, batch.trained_trajectories, sequences)
        with session.stage("update", step):
            results = [] if self.credit.holds_policy(step) else self.update(sequences, anchors)
        self.credit.learn(step)
        published = self.advance(step) if any(r.skipped is None for r in results) else None
        # also after a step that was skipped because the mask took every token: an average restarts then
        if (active := active_fraction(self.objective, results)) is not None:
            self.old_logits.trained(active)
        session.interruption.release()
        session.finish_step(
            step, batch, anchors, self.objective, results, published, self.credit.take_metrics()
        )

    @property
    def idle_work(self) -> IdleWork | None:
        """What to do with finished trajectories while their batch is incomplete: score them ahead, if of use."""
        return self.score_ahead if self.old_logits.scores_ahead else None

    def score_ahead(self, trajectories: list[Trajectory]) -> None:
        """Old log-probs of trajectories that wait; the batch finds them."""
        if not trajectories:
            return
        sequences = unrewarded_sequences(trajectories, self.session.version, self.session.lineage)
        self.old_logits.score_ahead(sequences, [trajectory.trajectory_id for trajectory in trajectories])

    def interrupt(self) -> None:
        """Generation stops; the resident weights score all their tokens that have no old log-prob yet."""
        trajectories = self.session.interruption.collect(self.session.version)
        self.score_ahead(trajectories)
        ids = [trajectory.trajectory_id for trajectory in trajectories]
        self.session.scores.keep(self.old_logits.export(ids), self.session.oldest_needed)

    def assemble(self, trajectories: list[Trajectory], version: int) -> Batch:
        """Rewards to advantages; groups without any signal are left out of the loss if so configured."""
        advantages, trained = self.credit.scalars(trajectories)
        return Batch(trajectories, advantages, trained, version, self.session.lineage)

    def update(self, sequences: list[Sequence], anchors: AnchorLogprobs) -> list[TrainStepResult]:
        """`updates_per_batch` optimiser steps on disjoint parts of the batch; none for a batch without any signal."""
        parts = self.config.trainer.updates_per_batch
        sequences = self.session.policy.with_own_routing(sequences)
        return train_in_parts(self.session.policy, self.objective, sequences, anchors, parts)

    def advance(self, step: int) -> Published | None:
        """The updated weights become the next version: recorded, kept in the history, published when due."""
        session = self.session
        session.advance(step)
        with session.stage("capture", step):
            self.old_logits.updated(session.version, session.oldest_kept)
        with session.stage("publish", step):
            return session.publish()

    def close(self) -> None:
        """Let go of the critic, and of the history's files and threads."""
        self.credit.close()
        self.old_logits.close()
