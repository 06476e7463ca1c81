"""What a run would do under other settings: step time, utilisation, staleness, cost of old log-probs.

    python -m tools.simulate_async runs/quickstart                                  # all old-logit sources
    python -m tools.simulate_async runs/quickstart --engines 1 2 4 --bound 0 1 2    # every combination
    python -m tools.simulate_async recipes/simulation/agents.yaml --nodes 1 2 4     # a plan without a run
    python -m tools.simulate_async runs/a --predict runs/b runs/c                   # how good is it? (--publish)

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
from megatron_async.errors import UserError
from megatron_async.observe import read_metrics
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
from megatron_async.simulation.calibration import SKIPPED_STEPS
from megatron_async.simulation.scenario import SOURCES
from tools.benchmark_rows import Row, write_rows

EXIT_USER_ERROR = 2
TOLERANCE = 0.15


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
    interference: float = 0.0


def read_scenario(path: Path, seed: int) -> Scenario:
    """A run's folder calibrated, or a YAML plan; raises UserError when it is neither."""
    if path.is_dir():
        return calibrate(path)
    if not path.is_file():
        raise UserError(f"{path} is neither the folder of a run nor a YAML plan")
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
    return Scenario(
        workload, plan.engines, plan.trainer, plan.publish, plan.old_logits, plan.rollout, plan.interference
    )


def overridden(scenario: Scenario, overrides: Sequence[str]) -> Scenario:
    """`scenario` with `SECTION.KEY=VALUE` applied; raises ConfigError for what no section knows."""
    data: dict[str, Any] = {}
    for override in overrides:
        apply_override(data, override)
    for section, values in data.items():
        if section == "interference":
            scenario = replace(scenario, interference=float(values))
        elif section in ("engines", "trainer", "publish", "old_logits", "rollout") and isinstance(
            values, dict
        ):
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
        except ValueError as error:
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
        f"interference of trainer and engines: {scenario.interference:.2f}"
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


# ---------------------------------------------------------------- how good is it


@dataclass(frozen=True, slots=True)
class Prediction:
    """A run predicted by the model of another. Seconds per step, mean version gap of trained tokens."""

    run: str
    settings: str
    measured_seconds: float
    predicted_seconds: float
    measured_gap: float
    predicted_gap: float

    @property
    def error(self) -> float:
        """|predicted - measured| / measured, of the step time."""
        return abs(self.predicted_seconds - self.measured_seconds) / self.measured_seconds


def predict(model: Scenario, run_path: Path, seed: int) -> Prediction:
    """What `model`, calibrated elsewhere, says of a run under that run's own policy, against what was measured.

    Engines, trainer, publishing and workload are the model's; taken from the run are only its settings.
    """
    policy = calibrate(run_path)
    rollout = replace(policy.rollout, recording=model.rollout.recording, turnaround=model.rollout.turnaround)
    publish = replace(model.publish, every=policy.publish.every, retract=policy.publish.retract)
    scenario = replace(
        model,
        engines=replace(model.engines, count=policy.engines.count),
        trainer=replace(model.trainer, nodes=policy.trainer.nodes),
        rollout=rollout,
        publish=publish,
    )
    rows = read_metrics(run_path)[SKIPPED_STEPS:]
    result = simulate(scenario, steps=max(60, len(rows)), seed=seed)
    gaps = [row["version_gap/mean"] for row in rows if row.get("version_gap/mean") is not None]
    return Prediction(
        run_path.name,
        f"bound {rollout.bound}, {rollout.concurrency} at once, batch {rollout.batch}, publish every {publish.every}",
        (rows[-1]["time"] - rows[0]["time"]) / (len(rows) - 1),
        result.step_seconds,
        sum(gaps) / len(gaps),
        result.gap_mean,
    )


def predictions_table(predictions: Sequence[Prediction]) -> Table:
    """Measured beside predicted."""
    made = Table(title="Predicted against measured", title_justify="left")
    for title in ("run", "settings", "s/step measured", "predicted", "error", "gap measured", "predicted"):
        made.add_column(title, justify="left" if title in ("run", "settings") else "right")
    for one in predictions:
        made.add_row(
            one.run, one.settings, f"{one.measured_seconds:.2f}", f"{one.predicted_seconds:.2f}", f"{one.error:.1%}",
            f"{one.measured_gap:.2f}", f"{one.predicted_gap:.2f}",
        )  # fmt: skip
    return made


def figures(source: str, predictions: Sequence[Prediction]) -> list[Row]:
    """The errors in the benchmarks' form."""
    each = "; ".join(
        f"{one.run} ({one.settings}): {one.measured_seconds:.2f} s measured, {one.predicted_seconds:.2f} s predicted, "
        f"gap {one.measured_gap:.2f} and {one.predicted_gap:.2f}"
        for one in predictions
    )
    return [
        Row(
            "simulation_step_error",
            [round(one.error, 4) for one in predictions],
            goal=f"<= {TOLERANCE}",
            conditions=f"mean step time predicted by a model calibrated on the run {source} alone; {each}",
        )
    ]


# ---------------------------------------------------------------- command line


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="folder of a run to calibrate from, or a YAML plan")
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
        "--predict", type=Path, nargs="+", metavar="RUN", help="compare with these measured runs"
    )
    parser.add_argument(
        "--publish", action="store_true", help="with --predict: write docs/benchmarks/async.json"
    )
    return parser.parse_args(arguments)


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
    scenario = overridden(read_scenario(options.model, options.seed), options.overrides)
    console.print(describe(scenario), highlight=False)
    if options.predict:
        predictions = [predict(scenario, path, options.seed) for path in options.predict]
        console.print(predictions_table(predictions))
        if options.publish:
            write_rows("async", figures(options.model.name, predictions))
        return
    results: list[tuple[Scenario, Any]] = []
    for variant, problem in variants(scenario, options):
        if problem:
            console.print(problem, highlight=False)
        else:
            results.append((variant, simulate(variant, steps=options.steps, seed=options.seed)))
    console.print(table(results))


if __name__ == "__main__":
    raise SystemExit(main())
