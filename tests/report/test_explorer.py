"""The page that opens with cases: without JavaScript as its source says it, and in headless Chromium.

REALVR_SCREENSHOTS=DIR keeps the pictures that the last test takes.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import case_results
from chromium import Page
from html_tree import Element, read
from optional import need_browser
from realvr.cli import main

COUNT = 4


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return case_results.make_cases(tmp_path_factory.mktemp("runs") / "mini", COUNT)


@pytest.fixture(scope="module")
def page(cases: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("page")
    assert main(["report", str(cases), "--out", str(out)]) == 0
    return out / "index.html"


@pytest.fixture(scope="module")
def content(cases: Path) -> list[Any]:
    return json.loads((cases / "cases.json").read_text())["cases"]


# ---------------------------------------------------------------------- the source of the page


def test_the_report_opens_with_them_and_shows_each_without_a_script(page: Path, content: list[Any]) -> None:
    tree = read(page)
    sections = [one.attributes["id"] for one in tree.all("section")]
    assert sections[:2] == ["cases", "overview"] and sections.count("cases") == 1
    articles = list(tree.all("article"))
    assert len(articles) == len(content) == COUNT
    for article, case in zip(articles, content, strict=True):
        text = article.text()
        assert case["question"] in text and ("(a failure)" in text) == case["failed"]
        assert [one.text() for one in next(article.all("ol")).all("li")] == case["choices"]
        for figure, view in zip(article.all("figure"), case["views"], strict=True):
            assert next(figure.all("img")).attributes["src"] == view["picture"]
            shown = [one for one in figure.all("g") if "stop" in one.attributes["class"]]
            assert _cells(shown) == _merged(view["walk"]["cells"])
            said = [one.text() for one in figure.all("li")]
            words = {
                "right": "✓ right",
                "other": "✗ wrong, it is right for the",
                "wrong": "✗ wrong",
                "unread": "no answer",
            }
            for line, name, reply in zip(said, ("mini", "mini-direct"), view["replies"], strict=True):
                assert line.startswith(name) and words[reply["verdict"]] in line


def test_failures_among_the_cases_are_counted_for_each_model(page: Path, content: list[Any]) -> None:
    """The second model is wrong on every edited picture, the first on the last case alone."""
    failed: dict[str, int] = {}
    for place, name in enumerate(("mini", "mini-direct")):
        for case in content:
            wrong = {view["replies"][place]["answer"] == view["truth"] for view in case["views"]} != {True}
            failed[name] = failed.get(name, 0) + wrong
    assert failed == {"mini": 1, "mini-direct": COUNT}
    head, *rows = read(page).table("What the cases were chosen from")
    assert {row[0]: int(row[head.index("failures among them")]) for row in rows} == failed


def test_a_model_has_one_name_on_the_page(tmp_path: Path) -> None:
    """The second model of the cases is an arm with results of its own: it is called as that is."""
    models = [{"name": "mini", "weights": "a" * 64}, {"name": "mini-direct", "weights": "b" * 64}]

    def measure(name: str, **settings: Any) -> None:
        folder = case_results.make_cases(tmp_path / "runs" / name, COUNT)
        found = json.loads((folder / "cases.json").read_text())
        (folder / "cases.json").write_text(json.dumps(found | {"settings": settings}))
        (folder / "cases_settings.json").write_text(json.dumps({"diagnostic": "cases"} | settings))

    def names(*more: str) -> list[str]:
        for name in more:
            measure(name, model=models[1])
        arms = [{"name": name, "cases": name} for name in ("Stage 1", *more)]
        (tmp_path / "runs/demo.json").write_text(json.dumps({"arms": arms}))
        assert main(["report", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 0
        tree = read(tmp_path / "out/index.html")
        said = [one.text() for one in next(next(tree.all("article")).all("figure")).all("b")]
        assert said == [row[0] for row in tree.table("What the cases were chosen from")[1:3]]
        return said

    measure("Stage 1", model=models[0], second_model=models[1])
    assert names() == ["Stage 1", "mini-direct"]
    assert names("Direct") == ["Stage 1", "Direct"]
    shutil.rmtree(tmp_path / "runs/Direct")
    assert names("one", "other") == ["Stage 1", "mini-direct"]  # weights that say nothing about the name


def _cells(stops: list[Element]) -> list[int]:
    """Cells of drawn stops, from what is said about them: rows and columns counted from 1."""
    found = []
    for one in stops:
        row, column = one.attributes["aria-label"].split(" at row ")[1].split(", cosine")[0].split(", column ")
        found.append((int(row) - 1) * case_results.GRID + int(column) - 1)
    return found


def _merged(cells: list[int]) -> list[int]:
    return [cell for place, cell in enumerate(cells) if place == 0 or cells[place - 1] != cell]


@pytest.fixture(scope="module")
def hostile(cases: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page whose texts would like to be more than texts."""
    folder = tmp_path_factory.mktemp("hostile")
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    content = json.loads((cases / "cases.json").read_text())
    for case in content["cases"]:
        case |= {"question": evil, "about": evil, "choices": [evil, "b", "c", "d"]}
        case["views"][0]["replies"][1] |= {"text": evil, "answer": None, "verdict": "unread"}
    (folder / "cases.json").write_text(json.dumps(content))
    assert main(["report", str(folder), "--out", str(folder / "out")]) == 0
    return folder / "out/index.html"


