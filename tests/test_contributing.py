"""The recipes of CONTRIBUTING.md: their code, put where they say into a copy of the package, does what they promise."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import realvr
from realvr.backbone.samples import conversation
from realvr.data import read
from realvr.diagnostics import DIAGNOSTICS
from realvr.evaluation.benchmark import BENCHMARKS
from realvr.latent import rollout
from realvr.registry import load_file
from realvr.training.method import METHODS

PACKAGE = Path(realvr.__file__).parent
ROOT = Path(__file__).parents[1]
PAGE = ROOT / "CONTRIBUTING.md"
PLACE = re.compile(r"# (end of )?(src/realvr/\S+\.py)\n")


def blocks(language: str) -> list[str]:
    """Fenced code of the page."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def placed() -> dict[str, tuple[bool, str]]:
    """Code by the file of the package it belongs to, and whether it goes to the end of one that is there."""
    found = {}
    for block in blocks("python"):
        place = PLACE.match(block)
        assert place, f"a block does not say where it goes: {block[:60]}"
        found[place[2]] = bool(place[1]), block[place.end() :]
    return found


def commands(*verbs: str) -> list[str]:
    """Lines of the page that call one of the verbs."""
    lines = [line for block in blocks("console") for line in block.splitlines() if line.startswith("realvr ")]
    return [line for line in lines if any(line.startswith(f"realvr {verb} ") for verb in verbs)]


def test_the_examples_pass_our_own_rules() -> None:
    new = {file: code for file, (end, code) in placed().items() if not end}
    assert len(new) == 3
    ruff = [sys.executable, "-m", "ruff"]
    for file, code in new.items():
        assert not (ROOT / file).exists(), f"{file} is there: choose another example"
        for call in (["check", "--quiet"], ["format", "--check"]):
            done = subprocess.run(
                [*ruff, *call, "--stdin-filename", file, "-"], input=code, cwd=ROOT, capture_output=True, text=True
            )
            assert done.returncode == 0, f"{file}: {done.stdout}{done.stderr}"


def test_the_examples_are_members_of_their_registries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    homes: dict[str, Any] = {"training/methods": METHODS, "evaluation/tasks": BENCHMARKS, "diagnostics": DIAGNOSTICS}
    for registry in homes.values():
        registry.names()
        monkeypatch.setattr(registry, "_members", dict(registry._members))
    added = []
    for file, (end, code) in placed().items():
        if not end:
            copy = tmp_path / Path(file).name
            copy.write_text(code, encoding="utf-8")
            folder = str(Path(file).parent.relative_to("src/realvr"))
            (member,) = homes[folder].adopt(load_file(copy))
            assert homes[folder].package.endswith(folder.replace("/", "."))
            added.append(member.name)
    assert added == ["spread", "yes-no", "collapse"]


# ---------------------------------------------------------------------- in a copy of the package


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package as it is after all four recipes."""
    home = tmp_path_factory.mktemp("copy")
    shutil.copytree(PACKAGE, home / "realvr")
    for file, (end, code) in placed().items():
        path = home / Path(file).relative_to("src")
        assert path.exists() == end
        path.write_text((path.read_text(encoding="utf-8") + "\n\n" if end else "") + code, encoding="utf-8")
    return home


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the commands of the page run, with the files that they name."""
    folder = tmp_path_factory.mktemp("work")
    lines = ["id\timage\tquestion\tanswer"]
    answers = ("yes", "no", "no", "no")  # the last is a mistake of the table: a score of 100 % would show nothing
    for number, color in enumerate(("red", "blue", "green", "red")):
        Image.new("RGB", (48, 48), color).save(folder / f"{number}.png")
        lines.append(f"q{number}\t{number}.png\tIs it red?\t{answers[number]}")
    (folder / "yes_no.tsv").write_text("\n".join([*lines, "q4\t0.png\tIs it red?\tperhaps"]) + "\n")
    shutil.copy(folder / "0.png", folder / "photo.png")
    return folder


VERBS = """
import shlex, sys
from realvr.cli import main
for line in sys.argv[1:]:
    assert main(shlex.split(line)[1:]) == 0, line
"""


