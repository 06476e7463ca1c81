"""tau2-bench through our adapter: gold actions must score 1, and an episode must cost little.

gold_*             tasks whose gold actions, replayed through the adapter with the scripted user, score 1.0 with the
                   benchmark's own evaluator *and* with the cached one
episode_cpu_ratio  CPU seconds per episode, 64 episodes at once, against the benchmark's own orchestrator and evaluator
                   playing the same conversations one after the other; participants answer at once in both, so neither
                   side pays for HTTP or a model
episode_memory     memory added per open episode, database records shared

    python -m tools.benchmark_tau2 --write                    # about ten minutes of CPU
    python -m tools.benchmark_tau2 --only cpu --write         # under a minute
"""

from __future__ import annotations

import argparse
import asyncio
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

from megatron_async.config.schema import EnvironmentConfig
from megatron_async.rollout.environments import AssistantTurn, ToolCall, build_task_source
from megatron_async.rollout.environments.tau2 import reward
from megatron_async.rollout.environments.tau2.environment import Tau2Environment, Tau2Tasks
from megatron_async.rollout.environments.tau2.users import ScriptedUser, gold_turns
from tools.benchmark_rows import Row, write_rows

GOLD = {
    "gold_airline": ("airline", False, "base", 50),
    "gold_retail": ("retail", False, "base", 114),
    "gold_telecom": ("telecom", False, "full", 2285),
    "gold_telecom_solo": ("telecom", True, "full", 2285),
}
EPISODES = 64


def main() -> None:
    args = _arguments()
    rows = []
    if args.only in ("all", "gold"):
        rows += [gold(figure, *GOLD[figure], limit=args.limit) for figure in GOLD]
    if args.only in ("all", "cpu"):
        rows += [cost()]
    if args.only in ("all", "cpu", "memory"):
        rows += [memory()]
    for row in rows:
        print(f"{row.figure}: {row.value} {row.unit} (goal {row.goal or 'none'}) {row.conditions}")
    if args.write and not args.limit:
        write_rows("tau2", rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=("all", "gold", "cpu", "memory"), default="all")
    parser.add_argument("--limit", type=int, default=0, help="first tasks only, for a trial; writes nothing")
    parser.add_argument("--write", action="store_true", help="keep the figures in docs/benchmarks/tau2.json")
    return parser.parse_args()


def tasks(domain: str, solo: bool, split: str) -> Tau2Tasks:
    """Tasks of one split with the scripted user and the cached evaluator alone."""
    options = {
        "domain": domain,
        "solo": solo,
        "heldout_split": split,
        "user": {"kind": "scripted"},
        "verify_official": 0.0,
        "record_transcript": False,
    }
    source = build_task_source(EnvironmentConfig("tau2", options), "heldout", 0)
    assert isinstance(source, Tau2Tasks)
    return source


# ------------------------------------------------------------------ gold


def gold(figure: str, domain: str, solo: bool, split: str, total: int, limit: int = 0) -> Row:
    """Number of tasks that score 1.0 with both evaluators."""
    source = tasks(domain, solo, split)
    count = min(source.size, limit) if limit else source.size
    successes = disagreements = 0
    for index in range(count):
        environment = source.environment(source.task(index))
        cached = asyncio.run(play(environment, gold_turns(environment.episode.task, solo)))
        basis = reward.reward_basis(environment.episode.task, "official")
        episode = environment.episode
        official = reward.official(
            episode.domain, episode.task, episode.messages, episode.termination, basis
        ).reward
        successes += official == cached == 1.0
        disagreements += official != cached
    package = source.context.domain.package.label
    conditions = f"of {count} tasks, split {split}, {package}; evaluators disagreed on {disagreements}"
    return Row(figure, float(successes), "tasks", f">= {count if limit else total}", conditions)


async def play(environment: Tau2Environment, turns: list[Any]) -> float:
    """Play prepared turns to the end; returns the reward."""
    await environment.reset()
    for said in turns:
        calls = tuple(ToolCall(name, arguments) for name, arguments in said.calls)
        if (await environment.step(AssistantTurn(said.content, calls))).done:
            break
    value, _ = await environment.reward()
    await environment.close()
    return value


# ------------------------------------------------------------------ cost


