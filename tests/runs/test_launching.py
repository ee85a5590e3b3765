"""Several processes of one command: which of them is named when one fails, and who gets a signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from realvr.runs.launching import LOST, ProcessFailed, held_port, launch

RANK = "import os, signal, sys, time; rank = int(os.environ['RANK']); "
SOURCE = str(Path(__file__).resolve().parents[2] / "src")


def fails(code: str, capfd: pytest.CaptureFixture[str], processes: int = 2) -> tuple[int, str]:
    """Exit code and standard error of processes of which one fails."""
    with pytest.raises(ProcessFailed) as failure:
        launch(["-c", RANK + code], processes, go_on=lambda: "go on")
    return failure.value.code, capfd.readouterr().err


def test_every_process_has_a_number_and_the_first_one_talks(capfd: pytest.CaptureFixture[str]) -> None:
    told = "print(rank, os.environ['LOCAL_RANK'], os.environ['WORLD_SIZE'], file=sys.stderr); print('said', rank)"
    assert launch(["-c", RANK + told], 3) == 0
    found = capfd.readouterr()
    assert found.out == "said 0\n" and found.err == "0 0 3\n"


def test_the_port_of_the_meeting_is_taken_by_nobody_else(capfd: pytest.CaptureFixture[str]) -> None:
    """Before the processes have come to listen there: it is refused to others, and torch can still take it."""
    code, text = fails("import socket; socket.socket().bind(('', int(os.environ['MASTER_PORT'])))", capfd)
    assert code == 1 and "Address already in use" in text
    with held_port() as port:
        TCPStore("127.0.0.1", port, 1, is_master=True).set("key", "value")
        assert TCPStore("127.0.0.1", port, 1, is_master=True).port == port  # once more, as ranks that start again


def test_a_killed_process_is_named_and_the_others_end(capfd: pytest.CaptureFixture[str]) -> None:
    """Also where another one feels it first, and says so with its exit code."""
    began = time.monotonic()
    code, text = fails(
        "rank == 1 and os.kill(os.getpid(), signal.SIGKILL); rank == 0 and (time.sleep(0.2), os._exit(75)); "
        "time.sleep(60)",
        capfd,
        3,
    )
    assert code == 1 and text == "realvr: error: rank 1 of 3 was ended by SIGKILL; go on\n"
    assert time.monotonic() - began < 10


def test_a_process_that_holds_on_is_killed(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realvr.runs.launching.ENDING", 0.5)
    ignoring = "signal.signal(signal.SIGTERM, signal.SIG_IGN); rank and (time.sleep(0.5), os._exit(3)); time.sleep(60)"
    code, text = fails("rank == 1 and print('why', file=sys.stderr); " + ignoring, capfd)
    assert code == 3 and text == "why\nrealvr: error: rank 1 of 2 ended with exit code 3, see above; go on\n"


def test_what_the_first_process_said_is_not_said_again(capfd: pytest.CaptureFixture[str]) -> None:
    code, text = fails("print(f'realvr: error: no file ({rank})', file=sys.stderr); sys.exit(2)", capfd)
    assert code == 2 and text == "realvr: error: no file (0)\n"


def test_a_process_that_takes_its_time_to_fail_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    """Such as one that prints a traceback while the others have lost it already."""
    slow = f"rank == 0 and os._exit({LOST}); time.sleep(1.5); print('why', file=sys.stderr); os._exit(1)"
    code, text = fails(slow, capfd)
    assert code == 1 and text == "why\nrealvr: error: rank 1 of 2 ended with exit code 1, see above; go on\n"


def test_processes_that_lost_each_other(capfd: pytest.CaptureFixture[str]) -> None:
    assert (
        fails(f"os._exit({LOST})", capfd)[1] == "realvr: error: rank 0 of 2 lost the connection to the others; go on\n"
    )


LAUNCHER = """
import sys
from realvr.runs.launching import launch
sys.exit(launch(["-c", sys.argv[1]], 2, forward=True))
"""
STOPS = (
    RANK
    + """
def stop(number, frame):
    open(f'FOLDER/stopped-{rank}-{number}', 'w').close()
    sys.exit(130)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, stop)
open(f'FOLDER/ready-{rank}', 'w').close()
time.sleep(60)
"""
)


def begun(script: str, folder: Path) -> subprocess.Popen[str]:
    """A launcher with two ranks that are ready."""
    script = script.replace("FOLDER", str(folder))
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, script], env=os.environ | {"PYTHONPATH": SOURCE}, text=True
    )
    wait_for(lambda: len(list(folder.glob("ready-*"))) == 2)
    return process


def wait_for(ready: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_every_process(number: signal.Signals, tmp_path: Path) -> None:
    process = begun(STOPS, tmp_path)
    process.send_signal(number)
    assert process.wait(30) == 130
    assert sorted(path.name for path in tmp_path.glob("stopped-*")) == [f"stopped-{rank}-{number}" for rank in (0, 1)]


def test_processes_end_with_a_launcher_that_was_killed(tmp_path: Path) -> None:
    script = (
        RANK
        + """
from realvr.runs.launching import end_with_launcher, launched
assert launched()
end_with_launcher()
open(f'FOLDER/ready-{rank}-{os.getpid()}', 'w').close()
time.sleep(60)
"""
    ).replace("'FOLDER/", f"'{tmp_path}/")
    process = begun(script, tmp_path)
    ranks = [int(path.name.split("-")[2]) for path in tmp_path.glob("ready-*")]
    process.kill()
    process.wait()
    wait_for(lambda: not any(Path(f"/proc/{rank}/cmdline").exists() for rank in ranks), 10)
