"""`megatron-async launch`: start every part of a run, watch them, stop them, report.

The parts: inference engines (SGLang servers), one rollout process, the trainer ranks under torchrun. Everything a
run writes lies in its run folder. Whatever ends the run (success, failure, Ctrl-C), no process survives it. The first
Ctrl-C while it trains lets the trainer end its step and write a checkpoint (`stopping`), the second ends it at once.
"""

from __future__ import annotations

import logging
import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from megatron_async import config as configuration
from megatron_async import training_record
from megatron_async.bank import Bank
from megatron_async.bank.requests import PHASE, PUBLISHED, RESUMING, TRAINING
from megatron_async.claim import CLAIM_FILE, InUse, claimed
from megatron_async.config.placement import Node, place, ranks_per_node
from megatron_async.config.schema import RunConfig
from megatron_async.engine_key import read_key
from megatron_async.engine_watch import EngineWatch
from megatron_async.errors import EXIT_STOPPED, UserError
from megatron_async.fleet import fleet
from megatron_async.health import Guard
from megatron_async.machines import Others, own_address
from megatron_async.observe import RunFiles, append_evaluation, read_evaluations, read_metrics
from megatron_async.observe.progress import Progress
from megatron_async.observe.report import write_report
from megatron_async.periodic_evaluation import PeriodicEvaluation
from megatron_async.roles import Roles
from megatron_async.rollout.chat import ChatFormat
from megatron_async.rollout.evaluation import evaluate_engines
from megatron_async.rollout.evaluation_files import results_folder
from megatron_async.rollout.recorded_tasks import training_on
from megatron_async.rollout.task_checks import heldout_tasks, training_tasks
from megatron_async.router import router
from megatron_async.silence import Silence
from megatron_async.stopping import Stopping
from megatron_async.supervise import (
    Part,
    StopRequested,
    first_signal_asks,
    python_module,
    stop_on_signals,
    supervised,
    watch,
)
from sglang_bridge import BridgeError

logger = logging.getLogger(__name__)


def run(config: RunConfig, *, fresh: bool = False, resume: bool = False, address: str | None = None) -> int:
    """Run the whole job, or with several machines the first one's part, which leads; returns the exit code.

    fresh: delete what an earlier run of the same name left. resume: go on with it (begin, where there is none).
    address: where other machines reach this one; found if not given.
    Raises UserError for what the user can mend.
    """
    # All this would be found out half a minute later, when the engines have started.
    ChatFormat(config.model.path, config.rollout.chat_template_options)
    heldout_tasks(config)
    tasks = training_tasks(config)
    with claimed(config.run_path):
        files = create_folder(config, fresh=fresh, resume=resume)
        training_record.begin(config, training_on(config, training_record.REINFORCED, tasks))
        try:
            with stop_on_signals():
                _run(config, files, address)
        except StopRequested as stop:
            go_on = f"megatron-async launch --config {files.config} --resume"
            print(f"stopped by {stop}{stop.outcome}; go on with: {go_on}")  # noqa: T201
            return EXIT_STOPPED
        except BridgeError as error:  # the bridge is usable alone and does not know UserError
            raise UserError(str(error)) from error
        print(write_report(files.root), end="")  # noqa: T201
    return 0


def sft(config: RunConfig, *, fresh: bool = False) -> int:
    """The warm start alone: the trainer ranks under torchrun, watched; returns the exit code."""
    heldout_tasks(config)
    tasks = training_tasks(config)
    wanted, needed = config.warm_start.demonstrations, config.batch.trajectories
    if wanted < needed:
        raise UserError(
            f"warm_start.demonstrations: {wanted} do not fill one batch of groups {config.batch.groups} * group_size "
            f"{config.batch.group_size} = {needed}; raise the first or lower the second"
        )
    with claimed(config.run_path):
        files = create_folder(config, fresh=fresh, resume=None)
        training_record.begin(config, training_on(config, training_record.WARM_START, tasks))
        part = Part("warm start", trainer_command(config, str(files.config), "sft"), files.logs / "sft.log")
        return _watched([part], "warm start", "action_loss", config, files.checkpoint)


def pretrain_critic(config: RunConfig, *, fresh: bool = False) -> int:
    """Value pre-training alone, as `sft`, on the ranks that the critic will live on."""
    command = critic_command if config.critic.ranks == "own" else trainer_command
    with claimed(config.run_path):
        files = create_folder(config, fresh=fresh, resume=None)
        argv = command(config, str(files.config), "pretrain-critic")
        part = Part("critic", argv, files.logs / "pretrain-critic.log")
        return _watched([part], "critic", "critic/explained_variance", config, files.critic)


