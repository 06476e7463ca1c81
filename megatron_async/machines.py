"""How the machines of one run know of each other: small files in the run's folder, which all of them see.

    cluster/machine_<n>.json     written by machine n every few seconds: its phase, address, engines, and a beat

Invariants
- The first machine (number 0) decides when the run ends; the others follow its phase.
- A file counts only after its beat was seen to change, so what an earlier run left is never believed.
- Clocks of different machines are never compared: a machine is lost when its beat stood still for `LOST_S` seconds of
  the observer's own clock.
- Whoever leaves, for any reason, says so; whoever is killed falls silent and is noticed.
- A disk that is full, or a file system that is away, for less than `LOST_S` ends nobody: what could not be written or
  read is tried again at the next beat or look.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from megatron_async.errors import UserError
from megatron_async.observe import RunFiles
from megatron_async.roster import Engine
from megatron_async.supervise import PartFailed

logger = logging.getLogger(__name__)

BEAT_S = 2.0
LOST_S = 120.0
"""Longer than network file systems keep attributes in their caches."""
_POLL_S = 0.2

STARTING, TRAINING, READY, ENDED, FAILED = "starting", "training", "ready", "ended", "failed"


def machine_file(files: RunFiles, number: int) -> Path:
    """Where machine `number` of a run speaks."""
    return files.root / "cluster" / f"machine_{number}.json"


class Announcement:
    """This machine's file: rewritten by a thread every `BEAT_S` seconds while the block runs; the last word is ENDED,
    or FAILED with the reason."""

    def __init__(self, path: Path, beat_s: float = BEAT_S, **values: Any) -> None:
        self._path, self._beat_s = path, beat_s
        self._values: dict[str, Any] = {"phase": STARTING, **values}
        self._unwritten = ""
        self._token, self._beat = uuid.uuid4().hex, 0
        self._lock, self._left = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="machine-beat", daemon=True)

    def __enter__(self) -> Self:
        self._replace()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.set()
        self._thread.join()
        failed = {"phase": FAILED, "reason": f"{kind.__name__}: {error}"} if kind else {"phase": ENDED}
        self.set(**failed)

    def set(self, **values: Any) -> None:
        """Change what is said, at once; or at the next beat, where it cannot be written now."""
        with self._lock:
            self._values.update(values)
        self._write()

    def _run(self) -> None:
        while not self._left.wait(self._beat_s):
            self._write()

    def _write(self) -> None:
        try:
            self._replace()
        except OSError as error:
            if str(error) != self._unwritten:
                logger.warning("others are not told anything for now: %s", error)
            self._unwritten = str(error)
        else:
            self._unwritten = ""

    def _replace(self) -> None:
        with self._lock:
            self._beat += 1
            text = json.dumps({**self._values, "token": self._token, "beat": self._beat})
            self._path.parent.mkdir(parents=True, exist_ok=True)
            fresh = self._path.with_suffix(f".{self._token}")
            fresh.write_text(text, encoding="utf-8")
            os.replace(fresh, self._path)


class Machine:
    """Another machine, as its file shows it. clock: monotonic seconds."""

    def __init__(
        self,
        files: RunFiles,
        number: int,
        *,
        lost_s: float = LOST_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.number = number
        self._path = machine_file(files, number)
        self._lost_s, self._clock = lost_s, clock
        self._first: tuple[str, int] | None = None
        self._last: tuple[str, int] | None = None
        self._said: Mapping[str, Any] = {}
        self._changed = clock()

    def look(self) -> Mapping[str, Any] | None:
        """What it says now; None until it was seen to be alive.

        Raises:
            PartFailed: it failed, or was alive and fell silent.
        """
        values = self._read()
        if values is not None:
            beat = (str(values["token"]), int(values["beat"]))
            if self._first is None:
                self._first = self._last = beat
            if beat != self._last:
                self._last, self._said, self._changed = beat, values, self._clock()
        return self._trusted(self._said) if self._said else None

    def _trusted(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        if values["phase"] == FAILED:
            raise PartFailed(f"machine {self.number} ({values.get('address')}) failed: {values['reason']}")
        silent = self._clock() - self._changed
        if values["phase"] != ENDED and silent > self._lost_s:
            raise PartFailed(
                f"machine {self.number} ({values.get('address')}) was not heard of for {silent:.0f} s; it is down, its "
                f"process was killed, or it no longer sees {self._path.parent}"
            )
        return values

    def wait_for(
        self, phases: tuple[str, ...], deadline_s: float, tick: Callable[[], None]
    ) -> Mapping[str, Any]:
        """Wait until its phase is one of these. tick: called at every look.

        Raises:
            PartFailed: it failed, fell silent, or the deadline passed.
        """
        limit = self._clock() + deadline_s
        while True:
            values = self.look()
            if values is not None and values["phase"] in phases:
                return values
            if self._clock() > limit:
                said = "said nothing" if values is None else f"is {values['phase']}"
                raise PartFailed(
                    f"machine {self.number} {said} after {deadline_s:g} s, waited for {' or '.join(phases)}; start it "
                    f"with --node {self.number}, with the same run_dir on a file system that both see ({self._path})"
                )
            tick()
            time.sleep(_POLL_S)

    def _read(self) -> Mapping[str, Any] | None:
        """None where there is nothing to read now: not yet, not any more, or not for this machine's file system."""
        try:
            values: Mapping[str, Any] = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return values


