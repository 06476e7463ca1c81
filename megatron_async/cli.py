"""The command line: `megatron-async COMMAND`, or `python -m megatron_async COMMAND`.

Invariants: --help, --dry-run, doctor and report import neither torch nor megatron; what the user can mend is one
message on stderr and exit code 2, without a traceback; everything else keeps its traceback.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_async import __version__
from megatron_async.config import check, load, shown
from megatron_async.config.describe import describe
from megatron_async.config.schema import RunConfig
from megatron_async.errors import EXIT_STOPPED, EXIT_USER_ERROR, MissingHere, UserError, leave_message
from megatron_async.heart import BEATS_VARIABLE, beat
from megatron_async.supervise import PART_VARIABLE, end_with_parent

Handler = Callable[[argparse.Namespace], int]
if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def _configuration(
    arguments: argparse.Namespace, *, starts_engines: bool = False, warns: bool = True
) -> RunConfig:
    """Load and check; warnings, which are about reinforcement learning, go to stderr."""
    config = load(arguments.config, arguments.overrides)
    warnings = check(config, starts_engines=starts_engines)
    for warning in warnings if warns else ():
        print(f"warning: {warning}", file=sys.stderr)  # noqa: T201
    return config


def _dry_run(config: RunConfig) -> int:
    from megatron_async.rollout import task_checks

    try:
        task_checks.training_tasks(config)
        task_checks.heldout_tasks(config)
    except MissingHere as missing:  # plans are made anywhere
        print(f"warning: environment: its tasks are not checked: {missing}", file=sys.stderr)  # noqa: T201
    print(shown(config))  # noqa: T201
    print(describe(config))  # noqa: T201
    return 0


def _launch(arguments: argparse.Namespace) -> int:
    leads = arguments.node == 0
    config = _configuration(arguments, starts_engines=leads and not arguments.dry_run, warns=leads)
    if arguments.dry_run:
        return _dry_run(config)
    if not leads:
        from megatron_async import join

        return join.run(config, arguments.node, arguments.address)
    from megatron_async import launch

    return launch.run(config, fresh=arguments.fresh, resume=arguments.resume, address=arguments.address)


def _train(arguments: argparse.Namespace) -> int:
    config = load(arguments.config, arguments.overrides)
    from megatron_async import train

    return train.main(config)


def _score(arguments: argparse.Namespace) -> int:
    config = load(arguments.config, arguments.overrides)
    from megatron_async import scorer

    return scorer.main(config)


def _critic(arguments: argparse.Namespace) -> int:
    config = load(arguments.config, arguments.overrides)
    from megatron_async import critic_part

    return critic_part.main(config)


def _rollout(arguments: argparse.Namespace) -> int:
    config = load(arguments.config, arguments.overrides)
    from megatron_async.rollout import process

    return process.main(config)


def _serve(arguments: argparse.Namespace) -> int:
    config = _configuration(arguments, starts_engines=True)
    from megatron_async import serve

    return serve.main(config)


def _sft(arguments: argparse.Namespace) -> int:
    if "RANK" in os.environ:  # one of the ranks that the launcher below started
        from megatron_async import warm_start

        return warm_start.main(load(arguments.config, arguments.overrides))
    config = _configuration(arguments, warns=False)
    from megatron_async import launch

    return launch.sft(config, fresh=arguments.fresh)


def _pretrain_critic(arguments: argparse.Namespace) -> int:
    if "RANK" in os.environ:  # one of the ranks that the launcher below started
        from megatron_async import value_pretraining

        return value_pretraining.main(load(arguments.config, arguments.overrides))
    config = _configuration(arguments, warns=False)
    from megatron_async import launch

    return launch.pretrain_critic(config, fresh=arguments.fresh)


def _replay(arguments: argparse.Namespace) -> int:
    from megatron_async import replay

    return replay.run(arguments.run, arguments.name, arguments.overrides, fresh=arguments.fresh)


def _evaluate(arguments: argparse.Namespace) -> int:
    from megatron_async import evaluate

    if arguments.endpoint:  # nothing of a model is needed here
        config = load(arguments.config, arguments.overrides)
    else:
        if arguments.checkpoint is not None:
            arguments.overrides.append(f"model.path={arguments.checkpoint}")
        config = _configuration(arguments, starts_engines=arguments.checkpoint is not None, warns=False)

    policy = evaluate.EvaluatedPolicy(
        checkpoint=arguments.checkpoint,
        endpoint=arguments.endpoint or "",
        endpoint_model=arguments.endpoint_model,
        endpoint_key_env=arguments.endpoint_key_env,
        folder=arguments.folder,
    )
    return evaluate.main(config, policy)


def _doctor(arguments: argparse.Namespace) -> int:
    from megatron_async import doctor

    config = load(arguments.config, arguments.overrides) if arguments.config else None
    return doctor.main(config)


def _inspect(arguments: argparse.Namespace) -> int:
    from megatron_async import inspect_run

    print(inspect_run.describe(arguments.run, arguments.trajectory), end="")  # noqa: T201
    return 0


def _report(arguments: argparse.Namespace) -> int:
    from megatron_async.observe.report import write_report

    print(write_report(arguments.run, arguments.step), end="")  # noqa: T201
    return 0


def _add_config(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    parser.add_argument(
        "--config", required=required, metavar="FILE", help="YAML configuration (see recipes/configs)"
    )
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override one option, e.g. --set optimizer.lr=1e-6; may be given several times",
    )


def _add_policy(parser: argparse.ArgumentParser) -> None:
    """Which policy `evaluate` asks; without any of these the engines of the run."""
    parser.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="a Hugging Face checkpoint: starts engines on it"
    )
    parser.add_argument(
        "--endpoint", metavar="URL", help="any OpenAI-compatible chat endpoint, e.g. http://host:30000/v1"
    )
    parser.add_argument("--endpoint-model", default="default", metavar="NAME", help="the model's name there")
    parser.add_argument(
        "--endpoint-key-env", default="", metavar="VARIABLE", help="environment variable that holds its key"
    )
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="where results go, instead of a folder under the run's evaluation/"
    )


def _command(commands: Commands, name: str, handler: Handler, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    parser.set_defaults(handler=handler)
    return parser


def _add_launch(commands: Commands) -> None:
    launch = _command(
        commands, "launch", _launch, "run everything: engines, rollout, trainer, evaluation, report"
    )
    _add_config(launch)
    launch.add_argument(
        "--dry-run",
        action="store_true",
        help="print resolved options, ranks, batch and memory; start nothing",
    )
    launch.add_argument(
        "--fresh", action="store_true", help="delete what an earlier run of the same name left"
    )
    launch.add_argument(
        "--resume",
        action="store_true",
        help="go on from the newest checkpoint of the run of this name (begin, if there is no such run)",
    )
    launch.add_argument(
        "--node",
        type=int,
        default=0,
        metavar="N",
        help="number of this machine, for runs on several: 0 leads; the trainer's come first, then the engines'",
    )
    launch.add_argument(
        "--address", help="where other machines reach this one (default: its host name's address)"
    )


def build_parser() -> argparse.ArgumentParser:
    """The parser with all commands."""
    parser = argparse.ArgumentParser(
        prog="megatron-async",
        description="Asynchronous RL for LLM agents: Megatron-core trains, SGLang samples, no old logit is lost.",
    )
    parser.add_argument("--version", action="version", version=f"megatron-async {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    _add_launch(commands)
    _add_parts(commands)
    doctor = _command(
        commands, "doctor", _doctor, "check this machine: Python, packages, ports, memory, disk, GPUs"
    )
    _add_config(doctor, required=False)
    _add_recorded(commands)
    return parser


def _add_parts(commands: Commands) -> None:
    """Commands that take the configuration of a run, for one part of it or for what comes before and after."""
    for name, handler, text in (
        ("train", _train, "one trainer rank (started by torchrun)"),
        ("score", _score, "one rank of the dedicated old-logit model (started by torchrun)"),
        ("critic", _critic, "one rank of a critic with ranks of its own (started by torchrun)"),
        ("rollout", _rollout, "the rollout process of a run"),
        ("serve", _serve, "the inference engines alone, until Ctrl-C"),
        ("sft", _sft, "warm start: supervised learning on demonstrations"),
        ("pretrain-critic", _pretrain_critic, "value pre-training on the trajectories of recorded runs"),
        (
            "evaluate",
            _evaluate,
            "success on held-out tasks: of the engines that launch or serve started, a checkpoint, or any endpoint",
        ),
    ):
        command = _command(commands, name, handler, text)
        _add_config(command)
        if name == "evaluate":
            _add_policy(command)
        if name in ("sft", "pretrain-critic"):
            command.add_argument(
                "--fresh", action="store_true", help="delete what an earlier run of the same name left"
            )


def _add_recorded(commands: Commands) -> None:
    """Commands that take the folder of a run."""
    replay = _command(
        commands, "replay", _replay, "train on the batches that another run recorded, without engines"
    )
    replay.add_argument("run", type=Path, help="folder of the recorded run, e.g. runs/quickstart")
    replay.add_argument("--name", required=True, help="name of the new run")
    replay.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE",
        help="option that differs from the recorded run's, e.g. --set optimizer.lr=1e-6; may be given several times",
    )  # fmt: skip
    replay.add_argument("--fresh", action="store_true", help="delete what an earlier run of that name left")
    inspect = _command(
        commands, "inspect", _inspect, "what a run's bank holds, or one trajectory token by token"
    )
    inspect.add_argument("run", type=Path, help="folder of the run, e.g. runs/quickstart")
    inspect.add_argument(
        "--trajectory", metavar="ID", help="show this trajectory's turns, versions and log-probs"
    )
    report = _command(commands, "report", _report, "the final table of a run again, from its folder")
    report.add_argument("run", type=Path, help="folder of the run, e.g. runs/quickstart")
    report.add_argument(
        "--step", type=int, help="step whose timeline is drawn (default: one of median length)"
    )


def _mendable() -> tuple[type[Exception], ...]:
    """What the user can mend. Asked only when something was raised, so the bridge is not imported for it: an error of
    its own can only come from where it was imported already."""
    bridge = sys.modules.get("sglang_bridge.errors")
    return (UserError,) if bridge is None else (UserError, bridge.BridgeError)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    if PART_VARIABLE in os.environ:
        end_with_parent()
    if BEATS_VARIABLE in os.environ:
        beat(Path(os.environ[BEATS_VARIABLE]))
    arguments = build_parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("megatron").setLevel(logging.WARNING)  # it lists every parameter
    handler: Handler = arguments.handler
    try:
        return handler(arguments)
    except _mendable() as error:
        print(f"megatron-async {arguments.command}: {error}", file=sys.stderr)  # noqa: T201
        leave_message(error)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:  # before, or in a command without, a stop of its own
        print(f"megatron-async {arguments.command}: interrupted", file=sys.stderr)  # noqa: T201
        return EXIT_STOPPED
    except BrokenPipeError:
        # `megatron-async report RUN | head`: the reader has seen enough.
        sys.stderr.close()
        return 0


if __name__ == "__main__":
    raise SystemExit(main())
