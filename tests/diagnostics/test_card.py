"""The card of latents: from a folder of results alone, one file, whatever names the results have."""

from __future__ import annotations

import base64
import json
import re
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tyro

from chromium import Page
from html_tree import Element, read
from optional import need_browser
from realvr.cli import main
from realvr.cli.diagnose import SuiteCommand, as_suite
from realvr.diagnostics.base import DIAGNOSTICS, Diagnostic
from realvr.diagnostics.card import FIGURES, _lines, as_markdown, read_card, write_card
from realvr.diagnostics.numbers import macro_mean
from realvr.diagnostics.parts import Shown
from realvr.diagnostics.settings import DiagnoseSettings
from realvr.diagnostics.suite import RECORD_FILE, Suite
from realvr.diagnostics.vocabulary import Vocabulary
from realvr.errors import UserError
from realvr.widgets import DASH
from realvr.widgets.figures import files

EVIL = "<script>alert(1)</script>\"'|`[x](javascript:1)` *b* ${x}"


def mean(value: float, low: float, high: float, count: int = 60) -> dict[str, Any]:
    return {"mean": value, "low": low, "high": high, "pairs": count}


def rate(count: int, of: int) -> dict[str, Any]:
    return {"count": count, "of": of, "rate": count / of, "low": count / of - 0.05, "high": count / of + 0.05}


def controls(right: int = 54, changed: int = 40) -> dict[str, Any]:
    def condition(name: str, hits: int) -> dict[str, Any]:
        found = {"accuracy": rate(hits, 60), "readable": rate(60, 60), "accuracy_readable": rate(hits, 60)}
        change = {"difference": mean((hits - right) / 60, -0.6, -0.4), "changed": rate(changed, 60)}
        return {"condition": name, "questions": 60, **found, **change}

    made = {"latents": 4, "questions": 60, "errors": 0, "dummy": "x", "seed": 0, "guessing": mean(0.25, 0.2, 0.3)}
    more = {"sham": {"equal_replies": rate(60, 60)}, "by": "", "groups": {}}
    return made | {"conditions": [condition("free", right), condition("another", 20)], **more}


def walk() -> dict[str, Any]:
    names = ("inside", "on_the_way", "at_the_end", "evidence", "cosine", "nearest_cosine", "thumbnail")
    numbers: dict[str, Any] = {
        "questions": 60,
        "whole": rate(50, 60),
        **{name: mean(0.9, 0.85, 0.95) for name in names},
    }
    numbers |= {"chance": mean(0.1, 0.1, 0.1), "chance_evidence": mean(0.1, 0.1, 0.1)}
    numbers["evidence_above_chance"] = mean(0.8, 0.75, 0.85)
    return numbers | {"latents": 4, "by": "arrows", "longer": 0, "steps": [], "groups": {}}


@cache
def read_out() -> tuple[dict[str, Any], bytes]:
    """A summary and its figure."""
    entry = [[7, EVIL, 0.5]] * 4
    cosine = {"top": [0.1] * 4, "end": [0.1] * 4, "opening": None, "random": [0.0] * 4}
    more = {"latents": 4, "raw": entry, "masked": entry, "cosine": cosine, "end": 0, "answer": [], "error": None}
    summary = Vocabulary().summarise([{"id": "q", **more}])
    return summary, files(lambda: Vocabulary().figure([Shown("model", summary)]), "vocabulary")[Path("vocabulary.svg")]


def results(folder: Path, name: str = "model") -> Path:
    """What a suite leaves: two diagnostics measured, one with a figure, one skipped."""
    folder.mkdir(parents=True)
    settings = {"model": {"name": name, "path": f"runs/{name}", "weights": "ab" * 32, "family": "gemma3"}, "latents": 4}
    DIAGNOSTICS.get("controls").result_file().dump(
        folder / "controls.json", controls() | {"settings": settings | {"data": "d.jsonl"}}
    )
    DIAGNOSTICS.get("walk").result_file().dump(folder / "walk.json", walk())
    summary, drawing = read_out()
    Vocabulary.result_file().dump(folder / "vocabulary.json", summary)
    (folder / "vocabulary.svg").write_bytes(drawing)
    done = {"reason": "", "seconds": 1.0, "peak_gib": None}
    tests = {kind: {"status": "measured", "examples": 60, **done} for kind in ("controls", "walk", "vocabulary")}
    tests["exchange"] = {"status": "skipped", "examples": 0, **done, "reason": f"no pairs in {EVIL}"}
    text = {"model": f"runs/{name}", "latents": 4, "data": "d.jsonl", "tests": tests, "version": "0"}
    RECORD_FILE.dump(folder / "diagnose.json", text)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = results(tmp_path_factory.mktemp("card") / "out")
    write_card(made, "my model")
    return made


