"""`megatron-async launch`: start every part of a run, watch them, stop them, report.

The parts: inference engines (SGLang servers), one rollout process, the trainer ranks under torchrun. Everything a
run writes lies in its run folder. Whatever ends the run (success, failure, Ctrl-C), no process survives it.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from megatron_async import config as configuration
from megatron_async.bank import Bank
from megatron_async.config.checks import is_local
from megatron_async.config.placement import Node, place, ranks_per_node
from megatron_async.config.schema import RunConfig
from megatron_async.errors import UserError
from megatron_async.machines import Others, own_address
from megatron_async.observe import RunFiles, append_evaluation, read_metrics
from megatron_async.observe.progress import Progress
from megatron_async.observe.report import write_report
from megatron_async.rollout.chat import ChatFormat
from megatron_async.rollout.evaluation import evaluate_engines
from megatron_async.supervise import (
    Part,
    PartFailed,
    StopRequested,
    python_module,
    stop_on_signals,
    supervised,
    watch,
)
from sglang_bridge import BridgeError, EngineServer, ServerOptions

EXIT_STOPPED = 130
"""Exit code after Ctrl-C, as shells use it."""

_ENGINE_STOP_S = 3.0


def run(config: RunConfig, *, fresh: bool = False, address: str | None = None) -> int:
    """Run the whole job, or with several machines the first one's part, which leads; returns the exit code.

    fresh: delete what an earlier run of the same name left. address: where other machines reach this one; found if not
    given.
    Raises UserError for what the user can mend.
    """
    ChatFormat(
        config.model.path
    )  # a tokenizer without tools is refused before half a minute of starting engines
    files = create_folder(config, fresh=fresh)
    try:
        with stop_on_signals():
            _run(config, files, address)
    except StopRequested as stop:
        print(f"stopped by {stop}; finished trajectories and metrics are in {files.root}")  # noqa: T201
        return EXIT_STOPPED
    except BridgeError as error:  # the bridge is usable alone and does not know UserError
        raise UserError(str(error)) from error
    print(write_report(files.root), end="")  # noqa: T201
    return 0


def sft(config: RunConfig) -> int:
    """The warm start alone: the trainer ranks under torchrun, watched; returns the exit code."""
    files = create_folder(config, fresh=True)
    part = Part("warm start", trainer_command(config, str(files.config), "sft"), files.logs / "sft.log")
    try:
        with stop_on_signals(), supervised([part]):
            part.start()
            watch([part], lambda: part.poll() == 0, _Steps("warm start", config))
    except StopRequested as stop:
        print(f"stopped by {stop}")  # noqa: T201
        return EXIT_STOPPED
    print(f"warm start: {files.checkpoint}")  # noqa: T201
    return 0


class _Steps:
    """Prints a line of progress every now and then, from the metrics file."""

    def __init__(self, name: str, config: RunConfig) -> None:
        self._name, self._config, self._printed, self._started = name, config, 0, time.monotonic()

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
        loss = rows[-1]["action_loss"]
        print(f"{self._name} {done}/{self._config.steps}  action loss {loss:.3f}  {seconds:.0f} s")  # noqa: T201


def _run(config: RunConfig, files: RunFiles, address: str | None) -> None:
    with Bank.open(config.bank_url) as bank:
        bank.set_state("phase", "training")
    nodes = place(config)
    with (
        _other_machines(config, files, nodes, address) as others,
        engines(config, files, nodes[0], others.address) as servers,
    ):
        urls = [*(server.url for server in servers), *others.engines(engines_alive(servers))]
        write_engines(files, urls)
        _evaluate(config, urls, step=0)
        others.train()
        with supervised([]) as parts:
            for part in (_rollout(files), *_scorer(config, files), _trainer(config, files, others.address)):
                parts.append(part)
                part.start()
            trainer = parts[-1]
            with Progress(config) as progress:
                watch(
                    parts,
                    lambda: trainer.poll() == 0,
                    progress.refresh,
                    engines_alive(servers),
                    others.check,
                )
        _evaluate(config, urls, step=config.steps)


def _other_machines(config: RunConfig, files: RunFiles, nodes: list[Node], address: str | None) -> Others:
    where = config.engines.host if len(nodes) == 1 else address or own_address()
    deadline = config.cluster.join_deadline_s + config.engines.start_deadline_s
    hosting = {node.number for node in nodes if node.engines}
    return Others(files, [node.number for node in nodes[1:]], hosting, where, deadline)


def create_folder(config: RunConfig, *, fresh: bool) -> RunFiles:
    """Make the run's folder with its resolved configuration.

    Raises UserError when a run of that name is there and `fresh` is not asked for: its trajectories and metrics
    would mix with the new ones.
    """
    files = RunFiles(config.run_path)
    if files.config.exists() and not fresh:
        raise UserError(
            f"{files.root} already holds a run. Choose another name (--set name=...), or pass --fresh to delete it "
            "and start again."
        )
    if fresh and files.root.exists():
        shutil.rmtree(files.root)
    for folder in (files.root, files.logs, files.status):
        folder.mkdir(parents=True, exist_ok=True)
    files.config.write_text(configuration.dump(config))
    return files


@contextmanager
def engines(config: RunConfig, files: RunFiles, node: Node, host: str) -> Iterator[list[EngineServer]]:
    """The inference servers that a machine holds, all ready, listening on `host` (or `engines.host`, if that is an
    address that others can reach)."""
    listen = host if is_local(config.engines.host) else config.engines.host
    with ExitStack() as stack:
        servers = []
        for i, slot in enumerate(node.engines):
            port = config.engines.base_port + i if config.engines.base_port else 0
            server = EngineServer(
                config.model.path,
                listen,
                port,
                log_path=files.logs / f"engine_{slot.index}.log",
                options=server_options(config, slot.devices),
            )
            stack.callback(server.stop, _ENGINE_STOP_S)
            server.start()
            servers.append(server)
        for server in servers:
            server.wait_ready(config.engines.start_deadline_s)
        yield servers


def write_engines(files: RunFiles, urls: list[str]) -> None:
    """Tell trainer, rollout and other commands where the run's engines are."""
    addresses = {"engines": [{"url": url} for url in urls]}
    (files.root / "engines.json").write_text(json.dumps(addresses, indent=1))


