"""`megatron-async serve`: the inference engines of a configuration alone, until told to stop.

Invariants: the addresses are in the run's folder (engines.json) for other commands to find; no server outlives it.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from megatron_async.claim import claimed
from megatron_async.config import save
from megatron_async.config.placement import place
from megatron_async.config.schema import RunConfig
from megatron_async.errors import UserError
from megatron_async.fleet import fleet
from megatron_async.observe import RunFiles
from megatron_async.roster import SERVING, Engine, write_roster
from megatron_async.supervise import StopRequested, stop_on_signals

logger = logging.getLogger(__name__)

_POLL_S = 1.0


def main(config: RunConfig) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit code. Raises UserError when too few engines are left."""
    if config.cluster.engine_nodes:
        raise UserError(
            f"cluster.engine_nodes: {config.cluster.engine_nodes} machines hold engines, but serve starts those of one "
            "machine; use launch --node N on each, or set cluster.engine_nodes=0"
        )
    with claimed(config.run_path):
        return _serve(config, RunFiles(config.run_path))


def _serve(config: RunConfig, files: RunFiles) -> int:
    files.logs.mkdir(parents=True, exist_ok=True)
    if not files.config.exists():
        save(config, files.config)
    try:
        with (
            stop_on_signals(),
            fleet(config, files, place(config)[0], config.engines.host, logger.info) as here,
        ):
            known: list[Engine] = []
            while True:
                engines = [replace(engine, state=SERVING) for engine in here.engines]
                if engines != known:  # alone, nobody publishes: what answers serves what it was started with
                    write_roster(config.run_path, engines)
                    for engine in engines:
                        logger.info("engine ready at %s", engine.url)
                    known = engines
                time.sleep(_POLL_S)
                here.tick()
                if here.hopeful < config.engines.quorum:
                    raise UserError("too few engines are left (engines.quorum):\n" + "\n".join(here.describe()))
    except StopRequested as stop:
        logger.info("stopped by %s", stop)
    return 0
