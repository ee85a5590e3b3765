"""The processes that tests start: none inherits a thread, and one that hangs says where."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from forked import Forked, family, forked, server

STUCK = "import time\ndef {name}():\n    open({begun!r}, 'w').close()\n    time.sleep(600)\n"
"""Code with a function that does not end."""


def test_forks_come_from_a_process_with_one_thread(tmp_path: Path) -> None:
    done = forked(["--version"], tmp_path)
    assert done.code == 0 and done.out.read_text().startswith("realvr ") and not done.said
    assert len(os.listdir(f"/proc/{server(os.getpid()).process.pid}/task")) == 1


def test_exit_codes_and_signals_arrive(tmp_path: Path) -> None:
    many = [Forked(["sh", "-c", f"sleep 0.{code}; exit {code}"], tmp_path, what="program") for code in (3, 1, 2)]
    assert [each.wait() for each in many] == [3, 1, 2]
    process = Forked(["sleep", "600"], tmp_path, what="program")
    assert process.code is None
    process.signal(signal.SIGTERM)
    assert process.wait() == process.code == -signal.SIGTERM
    assert forked(["nonsense"], tmp_path).code == 2


def test_a_hang_prints_the_stacks_of_all_processes(tmp_path: Path) -> None:
    """Also of one that writes to a file of its own, in a group of its own, as a launcher starts them."""
    inner = STUCK.format(name="inner_place", begun=str(tmp_path / "inner")) + "inner_place()"
    outer = STUCK.format(name="outer_place", begun=str(tmp_path / "outer")) + (
        f"import subprocess, sys\nlog = open({str(tmp_path / 'log')!r}, 'w')\n"
        f"subprocess.Popen([sys.executable, '-c', {inner!r}], stderr=log, process_group=0)\nouter_place()"
    )
    process = Forked([sys.executable, "-c", outer], tmp_path, what="program")
    process.until(lambda: (tmp_path / "inner").exists() and (tmp_path / "outer").exists())
    both = family(process.pid)
    with pytest.raises(AssertionError, match="still running after 0.1 s") as found:
        process.wait(0.1)
    assert "in outer_place" in str(found.value) and "in inner_place" in str(found.value)
    assert len(both) == 2
    end = time.monotonic() + 20
    while any(alive(pid) for pid in both):
        assert time.monotonic() < end, both
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Not even a zombie counts, which nobody may have waited for."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"
