"""Every verb that writes a run folder, as a command line on small data and a small model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pair_cases import world_samples
from realvr.data.export import write as export
from stage_runs import config_file, configure, with_markers, world, write


@dataclass(frozen=True)
class Verb:
    """``journal``: the file that grows while it runs; ``key``: what tells its records apart."""

    words: Callable[[Path], list[Any]]
    journal: str
    key: Callable[[dict[str, Any]], Any]

    def args(self, out: Path) -> list[str]:
        return [str(word) for word in self.words(out)]

    def records(self, out: Path) -> list[dict[str, Any]]:
        path = out / self.journal
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def written(self, out: Path) -> int:
        path = out / self.journal
        return path.read_bytes().count(b"\n") if path.exists() else 0


@dataclass(frozen=True)
class Place:
    """What the verbs work on."""

    model: Path
    data: Path
    pairs: Path
    verbs: dict[str, Verb]


def make_place(plain: Path, root: Path) -> Place:
    """Data and model under ``root``, from a tiny checkpoint."""
    model = with_markers(plain, root / "model")
    data = write(world(8), root / "data")
    pairs = root / "pairs" / "samples.jsonl"
    export(iter(world_samples(2)), "jsonl", pairs)
    verbs = {
        kind: Verb(_training(kind, model, data, root), "metrics.jsonl", lambda row: row["step"])
        for kind in ("base", "sft", "rl")
    }
    cpu = ["--device", "cpu", "--max-new", "3"]
    verbs["eval"] = Verb(
        lambda out: ["eval", model, "--bench", f"mine={data}", "--out", out, "--batch", "1", *cpu],
        "predictions.jsonl",
        lambda row: tuple(row[name] for name in ("bench", "question", "condition", "latents", "seed")),
    )
    verbs["counterfactual"] = Verb(
        lambda out: ["counterfactual", model, pairs, "--out", out, "--batch", "1", *cpu],
        "counterfactual.jsonl",
        lambda row: json.dumps({name: row.get(name) for name in ("pair", "protocol", "first_span")}),
    )
    verbs["exchange"] = Verb(
        lambda out: ["exchange", model, pairs, "--out", out, "--batch", "1", "--seeds", "1", *cpu],
        "exchange.jsonl",
        lambda row: json.dumps({name: value for name, value in row.items() if name not in ("seconds",)}),
    )
    return Place(model, data, pairs, verbs)


def _training(kind: str, model: Path, data: Path, root: Path) -> Callable[[Path], list[Any]]:
    changes: dict[str, Any] = {"optim": {"steps": 4}, "checkpoint": {"every": 2}, "log": {"tensorboard": True}}
    config = config_file(configure(kind, model, data, root / "unused", **changes), root / f"{kind}.yaml")
    return lambda out: ["train", kind, config, "--run.out", out]
