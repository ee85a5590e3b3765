"""The page in headless Chromium: it loads without a complaint, its switches work, it fits a phone.

REALVR_SCREENSHOTS=DIR keeps the pictures that the last test takes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from chromium import Page
from optional import need_browser
from realvr.diagnostics import DIAGNOSTICS
from report_cases import ARMS


@pytest.fixture(autouse=True)
def _browser() -> None:
    need_browser()


@pytest.fixture
def tab(page: Path) -> Iterator[Page]:
    """The page in a fresh browser; whatever it complains about fails the test."""
    with Page() as tab:
        tab.open(page)
        yield tab
        tab.run("1")  # collects events that are still on their way
        assert not tab.complaints
        assert all(url.startswith(("file:", "data:", "about:")) for url in tab.requests), tab.requests


def test_everything_is_there(tab: Page) -> None:
    everywhere = tab.run("document.querySelectorAll('main > section, .commands > div').length")
    assert everywhere == 9 + len(DIAGNOSTICS.names())  # with the list of those without results
    assert tab.run("document.querySelectorAll('.commands > div').length") > 20
    assert tab.run("Array.from(document.querySelectorAll('main > section h2')).every(one => one.offsetHeight > 0)")
    assert tab.run("document.querySelectorAll('svg.chart').length") > 20
    names = (
        "Array.from(document.querySelectorAll('#overview table')[0].querySelectorAll('tbody th')).map(t => t.innerText)"
    )
    assert tab.run(names) == list(ARMS)
    assert tab.run("Array.from(document.querySelectorAll('figure svg.chart')).some(s => s.getBBox().width > 200)")


def test_protocol_buttons_show_one_panel_at_a_time(tab: Page) -> None:
    shown = (
        "Array.from(document.querySelectorAll('#counterfactual .panel')).filter(p => p.offsetHeight > 0).map(p => p.id)"
    )
    pressed = (
        "Array.from(document.querySelectorAll('#counterfactual .switch [aria-pressed=true]')).map(b => b.dataset.panel)"
    )
    assert tab.run(shown) == tab.run(pressed) == ["protocol-two-turn-keep"]
    tab.run("document.querySelector('[data-panel=protocol-separate]').click()")
    assert tab.run(shown) == tab.run(pressed) == ["protocol-separate"]
    tab.run("document.querySelector('[data-panel=protocol-two-turn-drop]').focus()")
    tab.press("Enter", 13)
    assert tab.run(shown) == tab.run(pressed) == ["protocol-two-turn-drop"]


def test_a_legend_button_hides_its_arm_in_its_figures(tab: Page) -> None:
    button = "document.querySelector('#curves-rl button[data-shows=\"2\"]')"
    lines = "Array.from(document.querySelectorAll('#curves-rl g[data-arm=\"{}\"]'))"
    visible = f"{lines}.filter(line => getComputedStyle(line).display !== 'none').length"
    before, other = tab.run(visible.format(2)), tab.run(visible.format(1))
    assert before > 3 and other > 0
    tab.run(f"{button}.click()")
    assert tab.run(visible.format(2)) == 0 and tab.run(visible.format(1)) == other
    assert tab.run(f"{button}.getAttribute('aria-pressed')") == "false"
    tab.run(f"{button}.click()")
    assert tab.run(visible.format(2)) == before


def test_dark_mode_follows_the_system_then_the_button_and_is_kept(tab: Page, page: Path) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    pressed = "document.getElementById('theme').getAttribute('aria-pressed')"
    dark, light = "rgb(13, 17, 23)", "rgb(255, 255, 255)"
    tab.scheme("light")
    assert (tab.run(background), tab.run(pressed)) == (light, "false")
    tab.scheme("dark")
    assert (tab.run(background), tab.run(pressed)) == (dark, "true")
    tab.run("document.getElementById('theme').click()")
    assert (tab.run(background), tab.run(pressed)) == (light, "false")
    assert _reopened(tab, page, pressed, "false") == "false" and tab.run(background) == light
    tab.scheme("light")
    tab.run("document.getElementById('theme').click()")
    assert (tab.run(background), tab.run(pressed)) == (dark, "true")
    assert _reopened(tab, page, pressed, "true") == "true" and tab.run(background) == dark


def _reopened(tab: Page, page: Path, asked: str, wanted: str) -> object:
    """What the page says after a while: on a busy machine Chromium may load it before what it stored is written."""
    for _ in range(10):
        tab.open(page)
        if (found := tab.run(asked)) == wanted:
            break
        time.sleep(0.2)
    return found


def test_the_keyboard_reaches_the_results_first(tab: Page) -> None:
    tab.press("Tab", 9)
    assert tab.run("document.activeElement.className") == "skip"
    assert tab.run("document.activeElement.getBoundingClientRect().left") >= 0
    tab.press("Enter", 13)
    assert tab.run("document.activeElement.id") == "main"
    tab.run("document.getElementById('theme').focus()")
    tab.press("Tab", 9)
    assert tab.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    tab.run("document.querySelector('#provenance summary').focus()")
    tab.press("Enter", 13)
    assert tab.run("document.querySelector('#provenance details').open")


@pytest.mark.parametrize("width", [320, 390, 1280])
def test_nothing_but_tables_scrolls_sideways(tab: Page, width: int) -> None:
    tab.resize(width)
    tab.run("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert tab.run("document.documentElement.scrollWidth") <= width
    small = "Array.from(document.querySelectorAll('button')).filter(b => b.offsetHeight && b.offsetHeight < 32).length"
    assert tab.run(small) == 0


def test_a_desktop_shows_tables_whole_and_a_phone_keeps_the_names_of_rows(tab: Page) -> None:
    boxes = "Array.from(document.querySelectorAll('.table')).filter(box => !box.closest('details'))"
    cut = f"{boxes}.filter(box => box.scrollWidth > box.clientWidth).map(box => box.getAttribute('aria-label'))"
    assert tab.run(cut) == []
    tab.resize(390)
    tab.run(f"{boxes}.forEach(box => box.scrollLeft = 300)")
    name = "box.querySelector('tbody th')"
    moved = f"{boxes}.filter(box => box.scrollLeft > 100 && box.offsetWidth)"
    assert tab.run(f"{moved}.length") > 3
    seen = f"{name}.getBoundingClientRect().left - box.getBoundingClientRect().left"
    assert tab.run(f"{moved}.every(box => Math.abs({seen}) < 3 && {name}.offsetWidth < 0.5 * box.clientWidth)")


def test_it_can_be_looked_at(tab: Page, tmp_path: Path) -> None:
    folder = Path(os.environ.get("REALVR_SCREENSHOTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    for name, width, scheme in (("desktop", 1280, "light"), ("dark", 1280, "dark"), ("phone", 390, "light")):
        tab.resize(width)
        tab.scheme(scheme)
        tab.screenshot(folder / f"{name}.png")
        with Image.open(folder / f"{name}.png") as picture:
            assert picture.width == width and picture.height >= 900
            assert len(picture.convert("RGB").getcolors(1 << 24) or ()) > 20
