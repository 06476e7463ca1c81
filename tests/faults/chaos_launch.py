"""`launch --resume` with scripted engines, which start in a second instead of half a minute; all else is the product's.

usage: python -m tests.faults.chaos_launch [--stand-in] CONFIG     --stand-in: a trainer without a model
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
from typing import Any

from megatron_async import cli, launch
from megatron_async.config import load
from megatron_async.config.placement import Node
from megatron_async.config.schema import RunConfig
from megatron_async.errors import EXIT_USER_ERROR
from megatron_async.fleet import Fleet, Say, server_options
from megatron_async.observe import RunFiles
from megatron_async.supervise import Part, python_module
from sglang_bridge import EngineServer
from sglang_bridge.server import claim_port


class ScriptedServer(EngineServer):
    """Starts `tools.scripted_endpoint` where the product starts SGLang."""

    def start(self) -> None:
        self.port = claim_port(self.host, self.port)
        command = [
            sys.executable, "-m", "tools.scripted_endpoint", "--model", self.model_path, "--port", str(self.port),
            "--version", str(self.options.weight_version), "--seed", str(self.port), "--base-ms", "10",
            "--longest", "60", "--parent", str(os.getpid()),
        ]  # fmt: skip
        self._log_start = 0
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )


def scripted_fleet(config: RunConfig, files: RunFiles, node: Node, host: str, say: Say) -> Fleet:
    return Fleet(config, files, node, host, lambda devices: server_options(config, devices), say, server=ScriptedServer)


def stand_in(config: RunConfig, files: RunFiles, lead: str = "") -> Part:
    command = python_module("tests.faults.chaos_trainer", str(files.config))
    return Part("trainer", command, files.logs / "trainer.log")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stand-in", action="store_true")
    parser.add_argument("config")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S")
    product: Any = launch
    product.fleet = scripted_fleet
    if arguments.stand_in:
        product.trainer_part = stand_in
    try:
        return launch.run(load(arguments.config, []), resume=True)
    except cli._mendable() as error:
        print(f"launch: {error}", file=sys.stderr)
        return EXIT_USER_ERROR


if __name__ == "__main__":
    raise SystemExit(main())