@pytest.fixture(scope="module")
def page(folder: Path) -> Element:
    return read(folder / "card.html")


def test_verdict_numbers_and_what_is_missing(page: Element, folder: Path) -> None:
    text = page.text()
    assert next(page.all("h1")).text() == "Latents of my model"
    assert "Grounded and used" in text and "66.7 %" in text and "80.0 %" in text and "n = 60" in text
    rows = [[cell.text() for cell in one.all() if cell.tag in ("th", "td")] for one in page.all("tr")]
    accuracy = next(row for row in rows if row[0].startswith("accuracy with its own latents"))
    assert accuracy[1].startswith("90.0") and accuracy[3] == "60 questions" and accuracy[4] == "controls"
    assert any(row[0].startswith("latents in their box") for row in rows)
    assert "exchange" in text and "no pairs in" in text and "Not run: " in text
    assert "--tests controls,walk,vocabulary" in text and "--card" in text
    assert (folder / "card.md").read_text().count("\n## ") == 5


EMPTY = {"mean": None, "low": None, "high": None, "pairs": 0}
SOME: dict[str, Any] = {"mean": 0.125, "low": 0.0625, "high": 0.1875, "pairs": 60}


@pytest.mark.parametrize("kind", list(DIAGNOSTICS), ids=lambda kind: kind.name)
def test_every_diagnostic_puts_a_number_forward(kind: type[Diagnostic], tmp_path: Path) -> None:
    headings = [one.heading for one in kind.highlights]
    assert headings and len(set(headings)) == len(headings)
    diagnostic = kind()
    empty: Any = diagnostic.extend(diagnostic.summarise([]), {}, tmp_path)
    assert [one.cell(empty).text for one in kind.highlights] == [DASH] * len(headings), "nothing was measured"
    (line, *more) = _lines(kind, empty, {})
    assert line.text == DASH and line.diagnostic == kind.name and not more, "and the card says so in one line"


@pytest.mark.parametrize(
    ("name", "summary", "numbers"),
    [
        ("similarity", {"within": {"adjacent": SOME}, "residualised": SOME}, ["0.125", "0.125"]),
        (
            "consistency",
            {"rows": [{"condition": "augmentation", "rcs": SOME}], "other_questions": EMPTY},
            ["0.125", "–"],
        ),
        (
            "forcing",
            {
                "targets": {
                    "a": {"questions": 1, "schedules": []},
                    "b": {"questions": 2, "schedules": [{"forced": 0, "cosine": SOME}]},
                }
            },
            ["0.125"],
        ),
        (
            "rank",
            {"clouds": {"latents": {"rows": 9, "width": 4, "rank90": 3, "halves": [{"rank90": 2}, {"rank90": 3}]}}},
            ["3", "–"],
        ),
        ("residual", {"best": {"lift": {"value": SOME | {"mean": 12.5}}}}, ["+12.5"]),
        (
            "readout",
            {
                "groups": {
                    "a": {"mass": {"correct": EMPTY, "delta": EMPTY}},
                    "all": {"mass": {"correct": SOME, "delta": SOME}},
                }
            },
            ["0.1250", "+0.1250"],
        ),
        (
            "distances",
            {
                "distances": {
                    "a": {"latent": SOME, "final": SOME},
                    "b": {"latent": SOME | {"mean": 0.375, "low": 0.3125, "high": 0.4375}, "final": EMPTY},
                }
            },
            ["0.250", "0.125"],
        ),
        ("attention-map", {"links": {"answer_on_image": SOME, "answer_on_latents": EMPTY}}, ["0.125", "–"]),
        ("steer-region", {"toward": {"moved": SOME}}, ["+0.125"]),
        ("steer-edit", {"steps": [{"edited": {"new": rate(30, 60)}}, {"edited": {"new": rate(0, 60)}}]}, ["50.0"]),
        ("question-switch", {"selection": SOME}, ["+0.12"]),
        ("evidence-readout", {"on_latents": SOME}, ["0.125"]),
        ("cases", {"both_right": [rate(45, 60), rate(0, 60)]}, ["75.0"]),
    ],
)
def test_numbers_on_the_card_are_those_of_the_summary(name: str, summary: dict[str, Any], numbers: list[str]) -> None:
    kind = DIAGNOSTICS.get(name)
    assert [one.cell(summary).text for one in kind.highlights] == numbers
    lines = _lines(kind, summary, {name: {"examples": 60}})
    assert [one.text for one in lines] == [text for text in numbers if text != DASH]
    assert lines[0].examples == f"60 {kind.unit}" and lines[0].diagnostic == name


