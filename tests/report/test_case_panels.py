"""Every diagnostic in the case browser: what it shows of a case, from records written by hand and from a real run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from html_tree import read
from realvr.cli import main
from realvr.data.export import write
from realvr.diagnostics.base import DIAGNOSTICS
from realvr.diagnostics.cases import Cases
from realvr.diagnostics.panels import AGGREGATE_ONLY, Source, has_panel, join
from realvr.world.splits import Recipe, samples
from stage_runs import with_markers

COLORS = ["red", "blue", "pink"]
PAIRS = ("counterfactual", "sensitivity", "distances", "exchange", "residual", "steer-edit")
SINGLES = ("steer", "steer-region", "grounding")


def test_every_diagnostic_has_a_panel_or_is_declared_to_have_aggregates_only() -> None:
    without = {name for name in DIAGNOSTICS.names() if not has_panel(DIAGNOSTICS.get(name))}
    browser = {name for name in without if DIAGNOSTICS.get(name).opens}
    assert without - browser == set(AGGREGATE_ONLY) and browser == {"cases"}
    docs = (Path(__file__).resolve().parents[2] / "docs" / "report.md").read_text()
    (sentence,) = [line for line in docs.splitlines() if line.startswith("No panel: ")]
    assert all(f"`{name}`" in sentence for name in AGGREGATE_ONLY)
    assert sentence.count("`") == 2 * len(AGGREGATE_ONLY)


def shown(folder: Path, name: str, records: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """What the page has of a diagnostic's records: the panels of each view of the case ``p`` (views o and e)."""
    kind = DIAGNOSTICS.get(name)
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (found,) = join(Source(Cases, folder, {}), [Source(kind, folder, {})], {"p", "o", "e"})
    assert not found.missing
    return found.of("p", ["o", "e"])["views"]  # type: ignore[no-any-return]


def rows(panel: dict[str, Any]) -> list[list[str]]:
    return [row for part in panel["parts"] if part["kind"] == "facts" for row in part["rows"]]


def test_answers_and_distances_of_a_pair_are_shown_with_both_pictures(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"pair": "p", "truths": ["A", "B"], "choices": COLORS, "errors": [None, None]}
    first = asked | {"protocol": "two-turn", "first_span": "keep", "extracted": ["A", "A"]}
    second = asked | {"protocol": "separate", "first_span": "none", "extracted": ["C", None]}
    views = shown(tmp_path, "counterfactual", [first, second | {"pair": "elsewhere"}, second])
    assert views[0] == views[1] and len(views[0]) == 1  # one panel of all its records, on either picture
    assert rows(views[0][0]) == [
        ["one conversation, span kept", "A, red (right)", "A, red (right for the original)"],
        ["two conversations", "C, pink (wrong)", "not readable"],
    ]
    moved = {"latent": 0.25, "latent_unrelated": 0.5, "final": 0.125, "final_unrelated": None, "error": None}
    ((panel,), _) = shown(tmp_path, "sensitivity", [asked | moved | {"per_slot": 0.5, "extracted": ["A", "B"]}])
    assert rows(panel) == [
        ["original picture", "A, red (right)"],
        ["edited picture", "B, blue (right)"],
        ["mean of the latents", "0.25", "0.5"],
        ["slot by slot", "0.5", "–"],
        ["state before the answer", "0.125", "–"],
    ]
    ((panel,), _) = shown(tmp_path, "distances", [{"pair": "p", **moved}])
    assert [row[0] for row in rows(panel)] == ["mean of the latents", "state before the answer"]
    still = asked | {"truths": ["A", "A"], "protocol": "separate", "first_span": "none", "extracted": ["A", "B"]}
    assert rows(shown(tmp_path, "counterfactual", [still])[0][0]) == [
        ["two conversations", "A, red (right)", "B, blue (wrong)"]
    ]
    for name in PAIRS[:3]:
        failed = asked | {"protocol": "separate", "first_span": "none", "extracted": [None, None], "error": "broken"}
        found = shown(tmp_path, name, [failed | {"errors": ["broken"] * 2}])
        assert found == [[], []] or rows(found[0][0])[0][1:] == ["cannot be read"] * 2


