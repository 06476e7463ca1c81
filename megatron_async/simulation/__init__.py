"""A discrete-event model of the asynchronous loop: what a run would do, before it is started (docs/simulation.md)."""

from megatron_async.simulation.calibration import calibrate
from megatron_async.simulation.loop import simulate
from megatron_async.simulation.result import Result
from megatron_async.simulation.scenario import (
    EngineModel,
    OldLogitModel,
    PublishModel,
    RolloutPolicy,
    Scenario,
    TrainerModel,
)
from megatron_async.simulation.staleness import fully_asynchronous_staleness
from megatron_async.simulation.workload import Episode, Turn, Workload

__all__ = [
    "EngineModel",
    "Episode",
    "OldLogitModel",
    "PublishModel",
    "Result",
    "RolloutPolicy",
    "Scenario",
    "TrainerModel",
    "Turn",
    "Workload",
    "calibrate",
    "fully_asynchronous_staleness",
    "simulate",
]
