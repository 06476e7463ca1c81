"""The errors of the bridge. Each says what happened, with the values, and what to do about it."""

from __future__ import annotations


class BridgeError(RuntimeError):
    """Base of every error the bridge raises."""


class EngineStartError(BridgeError):
    """A server could not be started: wrong arguments, port in use, it died, or it missed its deadline."""


class EngineError(BridgeError):
    """An engine answered with an error, or with an answer that contradicts itself.

    ``status`` is the HTTP status (None when the answer was a success by status but malformed, or when the
    connection broke); ``text`` is what the engine said or what is wrong with what it said.
    """

    def __init__(self, text: str, *, status: int | None = None, url: str = "") -> None:
        self.status = status
        self.text = text
        self.url = url
        where = f"{url}: " if url else ""
        code = f"HTTP {status}: " if status is not None else ""
        super().__init__(f"{where}{code}{text}")


class EngineUnreachable(EngineError):
    """The connection to an engine could not be opened or broke; nothing is known about its state."""


class EngineTimeout(EngineError):
    """An engine did not answer, or its stream fell silent, before the deadline."""


class PublishError(BridgeError):
    """New weights did not reach every engine, or an engine's weights are not the trainer's.

    The message names the engine (peer) and the step that failed. ``urls``: the engines to blame, empty where it is
    nobody's fault, or not known whose.
    """

    def __init__(self, text: str, *, urls: tuple[str, ...] = ()) -> None:
        self.urls = urls
        super().__init__(text)
