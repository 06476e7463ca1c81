"""What a run would do under other settings: step time, utilisation, staleness, cost of old log-probs.

    python -m tools.simulate_async runs/quickstart                                  # all old-logit sources
    python -m tools.simulate_async runs/quickstart --engines 1 2 4 --bound 0 1 2    # every combination
    python -m tools.simulate_async recipes/simulation/agents.yaml --nodes 1 2 4     # a plan without a run
    python -m tools.simulate_async runs/a runs/b --bound 1                          # calibrated on both
    python -m tools.simulate_async runs/a --halves --predict runs/c --write         # how good is it?
    python -m tools.simulate_async --closed-form --write                            # against the closed form

The model is calibrated from the folder of a run, or written down in YAML (docs/simulation.md says what it leaves out).
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_async.config import ConfigError
from megatron_async.config.loader import apply_override, parse_yaml
from megatron_async.config.typed import build, to_plain
from megatron_async.errors import EXIT_USER_ERROR, UserError
from megatron_async.simulation import (
    EngineModel,
    OldLogitModel,
    PublishModel,
    Result,
    RolloutPolicy,
    Scenario,
    TrainerModel,
    Workload,
    calibrate,
    simulate,
)
from megatron_async.simulation.errors import ScenarioError
from megatron_async.simulation.measured import read_config
from megatron_async.simulation.scenario import SOURCES
from tools.benchmark_rows import write_rows
from tools.simulation_checks import (
    closed_form_rows,
    predict,
    predict_second_half,
    prediction_rows,
    predictions_table,
)


@dataclass(frozen=True, slots=True)
class Shape:
    """Episodes of a plan: see `Workload.parametric`."""

    turns: float = 4.0
    actions_per_turn: float = 100.0
    actions_spread: float = 0.5
    prompt: int = 500
    observation: int = 100
    tool_seconds: float = 1.0
    tool_spread: float = 0.5


@dataclass(frozen=True, slots=True)
class Plan:
    """A YAML file of assumptions."""

    workload: Shape = Shape()
    engines: EngineModel = EngineModel()
    trainer: TrainerModel = TrainerModel()
    publish: PublishModel = PublishModel()
    old_logits: OldLogitModel = OldLogitModel()
    rollout: RolloutPolicy = field(default_factory=RolloutPolicy)


def read_scenario(paths: Sequence[Path], seed: int) -> Scenario:
    """Folders of runs calibrated, or a YAML plan; raises UserError when it is neither."""
    if all(path.is_dir() for path in paths):
        return calibrate(*paths)
    path = next(path for path in paths if not path.is_dir())
    if not path.is_file():
        raise UserError(f"{path} is neither the folder of a run nor a YAML plan")
    if len(paths) > 1:
        raise UserError(f"{path} is a plan, which stands alone; give one plan, or folders of runs")
    data = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    if not isinstance(data, dict):
        raise ConfigError([f"expected a mapping, got {data!r}"], str(path))
    plan = build(Plan, data, str(path))
    shape = plan.workload
    workload = Workload.parametric(
        turns=shape.turns, actions_per_turn=shape.actions_per_turn, actions_spread=shape.actions_spread,
        prompt=shape.prompt, observation=shape.observation, tool_seconds=shape.tool_seconds,
        tool_spread=shape.tool_spread, seed=seed,
    )  # fmt: skip
    return Scenario(workload, plan.engines, plan.trainer, plan.publish, plan.old_logits, plan.rollout)


def overridden(scenario: Scenario, overrides: Sequence[str]) -> Scenario:
    """`scenario` with `SECTION.KEY=VALUE` applied; raises ConfigError for what no section knows."""
    data: dict[str, Any] = {}
    for override in overrides:
        apply_override(data, override)
    for section, values in data.items():
        if section in ("engines", "trainer", "publish", "old_logits", "rollout") and isinstance(values, dict):
            now = getattr(scenario, section)
            changed = build(type(now), {**to_plain(now), **values}, f"--set {section}")
            scenario = replace(scenario, **{section: changed})
        else:
            raise ConfigError(
                [f"--set {section}: expected engines, trainer, publish, old_logits or rollout with a key"]
            )
    return scenario


def variants(scenario: Scenario, options: argparse.Namespace) -> Iterator[tuple[Scenario, str]]:
    """Every combination of the values asked for, or for one that cannot be built the reason why."""
    for engines, nodes, bound, concurrency, every, source in itertools.product(
        options.engines or [scenario.engines.count],
        options.nodes or [scenario.trainer.nodes],
        options.bound or [scenario.rollout.bound],
        options.concurrency or [scenario.rollout.concurrency],
        options.publish_every or [scenario.publish.every],
        options.source or SOURCES,
    ):
        try:
            yield (
                replace(
                    scenario,
                    engines=replace(scenario.engines, count=engines),
                    trainer=replace(scenario.trainer, nodes=nodes),
                    rollout=replace(scenario.rollout, bound=bound, concurrency=concurrency),
                    publish=replace(scenario.publish, every=every),
                    old_logits=replace(scenario.old_logits, source=source),
                ),
                "",
            )
        except ScenarioError as error:
            yield scenario, f"{source}, {engines} engines, {nodes} nodes: left out, {error}"


def describe(scenario: Scenario) -> str:
    """The model in a few lines."""
    engines, trainer, publish = scenario.engines, scenario.trainer, scenario.publish
    episodes = scenario.workload.episodes
    return (
        f"workload: {len(episodes)} episodes, mean {scenario.workload.mean_actions:.1f} sampled tokens, "
        f"{sum(len(e.turns) for e in episodes) / len(episodes):.1f} turns\n"
        f"engine: decoding step {1e3 * engines.step_base:.2f} ms + {1e3 * engines.step_per_request:.3f} ms a request; "
        f"{1e3 * engines.request_seconds:.0f} ms beside it per turn\n"
        f"trainer: update {trainer.update_fixed:.3f} s + {1e6 * trainer.update_per_token:.1f} µs a token, "
        f"{trainer.trained_share:.0%} of a batch trained, {trainer.overhead:.3f} s between steps\n"
        f"publishing: {publish.seconds:.3f} s, {publish.paused:.3f} s of it paused, every {publish.every}\n"
        f"rollout: bound {scenario.rollout.bound}, {scenario.rollout.concurrency} at once, batch "
        f"{scenario.rollout.groups} x {scenario.rollout.group_size}, recorded after "
        f"{scenario.rollout.recording:.2f} s, replaced after {scenario.rollout.turnaround:.2f} s\n"
        f"slowed down by each other: engines by {engines.interference:.2f}, trainer by {trainer.interference:.2f}"
    )


def table(results: Sequence[tuple[Scenario, Result]]) -> Table:
    """One row per variant."""
    made = Table(title="Predicted", title_justify="left")
    for title in ("engines", "nodes", "bound", "at once", "publish", "source"):
        made.add_column(title)
    for title in (
        "s/step", "tokens/s", "engine busy", "trainer busy", "gap", "max", "stale", "old logits s", "update s", "wait s"
    ):  # fmt: skip
        made.add_column(title, justify="right")
    for scenario, result in results:
        stages = result.stage_seconds
        rollout = scenario.rollout
        made.add_row(
            str(scenario.engines.count), str(scenario.trainer.nodes), str(rollout.bound), str(rollout.concurrency),
            str(scenario.publish.every), scenario.old_logits.source,
            f"{result.step_seconds:.2f}", f"{result.tokens_per_second:.0f}", f"{result.engine_busy:.0%}",
            f"{result.trainer_busy:.0%}", f"{result.gap_mean:.2f}", str(result.gap_max), str(result.stale),
            f"{stages['score'] + stages['capture']:.2f}", f"{stages['update']:.2f}", f"{stages['wait']:.2f}",
        )  # fmt: skip
    return made


# ---------------------------------------------------------------- command line


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, nargs="*", help="folders of runs to calibrate from, or a YAML plan")
    for flag, text in (
        ("--engines", "numbers of engines"), ("--nodes", "numbers of trainer nodes"),
        ("--bound", "values of rollout.max_staleness"), ("--concurrency", "trajectories running at once"),
        ("--publish-every", "trainer steps per publishing"),
    ):  # fmt: skip
        parser.add_argument(flag, type=int, nargs="+", help=text)
    parser.add_argument("--source", nargs="+", choices=SOURCES, help="old-logit sources (default: all)")
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE",
        help="a number of the model, e.g. --set old_logits.travel=7.1 --set trainer.update_fixed=10",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=60, help="simulated steps of each variant (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--predict", type=Path, nargs="+", default=[], metavar="RUN", help="compare with these measured runs"
    )
    parser.add_argument(
        "--halves", action="store_true", help="calibrate on the first half of each run, compare with its second"
    )
    parser.add_argument(
        "--closed-form", action="store_true", help="compare mean staleness with the closed form; needs no run"
    )
    parser.add_argument(
        "--write", action="store_true", help="write what was compared into docs/benchmarks/async.json"
    )
    options = parser.parse_args(arguments)
    if bool(options.model) == options.closed_form:
        parser.error("give folders of runs or a YAML plan, or --closed-form without one")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Calibrate or read, simulate, print; returns the exit code."""
    options = parse(arguments)
    console = Console(width=None if sys.stdout.isatty() else 200)
    try:
        _main(options, console)
    except UserError as error:
        print(f"simulate_async: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    return 0


def _main(options: argparse.Namespace, console: Console) -> None:
    if options.closed_form:
        _compare_closed_form(options, console)
    elif options.predict or options.halves:
        _compare_runs(options, console)
    else:
        _explore(options, console)


def _compare_closed_form(options: argparse.Namespace, console: Console) -> None:
    rows = closed_form_rows()
    for row in rows:
        console.print(f"{row.figure}: {row.value}, goal {row.goal}\n{row.conditions}", highlight=False)
    if options.write:
        write_rows("async", rows)


def _compare_runs(options: argparse.Namespace, console: Console) -> None:
    predictions = [predict_second_half(path, options.seed) for path in options.model if options.halves]
    if options.predict:
        model = overridden(read_scenario(options.model, options.seed), options.overrides)
        console.print(describe(model), highlight=False)
        name = " and ".join(path.name for path in options.model)
        most = max((read_config(path).rollout.concurrency for path in options.model if path.is_dir()), default=0)
        predictions += [predict(model, path, options.seed, calibrated=name, most=most) for path in options.predict]
    console.print(predictions_table(predictions))
    if options.write:
        write_rows("async", prediction_rows(predictions))


def _explore(options: argparse.Namespace, console: Console) -> None:
    scenario = overridden(read_scenario(options.model, options.seed), options.overrides)
    console.print(describe(scenario), highlight=False)
    results: list[tuple[Scenario, Any]] = []
    for variant, problem in variants(scenario, options):
        try:
            if not problem:
                results.append((variant, simulate(variant, steps=options.steps, seed=options.seed)))
        except ScenarioError as error:
            problem = f"{variant.old_logits.source}, {variant.engines.count} engines: left out, {error}"
        if problem:
            console.print(problem, highlight=False)
    if not results:
        raise UserError("none of what was asked for can be simulated")
    console.print(table(results))


if __name__ == "__main__":
    raise SystemExit(main())
