"""An independent solver: question text and scene description in, answer out.

It shares nothing with the code that writes questions: it reads the English, keeps its own word lists and its own
geometry, and never sees the query. Tests hold every generated answer against it.
"""

from __future__ import annotations

import re
from typing import Any

from realvr.world.scene import Scene

_SIZE = ("small", "large")
_FILL = ("plain", "striped", "dotted", "checkered")
_HUE = ("red", "green", "blue", "yellow", "orange", "purple", "cyan", "pink", "brown", "white", "black", "gray")
_FORM = ("circle", "square", "triangle", "star", "heart", "cross", "ring", "moon", "arrow", "hexagon")
_NOUN = (
    r"((?:(?:small|large|plain|striped|dotted|checkered|"
    + "|".join(_HUE)
    + r") )*(?:object|"
    + "|".join(_FORM)
    + r")(?:e?s)?)\b"
)

Row = dict[str, Any]


class Unsolvable(ValueError):
    """The text was not understood, or the scene gives it no single answer."""


def _rows(scene: Scene) -> list[Row]:
    """The scene as plain rows, with everything the questions can be about."""
    rows = []
    for order, item in enumerate(scene.objects):
        turn = ((item.rotation + 45) // 90) % 4
        row: Row = {
            "order": order,
            "form": item.shape,
            "hue": item.color,
            "size": item.size,
            "fill": item.texture,
            "x": (item.x + 0.5) / scene.width,
            "y": (item.y + 0.5) / scene.height,
            "radius": item.radius,
            "shade": item.shade,
            "heading": ("up", "right", "down", "left")[turn] if item.shape == "arrow" else "",
        }
        rows.append(row)
    return rows


def _select(rows: list[Row], noun: str) -> list[Row]:
    """Rows that a noun phrase such as ``large striped red circles`` names."""
    for word in noun.split():
        if word in _SIZE:
            rows = [row for row in rows if row["size"] == word]
        elif word in _FILL:
            rows = [row for row in rows if row["fill"] == word]
        elif word in _HUE:
            rows = [row for row in rows if row["hue"] == word]
        elif not word.startswith("object"):
            form = next((form for form in _FORM if word in (form, form + "s", form + "es")), None)
            if form is None:
                raise Unsolvable(f"unknown word {word!r}")
            rows = [row for row in rows if row["form"] == form]
    return rows


def _only(rows: list[Row], noun: str) -> Row:
    chosen = _select(rows, noun)
    if len(chosen) != 1:
        raise Unsolvable(f"{len(chosen)} objects are {noun!r}")
    return chosen[0]


def _ninth(row: Row) -> str:
    """Name of the ninth of the picture."""
    across = "left" if row["x"] < 1 / 3 else "center" if row["x"] < 2 / 3 else "right"
    down = "top" if row["y"] < 1 / 3 else "middle" if row["y"] < 2 / 3 else "bottom"
    return "center" if (down, across) == ("middle", "center") else f"{down} {across}"


def _extreme(rows: list[Row], word: str) -> Row:
    axis = "x" if word in ("leftmost", "rightmost") else "y"
    ranked = sorted(rows, key=lambda row: row[axis], reverse=word in ("rightmost", "bottommost"))
    return ranked[0]


def _about_place(text: str, rows: list[Row]) -> Row | None:
    """The object named by where it is, if the question does so."""
    extreme = re.search(r"(leftmost|rightmost|topmost|bottommost) object", text)
    if extreme:
        return _extreme(rows, extreme[1])
    place = re.search(r"at the ((?:top|middle|bottom)? ?(?:left|center|right))\b", text.replace("Look at", "look at"))
    if place:
        inside = [row for row in rows if _ninth(row) == place[1].strip()]
        if len(inside) != 1:
            raise Unsolvable(f"{len(inside)} objects at {place[1]!r}")
        return inside[0]
    return None


def _sides(text: str, rows: list[Row], nouns: list[str]) -> str:
    """Left/right, above/below and yes/no about them."""
    seen_from = re.match(r"(Seen from|On which side of) the ", text)
    first, second = (nouns[1], nouns[0]) if seen_from else (nouns[0], nouns[1])
    a, b = _only(rows, first), _only(rows, second)
    across = "left" if a["x"] < b["x"] else "right"
    down = "above" if a["y"] < b["y"] else "below"
    both_x, both_y = "left" in text and "right" in text, "above" in text and "below" in text
    if both_x:
        return across
    if both_y:
        return down
    claimed = next(word for word in ("left", "right", "above", "below") if re.search(rf"\b{word}\b", text))
    return "yes" if claimed in (across, down) else "no"


def _pairwise(text: str, rows: list[Row], nouns: list[str]) -> str | None:
    """Questions that name two objects or two groups."""
    if "more " in text:
        a, b = (len(_select(rows, noun)) for noun in nouns)
        return "the same number" if a == b else nouns[0] if a > b else nouns[1]
    if "in front" in text or "covers part" in text:
        a, b = (_only(rows, noun)["order"] for noun in nouns)
        return "the " + (nouns[0] if a > b else nouns[1])
    if "larger" in text or "bigger" in text:
        a, b = (_only(rows, noun)["radius"] for noun in nouns)
        return "the " + (nouns[0] if a > b else nouns[1])
    if re.search(r"\b(left|right|above|below)\b", text):
        return _sides(text, rows, nouns)
    return None


def _property(text: str, row: Row) -> str:
    """Which property of a found object the question wants."""
    tests = (
        ("color", "hue"),
        ("shape", "form"),
        ("pattern", "fill"),
        ("filled", "fill"),
        ("small or large", "size"),
        ("point", "heading"),
    )
    for word, name in tests:
        if word in text:
            return str(row[name])
    if text.startswith(("Where is", "In which part", "Find the")):
        return _ninth(row)
    raise Unsolvable(f"cannot read {text!r}")


def solve(scene: Scene, text: str) -> str:
    """The answer, in words, to a question about one scene."""
    rows = _rows(scene)
    if "point A" in text or "Point A" in text:
        return _darker(scene, rows)
    placed = _about_place(text, rows)
    if placed is not None:
        return _property(text, placed)
    if text.startswith(("How many", "Count")):
        return str(len(_select(rows, re.findall(_NOUN, text)[0])))
    nouns = [noun for noun in re.findall(_NOUN, text) if noun not in ("object", "objects")]
    if not nouns:
        raise Unsolvable(f"no object named in {text!r}")
    if text.startswith(("Is there", "Does the image contain", "Can you see")):
        return "yes" if _select(rows, nouns[0]) else "no"
    if len(nouns) == 2:
        answer = _pairwise(text, rows, nouns)
        if answer is not None:
            return answer
    return _property(text, _only(rows, nouns[0]))


def _darker(scene: Scene, rows: list[Row]) -> str:
    """Which marked point lies on the darker surface."""
    levels = {}
    for mark in scene.marks:
        if mark.kind == "letter":
            cx, cy = (mark.box[0] + mark.box[2]) / 2, (mark.box[1] + mark.box[3]) / 2
            near = min(rows, key=lambda row: (row["x"] * scene.width - cx) ** 2 + (row["y"] * scene.height - cy) ** 2)
            levels[mark.text] = near["shade"]
    if abs(levels["A"] - levels["B"]) < 0.02:
        return "about the same"
    return "A is darker" if levels["A"] < levels["B"] else "B is darker"


def solve_follow_up(scene: Scene, first: str, text: str) -> str:
    """The answer to a second question that says "it" about the one object of the first."""
    rows = _rows(scene)
    row = _about_place(first, rows)
    if row is None:
        nouns = [noun for noun in re.findall(_NOUN, first) if noun not in ("object", "objects")]
        row = _only(rows, nouns[0])
    return _ninth(row) if "where" in text else _property(text, row)
