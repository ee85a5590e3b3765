"""A folder of results for the tests of the report, written by the real commands on a tiny model with random weights.

Run as ``python report_cases.py FOLDER`` it leaves them there, to be looked at.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import stage_runs
from realvr.backbone.tiny import build
from realvr.cli import main

ARMS = ("Direct", "LVR-RL", "ReaLVR")
BENCHES = {
    "mmvp": "mmvp/MMVP",
    "blink": "blink/BLINK",
    "hrbench-4k": "hrbench-4k/hr_bench_4k.tsv",
    "hrbench-8k": "hrbench-8k/hr_bench_8k.tsv",
    "mme-realworld": "mme-realworld/MME_RealWorld.json",
}
CPU = ("--device", "cpu", "--max-new", "3")


def make_results(root: Path) -> Path:
    """``root/demo``: three arms as ``realvr demo`` lays them out, and an ablation that its list does not name."""
    out, model = root / "demo", _model(root)
    data = stage_runs.write(stage_runs.world(8), root / "train")
    _run("world", "make", root, "--split", "mmvp", "blink", "mme-realworld", *_small(48, 4))
    _run("world", "make", root, "--split", "hrbench-4k", "hrbench-8k", *_small(96, 1), *_tiles())
    _run("world", "make", root, "--split", "counterfactual", *_small(48, 8))
    for name, method in (("lvr-rl", "lvr-rl"), ("realvr", "realvr"), ("ablations/no-negatives", "no-negatives")):
        raw = stage_runs.configure("rl", model, data, out / "train" / name, method=method, optim={"steps": 4})
        stage_runs.run("rl", raw)
    stage_runs.run("sft", stage_runs.configure("sft", model, data, out / "train/stage1", optim={"steps": 2}))
    for name, weights, latents in (
        ("direct", model, ("--latents", "0")),
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
    arms = [_arm(name, name != "Direct") for name in ARMS]
    (out / "demo.json").write_text(json.dumps({"arms": arms, "notes": ["Random weights: every number is noise."]}))
    return out


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
