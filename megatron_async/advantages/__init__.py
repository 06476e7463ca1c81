"""From rewards to advantages: group baselines keyed by id, running baselines, whitening, GAE over action tokens."""

from megatron_async.advantages.estimator import (
    AdvantageError,
    AdvantageEstimator,
    build_advantage,
    informative_groups,
)
from megatron_async.advantages.gae import (
    explained_variance,
    length_adaptive_lambda,
    skip_observation_gae,
    step_values,
)
from megatron_async.advantages.whitening import whiten

__all__ = [
    "AdvantageError",
    "AdvantageEstimator",
    "build_advantage",
    "explained_variance",
    "informative_groups",
    "length_adaptive_lambda",
    "skip_observation_gae",
    "step_values",
    "whiten",
]
