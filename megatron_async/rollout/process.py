"""The rollout as a process: opens bank, engines and tasks of a run, and lets the controller run to the end."""

from __future__ import annotations

import asyncio
import signal

from megatron_async.bank import Bank
from megatron_async.config.schema import RunConfig
from megatron_async.credentials import hidden_credentials
from megatron_async.observe import StatusWriter, Timeline
from megatron_async.rollout import collecting_garbage
from megatron_async.rollout.chat import ChatFormat
from megatron_async.rollout.controller import RolloutController
from megatron_async.rollout.engines import build_pool, serving_engines, with_engines
from megatron_async.rollout.loop_watchdog import end_process, watched_loop
from megatron_async.rollout.numbers import claim_name
from megatron_async.rollout.task_checks import training_tasks
from megatron_async.roster import read_roster


def main(config: RunConfig) -> int:
    """`megatron-async rollout`: roll out against the engines of the run's folder until the run is finished.

    SIGINT and SIGTERM stop it: running episodes are written down for the next rollout to go on with (with
    `rollout.flush_s: 0` they are given up), finished ones are in the bank. Returns the exit code. An event loop that is
    blocked for `rollout.turn_deadline_s` ends the process (`loop_watchdog`).
    """
    return asyncio.run(run(config))


async def run(config: RunConfig) -> int:
    read_roster(config.run_path)  # a run that nobody started has no engines, and no bank either: the first says more
    with Bank.open(config.bank_url) as bank, hidden_credentials(config.environment):
        await _roll_out(config, bank)
    return 0


async def _roll_out(config: RunConfig, bank: Bank) -> None:
    chat = ChatFormat(config.model.path, config.rollout.chat_template_options)
    source = training_tasks(config)
    part = f"rollout-{config.rollout.process}" if config.rollout.process else "rollout"
    status, timeline = StatusWriter(config.run_path, part), Timeline(config.run_path, part)
    # Held while engines start: nobody is to take over what this number left. The controller waits where it is not free.
    bank.claim(claim_name(config.rollout.process))
    urls = await serving_engines(config.run_path, config.engines.start_deadline_s)
    patience_s = config.rollout.turn_deadline_s
    blocked = watched_loop(patience_s, end_process(config.run_path, patience_s))
    async with build_pool(config, urls) as pool, collecting_garbage.rarely(), blocked:
        controller = RolloutController(config, bank, pool, source, chat, status=status, timeline=timeline)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, controller.stop, number.name)
        await with_engines(pool, config.run_path, controller.run())
    timeline.close()
