"""Generations: everything a run resumes from, complete or not there at all.

Layout::

    checkpoints/step_000010/          ten steps are in it
      weights/                        model, optimiser, averaged weights, random state: see engine/checkpoint.py
      critic/                         the same of the critic, where there is one
      manifest.json                   written last: step, version, schedule, baselines, what is where
    checkpoints/.step_000020.<token>/ being written, or left by a kill

Invariants:
- A generation is written aside, under a name that is never used again, and gets its name in one rename when files and
  manifest are on the disk. What was left aside is never read, and removed at the next start; nor is a folder read whose
  files are not all there in the sizes its manifest names.
- A critic on ranks of its own writes its part into the same folder, which gets its name only when that is complete too.
- Older generations go after a newer one is complete, so one can always be resumed once there was one. What only they
  needed goes after them (`on_pruned`): a kill in between leaves too much, never too little.
- The data cursor needs no copy: which prompts were issued, and which batches steps had, is in the bank, whose
  transactions outlive a kill. A resume hands the batches of later steps out again.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from megatron_async.config.schema import LayoutConfig, RunConfig
from megatron_async.engine import checkpoint
from megatron_async.engine.policy import Policy
from megatron_async.engine.token_model import TokenModel
from megatron_async.observe import RunFiles
from megatron_async.passwords import hide_password
from megatron_async.snapshots.record_file import replace_file
from megatron_async.training.control import Control

logger = logging.getLogger(__name__)

FORMAT = 1
MANIFEST = "manifest.json"
_WEIGHTS = "weights"


class Stateful(Protocol):
    """What a step changes besides the weights. States are JSON, but for `values`: fp32 weights like the masters."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class ModelFiles(Protocol):
    """Saves and loads a model beside the policy, wherever its ranks are; every method but `abandon` is collective.

    One save at a time: `pending` from `begin` until `written`, which `begin` got, has been called on every rank.
    """

    @property
    def pending(self) -> bool: ...

    def prepare(self) -> None: ...

    def begin(self, folder: Path, written: Callable[[], None]) -> None: ...

    def poll(self) -> None: ...

    def finish(self) -> None: ...

    def abandon(self) -> None: ...

    def load(self, folder: Path, state: Mapping[str, Any]) -> None:
        """state: the part's `state_dict` at the time of the save."""


class LocalFiles:
    """`ModelFiles` of a model on the caller's own ranks.

    random_states: these ranks have no other model, so that the generators are the model's too; they are loaded where
    `state["layout"]` says that they were saved under the same layout.
    """

    def __init__(self, model: TokenModel, *, asynchronous: bool, random_states: bool = False) -> None:
        self._model = model
        self._random_states = random_states
        self._writer = checkpoint.ShardedWriter(asynchronous=asynchronous)

    @property
    def pending(self) -> bool:
        return self._writer.pending

    def prepare(self) -> None:
        self._writer.prepare(self._model)

    def begin(self, folder: Path, written: Callable[[], None]) -> None:
        self._writer.begin(self._model, folder, written)

    def poll(self) -> None:
        self._writer.poll()

    def finish(self) -> None:
        self._writer.finish()

    def abandon(self) -> None:
        self._writer.abandon()

    def load(self, folder: Path, state: Mapping[str, Any]) -> None:
        checkpoint.load(
            self._model,
            folder,
            num_steps=state["optimizer_steps"],
            with_random_state=self._random_states and state.get("layout") == asdict(self._model.layout),
        )


@runtime_checkable
class HoldsModel(Stateful, Protocol):
    """A part with a model of its own, which is saved and loaded with the policy, in a folder of the part's name."""

    @property
    def files(self) -> ModelFiles: ...


@dataclass(frozen=True, slots=True)
class Generation:
    """A complete checkpoint. steps: training steps in it. version: of its weights. optimizer_steps: updates made, None
    where there are weights alone (tools/convert_checkpoint.py)."""

    path: Path
    steps: int
    version: int
    optimizer_steps: int | None
    layout: LayoutConfig
    model: dict[str, Any]
    states: dict[str, Any]

    @property
    def weights(self) -> Path:
        return self.path / _WEIGHTS


