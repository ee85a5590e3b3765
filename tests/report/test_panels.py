"""Panels of the case browser: what a part refuses, how maps are made smaller, and how saved records join the cases."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import case_results
import outside
from html_tree import read
from realvr.diagnostics.base import DIAGNOSTICS
from realvr.diagnostics.cases import Cases, case_ids
from realvr.diagnostics.panels import Source, join
from realvr.diagnostics.parts import Shown
from realvr.errors import UserError
from realvr.registry import load_file
from realvr.widgets.browser import MOST_NUMBERS, Bars, Facts, Map, Matrix, Measured, Overlay, Panel, Series, pooled
from realvr.widgets.explorer import Explorer

PLUGIN = Path(__file__).resolve().parents[1] / "toys" / "toy_panels.py"
NAN = float("nan")


# ---------------------------------------------------------------------- parts


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Bars([]), "bars need series"),
        (lambda: Bars([Series("", [1.0])]), "each with a name"),
        (lambda: Bars([Series("u", [1.0]), Series("v", [1.0, 2.0])]), "have one length"),
        (lambda: Bars([Series("u", [])]), "have one length"),
        (lambda: Bars([Series("u", [1.0, 2.0])], ["a"]), "a label for every value"),
        (lambda: Bars([Series("u", [NAN])]), "u: values are finite numbers"),
        (lambda: Bars([Series("u", ["1"])]), "u: values are finite numbers"),  # type: ignore[list-item]
        (lambda: Overlay("", [Map(1, 0, [[[1.0]]])]), "needs a name"),
        (lambda: Overlay("a", []), "at least one map"),
        (lambda: Overlay("a", [Map(1, 0, [[[1.0]]])] * 2), "two maps of one latent and layer"),
        (lambda: Overlay("a", [Map(1, 0, [[[1.0]]]), Map(2, 0, [[[1.0, 2.0]]])]), "the same grids"),
        (lambda: Overlay("a", [Map(1, 0, [[[1.0, 2.0], [1.0]]])]), "rows of different length"),
        (lambda: Overlay("a", [Map(1, 0, [[[float("inf")]]])]), "finite"),
        (lambda: Overlay("a", [Map(1, 0, [[]])]), "a grid without cells"),
        (lambda: Overlay("a", [Map(1, 0, [[[1.0]]])], high=-1.0), "below its start"),
        (lambda: Matrix("m", ["a"], ["b"], [[1.0], [2.0]]), "2 rows, 1 labels"),
        (lambda: Matrix("m", ["a"], ["b"], [[1.0, 2.0]]), "rows of different length"),
        (lambda: Facts([["a", "b"], ["c"]]), "rows of one length"),
        (lambda: Facts([["a", 1]]), "facts are text"),  # type: ignore[list-item]
        (lambda: Panel([]), "a panel needs parts"),
        (lambda: Panel(["text"]), "a panel needs parts"),  # type: ignore[list-item]
    ],
)
def test_a_part_that_no_page_could_draw_is_refused(make: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


def test_a_large_map_is_made_of_means_and_says_so() -> None:
    rng = random.Random(0)
    grid = [[rng.random() for _ in range(50)] for _ in range(31)]
    small = pooled(grid, 8)
    assert (len(small), len(small[0])) == (8, 8)
    for row in range(8):
        for column in range(8):
            ys = [y for y in range(31) if row * 31 // 8 <= y < (row + 1) * 31 // 8]
            xs = [x for x in range(50) if column * 50 // 8 <= x < (column + 1) * 50 // 8]
            mean = sum(grid[y][x] for y in ys for x in xs) / (len(ys) * len(xs))
            assert small[row][column] == pytest.approx(mean, rel=1e-5)
    assert pooled([[None, 1.0], [None, 3.0]], 1) == [[2.0]] and pooled([[None]], 1) == [[None]]
    many = Overlay("a", [Map(1, layer, [grid]) for layer in (*range(28), "mean")], note="Heads averaged.")
    shown = many.as_json()
    assert shown["layers"][-1] == "mean" and shown["layers"][0] == 0 and 27 in shown["layers"]
    assert len(shown["layers"]) == 13 == len(shown["maps"])
    assert shown["note"] == "Heads averaged.; 12 of 28 layers; cells averaged from 31 x 50"
    assert {(len(rows), len(rows[0])) for _, _, (rows,) in shown["maps"]} == {(24, 24)}


def test_maps_of_a_large_model_stay_within_the_budget_of_a_page() -> None:
    grid = [[0.5] * 64] * 40
    queries: list[int | str] = [*range(1, 9), "answer"]
    large = Overlay("a", [Map(query, layer, [grid]) for query in queries for layer in (*range(28), "mean")])
    shown = large.as_json()
    assert shown["layers"] == [0, 5, 11, 16, 22, 27, "mean"] and len(shown["maps"]) == 63
    numbers = sum(len(row) for _, _, grids in shown["maps"] for rows in grids for row in rows)
    assert numbers == 63 * 16 * 16 <= MOST_NUMBERS and len(json.dumps(shown)) < 200_000
    small = [[0.5] * 13] * 13
    several = Overlay("a", [Map(query, layer, [small] * 8) for query in queries for layer in range(28)]).as_json()
    assert several["note"] == "2 of 28 layers; cells averaged from " + ", ".join(["13 x 13"] * 8)


def test_a_map_that_fits_is_shown_as_it_is() -> None:
    grids = [[[0.125, 1e-7], [None, 0.25]], [[1.0]]]
    shown = Overlay("a", [Map("answer", 3, grids), Map(2, "mean", grids)]).as_json()
    assert shown["queries"] == ["answer", 2] and shown["layers"] == [3, "mean"] and shown["note"] == ""
    assert shown["maps"] == [[0, 0, grids], [1, 1, grids]]


def test_parts_of_a_pair_go_to_their_picture_and_those_of_both_to_both() -> None:
    panel = Panel(
        [Facts([["x", "both"]]), Facts([["x", "first"]], view="original"), Facts([["x", "2"]], view="edited")]
    )
    found = Measured("t", "T", panels={"pair": [panel], "one": [Panel([Facts([["x", "own"]])])]})
    words = [
        [part["rows"][0][1] for one in view for part in one["parts"]]
        for view in found.of("pair", ["one", "b"])["views"]
    ]
    assert words == [["own", "both", "first"], ["both", "2"]]
    assert found.of("one", ["one"])["views"][0] == [Panel([Facts([["x", "own"]])]).as_json()]  # not twice
    assert found.of("c", ["d"])["views"] == [[]]


# ---------------------------------------------------------------------- saved records


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = case_results.make_cases(tmp_path_factory.mktemp("runs") / "mini", 4, 1)
    case_results.make_panels(made)
    return made


def sources(folder: Path, **settings: Any) -> list[Source]:
    toys = load_file(PLUGIN)
    return [
        Source(kind, folder, {"data": "a.jsonl", "latents": 8} | settings) for kind in (toys.ToyLook, toys.ToyPairs)
    ]


def cases_of(folder: Path) -> Source:
    return Source(Cases, folder, {"data": "a.jsonl", "latents": 8})


def test_records_join_the_cases_by_the_ids_of_samples_and_pairs(folder: Path) -> None:
    summary = json.loads((folder / "cases.json").read_text())
    ids = case_ids(summary)
    assert ids == {f"turn_on_trail-{n}{end}" for n in range(4) for end in ("", "-original", "-edited")} | {"bench0/0"}
    look, pairs = join(cases_of(folder), [cases_of(folder), *sources(folder)], ids)  # cases have no panel
    assert (look.name, look.title, look.missing) == ("toy-look", "Where latents look", "")
    own = [f"turn_on_trail-{n}-{end}" for n in (0, 2, 3) for end in ("original", "edited")]
    assert set(look.panels) == {*own, "bench0/0"} - {"turn_on_trail-2-original"}
    assert set(pairs.panels) == {"turn_on_trail-0", "turn_on_trail-2", "turn_on_trail-3"}
    recorded = case_results.detail(1)
    utility = look.panels["turn_on_trail-0-edited"][0].parts[0]
    assert utility.series[0].values == recorded["utility"]  # type: ignore[union-attr]
    (shown,) = [
        one
        for one in Cases().draw([Shown("mini", summary, 0, lambda asked: [look] if asked == ids else [])])
        if getattr(one, "part", "") == "explorer"
    ]
    assert list(shown.measured) == [look]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"data": "b.jsonl"}, "it was measured on other data (b.jsonl)"),
        ({"latents": 4}, "it was measured with K = 4, the cases with K = 8"),
        ({"data": "./a.jsonl"}, ""),
        ({"data": None, "latents": None}, ""),
    ],
)
def test_records_of_other_data_or_another_k_are_no_records_of_the_case(folder: Path, settings: Any, said: str) -> None:
    look, _ = join(cases_of(folder), sources(folder, **settings), {"turn_on_trail-0-original"})
    assert look.missing == said and bool(look.panels) == (said == "")


def test_numbers_without_their_records_say_so(folder: Path, tmp_path: Path) -> None:
    (look, _) = join(cases_of(folder), sources(tmp_path), {"turn_on_trail-0-original"})
    assert look.missing == "its records (toy-look.jsonl) are not beside its numbers" and not look.panels


def test_a_record_that_makes_no_panel_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"toy-look.jsonl: what is recorded of 'elsewhere' makes no panel"):
        join(cases_of(folder), sources(folder), {"elsewhere"})
    (tmp_path / "toy-look.jsonl").write_text('{"id": "x"}\n{"id": \n')
    with pytest.raises(UserError, match=r"toy-look.jsonl, line 2: not a record"):
        join(cases_of(tmp_path), sources(tmp_path), {"x"})

    class Wrong(load_file(PLUGIN).ToyLook):  # type: ignore[misc, name-defined]
        def panel(self, record: Any) -> Any:
            return "text"

    with pytest.raises(UserError, match="panel must return a Panel"):
        join(cases_of(folder), [Source(Wrong, folder, {})], {"turn_on_trail-0-original"})


def test_the_walk_shows_its_cosines_and_whether_a_latent_is_in_its_box() -> None:
    record = {"id": "x", "latents": 2, "cosine": [0.5, -0.25], "nearest_cosine": [0.75, 0.5], "inside": [True, False]}
    panel = DIAGNOSTICS.get("walk")().panel(record | {"error": None})
    assert panel is not None
    (bars,) = panel.as_json()["parts"]
    assert [one["values"] for one in bars["series"]] == [[0.5, -0.25], [0.75, 0.5], [1, 0]]
    assert DIAGNOSTICS.get("walk")().panel({"id": "x", "error": "damaged"}) is None


# ---------------------------------------------------------------------- the source of the page


def test_the_page_holds_every_saved_number_once_for_each_case(folder: Path, tmp_path: Path) -> None:
    outside.run("report", folder, "--out", tmp_path, plugin=PLUGIN)
    tree = read(tmp_path / "index.html")
    scripts = [one for one in tree.all("script") if "data-panels" in one.attributes]
    assert len(scripts) == 5
    found = [json.loads(one.text()) for one in scripts]
    assert [[[len(view) for view in test["views"]] for test in case] for case in found] == [
        [[1, 1], [2, 2]],
        [[0, 0], [0, 0]],
        [[0, 1], [2, 2]],
        [[1, 1], [2, 2]],
        [[1], [0]],
    ]
    overlay = found[0][0]["views"][1][0]["parts"][1]
    for query, layer, grids in case_results.detail(1)["maps"]:
        place = [overlay["queries"].index(query), overlay["layers"].index(layer)]
        assert [*place, grids] in overlay["maps"]
    assert (
        "Measured of this case, and drawn with JavaScript: Where latents look, What pairs tell."
        in next(tree.all("article")).text()
    )


def test_a_page_counts_the_panels_that_it_shows(folder: Path) -> None:
    """Of four diagnostics one was measured elsewhere, and one has records of other samples only."""
    cases = json.loads((folder / "cases.json").read_text())["cases"]
    ids = case_ids({"cases": cases})
    look, pairs = join(cases_of(folder), sources(folder), ids)
    away = Measured("away", "Elsewhere", missing="it was measured on other data (b.jsonl)")
    more = [replace(away, name="further", title="There too"), Measured("none", "Of other samples")]
    explorer = Explorer("x", "x", ["mini"], cases, [away, look, pairs, *more])
    assert explorer.size().startswith("5 cases with the panels of 2 diagnostics: ")
    assert Explorer("x", "x", ["mini"], cases[:1], [away, look]).size().startswith("1 case with the panels of 1 diag")
    assert Explorer("x", "x", ["mini"], cases, [away]).size().startswith("5 cases: ")
    left = "Not shown, it was measured on other data (b.jsonl): Elsewhere, There too."
    here = "Measured of this case, and drawn with JavaScript:"
    assert [explorer.measured_of(case) for case in cases[:2]] == [
        f"{here} Where latents look, What pairs tell. {left} Not measured for this case: Of other samples.",
        f"{left} Not measured for this case: Where latents look, What pairs tell, Of other samples.",
    ]


def test_ids_and_texts_that_would_like_to_be_more_stay_text(folder: Path, tmp_path: Path) -> None:
    evil = "</script><img src=x onerror=alert(1)>\u2028"
    shutil.copytree(folder, tmp_path / "run")
    for name in ("cases.json", "toy-look.jsonl", "toy-pairs.jsonl"):
        file = tmp_path / "run" / name
        text = (
            file.read_text()
            .replace("turn_on_trail-0", json.dumps(evil)[1:-1])
            .replace("both 0", json.dumps(evil)[1:-1])
        )
        file.write_text(text)
    outside.run("report", tmp_path / "run", "--out", tmp_path / "out", plugin=PLUGIN)
    tree = read(tmp_path / "out/index.html")
    assert not any(name.startswith("on") for element in tree.all() for name in element.attributes)
    shown = json.loads(next(one for one in tree.all("script") if "data-panels" in one.attributes).text())
    assert shown[1]["views"][0][0]["parts"][0]["rows"] == [["both", evil]] and len(shown[0]["views"][0]) == 1
