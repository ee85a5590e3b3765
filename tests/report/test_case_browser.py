"""The case browser in headless Chromium, on records of two diagnostics: filters, maps, bars, keys, links, what is
missing, and that nothing is fetched.

REALVR_SCREENSHOTS=DIR keeps the pictures that the last test takes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

import case_results
import outside
from chromium import Page
from optional import need_browser

PLUGIN = Path(__file__).resolve().parents[1] / "toys" / "toy_panels.py"
COUNT = 4
EVIL = "</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four pairs, of which the last failed, and two questions of other benchmarks with two pictures each."""
    need_browser()
    folder = case_results.make_cases(tmp_path_factory.mktemp("runs") / "mini", COUNT, 2)
    case_results.make_panels(folder)
    pairs = folder / "toy-pairs.jsonl"
    pairs.write_text(pairs.read_text().replace("both 3", EVIL))
    outside.run("report", folder, "--out", folder / "out", plugin=PLUGIN)
    return folder / "out/index.html"


@pytest.fixture(scope="module")
def browser(page: Path) -> Iterator[Page]:
    with Page() as tab:
        yield tab


@pytest.fixture
def tab(browser: Page, page: Path) -> Iterator[Page]:
    browser.resize(1280)
    browser.open(page)
    yield browser
    browser.run("1")  # collects events that are still on their way
    assert not browser.complaints
    assert all(url.startswith(("file:", "data:", "about:")) for url in browser.requests), browser.requests


HEADING = "document.querySelector('.card h3').textContent"
SHOWN = "Array.from(document.querySelectorAll('.thumb')).map((t, n) => t.offsetWidth ? n : -1).filter(n => n >= 0)"


def choose(tab: Page, selector: str, value: str) -> None:
    tab.run(
        f"(() => {{ const s = document.querySelector({selector!r}); s.value = {value!r}; "
        "s.dispatchEvent(new Event('change')); })()"
    )


def heat(tab: Page, board: int = 0) -> list[float]:
    """The numbers of the cells that are drawn over a picture, row by row."""
    svg = f"document.querySelectorAll('.card .board')[{board}].querySelector('svg.heat')"
    return [float(value) for value in tab.run(f"Array.from({svg}.querySelectorAll('rect')).map(r => r.dataset.value)")]


def saved(number: int, query: int | str, layer: int | str) -> list[float]:
    maps = {(q, step): grids for q, step, grids in case_results.detail(number)["maps"]}
    return [value for row in maps[query, layer][0] for value in row]


def number_of(tab: Page) -> int:
    return int(tab.run(HEADING).split()[1]) - 1


def part(test: str, inside: str) -> str:
    return f"document.querySelector('.part[data-test={test}] {inside}')"


def test_filters_leave_the_cases_that_fit(tab: Page) -> None:
    count = "document.querySelector('.filters .count').textContent"
    assert tab.run(SHOWN) == [0, 1, 2, 3, 4, 5] and tab.run(count) == "6 of 6 cases"
    choose(tab, "#cases-0-task", "bench1")
    assert tab.run(SHOWN) == [5] and number_of(tab) == 5 and tab.run(count) == "1 of 6 cases"
    choose(tab, "#cases-0-task", "trails-pairs")
    assert tab.run(SHOWN) == [0, 1, 2, 3] and number_of(tab) == 0
    choose(tab, "#cases-0-outcome", "failed")
    assert tab.run(SHOWN) == [3] and number_of(tab) == 3 and "✗ failure" in tab.run(HEADING)
    tab.press("ArrowRight", 39)  # nothing else to go to
    assert number_of(tab) == 3
    choose(tab, "#cases-0-task", "bench0")
    assert tab.run(SHOWN) == [] and tab.run(count) == "0 of 6 cases"
    assert tab.run("document.querySelector('.card > .none').offsetHeight > 0")
    assert tab.run("document.querySelector('.card .case').offsetHeight") == 0
    tab.run("document.activeElement.blur()")
    tab.press("x", 88)
    assert tab.run(SHOWN) == [0, 1, 2, 3, 4, 5] and tab.run("document.activeElement.id") == "cases-0-task"
    choose(tab, "#cases-0-edit", "none")
    assert tab.run(SHOWN) == [4, 5]
    choose(tab, "#cases-0-edit", "turn_on_trail")
    assert tab.run(SHOWN) == [0, 1, 2, 3]
    tab.run("document.activeElement.blur()")
    for wanted in (1, 2, 3, 0):  # the next of those that fit, round and round (case 5 was shown before)
        tab.press("n", 78)
        assert number_of(tab) == wanted


