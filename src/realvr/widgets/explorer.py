"""Cases that a reader explores: a picture and its edited twin, the walk of the latents over them, answers, and what
becomes of both when latents are swapped or put elsewhere. Everything is computed beforehand; the page only looks it up.

The shapes below are what a page needs; a diagnostic that fills them may use them in its result file. The page draws the
walks of its first view from here, so that it can be read without JavaScript; ``explorer.js`` of the report draws all
others by the same rules.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Literal, NotRequired

from markupsafe import Markup
from typing_extensions import TypedDict

from realvr.widgets.browser import Measured

WIDTH = 600
"""Units across a picture."""
_ROOMY = 60
"""Cells of so many units hold their number beside the line, in a corner."""


class Walked(TypedDict):
    """Where latents are: the cell (row * columns + column, from 0) of the nearest visual token, and its cosine."""

    cells: list[int]
    cosine: list[float]


class Said(TypedDict):
    """A reply. ``verdict``: ``right``, ``other`` (right for the other picture of the case), ``wrong``, or ``unread``
    where no answer can be read."""

    text: str
    answer: str | None
    verdict: str


class Swapped(TypedDict):
    """z_t … z_K taken from the other picture: the reply, and where these latents are in this picture."""

    reply: Said
    walk: Walked


class Steered(TypedDict):
    """z_t put at each cell of a grid in turn, row by row: answers, and the walk from z_t on. ``expected``: the answer
    that following the picture from there gives, where it is known."""

    step: int
    grid: list[int]
    answers: list[str | None]
    expected: list[str | None]
    walks: list[Walked]


class Picture(TypedDict):
    """A further picture of a question that shows several. Its cells are counted on from those of the one before."""

    picture: str
    size: list[int]
    grid: list[int]
    evidence: list[list[float]]


class View(TypedDict):
    """One of the two pictures of a case, or the only one."""

    picture: str
    """A ``data:`` address."""
    size: list[int]
    """Width and height in pixels before it was made smaller for the page."""
    grid: list[int]
    """Rows and columns of visual tokens."""
    truth: str
    evidence: list[list[float]]
    """Boxes in fractions of the picture, in order."""
    changed: list[int]
    """Cells in which the two pictures differ."""
    replies: list[Said]
    """Of the model and, where there is one, of the second model."""
    walk: Walked
    swaps: list[Swapped]
    """Entry t - 1: latents of the other picture from step t on."""
    steered: list[Steered]
    more: NotRequired[list[Picture]]


class Case(TypedDict):
    """One question about two pictures, or about one."""

    id: str
    about: str
    """What sets it apart, in a few words."""
    question: str
    choices: list[str]
    failed: bool
    views: list[View]
    """Original and edited; only the original where there is no pair."""
    ids: NotRequired[list[str]]
    """Of the samples behind the views: what other diagnostics have measured of them is shown with the case."""
    task: NotRequired[str]
    edit: NotRequired[str]


@dataclass(frozen=True)
class Explorer:
    """Cases of one model, and of a second one that they are shown beside. ``id`` is unique in a page."""

    id: str
    label: str
    names: Sequence[str]
    """Of the model and, where there is one, of the second."""
    cases: Sequence[Case]
    measured: Sequence[Measured] = ()
    """What diagnostics have measured of these cases."""
    part: Literal["explorer"] = "explorer"

    def data(self) -> dict[str, Any]:
        """What the page's script reads. It takes pictures from the page, where they stand once."""
        return {"names": list(self.names), "cases": [{**case, "views": _views(case)} for case in self.cases]}

    def panels(self, case: Case) -> list[dict[str, Any]]:
        """What is measured of one case, diagnostic by diagnostic; the page reads it when the case is opened."""
        views = case.get("ids") or [f"{case['id']}/{number}" for number in range(len(case["views"]))]
        return [one.of(case["id"], views) for one in self.measured]

    def size(self) -> str:
        """What it takes of the page, in words."""
        panels = [one for case in self.cases for one in self.panels(case)]
        numbers = len(json.dumps(panels)) + len(json.dumps(self.data()))
        views = [view for case in self.cases for view in case["views"]]
        pictures = sum(len(one["picture"]) for view in views for one in self.pictures(view))
        shown = {one["name"] for one in panels if any(one["views"])}
        of = f" with the panels of {_count(len(shown), 'diagnostic')}" if shown else ""
        return f"{_count(len(self.cases), 'case')}{of}: {(numbers + pictures) / 1e6:.1f} MB of this page."

    def measured_of(self, case: Case) -> str:
        """Which diagnostics have panels of a case, and which have none and why: for readers without the script."""
        names: dict[str, list[str]] = {}
        for one in self.panels(case):
            why = f"Not shown, {one['missing']}" if one["missing"] else "Not measured for this case"
            heading = "Measured of this case, and drawn with JavaScript" if any(one["views"]) else why
            names.setdefault(heading, []).append(one["title"])
        return " ".join(
            f"{heading}: {', '.join(names[heading])}." for heading in sorted(names, key=lambda one: "drawn" not in one)
        )

    def letter(self, case: Case, answer: str | None) -> str:
        """An answer in words: a letter with its option."""
        if answer is None:
            return ""
        place = ord(answer) - ord("A") if len(answer) == 1 else -1
        return f"{answer} ({case['choices'][place]})" if 0 <= place < len(case["choices"]) else answer

    def pictures(self, view: View) -> list[Picture | View]:
        """The picture of a view, and the others where its question shows several."""
        return [view, *view.get("more", ())]

    def drawing(self, view: View, number: int = 0) -> Markup:
        """The walk over one picture."""
        pictures = self.pictures(view)
        grid, size = pictures[number]["grid"], pictures[number]["size"]
        body = walk_marks(view["walk"], grid, size, sum(math.prod(one["grid"]) for one in pictures[:number]))
        return Markup(f'<svg class="walk" viewBox="0 0 {WIDTH} {height_of(size)}" aria-hidden="true">{body}</svg>')

    def spoken(self, view: View) -> str:
        """The same walk in words."""
        pictures = self.pictures(view)
        starts = [sum(math.prod(one["grid"]) for one in pictures[:number]) for number in range(len(pictures))]
        found = []
        for one in stops(view["walk"]):
            number = max(place for place, start in enumerate(starts) if start <= one["cell"])
            where = _place(one["cell"] - starts[number], pictures[number]["grid"])
            found.append(f"{_name(one)} {where}" + (f" of picture {number + 1}" if len(pictures) > 1 else ""))
        return "; ".join(found)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _views(case: Case) -> list[dict[str, Any]]:
    """The views of a case without their pictures."""
    found = []
    for view in case["views"]:
        one: dict[str, Any] = {name: value for name, value in view.items() if name != "picture"}
        if "more" in view:
            one["more"] = [{k: v for k, v in other.items() if k != "picture"} for other in view["more"]]
        found.append(one)
    return found


