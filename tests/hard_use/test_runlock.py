"""One run folder, one process: live, dead, stale and foreign owners, for every verb, in real processes."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from forked import Forked, assert_one_line, forked
from realvr.errors import UserError
from realvr.runs import lock as runlock
from realvr.runs.lock import Owner, hold
from verbs import Place

IMPATIENT = {"realvr.runs.lock.PATIENCE": 0.4}
VERBS = ("base", "sft", "rl", "eval", "counterfactual", "exchange")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runlock, "PATIENCE", IMPATIENT["realvr.runs.lock.PATIENCE"])


@pytest.mark.parametrize("name", VERBS)
def test_two_processes_and_a_kill(name: str, place: Place, tmp_path: Path) -> None:
    """The second is kept out while the first lives; after a kill -9 the third goes on with what the first left."""
    verb, out = place.verbs[name], tmp_path / "run"
    first = Forked(verb.args(out), tmp_path)
    try:
        os.setpriority(os.PRIO_PROCESS, first.pid, 19)  # on a busy machine it must not end before it is stopped
        first.until(lambda: verb.written(out) >= 1)
        first.stop()
        before = verb.written(out)
        second = forked(verb.args(out), tmp_path, constants=IMPATIENT)
        assert_one_line(second, str(out), f"process {first.pid} on this machine", "is writing there")
        assert verb.written(out) == before
    finally:
        first.kill()
    third = forked(verb.args(out), tmp_path)
    assert third.code == 0, third.said
    assert f"took over from realvr {'train ' * (name in VERBS[:3])}{name} (process {first.pid}" in third.said
    keys = [verb.key(record) for record in verb.records(out)]
    assert len(keys) > before and len(keys) == len(set(keys))
    assert not list(out.glob(".lock*"))  # released


def test_several_checkpoints_are_one_evaluation(place: Place, tmp_path: Path) -> None:
    """The folder above those of the checkpoints is held too: its summary is written last."""
    args = place.verbs["eval"].args(tmp_path / "run")
    args.insert(2, "mini")
    with hold(tmp_path / "run", "eval"):
        assert_one_line(forked(args, tmp_path, constants=IMPATIENT), "is writing there")


def test_a_demo_keeps_another_out_and_is_taken_over(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    first = Forked(["demo", "--quick", "--out", out], tmp_path)
    try:
        first.until(lambda: (out / "logs").exists())
        second = forked(["demo", "--quick", "--out", out], tmp_path, constants=IMPATIENT)
        assert_one_line(second, f"demo (process {first.pid}")
    finally:
        first.kill()
    third = Forked(["demo", "--quick", "--out", out], tmp_path)
    try:
        third.until(lambda: "took over" in third.said and (out / ".lock").exists())
        third.signal(signal.SIGTERM)
        assert third.wait() == 130 and not (out / ".lock").exists()
    finally:
        third.kill()


def test_a_split_of_the_world_is_made_once(tmp_path: Path) -> None:
    args = ["world", "make", tmp_path / "world", "--split", "train-boxes", "--count", "4", "--size", "48"]
    with hold(tmp_path / "world" / "train-boxes", "world make"):
        second = forked([*args, "--workers", "1"], tmp_path, constants=IMPATIENT)
        assert_one_line(second, "world make", "is writing there")
    assert not (tmp_path / "world").exists()  # what was made for the lock alone is gone
    assert forked([*args, "--workers", "1"], tmp_path).code == 0


# ---------------------------------------------------------------------- owners


def other(folder: Path, **changes: object) -> Owner:
    """A lock that another process left."""
    folder.mkdir(exist_ok=True)
    owner = dataclasses.replace(Owner.this_process("train rl"), token="other", **changes)  # type: ignore[arg-type]
    (folder / runlock.NAME).write_text(json.dumps(dataclasses.asdict(owner)))
    return owner


def aged(folder: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(folder / runlock.NAME, (then, then))


def test_a_process_id_that_was_given_to_another_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other(tmp_path, started="1")  # this process's id, but of one that was started at another time
    with hold(tmp_path, "eval"):
        assert Owner.read(tmp_path / runlock.NAME) is not None
    assert "took over from realvr train rl" in capsys.readouterr().err
    other(tmp_path)  # the very same process: alive
    with pytest.raises(UserError, match="is writing there"), hold(tmp_path, "eval"):
        pass


def test_a_zombie_is_dead(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"], stdout=subprocess.PIPE)
    started = runlock._start_of(child.pid)
    assert child.stdout is not None and child.stdout.read() == b""
    end = time.monotonic() + 20
    while runlock._start_of(child.pid) is not None:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert os.path.exists(f"/proc/{child.pid}") and started
    child.wait()


def test_a_living_process_keeps_its_folder_however_long_it_was_silent(tmp_path: Path) -> None:
    """Suspended, or a clock that jumped: its process id says that it lives."""
    other(tmp_path)
    aged(tmp_path, 100 * runlock.STALE)
    for take_over in (False, True):
        with pytest.raises(UserError, match="wait for it or end it"), hold(tmp_path, "eval", take_over):
            pass


def test_an_owner_on_another_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    owner = other(tmp_path, machine="elsewhere", host="node7", pid=4)
    with pytest.raises(UserError, match=r"process 4 on node7\) is writing there.*add --take-over"), hold(tmp_path, "x"):
        pass
    assert Owner.read(tmp_path / runlock.NAME) == owner
    with hold(tmp_path, "eval", take_over=True):
        pass
    assert "node7), as --take-over says" in capsys.readouterr().err
    other(tmp_path, machine="elsewhere", host="node7", pid=4)
    aged(tmp_path, runlock.STALE + 60)
    with hold(tmp_path, "eval"):
        pass
    assert "no sign of life for 6 minutes" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": "x"}', "[" * 50_000, "\x00\xff", '{"pid": -1}'])
def test_a_lock_that_says_nothing_counts_by_its_age(content: str, tmp_path: Path) -> None:
    """Such as the empty one that earlier releases left behind in every folder."""
    (tmp_path / runlock.NAME).write_text(content)
    with pytest.raises(UserError, match="left no name"), hold(tmp_path, "eval"):
        pass
    aged(tmp_path, runlock.STALE + 60)
    with hold(tmp_path, "eval"):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("nowhere")])
def test_something_that_is_no_lock_is_refused_at_once(make: Callable[[Path], None], tmp_path: Path) -> None:
    """Not waited for: nobody will ever release it."""
    make(tmp_path / runlock.NAME)
    with pytest.raises(UserError, match=r"\.lock: not a file.*remove it"), hold(tmp_path, "eval"):
        pass


def test_the_owner_gives_signs_of_life_and_ends_when_the_folder_is_taken(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom realvr.runs import lock as runlock\nrunlock.BEAT = 0.05\n"
        f"with runlock.hold({str(tmp_path)!r}, 'train rl'):\n"
        "    print('held', flush=True)\n    time.sleep(60)"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    child = subprocess.Popen([sys.executable, "-c", code], **pipes)  # type: ignore[call-overload]
    try:
        assert child.stdout.readline() == "held\n"
        aged(tmp_path, 1000)
        end = time.monotonic() + 20
        while time.time() - (tmp_path / runlock.NAME).stat().st_mtime > 500:
            assert time.monotonic() < end, "no sign of life"
            time.sleep(0.02)
        other(tmp_path, host="node7", machine="elsewhere")
        assert child.wait(20) == 2 and "was taken over by realvr train rl" in child.stderr.read()
        assert Owner.read(tmp_path / runlock.NAME).host == "node7"  # type: ignore[union-attr]
    finally:
        child.kill()
        child.communicate()


def test_of_many_that_take_over_at_once_one_does(tmp_path: Path) -> None:
    """Real processes on one stale lock, again and again: never two owners."""
    code = (
        "import sys, time\nfrom realvr.runs import lock as runlock\nfrom realvr.errors import UserError\n"
        "runlock.PATIENCE = 0.1\n"
        "try:\n"
        f"    with runlock.hold({str(tmp_path)!r}, 'train rl'):\n"
        "        print('held', flush=True)\n        time.sleep(1.5)\n"
        "except UserError:\n    pass"
    )
    other(tmp_path, started="1")
    children = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(6)]
    assert sum(b"held" in child.communicate()[0] for child in children) == 1


def test_a_child_of_the_owner_does_not_release(tmp_path: Path) -> None:
    with hold(tmp_path, "eval"):
        with hold(tmp_path, "eval"):  # a verb inside a verb
            pass
        assert (tmp_path / runlock.NAME).exists()
        pid = os.fork()
        if not pid:
            runlock._held[tmp_path.resolve()].release()
            os._exit(0)
        os.waitpid(pid, 0)
        assert (tmp_path / runlock.NAME).exists()
    assert not list(tmp_path.iterdir())
