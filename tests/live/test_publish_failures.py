"""Publishing to engines that are missing, die or freeze: bounded, blamed on the right one, and survivors go on."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sglang_bridge import EngineServer, Publisher, PublishError, SamplingOptions
from tests.live.conftest import BUCKET_BYTES
from tests.live.policies import Policy
from tests.live.test_publishing import canary
from tests.live.under_way import with_client

pytestmark = pytest.mark.live

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 4.0


@contextmanager
def failing_peer(script: str) -> Iterator[str]:
    """The url of a ``tests.live.failing_peer``."""
    command = [sys.executable, "-m", "tests.live.failing_peer", script]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()


def check_alone_it_works(url: str, update: Policy) -> None:
    """The surviving engine takes the next publication and samples under it."""
    started = time.monotonic()
    with Publisher([url], bucket_bytes=BUCKET_BYTES, deadline_s=20) as publisher:
        publisher.publish(1, update.tensors.items(), canary(update))
    generation = with_client(url, lambda client: client.generate([5, 6, 7], SamplingOptions(max_new_tokens=3)))
    assert generation.spans[0].version == 1
    assert time.monotonic() - started < 15  # the engine was not stuck in the old group


@pytest.mark.parametrize(
    ("script", "step"),
    [("absent", "join the process group"), ("dies", "(receive|load) a bucket"), ("frozen", "(receive|load) a bucket")],
)
def test_the_failing_engine_is_named_and_the_other_goes_on(
    script: str, step: str, url: str, updates: list[Policy]
) -> None:
    with failing_peer(script) as peer:
        started = time.monotonic()
        with Publisher([url, peer], bucket_bytes=BUCKET_BYTES, deadline_s=DEADLINE_S) as publisher:
            with pytest.raises(PublishError, match=f"could not {step} on 1 of 2 engines: {peer}") as caught:
                publisher.publish(1, updates[0].tensors.items())
        assert url not in str(caught.value)
        assert time.monotonic() - started < 4 * DEADLINE_S
    check_alone_it_works(url, updates[0])


def test_an_engine_that_is_not_there_is_named_at_once(url: str, updates: list[Policy]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        missing = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with Publisher([url, missing], deadline_s=DEADLINE_S) as publisher:
            with pytest.raises(PublishError, match=f"could not reach on 1 of 2 engines: {missing}"):
                publisher.publish(1, updates[0].tensors.items())
    assert with_client(url, lambda client: client.version()) == 0


def test_a_stream_of_weights_that_fails_passes_its_error_on(url: str, updates: list[Policy]) -> None:
    def broken() -> Iterator[tuple[str, object]]:
        yield from list(updates[0].tensors.items())[:5]
        raise KeyError("layer 2 is gone")

    with Publisher([url], bucket_bytes=BUCKET_BYTES, deadline_s=10) as publisher:
        with pytest.raises(KeyError, match="layer 2 is gone"):
            publisher.publish(1, broken())  # type: ignore[arg-type]
        report = publisher.publish(1, updates[0].tensors.items(), canary(updates[0]))  # the group is rebuilt
    assert report.version == 1


def test_trainer_ranks_publish_from_a_collective_generator(
    server: EngineServer, url: str, updates: list[Policy], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "tests.live.trainer_ranks", url, str(updates[2].path), str(tmp_path / "store")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    version, verified, buckets = result.stdout.split()
    assert (version, verified) == ("2", "checksum")
    assert int(buckets) > 2
    assert with_client(url, lambda client: client.version()) == 2
