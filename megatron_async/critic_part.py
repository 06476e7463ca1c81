"""The critic on ranks of its own: judges and learns when the trainer asks for it, beside the policy's updates.

Runs under torchrun with `critic.layout`. Its rank 0 takes the requests of the trainer's rank 0
(`training/remote_critic.py`); all ranks do what they say, in their order.

Invariants: a request that fails is answered with what went wrong, and ends the part; a trainer that ends, or is gone,
ends it too, without blame.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from megatron_async.beside import LAST, NOTHING, SILENCE_S, PartBeside
from megatron_async.config.schema import RunConfig
from megatron_async.engine.critic import Critic
from megatron_async.errors import UserError
from megatron_async.observe import RunFiles
from megatron_async.peers import Inbox, PeerGone, PeerLink
from megatron_async.training import critic_messages as messages
from megatron_async.training.critics import SharedCritic, build_critic

logger = logging.getLogger(__name__)

_LOOK_S = 0.2


def main(config: RunConfig) -> int:
    """Do what the trainer asks until it ends; returns the exit code."""
    return CriticPart(config, build_critic(config)).run()


class CriticPart(PartBeside):
    """One rank of the critic."""

    def __init__(self, config: RunConfig, critic: Critic) -> None:
        super().__init__(config, "critic")
        asynchronous = config.checkpoint.asynchronous
        self._critic = SharedCritic(critic, asynchronous=asynchronous, random_states=True)
        self._link: PeerLink | None = None
        self._control.from_rank_zero(self._call)
        self._requests = Inbox(self._link, bytes) if self._link is not None else None
        self._sender = ThreadPoolExecutor(1, "trainer-link")
        self._sending: Future[None] | None = None
        self._handlers: dict[bytes, tuple[str, Callable[[bytes], bytes]]] = {
            messages.VALUES: ("values", self._values),
            messages.UPDATE: ("update", self._update),
            messages.SAVE_HF: ("save", self._save_hf),
            messages.PREPARE: ("prepare", self._prepare),
            messages.BEGIN: ("checkpoint", self._begin),
            messages.POLL: ("checkpoint", self._poll),
            messages.FINISH: ("checkpoint", self._finish),
            messages.LOAD: ("load", self._load),
        }

    def _call(self) -> bytes:
        self._link = PeerLink.call(RunFiles(self.config.run_path).critic_link, self.config.trainer.deadline_s)
        return b""

    def _next(self) -> bytes:
        """The trainer's next request."""
        assert self._requests is not None, "rank 0 speaks with the trainer"
        self._show("waiting", "the trainer", {"updates": self._critic.num_updates})
        started = time.monotonic()
        try:
            while time.monotonic() - started < SILENCE_S:
                if (request := self._requests.take(_LOOK_S)) is not None:
                    return request
                if self._requests.ended_at is not None:
                    return LAST
        except PeerGone as error:
            logger.warning("the trainer is gone, and so the critic ends: %s", error)
            return LAST
        return NOTHING

    def _do(self, kind: bytes, body: bytes) -> None:
        stage, handle = self._handlers[kind]
        try:
            answer = self._timed(stage, self._critic.num_updates, lambda: handle(body))
        except Exception as error:
            name = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            self._answer(messages.FAILED + f"{name}{error}".encode())
            raise
        self._answer(messages.DONE + answer)

    def _answer(self, answer: bytes) -> None:
        """Send while this rank goes on: the trainer may listen much later."""
        if self._link is not None:
            if self._sending is not None:
                self._sending.result()  # was taken, since the trainer has asked again
            self._sending = self._sender.submit(self._link.send, answer)

    def _values(self, body: bytes) -> bytes:
        return messages.encode_values(self._critic.values(messages.decode_sequences(body)))

    def _update(self, body: bytes) -> bytes:
        count = int.from_bytes(body[:4], "little")
        self._critic.begin_updates(messages.decode_sequences(body[4:]), count)
        return messages.encode_updates(self._critic.finish_updates(), self._critic.num_updates)

    def _save_hf(self, body: bytes) -> bytes:
        self._critic.save_hf(Path(body.decode()))
        return b""

    def _prepare(self, body: bytes) -> bytes:
        self._critic.files.prepare()
        return b""

    def _begin(self, body: bytes) -> bytes:
        self._critic.files.begin(Path(body.decode()), lambda: None)
        return self._pending

    def _poll(self, body: bytes) -> bytes:
        self._critic.files.poll()
        return self._pending

    def _finish(self, body: bytes) -> bytes:
        self._critic.files.finish()
        return self._pending

    @property
    def _pending(self) -> bytes:
        """The answer to everything about a save: empty when its files are complete."""
        return b"pending" if self._critic.files.pending else b""

    def _load(self, body: bytes) -> bytes:
        wanted = json.loads(body)
        self._critic.files.load(Path(wanted["folder"]), wanted["state"])
        return messages.encode_updates([], self._critic.num_updates)

    def close(self) -> None:
        self._sender.shutdown(wait=True)
        super().close()
