"""Help and dependence: responders whose use of their latents is known, and every number again by plain loops."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from eval_cases import WIDTH, Speaker, lines, load_all, make_world
from realvr.data.sample import ImageRef, Sample
from realvr.evaluation.ablation import matched_noise
from realvr.evaluation.effects import beyond_noise
from realvr.evaluation.questions import Questions
from realvr.evaluation.responder import Plan, Reply, Request
from realvr.evaluation.runner import EvalSettings, evaluate

LETTERS = "ABCDEFGH"


@pytest.fixture(scope="module")
def benches(tmp_path_factory: pytest.TempPathFactory) -> list[Questions]:
    return load_all(make_world(tmp_path_factory.mktemp("world")))


class Thinker(Speaker):
    """Its first latent says which option is right: the number of the option in its first place, 100 in its second."""

    def think(self, sample: Sample) -> Tensor:
        own = torch.zeros(self.latents, WIDTH)
        own[0, 0], own[0, 1] = LETTERS.index(sample.answer), 100.0
        own[1:] = 1.0 + len(sample.id)
        return own

    def _one(self, request: Request, plan: Plan, row: int) -> Reply:
        sample = request.sample
        own = self.think(sample)[: plan.latents] if plan.latents else None
        span = own if plan.given is None else plan.given[row]
        if plan.given is not None:
            self.given.setdefault((sample.task, sample.id), []).append(plan.given[row])
        return Reply(self.answer(sample, span), latents=own, prompt=sample.id, new_tokens=3)

    def answer(self, sample: Sample, span: Tensor | None) -> str:
        raise NotImplementedError


class Reads(Thinker):
    """Answers from its latents, and A without a span. Whatever the span says, the reply can be read."""

    def answer(self, sample: Sample, span: Tensor | None) -> str:
        number = 0 if span is None else round(float(span[0, 0])) % len(sample.choices)
        return f"<answer>{LETTERS[number]}</answer>"


class Ignores(Thinker):
    """Needs a span to be right, and does not look into it."""

    def answer(self, sample: Sample, span: Tensor | None) -> str:
        return f"<answer>{'A' if span is None else sample.answer}</answer>"


class Breaks(Thinker):
    """Ignores what its latents say, and babbles where they are nothing it could have thought."""

    def answer(self, sample: Sample, span: Tensor | None) -> str:
        strange = span is not None and float(span[0, 1]) != 100.0
        return "the the the" if strange else f"<answer>{sample.answer}</answer>"


def headline(rows: list[dict[str, Any]]) -> float:
    """BLINK: mean over subtasks; HR-Bench: mean over cycles, all of one size; else the share of right answers."""
    parts: dict[str, list[bool]] = defaultdict(list)
    for row in rows:
        parts[row["task"] if row["bench"] == "mini-blink" else ""].append(row["correct"])
    return sum(100 * sum(part) / len(part) for part in parts.values()) / len(parts)


def by_plain_loops(out: Path) -> dict[str, dict[str, Any]]:
    """Effects of every benchmark, from predictions.jsonl alone."""
    cells: dict[tuple[str, str, int], list[dict[str, Any]]] = defaultdict(list)
    for row in lines(out):
        cells[row["bench"], row["condition"], row["latents"]].append(row)
    found: dict[str, dict[str, Any]] = {}
    for bench in {row[0] for row in cells}:
        own = cells[bench, "own", 3]
        found[bench] = {}
        for name, other in (
            ("help", cells[bench, "own", 0]),
            ("dependence_other", cells[bench, "other", 3]),
            ("dependence_noise", cells[bench, "noise", 3]),
        ):
            read = {row["question"] for row in other if row["extracted"] is not None}
            read &= {row["question"] for row in own if row["extracted"] is not None}
            both = [[row for row in rows if row["question"] in read] for rows in (own, other)]
            found[bench][name] = {
                "points": headline(own) - headline(other),
                "read": 100 * sum(row["extracted"] is not None for row in other) / len(other),
                "readable": headline(both[0]) - headline(both[1]) if read else None,
            }
    return found


@pytest.mark.parametrize("kind", [Reads, Ignores, Breaks])
def test_effects_are_those_of_the_saved_answers(kind: type[Thinker], benches: list[Questions], tmp_path: Path) -> None:
    summary = evaluate(kind(), benches, tmp_path, batch=4)
    expected = by_plain_loops(tmp_path)
    assert expected.keys() == summary["benches"].keys() and len(expected) == 4
    for bench, effects in expected.items():
        for name, numbers in effects.items():
            found = summary["benches"][bench]["effects"][name]
            assert found["points"] == pytest.approx(numbers["points"])
            assert found["read"] == pytest.approx(numbers["read"])
            assert found["readable"]["points"] == pytest.approx(numbers["readable"])
            assert found["ci"][0] <= found["points"] + 1e-9 and found["points"] <= found["ci"][1] + 1e-9
    mean = {
        name: sum(effects[name]["points"] for effects in expected.values()) / 4 for name in ("help", "dependence_noise")
    }
    for name, value in mean.items():  # four tasks, not the five: the mean of those there are
        assert summary["effects"][name]["points"] == pytest.approx(value)
    assert json.loads((tmp_path / "summary.json").read_text())["effects"] == summary["effects"]


def test_known_responders_are_told_apart(benches: list[Questions], tmp_path: Path) -> None:
    found = {kind: evaluate(kind(), benches, tmp_path / kind.__name__) for kind in (Reads, Ignores, Breaks)}
    reads, ignores, breaks = (found[kind]["effects"] for kind in (Reads, Ignores, Breaks))
    assert reads["help"]["points"] > 20 and reads["dependence_other"]["points"] > 20
    assert all(effect["read"] == 100 for effect in reads.values())
    assert beyond_noise(reads["dependence_other"]) and beyond_noise(reads["dependence_noise"])
    # A span whose contents do not matter: help without dependence.
    assert ignores["help"]["points"] > 20 and beyond_noise(ignores["help"])
    assert ignores["dependence_other"]["points"] == ignores["dependence_noise"]["points"] == 0
    assert not beyond_noise(ignores["dependence_other"]) and not beyond_noise(ignores["dependence_noise"])
    # All points are lost under noise, with the format: the readable share says so, and it does not count as use.
    assert breaks["dependence_noise"]["points"] == 100 and breaks["dependence_noise"]["read"] == 0
    assert not beyond_noise(breaks["dependence_noise"])
    assert (breaks["dependence_other"]["points"], breaks["dependence_other"]["read"]) == (0, 100)
    text = (tmp_path / "Breaks" / "summary.md").read_text()
    (header, row) = (
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in text.splitlines()
        if "dependence: own − noise" in line or line.startswith("| mini-mmvp | 100.0 | 100.0 |")
    )
    at = header.index("dependence: own − noise")
    assert row[at] == "+100.0" and header[at + 2] == "read %" and row[at + 2] == "0.0"


def test_noise_has_the_norms_of_the_own_latents_and_a_seed_of_its_own(benches: list[Questions], tmp_path: Path) -> None:
    spans = {}
    for name, batch, seed in (("one", 1, 0), ("five", 5, 0), ("other", 5, 1)):
        responder = Reads()
        evaluate(responder, benches[:1], tmp_path / name, EvalSettings(exchange_seed=seed), batch=batch)
        spans[name] = {question: given[2] for (_, question), given in responder.given.items()}
    own = {sample.id: responder.think(sample) for sample in benches[0].samples}
    seen = []
    for question, noise in spans["one"].items():
        assert torch.allclose(noise.norm(dim=-1), own[question].norm(dim=-1), rtol=1e-6)
        assert torch.equal(noise, spans["five"][question])  # the same in any batch
        assert not torch.allclose(noise, spans["other"][question])
        seen.append(noise / noise.norm(dim=-1, keepdim=True))
    directions = torch.cat(seen)
    cosines = directions @ directions.T - torch.eye(len(directions))
    assert cosines.abs().max() < 0.999  # no two slots, of no two questions, point the same way
    assert len(seen) == 6


def test_noise_is_gaussian_in_direction() -> None:
    own = torch.ones(200, 64) * 3.0
    noise = matched_noise(own, 0, "q")
    assert abs(float(noise.mean())) < 0.1 and float(noise.std()) == pytest.approx(3.0, rel=0.02)
    assert abs(float((noise / noise.norm(dim=-1, keepdim=True)).mean(0).norm())) < 0.15
    assert torch.equal(matched_noise(torch.zeros(2, 4), 0, "q"), torch.zeros(2, 4))  # nothing to rescale to


def test_nobody_gets_the_latents_of_the_same_picture_under_another_name(tmp_path: Path) -> None:
    """Three files, two of them the same picture in two encodings."""
    one, other = (Image.effect_noise((28, 28), spread).convert("RGB") for spread in (20, 90))
    files = {"a": (one, 1), "b": (one, 9), "c": (other, 1)}
    samples = []
    for name, (picture, level) in files.items():
        picture.save(tmp_path / f"{name}.png", compress_level=level)
        image = ImageRef.from_path(tmp_path / f"{name}.png")
        samples.append(Sample.ask(name, [image], "What?", "A", choices=["x", "y"]))
    assert (tmp_path / "a.png").read_bytes() != (tmp_path / "b.png").read_bytes()
    for seed in range(6):
        responder = Thinks()
        out = tmp_path / str(seed)
        evaluate(responder, [Questions("mine", samples)], out, EvalSettings(exchange_seed=seed))
        given = {question: spans[1] for (_, question), spans in responder.given.items()}
        assert torch.equal(given["a"], responder.think(samples[2]))
        assert torch.equal(given["b"], responder.think(samples[2]))
        assert not torch.equal(given["c"], responder.think(samples[2]))


class Thinks(Ignores):
    """Thinks something else about every question."""

    def think(self, sample: Sample) -> Tensor:
        return torch.full((self.latents, WIDTH), float(ord(sample.id[0])))
