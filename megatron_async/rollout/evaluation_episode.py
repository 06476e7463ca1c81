"""One episode of an evaluation: what its statistics need, whoever played it.

Invariant: plain JSON, so that an interrupted evaluation can keep finished episodes and go on.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # reports are also written in processes that have none of our packages
    from megatron_async.trajectory import Trajectory

SUCCESS_REWARD = 1.0 - 1e-6
"""A reward of 1 is success; sums of shares may fall short by rounding."""


@dataclass(frozen=True, slots=True)
class EvaluatedEpisode:
    """One episode that was played.

    reward: None for an episode that failed (environment, engine, deadline): no wrong answer, no answer. ending: done,
    the limit that cut it, or the kind of failure. info: what `Environment.reward` said. truncated: a limit cut it.
    tokens, turns: of the policy. versions: [oldest, newest] policy version that sampled; None for a policy that has
    none (an endpoint). seconds: spent waiting for the policy and the environment. unmetered: turns whose tokens the
    endpoint did not state; `tokens` lacks them, and no limit on tokens could be applied. failed_attempts: kind of
    failure -> attempts at this episode that ended so before this one.
    """

    reward: float | None
    ending: str
    info: dict[str, Any] = field(default_factory=dict)
    truncated: bool = False
    tokens: int = 0
    turns: int = 0
    versions: tuple[int, int] | None = None
    seconds: float = 0.0
    unmetered: int = 0
    failed_attempts: dict[str, int] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether it is left out, as no answer at all."""
        return self.reward is None

    @property
    def succeeded(self) -> bool:
        """Whether its reward is 1."""
        return self.reward is not None and self.reward >= SUCCESS_REWARD

    @property
    def failures(self) -> Counter[str]:
        """Kind -> attempts at this episode that failed, this one too if it did."""
        return Counter(self.failed_attempts) + Counter([self.ending] * self.failed)

    @classmethod
    def of(cls, trajectory: Trajectory) -> EvaluatedEpisode:
        """The episode of a finished trajectory."""
        info = trajectory.info
        oldest, newest = trajectory.min_version, trajectory.max_version
        return cls(
            reward=(trajectory.reward or 0.0) if trajectory.status.trainable else None,
            ending=str(info["ending"]),
            info=dict(info.get("reward") or {}),
            truncated=trajectory.status == "truncated",
            tokens=trajectory.num_action_tokens,
            turns=len(trajectory.turns),
            versions=None if oldest is None or newest is None else (oldest, newest),
            seconds=float(info.get("engine_s", 0.0)) + float(info.get("environment_s", 0.0)),
        )

    def to_json(self) -> str:
        """All of it, as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> EvaluatedEpisode:
        """What `to_json` wrote."""
        values = json.loads(text)
        versions = values.pop("versions")
        return cls(**values, versions=None if versions is None else (versions[0], versions[1]))
