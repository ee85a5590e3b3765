"""A folder of results for the tests of the report, written by the real commands on a tiny model.

A model with random weights says nothing that can be read, so its replies are then replaced by answers of which a known
share is right, and the summaries are computed again from these records by the product's own functions.

Run as ``python report_cases.py FOLDER`` it leaves them there, to be looked at.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import stage_runs
from realvr.cli import main
from realvr.diagnostics.counterfactual_summary import summarise_pairs
from realvr.diagnostics.exchange_summary import summarise_exchange
from realvr.zoo.tiny import build

ARMS = ("Direct", "LVR-RL", "ReaLVR")
BENCHES = {
    "mmvp": "mmvp/MMVP",
    "blink": "blink/BLINK",
    "hrbench-4k": "hrbench-4k/hr_bench_4k.tsv",
    "hrbench-8k": "hrbench-8k/hr_bench_8k.tsv",
    "mme-realworld": "mme-realworld/MME_RealWorld.json",
}
RIGHT = {"direct": 0.45, "lvr-rl": 0.5, "realvr": 0.7}
CPU = ("--device", "cpu", "--max-new", "3")


def make_results(root: Path) -> Path:
    """``root/demo``: three arms as ``realvr demo`` lays them out, and an ablation that its list does not name."""
    out, model = root / "demo", _model(root)
    released = root / "released"
    data = stage_runs.write(stage_runs.world(8), root / "train")
    _run("world", "make", root, "--split", "mmvp", "blink", "mme-realworld", *_small(48, 10))
    _run("world", "make", root, "--split", "hrbench-4k", "hrbench-8k", *_small(96, 3), *_tiles())
    _run("world", "make", root, "--split", "counterfactual", *_small(48, 8))
    for name, method in (("lvr-rl", "lvr-rl"), ("realvr", "realvr"), ("ablations/no-negatives", "no-negatives")):
        raw = stage_runs.configure("rl", model, data, out / "train" / name, method=method, optim={"steps": 4})
        stage_runs.run("rl", raw)
    stage_runs.run("sft", stage_runs.configure("sft", model, data, out / "train/stage1", optim={"steps": 2}))
    for name, weights, latents in (
        ("direct", released, ("--latents", "0")),
        ("lvr-rl", out / "train/lvr-rl/final", ()),
        ("realvr", out / "train/realvr/final", ("--latents", "0,1,3")),
    ):
        benches = [option for bench, path in BENCHES.items() for option in ("--bench", f"{bench}={root / path}")]
        _run("eval", weights, *benches, "--out", out / "eval" / name, *latents, "--batch", "32", *CPU)
        pairs = root / "counterfactual/samples.jsonl"
        span = latents if name == "direct" else ()
        _run("counterfactual", weights, pairs, "--out", out / "counterfactual" / name, *span, *CPU)
        if name != "direct":
            _run("exchange", weights, pairs, "--out", out / "exchange" / name, "--k", "1,2", "--seeds", "2", *CPU)
        _answer(out, name)
    arms = [_arm(name, name != "Direct") for name in ARMS]
    (out / "demo.json").write_text(json.dumps({"arms": arms, "notes": ["Made for a test: the numbers mean nothing."]}))
    return out


def _answer(out: Path, name: str) -> None:
    """Put answers into the records of an arm and compute its summaries again."""
    rng, right = random.Random(name), RIGHT[name]

    def say(record: dict[str, Any]) -> None:
        loss = {"own": 0.0, "mean": 0.1, "other": 0.2, "noise": 0.3}[record["condition"]]
        loss += 0.1 if record["latents"] == 0 else 0.0
        letters = "ABCD"[: max(2, len(record["choices"]))]
        said = record["answer"] if rng.random() < right - loss else rng.choice(letters)
        read = rng.random() < 0.95
        record["text"] = f"<answer>{said}</answer>" if read else "I cannot tell."
        record |= {"extracted": said if read else None, "correct": read and said == record["answer"]}

    _rewrite(out / "eval" / name / "predictions.jsonl", say)
    _run("score", out / "eval" / name)

    def look(record: dict[str, Any]) -> None:
        record["extracted"] = [truth if rng.random() < right else "Z" for truth in record["truths"]]

    _again(out / "counterfactual" / name, "counterfactual", look, summarise_pairs)
    if name == "direct":
        return

    def swap(record: dict[str, Any]) -> None:
        follows = rng.random() < (record["k"] / 6 if record["condition"] == "swap" else 0.05)
        record["extracted"] = record["donor_truth"] if follows else record["recipient_truth"]
        record["margin"] = rng.gauss(0.5 if follows else -0.5, 0.2)

    _again(out / "exchange" / name, "exchange", swap, lambda records, _: summarise_exchange(records))


def _again(folder: Path, name: str, change: Callable[[Any], None], summarise: Callable[[Any, Any], Any]) -> None:
    records = _rewrite(folder / f"{name}.jsonl", change)
    moved = folder / "distances.jsonl"
    distances = [json.loads(line) for line in moved.read_text().splitlines()] if moved.exists() else []
    path = folder / f"{name}.json"
    settings = json.loads(path.read_text())["settings"]
    path.write_text(json.dumps(summarise(records, distances) | {"settings": settings}))


def _rewrite(path: Path, change: Callable[[Any], None]) -> list[Any]:
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for record in records:
        change(record)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return records


def _arm(name: str, trained: bool) -> dict[str, str]:
    kinds = ("train", "eval", "counterfactual", "exchange") if trained else ("eval", "counterfactual")
    return {"name": name} | {kind: f"{kind}/{name.lower()}" for kind in kinds}


def _model(root: Path) -> Path:
    return stage_runs.with_markers(build("internvl3", "tiny", root / "released"), root / "model")


def _small(size: int, count: int) -> list[str]:
    return ["--size", str(size), "--count", str(count), "--workers", "1"]


def _tiles() -> list[str]:
    return ["--resize-pixels", "9216", "--patch", "14"]


def _run(*arguments: str | Path) -> None:
    assert main([str(argument) for argument in arguments]) == 0


if __name__ == "__main__":
    print(make_results(Path(sys.argv[1])))
