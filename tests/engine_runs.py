"""Runs of the real command line in several processes, under an engine, beside the same run in one process.

``realvr train KIND CONFIG --engine ENGINE`` on ``processes`` ranks of this machine (gloo). What a test asserts comes
from files that every run writes: ``metrics.jsonl``, ``engine.json`` and the model in ``final``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import stage_runs
from forked import Forked
from realvr.backbone import Backbone
from stage_runs import column, config_file, configure, lines, numbers, own_port

TIMEOUT = 240
DYING = Path(__file__).resolve().parent / "toys" / "dying_method.py"
NOTING = DYING.with_name("noting_method.py")
TWO_LANES = DYING.with_name("two_lanes.py")
LORA = {"rank": 4, "targets": ["q_proj", "v_proj", "down_proj"], "dropout": 0.0}
STAGE_TWO = {"max_new": 12, "optim": {"steps": 3, "microbatch": 1, "eps": 1e-4}, "log": {"parts_every": 9}}
"""Three steps with evidence, two microbatches on each of two ranks; norms of single terms in the first. Long enough for
an answer, so that some are right and some wrong.

AdamW divides a gradient by its size: one that is nothing but rounding would move a weight as far as any other. With the
usual ``eps`` one process in float32 ends 3 % of the way apart from one in float64; with this one 0.01 %."""
STAGE_ONE = {"pack_tokens": 256, "optim": STAGE_TWO["optim"], "log": {"parts_every": 9}}
PER_RANK = ("data/examples_per_rank", "data/rejected_per_rank")
"""Metrics that are means over ranks by their name."""


def engine_file(folder: Path, **content: Any) -> Path:
    """An engine file; ``type`` is its engine."""
    return config_file(content, folder / f"{content['type']}.yaml")


def environment(**more: str) -> dict[str, str]:
    """Of a process that trains: no GPU, one thread, this checkout."""
    path = os.pathsep.join(filter(None, [stage_runs.environment()["PYTHONPATH"], os.environ.get("PYTHONPATH", "")]))
    return stage_runs.environment() | {"PYTHONPATH": path} | more


def command(kind: str, config: Path, *flags: str, processes: int = 2, engine: str | Path = "ddp") -> list[str]:
    """The command line of a run on several processes."""
    several = ["--processes", str(processes)]
    return [sys.executable, "-m", "realvr", "train", kind, str(config), "--engine", str(engine), *several, *flags]


def torchrun(line: list[str]) -> list[str]:
    """The same command, started by torchrun instead of ``--processes``."""
    at = line.index("--processes")
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", line[at + 1], "--master-addr", "127.0.0.1"]
    return [line[0], *launcher, "--master-port", own_port(), *line[1:at], *line[at + 2 :]]


def finish(arguments: list[str], seconds: float = TIMEOUT, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end. One that hangs fails, with the stacks of all its processes. ``realvr`` itself is a fork
    of a process that has imported torch and transformers; the ranks that it starts are new processes."""
    started = Forked.of(arguments, environment=environment(**variables))
    code = started.wait(seconds)
    return subprocess.CompletedProcess(arguments, code, started.out.read_text(), started.said)


