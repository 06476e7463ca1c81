"""Everything of a training run that outlives a step: policy, bank, engines, version, metrics.

Invariants: the version grows by one with every update and is recorded in the bank before any engine samples with
it; a step is committed to the bank exactly once, after its update; only rank 0 touches bank, engines and files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from typing import Any

from megatron_async.bank import Bank
from megatron_async.config.schema import RunConfig
from megatron_async.engine import platform
from megatron_async.engine.policy import Policy, TrainStepResult
from megatron_async.objectives import Objective
from megatron_async.observe import MetricsWriter, RunFiles, StatusWriter, Timeline
from megatron_async.old_logits import AnchorLogprobs
from megatron_async.training.batch import Batch, BatchFeed
from megatron_async.training.control import Control
from megatron_async.training.interruption import Interruption
from megatron_async.training.metrics import step_metrics, update_metrics
from megatron_async.training.publishing import Published, WeightPublisher
from sglang_bridge import Publisher

_CONTROL_MARGIN_S = 120.0


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
        self.feed = BatchFeed(config, control, self.bank, self._waiting)
        self._bridge = self._connect() if leads else None
        self.publisher = WeightPublisher(
            config.publish, policy, control, self._bridge, config.run_path / "published"
        )
        self.interruption = Interruption(config, control, self.bank, self._bridge)
        self.version = 0
        self.first_step = 0

    @classmethod
    @contextmanager
    def open(cls, config: RunConfig) -> Iterator[Session]:
        """Build the policy from the checkpoint (version 0), connect to bank and engines."""
        policy = Policy.build(config.model, config.layout, config.trainer, config.optimizer, config.seed)
        session = cls(config, policy, Control(config.trainer.deadline_s + _CONTROL_MARGIN_S))
        try:
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

    def advance(self, step: int) -> None:
        """Give the updated weights the next version."""
        parent, self.version = self.version, self.version + 1
        if self.bank:
            self.bank.record_version(self.version, parent, step)

    def publish(self) -> Published | None:
        """Publish the present version when due; None where nothing was published."""
        published = self.publisher.publish(self.version) if self.publisher.due(self.version) else None
        self.interruption.published()
        return published

    def keep_scores(self, scores: Mapping[str, tuple[int, bytes]]) -> None:
        """Old log-probs that could not be scored again go to the bank."""
        if self.bank and scores:
            self.bank.save_scores(scores, self.oldest_needed)

    def kept_scores(self) -> dict[str, tuple[int, bytes]]:
        """What a run before this process kept; on every rank (collective)."""
        found = self.control.json_from_rank_zero(
            lambda: (
                {key: [v, data.hex()] for key, (v, data) in self.bank.load_scores().items()}
                if self.bank
                else {}
            )
        )
        return {key: (int(v), bytes.fromhex(data)) for key, (v, data) in found.items()}

    @property
    def oldest_needed(self) -> int:
        """No token of an older version is trained any more: a batch may not hold it."""
        return self.version - self.config.rollout.max_staleness

    def finish_step(
        self,
        step: int,
        batch: Batch,
        anchors: AnchorLogprobs,
        objective: Objective,
        results: SequenceOf[TrainStepResult],
        published: Published | None,
    ) -> None:
        """Commit the step to the bank and write its metrics."""
        if self.bank is None or self.metrics is None or self.status is None:
            return
        seconds = self.timeline.take_seconds()
        metrics = step_metrics(batch, anchors, published, seconds, self.version)
        metrics |= self.interruption.take_metrics()
        metrics |= update_metrics(objective, results, metrics["batch/trained_action_tokens"])
        self.bank.commit_step(step, batch.version, self.version, metrics)
        self.metrics.log(step, metrics)
        self.status.count(step=step + 1, version=self.version, reward=metrics["reward/mean"])

    def save_final(self) -> None:
        """Write the policy as a Hugging Face checkpoint and tell the rollout process that training is over."""
        if self.status:
            self.status.set("saving")
        self.policy.save_hf(self.files.checkpoint)
        if self.bank:
            self.bank.set_state("phase", "finished")

    def close(self) -> None:
        """Idempotent; also on failure."""
        for part in (self._bridge, self.bank, self.metrics, self.status, self.timeline):
            if part is not None:
                part.close()
        platform.shutdown()

    def _connect(self) -> Publisher:
        config = self.config.publish
        engines: list[dict[str, Any]] = json.loads((self.files.root / "engines.json").read_text())["engines"]
        publisher = Publisher(
            [engine["url"] for engine in engines],
            transport=config.transport,
            pause_mode=config.pause_mode,
            bucket_bytes=config.bucket_bytes,
            deadline_s=config.deadline_s,
        )
        publisher.connect()
        return publisher

    def _waiting(self, what: str) -> None:
        if self.status:
            self.status.set("wait_batch", what)