def test_a_mean_over_edits_is_as_sure_as_independent_edits_make_it() -> None:
    assert macro_mean([SOME, SOME]) == {
        "mean": 0.125,
        "low": pytest.approx(0.125 - 0.0625 / 2**0.5),
        "high": pytest.approx(0.125 + 0.0625 / 2**0.5),
        "pairs": 120,
    }


def test_every_diagnostic_in_the_folder_has_a_line(folder: Path) -> None:
    card = read_card(folder)
    measured = {kind.name for kind in DIAGNOSTICS if kind.read(folder) is not None}
    assert {one.diagnostic for one in card.lines} == measured == {"controls", "walk", "vocabulary"}


def test_its_command_asks_for_the_same_settings(tmp_path: Path) -> None:
    """Read again as the shell and the command line read it: several settings, one of them with several values."""
    folder = results(tmp_path / "out")
    asked = [
        DIAGNOSTICS.get("controls").configure({"conditions": ("another", "noise"), "dummy": "a b, c", "seed": 3}),
        DIAGNOSTICS.get("walk").configure({"by": "kind"}),
        DIAGNOSTICS.get("vocabulary").configure({}),
    ]
    for one in asked:
        file = folder / f"{one.name}.json"
        saved = json.loads(file.read_text())
        settings = saved.get("settings", {}) | one.fixed() | {"limit": 60}
        one.result_file().dump(file, saved | {"settings": settings})
    words = shlex.split(read_card(folder).command)
    assert words[:2] == ["realvr", "diagnose"]
    suite = tyro.cli(SuiteCommand, args=as_suite(words[2:])).suite()
    assert {one.name: one.fixed() for one in suite.diagnostics()} == {one.name: one.fixed() for one in asked}
    assert suite.run.limit == 60 and suite.card and Path(suite.run.out) == folder


def test_the_page_is_one_file_and_the_figure_is_in_it(page: Element, folder: Path) -> None:
    for element in page.all():
        for name in ("src", "href", "data", "action", "srcset"):
            assert element.attributes.get(name, "data:").startswith("data:")
    (image,) = page.all("img")
    assert base64.b64decode(image.attributes["src"].partition(",")[2]) == (folder / "vocabulary.svg").read_bytes()
    assert image.attributes["style"] == "width: 100%" and image.attributes["alt"]
    assert "![Vocabulary readout](vocabulary.svg)" in (folder / "card.md").read_text()


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    made = results(tmp_path / "out", EVIL)
    write_card(made)
    page = read(made / "card.html")
    assert not list(page.all("script")) and next(page.all("h1")).text() == f"Latents of {EVIL}"
    assert not any(name.startswith("on") for element in page.all() for name in element.attributes)
    text = (made / "card.md").read_text()
    before, _, fenced = text.partition("## Again")
    assert "<script" not in before and "[x](" not in before
    assert fenced.count("````") == 2  # the command has a backtick, and its fence more of them
    table = [line for line in text.splitlines() if line.startswith("| model |")]
    assert len(table) == 1 and len(re.findall(r"(?<!\\)\|", table[0])) == 3  # a bar in a name opens no column


