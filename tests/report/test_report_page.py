"""The report's numbers against the records they come from, and the page against what a page must be."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from html_tree import Element, read
from realvr.cli import main
from realvr.diagnostics import DIAGNOSTICS
from realvr.widgets import significant
from report_cases import ARMS

SECTIONS = [
    "overview",
    "training",
    "benchmarks",
    "ablation",
    "sweep",
    *(kind.name for kind in DIAGNOSTICS),
    "further",
    "paper",
    "provenance",
]


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def plain(cell: str) -> float:
    """The number of a cell, without interval, dagger and typographic minus."""
    return float(cell.split("|")[0].replace("†", "").replace("\u2212", "-"))


@pytest.fixture(scope="module")
def tree(page: Path) -> Element:
    return read(page)


def column(table: list[list[str]], name: str) -> int:
    return table[0].index(name)


# ---------------------------------------------------------------------- numbers


def test_headline_scores_are_the_shares_of_right_answers(tree: Element, results: Path) -> None:
    table = tree.table("Benchmark scores, %")
    assert [row[0] for row in table[1:]] == list(ARMS)
    for row in table[1:]:
        asked = [
            one
            for one in records(results / "eval" / row[0].lower() / "predictions.jsonl")
            if one["bench"] == "mini-mmvp"
            and one["condition"] == "own"
            and one["latents"] == (0 if row[0] == "Direct" else 3)
        ]
        right = sum(one["text"] == f"<answer>{one['answer']}</answer>" for one in asked)
        assert plain(row[column(table, "mini-mmvp")]) == pytest.approx(100 * right / len(asked), abs=0.051)
        assert (
            "†" in row[column(table, "mini-mmvp")] and "|[" in row[column(table, "mini-mmvp")]
        )  # few questions; an interval
        five = [plain(cell) for cell in row[1:6]]
        assert plain(row[6]) == pytest.approx(sum(five) / 5, abs=0.1)


def test_ablation_and_difference_from_the_baseline_are_paired_differences(tree: Element, results: Path) -> None:
    def right(arm: str, condition: str, latents: int) -> dict[str, bool]:
        found = records(results / "eval" / arm / "predictions.jsonl")
        chosen = [
            one
            for one in found
            if (one["bench"], one["condition"], one["latents"]) == ("mini-mmvp", condition, latents)
        ]
        return {one["question"]: one["text"] == f"<answer>{one['answer']}</answer>" for one in chosen}

    own, mean = right("realvr", "own", 3), right("realvr", "mean", 3)
    lvr = right("lvr-rl", "own", 3)
    assert own.keys() == mean.keys() == lvr.keys()
    (row,) = [row for row in tree.table("Span ablation")[1:] if row[:2] == ["ReaLVR", "mini-mmvp"]]
    assert plain(row[6]) == pytest.approx(100 * (sum(mean.values()) - sum(own.values())) / len(own), abs=0.051)
    (row,) = [row for row in tree.table("Help and dependence, percentage")[1:] if row[:2] == ["ReaLVR", "mini-mmvp"]]
    for place, stand_in in ((3, ("own", 0)), (5, ("other", 3)), (7, ("noise", 3))):
        found = [
            one
            for one in records(results / "eval/realvr/predictions.jsonl")
            if (one["bench"], one["condition"], one["latents"]) == ("mini-mmvp", *stand_in)
        ]
        instead = right("realvr", *stand_in)
        lost = 100 * (sum(own.values()) - sum(instead.values())) / len(own)
        assert plain(row[place]) == pytest.approx(lost, abs=0.051) and "|[" in row[place]
        read = 100 * sum(one["text"].startswith("<answer>") for one in found) / len(found)
        assert f"{read:.1f} % read" in row[place]
    table = tree.table("Difference from LVR-RL")
    (row,) = [row for row in table[1:] if row[0] == "ReaLVR"]
    shown = [round(100 * sum(one.values()) / len(one), 1) for one in (own, lvr)]  # the paper quotes displayed means
    assert plain(row[1]) == pytest.approx(shown[0] - shown[1], abs=1e-6)
    assert [row[0] for row in table[1:]] == ["Direct", "ReaLVR"]


@pytest.mark.parametrize(
    ("panel", "protocol", "span"),
    [
        ("Two turns, span kept", "two-turn", "keep"),
        ("Two turns, span dropped", "two-turn", "drop"),
        ("Separate", "separate", None),
    ],
)
def test_flips_are_counted_per_protocol_and_edit(
    tree: Element, results: Path, panel: str, protocol: str, span: str | None
) -> None:
    table = tree.table(f"{panel}: paired behaviour")
    found = [
        one
        for one in records(results / "counterfactual/realvr/counterfactual.jsonl")
        if one["protocol"] == protocol and one["edit"] == "shape_swap" and (span is None or one["first_span"] == span)
    ]
    changed = [one for one in found if one["truths"][0] != one["truths"][1]]
    strict = sum(one["extracted"] == one["truths"] for one in changed)
    false = sum(one["extracted"][0] != one["extracted"][1] for one in found if one not in changed)
    (row,) = [row for row in table[1:] if row[:2] == ["ReaLVR", "shape swap"]]
    assert row[2] == f"{len(changed)} / {len(found) - len(changed)}"
    assert plain(row[column(table, "strict flip, %")]) == pytest.approx(100 * strict / len(changed), abs=0.051)
    assert row[column(table, "strict flip, %")].endswith(f" {strict}/{len(changed)}")
    assert row[column(table, "false flip, %")].endswith(f" {false}/{len(found) - len(changed)}")
    names = {row[0] for row in table[1:]}
    assert ("Direct (no span)" if protocol == "two-turn" else "Direct") in names


def test_donor_lift_is_the_frequency_above_the_sham(tree: Element, results: Path) -> None:
    found = records(results / "exchange/realvr/exchange.jsonl")

    def frequency(condition: str, selector: str) -> float:
        rows = [one for one in found if one["condition"] == condition and one["selector"] == selector]
        return 100 * sum(one["extracted"] == one["donor_truth"] for one in rows) / len(rows)

    sham = next(one["selector"] for one in found if one["condition"] == "sham")
    lift = frequency("swap", "full") - frequency("sham", sham)
    (row,) = [row for row in tree.table("Exchange")[1:] if row[:2] == ["ReaLVR", "whole span"]]
    assert plain(row[3]) == pytest.approx(lift, abs=0.051)
    table = tree.table("What the latents do")
    (row,) = [row for row in table[1:] if row[0] == "ReaLVR"]
    assert plain(row[column(table, "donor-answer lift (points)")]) == pytest.approx(lift, abs=0.051)
    last = records(results / "train/realvr/metrics.jsonl")[-1]  # four steps: the last tenth is one
    assert plain(row[column(table, "evidence margin g")]) == pytest.approx(last["evidence/margin"], abs=0.00051)


def test_differences_are_read_under_the_policy_of_the_scores(results: Path, tmp_path: Path, capsys: Any) -> None:
    root = tmp_path / "runs"
    for name in ("lvr-rl", "realvr"):
        shutil.copytree(results / "eval" / name, root / name)
        assert main(["score", str(root / name), "--policy", "vlmevalkit"]) == 0  # reads no letter inside the tags
    arguments = ["report", str(root), "--out", str(tmp_path / "out"), "--baseline", "lvr-rl"]
    assert main([*arguments, "--policy", "vlmevalkit"]) == 0
    tree = read(tmp_path / "out/index.html")
    assert [plain(row[1]) for row in tree.table("Benchmark scores, %")[1:]] == [0.0, 0.0]
    (row,) = tree.table("Difference from lvr-rl")[1:]
    assert plain(row[1]) == 0.0
    assert main(arguments) == 0  # the run's own policy, and a word about the other
    tree = read(tmp_path / "out/index.html")
    assert all(plain(row[1]) > 0 for row in tree.table("Benchmark scores, %")[1:])
    assert "Also scored under vlmevalkit: lvr-rl, realvr." in tree.text()
    capsys.readouterr()
    assert main([*arguments, "--policy", "lvr"]) == 2
    said = capsys.readouterr().err
    assert "only evaluations without a summary under lvr" in said and "--policy lvr" in said


def test_a_report_about_own_questions_says_what_the_latents_do(tmp_path: Path) -> None:
    """One question file of the user: no benchmark of the five anywhere."""
    run = tmp_path / "runs" / "mine"
    run.mkdir(parents=True)
    conditions = {("own", 4): 8, ("own", 0): 5, ("mean", 4): 8, ("other", 4): 4, ("noise", 4): 2}
    rows = [
        {"bench": "mine", "question": str(n), "condition": condition, "latents": k, "seed": 0, "answer": "A"}
        | {"choices": ["x", "y"], "text": "?", "correct": n < right, "extracted": "A" if n < right else "B"}
        | ({"extracted": None} if condition == "noise" and n > 4 else {})
        for (condition, k), right in conditions.items()
        for n in range(10)
    ]
    (run / "predictions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["score", str(run)]) == 0
    assert main(["report", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 0
    page = read(tmp_path / "out/index.html")
    assert page.table("Benchmark scores, %")[0] == ["arm", "mine"]  # one question file has no mean
    notes = [one.text() for one in page.all("p", **{"class": "note"})]
    assert not [text for text in notes if "unweighted" in text or "the mean over the tasks" in text]
    table = page.table("What the latents do")
    (row,) = table[1:]
    names = ("help: own − no span", "dependence: own − another's", "dependence: own − noise")
    cells = [row[column(table, f"{name} (points)")] for name in names]
    assert [plain(cell) for cell in cells] == [30.0, 40.0, 60.0]
    assert ["% read" in cell for cell in cells] == [True] * 3
    assert "100.0 % read" in cells[0] and "100.0 % read" in cells[1] and "50.0 % read" in cells[2]


def test_the_paper_stands_beside_published_sets_only(tmp_path: Path) -> None:
    """MMVP as published, HR-Bench with --limit, and drawings: one of the three has the paper's numbers beside it."""
    run = tmp_path / "runs" / "model"
    run.mkdir(parents=True)
    names = {"mmvp": ("mmvp", 300), "hrbench-4k": ("hr-bench", 40), "mini-blink": ("blink", 697)}
    row = {"question": "1", "condition": "own", "latents": 0, "seed": 0, "answer": "A", "text": "A", "extracted": "A"}
    (run / "predictions.jsonl").write_text("".join(json.dumps(row | {"bench": name}) + "\n" for name in names))
    benches = {
        name: {"path": "x", "format": form, "questions": rows, "tasks": [], "limit": None}
        for name, (form, rows) in names.items()
    }
    benches["hrbench-4k"]["limit"] = 40
    sets = {name: {"world": name.startswith("mini-")} for name in names}
    (run / "eval.json").write_text(json.dumps({"responder": {"latents": 0}, "benches": benches, "sets": sets}))
    assert main(["score", str(run)]) == 0
    assert main(["report", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 0
    tree = read(tmp_path / "out/index.html")
    table = tree.table("The same sets in the paper")
    assert table[0] == ["method", "backbone", "MMVP"]
    assert ["ReaLVR", "Qwen2.5-VL-7B", "72.0|± 0.4"] in table
    measured = tree.table("Measured")
    found = {row[1]: row[column(measured, "published set")] for row in measured[1:]}
    assert found["MMVP"] == "yes" and found["mini-blink"] == "no: drawn by the embedded world"
    assert found["HR-Bench 4K"] == "no: only 40 questions (--limit 40)"


def test_negative_numbers_have_one_minus(tree: Element, results: Path, tmp_path: Path) -> None:
    """Everywhere but in commands and settings, which are to be copied; also where a saved note has another one."""
    demo = json.loads((results / "demo.json").read_text())
    text = (
        "One - Two -3.8 [-10.1, +2.0], p = 1e-5, mini-3 of 2026-11-20 in runs/lr1e-5/final at 83e-4f, "
        "--seed -1 and `x -2`"
    )
    shutil.copytree(results, tmp_path / "runs")
    (tmp_path / "runs/demo.json").write_text(json.dumps(demo | {"notes": [text], "leading": [text]}))
    assert main(["report", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 0
    noted = read(tmp_path / "out/index.html")
    said = [one.text() for one in noted.all("p") if "One - Two" in one.text()]
    right = text.replace("-3.8 [-10.1", "−3.8 [−10.1").replace("1e-5,", "1e−5,")
    assert said == [right] * 2
    for page in (tree, noted):
        shown = [one.text() for one in page.all() if one.tag in ("td", "th", "p", "text", "figcaption", "caption")]
        shown += [one.attributes["aria-label"] for one in page.all("svg") if "aria-label" in one.attributes]
        assert any("\u2212" in words for words in shown)
        shown = [words.replace(right, "") for words in shown]
        assert not [words for words in shown if re.search(r"(?<![\w-])-\.?\d|\de-\d", words)]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "–"),
        (0.25, "0.25"),
        (-0.0, "0"),
        (9.536e-07, "9.54e−7"),
        (-2.5e-10, "−2.5e−10"),
        (1234567.0, "1.23e6"),
        (-12, "−12"),
    ],
)
def test_significant_digits_have_one_minus_and_no_padded_exponent(value: float | None, said: str) -> None:
    assert significant(value) == said


def test_published_numbers_are_set_apart_and_marked(tree: Element) -> None:
    marked = [one for one in tree.all("table") if "published, not measured here" in next(one.all("caption")).text()]
    assert len(marked) >= 10 and all(one.inside("published") for one in marked)
    assert not any(one.inside("published") for one in tree.all("table") if one not in marked)
    for section in tree.all("section"):  # beside no score: none of these questions is a published set
        inside = [one for one in section.all("table") if "published, not measured here" in one.text()]
        assert len(inside) == (len(marked) if section.attributes["id"] == "paper" else 0)
    (row,) = [row for row in tree.table("Qwen2.5-VL-7B, %")[1:] if row[0] == "ReaLVR"]
    assert row[1:] == ["72.0|± 0.4", "55.8|± 0.3", "71.8|± 0.3", "66.6|± 0.3", "52.2|± 0.2", "63.7|± 0.2"]


def test_data_json_holds_the_tables_unrounded(page: Path, results: Path) -> None:
    data = json.loads((page.parent / "data.json").read_text(encoding="utf-8"))
    *shown, last = data["sections"]
    assert last["id"] == "not-measured" and last["commands"]
    names = [one["id"] for one in (*shown, *last["commands"])]  # each once, shown ones in the order of the page
    assert sorted(names) == sorted(SECTIONS) and [one for one in SECTIONS if one in names[: len(shown)]] == [
        one["id"] for one in shown
    ]
    table = data["sections"][0]["tables"][0]
    summary = json.loads((results / "eval/realvr/summary.json").read_text())
    assert table["rows"][2][1]["value"] == summary["benches"]["mini-mmvp"]["headline"]


def test_a_long_run_is_drawn_as_means_of_equal_parts(tmp_path: Path) -> None:
    run = tmp_path / "long"
    run.mkdir()
    steps = [{"step": i + 1, "loss": float(i), "seconds": 1.0} for i in range(400)] + [{"step": 401, "loss": None}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps) + '{"step": 402, "lo')
    assert main(["report", str(run), "--out", str(tmp_path / "out")]) == 0
    tree = read(tmp_path / "out/index.html")
    assert "Each point is the mean of up to 4 steps." in tree.text()
    (line,) = tree.all("polyline")
    assert len(line.attributes["points"].split()) == 100
    (chart,) = tree.all("svg", role="img")
    assert chart.attributes["aria-label"] == "Loss over training steps: long from 1.5 to 398."  # means of 0…3, 396…399
    (row,) = tree.table("Base model: mean of the last tenth")[1:]
    assert row[5] == "379.500|40 of 400 steps" and row[2] == "401"


