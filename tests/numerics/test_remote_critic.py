"""The trainer's side of a critic on ranks of its own, against a peer that follows a script."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_async.config.schema import CriticConfig, LayoutConfig, ModelConfig, RunConfig, TrainerConfig
from megatron_async.engine.critic import Values
from megatron_async.engine.sequences import Sequence
from megatron_async.errors import UserError
from megatron_async.peers import END, Inbox, PeerGone, PeerLink
from megatron_async.training import critic_messages as messages
from megatron_async.training.checkpointing import Checkpoints, Generation
from megatron_async.training.credit import CriticCredit
from megatron_async.training.critics import ValueModel, ValueUpdate
from megatron_async.training.remote_critic import LEARNED, CriticGone, RemoteCritic
from tests.recorded_run import make_trajectory

PATIENCE_S = 60.0


class Alone:
    """Stands for the control messages of a trainer of one rank."""

    rank = 0

    def from_rank_zero(self, produce: Callable[[], bytes]) -> bytes:
        return produce()


def configured(folder: Path, deadline_s: float = PATIENCE_S) -> RunConfig:
    return RunConfig(
        name="run",
        run_dir=str(folder),
        model=ModelConfig(path=""),
        trainer=TrainerConfig(deadline_s=deadline_s),
        critic=CriticConfig(ranks="own", layout=LayoutConfig()),
    )


@contextlib.contextmanager
def met(folder: Path, script: Callable[[PeerLink], None], deadline_s: float = PATIENCE_S) -> Iterator[RemoteCritic]:
    """A critic whose ranks are a thread that runs `script`."""
    config = configured(folder, deadline_s)

    def peer() -> None:
        script(PeerLink.call(config.run_path / "critic_link.json", PATIENCE_S))

    thread = threading.Thread(target=peer, daemon=True)
    thread.start()
    yield RemoteCritic.connect(config, Alone())  # type: ignore[arg-type]
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def batch(seed: int = 0) -> list[Sequence]:
    random = np.random.default_rng(seed)
    return [
        Sequence(
            random.integers(0, 9, size).astype(np.int32),
            1.0,
            {
                "action_mask": random.random(size) < 0.5,
                "returns": random.normal(size=size).astype(np.float32),
                "old_values": random.normal(size=size).astype(np.float32),
                "unread": np.zeros(size),
            },
        )
        for size in (3, 1, 7)
    ]


UPDATES = [ValueUpdate(0.1 + 0.2, 1 / 3, 0.0, float("inf"), 5e-6, None), ValueUpdate(1.0, 2.0, 3.0, 4.0, 0.0, "why")]


def test_messages_carry_every_bit() -> None:
    sent = batch()
    arrived = messages.decode_sequences(messages.encode_sequences(sent, LEARNED))
    for own, other in zip(sent, arrived, strict=True):
        assert set(other.arrays) == set(LEARNED)
        for name in LEARNED:
            np.testing.assert_array_equal(own.arrays[name], other.arrays[name])
            assert own.arrays[name].dtype == other.arrays[name].dtype
        np.testing.assert_array_equal(own.token_ids, other.token_ids)
    values = Values([s.arrays["returns"] for s in sent], np.array([1.5, -0.0, 1e-40], np.float32))
    again = messages.decode_values(messages.encode_values(values), [len(s) for s in sent])
    assert again.after.tobytes() == values.after.tobytes()
    assert [v.tobytes() for v in again.before] == [v.tobytes() for v in values.before]
    assert messages.decode_updates(messages.encode_updates(UPDATES, 7)) == (UPDATES, 7)


def test_updates_run_while_the_trainer_goes_on(tmp_path: Path) -> None:
    """The peer answers only once the trainer has come back from `begin_updates` and `work`."""
    went_on, requests = threading.Event(), []

    def script(link: PeerLink) -> None:
        requests.append(link.receive())
        assert went_on.wait(PATIENCE_S)
        link.send(messages.DONE + messages.encode_updates(UPDATES, 2))
        requests.append(link.receive())

    with met(tmp_path, script) as critic:
        assert critic.finish_updates() == []
        critic.begin_updates(batch(), 2)
        assert not critic.work()
        with pytest.raises(AssertionError, match="comes first"):
            critic.values(batch())
        went_on.set()
        assert critic.finish_updates() == UPDATES
        assert critic.work()
        critic.close()
    assert requests == [messages.UPDATE + b"\2\0\0\0" + messages.encode_sequences(batch(), LEARNED), END]
    assert critic.state_dict()["optimizer_steps"] == 2


def test_a_save_is_pending_until_the_critics_files_are_complete(tmp_path: Path) -> None:
    answers, requests = [b"", b"pending", b"pending", b""], []

    def script(link: PeerLink) -> None:
        for answer in answers:
            requests.append(link.receive())
            link.send(messages.DONE + answer)

    written: list[bool] = []
    with met(tmp_path, script) as critic:
        files = critic.files
        files.prepare()
        files.begin(tmp_path / "critic", lambda: written.append(True))
        files.poll()
        assert files.pending and not written
        files.finish()
        assert not files.pending and written == [True]
        files.finish()  # nothing is asked
    kinds = [messages.PREPARE, messages.BEGIN, messages.POLL, messages.FINISH]
    assert [request[:1] for request in requests] == kinds
    assert requests[1][1:].decode() == str((tmp_path / "critic").resolve())


def fails(link: PeerLink) -> None:
    link.receive()
    link.send(messages.FAILED + b"no space left")


def leaves(link: PeerLink) -> None:
    link.receive()


@pytest.mark.parametrize(("script", "says"), [(fails, "failed: no space left"), (leaves, "ranks are gone")])
def test_what_goes_wrong_with_the_critic_is_said(
    tmp_path: Path, script: Callable[[PeerLink], None], says: str
) -> None:
    with met(tmp_path, script) as critic, pytest.raises(CriticGone, match=f"{says}.*logs/critic.log"):
        critic.values(batch())
    critic.close()  # says goodbye to whoever is left, and does not mind


def test_a_critic_that_hangs_is_given_up(tmp_path: Path) -> None:
    over = threading.Event()

    def script(link: PeerLink) -> None:
        link.receive()
        assert over.wait(PATIENCE_S)

    with met(tmp_path, script, deadline_s=1.0) as critic:
        with pytest.raises(CriticGone, match=r"silent for 1 s \(trainer.deadline_s\)"):
            critic.values(batch())
        over.set()


def test_an_inbox_gives_what_came_then_what_ended_it(tmp_path: Path) -> None:
    def caller() -> None:
        PeerLink.call(tmp_path / "link.json", PATIENCE_S).send(b"one")

    thread = threading.Thread(target=caller)
    thread.start()
    inbox = Inbox(PeerLink.listen(tmp_path / "link.json", PATIENCE_S), bytes.decode)
    assert inbox.take(PATIENCE_S) == "one"
    thread.join(PATIENCE_S)
    with pytest.raises(PeerGone):
        inbox.take(PATIENCE_S)
    assert inbox.ended_at is None


class Noted(ValueModel):
    """Notes what it is asked, as a critic whose updates run elsewhere."""

    files = None  # type: ignore[assignment]

    def __init__(self) -> None:
        self.asked: list[str] = []

    def values(self, sequences: list[Sequence]) -> Values:
        self.asked.append("values")
        return Values([np.zeros(len(s), np.float32) for s in sequences], np.zeros(len(sequences), np.float32))

    def begin_updates(self, sequences: list[Sequence], count: int) -> None:
        self.asked.append(f"begin {count}")

    def work(self) -> bool:
        self.asked.append("work")
        return False

    def finish_updates(self) -> list[ValueUpdate]:
        self.asked.append("finish")
        return UPDATES

    def save_hf(self, path: Path) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer_steps": 0}

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("order", "asked"),
    [
        ("policy_first", ["values", "begin 2", "| policy |", "work", "| publish |", "finish"]),
        ("critic_first", ["values", "begin 2", "finish", "values", "| policy |", "| publish |"]),
    ],
)
def test_the_order_of_a_step(tmp_path: Path, order: str, asked: list[str]) -> None:
    config = configured(tmp_path)
    critic_config = CriticConfig(order=order, warmup_steps=0)  # type: ignore[arg-type]
    critic = Noted()
    credit = CriticCredit(
        RunConfig(name="run", model=config.model, critic=critic_config), critic, lambda *_: contextlib.nullcontext()
    )
    trajectories = [make_trajectory(np.random.default_rng(i), i) for i in range(4)]
    sequences = [Sequence(t.token_ids, 1.0, {"action_mask": t.loss_mask}) for t in trajectories]
    credit.assign(0, trajectories, sequences)
    critic.asked.append("| policy |")
    credit.learn(0)
    critic.asked.append("| publish |")
    assert credit.take_metrics()["critic/skipped_updates"] == 1
    assert critic.asked == asked


def test_a_checkpoint_without_a_critic_is_no_checkpoint_of_a_run_with_one(tmp_path: Path) -> None:
    checkpoints = Checkpoints(configured(tmp_path), policy=None, control=Alone())  # type: ignore[arg-type]
    states = {"advantage": {"has_values": False}}
    checkpoints._resumed = Generation(tmp_path / "step_000004", 4, 4, 4, LayoutConfig(), {}, states)
    credit = CriticCredit(configured(tmp_path), Noted(), lambda *_: contextlib.nullcontext())
    with pytest.raises(UserError, match="step_000004 holds no critic: its run had none"):
        checkpoints.restore(credit.parts)