def test_what_a_model_says_stays_text(hostile: Path) -> None:
    tree = read(hostile)
    assert len(list(tree.all("script"))) == 3 and len(list(tree.all("img"))) == 2 * COUNT
    assert not any(name.startswith("on") for element in tree.all() for name in element.attributes)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"cases": [{}]}, "cases.json: not what realvr writes"),
        ({"both_right": None}, "cases.json: not what realvr writes"),
    ],
)
def test_a_damaged_file_is_named(cases: Path, tmp_path: Path, change: Any, said: str, capsys: Any) -> None:
    content = json.loads((cases / "cases.json").read_text()) | change
    (tmp_path / "cases.json").write_text(json.dumps(content))
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err


# ---------------------------------------------------------------------- in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    need_browser()
    with Page() as tab:
        yield tab


@pytest.fixture
def tab(browser: Page, page: Path) -> Iterator[Page]:
    """The page, loaded again; whatever it complains about fails the test."""
    browser.resize(1280)
    browser.open(page)
    yield browser
    browser.run("1")  # collects events that are still on their way
    assert not browser.complaints
    assert all(url.startswith(("file:", "data:", "about:")) for url in browser.requests), browser.requests


STOPS = "Array.from(document.querySelectorAll('.card .stop')).map(s => [s.classList[1], s.getAttribute('aria-label')])"
SAID = "Array.from(document.querySelectorAll('.card .said li')).map(l => l.textContent)"


def stops(tab: Page, columns: int = case_results.GRID) -> list[tuple[str, int]]:
    """(where its latents come from, cell) of every stop that is drawn."""
    found = []
    for kind, label in tab.run(STOPS):
        row, column = label.split(" at row ")[1].split(", cosine")[0].split(", column ")
        found.append((kind, (int(row) - 1) * columns + int(column) - 1))
    return found


def slide(tab: Page, value: int) -> None:
    tab.run(
        f"(() => {{ const s = document.querySelector('.card input'); s.value = {value}; "
        "s.dispatchEvent(new Event('input')); })()"
    )


def option(case: Any, letter: str) -> str:
    return f"{letter} ({case['choices'][ord(letter) - ord('A')]})"


def test_what_a_model_says_stays_text_in_the_script(tab: Page, hostile: Path) -> None:
    tab.open(hostile)
    assert tab.run("document.querySelector('.card .question').textContent.includes('alert(1)')")
    assert "onerror" in tab.run(SAID)[1]
    assert tab.run("document.querySelectorAll('img[onerror]').length") == 0


@pytest.mark.parametrize("shape", [(6, 6, 48, 48), (3, 12, 960, 250), (12, 3, 48, 100)])
def test_the_script_draws_what_the_page_has_without_it(
    tab: Page, cases: Path, tmp_path: Path, shape: tuple[int, int, int, int]
) -> None:
    """Both pictures of every case, on any grid: drawn by Python and by the script, the same marks."""
    content = json.loads((cases / "cases.json").read_text())
    for case in content["cases"]:
        for view in case["views"]:
            view |= {"grid": list(shape[:2]), "size": list(shape[2:])}
    (tmp_path / "cases.json").write_text(json.dumps(content))
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    tab.open(tmp_path / "out/index.html")
    plain = "document.querySelectorAll('.plain')[{}].querySelectorAll('svg.walk')[{}].{}"
    drawn = (
        "(() => { const copy = document.querySelector('.card svg.walk').cloneNode(true); "
        "copy.querySelectorAll('.edit').forEach(e => e.remove()); "
        "copy.querySelectorAll('.stop').forEach(s => { s.removeAttribute('tabindex'); s.removeAttribute('role'); }); "
        "return copy.{}; })()"
    )
    for number, case in enumerate(content["cases"]):
        tab.run(f"document.querySelectorAll('.card .thumb')[{number}].click()")
        for view in (0, 1):
            tab.run(f"document.querySelectorAll('.card .toggle button')[{view}].click()")
            for part in ("innerHTML", "getAttribute('viewBox')"):
                assert tab.run(drawn.replace("{}", part)) == tab.run(plain.format(number, view, part)) != ""
            assert [cell for _, cell in stops(tab, shape[1])] == _merged(case["views"][view]["walk"]["cells"])
    assert tab.run("Array.from(document.querySelectorAll('.plain')).every(one => one.offsetHeight === 0)")
    # A number stands in or beside its cell, within the picture.
    inside = (
        "Array.from(document.querySelectorAll('.card .stop .badge')).every(b => { const box = b.getBBox(), "
        "all = document.querySelector('.card svg.walk').viewBox.baseVal; return box.x >= -0.1 && box.y >= -0.1 "
        "&& box.x + box.width <= all.width + 0.1 && box.y + box.height <= all.height + 0.1; })"
    )
    assert tab.run(inside)


