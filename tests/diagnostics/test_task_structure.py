"""Task structure: clusters and probes on separable and on shuffled labels, states of every family, bad input."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import reference
from helpers import DEVICE, tolerance
from optional import need_package
from pair_cases import world_samples
from pair_reference import greedy, question
from realvr import errors
from realvr.backbone import Backbone
from realvr.cli import main
from realvr.data.export import write
from realvr.diagnostics import probing
from realvr.diagnostics.model import Model
from realvr.diagnostics.parts import Samples, Shown, Skip
from realvr.diagnostics.probing import Probed
from realvr.diagnostics.states import StateFiles
from realvr.diagnostics.task_structure import TaskStructure, TaskStructureSettings
from realvr.errors import UserError
from realvr.evaluation.model_responder import ModelResponder
from realvr.latent.sampling import Sampling

K, NEW = 3, 4


@pytest.fixture(autouse=True)
def _no_graph() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the numbers of the MLP do not matter."""
    need_package("sklearn")
    monkeypatch.setattr(probing, "EPOCHS", 3)
    monkeypatch.setattr(probing, "STARTS", 2)


def cloud(classes: int, each: int, dimensions: int, apart: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = np.repeat([f"c{n}" for n in range(classes)], each)
    centres = apart * rng.normal(size=(classes, dimensions))
    return np.repeat(centres, each, axis=0) + rng.normal(size=(classes * each, dimensions)), labels


def test_separable_classes_are_found_and_shuffled_ones_are_chance() -> None:
    need_package("sklearn")
    rows, labels = cloud(3, 30, 6, 4.0)
    one = Probed(rows, labels, [str(n) for n in range(90)])
    assert one.ari() == 1.0 and one.linear()["rate"] == 1.0 and one.mlp()["rate"] == 1.0
    drawn = one.bootstrap(5)
    assert drawn["pairs"] == 90 and drawn["mean"] > 0.7 and drawn["low"] <= drawn["mean"] <= drawn["high"]
    chance = one.shuffled()
    assert sorted(chance.labels) == sorted(labels) and abs(chance.ari()) < 0.08
    for found in (chance.linear(), chance.mlp()):
        assert found["of"] == 90 and found["low"] < 1 / 3 < found["high"]
    again = one.shuffled()
    assert (again.labels == chance.labels).all() and again.linear() == chance.linear()


def test_standardised_in_place_as_scikit_learn_does_it() -> None:
    """Constant columns, one of them not exactly: a large number that is rounded."""
    need_package("sklearn")
    from sklearn.preprocessing import StandardScaler

    rows = np.random.default_rng(3).normal(size=(30, 5)) * [1, 5, 0.1, 0, 0] + [0, 1e3, -1, 7, 1e8 / 3]
    right = StandardScaler().fit_transform(rows)
    probing.standardise(rows)
    assert rows == pytest.approx(right, abs=1e-9) and abs(rows[:, 3:]).max() < 1e-6


def test_fewer_samples_than_dimensions_and_noise_is_still_chance() -> None:
    """Any training data can be separated here; held-out samples tell."""
    need_package("sklearn")
    rows, labels = cloud(2, 20, 200, 0.0)
    found = Probed(rows, labels, [str(n) for n in range(40)]).linear()
    assert found["rate"] < 0.7


def test_questions_on_one_picture_stay_in_one_fold() -> None:
    """The label is a property of the picture, and the vector names the picture: only a leak could decode it."""
    need_package("sklearn")
    rng = np.random.default_rng(2)
    pictures = np.repeat(np.arange(30), 4)
    rows = rng.normal(size=(30, 60))[pictures] * 5 + 0.01 * rng.normal(size=(120, 60))
    labels = rng.integers(0, 2, 30).astype(str)[pictures]
    kept = Probed(rows, labels, [str(n) for n in pictures]).linear()["rate"]
    leaked = Probed(rows, labels, [str(n) for n in range(120)]).linear()["rate"]
    assert leaked == 1.0 and kept < 0.75


# ---------------------------------------------------------------------- records, files, summaries


def planted(folder: Path, labels: list[str], apart: float = 4.0, latents: int = 2, **changes: Any) -> dict[str, Any]:
    """The summary of states around a centre for each label."""
    names = sorted(set(labels))
    rng = np.random.default_rng(0)
    centres = {name: apart * rng.normal(size=8) for name in names}
    rows = np.stack([centres[label] for label in labels]) + rng.normal(size=(len(labels), 8))
    ids = [f"s{n}" for n in range(len(labels))]
    kinds = ["prompt", "final", *(["mean", "last"] if latents else [])]
    StateFiles(folder / "task-structure-states").write(0, ids, {kind: rows.astype(np.float32) for kind in kinds})
    records = [
        {"id": i, "latents": latents, "label": label, "answered": True, "picture": i, "error": None} | changes
        for i, label in zip(ids, labels, strict=True)
    ]
    diagnostic = TaskStructure(TaskStructureSettings(by="kind", resamples=3))
    return diagnostic.extend(diagnostic.summarise(records), {}, folder)


def test_small_classes_and_samples_without_a_label_are_left_out_and_counted(tmp_path: Path, quick: None) -> None:
    found = planted(tmp_path, ["a"] * 12 + ["b"] * 8 + ["few"] * 4 + ["none"] * 3)
    assert found["classes"] == {"a": 12, "b": 8} and found["left_out"] == {"few": 4} and found["unlabelled"] == 3
    assert found["majority"] == 0.6 and not found["grouped"]
    assert {name: one["samples"] for name, one in found["representations"].items()} == dict.fromkeys(
        ("prompt", "mean", "last", "final"), 20
    )
    assert found["representations"]["mean"]["linear"]["rate"] == 1.0
    lines = TaskStructure().notes([], found, 27)
    assert any("fewer than 5 samples are left out: few (4)" in line for line in lines)
    assert any("3 samples have no 'kind'" in line for line in lines)
    figure = TaskStructure().figure([Shown("one", found), Shown("two", found, 1)])
    assert figure is not None and len(figure.axes) == 3 and len(figure.axes[0].patches) == 8
    json.dumps(found)


def test_a_model_without_a_span_and_replies_without_content(tmp_path: Path, quick: None) -> None:
    found = planted(tmp_path, ["a"] * 6 + ["b"] * 6, latents=0, answered=False)
    assert set(found["representations"]) == {"prompt"} and found["unanswered"] == 12
    assert any("12 replies are empty" in line for line in TaskStructure().notes([], found, 12))
    (table,) = TaskStructure().drawn([Shown("m", found)])
    assert [row[2] for row in table.rows[1:]] == ["–"] * 3  # type: ignore[union-attr]
    figure = TaskStructure().figure([Shown("m", found)])
    assert figure is not None and "–" in [text.get_text() for text in figure.axes[1].texts]


def test_few_samples_for_the_dimensions_are_said() -> None:
    summary = TaskStructure().summarise([]) | {"representations": {"mean": {"samples": 10, "dimensions": 3584}}}
    (line,) = TaskStructure().notes([], summary, 10)
    assert "10 samples are fewer than 3584 dimensions" in line and "L2 penalty (C = 1)" in line


def test_one_task_only_is_refused_with_the_labels_there_are() -> None:
    need_package("sklearn")
    samples = world_samples(2)
    tasks = {sample.task for sample in samples}
    assert len(tasks) > 0
    alike = [replace(sample, task="one") for sample in samples]
    with pytest.raises(
        Skip, match=r"1 class of 'task' with at least 5 samples.*--by task, category, source, answer, .*edit"
    ):
        TaskStructure().select(alike, Path("data.jsonl"))
    with pytest.raises(Skip, match="0 classes of 'task'"):
        TaskStructure().select([replace(sample, task=sample.id) for sample in samples], Path("data.jsonl"))


def test_without_scikit_learn_it_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"task-structure needs sklearn: pip install 'realvr\[diagnostics\]'"):
        TaskStructure().select([], Path("x"))