def test_maps_over_the_picture_have_the_saved_numbers(tab: Page) -> None:
    assert heat(tab) == []
    choose(tab, "#cases-0-overlay", "toy-look/attention")
    for query in (1, 5, "answer"):
        tab.run(f"document.querySelector('.queries [data-query=\"{query}\"]').click()")
        for place, layer in enumerate((0, 1, 2, "mean")):
            tab.run(
                f"(() => {{ const s = document.querySelector('#cases-0-layer'); s.selectedIndex = {place}; "
                "s.dispatchEvent(new Event('change')); })()"
            )
            values = saved(0, query, layer)
            assert heat(tab) == values
            told = tab.run("document.querySelector('.overlay-told').textContent")
            best = values.index(max(values))
            assert f"row {best // case_results.GRID + 1}, column {best % case_results.GRID + 1}" in told
            assert "this map’s largest" in told and "share of attention" in told and "Mean over heads." in told
    dark, light = (
        tab.run(
            "(() => { const cells = Array.from(document.querySelectorAll('.card svg.heat rect')).sort((a, b) => "
            f"a.dataset.value - b.dataset.value); return cells.at({place}).getAttribute('fill'); }})()"
        )
        for place in (0, -1)
    )
    assert light == "rgb(253, 231, 37)" and dark != light
    tab.run("document.querySelectorAll('.card .toggle button')[1].click()")
    assert heat(tab) == saved(1, "answer", "mean")  # the edited picture has its own
    choose(tab, "#cases-0-overlay", "toy-look/saliency")  # a fixed scale, fewer maps: what there is of z_1
    assert heat(tab) == saved(1, 1, 0)
    assert "0.5, share of saliency" in tab.run("document.querySelector('.overlay-told').textContent")


def test_a_question_with_two_pictures_shows_both_and_no_edited_one(tab: Page) -> None:
    tab.run("document.querySelectorAll('.thumb')[4].click()")
    assert tab.run("document.querySelectorAll('.card .board img').length") == 2
    assert tab.run("document.querySelector('.card .toggle').offsetHeight") == 0
    assert tab.run("document.querySelector('.card input[type=range]').offsetHeight") == 0
    stops = (
        "Array.from(document.querySelectorAll('.card .board')[{}].querySelectorAll('.stop')).map(s => s.dataset.last)"
    )
    assert tab.run(stops.format(1)) == ["8"] and "8" not in tab.run(stops.format(0))
    label = "document.querySelectorAll('.card .board')[1].querySelector('.stop').getAttribute('aria-label')"
    assert tab.run(label).startswith("z8 at row 2, column 2")  # cell 7 of a grid of six columns
    choose(tab, "#cases-0-overlay", "toy-look/attention")
    assert heat(tab) == saved(40, 1, "mean") and heat(tab, 1) == []  # the record has a map of the first alone


def test_bars_have_the_saved_numbers_and_choose_a_latent(tab: Page) -> None:
    detail = case_results.detail(0)
    rows = (
        f"Array.from({part('toy-look', '.bars tbody')}.rows).map(r => [r.cells[0].textContent, "
        "...Array.from(r.cells).slice(1).map(c => c.dataset.value)])"
    )
    utility, readout = tab.run(rows)
    assert utility[0] == "utilitynats" and [float(value) for value in utility[1:]] == detail["utility"]
    assert readout[1] == "none" and [float(value) for value in readout[2:]] == detail["readout"][1:]
    heights = (
        f"Array.from({part('toy-look', '.bars tbody')}.rows[0].querySelectorAll('.plot')).map(p => "
        "[p.querySelector('.bar').className, p.querySelector('.bar').offsetHeight])"
    )
    drawn = tab.run(heights)
    assert [name == "bar below" for name, _ in drawn] == [value < 0 for value in detail["utility"]]
    largest = max(range(8), key=lambda place: abs(detail["utility"][place]))
    assert max(range(8), key=lambda place: drawn[place][1]) == largest
    small = f"{part('toy-look', '.bars tbody')}.rows[0].cells[1]"
    assert detail["utility"][0] == -9.53e-07
    assert tab.run(f"[{small}.textContent, {small}.title]") == ["−9.53e−7", "z1: −9.53e−7"]
    button = f"{part('toy-look', '.bars thead')}.querySelectorAll('button')[5]"
    tab.run(f"{button}.focus()")
    tab.run(f"{button}.click()")
    chosen = f"{part('toy-look', '.bars')}.querySelectorAll('td.chosen').length"
    assert tab.run(chosen) == 2 and tab.run("document.activeElement.dataset.latent") == "6"
    tab.run(f"{part('toy-look', '[data-offer=attention]')}.focus()")
    tab.press("Enter", 13)
    assert heat(tab) == saved(0, 6, "mean")
    assert tab.run("document.activeElement.dataset.offer") == "attention"  # drawn again, and still in the focus