def test_one_click_or_key_shows_the_edited_picture(tab: Page, content: list[Any]) -> None:
    case = content[0]
    src = "document.querySelector('.card .board img').src"
    right = "document.querySelector('.card .options .true .letter').textContent"
    assert tab.run(src) == case["views"][0]["picture"] and tab.run(right) == case["views"][0]["truth"]
    assert tab.run("document.querySelectorAll('.card .edit').length") == 0
    tab.run("document.querySelectorAll('.card .toggle button')[1].click()")
    assert tab.run(src) == case["views"][1]["picture"] and tab.run(right) == case["views"][1]["truth"]
    assert tab.run("document.querySelectorAll('.card .edit').length") == len(case["views"][1]["changed"]) == 1
    assert (
        tab.run(SAID)[1]
        == f"mini-direct says {option(case, case['views'][0]['truth'])}: ✗ wrong, it is right for the original picture"
    )
    for view in (0, 1, 0):
        tab.press("e", 69)
        assert tab.run(src) == case["views"][view]["picture"]
    pressed = "Array.from(document.querySelectorAll('.card .toggle button')).map(b => b.getAttribute('aria-pressed'))"
    assert tab.run(pressed) == ["true", "false"]
    tab.press("n", 78)
    assert tab.run(src) == content[1]["views"][0]["picture"]
    tab.press("p", 80)
    tab.press("p", 80)
    assert tab.run(src) == content[-1]["views"][0]["picture"]
    assert "✗ failure" in tab.run("document.querySelector('.card h3').textContent")
    assert tab.run(SAID)[0].endswith("✗ wrong")


def test_the_slider_swaps_latents_in_and_the_keyboard_moves_it(tab: Page, content: list[Any]) -> None:
    case = content[0]
    view, count = case["views"][0], case_results.LATENTS
    slider = "document.querySelector('.card input[type=range]')"
    assert [tab.run(f"{slider}.{name}") for name in ("min", "max", "value")] == ["1", str(count + 1), str(count + 1)]
    for start in range(1, count + 1):
        slide(tab, start)
        swap = view["swaps"][start - 1]
        kinds = ["own"] * (start - 1) + ["donor"] * (count - start + 1)
        cells = view["walk"]["cells"][: start - 1] + swap["walk"]["cells"]
        steps = list(zip(kinds, cells, strict=True))
        assert stops(tab) == [one for place, one in enumerate(steps) if place == 0 or steps[place - 1] != one]
        chips = tab.run("Array.from(document.querySelectorAll('.card .slots li')).map(l => l.className)")
        assert chips == kinds
        follows = swap["reply"]["verdict"] == "other"
        assert ("it follows the swapped latents" in tab.run(SAID)[0]) == follows
        assert option(case, swap["reply"]["answer"]) in tab.run(SAID)[0]
        assert f"from step {start}: z{start}" in tab.run(f"{slider}.getAttribute('aria-valuetext')")
        assert "edited picture" in tab.run("document.querySelector('.card output').textContent")
    tab.run(f"{slider}.focus()")
    tab.press("ArrowRight", 39)  # from step 8: now none
    tab.press("ArrowLeft", 37)
    tab.press("ArrowLeft", 37)
    assert tab.run(f"{slider}.value") == str(count - 1)
    assert [kind for kind, _ in stops(tab)].count("donor") >= 1
    tab.run("document.querySelectorAll('.card .toggle button')[1].click()")  # the swap goes the other way
    assert "original picture" in tab.run("document.querySelector('.card .span label').textContent")
    tab.run("document.querySelector('.card .reset').click()")
    assert tab.run(f"{slider}.value") == str(count + 1) and {kind for kind, _ in stops(tab)} == {"own"}


