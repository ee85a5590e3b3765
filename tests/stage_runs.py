"""Small runs of the three real stages: data from the built-in world, tiny models, the real loop.

Run as ``python stage_runs.py KIND CONFIG [FLAGS]`` it is ``realvr train`` that also leaves ``facts-RANK.json`` behind.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import yaml

from forked import Forked
from realvr.backbone import Backbone
from realvr.data import export
from realvr.data.sample import Sample
from realvr.runs.launching import held_port
from realvr.training import loop
from realvr.training.configuration import KINDS
from realvr.training.engine import Engine, start_engine
from realvr.training.method import build
from realvr.training.settings import TrainSettings
from realvr.world.splits import Recipe, samples

QUIET = {"tensorboard": False, "console": False, "parts_every": 0, "table_every": 0}
LATENTS = 3
HELD = ExitStack()
"""Ports."""


def world(count: int = 8, seed: int = 0, split: str = "train-boxes", size: int = 64) -> list[Sample]:
    """Questions about small pictures, with evidence boxes."""
    return list(samples(Recipe(split, seed, count, (size, size))))


def write(found: list[Sample], folder: Path, name: str = "data.jsonl") -> Path:
    """The samples as a file of our JSON lines."""
    folder.mkdir(parents=True, exist_ok=True)
    export.write(found, "jsonl", folder / name)
    return folder / name


def with_markers(checkpoint: Path, out: Path, latents: int = LATENTS) -> Path:
    """The checkpoint as Stage 1 would leave it: with latent markers, untrained."""
    return Backbone.load(checkpoint, dtype=torch.float32, latents=latents).save(out)


def configure(kind: str, model: Path, data: Path, out: Path, /, **changes: Any) -> dict[str, Any]:
    """Raw settings of a small run; ``changes`` go on top, section by section."""
    raw: dict[str, Any] = {
        "model": {"path": str(model), "dtype": "float32", "latents": LATENTS},
        "data": {"sources": [{"path": str(data)}]},
        "run": {"out": str(out)},
        "optim": {"lr": 1e-3, "steps": 1, "batch": 4, "microbatch": 2, "warmup": 0, "schedule": "constant"},
        "checkpoint": {"every": 0},
        "log": dict(QUIET),
    }
    if kind == "sft":
        raw |= {"pack_tokens": 512, "gradient_checkpointing": False}
    if kind == "rl":
        raw |= {"group": 4, "max_new": 8, "temperature": 1.0, "negatives": 4, "memory": "cached"}
    for key, value in changes.items():
        raw[key] = raw[key] | value if isinstance(value, dict) and key in raw else value
    return raw


def make(kind: str, raw: dict[str, Any], engine: Engine | None = None) -> tuple[Any, TrainSettings, Engine]:
    """Task, settings and engine of a run, as ``realvr train`` builds them."""
    settings, engine = KINDS[kind].model_validate(raw), engine or start_engine(cpu=True)
    engine.seed(settings.run.seed)
    return build(settings, engine), settings, engine


def run(kind: str, raw: dict[str, Any], engine: Engine | None = None) -> list[dict[str, Any]]:
    """Train in this process; the metrics of every step."""
    assert loop.train(*make(kind, raw, engine)) == 0
    return lines(Path(raw["run"]["out"]))


def lines(out: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """Records of a run."""
    return [json.loads(line) for line in (out / name).read_text().splitlines()]


def column(found: list[dict[str, Any]], name: str) -> list[float]:
    """One metric over the steps."""
    return [line[name] for line in found]


CLOCKS = ("seconds", "prepare_s", "tokens_per_s", "peak_memory_gib", "time")


def numbers(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records without what depends on the machine."""
    return [{name: value for name, value in line.items() if name not in CLOCKS} for line in found]


def weights(task: Any) -> dict[str, torch.Tensor]:
    """A copy of every parameter of the model."""
    return {name: value.detach().clone() for name, value in task.backbone.model.named_parameters()}


# ---------------------------------------------------------------------- processes


def config_file(raw: dict[str, Any], path: Path) -> Path:
    """The settings as a YAML file."""
    path.write_text(yaml.safe_dump(raw, allow_unicode=True))
    return path


def own_port() -> str:
    """A port that nobody else gets while this process lives."""
    return str(HELD.enter_context(held_port()))


def command(kind: str, config: Path, *flags: str, ranks: int = 1) -> list[str]:
    """Command line of a training process, or of a launcher of several."""
    launcher: list[str] = []
    if ranks > 1:
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-addr", "127.0.0.1"]
        launcher += ["--master-port", own_port()]
    return [sys.executable, *launcher, str(Path(__file__).resolve()), kind, str(config), *flags]


def environment() -> dict[str, str]:
    """Environment of a training process."""
    source = str(Path(__file__).resolve().parents[1] / "src")
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": source, "CUDA_VISIBLE_DEVICES": ""}


def start(arguments: list[str], code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a process to its end."""
    process = Forked.of(arguments, environment=environment())
    done = subprocess.CompletedProcess(arguments, process.wait(300), process.out.read_text(), process.said)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def facts(out: Path) -> list[dict[str, Any]]:
    """What each rank wrote about itself."""
    return [json.loads(path.read_text()) for path in sorted(out.glob("facts-*.json"))]


def main() -> int:
    from realvr import cli

    torch.set_num_threads(1)
    inner = loop.train

    def train(task: Any, settings: TrainSettings, engine: Engine) -> int:
        code = inner(task, settings, engine)
        trained = [p.detach().double().sum().item() for p in engine.trainable()]
        found = {"world": engine.world, "rank": engine.rank, "wrapped": type(engine.wrapped).__name__, "sums": trained}
        (settings.run.out / f"facts-{engine.rank}.json").write_text(json.dumps(found))
        return code

    loop.train = train
    return cli.main(["train", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
