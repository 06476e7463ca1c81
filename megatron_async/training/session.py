"""Everything of a training run that outlives a step: policy, bank, engines, version, metrics.

Invariants: the version grows by one with every update and is recorded in the bank before any engine samples with
it; a step is committed to the bank exactly once, after its update; only rank 0 touches bank, engines and files.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from typing import Any

from megatron_async import training_record
from megatron_async.bank import Bank
from megatron_async.bank.lineage import Lineage
from megatron_async.bank.requests import FINISHED, PHASE, TRAINING
from megatron_async.config.schema import RunConfig
from megatron_async.engine import platform
from megatron_async.engine.policy import Policy, TrainStepResult
from megatron_async.errors import PartnerGone, UserError
from megatron_async.objectives import Objective
from megatron_async.observe import MetricsWriter, RunFiles, StatusWriter, Timeline
from megatron_async.old_logits import AnchorLogprobs
from megatron_async.training.batch import Batch, BatchFeed
from megatron_async.training.checkpointing import Checkpoints, Stateful
from megatron_async.training.control import MARGIN_S, Control
from megatron_async.training.engine_group import EngineGroup
from megatron_async.training.interruption import Interruption
from megatron_async.training.metrics import filter_metrics, step_metrics, update_metrics
from megatron_async.training.publishing import Published, WeightPublisher
from megatron_async.training.scores import KeptScores
from megatron_async.training.stopping import StopAsked, StopRequest

logger = logging.getLogger(__name__)

_CLAIM = "trainer"
_CLAIM_S, _CLAIM_PAUSE_S = 60.0, 0.5
"""How long an earlier trainer may take to end. That it was killed shows at once, on PostgreSQL within a minute if its
host went too."""


class Session:
    """Opened by every trainer rank; `with` closes it on every way out."""

    def __init__(self, config: RunConfig, policy: Policy, control: Control) -> None:
        self.config = config
        self.policy = policy
        self.control = control
        self.files = RunFiles(config.run_path)
        leads = control.rank == 0
        self.bank = Bank.open(config.bank_url) if leads else None
        self.status = StatusWriter(config.run_path, "trainer") if leads else None
        self.metrics = (
            MetricsWriter(config.run_path, tensorboard=config.observe.tensorboard) if leads else None
        )
        self.timeline = Timeline(config.run_path if leads else None, "trainer")
        self._engines = self._connect() if leads else None
        self.publisher = WeightPublisher(
            config.publish, policy, control, self._engines, config.run_path / "published"
        )
        anyone_late = self._engines.anyone_late if self._engines is not None else None
        self.stop = StopRequest(self.bank)
        self.feed = BatchFeed(
            config, control, self.bank, self._waiting, anyone_late, self._catch_up, self.stop.by, self._keep_claim
        )
        self.interruption = Interruption(config, control, self.bank, self._engines)
        self.scores = KeptScores(config, control, self.bank)
        self.checkpoints = Checkpoints(config, policy, control, self._generations_pruned)
        self.lineage = Lineage()
        self.version = self._newest = 0
        self.first_step = self._repeated_until = 0
        self.catching_up = False
        """Whether recorded batches are trained again, with engines and rollout waiting."""

    @classmethod
    @contextmanager
    def open(cls, config: RunConfig) -> Iterator[Session]:
        """Build the policy from the checkpoint (version 0), connect to bank and engines."""
        policy = Policy.build(config.model, config.layout, config.trainer, config.optimizer, config.seed)
        session = cls(config, policy, Control(config.trainer.deadline_s + MARGIN_S))
        try:
            session.resume()
            with session.stop:
                yield session
        finally:
            session.close()

    @contextmanager
    def stage(self, name: str, step: int) -> Iterator[None]:
        """Times the block, shows it in the status and on the timeline."""
        if self.status:
            self.status.set(name, counters={"step": step, "version": self.version})
        with self.timeline.stage(name, step):
            yield

    def resume(self) -> None:
        """Go on from the newest complete generation, or from the start where there is none.

        Steps that it does not contain are trained again on their recorded batches before anything new is sampled.

        Raises PartnerGone where another trainer of this run does not end.
        """
        self.control.json_from_rank_zero(self._claim)
        generation = self.checkpoints.resume()
        if generation is not None:
            self.version, self.first_step = generation.version, generation.steps
        versions, self._repeated_until = self.control.json_from_rank_zero(self._rewind_bank)
        made_at = {version: at for version, _, at in versions}
        self.lineage = Lineage(((version, parent) for version, parent, _ in versions), made_at)
        self._newest = versions[-1][0]
        self.catching_up = self.first_step < self._repeated_until
        if not self.catching_up:
            self._go_on()

    def _claim(self) -> None:
        """Be the only trainer of the bank until the end: two would train the same steps into different weights."""
        assert self.bank is not None, "rank 0 owns the bank"
        limit = time.monotonic() + _CLAIM_S
        while not self.bank.claim(_CLAIM):
            if time.monotonic() > limit:
                raise PartnerGone(
                    f"another trainer is at work in the bank of {self.config.run_path} and has not ended within "
                    f"{_CLAIM_S:g} s: stop it, or wait until it has ended, and resume"
                )
            time.sleep(_CLAIM_PAUSE_S)

    def _keep_claim(self) -> None:
        """Raises UserError when another trainer is at work: the claim of a connection that was cut was free for it."""
        assert self.bank is not None, "rank 0 owns the bank"
        if not self.bank.keeps(_CLAIM):
            raise UserError(
                f"another trainer took over the bank of {self.config.run_path} while this one's connection to it was "
                "cut; this one ends, since two would train the same steps into different weights. Start one trainer "
                "to a run; the run goes on with the other"
            )

    def _rewind_bank(self) -> tuple[list[tuple[int, int | None, float]], int]:
        """The versions there are with parent and time, and the step before which batches are on record."""
        assert self.bank is not None, "rank 0 owns the bank"
        self.bank.rollback_uncommitted(self.first_step - 1)
        self.bank.set_current_version(self.version)
        versions = [(version.version, version.parent, version.created_at) for version in self.bank.versions()]
        return versions, max((step.step + 1 for step in self.bank.steps() if step.state == "redo"), default=0)

    def _go_on(self) -> None:
        """Let the rollout begin, on engines that hold the present version (of a new run they do from the start)."""
        self.catching_up = False
        if self._newest > 0:  # engines that outlived an earlier trainer may hold any version
            self.publisher.publish(self.version)
        if self.bank:
            self.bank.set_state(PHASE, TRAINING)

    def advance(self, step: int) -> None:
        """Give the updated weights the next version that was never used."""
        parent, self.version = self.version, self.control.json_from_rank_zero(self._next_version)
        self.lineage.add(self.version, parent, made_at=time.time())
        if self.bank:
            self.bank.record_version(self.version, parent, step)

    def _next_version(self) -> int:
        assert self.bank is not None, "rank 0 owns the bank"
        self._keep_claim()  # the step was long, and its update is about to be recorded
        return self.bank.next_version()

    def save(self, step: int, parts: Mapping[str, Stateful]) -> None:
        """After a step: make a generation when one is due, complete one that was written, end the catching up."""
        if self.catching_up and step + 1 == self._repeated_until:
            self._go_on()
        self.checkpoints.poll()
        if self.checkpoints.due(step + 1):
            with self.stage("checkpoint", step):
                self.checkpoints.save(step + 1, self.version, parts)

    def save_stopped(self, stop: StopAsked, parts: Mapping[str, Stateful]) -> None:
        """Make a generation of the steps that none holds yet, so that a resume repeats nothing."""
        with self.stage("checkpoint", stop.steps):
            if self.config.checkpoint.every > 0 and stop.steps > self.checkpoints.newest_steps:
                self.checkpoints.save(stop.steps, self.version, parts)
            self.checkpoints.finish()
        if self.control.rank == 0:
            logger.info("stopped after %d steps, asked by %s", stop.steps, stop.by)

    def _generations_pruned(self, steps: int) -> None:
        """Nobody can go back to before `steps` any more: what those steps were trained on may go."""
        assert self.bank is not None, "rank 0 owns the bank"
        if self.config.bank.keep == "resumable":
            self.bank.discard_payloads(through_step=steps - 1)

    def publish(self) -> Published | None:
        """Publish the present version when due; None where nothing was published."""
        if self.catching_up:
            return None
        published = self.publisher.publish(self.version) if self.publisher.due(self.version) else None
        self.interruption.published()
        return published

    @property
    def least_updates(self) -> int:
        """No token is trained any more whose version has fewer updates behind it: a batch may not hold it."""
        return self.lineage.updates(self.version) - self.config.rollout.max_staleness

    @property
    def oldest_needed(self) -> int:
        """No token of a version with a lower id is trained any more."""
        return self.lineage.oldest_within(self.version, self.config.rollout.max_staleness)

    @property
    def oldest_kept(self) -> int:
        """Older versions than this may leave the history. A resume trains recorded batches again from the last
        generation on, so that a history which outlives a kill keeps what those were sampled with."""
        options = self.config.snapshots
        outlives = options.durable and options.disk_bytes != 0 and self.config.checkpoint.every > 0
        newest = min(self.version, self.checkpoints.safe_version) if outlives else self.version
        return self.lineage.oldest_within(newest, self.config.rollout.max_staleness)

    def finish_step(
        self,
        step: int,
        batch: Batch,
        anchors: AnchorLogprobs,
        objective: Objective,
        results: SequenceOf[TrainStepResult],
        published: Published | None,
        credit: Mapping[str, Any],
    ) -> None:
        """Commit the step to the bank and write its metrics."""
        routing = self.policy.routing.take_metrics() if self.policy.routing else {}
        if self.bank is None or self.metrics is None or self.status is None:
            return
        seconds = self.timeline.take_seconds()
        metrics = step_metrics(batch, anchors, published, seconds, self.version)
        metrics |= self.interruption.take_metrics() | routing
        metrics |= update_metrics(objective, results, metrics["batch/trained_action_tokens"])
        metrics |= credit
        if self.config.batch.max_filtered_groups:
            metrics |= filter_metrics(self.bank.filtered(step), self.config.batch)
        self.bank.commit_step(step, batch.version, self.version, metrics)
        self.metrics.log(step, metrics)
        self.status.count(step=step + 1, version=self.version, reward=metrics["reward/mean"])

    def save_final(self) -> None:
        """Write the policy as a Hugging Face checkpoint and tell the rollout process that training is over."""
        if self.status:
            self.status.set("saving")
        self.policy.save_hf(self.files.checkpoint)
        if self.bank:
            training_record.begin_if_missing(self.config, training_record.REINFORCED)
            training_record.carry(self.files.root, self.files.checkpoint)
            self.bank.set_state(PHASE, FINISHED)

    def close(self) -> None:
        """Idempotent; also on failure."""
        self.checkpoints.abandon()
        for part in (self._engines, self.bank, self.metrics, self.status, self.timeline):
            if part is not None:
                part.close()
        platform.shutdown()

    def _connect(self) -> EngineGroup:
        assert self.bank is not None, "rank 0 owns the bank"
        engines = EngineGroup(self.config.publish, self.bank, self.files.root)
        engines.connect()
        return engines

    def _catch_up(self) -> None:
        """Engines that came back get the resident weights while there is nothing else to do.

        With lag-n publishing those may be newer than what the others hold; a token's own version says which it was.
        """
        self.publisher.catch_up(self.version)

    def _waiting(self, what: str) -> None:
        if self.status:
            self.status.set("wait_batch", what)
