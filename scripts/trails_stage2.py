"""Stage 2 on longer trails than Stage 1 has seen: several arms and seeds side by side on one GPU, and what they gain.

    python scripts/trails_stage2.py runs/trails-stage2 --model mini-short --seeds 1 2 3
    python scripts/trails_stage2.py runs/trails-stage2 --arms realvr uniform "realvr-eta-1=--method realvr --eta 1"

Every arm has the same prompts in the same order for a seed (settings ``mini/rl-trails``; ``data.seed`` is the seed) and
is asked the same fresh questions, greedily, with its own latents. A call that was stopped, or that ran into
``--limit``, goes on where it was. OUT/summary.json and summary.md hold accuracy by number of arrows, seeds pooled, and
differences between arms, paired over seeds and questions; intervals draw both again. ``--only-summary`` trains nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from realvr.evaluation.records import PREDICTIONS, read_predictions
from realvr.runs.files import write_atomically
from realvr.training.records import load_run

CONFIG = "mini/rl-trails"
START = "stage-1"
"""The model that every arm starts from."""
ARMS: dict[str, str] = {
    "lvr-rl": "--method lvr-rl",
    "realvr": "--method realvr",
    "uniform": "--method uniform",
    "realvr-normalised": "--method realvr --credit normalised",
    "realvr-lambda-1-normalised": "--method realvr --credit normalised --lambda-ev 1",
    "uniform-lambda-1": "--method uniform --lambda-ev 1",
    "realvr-per-slot": "--method realvr --evidence-boxes per-slot",
    "uniform-per-slot": "--method uniform --evidence-boxes per-slot",
    "realvr-all-cells": "--method realvr --evidence-boxes all",
}
"""Flags of ``realvr train rl`` by arm."""
USUAL = ("lvr-rl", "realvr", "uniform", "realvr-normalised")
WATCHED = ("reward", "reward/accuracy", "evidence/credit_mass", "evidence/readout_mass", "evidence/weight_spread")
RESAMPLES = 2000


@dataclass(frozen=True)
class Job:
    """One arm with one seed; the start has no seed and is only asked."""

    arm: str
    flags: tuple[str, ...]
    seed: int | None
    folder: Path

    @property
    def name(self) -> str:
        return self.arm if self.seed is None else f"{self.arm}/{self.seed}"


class Runner:
    """Commands of realvr until a moment, after which what runs is interrupted and nothing is begun."""

    def __init__(self, limit: float) -> None:
        self.end = time.monotonic() + limit
        self.environment = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **os.environ}

    def __call__(self, log: Path, *words: object) -> bool:
        """Whether the command ended well; what it prints is added to ``log``."""
        left = self.end - time.monotonic()
        if left <= 0:
            return False
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "realvr", *map(str, words)]
        with log.open("a", encoding="utf-8") as target:
            target.write(f"$ {shlex.join(command)}\n")
            target.flush()
            process = subprocess.Popen(command, stdout=target, stderr=subprocess.STDOUT, env=self.environment)
            try:
                return process.wait(left) == 0
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)  # training then writes a checkpoint, an evaluation keeps its answers
                process.wait()
                return False


# ---------------------------------------------------------------------- training and asking


def draw(run: Runner, out: Path, options: argparse.Namespace) -> dict[str, Path]:
    """Rows to train on and fresh questions, made once."""
    found = {}
    counts = {"trails-train": (options.rows, options.data_seed), "trails": (options.questions, options.test_seed)}
    for split, (count, seed) in counts.items():
        words = ["--split", split, "--count", count, "--seed", seed, "--arrows", options.arrows, "--format", "jsonl"]
        if not run(out / "log" / "world.txt", "world", "make", out / "world", *words, "--workers", options.jobs):
            sys.exit(f"{out / 'log' / 'world.txt'}: the pictures could not be drawn")
        found[split] = out / "world" / split / "samples.jsonl"
    return found


def do(run: Runner, job: Job, data: Mapping[str, Path], options: argparse.Namespace) -> bool:
    """Train where that is not done, then ask."""
    log = options.out / "log" / f"{job.name.replace('/', '-')}.txt"
    model: object = options.model
    if job.seed is not None:
        model = job.folder / "train" / "final"
        words = ["--model.path", options.model, "--data.sources.0.path", data["trails-train"], "--run.seed", job.seed]
        words += ["--data.seed", job.seed, "--run.out", job.folder / "train", *options.train, *job.flags]
        if not Path(model).is_dir() and not run(log, "train", "rl", options.config, *words):
            return False
    asked = ["--bench", f"trails={data['trails']}", "--no-ablation", "--max-new", 24, "--batch", options.batch]
    asked += ["--device", options.device] if options.device else []
    done = job.folder / "eval"
    return (done / "summary.json").is_file() or run(log, "eval", model, *asked, "--out", done)


# ---------------------------------------------------------------------- what came of it


def answers(jobs: Sequence[Job]) -> tuple[dict[str, dict[int | None, dict[str, bool]]], dict[str, int], dict[str, Any]]:
    """Right or wrong by arm, seed and question; arrows of each question; readable replies by arm, in percent."""
    right: dict[str, dict[int | None, dict[str, bool]]] = {}
    arrows: dict[str, int] = {}
    read: dict[str, list[bool]] = {}
    for job in jobs:
        path = job.folder / "eval" / PREDICTIONS
        if not (job.folder / "eval" / "summary.json").is_file():
            continue
        rows = list(read_predictions(path))
        arrows |= {row.question: int(row.tags["arrows"]) for row in rows}
        right.setdefault(job.arm, {})[job.seed] = {row.question: row.correct for row in rows}
        read.setdefault(job.arm, []).extend(row.extracted is not None for row in rows)
    return right, arrows, {arm: 100 * sum(rows) / len(rows) for arm, rows in read.items()}


def interval(values_SQ: np.ndarray, generator: np.random.Generator) -> list[float]:
    """95 % of the mean when seeds (rows) and questions (columns) are both drawn again."""
    seeds, questions = values_SQ.shape
    drawn_RS = generator.multinomial(seeds, [1 / seeds] * seeds, RESAMPLES)
    drawn_RQ = generator.multinomial(questions, [1 / questions] * questions, RESAMPLES)
    means_R = ((drawn_RS @ values_SQ) * drawn_RQ).sum(1) / (seeds * questions)
    return [float(value) for value in np.percentile(means_R, [2.5, 97.5])]


def cell(values_SQ: np.ndarray) -> dict[str, Any]:
    """Mean of values in percent, with its interval."""
    ci = interval(100 * values_SQ, np.random.default_rng(0))
    return {"value": float(100 * values_SQ.mean()), "ci": ci, "seeds": values_SQ.shape[0], "n": values_SQ.shape[1]}


def summarise(
    right: Mapping[str, Mapping[int | None, Mapping[str, bool]]],
    arrows: Mapping[str, int],
    taught: int,
    pairs: Sequence[tuple[str, str]],
) -> dict[str, Any]:
    """Accuracy of each arm, and differences of pairs: by number of arrows, up to ``taught`` of them, and beyond."""
    questions = sorted(arrows)
    numbers = sorted(set(arrows.values()))
    parts = {str(number): [q for q in questions if arrows[q] == number] for number in numbers}
    parts |= {
        "short": [q for q in questions if arrows[q] <= taught],
        "long": [q for q in questions if arrows[q] > taught],
    }
    parts["all"] = questions
    parts = {name: part for name, part in parts.items() if part}

    def values(arm: str, seeds: Sequence[int | None], part: Sequence[str]) -> np.ndarray:
        own = right[arm]
        return np.array([[own[seed if seed in own else None][q] for q in part] for seed in seeds], dtype=float)

    arms = {arm: {name: cell(values(arm, list(right[arm]), part)) for name, part in parts.items()} for arm in right}
    differences = {}
    for first, second in pairs:
        if first not in right or second not in right:
            continue
        # The start has no seed: it stands beside every seed of the other.
        own = [set(right[arm]) for arm in (first, second)]
        seeds = sorted((own[0] | own[1]) - {None} if None in own[0] | own[1] else own[0] & own[1], key=str)
        if seeds:
            differences[f"{first} - {second}"] = {
                name: cell(values(first, seeds, part) - values(second, seeds, part)) for name, part in parts.items()
            }
    return {"taught": taught, "arms": arms, "differences": differences}


def recorded(jobs: Sequence[Job]) -> dict[str, dict[str, Any]]:
    """First and last tenth of what the trainings of each arm recorded, over its seeds."""
    found: dict[str, dict[str, Any]] = {}
    for arm in dict.fromkeys(job.arm for job in jobs if job.seed is not None):
        folders = [job.folder / "train" for job in jobs if job.arm == arm]
        runs = [load_run(folder).steps for folder in folders if (folder / "metrics.jsonl").is_file()]
        for name in WATCHED:
            ends = []
            for steps in runs:
                values = [value for step in steps if (value := step.get(name)) is not None]
                tenth = max(1, len(values) // 10)
                ends += [(float(np.mean(values[:tenth])), float(np.mean(values[-tenth:])))] if values else []
            if ends:
                first, last = np.mean(ends, axis=0)
                found.setdefault(arm, {})[name] = {"first": float(first), "last": float(last)}
    return found


def markdown(summary: Mapping[str, Any]) -> str:
    """The tables, for a page."""
    arms, taught = summary["arms"], summary["taught"]
    columns = list(next(iter(arms.values()))) if arms else []
    titles = [{"short": f"1–{taught}", "long": f"over {taught}"}.get(name, name) for name in columns]
    lines = ["| % right by number of arrows | seeds | " + " | ".join(titles) + " |", "|---" * (len(columns) + 2) + "|"]
    for arm, cells in arms.items():
        shown = [f"{cells[name]['value']:.1f}" for name in columns]
        lines.append(f"| {arm} | {cells['all']['seeds']} | " + " | ".join(shown) + " |")
    lines += ["", "| difference in points [95 %] | seeds | " + " | ".join(titles[-3:]) + " |", "|---" * 5 + "|"]
    for pair, cells in summary["differences"].items():
        shown = [f"{c['value']:+.1f} [{c['ci'][0]:+.1f}, {c['ci'][1]:+.1f}]" for c in (cells[n] for n in columns[-3:])]
        lines.append(f"| {pair} | {cells['all']['seeds']} | " + " | ".join(shown) + " |")
    names = {name: None for found in summary["recorded"].values() for name in found}
    if names:
        lines += [
            "",
            "| first → last tenth of the training | " + " | ".join(names) + " |",
            "|---" * (len(names) + 1) + "|",
        ]
        for arm, found in summary["recorded"].items():
            shown = [f"{c['first']:.4g} → {c['last']:.4g}" if (c := found.get(name)) else "" for name in names]
            lines.append(f"| {arm} | " + " | ".join(shown) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="mini-short", help="Stage-1 checkpoint that every arm starts from")
    parser.add_argument("--arms", nargs="+", default=list(USUAL), help=f"of {', '.join(ARMS)}, or NAME=FLAGS")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--train", type=shlex.split, default=[], help="further flags of every training, in quotes")
    parser.add_argument("--config", default=CONFIG)
    parser.add_argument("--arrows", default="1-7", help="fewest and most arrows of the trails")
    parser.add_argument("--taught", type=int, default=4, help="most arrows that Stage 1 has seen")
    parser.add_argument("--rows", type=int, default=12_000, help="trails to train on")
    parser.add_argument("--questions", type=int, default=2_100, help="fresh trails to ask about")
    parser.add_argument("--data-seed", type=int, default=5)
    parser.add_argument("--test-seed", type=int, default=11)
    parser.add_argument("--jobs", type=int, default=12, help="runs side by side")
    parser.add_argument("--batch", type=int, default=256, help="questions asked at a time")
    parser.add_argument("--device")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds after which what is unfinished stops")
    parser.add_argument("--only-summary", action="store_true")
    options = parser.parse_args()
    arms = dict(arm.split("=", 1) if "=" in arm else (arm, ARMS.get(arm, "")) for arm in options.arms)
    if unknown := [arm for arm, flags in arms.items() if not flags]:
        parser.error(f"no arm {unknown[0]!r}: there are {', '.join(ARMS)}, or write NAME=FLAGS of realvr train rl")
    jobs = [Job(START, (), None, options.out / START)]
    jobs += [
        Job(arm, tuple(shlex.split(flags)), seed, options.out / arm / str(seed))
        for seed in options.seeds
        for arm, flags in arms.items()
    ]
    if not options.only_summary:
        run = Runner(options.limit)
        data = draw(run, options.out, options)
        with ThreadPoolExecutor(options.jobs) as pool:
            done = list(pool.map(lambda job: do(run, job, data, options), jobs))
        for job, well in zip(jobs, done, strict=True):
            if not well:
                print(f"{job.name}: not finished, see {options.out}/log; the same command goes on", file=sys.stderr)
    right, arrows, read = answers(jobs)
    pairs = [(arm, "lvr-rl") for arm in right if arm not in ("lvr-rl", START)]
    pairs += [(arm, START) for arm in right if arm != START]
    pairs += [(a, b) for a, b in (("realvr-normalised", "uniform"), ("realvr-lambda-1-normalised", "uniform-lambda-1"))]
    summary = summarise(right, arrows, options.taught, pairs)
    summary |= {"readable": read, "recorded": recorded(jobs), "flags": arms, "model": str(options.model)}
    write_atomically(options.out / "summary.json", json.dumps(summary, indent=2) + "\n")
    write_atomically(options.out / "summary.md", text := markdown(summary))
    print(text)


if __name__ == "__main__":
    main()