def test_six_figures_at_most_in_the_order_of_the_questions(tmp_path: Path) -> None:
    made = results(tmp_path / "out")
    drawing = (made / "vocabulary.svg").read_text()
    (made / "walk.svg").write_text(drawing.replace('width="504pt"', 'width="252pt"'))
    (made / "controls-first.svg").write_text(drawing)
    card = read_card(made)
    assert [one.file for one in card.drawings] == ["controls-first.svg", "walk.svg", "vocabulary.svg"]
    assert len(FIGURES) == 6 and [one.width for one in card.drawings] == [100, 50, 100]


def test_negative_shares_have_the_minus_of_the_tables(tmp_path: Path) -> None:
    folder = results(tmp_path / "out")
    below = walk() | {"evidence_above_chance": mean(-0.02, -0.06, 0.01)}
    DIAGNOSTICS.get("walk").result_file().dump(folder / "walk.json", below)
    worse = controls(right=10) | {"settings": json.loads((folder / "controls.json").read_text())["settings"]}
    DIAGNOSTICS.get("controls").result_file().dump(folder / "controls.json", worse)
    write_card(folder, "m")
    verdict = next(one.text() for one in read(folder / "card.html").all("section"))
    assert "\u22122.0 %" in verdict and "[\u22126.0 %, 1.0 %]" in verdict
    assert "another sample's latents: \u221216.7 points" in verdict and not re.search(r"(?<!\w)-\d", verdict)


def test_without_controls_nothing_is_decided(tmp_path: Path) -> None:
    made = results(tmp_path / "out")
    (made / "controls.json").unlink()
    (made / "diagnose.json").unlink()
    card = read_card(made)
    assert card.verdict.label == "not decided" and "controls was not measured" in as_markdown(card)
    write_card(made)
    assert "Not decided" in read(made / "card.html").text()


def test_a_folder_without_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no results of a diagnostic in it; realvr diagnose MODEL .* --card"):
        write_card(tmp_path)
    assert not list(tmp_path.iterdir())


def test_results_that_are_damaged_are_named(tmp_path: Path) -> None:
    made = results(tmp_path / "out")
    (made / "walk.json").write_text('{"questions": "many"}')
    with pytest.raises(UserError, match=r"walk\.json"):
        write_card(made)


def test_no_torch_is_needed(folder: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from realvr.diagnostics.card import write_card;"
        f"write_card(Path({str(folder)!r}), 'my model');"
        "assert 'torch' not in sys.modules and 'matplotlib' not in sys.modules"
    )
    before = (folder / "card.html").read_bytes()
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert (folder / "card.html").read_bytes() == before


def test_the_report_links_to_the_card(folder: Path, tmp_path: Path) -> None:
    copied = tmp_path / "a b" / "out"
    shutil.copytree(folder, copied)
    (copied / "walk.json").unlink()  # which has no steps to draw
    assert main(["report", str(copied), "--out", str(tmp_path / "report")]) == 0
    links = [one for one in read(tmp_path / "report" / "index.html").all("a") if "card.html" in one.attributes["href"]]
    assert [one.attributes["href"] for one in links] == ["../a%20b/out/card.html"]
    assert links[0].text().startswith("Card of the latents: ")
    (copied / "card.html").unlink()
    assert main(["report", str(copied), "--out", str(tmp_path / "report")]) == 0
    assert "card.html" not in (tmp_path / "report" / "index.html").read_text()


def test_it_is_seen_in_a_browser(folder: Path) -> None:
    need_browser()
    with Page(400, 800) as browser:
        browser.open(folder / "card.html")
        assert browser.run("document.documentElement.scrollWidth <= innerWidth")
        assert browser.run("[...document.images].every(image => image.complete && image.naturalWidth > 100)")


def test_suite_options_carry_the_card() -> None:
    made = Suite(DiagnoseSettings("m", "d", "o"), card=True)
    assert json.loads(made.to_json())["suite"]["card"] is True