def test_keys_move_through_cases_latents_layers_and_pictures(tab: Page) -> None:
    tab.press("o", 79)
    assert heat(tab) == saved(0, 1, "mean")
    tab.press("3", 51)
    assert heat(tab) == saved(0, 3, "mean")
    tab.press("k", 75)
    tab.press("l", 76)  # behind the mean comes the first layer again
    assert heat(tab) == saved(0, 4, 0)
    tab.press("j", 74)
    tab.press("l", 76)
    assert heat(tab) == saved(0, 3, 1)
    tab.press("L", 76)
    tab.press("0", 48)
    assert heat(tab) == saved(0, "answer", 0)
    tab.press("e", 69)
    assert heat(tab) == saved(1, "answer", 0)
    tab.press("ArrowRight", 39)
    assert number_of(tab) == 1 and heat(tab) == []
    assert "Not measured for this picture" in tab.run("document.querySelector('.overlay-told').textContent")
    tab.press("ArrowLeft", 37)
    tab.press("ArrowLeft", 37)
    assert number_of(tab) == 5
    tab.run("document.querySelector('.queries button').focus()")
    tab.press("1", 49)
    tab.press("ArrowDown", 40)
    assert heat(tab) == saved(50, 2, 0)
    tab.press("ArrowUp", 38)
    assert heat(tab) == saved(50, 1, 0)
    tab.run("document.querySelector('#cases-0-layer').focus()")
    tab.press("e", 69)  # a list keeps its letters
    tab.press("n", 78)
    assert number_of(tab) == 5
    tab.run("document.activeElement.blur()")
    assert not tab.run("document.querySelector('.keys').open")
    tab.press("?", 191)
    listed = tab.run("document.querySelector('.keys').textContent")
    assert tab.run("document.querySelector('.keys').open") and "next and previous layer" in listed
    tab.press("f", 70)
    assert tab.run("document.activeElement.id") == "cases-0-task"
    tab.run("document.activeElement.blur()")
    tab.press("r", 82)
    assert heat(tab) == []


def test_what_was_not_measured_is_said(tab: Page) -> None:
    """In one line below the panels, which are those with something to show."""
    words = "Array.from(document.querySelectorAll('.measured > *')).map(p => p.dataset.test ?? p.textContent)"
    for number, expected in (
        (0, ["toy-look", "toy-pairs"]),
        (1, ["Not measured for this case: Where latents look, What pairs tell."]),
        (2, ["toy-pairs", "Not measured for this picture of the case: Where latents look."]),
        (4, ["toy-look", "Not measured for this case: What pairs tell."]),
    ):
        tab.run(f"document.querySelectorAll('.thumb')[{number}].click()")
        assert tab.run(words) == expected
    tab.run("document.querySelectorAll('.thumb')[2].click()")
    tab.press("e", 69)
    assert tab.run(words) == ["toy-look", "toy-pairs"]
    assert tab.run(f"{part('toy-pairs', '')}.textContent").endswith("both 2ownsecond 2")
    assert tab.run(f"{part('toy-look', 'svg.matrix')}.querySelectorAll('rect').length") == 3  # a hole is no cell


def test_texts_of_records_stay_text(tab: Page) -> None:
    tab.run("document.querySelectorAll('.thumb')[3].click()")
    assert EVIL in tab.run(f"{part('toy-pairs', '')}.textContent")
    assert "<b>question</b>" in tab.run(f"{part('toy-look', 'svg.matrix')}.textContent")
    assert tab.run("document.querySelectorAll('img[onerror], .matrix b').length") == 0


def test_a_link_opens_the_case_the_latent_and_the_map(tab: Page, page: Path) -> None:
    assert tab.run("location.hash") == ""  # nothing was chosen yet
    tab.run("document.querySelectorAll('.thumb')[2].click()")
    tab.press("e", 69)
    choose(tab, "#cases-0-overlay", "toy-look/attention")
    tab.press("4", 52)
    tab.press("l", 76)
    choose(tab, "#cases-0-task", "trails-pairs")
    link = tab.run("location.href")
    assert "case=turn_on_trail-2" in link
    tab.run("location.hash = ''")
    tab.open(page)
    assert number_of(tab) == 0
    tab.run(f"location.href = {json.dumps(link)}")
    tab.run("new Promise(done => setTimeout(done, 100))")
    assert number_of(tab) == 2 and heat(tab) == saved(21, 4, 0) and tab.run(SHOWN) == [0, 1, 2, 3]
    assert tab.run("document.querySelectorAll('.toggle button')[1].getAttribute('aria-pressed')") == "true"
    tab.run("location.hash = '#case=nothing&overlay=x&latent=%3Cb%3E'")
    tab.run("new Promise(done => setTimeout(done, 100))")
    assert number_of(tab) == 2  # a case that is not there changes nothing


