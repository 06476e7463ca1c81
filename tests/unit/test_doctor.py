"""The doctor: each finding that is not fine says what to do, and the exit code follows the worst."""

from __future__ import annotations

import io
import socket

import pytest
from rich.console import Console

from megatron_async import doctor
from megatron_async.config import load
from megatron_async.doctor import GIB, Finding
from tests.unit.configs import write_config


def test_this_machine_has_all_kinds_of_findings_and_advice_where_needed():
    findings = doctor.examine()
    subjects = [finding.subject for finding in findings]
    for subject in ("Python", "torch", "megatron-core", "sglang", "memory", "shared memory", "disk", "ports"):
        assert subjects.count(subject) == 1
    assert any(subject.startswith("GPU") for subject in subjects)
    assert all(finding.advice for finding in findings if finding.level in ("warning", "error"))


@pytest.mark.parametrize(
    ("finding", "level", "word"),
    [
        (doctor.python_finding((3, 11)), "ok", ""),
        (doctor.python_finding((3, 9)), "error", "PYTHON=python3.11"),
        (doctor.engine_finding("torch", "2.13.0", "2.13.0+cpu"), "ok", ""),
        (doctor.engine_finding("torch", "2.13.0", "2.14.1"), "warning", "pip install torch==2.13.0"),
        (
            doctor.engine_finding("megatron-core", "0.16.1", "0.17.0"),
            "error",
            "pip install megatron-core==0.16.1",
        ),
        (doctor.engine_finding("sglang", "0.5.23", None), "error", "recipes/setup.sh"),
        (doctor.memory_finding(7 * GIB, 24 * GIB), "ok", ""),
        (doctor.memory_finding(2 * GIB, 24 * GIB), "error", "stop other programs"),
        (doctor.gpu_finding(0, "H200", 130 * GIB, 139 * GIB), "ok", ""),
        (doctor.gpu_finding(0, "H200", 3 * GIB, 139 * GIB), "warning", "nvidia-smi"),
    ],
)
def test_levels_and_advice(finding, level, word):
    assert finding.level == level
    assert word in finding.advice


def test_missing_shared_memory_and_disk(tmp_path, monkeypatch):
    assert "mount a tmpfs" in doctor.shm_finding(tmp_path / "none").advice
    usage = type("Usage", (), {"free": GIB // 100})
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _path: usage)
    assert doctor.shm_finding(tmp_path).level == "error"
    finding = doctor.disk_finding(tmp_path / "not" / "there" / "yet")
    assert (finding.level, "larger disk" in finding.advice) == ("warning", True)


def test_exit_code_follows_errors_only():
    fine, warned = Finding("a", "ok", ""), Finding("b", "warning", "", "do")
    assert doctor.exit_code([fine, warned]) == 0
    assert doctor.exit_code([fine, Finding("c", "error", "", "do")]) == 1


def test_a_configuration_is_examined_too(tmp_path):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        config = load(write_config(tmp_path), [f"engines.base_port={port}", "rollout.top_p=2"])
        output = io.StringIO()
        code = doctor.main(config, Console(file=output, width=300))
    assert code == 1
    assert f"port(s) {port} on 127.0.0.1 are in use" in output.getvalue()
    assert "outside (0, 1]" in output.getvalue()
    assert "to mend before a run" in output.getvalue()
