"""``Publisher``: brings version v + 1 of the weights to every engine, and proves it.

Invariants
- No token is sampled while weights are partly old and partly new: engines are paused over the whole update.
- A version's label is set after all its weights are in (and, with a checksum, proven to be in), and never aborts
  running requests: only ``pause_mode="abort"`` does, and those are counted.
- Keys and values computed by old weights are flushed, except ``in_place``, which is chosen to keep them.
- Unproven weights do not sample on: when an engine fails the proof, it is left paused and the error names it.
- Every wait has the deadline, and the error names the engine (peer) and the step. After a failure the process
  group is dropped; the next ``publish`` builds a new one. An update that fails before any weight moved resumes the
  engines as they were.

Pause modes: ``retract`` (requests wait, are recomputed under the new weights and go on), ``abort`` (requests end
with what they have), ``in_place`` (requests go on over the old keys and values; clients made with
``in_place_updates=True`` flag their tokens).

Synchronous: it is called by the trainer's rank 0 while a collective generator yields the tensors one by one.
"""

from __future__ import annotations

import collections
import concurrent.futures
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NoReturn, Self

from torch import Tensor

from sglang_bridge import platform
from sglang_bridge.buckets import Bucket, pack
from sglang_bridge.checksum import EngineChecksums
from sglang_bridge.client import EngineClient, PauseMode
from sglang_bridge.engine_calls import EngineCalls, failed
from sglang_bridge.errors import EngineError, PublishError
from sglang_bridge.proof import (
    Canary,
    Problem,
    check_hashable,
    engine_processes,
    hashed,
    hashes_problem,
    read_checkpoint,
    scores_problem,
)
from sglang_bridge.weight_group import WeightGroup, address_towards

_POLL_S = 0.0005
# Buckets on their way at once: the engines load one while the next one is gathered and sent.
_BUCKETS_IN_FLIGHT = 2


@dataclass(frozen=True, slots=True)
class PublishReport:
    """What one publication did.

    ``seconds``: all of it; ``transfer_seconds``: from the first bucket to the last engine's acknowledgement;
    ``paused_seconds``: how long engines did not sample. ``bytes``: sent to each engine. ``aborted_requests`` and
    ``aborted_tokens`` (prompts included): what ``pause_mode="abort"`` ended. ``verified``: how, or ``""``.
    """

    version: int
    seconds: float
    paused_seconds: float
    transfer_seconds: float
    bytes: int
    buckets: int
    aborted_requests: int
    aborted_tokens: int
    verified: str


@dataclass(slots=True)
class _Progress:
    """State of the publication that is running, for the report and for cleaning up."""

    step: str = "pause"
    paused_at: float = 0.0
    touched: bool = False
    bytes: int = 0
    buckets: int = 0
    transfer_seconds: float = 0.0
    aborted_requests: int = 0
    aborted_tokens: int = 0


