"""Ranks end with torchrun, whatever kills it: they must not train on beside the next ones."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil

from megatron_async.supervise import PART_VARIABLE

RANK = """
import sys, time
from pathlib import Path
from megatron_async import cli
cli.build_parser = lambda: (Path(sys.argv[1]).touch(), time.sleep(600))
cli.main([])
"""


def test_ranks_end_when_torchrun_is_killed(tmp_path: Path) -> None:
    script, began = tmp_path / "rank.py", tmp_path / "began"
    script.write_text(RANK)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", str(script), str(began)]
    root = str(Path(__file__).resolve().parents[2])
    job = subprocess.Popen(command, env={"PATH": "/usr/bin:/bin", "PYTHONPATH": root, PART_VARIABLE: "mark"})
    try:
        while not began.exists():
            assert job.poll() is None
            time.sleep(0.05)  # the cores are for what is waited for
        ranks = [each for each in psutil.Process(job.pid).children(recursive=True) if str(script) in each.cmdline()]
        assert ranks
    finally:
        job.kill()  # SIGKILL: it can tell its ranks nothing
        job.wait()
    assert psutil.wait_procs(ranks, timeout=10)[1] == []