# ---------------------------------------------------------------------- models


def test_states_are_those_of_the_stock_model(pair: Any, tmp_path: Path) -> None:
    """Replies of these models have no answer block: the first token is content, and the state behind ``<|lvr_end|>``
    predicts it."""
    chosen = [sample for sample in world_samples(2) if sample.tags["view"] == "original"][:2]
    chosen[1] = replace(chosen[1], turns=[replace(chosen[1].turns[0], text="A longer question: what is it, please?")])
    model = Model(ModelResponder(pair.ours, Sampling(temperature=0.0, max_new=NEW)), K)
    states = StateFiles(tmp_path / "task-structure-states")
    records = list(TaskStructure().measure(model, Samples(chosen, place=0, states=states)))
    ids = [record["id"] for record in records]
    found = {name: states.rows(ids, name) for name in ("prompt", "mean", "last", "final")}
    for row, sample in enumerate(chosen):
        begun = pair.begin([pair.ours.prompt([question(sample)])])
        thought, z_BKD = pair.think(begun, K)
        right = {
            "prompt": reference.hidden(pair.stock, begun)[0, -1],
            "mean": z_BKD[0].float().mean(0),
            "last": z_BKD[0, -1],
            "final": reference.hidden(pair.stock, thought)[0, -1],
        }
        for name, vector in right.items():
            assert found[name][row] == pytest.approx(vector.float().cpu().numpy(), abs=tolerance(2e-5)), name


