"""One domain of the benchmark: its tasks and splits, and environments that cost next to nothing to make.

Invariants
- The benchmark's loaders, constructors, policies and tool schemas are used as they are; what they return is kept, not
  recomputed, so an episode pays for its own records only.
- `environment()` gives an environment in the state the benchmark's constructor gives; `gold(task)` is the state after
  the task's gold actions, replayed exactly as the benchmark's evaluator replays them (failing actions are skipped,
  nothing is synchronised after the last one, never in solo mode).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_async.rollout.environments.tau2.bounds import bounded
from megatron_async.rollout.environments.tau2.database import fingerprint, layered
from megatron_async.rollout.environments.tau2.package import Package

State = tuple[str, str]
"""Fingerprints of the agent's and the user's database ("" for none)."""


@dataclass(frozen=True)
class DomainFiles:
    """Own files in place of the benchmark's ("" keeps the benchmark's)."""

    tasks: str = ""
    database: str = ""
    user_database: str = ""


class Domain:
    """Tasks, tools and environments of one domain; shared by all episodes of a process."""

    def __init__(
        self, package: Package, name: str, solo: bool = False, files: DomainFiles | None = None
    ) -> None:
        """Load the domain. Raises ValueError for files that cannot be read or do not fit the domain."""
        self.package = package
        self.name = name
        self.solo = solo
        self.files = files or DomainFiles()
        self._constructor = package.registry.get_env_constructor(name)
        self._template = self._constructor(**self._own_databases())
        self._user_database = self._template.user_tools.db if self._template.user_tools is not None else None
        self._tasks: dict[str, Any] | None = None
        self._gold: dict[str, State] = {}
        self._schemas: dict[str, list[dict[str, Any]]] = {}
        first = self._constructor(**self._fresh_databases(), solo_mode=solo)
        self.policy: str = first.get_policy()
        self.tools = first.get_tools()
        self.user_tools = first.get_user_tools() if first.user_tools is not None else None
        if solo and self.user_tools is not None:
            self.tools = self.tools + self.user_tools
        self._reading = self._reading_tools()

    # ------------------------------------------------------------------ tasks

    @property
    def tasks(self) -> dict[str, Any]:
        """All tasks by id, in the order of their file."""
        if self._tasks is None:
            if self.files.tasks:
                loaded = self.package.load_file(self.files.tasks)
                listed = loaded["tasks"] if isinstance(loaded, dict) and "tasks" in loaded else loaded
                tasks = [self.package.Task.model_validate(task) for task in listed]
            else:
                loader = self.package.registry.get_tasks_loader(self.name)
                tasks = loader(None) if self._has_splits() else loader()
            self._tasks = {task.id: task for task in tasks}
        return self._tasks

    def splits(self) -> dict[str, list[str]]:
        """Task ids by split. Own files without a `split_<name>.json`, and domains without splits, have only `all`."""
        if self.files.tasks:
            path = Path(self.files.tasks)
            beside = path.parent / f"split_{path.stem}.json"
            return json.loads(beside.read_text()) if beside.is_file() else {"all": list(self.tasks)}
        if not self._has_splits():
            return {"all": list(self.tasks)}
        splits: dict[str, list[str]] = self.package.registry.get_task_splits_loader(self.name)()
        return splits

    def split(self, name: str) -> list[str]:
        """Ids of one split, in the order of the task file; ValueError lists the splits there are."""
        splits = self.splits()
        if list(splits) == ["all"]:
            name = "all"
        if name not in splits:
            sizes = ", ".join(f"{known} ({len(ids)})" for known, ids in splits.items())
            raise ValueError(f"tau2: the {self.name} domain has no split {name!r}; it has {sizes}")
        wanted = set(splits[name])
        missing = wanted - self.tasks.keys()
        if missing:
            raise ValueError(
                f"tau2: split {name!r} of {self.name} names unknown tasks: {sorted(missing)[:5]}"
            )
        return [task_id for task_id in self.tasks if task_id in wanted]

    def _has_splits(self) -> bool:
        return self.package.registry.get_task_splits_loader(self.name) is not None

    # ------------------------------------------------------------------ environments

    def environment(self, solo: bool | None = None) -> Any:
        """A fresh environment of the benchmark, its databases its own. solo: None for the domain's mode."""
        solo = self.solo if solo is None else solo
        environment = bounded(self._constructor(**self._fresh_databases()))
        if solo:  # checked once, in __init__: the benchmark's own check rebuilds all tool schemas
            environment.solo_mode = True
            environment.policy = self.policy
        return environment

    def schemas(self, participant: str, tools: Sequence[Any]) -> list[dict[str, Any]]:
        """OpenAI schemas of a participant's tools, made once: they are the same in every episode."""
        if participant not in self._schemas:
            self._schemas[participant] = [tool.openai_schema for tool in tools]
        return self._schemas[participant]

    def official_constructor(self, solo_mode: bool = False) -> Any:
        """The benchmark's own construction from its files (or the run's own files): slow, and shares nothing."""
        return bounded(self._constructor(**self._own_databases(), solo_mode=solo_mode))

    def only_reads(self, calls: Iterable[Any]) -> bool:
        """Whether all these tool calls are of tools that the benchmark marks as reading."""
        return all(call.name in self._reading for call in calls)

    def initialise(self, environment: Any, task: Any) -> None:
        """Put the environment into the task's initial state."""
        initial = task.initial_state
        environment.set_state(
            initialization_data=initial.initialization_data if initial is not None else None,
            initialization_actions=initial.initialization_actions if initial is not None else None,
            message_history=(initial.message_history or []) if initial is not None else [],
        )

    # ------------------------------------------------------------------ states

    def state(self, environment: Any) -> State:
        """Fingerprint of the databases of an environment made by `environment`."""
        user = environment.user_tools
        has_user = user is not None and user.db is not None
        return _fingerprint(environment.tools), _fingerprint(user) if has_user else ""

    def gold(self, task: Any) -> State:
        """State after the task's gold actions; computed once per task."""
        if task.id not in self._gold:
            environment = self.environment(solo=False)
            self.initialise(environment, task)
            for action in task.evaluation_criteria.actions or []:
                try:
                    environment.make_tool_call(
                        tool_name=action.name, requestor=action.requestor, **action.arguments
                    )
                except Exception:  # noqa: BLE001, S112 - the benchmark skips gold actions that fail, whatever they raise
                    continue
            self._gold[task.id] = self.state(environment)
        return self._gold[task.id]

    def forget_gold(self) -> None:
        """Drop the gold states computed so far: for measurements of what they cost."""
        self._gold.clear()

    # ------------------------------------------------------------------ helpers

    def _fresh_databases(self) -> dict[str, Any]:
        databases = {"db": layered(self._template.tools.db)}
        if self._user_database is not None:
            databases["user_db"] = layered(self._user_database)
        return databases

    def _own_databases(self) -> dict[str, Any]:
        own: dict[str, Any] = {}
        for argument, path, tools in (
            ("db", self.files.database, "tools"),
            ("user_db", self.files.user_database, "user_tools"),
        ):
            if not path:
                continue
            kit = getattr(self._constructor(), tools)
            if kit is None:
                raise ValueError(
                    f"tau2: the {self.name} domain has no user database; leave user_database_file empty"
                )
            if not Path(path).is_file():
                raise ValueError(f"tau2: database file {path} does not exist")
            own[argument] = type(kit.db).load(path)
        return own

    def _reading_tools(self) -> frozenset[str]:
        kits = [self._template.tools, self._template.user_tools]
        reading = self.package.ToolType.READ
        return frozenset(
            name for kit in kits if kit is not None for name in kit.tools if kit.tool_type(name) == reading
        )


def _fingerprint(toolkit: Any) -> str:
    return fingerprint(toolkit.db)
