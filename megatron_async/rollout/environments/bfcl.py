"""The multi-turn tasks of the Berkeley Function Calling Leaderboard: a second benchmark behind the same interface.

A task is a list of user requests, known beforehand, over simulated APIs (files, tickets, trading, travel, cars, ...).
The agent calls tools until it answers in words, which ends the request; then its APIs must be in the state of the
reference's, and its results so far must contain the reference's. Reward 1 if that holds after every request, else 0.

`pip install --no-deps bfcl-eval mpmath`: the package (Apache-2.0) pins what other categories need, the multi-turn
tasks need none of it.

Invariants
- APIs, data and both checks are the benchmark's own. Its executor is not used for the agent's calls: it passes text to
  `eval`, here a call is a public method of an API object with JSON arguments, and nothing else. What would compute for
  ever is refused (`bfcl_bounds`).
- An episode that can no longer succeed ends: its score is the same, and no tokens are spent on it.
- The benchmark has no training split: training on its tasks needs `train_on_evaluation_tasks`, and is stamped.
"""

from __future__ import annotations

import ast
import copy
import functools
import importlib
import importlib.util
import inspect
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_async.errors import MissingHere
from megatron_async.labels import TRAINED_ON
from megatron_async.rollout.environments import bfcl_bounds
from megatron_async.rollout.environments.base import AssistantTurn, Message, Split, Start, Step, Task

CATEGORIES = ("base", "miss_param", "miss_func", "long_context")
STEP_LIMIT = 20
"""Turns with tool calls that the benchmark allows per request; the next one ends the episode."""

MORE_FUNCTIONS = "I have updated some more functions you can choose from. What about now?"
"""What the benchmark's user says when a function that was held back becomes available."""

_JSON_TYPES = {"dict": "object", "float": "number", "tuple": "array", "list": "array", "any": "string"}
_CHECKS = "bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker"
_BACKENDS = "bfcl_eval.constants.executable_backend_config"


class BfclNotInstalled(MissingHere):
    """The benchmark's package is missing."""


@dataclass(slots=True)
class _Apis:
    """API objects in one state, and everything their methods have returned."""

    instances: dict[str, Any]
    results: list[str] = field(default_factory=list)
    endless: bool = False

    def call(self, name: str, positional: list[Any], named: Mapping[str, Any]) -> str:
        """The result of one call as the agent reads it; errors are results too."""
        method = self._method(name)
        try:
            if method is None:
                raise NameError(f"name {name!r} is not defined")
            return _as_text(self._made(name, method, positional, named))
        except Exception as error:  # noqa: BLE001 - whatever an API raises is what the agent is told
            return f"Error during execution: {error}"

    def _made(self, name: str, method: Callable[..., Any], positional: list[Any], named: Mapping[str, Any]) -> Any:
        if self.endless:
            raise bfcl_bounds.Refused("the file system is endless")
        owner = type(method.__self__).__name__  # type: ignore[attr-defined]
        if owner == "MathAPI" and (arguments := _bound(method, positional, named)) is not None:
            return method(**bfcl_bounds.bounded_arguments(name, arguments))
        value = method(*positional, **named)
        if owner == "GorillaFileSystem" and name in ("cp", "mv"):
            self.endless = bfcl_bounds.endless(method.__self__)  # type: ignore[attr-defined]
        return value

    def _method(self, name: str) -> Callable[..., Any] | None:
        found = None
        if not name.startswith("_"):
            for instance in self.instances.values():
                member = getattr(instance, name, None)
                found = member if inspect.ismethod(member) else found
        return found


def _bound(method: Callable[..., Any], positional: list[Any], named: Mapping[str, Any]) -> dict[str, Any] | None:
    """Arguments by parameter; None where they do not fit, which the call itself will say."""
    try:
        return dict(inspect.signature(method).bind(*positional, **named).arguments)
    except TypeError:
        return None


