"""`megatron-async launch --node N`, N above 0: this machine's part of a run that machine 0 leads.

Invariants: it starts its part when the lead says so, says how it is doing, and ends with the lead; nothing it started
survives it, whatever ends it.
"""

from __future__ import annotations

import logging
from dataclasses import asdict

from megatron_async import launch, machines
from megatron_async.config.placement import Node, place
from megatron_async.config.schema import RunConfig
from megatron_async.errors import EXIT_STOPPED, UserError
from megatron_async.fleet import Fleet, fleet
from megatron_async.health import Guard
from megatron_async.machines import Announcement, Machine, machine_file
from megatron_async.observe import RunFiles
from megatron_async.supervise import Part, StopRequested, stop_on_signals, supervised, watch
from sglang_bridge import BridgeError

logger = logging.getLogger(__name__)


def run(config: RunConfig, number: int, address: str | None = None) -> int:
    """Run machine `number`'s part until the lead ends the run; returns the exit code.

    address: of this machine, where the others reach it; found if not given.
    Raises UserError for what the user can mend.
    """
    nodes = place(config)
    if not 0 < number < len(nodes):
        raise UserError(
            f"--node {number}: the run has machines 0 to {len(nodes) - 1} (trainer.nodes {config.trainer.nodes} + "
            f"cluster.engine_nodes {config.cluster.engine_nodes}); machine 0 leads and takes no --node"
        )
    files, where = RunFiles(config.run_path), address or machines.own_address()
    lead = Machine(files, 0)
    try:
        with stop_on_signals():
            # An earlier run's folder may still be there until the lead has made the new one.
            lead.wait_for((machines.STARTING, machines.TRAINING), config.cluster.join_deadline_s, _nothing)
            with Announcement(machine_file(files, number), address=where) as announcement:
                _take_part(config, files, nodes[number], lead, where, announcement)
    except StopRequested as stop:
        logger.info("stopped by %s", stop)
        return EXIT_STOPPED
    except BridgeError as error:  # the bridge is usable alone and does not know UserError
        raise UserError(str(error)) from error
    return 0


def _take_part(
    config: RunConfig, files: RunFiles, node: Node, lead: Machine, address: str, announcement: Announcement
) -> None:
    if node.engines:
        with fleet(config, files, node, address, logger.info) as here:
            orders = _Orders(here, lead, announcement)
            announcement.set(phase=machines.READY)
            watch([], lambda: _ended(lead), here.tick, orders)
    else:
        _train(config, files, node, lead)


class _Orders:
    """What the lead asks of this machine's engines, and what it is told of them; called again and again."""

    def __init__(self, here: Fleet, lead: Machine, announcement: Announcement) -> None:
        self._here, self._lead, self._announcement = here, lead, announcement
        self._told: dict[str, object] = {}
        self()

    def __call__(self) -> None:
        said = self._lead.look() or {}
        if "begin_with" in said:
            path, version = said["begin_with"]
            self._here.model_path, self._here.version = str(path), int(version)
        for name in said.get("restart", []):
            self._here.restart(str(name), f"was reported: {said.get('reason')}")
        here = self._here
        engines = [asdict(engine) for engine in here.engines]
        news: dict[str, object] = {"engines": engines, "hopeful": here.hopeful, "describe": here.describe()}
        if news != self._told:
            self._announcement.set(**news)
            self._told = news


def _train(config: RunConfig, files: RunFiles, node: Node, lead: Machine) -> None:
    deadline = config.cluster.join_deadline_s + config.engines.start_deadline_s
    said = lead.wait_for((machines.TRAINING, machines.ENDED), deadline, _nothing)
    if said["phase"] == machines.ENDED:
        return
    command = launch.trainer_command(config, str(files.config), node=node.number, lead=str(said["address"]))
    part = Part("trainer", command, files.logs / f"trainer_{node.number}.log")
    with supervised([part]):
        part.start()
        watch([part], lambda: part.poll() == 0 or _ended(lead), Guard(config, [part]))


def _ended(lead: Machine) -> bool:
    said = lead.look()
    return said is not None and said["phase"] == machines.ENDED


def _nothing() -> None:
    """There is nothing to do between two looks."""