def test_a_latent_is_put_at_a_cell_with_the_mouse_and_with_keys(tab: Page, content: list[Any]) -> None:
    steered = content[0]["views"][0]["steered"][1]
    own = content[0]["views"][0]["walk"]["cells"]
    assert tab.run("document.querySelectorAll('.card .cell').length") == 0
    tab.run("document.querySelectorAll('.card .steering button')[1].click()")
    assert tab.run("document.querySelectorAll('.card .cell').length") == case_results.GRID**2
    known = next(cell for cell, answer in enumerate(steered["expected"]) if answer is not None and cell > 12)
    tab.run(f"document.querySelectorAll('.card .cell')[{known}].click()")

    def drawn(cell: int) -> list[tuple[str, int]]:
        later = steered["walks"][cell]["cells"]
        steps = [("own", c) for c in own[:3]] + [("put", cell)] + [("after", c) for c in later[1:]]
        return [one for place, one in enumerate(steps) if place == 0 or steps[place - 1] != one]

    assert stops(tab) == drawn(known)
    said = tab.run(SAID)[0]
    assert option(content[0], steered["expected"][known]) in said and "✓ the way leads there" in said
    assert tab.run("document.activeElement.className") == "cell"
    tab.press("ArrowUp", 38)
    tab.press("ArrowLeft", 37)
    tab.press("Enter", 13)
    moved = known - case_results.GRID - (1 if known % case_results.GRID else 0)
    assert stops(tab) == drawn(moved)
    assert f"row {moved // case_results.GRID + 1}, column {moved % case_results.GRID + 1}" in tab.run(
        "document.querySelector('.card .cell[aria-pressed=true]').getAttribute('aria-label')"
    )
    slide(tab, 2)  # the slider takes over
    assert {kind for kind, _ in stops(tab)} == {"own", "donor"}
    tab.run("document.querySelectorAll('.card .cell')[0].click()")
    tab.press("r", 82)
    assert {kind for kind, _ in stops(tab)} == {"own"} and tab.run(
        "document.querySelectorAll('.card .cell').length"
    ) == 0
    tab.run("document.querySelectorAll('.card .thumb')[1].click()")
    assert tab.run("document.querySelector('.card .steering').offsetHeight") == 0


def test_a_number_tells_its_cosine_on_focus_and_right_is_more_than_a_color(tab: Page, content: list[Any]) -> None:
    tab.run("document.querySelector('.card .stop').focus()")
    cosine = content[0]["views"][0]["walk"]["cosine"][0]
    assert f"cosine {cosine:.2f}" in tab.run("document.querySelector('.card .readout').textContent")
    tab.run("document.activeElement.blur()")
    assert "cosine 0" not in tab.run("document.querySelector('.card .readout').textContent")
    over = (  # nothing lies above a number, so the mouse reaches it
        "(() => { const box = document.querySelector('.card .stop .badge').getBoundingClientRect(); "
        "const top = document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2); "
        "return top.closest('.stop') !== null; })()"
    )
    assert tab.run(over)
    votes = "Array.from(document.querySelectorAll('.card .vote')).every(v => /^[✓✗⇢] /.test(v.textContent))"
    assert tab.run(f"document.querySelectorAll('.card .vote').length > 0 && {votes}")
    unnamed = (
        "Array.from(document.querySelectorAll('.card button, .card input, .card .cells, .card svg.walk')).filter(b => "
        "!b.hidden && !(b.getAttribute('aria-label') || b.textContent.trim() || (b.labels && b.labels.length))).length"
    )
    assert tab.run(unnamed) == 0


def test_it_fits_a_phone_moves_only_where_motion_is_welcome_and_can_be_looked_at(tab: Page, tmp_path: Path) -> None:
    for width in (320, 390, 768):
        tab.resize(width)
        assert tab.run("document.documentElement.scrollWidth") <= width
        assert tab.run("Array.from(document.querySelectorAll('.card button')).every(b => b.offsetHeight >= 32)")
    name = "getComputedStyle(document.querySelector('.card .stop')).animationName"
    media = [{"name": "prefers-reduced-motion", "value": "reduce"}]
    tab._call("Emulation.setEmulatedMedia", {"features": media})
    assert tab.run(name) == "none"
    folder = Path(os.environ.get("REALVR_SCREENSHOTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    backgrounds = set()
    for shot, width, scheme in (("cases", 1280, "light"), ("cases-dark", 1280, "dark"), ("cases-phone", 390, "light")):
        tab.resize(width)
        tab.scheme(scheme)
        assert tab.run(name) == "explorer-appear"
        tab.run("Promise.all(document.getAnimations().map(one => one.finished))")
        tab.screenshot(folder / f"{shot}.png", 1600)
        backgrounds.add(tab.run("getComputedStyle(document.querySelector('.card')).backgroundColor"))
        with Image.open(folder / f"{shot}.png") as picture:
            assert picture.width == width and len(picture.convert("RGB").getcolors(1 << 24) or ()) > 20
    assert len(backgrounds) == 2