class BfclEnvironment:
    """One episode of one task."""

    def __init__(self, entry: dict[str, Any], reference: list[list[str]], category: str, stamp: Any) -> None:
        self._entry = entry
        self._reference = reference
        self._stamp = dict(stamp)
        self._agent = _load_apis(entry, category)
        self._gold = _load_apis(entry, category)
        self._request = 0
        self._calls_of_request = 0
        self._steps_of_request = 0
        self._failure: str | None = None
        self._finished = False

    async def reset(self) -> Start:
        """The first request, and the functions that are available from the start."""
        later = {name for names in self._entry.get("missed_function", {}).values() for name in names}
        return Start([self._ask()], _schemas(self._entry, without=later))

    async def step(self, turn: AssistantTurn) -> Step:
        """Results of calls, or the next request. Words, and calls that cannot be read, end the request."""
        if turn.tool_calls and turn.parse_error is None:
            return self._run(turn)
        self._failure = self._check_request()
        self._request += 1
        self._calls_of_request = self._steps_of_request = 0
        self._finished = self._failure is None and self._request == len(self._reference)
        if self._finished or self._failure is not None:
            return Step([], done=True)
        return Step([self._ask()], done=False, added_tools=self._added())

    async def reward(self) -> tuple[float, dict[str, Any]]:
        """1.0 if every request was fulfilled, else 0.0 and the benchmark's name of what went wrong."""
        info = {**self._stamp, "requests": self._request, "failure": self._failure or ""}
        if not self._finished and self._failure is None:
            info["failure"] = "cut"
        return float(self._finished), info

    async def close(self) -> None:
        """Nothing is held."""

    def _ask(self) -> Message:
        if documents := self._added():
            return Message("user", f"{json.dumps(documents)}\n{MORE_FUNCTIONS}")
        return Message("user", "\n".join(m["content"] for m in self._entry["question"][self._request]))

    def _added(self) -> list[dict[str, Any]]:
        """The functions that were held back until this request."""
        names = self._entry.get("missed_function", {}).get(str(self._request), ())
        return [schema for schema in _schemas(self._entry) if schema["function"]["name"] in names] if names else []

    def _run(self, turn: AssistantTurn) -> Step:
        answers = [self._agent.call(call.name, [], call.arguments) for call in turn.tool_calls]
        self._agent.results += answers
        self._calls_of_request += len(answers)
        self._steps_of_request += 1
        if self._steps_of_request > STEP_LIMIT:
            self._failure = "force_terminated"
        if self._agent.endless:
            self._failure = "endless_file_system"
        return Step([Message("tool", answer) for answer in answers], done=self._failure is not None)

    def _check_request(self) -> str | None:
        """The benchmark's checks after a request; the name of the failure, or None."""
        checks = importlib.import_module(_CHECKS)
        wanted = self._reference[self._request]
        expected = [self._gold.call(*parse_call(call)) for call in wanted]
        if not wanted:
            return None  # nothing can be done here; what was done all the same shows in the next state
        if not self._calls_of_request:
            return "empty_turn_model_response"
        try:
            state = checks.state_checker(self._agent.instances, self._gold.instances)
        except RecursionError:  # directories in directories, deeper than the benchmark can compare
            return "instance_state_mismatch"
        for verdict in (state, checks.response_checker(self._agent.results, expected, self._request)):
            if not verdict["valid"]:
                return str(verdict["error_type"]).removeprefix("multi_turn:")
        return None


@dataclass(frozen=True)
class BfclTasks:
    """Tasks of one category."""

    split: Split
    category: str
    order: tuple[int, ...]
    trained: bool

    @property
    def size(self) -> int:
        """Number of tasks."""
        return len(self.order)

    def task(self, index: int) -> Task:
        """Task `index`; IndexError past the end."""
        number = self.order[index]
        stamp = {TRAINED_ON: self.size} if self.trained else {}
        return Task(f"bfcl-{self.category}-{number}", {"number": number, **stamp})

    def folder_name(self) -> str:
        """The benchmark and the category."""
        return f"bfcl-{self.category}"

    def labels(self) -> dict[str, str]:
        """That training is on the tasks of evaluations. Who is evaluated need not have been trained so."""
        return {TRAINED_ON: str(self.size)} if self.trained else {}

    def described(self) -> dict[str, Any]:
        """Which tasks these are."""
        return {"benchmark": "bfcl multi_turn", "category": self.category}

    def replayable(self, task: Task) -> bool:
        """Its answers are a function of the task and the turns."""
        return True

    def environment(self, task: Task) -> BfclEnvironment:
        """A fresh episode of `task`."""
        entries, references = _data(self.category)
        number = task.data["number"]
        stamp = {key: value for key, value in task.data.items() if key != "number"}
        stamp |= {"benchmark": "bfcl multi_turn", "category": self.category, "task": number}
        return BfclEnvironment(entries[number], references[number], self.category, stamp)


