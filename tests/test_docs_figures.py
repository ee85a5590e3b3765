"""The diagrams of the documentation: drawn by their script, and readable: no text leaves its box or lies on another."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from chromium import Page
from optional import need_browser

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "docs" / "figures"
NAMES = ("span.svg", "stage2.svg")

OUTSIDE = """
(() => {
  const inside = (a, b, slack) =>
    a.left >= b.left + slack && a.right <= b.right - slack && a.top >= b.top && a.bottom <= b.bottom;
  const place = (one) => one.getBoundingClientRect();
  const texts = Array.from(document.querySelectorAll("text"));
  const wrong = texts.filter((one) => !inside(place(one), place(document.querySelector(".page")), 8));
  document.querySelectorAll("g.labelled").forEach((group) => {
    const box = place(group.querySelector("rect"));
    group.querySelectorAll("text").forEach((one) => { if (!inside(place(one), box, 3)) wrong.push(one); });
  });
  return wrong.map((one) => one.textContent);
})()
"""
OVERLAPPING = """
(() => {
  const texts = Array.from(document.querySelectorAll("text")).map((one) => [one, one.getBoundingClientRect()]);
  const meet = (a, b) => a.left < b.right && b.left < a.right && a.top + 3 < b.bottom && b.top + 3 < a.bottom;
  return texts.flatMap(([one, a], i) =>
    texts.slice(i + 1).filter(([, b]) => meet(a, b)).map(([other]) => one.textContent + " | " + other.textContent));
})()
"""
COLORS = """
(() => {
  const shown = (one) => getComputedStyle(one).fill;
  return [shown(document.querySelector(".page")), shown(document.querySelector("text"))];
})()
"""


def brightness(color: str) -> float:
    return sum(int(part) for part in re.findall(r"\d+", color)[:3]) / 765


def test_the_committed_figures_are_what_the_script_draws(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "scripts" / "docs_figures.py", tmp_path], check=True, capture_output=True)
    for name in NAMES:
        assert (tmp_path / name).read_text() == (FIGURES / name).read_text(), f"{name}: run scripts/docs_figures.py"


@pytest.mark.parametrize("name", NAMES)
def test_texts_stay_in_their_boxes_and_apart_in_both_schemes(name: str) -> None:
    need_browser()
    with Page() as tab:
        tab.open(FIGURES / name)
        assert tab.run("document.querySelectorAll('text').length") > 15
        assert tab.run(OUTSIDE) == []
        assert tab.run(OVERLAPPING) == []
        for scheme, lightest in (("light", "page"), ("dark", "text")):
            tab.scheme(scheme)
            page, text = (brightness(color) for color in tab.run(COLORS))
            assert abs(page - text) > 0.6 and (page > text) == (lightest == "page"), scheme