def swap(direction: str, condition: str, selector: str, margin: float, said: str | None, **more: Any) -> dict[str, Any]:
    truths = ["A", "B"] if direction == "edited-to-original" else ["B", "A"]
    record = {"pair": "p", "edit": "x", "direction": direction, "condition": condition, "selector": selector, "k": 0}
    record |= {"seed": None, "latents": 3, "positions": [], "recipient_truth": truths[0], "donor_truth": truths[1]}
    return record | {"extracted": said, "margin": margin, "choices": COLORS, "error": None} | more


def test_swapped_latents_belong_to_the_picture_that_stays(tmp_path: Path) -> None:
    way, back = "edited-to-original", "original-to-edited"
    records = [
        swap(way, "unmodified", "none", -2.0, "A", contrast=[0.1, 0.0, 0.2]),
        swap(way, "sham", "full", -2.0, "A", k=3, positions=[1, 2, 3]),
        swap(way, "swap", "contrast", -1.0, "A", k=1, positions=[3]),
        swap(way, "swap", "random", -1.0, "B", k=1, seed=0, positions=[1]),
        swap(way, "swap", "random", -2.0, "A", k=1, seed=1, positions=[2]),
        swap(way, "swap", "from-step", 1.0, "B", k=2, positions=[2, 3], parts_at=2),
        swap(way, "swap", "full", 2.0, "B", k=3, positions=[1, 2, 3]),
        swap(way, "unrelated", "full", -2.5, "C", k=3, positions=[1, 2, 3]),
        swap(back, "sham", "full", -1.0, "B", k=3, positions=[1, 2, 3]),
        {"pair": "p", "direction": "", "condition": "no-control", "selector": "none", "k": 0, "seed": None},
    ]
    (original,), (edited,) = shown(tmp_path, "exchange", records)
    assert rows(original) == [
        ["none (sham)", "A, red (own)", "0.00"],
        ["largest contrast: 3", "A, red (own)", "+1.00"],
        ["from 2 on", "B, blue (the other picture's)", "+3.00"],
        ["all", "B, blue (the other picture's)", "+4.00"],
        ["all, of an unrelated picture", "C, pink (neither)", "−0.50"],
        ["1 at random, 2 times", "the other picture's 1 time", "+0.50"],
    ]
    assert rows(edited) == [["none (sham)", "B, blue (own)", "0.00"]]
    contrast, late = original["parts"][0]["series"]
    assert contrast["values"] == [0.1, 0.0, 0.2] and late["values"] == [4.0, 3.0, None]
    assert late["about"].endswith("the pictures part at step 2")
    assert shown(tmp_path, "exchange", records[-1:]) == [[], []]


def test_injected_steps_show_margin_and_answer_by_alpha(tmp_path: Path) -> None:
    def curve(margins: list[float], said: list[str | None]) -> dict[str, Any]:
        return {"margin": margins, "extracted": said}

    told = {"recipient_truth": "B", "donor_truth": "A", "step": [0.0, 1.0], "norm": [0.0, 4.0]}
    told |= {"inject": curve([-1.0, 1.0], ["B", "A"]), "random": [curve([-1.0, -1.5], ["B", None])]}
    record = {"pair": "p", "alphas": [0.0, 1.0], "choices": COLORS, "directions": {"original-to-edited": told}}
    original, (edited,) = shown(tmp_path, "residual", [record | {"error": None}])
    assert original == []
    steps, margins = (part for part in edited["parts"] if part["kind"] == "bars")
    assert steps["series"][0]["values"] == [None, 0.25] and margins["labels"] == ["α = 0", "α = 1"]
    assert [one["values"] for one in margins["series"]] == [[0.0, 2.0], [0.0, -0.5]]
    assert rows(edited)[1] == ["α = 1", "A, red (the other picture's)", "not readable"]
    assert shown(tmp_path, "residual", [{"pair": "p", "directions": {}, "error": "broken"}]) == [[], []]