def read_generation(path: Path) -> Generation | None:
    """The generation in a folder; None unless it is complete."""
    manifest = path / MANIFEST
    if not manifest.is_file():
        return None
    found: dict[str, Any] = json.loads(manifest.read_text())
    if found["format"] != FORMAT:
        logger.warning(
            "%s has format %s, this release reads %d: it is left alone", path, found["format"], FORMAT
        )
        return None
    wrong = [
        name for name, size in found["files"].items()
        if not (path / name).is_file() or (path / name).stat().st_size != size
    ]  # fmt: skip
    if wrong:
        logger.warning(
            "%s is not used: %d of its files are damaged or missing, the first is %s",
            path,
            len(wrong),
            wrong[0],
        )
        return None
    return Generation(
        path=path,
        steps=found["steps"],
        version=found["version"],
        optimizer_steps=found["optimizer_steps"],
        layout=LayoutConfig(**found["layout"]),
        model=found["model"],
        states=found["states"],
    )


def list_generations(folder: Path) -> list[Generation]:
    """Complete generations, oldest first."""
    found = (read_generation(path) for path in sorted(folder.glob("step_*")))
    return sorted((generation for generation in found if generation), key=lambda g: g.steps)


def prune(folder: Path, keep_last: int) -> list[Generation]:
    """Remove all complete generations but the last; returns those that stay, oldest first."""
    found = list_generations(folder)
    for generation in found[:-keep_last]:
        _remove(generation.path)
    return found[-keep_last:]


class Checkpoints:
    """Saves and restores the generations of a run. Every method is collective over the trainer ranks.

    on_pruned: called on rank 0 with the number of steps in the oldest generation that is kept, once there are
    `checkpoint.keep_last` of them.
    """

    def __init__(
        self,
        config: RunConfig,
        policy: Policy,
        control: Control,
        on_pruned: Callable[[int], None] = lambda steps: None,
    ) -> None:
        self._config = config
        self._on_pruned = on_pruned
        self._settings = config.checkpoint
        self._policy = policy
        self._control = control
        self._writer = checkpoint.ShardedWriter(asynchronous=config.checkpoint.asynchronous)
        self._others: dict[str, ModelFiles] = {}
        self.folder = RunFiles(config.run_path).checkpoints
        self._resumed: Generation | None = None
        self.newest_steps = 0
        """Steps in the newest generation, one that is being written included."""
        self.safe_version = 0
        """Version that a resume would start from now."""

    def resume(self) -> Generation | None:
        """Load the newest complete generation into the policy and return it; None where there is none.

        Raises CheckpointError when it was made of another model.
        """
        newest = self._control.json_from_rank_zero(self._newest)
        if newest is None:
            return None
        generation = read_generation(Path(newest))
        assert generation is not None, (
            f"rank 0 found {newest} complete: it must be on storage all ranks share"
        )
        checkpoint.check_fingerprint(self._policy, generation.model, generation.path)
        if generation.optimizer_steps is None:
            raise checkpoint.CheckpointError(
                f"{generation.path} holds weights alone and cannot be resumed: convert it to a Hugging Face checkpoint "
                "(tools/convert_checkpoint.py) and start a run from that with model.path"
            )
        same_layout = generation.layout == self._policy.layout
        if not same_layout:
            logger.info("%s was written by another layout; random states begin anew", generation.path)
        checkpoint.load(
            self._policy,
            generation.weights,
            num_steps=generation.optimizer_steps,
            with_random_state=same_layout,
        )
        self._resumed, self.safe_version = generation, generation.version
        self.newest_steps = generation.steps
        return generation

    def restore(self, parts: Mapping[str, Stateful]) -> None:
        """Give each part the state that the resumed generation holds of it, if it holds one.

        The memory that saves copy into is allocated here too, so that the first one does not wait for it.
        """
        if self._resumed is not None:
            self._restore(parts)
        if self._settings.every > 0:
            average = next((v for p in parts.values() if (v := p.state_dict().get("values")) is not None), None)
            self._writer.prepare(self._policy, average)
            for files in _models(parts).values():
                files.prepare()

    def _restore(self, parts: Mapping[str, Stateful]) -> None:
        assert self._resumed is not None, "called after a generation was loaded"
        for name, part in parts.items():
            saved = self._resumed.states.get(name)
            if isinstance(part, HoldsModel):
                folder = self._resumed.path / name
                if not saved or not folder.is_dir():
                    raise checkpoint.CheckpointError(
                        f"{self._resumed.path} holds no {name}: its run had none. Resume with the configuration it was "
                        "made with, or start a new run from its weights (model.path; tools/convert_checkpoint.py)"
                    )
                part.files.load(folder, saved)
            values = part.state_dict().get("values")
            if not saved or (values is None) != (not saved.pop("has_values")):
                continue
            if values is not None:
                checkpoint.load_average(self._policy, self._resumed.weights, values)
                saved["values"] = values
            part.load_state_dict(saved)

    def due(self, steps: int) -> bool:
        """Whether a generation is made after this many steps."""
        every = self._settings.every
        return every > 0 and (steps % every == 0 or steps == self._config.steps)

    def save(self, steps: int, version: int, parts: Mapping[str, Stateful]) -> None:
        """Begin a generation; a save that still runs is finished first."""
        self.finish()
        self.newest_steps = steps
        states = {name: part.state_dict() for name, part in parts.items()}
        average: list[Tensor] | None = None
        for state in states.values():
            values = state.pop("values", None)
            state["has_values"] = values is not None
            average = values if values is not None else average
        token = self._control.json_from_rank_zero(lambda: f"{time.time_ns():x}")
        aside = self.folder / f".{_name(steps)}.{token}"
        manifest = self._manifest(steps, version, states)

        self._others = _models(parts)
        unwritten = {_WEIGHTS, *self._others}

        def written(name: str) -> None:
            unwritten.discard(name)
            if unwritten:
                return
            if self._control.rank == 0:
                publish_generation(aside, self.folder / _name(steps), manifest)
                kept = prune(self.folder, self._settings.keep_last)
                if len(kept) == self._settings.keep_last:
                    self._on_pruned(kept[0].steps)
            self.safe_version = version

        self._writer.begin(self._policy, aside / _WEIGHTS, partial(written, _WEIGHTS), average)
        for name, files in self._others.items():
            files.begin(aside / name, partial(written, name))

    def poll(self) -> None:
        """Complete the save in progress if its files are written; cheap."""
        for writer in self._writers:
            if writer.pending:
                writer.poll()

    def finish(self) -> None:
        """Wait for the save in progress."""
        for writer in self._writers:
            writer.finish()

    def abandon(self) -> None:
        """Leave a save in progress incomplete; not collective."""
        for writer in self._writers:
            writer.abandon()

    @property
    def _writers(self) -> tuple[checkpoint.ShardedWriter | ModelFiles, ...]:
        return (self._writer, *self._others.values())

    def _newest(self) -> str | None:
        for path in self.folder.glob(".step_*"):
            logger.info("removing %s, which was not complete when its run ended", path)
            shutil.rmtree(path)
        complete = list_generations(self.folder)
        return str(complete[-1].path) if complete else None

    def _manifest(self, steps: int, version: int, states: dict[str, Any]) -> dict[str, Any]:
        return {
            **describe(self._policy),
            "steps": steps,
            "version": version,
            "states": states,
            **places(self._config),
        }


