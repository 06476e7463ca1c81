"""One real SGLang server for the whole session, policies whose log-probs are known, and one to begin a run with."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_bridge import EngineServer, Publisher, ServerOptions
from tests.live.policies import Policy, make_policy, updated
from tools.benchmark_rows import ROOT

# One model's worth of tiny weights in several buckets, so that more than one is in flight.
BUCKET_BYTES = 200_000


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    """Version 0: what the server starts with."""
    return make_policy(tmp_path_factory.mktemp("policy") / "v0")


@pytest.fixture(scope="session")
def updates(policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> list[Policy]:
    """Three successors of ``policy``."""
    folder = tmp_path_factory.mktemp("updates")
    return [updated(policy, folder / f"v{version}", seed=version) for version in (1, 2, 3)]


@pytest.fixture(scope="session")
def server(policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    """A ready server, shared by all live tests."""
    options = ServerOptions(dtype="float32", mem_fraction_static=0.1, max_total_tokens=32768, routed_experts=True)
    log_path = tmp_path_factory.mktemp("server") / "server.log"
    with EngineServer(policy.path, log_path=log_path, options=options) as server:
        yield server


@pytest.fixture
def url(server: EngineServer, policy: Policy) -> str:
    """The server, idle, running, holding version 0 with an empty cache, whatever the test before did."""
    with Publisher([server.url], transport="disk", pause_mode="abort", deadline_s=30) as publisher:
        publisher.publish_from_disk(0, policy.path)
    return server.url


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny untrained policy. Not to be written to."""
    path = tmp_path_factory.mktemp("model") / "tiny"
    subprocess.run([sys.executable, ROOT / "tools/make_tiny_checkpoint.py", "--out", path, "--seed", "0"], check=True)
    return path