class Publisher:
    """Sends weights to the engines at ``urls``.

    Args:
        transport: ``distributed`` (process group, flattened buckets) or ``disk`` (engines read a checkpoint).
        backend: ``nccl`` or ``gloo``; None: what this machine has.
        pause_mode: see the module.
        bucket_bytes: size of one broadcast; two are held at a time on either side.
        deadline_s: longest wait for any one step of any one engine.
        address: where the engines reach this process; None: found from the engines' addresses.
        api_key: of the engines, when they were started with one.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        transport: Literal["distributed", "disk"] = "distributed",
        backend: str | None = None,
        pause_mode: PauseMode = "retract",
        bucket_bytes: int = 256 * 2**20,
        deadline_s: float = 120.0,
        address: str | None = None,
        api_key: str = "",
    ) -> None:
        if transport not in ("distributed", "disk") or pause_mode not in ("retract", "abort", "in_place"):
            raise ValueError(f"unknown transport {transport!r} or pause mode {pause_mode!r}; transports are "
                             "distributed and disk, modes are retract, abort and in_place")
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be positive, got {bucket_bytes}")
        self.transport = transport
        self.backend = backend or platform.default_backend()
        self.pause_mode: PauseMode = pause_mode
        self.bucket_bytes = bucket_bytes
        self.deadline_s = deadline_s
        self._address = address
        self.version: int | None = None  # last one published
        self._calls = EngineCalls(urls, deadline_s, api_key)
        self._group: WeightGroup | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave the process group and close all connections. Engines keep running. Idempotent."""
        self._drop_group()
        self._calls.close()

    @property
    def urls(self) -> list[str]:
        """Addresses of the engines that are published to."""
        return self._calls.urls

    def follow(self, urls: Sequence[str]) -> None:
        """Speak to these engines from now on; the process group is built anew when they are others than before."""
        if list(urls) != self.urls:
            self._drop_group()
            self._calls.follow(urls)

    # -- the group --------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Reach every engine and, for ``distributed``, build the process group. Done by ``publish`` when needed.

        Raises:
            PublishError: names the engines that are missing.
        """
        if self._group is not None:
            return
        if not self.urls:
            raise PublishError("there is no engine to publish to")
        infos = self._calls.everywhere("reach", lambda client: client.info())
        if self.pause_mode == "in_place":
            self._refuse_overlap(infos)
        if self.transport == "disk":
            return
        sizes = [engine_processes(url, info) for url, info in zip(self.urls, infos)]
        offsets = [1 + sum(sizes[:index]) for index in range(len(sizes))]
        address = self._address or address_towards(self.urls)
        group = WeightGroup(address, 1 + sum(sizes), backend=self.backend, deadline_s=self.deadline_s)
        self._group = group
        calls = [self._calls.post(client, "/init_weights_update_group", {
            "master_address": group.address, "master_port": group.port, "rank_offset": offset,
            "world_size": group.world_size, "group_name": group.name, "backend": self.backend,
        }) for client, offset in zip(self._calls.clients, offsets)]
        try:
            group.join()
            self._calls.settle("join the process group", calls)
        except RuntimeError as error:  # torch's DistError is one
            missing = [url for url, offset, size in zip(self.urls, offsets, sizes)
                       if any(offset <= rank < offset + size for rank in group.missing_ranks())]
            self._fail("join the process group", calls, error, suspects=missing)

    def _drop_group(self) -> None:
        group, self._group = self._group, None
        if group is None:
            return
        # Engines forget it too; one that is gone, or already saw the connection break, has nothing to forget.
        calls = [self._calls.post(client, "/destroy_weights_update_group", {"group_name": group.name})
                 for client in self._calls.clients]
        group.close()
        concurrent.futures.wait(calls, timeout=min(5.0, self.deadline_s))

    def _refuse_overlap(self, infos: Sequence[dict[str, Any]]) -> None:
        overlapping = [url for url, info in zip(self.urls, infos) if info.get("disable_overlap_schedule") is False]
        if overlapping:
            raise PublishError(
                f"pause_mode in_place needs engines started with --disable-overlap-schedule, {', '.join(overlapping)} "
                "is not: a token sampled before the update would be counted after it and carry the new version"
            )

    # -- publishing -------------------------------------------------------------------------------------------

    def publish(
        self,
        version: int,
        tensors: Iterable[tuple[str, Tensor]],
        canary: Canary | None = None,
        *,
        checksum: bool = False,
    ) -> PublishReport:
        """Send ``tensors`` (Hugging Face names, all of the model, any order) as ``version``.

        ``canary``: score it on every engine afterwards. ``checksum``: compare hashes of every parameter before the
        engines sample again (engines on a CPU, tensor parallel 1).

        Raises:
            PublishError: an engine failed, is missing, or does not hold what was sent.
            ValueError: the version is not a new one, or the transport is ``disk``.
        """
        if self.transport != "distributed":
            raise ValueError("this publisher's transport is disk; use publish_from_disk")
        sums = EngineChecksums() if checksum else None
        stream = iter(tensors) if sums is None else hashed(tensors, sums)
        return self._publish(version, lambda progress: self._send(stream, progress), canary, sums)

    def publish_from_disk(
        self,
        version: int,
        path: str | Path,
        canary: Canary | None = None,
        *,
        checksum: bool = False,
    ) -> PublishReport:
        """Let every engine load the checkpoint at ``path`` (which it must see under that name) as ``version``."""
        sums = None
        if checksum:
            sums = EngineChecksums()
            for name, tensor in read_checkpoint(path):
                sums.add(name, tensor)
        return self._publish(version, lambda progress: self._load(path, progress), canary, sums)

    def _publish(
        self,
        version: int,
        transfer: Callable[[_Progress], None],
        canary: Canary | None,
        sums: EngineChecksums | None,
    ) -> PublishReport:
        if self.version is not None and version <= self.version:
            raise ValueError(f"version {version} was not after {self.version}, the last one published; "
                             "a version id is never used twice")
        started = time.monotonic()
        self.connect()
        progress = _Progress(paused_at=time.monotonic())
        try:
            self._pause(progress)
            transfer(progress)
            if self.pause_mode != "in_place":
                self._calls.everywhere("flush the prefix cache", lambda client: client.flush_cache())
            if sums is not None:
                self._check_sums(version, sums)
            self._calls.everywhere("set the version", lambda client: client.set_version(version))
            self._calls.everywhere("resume", lambda client: client.resume())
        except BaseException:
            self._clean_up(progress)
            raise
        paused = time.monotonic() - progress.paused_at
        if canary is not None:
            self._check_canary(version, canary)
        self.version = version
        proofs = [name for name, used in (("checksum", sums), ("canary", canary)) if used is not None]
        return PublishReport(
            version=version, seconds=time.monotonic() - started, paused_seconds=paused,
            transfer_seconds=progress.transfer_seconds, bytes=progress.bytes, buckets=progress.buckets,
            aborted_requests=progress.aborted_requests, aborted_tokens=progress.aborted_tokens,
            verified="+".join(proofs),
        )

    def running(self) -> int:
        """Requests that run or wait on the engines now: 0 when they are drained.

        Raises:
            PublishError: names the engine that did not answer.
        """
        return sum(_requests(load) for load in self._loads())

    def _loads(self) -> list[dict[str, Any]]:
        return self._calls.everywhere("count running requests", lambda client: client.load())

    # -- holding engines ------------------------------------------------------------------------------------------

    def hold(self) -> float:
        """Stop sampling everywhere; running requests come back as partial responses (finish reason ``abort``).

        Requests that arrive later wait, unanswered, until the next ``publish``, or ``release``, lets the engines go on.
        Returns when all engines stood still, in Unix seconds.

        Raises:
            PublishError: names the engine that did not.
        """
        self._calls.everywhere("pause", lambda client: client.pause("retract"))
        stopped_at = time.time()
        self._calls.everywhere("abort running requests", lambda client: client.abort_all())
        return stopped_at

    def release(self) -> None:
        """Let held engines sample again under the weights they have."""
        self._calls.everywhere("resume", lambda client: client.resume())

    def _pause(self, progress: _Progress) -> None:
        if self.pause_mode != "abort":
            self._calls.everywhere("pause", lambda client: client.pause(self.pause_mode))
            return
        # Retracting first and aborting then is the same as the engine's abort, which polls once a second.
        self._calls.everywhere("pause", lambda client: client.pause("retract"))
        for load in self._loads():
            progress.aborted_requests += _requests(load)
            progress.aborted_tokens += int(load["num_total_tokens"])
        self._calls.everywhere("abort running requests", lambda client: client.abort_all())

    def _send(self, tensors: Iterator[tuple[str, Tensor]], progress: _Progress) -> None:
        if self._group is None:
            raise PublishError("the process group is gone; connect again")
        self._calls.everywhere("begin the update", _begin_update)
        progress.touched = True
        started = time.monotonic()
        pending: collections.deque[list[Future[Any]]] = collections.deque()
        for bucket in pack(tensors, self.bucket_bytes, self._group.device):
            if len(pending) == _BUCKETS_IN_FLIGHT:
                self._calls.settle("load a bucket", pending.popleft())
            pending.append(self._broadcast(self._group, bucket))
            progress.bytes += bucket.nbytes
            progress.buckets += 1
        while pending:
            self._calls.settle("load a bucket", pending.popleft())
        if progress.buckets == 0:
            raise PublishError("no tensor was published: the stream of weights is empty")
        self._calls.everywhere("end the update", lambda client: client.call("/end_weight_update", {}))
        progress.transfer_seconds = time.monotonic() - started

    def _broadcast(self, group: WeightGroup, bucket: Bucket) -> list[Future[Any]]:
        """Announce one bucket to the engines and send it; the calls come back while they load it."""
        body = {"names": bucket.names, "dtypes": bucket.dtypes, "shapes": bucket.shapes, "group_name": group.name,
                "load_format": "flattened_bucket", "flush_cache": False}
        calls = [self._calls.post(client, "/update_weights_from_distributed", body) for client in self._calls.clients]
        limit = time.monotonic() + self.deadline_s
        try:
            group.broadcast(bucket.flat)
            while not group.sent():
                if time.monotonic() > limit:
                    raise RuntimeError(f"the broadcast took longer than {self.deadline_s:g} s")
                if any(call.done() and call.exception() is not None for call in calls):
                    raise RuntimeError("an engine gave up")
                time.sleep(_POLL_S)
        except RuntimeError as error:
            self._fail("receive a bucket", calls, error)
        return calls

    def _load(self, path: str | Path, progress: _Progress) -> None:
        progress.touched = True
        started = time.monotonic()
        body = {"model_path": str(path), "flush_cache": False, "abort_all_requests": False}
        self._calls.everywhere(f"load {path}", lambda client: client.call("/update_weights_from_disk", body))
        progress.transfer_seconds = time.monotonic() - started
        progress.bytes = sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))

    def _clean_up(self, progress: _Progress) -> None:
        """After a failure: drop the group; resume engines whose weights are whole, leave the others paused."""
        self._drop_group()
        if not progress.touched:
            calls = [self._calls.submit(client.resume()) for client in self._calls.clients]
            concurrent.futures.wait(calls, timeout=min(5.0, self.deadline_s))

    # -- proofs -----------------------------------------------------------------------------------------------

    def _check_sums(self, version: int, sums: EngineChecksums) -> None:
        for url, info in zip(self.urls, self._calls.everywhere("describe itself", lambda client: client.info())):
            check_hashable(url, info)
        answers = self._calls.everywhere(
            "hash its weights", lambda client: client.call("/weights_checker", {"action": "checksum"})
        )
        _refuse([problem for url, answer in zip(self.urls, answers)
                 if (problem := hashes_problem(url, version, sums, answer))])

    def _check_canary(self, version: int, canary: Canary) -> None:
        """Score twice: recomputed, and over the prefix cache, where keys and values of old weights would show."""
        starts = [0] if self.pause_mode == "in_place" else [len(canary.input_ids) // 2, 0]
        for start in starts:
            scores = self._calls.settle("score the canary", [
                self._calls.submit(client.score(canary.input_ids, start=start)) for client in self._calls.clients
            ])
            problems = []
            for client, score in zip(self._calls.clients, scores):
                if problem := scores_problem(client.url, version, canary, score, start):
                    self._quarantine(client)
                    problems.append(problem)
            _refuse(problems)

    def _quarantine(self, client: EngineClient) -> None:
        """Let it sample no further. Whether it still hears that does not matter: it is being reported."""
        for call in (client.pause("retract"), client.abort_all()):
            concurrent.futures.wait([self._calls.submit(call)], timeout=self.deadline_s)

    def _fail(
        self, step: str, calls: Sequence[Future[Any]], cause: RuntimeError, *, suspects: Sequence[str] = ()
    ) -> NoReturn:
        """The group broke: name the engines to blame, then leave the group, which frees the others.

        To blame are ``suspects``, else those that reported a failure first, else those that stayed silent.
        """
        if not suspects:
            concurrent.futures.wait(calls, timeout=1.0, return_when=concurrent.futures.FIRST_EXCEPTION)
        blamed = {url: f"{url} did not come within {self.deadline_s:g} s" for url in suspects}
        blamed = blamed or self._calls.failures(calls, silent=False) or self._calls.failures(calls)
        self._drop_group()
        concurrent.futures.wait(calls, timeout=2.0)
        # The traceback is dropped: its frames would keep the group's store, and with it waiting peers, alive.
        raise failed(step, blamed, len(calls), cause) from cause.with_traceback(None)


def _refuse(problems: Sequence[Problem]) -> None:
    """Raise for all engines that failed a proof, if any did: one that is not named would go on unproven."""
    if problems:
        raise PublishError(" ".join(problem.text for problem in problems), urls=tuple(p.url for p in problems))


def _requests(load: dict[str, Any]) -> int:
    return int(load["num_running_reqs"]) + int(load["num_waiting_reqs"])


async def _begin_update(client: EngineClient) -> None:
    """Open the engine's update session, closing one that a failed publication left open."""
    try:
        await client.call("/begin_weight_update", {})
    except EngineError as error:
        if "already open" not in error.text:
            raise
        await client.call("/end_weight_update", {})
        await client.call("/begin_weight_update", {})