def train_alone(config: RunConfig, prepare: Callable[[RunFiles], None], *, fresh: bool = False) -> int:
    """The trainer ranks alone, on what `prepare` puts into the run's new folder; returns the exit code."""
    with claimed(config.run_path):
        files = create_folder(config, fresh=fresh, resume=None)
        prepare(files)
        parts = training_parts(config, files, place(config)[0])
        return _watched(parts, "replay", "loss", config, files.checkpoint)


def _watched(parts: list[Part], name: str, metric: str, config: RunConfig, output: Path) -> int:
    """Run parts until the last one is done."""
    try:
        with stop_on_signals(), supervised(parts):
            for part in parts:
                part.start()
            watch(parts, lambda: parts[-1].poll() == 0, Guard(config, parts), _Steps(name, metric, config))
    except StopRequested as stop:
        print(f"stopped by {stop}")  # noqa: T201
        return EXIT_STOPPED
    print(f"{name}: {output}")  # noqa: T201
    return 0


class _Steps:
    """Prints a line of progress every now and then, from the metrics file."""

    def __init__(self, name: str, metric: str, config: RunConfig) -> None:
        self._name, self._metric, self._config = name, metric, config
        self._printed, self._started = 0, time.monotonic()

    def __call__(self) -> None:
        rows = read_metrics(self._config.run_path)
        done = len(rows)
        if (
            done - self._printed < self._config.steps / 10
            and done < self._config.steps
            or done == self._printed
        ):
            return
        self._printed = done
        seconds = time.monotonic() - self._started
        label, value = self._metric.replace("_", " "), rows[-1].get(self._metric, math.nan)
        print(f"{self._name} {done}/{self._config.steps}  {label} {value:.3f}  {seconds:.0f} s")  # noqa: T201


def _run(config: RunConfig, files: RunFiles, address: str | None) -> None:
    nodes = place(config)
    with (
        Bank.open(config.bank_url) as bank,
        _other_machines(config, files, nodes, address) as others,
        fleet(config, files, nodes[0], others.address, say) as here,
        router(config, files, say) as front,
        EngineWatch(config, here, others, bank, say, api_key=read_key(files.root), router=front) as watching,
    ):
        # Until the trainer has given the engines the version that it goes on from, they hold the first one.
        bank.set_state(PHASE, RESUMING if bank.versions()[-1].version > 0 else TRAINING)
        bank.set_state(PUBLISHED, "0")
        others.gather(here.tick)
        watching.begin()
        say(f"{len(watching.urls)} engine(s) ready; logs are in {files.logs}")
        if not read_evaluations(config.run_path):
            _evaluate(config, watching.wait(), 0, watching.tick)
        others.train()
        with supervised([]) as parts, Progress(config) as progress, first_signal_asks() as asked:
            training = training_parts(config, files, nodes[0], others.address)
            ticks = (progress.refresh, Silence(config.run_path, say), watching.tick)
            stopping = Stopping(config, bank, training[-1], asked, say, *ticks)
            evaluating = PeriodicEvaluation(config, bank, parts, say)
            Roles(config, training, rollout_part(files), parts).run(*ticks, evaluating, stopping)
        watching.training_ended(files.checkpoint)
        _evaluate(config, watching.wait(), config.steps, watching.tick)
    if here.restarts:
        say("\n".join(here.describe()))


def say(text: str) -> None:
    """Tell the user."""
    print(text, flush=True)  # noqa: T201


def _other_machines(config: RunConfig, files: RunFiles, nodes: list[Node], address: str | None) -> Others:
    where = config.engines.host if len(nodes) == 1 else address or own_address()
    deadline = config.cluster.join_deadline_s + config.engines.start_deadline_s
    hosting = {node.number for node in nodes if node.engines}
    return Others(files, [node.number for node in nodes[1:]], hosting, where, deadline)


def create_folder(config: RunConfig, *, fresh: bool, resume: bool | None = False) -> RunFiles:
    """Make the run's folder with its resolved configuration. resume: None for commands that cannot go on with a run.

    Raises UserError when a run of that name is there and neither is asked for: its trajectories and metrics would mix
    with the new ones.
    """
    files = RunFiles(config.run_path)
    if fresh and resume:
        raise UserError("--fresh deletes what --resume would go on with: choose one")
    if files.config.exists() and not (fresh or resume):
        ways = "" if resume is None else "--resume to go on with it, "
        raise UserError(
            f"{files.root} already holds a run. Pass {ways}--fresh to delete it and start again, or choose another "
            "name (--set name=...)."
        )
    if fresh and files.root.exists():
        _empty(files.root)
    for folder in (files.root, files.logs, files.status):
        folder.mkdir(parents=True, exist_ok=True)
    configuration.save(config, files.config)
    return files


