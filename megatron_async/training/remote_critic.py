"""The trainer's side of a critic on ranks of its own (`megatron_async/critic_part.py`).

Invariants:
- Rank 0 speaks with the critic's rank 0; what it hears, errors included, every rank of the trainer gets.
- Value updates run on the critic's ranks from `begin_updates` on; their answer is the first thing heard after it.
- A critic that is gone, or silent for `trainer.deadline_s` seconds, is an error, never waited for without end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from megatron_async.config.schema import RunConfig
from megatron_async.engine.critic import Values
from megatron_async.engine.sequences import Sequence
from megatron_async.errors import PartnerGone
from megatron_async.observe import RunFiles
from megatron_async.peers import END, PeerGone, PeerLink, PeerMissing
from megatron_async.training import critic_messages as messages
from megatron_async.training.checkpointing import ModelFiles
from megatron_async.training.control import Control
from megatron_async.training.critics import ValueModel, ValueUpdate

LEARNED = ("action_mask", "returns", "old_values")
"""Arrays of a sequence that a value update reads."""
_GOODBYE_S = 10.0
_WHERE = "look at logs/critic.log and status/critic.json"


class CriticGone(PartnerGone):
    """The critic's ranks do not answer any more, or said why they cannot."""


class RemoteCritic(ValueModel):
    """link: on rank 0 only."""

    def __init__(self, config: RunConfig, control: Control, link: PeerLink | None) -> None:
        self._deadline_s = config.trainer.deadline_s
        self._layout = asdict(config.critic_layout)
        self._control = control
        self._link = link
        self._files = RemoteFiles(self.ask)
        self._updating = False
        self._num_updates = 0

    @classmethod
    def connect(cls, config: RunConfig, control: Control) -> RemoteCritic:
        """Wait for the critic's ranks (collective). Raises PeerMissing after `trainer.deadline_s` seconds."""
        links: list[PeerLink] = []

        def listen() -> bytes:
            deadline_s = config.trainer.deadline_s
            try:
                links.append(PeerLink.listen(RunFiles(config.run_path).critic_link, deadline_s))
            except PeerMissing as error:
                raise PeerMissing(f"the critic's ranks (critic.ranks: own) did not come: {error}; {_WHERE}") from error
            return b""

        control.from_rank_zero(listen)
        return cls(config, control, links[0] if links else None)

    def values(self, sequences: list[Sequence]) -> Values:
        answer = self.ask(messages.VALUES, partial(messages.encode_sequences, sequences))
        return messages.decode_values(answer, [len(sequence) for sequence in sequences])

    def begin_updates(self, sequences: list[Sequence], count: int) -> None:
        def send() -> bytes:
            batch = messages.encode_sequences(sequences, LEARNED)
            self._send(messages.UPDATE + count.to_bytes(4, "little") + batch)
            return b""

        self._control.from_rank_zero(send)
        self._updating = True

    def work(self) -> bool:
        return not self._updating

    def finish_updates(self) -> list[ValueUpdate]:
        if not self._updating:
            return []
        self._updating = False
        made, self._num_updates = messages.decode_updates(self._control.from_rank_zero(self._hear))
        return made

    def save_hf(self, path: Path) -> None:
        self.ask(messages.SAVE_HF, lambda: str(path.resolve()).encode())

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer_steps": self._num_updates, "layout": self._layout}

    @property
    def files(self) -> ModelFiles:
        return self._files

    def close(self) -> None:
        if self._link is not None:
            with contextlib.suppress(PeerGone):  # whoever is gone needs no goodbye
                self._link.send(END, _GOODBYE_S)

    def ask(self, kind: bytes, body: Callable[[], bytes] = bytes) -> bytes:
        """Send a request and return its answer (collective). body: what it needs, made on rank 0.

        Raises CriticGone.
        """
        assert not self._updating, "the answer to the value updates comes first"

        def exchange() -> bytes:
            self._send(kind + body())
            return self._hear()

        answer = self._control.from_rank_zero(exchange)
        if kind == messages.LOAD:
            _, self._num_updates = messages.decode_updates(answer)
        return answer

    def _send(self, request: bytes) -> None:
        assert self._link is not None, "rank 0 owns the link"
        try:
            self._link.send(request, self._deadline_s)
        except PeerGone as error:
            raise self._gone(error) from error

    def _hear(self) -> bytes:
        assert self._link is not None, "rank 0 owns the link"
        try:
            answer = self._link.receive(self._deadline_s)
        except PeerGone as error:
            raise self._gone(error) from error
        if answer[:1] == messages.FAILED:
            raise CriticGone(f"the critic's ranks failed: {answer[1:].decode()}; {_WHERE}")
        return answer[1:]

    def _gone(self, error: PeerGone) -> CriticGone:
        silent = f"silent for {self._deadline_s:g} s (trainer.deadline_s)"
        return CriticGone(f"the critic's ranks are gone, or {silent}; {_WHERE} ({error})")


class RemoteFiles:
    """`ModelFiles` that the critic's ranks write and read. ask: as `RemoteCritic.ask`."""

    def __init__(self, ask: Callable[..., bytes]) -> None:
        self._ask = ask
        self._written: Callable[[], None] | None = None

    @property
    def pending(self) -> bool:
        return self._written is not None

    def prepare(self) -> None:
        self._ask(messages.PREPARE)

    def begin(self, folder: Path, written: Callable[[], None]) -> None:
        self._written = written
        self._note(self._ask(messages.BEGIN, lambda: str(folder.resolve()).encode()))

    def poll(self) -> None:
        self._note(self._ask(messages.POLL))

    def finish(self) -> None:
        if self.pending:
            self._note(self._ask(messages.FINISH))

    def abandon(self) -> None:
        self._written = None

    def load(self, folder: Path, state: Mapping[str, Any]) -> None:
        self._ask(messages.LOAD, lambda: messages.to_json({"folder": str(folder.resolve()), "state": dict(state)}))

    def _note(self, pending: bytes) -> None:
        """The answer to everything about a save: what is still pending."""
        written = self._written
        if not pending and written is not None:
            self._written = None
            written()