def ranks(commands: list[list[str]], folder: Path, homes: Sequence[Path] = (), code: int = 0) -> list[Forked]:
    """One process for each command, rank after rank, as torchrun would start them, without the time for imports. With
    ``homes`` each works in a folder of its own, as the only rank of its machine."""
    world, started = str(len(commands)), []
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": own_port(), "WORLD_SIZE": world}
    try:
        for rank, arguments in enumerate(commands):
            place = {"RANK": str(rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            if not homes:
                place |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": world}
            home, known = homes[rank] if homes else None, environment(**shared, **place)
            started.append(Forked(arguments, folder / f"rank-{rank}", environment=known, home=home))
        for process in started:
            assert process.wait(TIMEOUT) == code, "".join(each.said for each in started)
    finally:
        for process in started:
            process.kill()
    return started


def reference(kind: str, raw: dict[str, Any], *flags: str) -> Path:
    """Train under DDP on two ranks."""
    train(kind, raw, *flags)
    return Path(raw["run"]["out"])


def train(
    kind: str,
    raw: dict[str, Any],
    *flags: str,
    processes: int = 2,
    engine: str | Path = "ddp",
    code: int | None = 0,
    launcher: str = "",
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run it to its end. ``code``: the exit code that is expected (None: any). ``launcher``: realvr (``--processes``)
    or torchrun, where it matters who starts the ranks; they are forks otherwise, and the output that of the first."""
    out = Path(raw["run"]["out"])
    config = config_file(raw, out.with_name(f"{out.name}.config.yaml"))
    if processes > 1 and not launcher:
        assert code == 0 and not variables
        arguments = ["train", kind, str(config), "--engine", str(engine), *flags]
        first = ranks([arguments] * processes, out.with_name(f"{out.name}.ranks"))[0]
        return subprocess.CompletedProcess(arguments, code, first.out.read_text(), first.said)
    arguments = command(kind, config, *flags, processes=processes, engine=engine)
    done = finish(torchrun(arguments) if launcher == "torchrun" else arguments, **variables)
    assert code is None or done.returncode == code, done.stdout + done.stderr
    return done


def both(
    kind: str,
    model: Path,
    data: Path,
    folder: Path,
    /,
    *,
    engine: str | Path,
    processes: int = 2,
    launcher: str = "",
    **changes: Any,
) -> tuple[Path, Path]:
    """The same settings in one process (this one) and on several; the folders of both runs. Ranks of Stage 2 note what
    they had to do."""
    one, several = folder / "one", folder / "several"
    raw, flags = configure(kind, model, data, several, **changes), list[str]()
    if kind == "rl":
        raw, flags = raw | {"method": {"type": "noting-rl"}}, ["--plugin", str(NOTING)]
    train(kind, raw, *flags, processes=processes, engine=engine, launcher=launcher)
    stage_runs.run(kind, configure(kind, model, data, one, **changes))
    return one, several


def assert_uneven(out: Path, processes: int = 2, whole: bool = True) -> None:
    """That Stage 2 trained on rewards, and that ranks had unequal work: in some step one had wrong answers to pass
    through while another had none (``whole``: in all its microbatches), in some step the completions of one ended
    before those of another."""
    work = [lines(out.parent, f"{out.name}.work-{rank}.jsonl") for rank in range(processes)]
    steps = [[each["wrong"] for each in ranks] for ranks in zip(*work, strict=True)]
    if whole:
        steps = [[[sum(each)] for each in ranks] for ranks in steps]
    wrong = [counts for ranks in steps for counts in zip(*ranks, strict=True)]
    assert any(min(counts) == 0 < max(counts) for counts in wrong), wrong
    longest = [[max(each["tokens"]) for each in ranks] for ranks in zip(*work, strict=True)]
    assert any(min(counts) < max(counts) for counts in longest), longest
    found = lines(out)
    assert found[0]["grad_norm/policy"] > 1e-3 and max(column(found, "evidence/has_wrong_answer")) > 0


def assert_rewarded(out: Path) -> None:
    """That Stage 2 had something to learn from: rewards that differ within a group, and wrong answers."""
    rolled = [line for line in lines(out) if "reward" in line]  # later updates on the same rollouts have none
    assert min(column(rolled, "groups/without_variance")) < 1, rolled
    assert max(column(lines(out), "evidence/has_wrong_answer")) > 0


def checkpoints(out: Path) -> list[str]:
    """Whole checkpoints of a run."""
    return sorted(path.name for path in (out / "checkpoints").glob("step-*"))


def error_line(text: str) -> str:
    """The one line about an error."""
    found = [line for line in text.splitlines() if line.startswith("realvr: error:")]
    assert len(found) == 1, text
    return found[0]


def facts(out: Path) -> list[dict[str, Any]]:
    """What each rank says of itself in ``engine.json``."""
    return json.loads((out / "engine.json").read_text())["ranks"]


def assert_ranks(out: Path, processes: int, distributed_type: str, wrapped: str) -> list[dict[str, Any]]:
    """That the engine really ran, on that many distinct ranks; the facts of each."""
    found = facts(out)
    assert [each["rank"] for each in found] == list(range(processes))
    assert {each["world"] for each in found} == {processes}
    assert {each["distributed_type"] for each in found} == {distributed_type}
    assert {each["wrapped"] for each in found} == {wrapped}
    return found


def assert_same_steps(one: Path, several: Path, rel: float = 1e-4, abs: float = 1e-6, without: tuple[str, ...] = ()):
    """Every recorded number of every step: losses, norms, rewards, evidence."""
    first, second = numbers(lines(one)), numbers(lines(several))
    assert len(first) == len(second) > 0
    for ours, theirs in zip(first, second, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            if value is None:  # not finite
                assert theirs[name] is None, (name, ours["step"])
            elif name not in without:
                assert theirs[name] == pytest.approx(value, rel=rel, abs=abs), (name, ours["step"])


def final_weights(out: Path) -> dict[str, torch.Tensor]:
    """The exported model, as transformers reads it."""
    return dict(Backbone.load(out / "final", dtype="float64").model.state_dict())


def assert_same_model(one: Path, several: Path, start: Path, tolerance: float = 1e-4) -> None:
    """Both runs end in the same model: the difference is at most ``tolerance`` of what training changed."""
    first, second = final_weights(one), final_weights(several)
    before = Backbone.load(start, dtype="float64").model.state_dict()
    assert first.keys() == second.keys()
    apart = max(float((first[name] - second[name]).abs().max()) for name in first)
    moved = max(float((first[name] - before[name]).abs().max()) for name in first)
    assert moved > 0 and apart <= tolerance * moved, (apart, moved)
