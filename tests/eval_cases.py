"""What the tests of the evaluation share: small benchmarks in the real layouts, and responders that are no models."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from realvr.cli import main
from realvr.evaluation.questions import Questions, load
from realvr.evaluation.responder import Plan, Reply, Request

WIDTH = 4
CLOCKS = ("seconds",)
FILES = {
    "mmvp": "mmvp/MMVP",
    "blink": "blink/BLINK",
    "hrbench-4k": "hrbench-4k/hr_bench_4k.tsv",
    "mme-realworld": "mme-realworld/MME_RealWorld.json",
}


def make_world(root: Path) -> dict[str, Path]:
    """Four benchmarks with few questions: 6 MMVP, 10 BLINK (two of each subtask), 12 HR-Bench, 5 MME-RealWorld."""
    for split, count in (("mmvp", 3), ("blink", 10), ("mme-realworld", 5)):
        options = ["--split", split, "--size", "48", "--count", str(count), "--workers", "1"]
        assert main(["world", "make", str(root), *options]) == 0
    small = ["--size", "128", "--resize-pixels", "16384", "--patch", "14", "--count", "3", "--workers", "1"]
    assert main(["world", "make", str(root), "--split", "hrbench-4k", *small]) == 0
    return {name: root / file for name, file in FILES.items()}


def load_all(paths: dict[str, Path]) -> list[Questions]:
    return [load(name, path) for name, path in paths.items()]


def lines(out: Path, name: str = "predictions.jsonl") -> list[dict[str, Any]]:
    """Predictions without what a clock decides, read without the code under test."""
    found = [json.loads(line) for line in (out / name).read_text(encoding="utf-8").splitlines()]
    return [{key: value for key, value in row.items() if key not in CLOCKS} for row in found]


def keys(found: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in ("bench", "question", "condition", "latents", "seed")) for row in found]


def own_latents(question: str, latents: int) -> Tensor:
    """What the responders below think: (K, WIDTH) from the question's id."""
    seed = int.from_bytes(hashlib.md5(question.encode()).digest()[:4], "big")
    return torch.randn(latents, WIDTH, generator=torch.Generator().manual_seed(seed))


class Speaker:
    """A responder that says ``self.say(request)`` and remembers whose latents it was given."""

    latents = 3

    def __init__(self, name: str = "speaker") -> None:
        self.name = name
        self.given: dict[tuple[str, str], list[Tensor]] = {}
        self.sizes: list[int] = []
        self.answers = 0

    def say(self, request: Request) -> str:
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "latents": self.latents}

    def reply(self, requests: Sequence[Request], plans: Sequence[Plan]) -> list[list[Reply]]:
        self.sizes.append(len(requests))
        self.answers += len(requests) * len(plans)
        return [[self._one(request, plan, row) for row, request in enumerate(requests)] for plan in plans]

    def _one(self, request: Request, plan: Plan, row: int) -> Reply:
        question = request.sample.id
        if plan.given is not None:
            self.given.setdefault((request.sample.task, question), []).append(plan.given[row])
        span = own_latents(question, plan.latents) if plan.latents else None
        return Reply(self.say(request), latents=span, prompt=question, new_tokens=3)


class Oracle(Speaker):
    """Knows the answers."""

    def say(self, request: Request) -> str:
        return f"<answer>{request.sample.answer}</answer>"


class Constant(Speaker):
    """Always says the same."""

    def __init__(self, text: str) -> None:
        super().__init__("constant")
        self.text = text

    def say(self, request: Request) -> str:
        return self.text