def server_options(config: RunConfig, devices: tuple[int, ...] = ()) -> ServerOptions:
    """SGLang's options for one engine of this run. devices: the accelerators it may use; empty: all it finds."""
    return ServerOptions(
        environment={"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))} if devices else {},
        dtype=config.model.dtype,
        tensor_parallel_size=config.engines.tensor_parallel_size,
        max_total_tokens=config.engines.max_total_tokens,
        mem_fraction_static=config.engines.mem_fraction_static,
        routed_experts=config.engines.routed_experts,
        extra_args=config.engines.extra_args,
    )


def trainer_command(
    config: RunConfig, config_path: str, command: str = "train", *, node: int = 0, lead: str = ""
) -> list[str]:
    """argv of the trainer ranks on one machine: torchrun around `megatron-async train` (or another command).

    node, lead: with several machines, this one's number and the first one's address.
    """
    ranks = ranks_per_node(config)
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


def _rollout(files: RunFiles) -> Part:
    command = python_module("megatron_async", "rollout", "--config", str(files.config))
    return Part("rollout", command, files.logs / "rollout.log")


def _scorer(config: RunConfig, files: RunFiles) -> list[Part]:
    """The dedicated old-logit model, where old log-probs come from one."""
    if config.old_logits.source != "dedicated":
        return []
    return [Part("scorer", trainer_command(config, str(files.config), "score"), files.logs / "scorer.log")]


def _trainer(config: RunConfig, files: RunFiles, lead: str) -> Part:
    return Part("trainer", trainer_command(config, str(files.config), lead=lead), files.logs / "trainer.log")


def engines_alive(servers: list[EngineServer]) -> Callable[[], None]:
    """What notices an engine of this machine that died."""

    def tick() -> None:
        for server in servers:
            if not server.alive():
                raise PartFailed(f"the engine at {server.url} died; its log ends:\n{server.log_tail()}")

    return tick


def _evaluate(config: RunConfig, urls: list[str], step: int) -> None:
    """Held-out success of what the engines hold now, into evaluations.jsonl."""
    result = evaluate_engines(config, urls)
    append_evaluation(config.run_path, {"step": step, "version": result.versions[1], **result.as_dict()})
