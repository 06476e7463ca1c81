"""Where the files of a run lie: the one place that knows their names.

runs/<name>/
  config.yaml          resolved configuration
  metrics.jsonl        one row per training step
  evaluations.jsonl    one row per evaluation on held-out tasks
  evaluation/          results, by whom and what was evaluated, and episodes of interrupted evaluations
  timeline.jsonl       what each part did from when to when
  status/<part>.json   what each part does now
  restarts.jsonl       one row for each part that ended by itself and was started again
  blocked.jsonl        one row for each rollout process that ended because an environment blocked its event loop
  tensorboard/         the metrics as TensorBoard events
  logs/                output of every process; <part>.error: what one of them said that the user has to mend
  engines.json         the engines, and which of them serve
  .engine_key          what they ask for, where others could reach them
  bank.sqlite          trajectories, versions, steps
  trained_on.json      what the policy was trained on, also before this run; beside the weights of every export too
  checkpoint/          final policy in Hugging Face format
  critic/              final critic, as a token classifier in Hugging Face format, where there is one
  critic_link.json     where the trainer meets a critic on ranks of its own
  checkpoints/step_<n> what the run resumes from after n steps
  snapshots/rank_<r>/  history of that trainer rank's weights
  report.txt, timeline.png
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RunFiles:
    """Paths under one run's folder. Nothing is created by asking."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def engine_key(self) -> Path:
        return self.root / ".engine_key"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def evaluations(self) -> Path:
        return self.root / "evaluations.jsonl"

    @property
    def evaluation(self) -> Path:
        return self.root / "evaluation"

    @property
    def timeline(self) -> Path:
        return self.root / "timeline.jsonl"

    @property
    def timeline_image(self) -> Path:
        return self.root / "timeline.png"

    @property
    def status(self) -> Path:
        return self.root / "status"

    @property
    def restarts(self) -> Path:
        return self.root / "restarts.jsonl"

    @property
    def blocked(self) -> Path:
        return self.root / "blocked.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def checkpoint(self) -> Path:
        return self.root / "checkpoint"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def critic(self) -> Path:
        return self.root / "critic"

    @property
    def critic_link(self) -> Path:
        return self.root / "critic_link.json"

    @property
    def snapshots(self) -> Path:
        return self.root / "snapshots"

    @property
    def report(self) -> Path:
        return self.root / "report.txt"
