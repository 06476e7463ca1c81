"""Nothing that a supervisor started outlives it, however its parts end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import psutil
import pytest

from megatron_async.claim import claimed
from megatron_async.errors import UserError
from megatron_async.supervise import Part, PartFailed, describe_exit, log_tail, supervised, watch

ROOT = Path(__file__).resolve().parents[2]

# As torchrun does: a child in a session of its own, which a killed parent cannot take with it.
PARENT = (
    "import pathlib, subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(120)'], start_new_session=True)\n"
    "file = pathlib.Path(sys.argv[1])\n"
    "file.with_suffix('.new').write_text(str(child.pid))\n"
    "file.with_suffix('.new').rename(file)\n"
    "time.sleep(120)\n"
)


def wait_for(path: Path, deadline_s: float = 30.0) -> str:
    limit = time.monotonic() + deadline_s
    while not path.exists():
        assert time.monotonic() < limit, f"{path} did not come"
        time.sleep(0.02)
    return path.read_text()


def ends(pid: int, deadline_s: float) -> bool:
    limit = time.monotonic() + deadline_s
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > limit:
            return False
        time.sleep(0.05)
    return True


def test_what_a_killed_part_left_behind_is_stopped(tmp_path: Path) -> None:
    part = Part("parent", [sys.executable, "-c", PARENT, str(tmp_path / "pid")], tmp_path / "log")
    with supervised([part]):
        part.start()
        child = int(wait_for(tmp_path / "pid"))
        assert part.pid is not None
        os.kill(part.pid, signal.SIGKILL)
        with pytest.raises(PartFailed, match="(?s)parent was killed by SIGKILL .*is empty"):
            watch([part], lambda: False, poll_s=0.02)
    assert ends(child, 0.5), "the orphan survived"


ORPHAN = """
import os, sys, time
from pathlib import Path
from megatron_async.supervise import end_with_parent
first = os.getpid()
if os.fork():
    os._exit(0)  # as a parent that is killed while its child imports
while os.getppid() == first:
    time.sleep(0.01)
end_with_parent(parent=first if sys.argv[1] == "named" else None)
Path(sys.argv[2]).touch()
"""

RANK = """
import sys
from pathlib import Path
from megatron_async.supervise import end_with_parent
end_with_parent()
Path(sys.argv[1]).touch()
"""


@pytest.mark.parametrize("how", ["named", "by mark"])
def test_a_process_whose_parent_ended_before_it_asked_ends_too(how: str, tmp_path: Path) -> None:
    part = Part("orphan", [sys.executable, "-c", ORPHAN, how, str(tmp_path / "survived")], tmp_path / "log")
    part.start()
    while part.poll() is None or part.descendants():
        time.sleep(0.02)
    assert part.poll() == 0 and "Error" not in (tmp_path / "log").read_text()
    assert not (tmp_path / "survived").exists()


def test_one_whose_parent_is_there_goes_on(tmp_path: Path) -> None:
    """A process of a part: started by the supervisor itself, or by another process of the part, as torchrun's ranks."""
    rank = [sys.executable, "-c", RANK]
    between = "import subprocess, sys; raise SystemExit(subprocess.call(sys.argv[1:]))"
    parts = [
        Part("direct", [*rank, str(tmp_path / "direct")], tmp_path / "direct.log"),
        Part("rank", [sys.executable, "-c", between, *rank, str(tmp_path / "rank")], tmp_path / "rank.log"),
    ]
    with supervised(parts):
        for part in parts:
            part.start()
        watch(parts, lambda: all(part.poll() == 0 for part in parts), poll_s=0.02)
    assert (tmp_path / "direct").exists() and (tmp_path / "rank").exists()


def test_a_part_and_its_children_are_stopped_at_the_end_of_the_block(tmp_path: Path) -> None:
    part = Part("parent", [sys.executable, "-c", PARENT, str(tmp_path / "pid")], tmp_path / "log")
    with supervised([part]):
        part.start()
        child = int(wait_for(tmp_path / "pid"))
        assert {process.pid for process in part.descendants()} == {part.pid, child}
    assert part.poll() is not None
    assert ends(child, 0.5)


UNMARKED = (
    "import pathlib, subprocess, sys, time\n"
    "code = 'import subprocess, sys, time; print(subprocess.Popen([\"sleep\", \"300\"]).pid, flush=True); '\n"
    "code += 'time.sleep(300)'\n"
    "tool = subprocess.Popen([sys.executable, '-c', code], env={'PATH': '/usr/bin:/bin'}, start_new_session=True,\n"
    "                        stdout=subprocess.PIPE, text=True)\n"
    "file = pathlib.Path(sys.argv[1])\n"
    "file.with_suffix('.new').write_text(f'{tool.pid} {tool.stdout.readline()}')\n"
    "file.with_suffix('.new').rename(file)\n"
    "time.sleep(300)\n"
)


