"""Train the mini models: pictures, base, Stage 1 and its controls, side by side on one GPU.

    python scripts/mini_train.py --list                      # every job, and which are done
    python scripts/mini_train.py mini-s0                     # one of them, with what it needs
    python scripts/mini_train.py 'mini-s*' 'direct-s*' --parallel 8 --limit 560
    python scripts/mini_train.py 'family-*'                  # the other four families, trails only

A job is a command of ``realvr``; everything goes under ``runs/mini``, one folder and one log a job. What is unfinished
after ``--limit`` seconds stops with a checkpoint, and another call continues it.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from realvr.world.questions import EASY_EXTRA_KINDS, EASY_KINDS

ROOT = Path("runs/mini")
KINDS = (*EASY_KINDS, *EASY_EXTRA_KINDS)
FAMILIES = ("gemma3", "qwen2.5-vl", "qwen3-vl", "qwen3-vl-moe")
SEEDS = range(4)
"""Seed 0 chooses; the others report."""


@dataclass
class Job:
    """A command, the jobs that must be done before it, and the path that exists once it is done."""

    name: str
    command: list[str]
    done: Path
    after: tuple[str, ...] = ()
    processes: int = 1
    train: Path | None = None
    """Folder of a training, whose last step is shown."""


def _draw(name: str, split: str, count: int, *options: str, seed: int = 0) -> Job:
    out = ROOT / "world" / name
    command = ["world", "make", str(out), "--split", split, "--count", str(count), "--seed", str(seed)]
    return Job(f"draw-{name}", [*command, "--format", "jsonl", "--workers", "4", *options], out / "done", processes=4)


def _train(name: str, stage: str, config: str, model: str, after: tuple[str, ...], *options: str) -> Job:
    out = ROOT / name
    command = ["train", stage, f"configs/mini/{config}.yaml", "--model.path", model, "--run.out", str(out), *options]
    return Job(name, command, out / "final" / "config.json", after, train=out)


def jobs() -> dict[str, Job]:
    """Every job by name."""
    kinds = ("--kinds", *KINDS)
    lessons = ("--kinds", "points", "where", "at", "step", "step_at")  # single looks, no whole trail
    drawn = [
        _draw("lessons", "trails-lessons", 40_000, *lessons),
        _draw("trails", "trails-train", 36_000),
        _draw("trails-free", "trails-train", 4_000, "--answers", "free", seed=1),
        _draw("trails-short", "trails-train", 12_000, "--arrows", "1-4"),
        _draw("curriculum", "curriculum", 8_000, *kinds),
        _draw("practice", "practice", 5_000),
        _draw("sequels", "sequels", 3_500, *kinds),
        _draw("boxes", "train-boxes", 5_000, "--size", "48", "--withheld", "exclude", *kinds),
        _draw("world-curriculum", "curriculum", 40_000, *kinds),  # for the base without trails
        _draw("world-practice", "practice", 16_000),
        _draw("world-sequels", "sequels", 8_000, *kinds),
        _draw("world-dialogues", "dialogues", 5_000, *kinds),
        _draw("held-out", "trails", 350, seed=100),  # for the curves alone
    ]
    world = tuple(f"draw-world-{name}" for name in ("curriculum", "practice", "sequels", "dialogues"))
    looks, rest = ("draw-lessons", "draw-curriculum"), ("draw-practice", "draw-sequels")
    base = str(ROOT / "base" / "final")
    new = ["new", str(ROOT / "new"), "--family", "internvl3", "--size", "mini", "--seed", "0"]
    more = [
        "--run.seed",
        "1",
        "--data.seed",
        "1",
        "--optim.steps",
        "2400",
        "--optim.lr",
        "5e-4",
        "--optim.warmup",
        "50",
        "--caption_ratio",
        "0.1",
    ]
    made = [
        *drawn,
        Job("new", new, ROOT / "new" / "config.json"),
        _train("world-base-1", "base", "base-world", str(ROOT / "new"), ("new", *world)),
        _train("world-base", "base", "base-world", str(ROOT / "world-base-1" / "final"), ("world-base-1",), *more),
        _train("base", "base", "base", str(ROOT / "world-base" / "final"), ("world-base", *looks, *rest)),
    ]
    stage1 = ("base", "draw-trails", "draw-trails-free", "draw-boxes", *rest, "draw-held-out")
    for seed in SEEDS:
        seeded = ("--run.seed", str(seed), "--data.seed", str(seed))
        made += [
            _train(f"mini-s{seed}", "sft", "sft", base, stage1, *seeded),
            _train(f"direct-s{seed}", "sft", "sft", base, stage1, "--method", "direct-sft", *seeded),
            _train(f"short-s{seed}", "sft", "sft-short", base, (*stage1, "draw-trails-short"), *seeded),
        ]
    fresh = ("--run.seed", "1", "--data.seed", "1")
    made += [
        _train("direct-aux-s1", "sft", "sft", base, stage1, "--method", "direct-aux", *fresh),
        _train(
            "direct-longer-s1", "sft", "sft", base, stage1, "--method", "direct-sft", "--optim.steps", "4800", *fresh
        ),
    ]
    for family in FAMILIES:
        out = ROOT / f"family-{family}-new"
        new = ["new", str(out), "--family", family, "--size", "mini", "--seed", "0"]
        made += [
            Job(f"family-{family}-new", new, out / "config.json"),
            _train(f"family-{family}-base", "base", "base-trails", str(out), (f"family-{family}-new", "draw-lessons")),
            _train(
                f"family-{family}",
                "sft",
                "sft-trails",
                str(ROOT / f"family-{family}-base" / "final"),
                (f"family-{family}-base", "draw-trails", "draw-lessons", "draw-held-out"),
            ),
        ]
    return {job.name: job for job in made}


def trial(job: Job) -> Job:
    """The same with a hundredth of the pictures and four steps."""
    command = list(job.command)
    if "--count" in command:
        place = command.index("--count") + 1
        command[place] = str(max(int(command[place]) // 100, 40))
    if command[0] == "train":
        command += ["--optim.steps", "4", "--optim.batch", "4", "--optim.microbatch", "4", "--optim.warmup", "2"]
        command += ["--validation.n", "6"] if command[1] == "sft" else []
    return replace(job, command=command)


def needed(every: dict[str, Job], patterns: list[str]) -> list[Job]:
    """The jobs that match a pattern, and all that those not done wait for, in the order of the table."""
    wanted = {name for name in every for pattern in patterns if fnmatch.fnmatch(name, pattern)}
    for pattern in patterns:
        if not fnmatch.filter(every, pattern):
            sys.exit(f"no job matches {pattern!r}; --list shows them")
    waiting = list(wanted)
    while waiting:
        job = every[waiting.pop()]
        for name in job.after if not job.done.exists() else ():
            if name not in wanted:
                wanted.add(name)
                waiting.append(name)
    return [job for job in every.values() if job.name in wanted]


def _start(job: Job, python: str) -> subprocess.Popen[bytes]:
    if job.command[0] in ("world", "new"):
        shutil.rmtree(job.done.parent, ignore_errors=True)  # one that was cut off
    log = ROOT / "logs" / f"{job.name}.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with log.open("ab") as file:
        command = [python, "-m", "realvr", *job.command]
        return subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)


def _state(job: Job) -> str:
    """Last step of a training, its loss, and the last validation."""
    path = job.train / "metrics.jsonl" if job.train else None
    if path is None or not path.exists():
        return ""
    row: dict[str, float] = {}
    for line in path.read_text().splitlines()[-40:]:
        try:
            row |= json.loads(line)
        except ValueError:
            continue  # being written
    shown = ("step", "loss", "latents/cos_first", "latents/cos_target", "validation/accuracy", "seconds")
    return " ".join(f"{key.split('/')[-1]} {row[key]:.4g}" for key in shown if isinstance(row.get(key), (int, float)))


def run(todo: list[Job], parallel: int, limit: float, python: str) -> int:
    """Do the jobs; returns how many failed."""
    begun, shown, failed = time.monotonic(), 0.0, []
    running: dict[str, subprocess.Popen[bytes]] = {}
    left = {job.name: job for job in todo if not job.done.exists()}
    by_name = dict(left)
    while (left or running) and time.monotonic() - begun < limit:
        for name, process in list(running.items()):
            if process.poll() is None:
                continue
            del running[name]
            job = by_name[name]
            if process.returncode == 0 and job.command[0] == "world":
                job.done.touch()
            seconds = time.monotonic() - begun
            print(f"{seconds:5.0f} s  {name}: {'done' if job.done.exists() else 'FAILED'}  {_state(job)}", flush=True)
            if not job.done.exists():
                failed.append(name)
                left = {k: v for k, v in left.items() if name not in _all_before(v, by_name)}
        busy = sum(by_name[name].processes for name in running)
        for name, job in list(left.items()):
            if busy < parallel and not any(before in left or before in running for before in job.after):
                running[name] = _start(left.pop(name), python)
                busy += job.processes
        if time.monotonic() - shown > 30:
            shown = time.monotonic()
            for name in running:
                print(f"{shown - begun:5.0f} s  {name}: {_state(by_name[name])}", flush=True)
        time.sleep(0.5)
    for process in running.values():
        os.killpg(process.pid, signal.SIGINT)
    for name, process in running.items():
        process.wait()
        print(f"stopped with a checkpoint: {name}  {_state(by_name[name])}", flush=True)
    for name in failed:
        print(f"== {name} failed:\n{(ROOT / 'logs' / f'{name}.txt').read_text()[-1500:]}")
    print(f"{time.monotonic() - begun:.0f} s; not begun: {', '.join(left) or 'none'}")
    return len(failed)


def _all_before(job: Job, every: dict[str, Job]) -> set[str]:
    found, waiting = set(), list(job.after)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += every[name].after if name in every else ()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="*", default=["mini-s0", "direct-s0"], help="names or patterns")
    parser.add_argument("--parallel", type=int, default=12, help="processes at the same time")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds")
    parser.add_argument("--trial", action="store_true", help="a few pictures and steps, to see that everything runs")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    every = jobs()
    if options.trial:
        every = {name: trial(job) for name, job in every.items()}
    if options.list:
        for job in every.values():
            print(f"{'done' if job.done.exists() else '-':5} {job.name}: realvr {' '.join(job.command)}")
        return
    sys.exit(1 if run(needed(every, options.jobs), options.parallel, options.limit, sys.executable) else 0)


if __name__ == "__main__":
    main()