def mixed() -> tuple[dict[str, Tau2Tasks], list[tuple[str, int]]]:
    """(tasks by domain, the episodes as (domain, index)): the three domains in turns."""
    sources = {name: tasks(name, False, "base") for name in ("airline", "retail", "telecom")}
    share = EPISODES // len(sources) + 1
    return sources, [(name, index) for index in range(share) for name in sources][:EPISODES]


def cost() -> Row:
    """CPU per episode."""
    sources, mixture = mixed()

    def ours() -> None:
        async def together() -> None:
            environments = [sources[name].environment(sources[name].task(i)) for name, i in mixture]
            await asyncio.gather(*(play(e, gold_turns(e.episode.task, False)) for e in environments))

        asyncio.run(together())

    def theirs() -> None:
        for name, index in mixture:
            benchmark_episode(sources[name], index)

    _forget_gold(sources)
    fast, slow = _cpu(ours), _cpu(theirs)
    conditions = (
        f"{EPISODES} episodes at once, airline, retail and telecom in turns, gold conversations, gold states not yet "
        f"known; {1000 * fast / EPISODES:.1f} ms against {1000 * slow / EPISODES:.1f} ms of CPU per episode"
    )
    return Row("episode_cpu_ratio", round(fast / slow, 4), "", "<= 0.5", conditions)


def benchmark_episode(source: Tau2Tasks, index: int) -> float:
    """The benchmark's own construction, orchestrator and evaluator, with participants that answer at once."""
    domain = source.context.domain
    package: Any = domain.package
    task = domain.tasks[source.task(index).data["id"]]
    turns = iter(gold_turns(task, False))
    script = ScriptedUser(str(task.user_scenario))
    agent_base: Any = package.LLMAgent
    user_base: Any = package.UserSimulator

    class Agent(agent_base):
        def generate_next_message(self, message: Any, state: Any) -> tuple[Any, Any]:
            return _said(package, "AssistantMessage", "assistant", next(turns)), state

    class User(user_base):
        def generate_next_message(self, message: Any, state: Any) -> tuple[Any, Any]:
            heard = {"role": "tool" if message.role == "tool" else "user", "content": message.content}
            return _said(package, "UserMessage", "user", _now(script.answer([heard], []))), state

    environment = domain.official_constructor()
    user_tools = environment.get_user_tools() if environment.user_tools is not None else None
    simulation = package.Orchestrator(
        domain=domain.name,
        agent=Agent(tools=environment.get_tools(), domain_policy=environment.get_policy()),
        user=User(tools=user_tools, instructions=str(task.user_scenario)),
        environment=environment,
        task=task,
        max_steps=200,
    ).run()
    verdict = package.evaluate_simulation(
        simulation=simulation,
        task=task,
        evaluation_type=package.EvaluationType.ALL,
        solo_mode=False,
        domain=domain.name,
    )
    return float(verdict.reward)


def memory() -> Row:
    """Memory per episode that has been started and not finished."""
    sources, mixture = mixed()

    async def hold() -> float:
        # Python's own count: resident memory also moves with what earlier work has left free.
        before, _ = tracemalloc.get_traced_memory()
        environments = [sources[name].environment(sources[name].task(i)) for name, i in mixture]
        await asyncio.gather(*(environment.reset() for environment in environments))
        after, _ = tracemalloc.get_traced_memory()
        return (after - before) / 2**20 / len(environments)

    tracemalloc.start()
    try:
        mebibytes = asyncio.run(hold())
    finally:
        tracemalloc.stop()
    return Row("episode_memory", round(mebibytes, 3), "MiB", "", f"{EPISODES} open episodes, same mixture")


def _said(package: Any, kind: str, role: str, said: Any) -> Any:
    calls = [
        package.ToolCall(id=f"call_{time.monotonic_ns()}", name=name, arguments=arguments, requestor=role)
        for name, arguments in said.calls
    ]
    return package.names[kind](role=role, content=said.content or None, tool_calls=calls or None, cost=0.0)


def _now(coroutine: Any) -> Any:
    """The result of a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as finished:
        return finished.value
    raise RuntimeError("the scripted user waited for something")


def _forget_gold(sources: dict[str, Tau2Tasks]) -> None:
    for source in sources.values():
        source.context.domain.forget_gold()


def _cpu(work: Callable[[], None]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


if __name__ == "__main__":
    main()
