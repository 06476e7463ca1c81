"""``EngineServer``: starts, watches and ends one SGLang server process and everything under it.

Invariants
- A server either becomes ready before its deadline or raises ``EngineStartError`` with the end of its log.
- Nothing survives: the server is its own process group; ``stop`` ends the whole group, politely first. If the
  process that started it disappears without calling ``stop``, the server notices within a second and ends itself.
- A fresh server says which policy version it holds: ``weight_version`` is set at start, ``"0"`` by default.

::

    with EngineServer("checkpoints/tiny", log_path="engine.log") as server:
        ...  # server.url answers
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from sglang_bridge import direct_http
from sglang_bridge.addresses import is_loopback, url_of
from sglang_bridge.errors import EngineStartError
from sglang_bridge.lifetime import KEY_VARIABLE, PARENT_VARIABLE

_POLL_S = 0.2
_LOG_TAIL_LINES = 25
_OWN_PORTS = range(20_000, 32_000)
"""Below the ports that Linux (from 32,768), BSD and Windows (from 49,152) give to outgoing connections."""
_PORT_TRIES = 20


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What a server is started with; each field becomes the SGLang flag of the same meaning.

    Attributes:
        dtype: arithmetic of the model, ``auto`` follows the checkpoint (SGLang turns float32 into float16 then).
        tensor_parallel_size: processes (GPUs) that share the model.
        max_total_tokens: tokens the key-value pool holds; None lets SGLang fill the memory.
        mem_fraction_static: share of memory for weights and key-value pool; None leaves SGLang's default.
        routed_experts: let requests ask for the experts each token was routed to (costs a host buffer).
        weight_version: version of the weights in ``model_path``.
        extra_args: further SGLang arguments, appended last, so they win.
        environment: further environment variables of the server.
        api_key: what clients must send as a bearer token; needed to listen anywhere but on loopback.
    """

    dtype: str = "auto"
    tensor_parallel_size: int = 1
    max_total_tokens: int | None = 65536
    mem_fraction_static: float | None = None
    routed_experts: bool = False
    weight_version: int = 0
    extra_args: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    api_key: str = field(default="", repr=False)

    def arguments(self) -> list[str]:
        """The command line these options stand for."""
        arguments = [
            "--dtype", self.dtype,
            "--tp-size", str(self.tensor_parallel_size),
            "--weight-version", str(self.weight_version),
            "--incremental-streaming-output",
        ]
        if self.max_total_tokens is not None:
            arguments += ["--max-total-tokens", str(self.max_total_tokens)]
        if self.mem_fraction_static is not None:
            arguments += ["--mem-fraction-static", str(self.mem_fraction_static)]
        if self.routed_experts:
            arguments.append("--enable-return-routed-experts")
        return [*arguments, *self.extra_args]


