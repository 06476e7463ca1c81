"""Typed configuration from YAML; imports neither torch nor megatron."""

from megatron_async.config.checks import check
from megatron_async.config.errors import ConfigError
from megatron_async.config.loader import dump, from_dict, load, save, shown
from megatron_async.config.schema import (
    AdvantageConfig,
    BankConfig,
    BatchConfig,
    EngineConfig,
    EnvironmentConfig,
    EvaluationConfig,
    LayoutConfig,
    MegatronConfig,
    ModelConfig,
    ObjectiveConfig,
    ObserveConfig,
    OldLogitsConfig,
    OptimizerConfig,
    PublishConfig,
    RolloutConfig,
    RunConfig,
    TrainerConfig,
    WarmStartConfig,
)

__all__ = [
    "AdvantageConfig",
    "BankConfig",
    "BatchConfig",
    "ConfigError",
    "EngineConfig",
    "EnvironmentConfig",
    "EvaluationConfig",
    "LayoutConfig",
    "MegatronConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "ObserveConfig",
    "OldLogitsConfig",
    "OptimizerConfig",
    "PublishConfig",
    "RolloutConfig",
    "RunConfig",
    "TrainerConfig",
    "WarmStartConfig",
    "check",
    "dump",
    "from_dict",
    "load",
    "save",
    "shown",
]