def _empty(folder: Path) -> None:
    """Delete what a folder holds, but the claim on it."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != CLAIM_FILE:
            path.unlink()


def trainer_command(
    config: RunConfig, config_path: str, command: str = "train", *, node: int = 0, lead: str = ""
) -> list[str]:
    """argv of the trainer ranks on one machine: torchrun around `megatron-async train` (or another command).

    node, lead: with several machines, this one's number and the first one's address.
    """
    rendezvous = ["--standalone"]
    if config.trainer.nodes > 1:
        if not lead:
            raise UserError(
                f"trainer.nodes: {command} runs on one machine, but the configuration has {config.trainer.nodes}; set "
                "trainer.nodes=1 and a layout.world_size of its ranks"
            )
        # Static ranks: rank 0, which speaks with bank and engines, must be on the first machine.
        rendezvous = [
            "--nnodes", str(config.trainer.nodes), "--node-rank", str(node),
            "--master-addr", lead, "--master-port", str(config.cluster.rendezvous_port),
        ]  # fmt: skip
    return _torchrun(rendezvous, ranks_per_node(config), command, config_path)


def critic_command(config: RunConfig, config_path: str, command: str = "critic") -> list[str]:
    """argv of the critic's own ranks."""
    return _torchrun(["--standalone"], config.critic_layout.world_size, command, config_path)


def _torchrun(rendezvous: list[str], ranks: int, command: str, config_path: str) -> list[str]:
    return python_module(
        "torch.distributed.run",
        *rendezvous,
        "--nproc-per-node",
        str(ranks),
        "-m",
        "megatron_async",
        command,
        "--config",
        config_path,
    )


def rollout_part(files: RunFiles) -> Part:
    """The rollout process of a run."""
    command = python_module("megatron_async", "rollout", "--config", str(files.config))
    return Part("rollout", command, files.logs / "rollout.log")


def training_parts(config: RunConfig, files: RunFiles, node: Node, lead: str = "") -> list[Part]:
    """What starts and ends with the trainer's ranks on the first machine: a dedicated old-logit model and a critic with
    ranks of its own, where there are such, and the trainer last. lead: as for `trainer_command`."""
    parts = []
    if config.old_logits.source == "dedicated":
        command = trainer_command(config, str(files.config), "score")
        parts.append(_part_on("scorer", command, files, node.scorer_devices))
    if config.critic.ranks == "own":
        command = critic_command(config, str(files.config))
        parts.append(_part_on("critic", command, files, node.critic_devices))
    return [*parts, trainer_part(config, files, lead)]


def _part_on(name: str, command: list[str], files: RunFiles, devices: tuple[int, ...]) -> Part:
    """devices: as for `server_options`."""
    environment = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))} if devices else {}
    return Part(name, command, files.logs / f"{name}.log", environment)


def trainer_part(config: RunConfig, files: RunFiles, lead: str = "") -> Part:
    """The trainer ranks of this machine, under torchrun. lead: as for `trainer_command`."""
    return Part("trainer", trainer_command(config, str(files.config), lead=lead), files.logs / "trainer.log")


def _evaluate(config: RunConfig, urls: list[str], step: int, *ticks: Callable[[], None]) -> None:
    """Held-out success of what the engines hold now, into evaluations.jsonl. ticks: what to watch meanwhile.

    Results go to a folder of this step's own, so a command may evaluate the same run meanwhile. A folder that cannot be
    used is no reason to end a job: the evaluation is left out and told.
    """
    say(f"evaluating on {config.evaluation.tasks} held-out tasks after {step} steps")
    try:
        folder = results_folder(config, f"after_{step}_steps")
        result = evaluate_engines(config, urls, *ticks, folder=folder)
    except (OSError, InUse, ExceptionGroup) as error:
        if isinstance(error, ExceptionGroup) and error.split(OSError)[1] is not None:
            raise
        say(f"the evaluation after {step} steps failed ({error!r}); `megatron-async evaluate` repeats it")
        logger.warning("the evaluation after %d steps failed", step, exc_info=error)
        return
    append_evaluation(config.run_path, {"step": step, "version": result.newest_version, **result.as_dict()})