@pytest.mark.parametrize("kills", [False, True])
def test_a_tool_with_an_environment_of_its_own_is_stopped_with_the_part_that_started_it(
    kills: bool, tmp_path: Path
) -> None:
    part = Part("agents", [sys.executable, "-c", UNMARKED, str(tmp_path / "pids")], tmp_path / "log")
    with supervised([part]):
        part.start()
        tool, below = (int(pid) for pid in wait_for(tmp_path / "pids").split())
        assert {process.pid for process in part.descendants()} == {part.pid, tool, below}
        if kills:
            part.kill("it stands still")
    assert ends(tool, 0.5) and ends(below, 0.5)


DEAF = (
    "import pathlib, signal, sys, time\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "file = pathlib.Path(sys.argv[1])\n"
    "file.with_suffix('.new').write_text('')\n"
    "file.with_suffix('.new').rename(file)\n"
    "time.sleep(600)\n"
)

STOPPED_TWICE = (
    "import pathlib, sys, time\n"
    "from megatron_async import supervise\n"
    "supervise.STOP_GRACE_S = 300.0\n"
    "folder = pathlib.Path(sys.argv[1])\n"
    "part = supervise.Part('deaf', [sys.executable, '-c', sys.argv[2], str(folder / 'deaf')], folder / 'log')\n"
    "def stop(parts, grace_s=300.0, stop_all=supervise.stop_all):\n"
    "    print('stopping', flush=True)\n"
    "    stop_all(parts, grace_s)\n"
    "supervise.stop_all = stop\n"
    "try:\n"
    "    with supervise.stop_on_signals(), supervise.supervised([part]):\n"
    "        part.start()\n"
    "        supervise.watch([part], lambda: False)\n"
    "except supervise.StopRequested as stopped:\n"
    "    print(stopped, part.poll(), flush=True)\n"
)


def test_a_second_signal_stops_at_once(tmp_path: Path) -> None:
    """A part that ignores SIGTERM would get its grace of 300 s; the second Ctrl-C ends that."""
    command = [sys.executable, "-u", "-c", STOPPED_TWICE, str(tmp_path), DEAF]
    job = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert job.stdout is not None
    wait_for(tmp_path / "deaf")
    job.send_signal(signal.SIGINT)
    assert job.stdout.readline() == "stopping\n"
    job.send_signal(signal.SIGINT)
    output, _ = job.communicate(timeout=120)
    assert output == "SIGINT -9\n"


def test_how_a_part_ended_is_named() -> None:
    assert describe_exit(2) == "ended with exit code 2"
    assert describe_exit(-signal.SIGKILL).startswith("was killed by SIGKILL (by someone, or by the kernel")
    assert describe_exit(-signal.SIGSEGV) == "was killed by SIGSEGV"
    assert describe_exit(-signal.SIGRTMIN - 3).startswith("was killed by signal ")


def test_the_end_of_a_log_is_read_without_the_rest(tmp_path: Path) -> None:
    """A log of a long run does not fit into memory."""
    log = tmp_path / "log"
    with log.open("wb") as file:
        file.truncate(2**28)  # takes no room: a file with a hole
        file.seek(0, os.SEEK_END)
        file.write(b"one\ntwo\nthree\n")
    tracemalloc.start()
    try:
        assert log_tail(log, lines=2) == "two\nthree"
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()
    (tmp_path / "short").write_text("a\nb")
    assert log_tail(tmp_path / "short") == "a\nb"


def test_a_run_folder_belongs_to_one_launcher(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "a"
    with (
        claimed(run),
        pytest.raises(UserError, match=f"in use: process {os.getpid()} runs there"),
        claimed(run),
    ):
        pass
    with claimed(run):
        assert run.is_dir()


def test_a_claim_ends_with_its_holder(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys, time\nfrom megatron_async.claim import claimed\n"
        "with claimed(pathlib.Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(120)\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(UserError, match=f"process {holder.pid} "), claimed(tmp_path):
        pass
    holder.kill()
    holder.communicate()
    with claimed(tmp_path):
        assert (tmp_path / ".claim").read_text() == str(os.getpid())


def test_a_folder_that_cannot_be_made_is_a_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"), claimed(tmp_path / "file" / "run"):
        pass
