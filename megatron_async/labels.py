"""Labels: what makes a success rate incomparable with others. They stand wherever the number stands."""

from __future__ import annotations

from collections.abc import Mapping

TRAINED_ON = "trained_on_evaluation_tasks"
"""In the info of a reward, and among labels: how many evaluation tasks are among those of training."""


def describe_labels(labels: Mapping[str, str]) -> list[str]:
    """Lines that state what is unusual about the numbers."""
    told = dict(labels)
    trained = told.pop(TRAINED_ON, None)
    lines = [f"**{name.replace('_', ' ')}: {value}.**" for name, value in sorted(told.items())]
    if trained is not None:
        lines.append(f"**{trained} of the evaluated tasks were among the training tasks: no benchmark number.**")
    return lines
