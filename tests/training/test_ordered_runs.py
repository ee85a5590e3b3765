"""Runs with ordered evidence and fixed spans: K in training and at inference, resume, rows that are left out, and what
``--dry-run`` and ``realvr data check`` print about them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from realvr.backbone import Backbone
from realvr.cli import main
from realvr.data.boxes import token_boxes
from realvr.data.reading import read
from realvr.data.sample import Box, Sample
from realvr.imaging.types import Grid
from realvr.world.splits import Recipe, samples
from stage_runs import LATENTS, config_file, configure, lines, make, numbers, run, world, write

CELLS = [Box(0, tuple(area)) for area in token_boxes(Grid(4, 4)).tolist()]
FIXED: dict[str, Any] = {"span": "fixed", "evidence_order": "given", "without_boxes": "whole-image"}


def rows(*counts: int) -> list[Sample]:
    """Questions with so many boxes each, in an order that is not the reading order."""
    found = world(len(counts))
    return [replace(sample, boxes=CELLS[:count][::-1]) for sample, count in zip(found, counts, strict=True)]


def settings(plain: Path, data: Path, out: Path, **changes: Any) -> dict[str, Any]:
    return configure("sft", plain, data, out, **FIXED | changes)


# ---------------------------------------------------------------------- K


def test_every_span_has_the_k_of_inference(plain: Path, tmp_path: Path) -> None:
    """In each row of a step; the checkpoint remembers it, and asking takes it."""
    data, out = write(rows(1, 2, 3, 0), tmp_path / "data"), tmp_path / "run"
    task, _, _ = make("sft", settings(plain, data, out))
    for batch in task.collect(0).microbatches:
        assert batch.slot_example_N.bincount().tolist() == [LATENTS] * batch.examples
    found = run("sft", settings(plain, data, out))
    assert found[0]["data/with_targets"] == 1
    assert Backbone.load(out / "final").latents == LATENTS
    assert json.loads((out / "final" / "config.json").read_text())["realvr"]["latents"] == LATENTS


def test_rows_without_boxes_have_no_span_unless_asked_for(plain: Path, tmp_path: Path) -> None:
    data = write(rows(1, 2, 0, 0), tmp_path / "data")
    raw = settings(plain, data, tmp_path / "run", without_boxes="no-span", optim={"batch": 4, "microbatch": 4})
    task, _, _ = make("sft", raw | {"pack_tokens": 200})
    (batch,) = task.collect(0).microbatches
    assert 0 < len(batch.slot_example_N.unique()) < batch.examples


# ---------------------------------------------------------------------- resume


def test_a_resumed_run_ends_as_an_uninterrupted_one(plain: Path, tmp_path: Path) -> None:
    """Trails, rows without boxes and two-turn rows, with means, jitter and a veil."""
    sequels = list(samples(Recipe("sequels", 0, 4, (64, 64))))
    data = write([*rows(1, 3, 2, 0, 0), *sequels], tmp_path / "data")
    changes = {"target": "mean", "earlier_spans": True, "spell_out": True, "too_many_boxes": "thin"}
    changes |= {"position_jitter": 5, "hide_image_ratio": 0.5}
    whole = run("sft", settings(plain, data, tmp_path / "whole", **changes, optim={"steps": 3}))
    for steps in (2, 3):
        raw = settings(plain, data, tmp_path / "parts", **changes, optim={"steps": steps}, checkpoint={"every": 2})
        parts = run("sft", raw)
    assert numbers(parts) == numbers(whole)
    assert [line["loss/reconstruction"] is not None for line in parts] == [True] * 3


# ---------------------------------------------------------------------- rows that are left out


@pytest.mark.parametrize("most", [0.5, 0.2])
def test_rows_with_more_boxes_than_k(
    most: float, plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Counted before the model is read, in a dry run too, and refused where they are too many."""
    data, out = write(rows(1, 2, 4, 3, 1, 5), tmp_path / "data"), tmp_path / "run"
    raw = settings(plain, data, out)
    raw["data"]["max_dropped"] = most
    config = str(config_file(raw, tmp_path / "mine.yaml"))
    assert main(["train", "sft", config, "--dry-run"]) == (0 if most == 0.5 else 2)
    said = " ".join(capsys.readouterr().err.split())
    assert (
        f"2 of 6 rows are left out for their boxes: 2 too_many_boxes (first: {data}, row 3: 4 boxes, more than" in said
    )
    if most == 0.2:
        assert "that is 33.3%, data.max_dropped allows 20.0%" in said
        assert "raise model.latents, or set method.too_many_boxes thin" in said and "--data.max-dropped 0.34" in said
        raw["too_many_boxes"] = "thin"
        assert run("sft", raw)[0]["data/with_targets"] == 1
        return
    assert main(["train", "sft", config]) == 0
    written = json.loads((out / "data.json").read_text())["encoding"]
    assert set(written["rejected"]) == {"too_many_boxes"} and "row" in written["first"]["too_many_boxes"]
    assert lines(out)[-1]["data/rejected_per_rank"] > 0


