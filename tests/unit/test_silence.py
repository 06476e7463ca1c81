"""After a silence, what every part waits for is said, and then ever more rarely."""

from __future__ import annotations

from pathlib import Path

from megatron_async.observe.status import StatusWriter
from megatron_async.roster import LATE, Engine, write_roster
from megatron_async.silence import Silence


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_every_part_and_engine_is_named_after_a_silence_and_then_more_rarely(tmp_path: Path) -> None:
    trainer = StatusWriter(tmp_path, "trainer", interval_s=0.0)
    rollout = StatusWriter(tmp_path, "rollout", interval_s=0.0)
    write_roster(tmp_path, [Engine(0, "http://h:1"), Engine(1, "http://h:2", 3, LATE)])
    clock, said = Clock(), []
    silence = Silence(tmp_path, said.append, after_s=100, clock=clock)
    trainer.set("wait_batch", "batch: 0 of 3 groups")
    rollout.set("running", "the trainer: 24 trajectories wait", {"generated_tokens": 10.0})
    times = []
    for second in range(1000):
        clock.now = float(second)
        if second == 50:
            rollout.set("running", "", {"generated_tokens": 11.0})  # a token: not silent
        before = len(said)
        silence()
        if len(said) > before:
            times.append(second)
    assert times == [150, 250, 450, 850]
    lines = said[0].splitlines()
    assert lines[0] == "nothing has moved for 100 s:"
    assert any("trainer: wait_batch, waits for batch: 0 of 3 groups" in line for line in lines)
    assert any(line.strip() == "engine 1 at http://h:2: late" for line in lines)


def test_a_part_whose_process_no_longer_writes_is_named(tmp_path: Path) -> None:
    StatusWriter(tmp_path, "rollout")
    clock, said = Clock(), []
    silence = Silence(tmp_path, said.append, after_s=100, clock=clock, now=lambda: 4e9)
    silence()
    clock.now = 101.0
    silence()
    assert "its process" in said[0] and "last wrote" in said[0]
    assert "engines: none started" in said[0]