def test_the_final_state_predicts_the_first_content_token(pair: Any) -> None:
    """With two tokens before the content, the state is that of the stock model after both."""
    from realvr.diagnostics.measuring import task_structure
    from realvr.diagnostics.measuring.attending import Generated

    sample = world_samples(1)[0]
    model = Model(ModelResponder(pair.ours, Sampling(temperature=0.0, max_new=NEW)), K)
    reading = model.read([sample, sample, sample])
    thought, _ = pair.think(pair.begin([pair.ours.prompt([question(sample)])]), K)
    ids = greedy(pair, thought, 3)
    answers = [Generated(ids, "", content, True, None, False) for content in ([2], [0, 1], [])]
    found = task_structure._predicting(model, reading, answers)
    longer = reference.append(pair.stock, thought, torch.tensor([ids[:2]], device=DEVICE))
    right = [reference.hidden(pair.stock, one)[0, -1] for one in (longer, thought)]
    for ours, stock in zip(found, right, strict=False):
        assert ours.float().cpu().numpy() == pytest.approx(stock.float().cpu().numpy(), abs=tolerance(2e-5))
    assert not found[2].any()


def test_the_command(
    build_tiny: Callable[[str], Path], tmp_path: Path, quick: None, capsys: pytest.CaptureFixture[str]
) -> None:
    backbone = Backbone.load(build_tiny("qwen2.5-vl"), dtype=torch.float32, device="cpu")
    backbone.latents = 1
    small = backbone.save(tmp_path / "small")
    write((replace(sample, pair=None) for sample in world_samples(3)), "jsonl", tmp_path / "data.jsonl")
    args = ["diagnose", "task-structure", str(small), str(tmp_path / "data.jsonl"), "--out", str(tmp_path / "out")]
    args += ["--by", "view", "--max-new", "2", "--device", "cpu", "--resamples", "2"]
    assert main(args) == 0
    summary = json.loads((tmp_path / "out" / "task-structure.json").read_text())
    assert summary["classes"] == {"edited": 12, "original": 12} and len(summary["representations"]) == 4
    assert "samples are fewer than" in capsys.readouterr().err
    assert (tmp_path / "out" / "task-structure.svg").stat().st_size > 2000
    (next((tmp_path / "out" / "task-structure-states").iterdir())).unlink()
    assert main(args) == 2 and "delete task-structure.jsonl" in capsys.readouterr().err