class EngineServer:
    """One SGLang server on this machine.

    Args:
        model_path: Hugging Face checkpoint directory, or a hub name SGLang can resolve.
        host: address to listen on; one that others can reach needs ``options.api_key``, since whoever reaches an
            engine can replace its weights.
        port: 0 picks a free one at ``start``; ``url`` then has it.
        log_path: everything the server prints (appended).
        options: see ``ServerOptions``.
    """

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        log_path: str | os.PathLike[str],
        options: ServerOptions | None = None,
    ) -> None:
        self.model_path = os.fspath(model_path)
        self.host = host
        self.port = port
        self.log_path = Path(log_path)
        self.options = options or ServerOptions()
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    def __enter__(self) -> Self:
        self.start()
        self.wait_ready()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """Where clients reach the server."""
        return url_of(self.host, self.port)

    @property
    def pid(self) -> int | None:
        """Process id of the server, which is also its process group; None when not started."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process and return at once.

        Raises:
            EngineStartError: already running, the checkpoint is not there, the port is taken, others could reach it
                without a key, or the machine has no room for its log or its process.
        """
        if not is_loopback(self.host) and not self.options.api_key:
            raise EngineStartError(f"an engine that listens on {self.host} can be reached by others, who could read "
                                   "and replace its weights: give it a key (ServerOptions.api_key), or listen on "
                                   "127.0.0.1")
        if self.alive():
            raise EngineStartError(f"the server on {self.url} is already running (pid {self.pid})")
        check_checkpoint(self.model_path)
        self.port = claim_port(self.host, self.port)
        command = [
            sys.executable, "-m", "sglang_bridge.serve",
            "--model-path", self.model_path, "--host", self.host, "--port", str(self.port),
            *self.options.arguments(),
        ]
        try:
            self._process = self._begin(command)
        except OSError as error:
            raise EngineStartError(f"cannot start a server that writes its log to {self.log_path}: {error}") from error

    def _begin(self, command: list[str]) -> subprocess.Popen[bytes]:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        # SGLang prints its arguments, a key among them.
        mode = 0o600 if self.options.api_key else 0o666
        with open(os.open(self.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, mode), "ab") as log:
            if self.options.api_key:
                os.fchmod(log.fileno(), mode)
            self._log_start = log.tell()
            log.write(f"$ {' '.join(command)}\n".encode())
            log.flush()
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                env=self._environment(), start_new_session=True,
            )

    def _environment(self) -> dict[str, str]:
        package_root = str(Path(__file__).resolve().parent.parent)
        paths = [package_root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
                       "PYTHONUNBUFFERED": "1", PARENT_VARIABLE: str(os.getpid())}
        if Path(self.model_path).is_dir():
            environment["HF_HUB_OFFLINE"] = "1"  # everything is local; no look-up that could hang
        # A launcher's rank variables would make the server join the launcher's process group.
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            environment.pop(name, None)
        for name in ("no_proxy", "NO_PROXY"):  # SGLang's first request is one to itself
            around = (environment.get(name, ""), self.host, "127.0.0.1", "localhost", "::1")
            environment[name] = ",".join(filter(None, around))
        if self.options.api_key:
            environment[KEY_VARIABLE] = self.options.api_key  # command lines can be read by every user
        return {**environment, **self.options.environment}

    def alive(self) -> bool:
        """True while the server process runs (ready or not)."""
        return self._process is not None and self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """How the process ended, negative for a signal; None while it runs and when it was not started."""
        return None if self._process is None else self._process.poll()

    def answers(self) -> bool:
        """True once the server takes requests. Waits a second at most."""
        return self.alive() and _answers(f"{self.url}/ready", 1.0)

    def interrupt(self) -> None:
        """Tell the server to end, without waiting for it; ``stop`` waits."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)  # SGLang looks at SIGTERM only every five seconds

    def kill(self) -> None:
        """SIGKILL to all its processes, without waiting; ``stop`` does the rest."""
        if self._process is not None:
            for process in _group_members(self._process.pid):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()

    def wait_ready(self, deadline_s: float = 300.0) -> None:
        """Wait until the server takes requests.

        Raises:
            EngineStartError: the server died or missed the deadline; it is stopped, the log's tail is in the error.
        """
        if self._process is None:
            raise EngineStartError("wait_ready before start")
        limit = time.monotonic() + deadline_s
        while True:
            if not self.alive():
                status = self._process.returncode
                self.stop()
                raise EngineStartError(self._failure(f"ended with status {status} while starting"))
            if _answers(f"{self.url}/ready"):
                return
            if time.monotonic() > limit:
                self.stop()
                raise EngineStartError(self._failure(f"was not ready after {deadline_s:g} s; raise the deadline if "
                                                     "it was still loading"))
            time.sleep(_POLL_S)

    def _failure(self, what: str) -> str:
        tail = self.log_tail()
        return f"the SGLang server for {self.model_path} on {self.url} {what}.\nEnd of {self.log_path}:\n{tail}"

    def log_tail(self, lines: int = _LOG_TAIL_LINES) -> str:
        """The last lines this server (not an earlier one in the same file) wrote."""
        with self.log_path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, size - 200 * lines))
            text = log.read().decode("utf-8", "replace")
        return "\n".join(text.splitlines()[-lines:])

    def stop(self, timeout: float = 2.0) -> None:
        """End the server and all its processes; after ``timeout`` seconds by force. Idempotent.

        Requests that still run are cut off: their clients see the connection break.
        """
        process, self._process = self._process, None
        if process is None:
            return
        shared = _shared_memory(_group_members(process.pid))
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout)
        _kill_group(process.pid)
        process.wait()
        for path in shared:
            path.unlink(missing_ok=True)


def claim_port(host: str, port: int) -> int:
    """``port``, checked to be free, or a free one for 0.

    A free one is taken below the range from which the system gives ports to outgoing connections: a server binds its
    port only after half a minute of loading, and one of that range may be gone by then.

    Raises:
        EngineStartError: the port is in use or the address is not of this machine.
    """
    if port == 0:
        for candidate in random.SystemRandom().sample(_OWN_PORTS, _PORT_TRIES):
            with contextlib.suppress(EngineStartError):
                return _free(host, candidate)
    return _free(host, port)


def _free(host: str, port: int) -> int:
    """As ``claim_port``; 0 is any port that the system gives."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free
        try:
            probe.bind((host, port))
            probe.listen(1)  # with SO_REUSEADDR only listening tells that another socket listens
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
                raise EngineStartError(f"cannot listen on {host}: it is no address of this machine ({error.strerror}). "
                                       "Use 127.0.0.1, one of `ip -brief address`, or start the engine over there"
                                       ) from error
            raise EngineStartError(f"cannot listen on {host}:{port}: {error.strerror}. Stop what uses the port "
                                   f"(`ss -ltnp 'sport = :{port}'` names it), choose another one, or 0 for a free one"
                                   ) from error
        return int(probe.getsockname()[1])


