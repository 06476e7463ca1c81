"""`megatron-async inspect`: what a run's bank holds, and one trajectory with its versions, for people.

Invariants: only reads; shows tokens as they are stored (ids decoded one segment at a time, never encoded again). Words
of a policy or a tool are shown and nothing else: they are no markup, and control no terminal.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_async.bank import Bank
from megatron_async.bank.dialects import make_engine
from megatron_async.bank.errors import BankError
from megatron_async.bank.viewing import find, latest
from megatron_async.config import RunConfig, load
from megatron_async.errors import UserError
from megatron_async.observe import RunFiles
from megatron_async.passwords import hide_password
from megatron_async.trajectory import Trajectory

_WIDTH = 120
_SHOWN = 15
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # but for tabs and ends of lines


def describe(run_path: Path, trajectory_id: str | None = None) -> str:
    """Text about a run's bank, or about one trajectory of it; raises UserError when either is not there."""
    file = RunFiles(run_path).config
    if not file.is_file():
        raise UserError(
            f"{run_path} is not the folder of a run (it has no config.yaml); give one such as runs/quickstart"
        )
    config = load(file)
    url = config.bank.url or f"sqlite:///{run_path / 'bank.sqlite'}"
    if not config.bank.url and not (run_path / "bank.sqlite").is_file():
        raise UserError(
            f"{run_path} has no bank yet (bank.sqlite); has the run got as far as starting its rollout?"
        )
    text = io.StringIO()
    console = Console(file=text, width=_WIDTH, highlight=False, markup=False, emoji=False)
    if trajectory_id is None:
        _describe_bank(url, console)
    else:
        _describe_trajectory(config, url, trajectory_id, console)
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text.getvalue())


def _describe_bank(url: str, console: Console) -> None:
    with Bank.open_to_read(url) as bank:
        states, version, steps = bank.counts(), bank.current_version(), bank.steps()
    console.print(f"{hide_password(url)}: version {version}, {len(steps)} steps")
    console.print("trajectories: " + ", ".join(f"{count} {state}" for state, count in states.items()))
    engine = make_engine(url)
    rows = latest(engine, _SHOWN)
    engine.dispose()
    table = Table(title=f"The {len(rows)} started last, those with tokens first", title_justify="left")
    for title in (
        "trajectory",
        "state",
        "status",
        "reward",
        "tokens",
        "actions",
        "versions",
        "step",
        "reason",
    ):
        table.add_column(title, overflow="fold")
    for row in rows:
        versions = "–" if row.min_version is None else f"{row.min_version}–{row.max_version}"
        reward, step = ("–" if value is None else f"{value:g}" for value in (row.reward, row.step))
        counts = (str(row.tokens), str(row.action_tokens))
        table.add_row(
            row.trajectory_id, row.state, row.status, reward, *counts, versions, step, row.reason or ""
        )
    console.print(table)


def _describe_trajectory(config: RunConfig, url: str, trajectory_id: str, console: Console) -> None:
    engine = make_engine(url)
    try:
        trajectory = find(engine, trajectory_id)
    except BankError as error:
        raise UserError(f"{error}; `megatron-async inspect RUN` lists the latest ids") from error
    finally:
        engine.dispose()
    console.print(
        f"{trajectory_id} of group {trajectory.group_id}: {trajectory.status.value}, reward {trajectory.reward}, "
        f"{len(trajectory)} tokens, {trajectory.num_action_tokens} of them actions, versions "
        f"{trajectory.min_version}–{trajectory.max_version}"
    )
    decode = _decoder(config.model.path)
    for start, end, label in _segments(trajectory):
        style = "dim" if label == "context" else "bold"
        console.print(Text(f"[{start}, {end}) {label}{_mean_logprob(trajectory, start, end)}", style=style))
        console.print(Text(decode(trajectory.token_ids[start:end].tolist())))


def _segments(trajectory: Trajectory) -> list[tuple[int, int, str]]:
    """(start, end, label) of maximal runs of tokens that are context or were sampled by one version."""
    versions = trajectory.versions
    cuts = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    spans = [(a, b) for a, b in zip(cuts[:-1], cuts[1:], strict=True) if b > a]
    return [(a, b, "context" if versions[a] < 0 else f"action, version {versions[a]}") for a, b in spans]


def _mean_logprob(trajectory: Trajectory, start: int, end: int) -> str:
    values = trajectory.rollout_logprobs[start:end]
    known = values[~np.isnan(values)]
    return f", mean log-prob {known.mean():.3f}" if known.size else ""


def _decoder(model_path: str) -> Callable[[list[int]], str]:
    """ids -> text with the run's tokenizer; ids themselves where the checkpoint is gone."""
    file = Path(model_path) / "tokenizer.json"
    if not file.is_file():
        return lambda ids: " ".join(map(str, ids))
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))