def build(options: Mapping[str, Any], split: Split, seed: int) -> BfclTasks:
    """Factory. Options: `category`, one of CATEGORIES; `train_on_evaluation_tasks`.

    Raises BfclNotInstalled, and ValueError for options.
    """
    unknown = sorted(set(options) - {"category", "train_on_evaluation_tasks"})
    if unknown:
        raise ValueError(
            f"unknown options of the bfcl environment: {unknown}; known: category, train_on_evaluation_tasks"
        )
    category = options.get("category", "base")
    if category not in CATEGORIES:
        raise ValueError(f"bfcl: category={category!r}; known: {', '.join(CATEGORIES)}")
    trained = bool(options.get("train_on_evaluation_tasks", False))
    if split == "train" and not trained:
        raise ValueError(
            "bfcl: the benchmark has no training tasks; train_on_evaluation_tasks: true trains on those it evaluates "
            "with, which every report will say"
        )
    order = list(range(len(_data(category)[0])))
    if split == "train":
        random.Random(f"bfcl order {seed}").shuffle(order)
    return BfclTasks(split, category, tuple(order), trained and split == "train")


def parse_call(text: str) -> tuple[str, list[Any], dict[str, Any]]:
    """(name, positional, named) of a reference call such as "mv(source='a', destination='b')"."""
    node = ast.parse(text, mode="eval").body
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise ValueError(f"not a function call: {text!r}")
    named = {word.arg: ast.literal_eval(word.value) for word in node.keywords if word.arg is not None}
    return node.func.id, [ast.literal_eval(argument) for argument in node.args], named


def _root() -> Path:
    spec = importlib.util.find_spec("bfcl_eval")
    if spec is None or not spec.submodule_search_locations:
        raise BfclNotInstalled("bfcl-eval is not installed: pip install --no-deps bfcl-eval mpmath")
    return Path(next(iter(spec.submodule_search_locations)))


@functools.cache
def _data(category: str) -> tuple[list[dict[str, Any]], list[list[list[str]]]]:
    """(tasks, calls of the reference per request), in the order of the benchmark's files."""
    folder, name = _root() / "data", f"BFCL_v4_multi_turn_{category}.json"
    entries = _lines(folder / name)
    answers = {answer["id"]: answer["ground_truth"] for answer in _lines(folder / "possible_answer" / name)}
    return entries, [answers[entry["id"]] for entry in entries]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


@functools.cache
def _documents(api: str) -> list[dict[str, Any]]:
    files = importlib.import_module(_BACKENDS).MULTI_TURN_FUNC_DOC_FILE_MAPPING
    return _lines(_root() / "data" / "multi_turn_func_doc" / files[api])


def _schemas(entry: Mapping[str, Any], without: set[str] | None = None) -> list[dict[str, Any]]:
    hidden = without or set()
    documents = [
        doc for api in entry["involved_classes"] for doc in _documents(api) if doc["name"] not in hidden
    ]
    return [
        {
            "type": "function",
            "function": {
                "name": document["name"],
                "description": document["description"],
                "parameters": _json_schema(document["parameters"]),
            },
        }
        for document in documents
        if document["name"] not in hidden
    ]


def _json_schema(value: Any) -> Any:
    """The benchmark's parameter description with JSON schema's names of types."""
    if isinstance(value, list):
        return [_json_schema(item) for item in value]
    if not isinstance(value, dict):
        return value
    result = {key: _json_schema(item) for key, item in value.items()}
    if isinstance(value.get("type"), str):
        result["type"] = _JSON_TYPES.get(value["type"], value["type"])
    return result


def _load_apis(entry: Mapping[str, Any], category: str) -> _Apis:
    backends = importlib.import_module(_BACKENDS)
    instances = {}
    for name in entry["involved_classes"]:
        instance = getattr(importlib.import_module(backends.CLASS_FILE_PATH_MAPPING[name]), name)()
        if name not in backends.STATELESS_CLASSES:
            scenario = copy.deepcopy(entry["initial_config"].get(name, {}))
            instance._load_scenario(scenario, long_context=category == "long_context")
        instances[name] = instance
    return _Apis(instances)


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        try:
            return json.dumps(value)
        except (TypeError, ValueError):
            return str(value)
    return str(value)