def check_checkpoint(model_path: str) -> None:
    """Refuse a local checkpoint directory that is not one, before half a minute is spent finding out."""
    path = Path(model_path)
    looks_local = path.exists() or model_path.startswith(("/", ".", "~")) or model_path.count("/") != 1
    if looks_local and not (path / "config.json").is_file():
        state = "has no config.json" if path.is_dir() else "is not a directory"
        raise EngineStartError(f"model path {model_path!r} {state}; give the directory of a Hugging Face checkpoint "
                               "(config.json, tokenizer files, *.safetensors)")


def _answers(url: str, timeout_s: float = 5.0) -> bool:
    try:
        return direct_http.request(url, timeout_s)[0] == 200
    except direct_http.NO_ANSWER:
        return False


def _group_members(group: int) -> list[psutil.Process]:
    """Processes of a process group that still run (a zombie only waits for its parent)."""
    members = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process)
    return members


def _kill_group(group: int, deadline_s: float = 5.0) -> None:
    """SIGKILL what is left of a process group and wait until it is gone.

    Python's resource tracker gets a second to notice that the others ended: it then removes their semaphores.
    """
    began = time.monotonic()
    while members := _group_members(group):
        elapsed = time.monotonic() - began
        if elapsed > deadline_s:
            pids = [process.pid for process in members]
            raise EngineStartError(f"processes {pids} of the server do not end after SIGKILL")
        for process in members:
            with contextlib.suppress(psutil.NoSuchProcess):
                if elapsed > 1.0 or "multiprocessing.resource_tracker" not in " ".join(process.cmdline()):
                    process.kill()
        time.sleep(0.02)


def _shared_memory(members: list[psutil.Process]) -> set[Path]:
    """SGLang's own files in /dev/shm that these processes map; it leaves them behind when it is ended."""
    paths: set[Path] = set()
    for process in members:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            paths |= {Path(mapped.path) for mapped in process.memory_maps()}
    return {path for path in paths if path.parent == Path("/dev/shm") and path.name.startswith("sglang_")}