def run(package: Path, work: Path, lines: list[str]) -> str:
    """Commands of the page, one after the other in one process; what they print."""
    done = subprocess.run(
        [sys.executable, "-c", VERBS, *lines],
        cwd=work,
        env=os.environ
        | {"PYTHONPATH": str(package), "OMP_NUM_THREADS": "1", "COLUMNS": "150", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_the_method_trains_and_the_diagnostic_measures(package: Path, work: Path) -> None:
    told = commands("world make", "train", "diagnose")
    assert len(told) == 3
    run(package, work, told)
    # The term that the method adds is, up to its weight, a number that ReaLVR records on its own.
    steps = lines_of(work / "runs/spread/metrics.jsonl")
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        assert step["loss/spread"] == pytest.approx(step["latents/adjacent_cosine"], abs=1e-5) != 0
        terms = step["loss/policy"] + 0.2 * step["loss/evidence"] + 0.1 * step["loss/spread"]
        assert step["loss"] == pytest.approx(terms, abs=1e-6)
    assert (work / "runs/spread/final/config.json").is_file()
    # The diagnostic against latents of a rollout, compared in a loop.
    samples = {sample.id: sample for sample in read(work / "runs/world/train-boxes/samples.jsonl")}
    records = lines_of(work / "runs/collapse/collapse.jsonl")
    assert len(records) == 32
    backbone = realvr.Backbone.load("mini", device="cpu")
    for record in records[:3]:
        sample = samples[record["id"]]
        turns = conversation(sample, [backbone.processor(image.open()) for image in sample.images])
        z_KD = rollout(backbone, [backbone.prompt(turns)], group=1, latents=8).latents_BKD[0].double()
        near = [float(z_KD[t] @ z_KD[t + 1] / z_KD[t].norm() / z_KD[t + 1].norm()) for t in range(7)]
        assert record["cosine"] == pytest.approx(sum(near) / 7, abs=1e-4)
    summary = json.loads((work / "runs/collapse/collapse.json").read_text())
    assert summary["cosine"]["mean"] == pytest.approx(sum(r["cosine"] for r in records) / 32)
    assert {path.suffix for path in (work / "runs/collapse").glob("collapse*")} == {".json", ".jsonl", ".md", ".csv"}


@pytest.mark.slow
def test_the_benchmark_is_scored(package: Path, work: Path) -> None:
    told = run(package, work, commands("eval"))
    assert "Yes or no" in told and "1 rows cannot be asked" in told
    asked = [
        row
        for row in lines_of(work / "runs/yes-no/predictions.jsonl")
        if (row["condition"], row["latents"]) == ("own", 8)
    ]
    assert {row["question"]: row["answer"] for row in asked} == {"q0": "A", "q1": "B", "q2": "B", "q3": "B"}
    found = json.loads((work / "runs/yes-no/summary.json").read_text())["benches"]["yes-no"]
    right = sum(row["extracted"] == row["answer"] for row in asked)
    assert 0 < right < 4
    assert found["headline"] == pytest.approx(25 * right)
    assert found["metrics"]["yes"] == pytest.approx(25 * sum(row["extracted"] == "A" for row in asked))


STOCK = """
import sys, torch
from PIL import Image
from transformers import AutoModelForImageTextToText
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from realvr.backbone import Backbone, Turn
from realvr.latent import prefill
folder, picture = sys.argv[1:]
backbone = Backbone.load(folder, device="cpu", dtype="float32")
prompt = backbone.prompt([Turn("user", "What is this?", images=[picture])])
saved = backbone.save(folder + "-marked")
stock = AutoModelForImageTextToText.from_pretrained(saved, dtype=torch.float32).eval()
pixels = Qwen2VLImageProcessorPil.from_pretrained(folder)(images=[Image.open(picture)], return_tensors="pt")
ids = prompt.ids[None]
with torch.no_grad():
    kinds = (ids == stock.config.image_token_id).long()
    theirs = stock(input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=kinds, **pixels).logits
    ours = backbone.logits(prefill(backbone, backbone.batch([prompt]))[1])
print(float((ours - theirs).abs().max()), float(theirs.abs().max()))
"""


@pytest.mark.slow
def test_the_family_loads_and_equals_stock(package: Path, work: Path) -> None:
    told = commands("new", "ask")
    assert len(told) == 2
    run(package, work, told)
    assert json.loads((work / "runs/qwen2-vl/config.json").read_text())["model_type"] == "qwen2_vl"
    Image.effect_noise((90, 60), 80).convert("RGB").save(work / "noise.png")
    done = subprocess.run(
        [sys.executable, "-c", STOCK, "runs/qwen2-vl", "noise.png"],
        cwd=work,
        env=os.environ | {"PYTHONPATH": str(package)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    apart, largest = map(float, done.stdout.split()[-2:])
    assert apart < 1e-4 < largest