def test_it_fits_small_screens_everything_has_a_name_and_can_be_looked_at(tab: Page, tmp_path: Path) -> None:
    folder = Path(os.environ.get("REALVR_SCREENSHOTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    choose(tab, "#cases-0-overlay", "toy-look/attention")
    for width in (320, 700, 1280):
        tab.resize(width)
        assert tab.run("document.documentElement.scrollWidth") <= width
        assert tab.run("Array.from(document.querySelectorAll('.card button')).every(b => b.offsetHeight >= 32)")
        unnamed = (
            "Array.from(document.querySelectorAll('.card button, .card input, .card select')).filter(b => "
            "!(b.getAttribute('aria-label') || b.textContent.trim() && b.tagName !== 'SELECT' || b.labels && "
            "b.labels.length)).length"
        )
        assert tab.run(unnamed) == 0
        tab.screenshot(folder / f"browser-{width}.png", 2000)
        with Image.open(folder / f"browser-{width}.png") as picture:
            assert picture.width == width and len(picture.convert("RGB").getcolors(1 << 24) or ()) > 50


@pytest.mark.parametrize("width", [320, 420, 1280])
def test_numbers_of_bars_stand_apart_and_words_of_tables_stay_whole(tab: Page, width: int) -> None:
    tab.resize(width)
    tab.open(Path(tab.run("decodeURI(location.pathname)")))
    boxes = (
        "Array.from(document.querySelectorAll('.bars tbody tr')).map(row => Array.from(row.querySelectorAll('.value'))"
        ".map(one => { const range = document.createRange(); range.selectNodeContents(one); "
        "const box = range.getBoundingClientRect(); return [box.left, box.right]; }))"
    )
    found = tab.run(boxes)
    assert [len(row) for row in found] == [case_results.LATENTS] * 2
    assert all(right + 2 <= left for row in found for (_, right), (left, _) in zip(row, row[1:], strict=False))
    # Beside a long reply, which takes what it can get of the width.
    tab.run("document.querySelector('.facts td').textContent = 'a very long reply '.repeat(9)")
    tab.run("document.querySelector('.facts tr').insertCell(1).textContent = 'answered'")
    lines = (
        "(() => { const range = document.createRange(); "
        "range.selectNodeContents(document.querySelector('.facts').rows[0].cells[1]); "
        "return new Set(Array.from(range.getClientRects(), box => Math.round(box.top))).size; })()"
    )
    assert tab.run(lines) == 1
    assert tab.run("document.documentElement.scrollWidth") <= width


@pytest.mark.slow
def test_a_link_finds_the_model_among_several(browser: Page, page: Path, tmp_path: Path) -> None:
    """Each model has its own cases; keys move those that are shown."""
    for name in ("one", "other"):
        case_results.make_panels(case_results.make_cases(tmp_path / "runs" / name, COUNT))
    outside.run("report", tmp_path / "runs", "--out", tmp_path / "out", plugin=PLUGIN)
    browser.open(tmp_path / "out/index.html")
    seen = (
        "Array.from(document.querySelectorAll('.explorer')).map(e => [e.offsetHeight > 0, "
        "e.querySelector('.card h3').textContent.split(':')[0], e.querySelectorAll('svg.heat rect').length])"
    )
    assert browser.run(seen) == [[True, "Case 1 of 4", 0], [False, "Case 1 of 4", 0]]
    browser.run("location.hash = '#case=turn_on_trail-2&in=cases-1&view=edited&overlay=toy-look/attention&latent=3'")
    browser.run("new Promise(done => setTimeout(done, 100))")
    cells = case_results.GRID**2
    assert browser.run(seen) == [[False, "Case 1 of 4", 0], [True, "Case 3 of 4", cells]]
    browser.press("n", 78)
    assert browser.run(seen) == [[False, "Case 1 of 4", 0], [True, "Case 4 of 4", cells]]
    assert "in=cases-1" in browser.run("location.hash") and not browser.complaints