def places(config: RunConfig) -> dict[str, str]:
    """What a manifest says of where the rest of the run lies, for people: nothing reads it."""
    return {
        "bank": hide_password(config.bank_url),
        "snapshots": str(RunFiles(config.run_path).snapshots),
    }


def _models(parts: Mapping[str, Stateful]) -> dict[str, ModelFiles]:
    """Of the models of their own that parts have, by the parts' names."""
    return {name: part.files for name, part in parts.items() if isinstance(part, HoldsModel)}


def _name(steps: int) -> str:
    return f"step_{steps:06d}"


def describe(policy: Policy) -> dict[str, Any]:
    """What a manifest says of the weights."""
    return {
        "format": FORMAT,
        "optimizer_steps": policy.optimizer.num_steps if policy.optimizer is not None else None,
        "layout": asdict(policy.layout),
        "model": checkpoint.fingerprint(policy),
        "written_at": time.time(),
    }


def publish_generation(aside: Path, path: Path, manifest: dict[str, Any]) -> None:
    """Make a folder a generation: its files and their names reach the disk, then the manifest, then its name."""
    files = [file for file in sorted(aside.rglob("*")) if file.is_file()]
    for entry in (*files, *sorted({file.parent for file in files})):
        _sync(entry)
    sizes = {str(file.relative_to(aside)): file.stat().st_size for file in files}
    replace_file(aside / MANIFEST, json.dumps({**manifest, "files": sizes}, indent=1).encode())
    if path.exists():
        _remove(path)
    aside.rename(path)
    _sync(path.parent)


def _remove(path: Path) -> None:
    """Under a name aside it no longer counts, also if the removal is cut short."""
    aside = path.with_name(f".{path.name}.removed")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
    shutil.rmtree(aside)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