# ---------------------------------------------------------------------- arms


def test_without_a_list_arms_are_the_models(results: Path, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    shutil.copytree(results, root, ignore=shutil.ignore_patterns("demo.json", "final", "checkpoints"))
    # The records name the training folders of the original place: they moved, so names decide.
    assert main(["report", str(root), "--out", str(tmp_path / "out")]) == 0
    tree = read(tmp_path / "out/index.html")
    table = tree.table("What the latents do")
    rows = {row[0]: row for row in table[1:]}
    assert set(rows) == {"direct", "lvr-rl", "realvr", "ablations/no-negatives"}
    assert "–" not in rows["realvr"]  # training, evaluation, pairs and exchange came together
    assert "a demonstration" not in tree.text()


def test_an_evaluation_elsewhere_finds_its_training_run_by_its_weights(results: Path, tmp_path: Path) -> None:
    folders = [results / "train/realvr", tmp_path / "scores", tmp_path / "swaps"]
    shutil.copytree(results / "eval/realvr", folders[1])
    shutil.copytree(results / "exchange/realvr", folders[2])
    assert main(["report", *map(str, folders), "--out", str(tmp_path / "out")]) == 0
    rows = read(tmp_path / "out/index.html").table("What the latents do")[1:]
    assert [row[0] for row in rows] == ["realvr"]


def test_several_checkpoints_stand_behind_their_mean(results: Path, tmp_path: Path, capsys: Any) -> None:
    root = tmp_path / "seeds"
    for name in ("lvr-rl", "realvr"):
        shutil.copytree(results / "eval" / name, root / name)
    assert main(["score", str(root)]) == 0
    assert main(["report", str(root), "--out", str(tmp_path / "out")]) == 0
    tree = read(tmp_path / "out/index.html")
    (row,) = tree.table("Benchmark scores, %")[1:]
    assert row[0] == "seeds" and row[1].endswith(", 2 runs")
    values = [plain(line[1]) for line in tree.table("Benchmark scores of further arms")[1:]]
    assert plain(row[1]) == pytest.approx(sum(values) / 2, abs=0.1)


# ---------------------------------------------------------------------- the page


def test_names_and_outputs_from_outside_are_text(results: Path, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    shutil.copytree(results, root, ignore=shutil.ignore_patterns("final", "checkpoints"))
    evil = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>"
    demo = json.loads((root / "demo.json").read_text())
    demo["arms"][2]["name"] = evil
    demo["leading"], demo["notes"] = [f"Found: {evil}"], [evil]
    (root / "demo.json").write_text(json.dumps(demo))
    assert main(["report", str(root), "--out", str(tmp_path / "out"), "--title", evil]) == 0
    tree = read(tmp_path / "out/index.html")
    assert len(list(tree.all("script"))) == 2 and not list(tree.all("img"))
    assert evil in [row[0] for row in tree.table("Benchmark scores, %")]
    assert next(tree.all("h1")).text() == evil
    overview = next(section for section in tree.all("section") if section.attributes.get("id") == "overview")
    assert next(overview.all("p")).text() == f"Found: {evil}"  # what was found comes first
    assert any(evil in chart.attributes["aria-label"] for chart in tree.all("svg", role="img"))
    assert not any(name.startswith("on") for element in tree.all() for name in element.attributes)


def test_the_page_needs_nothing_outside_it(tree: Element, page: Path) -> None:
    for element in tree.all():
        for name in ("src", "href", "data", "action", "srcset"):
            value = element.attributes.get(name)
            assert value is None or value.startswith(("#", "data:")) or value == "data.json", (element.tag, value)
    style = next(tree.all("style")).text()
    assert "url(" not in style and "@import" not in style
    assert "fetch(" not in page.read_text() and "XMLHttpRequest" not in page.read_text()
    policy = next(one for one in tree.all("meta") if "http-equiv" in one.attributes)
    assert policy.attributes["content"].startswith("default-src 'none'")


def test_structure_serves_readers_without_a_mouse_or_a_picture(tree: Element) -> None:
    levels = [int(one.tag[1]) for one in tree.all() if re.fullmatch("h[1-6]", one.tag)]
    assert levels.count(1) == 1 and all(b <= a + 1 for a, b in zip(levels, levels[1:], strict=False))
    outside = [
        one.text() for one in tree.all("caption") if not any(one in fold.all("caption") for fold in tree.all("details"))
    ]
    assert len(outside) == len(set(outside)) > 8  # two tables of one name cannot be told apart by ear
    ids = [one.attributes["id"] for one in tree.all() if "id" in one.attributes]
    assert len(ids) == len(set(ids)) and set(SECTIONS) <= set(ids)
    for button in tree.all("button"):
        assert button.attributes["type"] == "button" and button.attributes["aria-pressed"] in ("true", "false")
        assert button.attributes.get("aria-controls", "main") in ids
        assert button.text().strip()
    charts = [one for one in tree.all("svg") if one.attributes.get("class") == "chart"]
    assert len(charts) > 20
    assert all(one.attributes["role"] == "img" and len(one.attributes["aria-label"]) > 30 for one in charts)
    assert all(one.attributes.get("aria-hidden") == "true" for one in tree.all("svg") if one not in charts)
    assert next(one for one in tree.all("a")).attributes["href"] == "#main"  # the first thing Tab reaches
    assert all(next(one.all("th")).attributes["scope"] == "col" for one in tree.all("table"))
    assert next(tree.all("html")).attributes["lang"] == "en"


def test_colours_have_contrast_in_both_themes(tree: Element) -> None:
    style = next(tree.all("style")).text()
    blocks = [dict(re.findall(r"--(\w+): (#\w{6})", block)) for block in re.findall(r"{([^{}]*--page: [^{}]*)}", style)]
    light, dark, system = blocks
    assert dark == system and light.keys() == dark.keys()

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(first: str, second: str) -> float:
        high, low = sorted((luminance(first), luminance(second)), reverse=True)
        return (high + 0.05) / (low + 0.05)

    for theme in (light, dark):
        for behind in ("page", "panel", "warn", "paper"):
            assert contrast(theme["text"], theme[behind]) >= 7
            assert contrast(theme["soft"], theme[behind]) >= 4.5
        for front in ("link", *(f"c{i}" for i in range(8))):
            assert contrast(theme[front], theme["page"]) >= 4.5


def test_missing_parts_say_which_command_makes_them(results: Path, tmp_path: Path) -> None:
    assert main(["report", str(results / "exchange/realvr"), "--out", str(tmp_path / "out")]) == 0
    tree = read(tmp_path / "out/index.html")
    sections = {one.attributes["id"]: one for one in tree.all("section")}
    assert list(sections) == ["overview", "exchange", "paper", "provenance", "not-measured"]
    navigation = [one.attributes["href"] for one in next(tree.all("nav")).all("a")]
    assert navigation == [f"#{name}" for name in sections]
    said = sections["overview"].text()
    assert (
        "Scores of benchmarks are not in these results. This command produces them:" in said and "realvr eval" in said
    )
    # Every other section is an entry of the last one, in order, with its heading and command.
    (entries,) = sections["not-measured"].all("dl")
    commands = {one.attributes["id"]: next(one.all("code")).text() for one in entries.all("div")}
    assert list(commands) == [name for name in SECTIONS if name not in sections]
    assert [next(one.all("dt")).text() for one in entries.all("div")][:2] == ["Training", "Benchmarks"]
    assert {name: commands[name].split(" MODEL")[0] for name in DIAGNOSTICS.names() if name != "exchange"} == {
        kind.name: kind.how().split(" MODEL")[0] for kind in DIAGNOSTICS if kind.name != "exchange"
    }
    for name, verb in {
        "training": "train rl",
        "benchmarks": "eval",
        "ablation": "eval",
        "sweep": "eval",
        "counterfactual": "counterfactual",
        "cases": "diagnose cases",
        "distances": "diagnose distances",
        "steer": "steer",
        "grounding": "diagnose grounding",
        "walk": "diagnose walk",
        "further": "train rl",
    }.items():
        assert f"realvr {verb} " in commands[name]
    listed = json.loads((tmp_path / "out/data.json").read_text())["sections"][-1]["commands"]
    assert {one["id"]: one["command"] for one in listed} == commands


def test_provenance_names_weights_files_and_a_command_that_runs(tree: Element, results: Path) -> None:
    (section,) = tree.all("section", id="provenance")
    record = json.loads((results / "eval/realvr/eval.json").read_text())
    assert record["responder"]["weights"] in section.text()
    assert all(bench["sha256"] in section.text() for bench in record["benches"].values())
    assert record["versions"]["torch"] in section.text()
    (command,) = [one.text() for one in section.all("pre") if f"--out {results / 'eval/realvr'}" in one.text()]
    words = command.split()
    assert words[:2] == ["realvr", "eval"] and "--latents" in words
    assert main(words[1:]) == 0  # everything is there, so it only has to agree with what was recorded


def test_the_same_results_give_the_same_page_without_torch(page: Path, results: Path, tmp_path: Path) -> None:
    code = (
        "import sys\nfrom realvr.cli import main\n"
        f"assert main(['report', {str(results)!r}, '--out', {str(tmp_path)!r}]) == 0\n"
        "assert 'torch' not in sys.modules and 'matplotlib' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tmp_path / 'index.html'}\n"
    assert (tmp_path / "index.html").read_bytes() == page.read_bytes()


# ---------------------------------------------------------------------- bad input


def refused(capsys: Any, *arguments: str | Path) -> str:
    assert main(["report", *map(str, arguments)]) == 2
    return capsys.readouterr().err


def test_bad_input_is_named(results: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    (tmp_path / "empty").mkdir()
    assert "looked for metrics.jsonl" in refused(capsys, tmp_path / "empty", "--out", out)
    assert "not a folder" in refused(capsys, tmp_path / "nowhere", "--out", out)
    assert "no run named" in refused(capsys, "--out", out)
    (tmp_path / "file").write_text("")
    said = refused(capsys, results, "--out", tmp_path / "file" / "report")
    assert "cannot be written" in said and "--out" in said
    assert "LVR-RL" in refused(capsys, results, "--out", out, "--baseline", "nobody")
    assert not out.exists()


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("summary.json", "{", "summary.json: damaged"),
        ("summary.json", "[]", "summary.json: a JSON object is expected"),
        ("summary.json", '{"x": 1}', "summary.json: has no 'benches'"),
        ("summary.json", '{"benches": {"mmvp": {}}}', "summary.json: not what realvr writes"),
        ("counterfactual.json", '{"protocols": {"separate": {"edits": []}}}', "counterfactual.json: not what realvr"),
        ("exchange.json", '{"rows": [{}]}', "exchange.json: not what realvr writes"),
        ("metrics.jsonl", '{"step": 1}\n{"loss": 2}\n', "metrics.jsonl, line 2: not the metrics of a step"),
        ("metrics.jsonl", '{"step": 1, "loss": "high"}\n', "metrics.jsonl: not what realvr writes"),
        ("demo.json", '{"arms": [1]}', "demo.json: not what realvr demo writes"),
        ("predictions.jsonl", "", "realvr score"),
    ],
)
def test_damaged_results_are_named(file: str, content: str, said: str, tmp_path: Path, capsys: Any) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / file).write_text(content)
    assert said in refused(capsys, run, "--out", tmp_path / "out")
