"""Metrics, status, progress, timeline and report of a run. Imports neither torch nor megatron."""

from megatron_async.observe.files import RunFiles
from megatron_async.observe.metrics import (
    MetricsWriter,
    append_evaluation,
    gap_histogram,
    read_evaluations,
    read_metrics,
)
from megatron_async.observe.status import Status, StatusWriter, read_status
from megatron_async.observe.timeline import Interval, Timeline, read_timeline

__all__ = [
    "Interval",
    "MetricsWriter",
    "RunFiles",
    "Status",
    "StatusWriter",
    "Timeline",
    "append_evaluation",
    "gap_histogram",
    "read_evaluations",
    "read_metrics",
    "read_status",
    "read_timeline",
]
