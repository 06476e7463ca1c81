"""Objectives of asynchronous policy optimisation: every method is a preset on one loss kernel.

Pure tensor functions; neither Megatron nor the bank is known here. See docs/algorithms for the methods.
"""

from megatron_async.objectives.batch import ContextParallel, LossOutput, Normaliser, TokenBatch
from megatron_async.objectives.objective import BatchState, EmptyBatch, Objective, build_objective
from megatron_async.objectives.registry import objective_table

__all__ = [
    "BatchState",
    "ContextParallel",
    "EmptyBatch",
    "LossOutput",
    "Normaliser",
    "Objective",
    "TokenBatch",
    "build_objective",
    "objective_table",
]