def test_moved_latents_of_all_steps_are_one_table(tmp_path: Path) -> None:
    common: dict[str, Any] = {"id": "e", "skipped": None, "error": None, "choices": COLORS, "box": [0.5, 0.0, 1.0, 0.5]}
    known = common | {"old_truth": "A", "new_truth": "B", "later": {"moved": [True, False]}, "cell": [4, 0]}
    records = [
        known | {"step": 4, "extracted": {"moved": "A"}, "later": {"moved": []}},  # of an earlier version
        known | {"step": 2, "extracted": {"moved": "B", "own_place": "A"}, "random": {"extracted": "C"}, "distance": 3},
        {"id": "e", "step": 6, "skipped": "there is no place", "error": None},
    ]
    original, (edited,) = shown(tmp_path, "steer", records)
    assert original == [] and rows(edited) == [
        ["z_2", "row 5, column 1 (3 away)", "B, blue (follows)", "A, red (keeps)", "C, pink (neither)", "1 of 2"],
        ["z_4", "row 5, column 1", "A, red (keeps)", "–", "–", "–"],
    ]
    assert edited["note"].endswith("z_6: there is no place.")
    assert rows(shown(tmp_path, "steer", records[2:])[1][0]) == [["z_6: there is no place"]]
    names = ("free", "moved", "own_place", "random")
    region = common | {"step": 1, "distance": 2, "extracted": dict(zip(names, ["A", "B", None, "A"], strict=True))}
    region |= {"right": dict(zip(names, [True, False, False, True], strict=True)), "toward": {"moved": -0.0625}}
    assert rows(shown(tmp_path, "steer-region", [region])[1][0]) == [
        ["z_1", "x 75 %, y 25 % (2 away)", "B, blue (wrong)", "not readable", "A, red (right)", "A, red (right)"]
        + ["−0.062"]
    ]
    edit = known | {"pair": "p", "step": 8, "toward": {"edited": None}}
    edit |= {"extracted": {"edited": "B", "original": "A", "random": "A", "free": "A"}}
    (panel,), nothing = shown(tmp_path, "steer-edit", [edit])  # the model has seen the original picture
    assert nothing == [] and rows(panel) == [["z_8", "B, blue (follows)", *["A, red (keeps)"] * 3, "–"]]
    ground = {"id": "o", "latents": 8, "negatives": 16, "margin": -0.5, "cos_positive": 0.25, "oracle_margin": 0.125}
    ((panel,), _) = shown(tmp_path, "grounding", [ground | {"error": None}])
    assert [row[1] for row in rows(panel)] == ["−0.500", "0.250", "0.125"]
    for name in SINGLES:
        assert shown(tmp_path, name, [{"id": "o", "step": None, "error": "broken"}]) == [[], []]


def test_numbers_in_words_have_the_minus_of_the_page_and_no_sign_at_zero(tmp_path: Path) -> None:
    health: dict[str, Any] = {"id": "o", "latents": 2, "norm": [1.0, 2.0], "adjacent": [0.5], "readout": None}
    health |= {"logp": [-7.7651, -0.5, -0.0001], "drift": None, "visual_norm": 1234.5, "error": None}
    ((panel,), _) = shown(tmp_path, "health", [health | {"readout": [0.1, 0.2]}])
    assert [row[1] for row in rows(panel)] == ["1.23e3", "0.000", "−7.765"]
    moved = {"pair": "p", "latent": 9.536e-07, "latent_unrelated": -2.5e-08, "error": None}
    ((panel,), _) = shown(tmp_path, "distances", [moved])
    assert rows(panel) == [["mean of the latents", "9.54e−7", "−2.5e−8"]]


@pytest.mark.slow
def test_a_real_run_fills_every_panel(build_tiny: Any, tmp_path: Path) -> None:
    model = with_markers(build_tiny("qwen2.5-vl"), tmp_path / "model")
    write(samples(Recipe("trails-pairs", count=1, size=(48, 48))), "jsonl", tmp_path / "pairs.jsonl")
    tests = [name for name in DIAGNOSTICS.names() if name in {"cases", *PAIRS, *SINGLES}]
    args = ["diagnose", model, "--data", tmp_path / "pairs.jsonl", "--tests", ",".join(tests), "--device", "cpu"]
    args += ["--max-new", 4, "--out", tmp_path / "out", "--set", "cases.at=2", "--limit", 8]
    assert main([str(arg) for arg in args]) == 0
    assert main(["report", str(tmp_path / "out"), "--out", str(tmp_path / "page")]) == 0
    scripts = [one for one in read(tmp_path / "page" / "index.html").all("script") if "data-panels" in one.attributes]
    filled: dict[str, int] = {}
    for script in scripts:
        for one in json.loads(script.text()):
            assert not one["missing"], one
            filled[one["name"]] = filled.get(one["name"], 0) + sum(map(bool, one["views"]))
    assert set(filled) == {*PAIRS, *SINGLES} and all(filled.values()), filled
