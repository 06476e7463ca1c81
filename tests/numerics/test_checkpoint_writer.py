"""A save in the background on one rank: what it copies, what it leaves alone, what becomes of an error."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from torch.distributed.checkpoint import CheckpointException

from megatron_async.config.schema import LayoutConfig, ModelConfig, TrainerConfig
from megatron_async.engine import checkpoint, checkpoint_files
from megatron_async.engine.policy import Policy
from tests.engine_batches import OPTIMIZER, make_sequences, weighted_loss
from tests.engine_reference import make_model


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Policy]:
    path = tmp_path_factory.mktemp("moe")
    make_model("moe").to(torch.bfloat16).save_pretrained(path)
    model = ModelConfig(path=str(path), dtype="bfloat16")
    return lambda: Policy.build(model, LayoutConfig(), TrainerConfig(micro_batch_tokens=64), OPTIMIZER)


def train(policy: Policy, seed: int) -> None:
    sequences = make_sequences(seed)
    assert policy.train_step(sequences, weighted_loss(sum(map(len, sequences)))).skipped is None


def states_of(policy: Policy) -> list[torch.Tensor]:
    """Everything a step changes, copied."""
    states = [held for _, _, held in checkpoint._live_states(policy)]
    return [state[kind].detach().clone() for state in states for kind in checkpoint.KINDS]


def test_every_save_holds_its_own_moment_in_the_same_memory(
    build: Callable[[], Policy], tmp_path: Path
) -> None:
    """Host buffers that are allocated at every save leak: many saves, one set of buffers."""
    policy, other, writer = build(), build(), checkpoint.ShardedWriter()
    writer.prepare(policy)
    addresses = {buffer.data_ptr() for buffer in writer._copies._held.values()}
    assert len(addresses) > 77
    moments = {}
    for number in range(5):
        train(policy, number)
        moments[number] = states_of(policy)
        writer.begin(policy, tmp_path / str(number), lambda: None)
        train(policy, 100 + number)  # while it is written
        writer.finish()
    assert {buffer.data_ptr() for buffer in writer._copies._held.values()} == addresses
    # bf16 weights, fp32 masters and two moments.
    assert writer._copies.nbytes == 14 * sum(p.numel() for p in policy.models[0].parameters())
    for number, saved in moments.items():
        checkpoint.load(other, tmp_path / str(number), num_steps=1)
        assert all(torch.equal(a, b) for a, b in zip(saved, states_of(other), strict=True)), number


def test_getting_ready_changes_nothing(build: Callable[[], Policy]) -> None:
    plain, prepared = build(), build()
    average = [master.detach() * 2.0 for master in prepared.masters()]
    checkpoint.ShardedWriter().prepare(prepared, average)
    assert all(torch.equal(a, 2.0 * b) for a, b in zip(average, prepared.masters(), strict=True))
    for policy in (plain, prepared):
        train(policy, 0)
    assert all(torch.equal(a, b) for a, b in zip(states_of(plain), states_of(prepared), strict=True))


@pytest.mark.parametrize("asynchronous", [True, False])
def test_saving_starts_no_process(
    build: Callable[[], Policy], tmp_path: Path, asynchronous: bool
) -> None:
    """A spawned one would import the program's main module again; a forked one would duplicate what training writes."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    writer = checkpoint.ShardedWriter(asynchronous=asynchronous)
    writer.begin(build(), tmp_path / "weights", lambda: None)
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
    assert gc.isenabled()
    writer.finish()


def test_an_error_while_writing_reaches_the_caller(
    build: Callable[[], Policy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.dist_checkpointing.core import CheckpointingException

    def full_disk(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(checkpoint_files.filesystem_async, "_write_item", full_disk)
    policy, writer, done = build(), checkpoint.ShardedWriter(), []
    writer.begin(policy, tmp_path / "weights", lambda: done.append(True))
    with pytest.raises(CheckpointException, match="no space left"):
        writer.finish()
    assert not done
    monkeypatch.undo()
    with pytest.raises(CheckpointingException):
        checkpoint.load(policy, tmp_path / "weights", num_steps=0)
    writer.begin(policy, tmp_path / "again", lambda: done.append(True))
    writer.finish()
    assert done == [True]


def test_polling_finishes_what_is_written(build: Callable[[], Policy], tmp_path: Path) -> None:
    writer, done = checkpoint.ShardedWriter(), []
    writer.poll()
    writer.begin(build(), tmp_path / "weights", lambda: done.append(True))
    assert writer.pending
    assert writer._write is not None
    for thread in writer._write._threads:
        thread.join()
    writer.poll()
    assert done == [True] and not writer.pending
