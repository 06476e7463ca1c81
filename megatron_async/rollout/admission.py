"""Who may start, so that no token is too old when it is trained: pure arithmetic, no clock, no bank.

Invariants
- A trajectory admitted at version v can be in the batch that is trained at version v + bound at the latest, queue
  time included, as long as the trainer takes complete groups oldest first. `StalenessAdmission.capacity` keeps this
  by counting everything that is ahead in the queue, not by looking at a trajectory's age when it is dispatched.
- Staleness is bounded by *throttling* what starts. Work that was started is not thrown away because it is long:
  while a long trajectory runs, `oldest_running` keeps younger ones from overtaking it beyond the bound.
- Everything is relative to the version that the run started or resumed at.

Symbols: B = trajectories per trainer step (`groups * group_size`). Versions count policy updates, one per step, so a
version consumes B trajectories and the i-th trajectory trained after the start (i from 0) is trained at version
`start_version + i // B`. With lag-n publishing the engines sample with the last published version, up to n - 1 updates
behind the trainer's; that lag is part of the staleness and has to fit into the bound.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StalenessAdmission:
    """Capacity in trajectories under a bound on version staleness.

    bound: largest allowed (trainer's version when a token is trained) - (version that sampled it), >= 0; 0 is
    synchronous. batch: B, trajectories per trainer step. start_version: version at the start or resume of the run.
    publish_every: n, trainer steps per publishing, >= 1. Raises ValueError when bound < n - 1: the engines' version
    would reach the bound before the next publishing, and trainer and rollout would wait for each other for ever.

    >>> StalenessAdmission(bound=2, batch=4, start_version=100).capacity(version=100, accepted=0, running=0)
    12
    """

    bound: int
    batch: int
    start_version: int = 0
    publish_every: int = 1

    def __post_init__(self) -> None:
        for name, least in (("bound", 0), ("batch", 1), ("start_version", 0), ("publish_every", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        if self.bound < self.publish_every - 1:
            raise ValueError(
                f"max_staleness={self.bound} is too small for publishing every {self.publish_every} steps: engines lag "
                f"up to {self.publish_every - 1} versions behind; set rollout.max_staleness to at least that"
            )

    def capacity(self, version: int, accepted: int, running: int, oldest_running: int | None = None) -> int:
        """How many trajectories may start now (>= 0).

        (bound + version - start_version + 1) * B - (accepted + running)

        version: the version that the engines sample with. accepted: trajectories finished since the start and not
        thrown away (waiting, reserved or trained). running: trajectories started and not finished, members that still
        wait for a slot included. oldest_running: version at which the oldest running trajectory started; `version` is
        replaced by it, so that everything admitted fits into the batches up to `oldest_running + bound`, the last of
        which then cannot be filled without that trajectory. A trajectory already beyond its bound is past help and
        holds nobody back. Raises ValueError when version < start_version (make a new rule after a resume).
        """
        if version < self.start_version:
            raise ValueError(
                f"version {version} is below start_version {self.start_version}: create a new StalenessAdmission "
                "when a run is resumed from an earlier version"
            )
        reference = version
        if oldest_running is not None and oldest_running >= version - self.bound:
            reference = min(version, oldest_running)
        return max(0, (self.bound + reference - self.start_version + 1) * self.batch - (accepted + running))

    def groups(
        self, version: int, accepted: int, running: int, group_size: int, oldest_running: int | None = None
    ) -> int:
        """How many whole groups may start now: `capacity` rounded down to groups of `group_size`."""
        return self.capacity(version, accepted, running, oldest_running) // group_size

    def consumed(self, version: int) -> int:
        """Trajectories trained on the way from start_version to the trainer's `version`.

        Derived from the version and not counted, so that a restarted rollout agrees with one that has watched from the
        beginning, and a batch without a signal, which makes no version, does not use up capacity for ever.
        """
        return max(0, version - self.start_version) * self.batch


@dataclass(slots=True)
class LengthBias:
    """Are long trajectories lost more often than short ones? Lengths are action tokens.

    Kept: finished, and trained or waiting for it. Dropped: failed, abandoned with their group, or set aside by the bank
    (too old when a batch was built, surplus, no signal). A ratio of mean lengths dropped/kept far above 1 says that the
    limits (deadlines, staleness) select for short answers.
    """

    kept: int = 0
    dropped: int = 0
    kept_tokens: int = 0
    dropped_tokens: int = 0

    def keep(self, length: int) -> None:
        self.kept += 1
        self.kept_tokens += length

    def drop(self, length: int) -> None:
        self.dropped += 1
        self.dropped_tokens += length

    def take_back(self, length: int) -> None:
        """What was kept is dropped after all."""
        self.kept -= 1
        self.kept_tokens -= length
        self.drop(length)

    @property
    def kept_mean(self) -> float:
        return self.kept_tokens / self.kept if self.kept else 0.0

    @property
    def dropped_mean(self) -> float:
        return self.dropped_tokens / self.dropped if self.dropped else 0.0

    @property
    def ratio(self) -> float:
        """Mean length dropped / kept; 1.0 while nothing was dropped or nothing kept (no evidence of a bias)."""
        return self.dropped_mean / self.kept_mean if self.dropped and self.kept_tokens else 1.0

    def as_dict(self) -> dict[str, float]:
        return {
            "kept": self.kept,
            "dropped": self.dropped,
            "kept_mean_tokens": self.kept_mean,
            "dropped_mean_tokens": self.dropped_mean,
            "dropped_over_kept": self.ratio,
        }
