"""One trainer to a bank, whatever is killed: ranks end with torchrun, and a second trainer waits and gives up."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from megatron_async.bank import Bank
from megatron_async.errors import PartnerGone
from megatron_async.supervise import PART_VARIABLE
from megatron_async.training import session
from megatron_async.training.session import Session

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


def test_a_second_trainer_does_not_touch_the_bank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_CLAIM_S", 0.2)
    url = f"sqlite:///{tmp_path / 'bank.sqlite'}"

    def trainer(bank: Bank) -> Any:
        made = object.__new__(Session)
        made.bank, made.config = bank, SimpleNamespace(run_path=tmp_path)  # type: ignore[assignment]
        return made

    with Bank.open(url) as later:
        with Bank.open(url) as earlier:
            trainer(earlier)._claim()
            with pytest.raises(PartnerGone, match="another trainer is at work"):
                trainer(later)._claim()
        trainer(later)._claim()  # the earlier one has ended