def test_a_trail_over_several_images(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two = [replace(s, boxes=[Box(0, CELLS[0].xyxy), Box(1, CELLS[1].xyxy)]) for s in samples(Recipe("sequels", 0, 2))]
    data = write([*rows(1, 2), *two], tmp_path / "data")
    raw = settings(plain, data, tmp_path / "run")
    config = str(config_file(raw, tmp_path / "mine.yaml"))
    for method in ("lvr-sft", "direct-sft"):
        assert main(["train", "sft", config, "--method", method]) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert f"2 boxes_on_several_images (first: {data}, row 3: boxes on images 0, 1; those of a trail are" in said
        assert "ordered: false" in said and "Traceback" not in said
    raw["data"]["sources"][0]["ordered"] = False
    assert run("sft", raw)[0]["data/with_targets"] == 1


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"span": "as-evidence"}, "without_boxes: whole-image has no effect with span: as-evidence; set span: fixed"),
        ({"evidence_order": "backwards"}, "method.evidence_order: Input should be 'reading' or 'given'"),
        ({"target": "corner"}, "method.target: Input should be 'center' or 'mean'"),
    ],
)
def test_settings_that_make_no_sense(
    changes: Any, told: str, plain: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(config_file(settings(plain, data, tmp_path / "run", **changes), tmp_path / "mine.yaml"))
    assert main(["train", "sft", config]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert told in said and "Traceback" not in said


# ---------------------------------------------------------------------- the file format


def test_order_and_earlier_boxes_survive_our_json_lines(tmp_path: Path) -> None:
    sequel = next(samples(Recipe("sequels", 1, 1)))
    (trail,) = rows(5)
    assert sequel.earlier_boxes[0] and trail.boxes != sorted(trail.boxes, key=lambda box: box.xyxy)
    data = write([sequel, replace(trail, ordered=False)], tmp_path)
    first, second = read(data)
    assert first.earlier_boxes == sequel.earlier_boxes and first.ordered
    assert second.boxes == trail.boxes and not second.earlier_boxes and not second.ordered


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("earlier_boxes", [], None),
        ("earlier_boxes", [[], []], "box_malformed"),
        ("earlier_boxes", {"0": []}, "box_malformed"),
        ("earlier_boxes", [7], "box_malformed"),
        ("earlier_boxes", [[{"image": 5, "xyxy": [0, 0, 1, 1]}]], "box_malformed"),
        ("earlier_boxes", [[{"image": 1, "xyxy": [0, 0, 1, 1]}]], "box_not_shown"),
        ("earlier_boxes", [[{"image": 0, "xyxy": [0, 0, 100, 100]}]], "box_in_pixels"),
        ("ordered", "no", "field_type"),
        ("ordered", None, None),
    ],
)
def test_odd_rows(key: str, value: Any, reason: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write(list(samples(Recipe("sequels", 1, 2))), tmp_path)
    good, bad = (json.loads(line) for line in data.read_text().splitlines())
    data.write_text(json.dumps(good) + "\n" + json.dumps(bad | {key: value}) + "\n")
    assert main(["data", "check", str(data), "--json", "--max-dropped", "1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["dropped"] == ({reason: 1} if reason else {})


def test_data_check_counts_boxes_by_sample(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two = [replace(s, boxes=[Box(0, CELLS[0].xyxy), Box(1, CELLS[1].xyxy)]) for s in samples(Recipe("sequels", 0, 1))]
    data = write([*rows(1, 0, 3, 3), *two], tmp_path)
    assert main(["data", "check", str(data)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "boxes by sample: 0 in 1, 1 in 1, 2 in 1, 3 in 2; on several images in 1; earlier replies" in said