class Others:
    """The other machines of a run, as the first one sees them; as a block it announces the first one to them.

    engine_machines: numbers of those that hold engines, and nothing else; the rest train. A lost machine of the latter
    kind ends the run, one with engines only takes its engines with it. With no other machine nothing is written.
    """

    def __init__(
        self, files: RunFiles, numbers: list[int], engine_machines: set[int], address: str, deadline_s: float
    ) -> None:
        self.address = address
        self._machines = [Machine(files, number) for number in numbers]
        self._engine_machines, self._deadline_s = engine_machines, deadline_s
        self._announcement = Announcement(machine_file(files, 0), address=address)
        self._said: dict[int, Mapping[str, Any]] = {}
        self._lost: dict[int, str] = {}
        self._asked: list[str] = []

    def __enter__(self) -> Self:
        if self._machines:
            self._announcement.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._machines:
            self._announcement.__exit__(kind, error, trace)

    def gather(self, tick: Callable[[], None]) -> None:
        """Wait until every machine is there and its engines answer."""
        for machine in self._machines:
            phase = READY if machine.number in self._engine_machines else STARTING
            self._said[machine.number] = machine.wait_for((phase,), self._deadline_s, tick)

    def train(self) -> None:
        """Let the others' trainer ranks start."""
        if self._machines:
            self._announcement.set(phase=TRAINING)

    def check(self) -> None:
        """Look at all of them.

        Raises PartFailed when one that trains failed or fell silent.
        """
        for machine in self._machines:
            if machine.number in self._lost:
                continue
            try:
                self._said[machine.number] = machine.look() or {}
            except PartFailed as failure:
                if machine.number not in self._engine_machines:
                    raise
                self._lost[machine.number] = str(failure)

    # ------------------------------------------------------------------ their engines

    def engines(self) -> list[Engine]:
        """Engines over there that answer."""
        return [Engine(**values) for said in self._hosting() for values in said.get("engines", [])]

    def hopeful(self) -> int:
        """Engines over there that answer or are being started."""
        return sum(int(said.get("hopeful", 0)) for said in self._hosting())

    def describe(self) -> list[str]:
        """Why each lost machine is lost, and what the others say of their engines."""
        return [*self._lost.values(), *(line for said in self._hosting() for line in said.get("describe", []))]

    def restart(self, name: str, reason: str) -> None:
        """Have an engine over there (by `Engine.name`) started again."""
        if any(engine.name == name for engine in self.engines()):
            self._asked.append(name)
            self._announcement.set(restart=self._asked, reason=reason)

    def begin_with(self, model_path: str, version: int) -> None:
        """Have engines that are started again begin with these weights."""
        if self._machines:
            self._announcement.set(begin_with=[model_path, version])

    def _hosting(self) -> list[Mapping[str, Any]]:
        return [self._said.get(n, {}) for n in sorted(self._engine_machines) if n in self._said and n not in self._lost]


def own_address() -> str:
    """An address of this machine that others can reach: its host name's, or that of the default route.

    Raises UserError when there is none.
    """
    name = socket.gethostname()
    try:
        found = [str(info[4][0]) for info in socket.getaddrinfo(name, None, socket.AF_INET)]
    except socket.gaierror:
        found = []  # a name without an address is common in containers
    reachable = [address for address in found if not address.startswith("127.")]
    try:
        return reachable[0] if reachable else _default_route()
    except OSError as error:
        raise UserError(
            f"no address of this machine ({name}) that others can reach was found ({error}); pass --address"
        ) from error


def _default_route() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("10.255.255.255", 9))  # nothing is sent: it only asks which interface would be used
        return str(probe.getsockname()[0])
