"""Starting servers: what is checked before anything runs, and the CPU adjustments of the server process."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_bridge import EngineServer, EngineStartError, ServerOptions, cpu_backend
from sglang_bridge.event_loop import BackgroundLoop
from sglang_bridge.server import claim_port
from tests.unit.bridge_endpoint import raw_endpoint

ROOT = Path(__file__).resolve().parents[2]


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    """``code`` in a fresh interpreter."""
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path / "missing", "is not a directory"),
        (lambda path: path, "has no config.json"),
        (lambda path: "./runs/tinny", "is not a directory"),
    ],
)
def test_a_checkpoint_that_is_not_there_is_refused_at_once(make: object, message: str, tmp_path: Path) -> None:
    server = EngineServer(make(tmp_path), log_path=tmp_path / "log")  # type: ignore[operator]
    with pytest.raises(EngineStartError, match=message):
        server.start()
    assert not server.alive()


def test_a_free_port_is_found_and_a_foreign_address_refused() -> None:
    # Outside what outgoing connections take: one of them could hold the port by the time the server has loaded.
    assert all(20_000 <= claim_port("127.0.0.1", 0) < 32_768 for _ in range(5))
    with pytest.raises(EngineStartError, match="cannot listen on 192.0.2.1"):
        claim_port("192.0.2.1", 0)


def test_options_become_flags_and_extra_arguments_come_last() -> None:
    options = ServerOptions(dtype="float32", tensor_parallel_size=2, routed_experts=True, weight_version=17,
                            extra_args=("--dtype", "bfloat16"))
    arguments = options.arguments()
    assert arguments[:2] == ["--dtype", "float32"]
    assert arguments[-2:] == ["--dtype", "bfloat16"]
    assert arguments[arguments.index("--weight-version") + 1] == "17"
    assert "--enable-return-routed-experts" in arguments
    assert "--mem-fraction-static" not in arguments


def test_cpu_flags_yield_to_what_the_user_gives() -> None:
    arguments = cpu_backend.add_server_flags(["--model-path", "m", "--grammar-backend=xgrammar", "--device", "cpu"])
    assert sum(argument.startswith("--grammar-backend") for argument in arguments) == 1
    assert arguments.count("--device") == 1
    assert arguments[arguments.index("--attention-backend") + 1] == "torch_native"


def test_sampling_processes_need_not_import_torch() -> None:
    code = "import sys, sglang_bridge; print('torch' in sys.modules, 'sglang' in sys.modules)"
    assert run_python(code).stdout.split() == ["False", "False"]


def test_the_adjustments_refuse_other_versions_and_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.6.0")
    monkeypatch.delitem(sys.modules, "sglang", raising=False)
    with pytest.raises(cpu_backend.CpuBackendError, match=r"written for sglang 0.5.23, found 0.6.0"):
        cpu_backend.install()
    monkeypatch.setitem(sys.modules, "sglang", sys)
    with pytest.raises(cpu_backend.CpuBackendError, match="before sglang is imported"):
        cpu_backend.install()


def test_stubbed_kernels_raise_when_called_and_only_then() -> None:
    code = """
from sglang_bridge import cpu_backend
for name in ("sgl_kernel", "triton"):
    __import__("sys").meta_path.insert(0, cpu_backend._StubFinder(name, below=name == "triton"))
import sgl_kernel, triton, triton.language as tl
from triton.runtime.jit import KernelInterface
class Kernel(KernelInterface[int]): pass
@triton.jit
def kernel(x, BLOCK: tl.constexpr): return x
@triton.autotune(configs=[triton.Config({"BLOCK": 1}, num_warps=4)], key=["x"])
@triton.jit
def tuned(x): return x
for call in (lambda: sgl_kernel.rmsnorm(1), lambda: kernel[(1,)](2)):
    try: call()
    except (NotImplementedError, TypeError) as error: print(type(error).__name__, error)
try: import sgl_kernel.flash_attn
except ImportError: print("no sub-modules")
"""
    lines = run_python(code).stdout.splitlines()
    assert lines[0].startswith("NotImplementedError sgl_kernel.rmsnorm is a GPU kernel and was called on a CPU")
    assert lines[1].startswith("TypeError")
    assert lines[2] == "no sub-modules"


def test_every_adjustment_gives_its_reason() -> None:
    assert len(cpu_backend.ADJUSTMENTS) >= 6
    for name, (reason, apply) in cpu_backend.ADJUSTMENTS.items():
        assert len(reason.split()) > 6, name
        assert callable(apply)


@pytest.mark.parametrize(
    "answer", [b"SSH-2.0-OpenSSH_9.6\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nZ"]
)
def test_a_program_that_took_the_port_is_no_engine_that_answers(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = BackgroundLoop("not-an-engine")
    try:
        url = loop.run(raw_endpoint(answer).__aenter__())
        server = EngineServer("m", port=int(url.rsplit(":", 1)[1]), log_path="log")
        monkeypatch.setattr(server, "alive", lambda: True)
        assert not server.answers()
    finally:
        loop.close()


def test_a_full_disk_is_a_server_that_cannot_be_started(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    server = EngineServer(str(tmp_path), log_path="/dev/full")
    with pytest.raises(EngineStartError, match="writes its log to /dev/full: .*No space left on device"):
        server.start()
    assert not server.alive()