def height_of(size: Sequence[int]) -> int:
    """Units down a picture."""
    return max(1, math.floor(WIDTH * size[1] / size[0] + 0.5))


def stops(walk: Walked) -> list[dict[str, Any]]:
    """Steps that follow each other in one cell are one stop: its cell, first and last step, smallest cosine."""
    found: list[dict[str, Any]] = []
    for step, (cell, cosine) in enumerate(zip(walk["cells"], walk["cosine"], strict=True), 1):
        if found and found[-1]["cell"] == cell:
            found[-1] |= {"last": step, "cosine": min(found[-1]["cosine"], cosine)}
        else:
            found.append({"cell": cell, "first": step, "last": step, "cosine": cosine})
    return found


def walk_marks(walk: Walked, grid: Sequence[int], size: Sequence[int], start: int = 0) -> str:
    """Legs from stop to stop, then the stops with their numbers; the fainter, the smaller the cosine. ``start``: cells
    of the pictures before this one; stops in other pictures are left out."""
    wide, high = WIDTH / grid[1], height_of(size) / grid[0]
    unit = min(wide, high)
    badge = min(max(unit * 0.17, 11), 17)
    found = stops(walk)
    legs, marks = [], []
    visits: dict[int, int] = {}
    before: tuple[float, float] | None = None
    for number, one in enumerate(found):
        one["cell"] -= start
        if not 0 <= one["cell"] < grid[0] * grid[1]:
            before = None
            continue
        x, y = (one["cell"] % grid[1] + 0.5) * wide, (one["cell"] // grid[1] + 0.5) * high
        opacity = _text(0.3 + 0.7 * max(0.0, one["cosine"]) ** 2, 2)
        if before is not None:
            line = f"M{_text(before[0])} {_text(before[1])}L{_text(x)} {_text(y)}"
            style = f'style="--step:{one["first"]}"'
            legs.append(f'<path class="halo" d="{line}" {style}></path>')
            legs.append(f'<path class="leg own" d="{line}" opacity="{opacity}" {style}></path>')
        before = x, y
        visit = visits.get(one["cell"], 0)
        visits[one["cell"]] = visit + 1
        marks.append(_stop(one, (x, y), (wide, high), badge, visit, number == len(found) - 1, opacity, grid))
    return "".join([*legs, *marks])


def _stop(
    one: dict[str, Any],
    at: tuple[float, float],
    cell: tuple[float, float],
    badge: float,
    visit: int,
    last: bool,
    opacity: str,
    grid: Sequence[int],
) -> str:
    (x, y), unit, height = at, min(cell), cell[1] * grid[0]
    label = str(one["first"]) if one["first"] == one["last"] else f"{one['first']}–{one['last']}"
    roomy = unit >= _ROOMY
    # A cell that is visited again has its further numbers in its other corners.
    across, down = ((-1, -1), (1, -1), (1, 1), (-1, 1))[visit % 4]
    bx = x + (across * 0.3 * cell[0] if roomy else 0)
    by = y + (down * 0.3 * cell[1] if roomy else 0)
    wide = 2 * badge + (len(label) - 1) * badge * 0.85
    bx = min(max(bx, wide / 2), WIDTH - wide / 2)
    by = min(max(by, badge), height - badge)
    parts = []
    if last:
        parts.append(f'<circle class="ring" cx="{_text(x)}" cy="{_text(y)}" r="{_text(0.44 * unit)}"></circle>')
    if roomy:
        parts.append(f'<circle class="dot" cx="{_text(x)}" cy="{_text(y)}" r="{_text(0.35 * badge)}"></circle>')
    parts.append(
        f'<rect class="badge" x="{_text(bx - wide / 2)}" y="{_text(by - badge)}" width="{_text(wide)}" '
        f'height="{_text(2 * badge)}" rx="{_text(badge)}"></rect>'
    )
    parts.append(f'<text x="{_text(bx)}" y="{_text(by)}" style="font-size: {_text(1.25 * badge)}px;">{label}</text>')
    spoken = escape(f"{_name(one)} {_place(one['cell'], grid)}, cosine {_signed(one['cosine'])}", quote=True)
    return (
        f'<g class="stop own" data-step="{one["first"]}" data-last="{one["last"]}" aria-label="{spoken}" '
        f'opacity="{opacity}" style="--step:{one["first"]}"><title>{spoken}</title>{"".join(parts)}</g>'
    )


def _text(value: float, digits: int = 1) -> str:
    """Rounded, halves up as the script does: the same marks from both."""
    return f"{math.floor(value * 10**digits + 0.5) / 10**digits:.{digits}f}"


def _signed(cosine: float) -> str:
    """With the minus of a page."""
    return _text(cosine, 2).replace("-", "\u2212")


def _name(one: dict[str, Any]) -> str:
    return f"z{one['first']}" if one["first"] == one["last"] else f"z{one['first']} to z{one['last']}"


def _place(cell: int, grid: Sequence[int]) -> str:
    return f"at row {cell // grid[1] + 1}, column {cell % grid[1] + 1}"
