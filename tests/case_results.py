"""Cases of boards with arrows, as a run leaves them, without a model: what a page of them shows is known beforehand.

Run as ``python case_results.py FOLDER`` it leaves results there, to be looked at.
"""

from __future__ import annotations

import base64
import io
import json
import random
import sys
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

GRID, LATENTS = 6, 8
CELL = 8
WAYS = {"up": (-1, 0), "right": (0, 1), "down": (1, 0), "left": (0, -1)}
COLORS = {"red": "#e01b24", "blue": "#2b57e0", "green": "#2a9d34", "pink": "#ff79b4"}
LETTERS = "ABCD"
Board = list[list[str]]


def trail(board: Board, row: int, column: int) -> list[int] | None:
    """Cells from a place to the circle."""
    found: list[int] = []
    while 0 <= row < GRID and 0 <= column < GRID and row * GRID + column not in found:
        found.append(row * GRID + column)
        if board[row][column] in COLORS:
            return found
        down, right = WAYS[board[row][column]]
        row, column = row + down, column + right
    return None


def boards(arrows: int, seed: int) -> tuple[Board, Board, tuple[int, int]]:
    """A board, the same with one arrow of its trail turned so that it ends elsewhere, and where the trail starts."""
    rng = random.Random(seed)
    while True:
        board = [[rng.choice(list(WAYS)) for _ in range(GRID)] for _ in range(GRID)]
        for color, cell in zip(COLORS, rng.sample(range(GRID * GRID), len(COLORS)), strict=True):
            board[cell // GRID][cell % GRID] = color
        start = rng.randrange(GRID), rng.randrange(GRID)
        found = trail(board, *start)
        if found is None or len(found) != arrows + 1:
            continue
        for cell in found[1:-1]:
            for way in WAYS:
                edited = [list(row) for row in board]
                edited[cell // GRID][cell % GRID] = way
                other = trail(edited, *start)
                if other is not None and len(other) <= LATENTS and other[-1] != found[-1]:
                    return board, edited, start


def picture(board: Board, start: tuple[int, int]) -> str:
    big = 10
    image = Image.new("RGB", (GRID * CELL * big, GRID * CELL * big), "#d2c8b8")
    draw, side = ImageDraw.Draw(image), CELL * big
    for row in range(GRID):
        for column in range(GRID):
            x, y, what = (column + 0.5) * side, (row + 0.5) * side, board[row][column]
            if what in COLORS:
                draw.ellipse([x - 0.44 * side, y - 0.44 * side, x + 0.44 * side, y + 0.44 * side], COLORS[what])
                continue
            down, right = WAYS[what]
            shape = [(-0.4, -0.13), (0, -0.13), (0, -0.4), (0.42, 0), (0, 0.4), (0, 0.13), (-0.4, 0.13)]
            points = [(x + side * (a * right - b * down), y + side * (a * down + b * right)) for a, b in shape]
            draw.polygon(points, "#ff8c00" if (row, column) == start else "#111111")
    buffer = io.BytesIO()
    image.resize((GRID * CELL, GRID * CELL), Image.Resampling.BOX).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def walk(cells: list[int], length: int = LATENTS) -> dict[str, Any]:
    """The trail as latents would walk it, the last cell repeated."""
    whole = [*cells, *[cells[-1]] * length][:length]
    return {"cells": whole, "cosine": [-0.126 if t == 5 else round(0.99 - 0.06 * (t % 3), 3) for t in range(length)]}


def letter(board: Board, cell: int) -> str:
    return LETTERS[list(COLORS).index(board[cell // GRID][cell % GRID])]


def said(answer: str | None, truth: str, other: str) -> dict[str, Any]:
    verdict = "right" if answer == truth else "other" if answer == other else "wrong"
    return {
        "text": "I see." if answer is None else f"<answer>{answer}</answer>",
        "answer": answer,
        "verdict": "unread" if answer is None else verdict,
    }


def steer(board: Board, step: int) -> dict[str, Any]:
    left = LATENTS - step + 1
    walks, answers, expected = [], [], []
    for cell in range(GRID * GRID):
        way = trail(board, cell // GRID, cell % GRID)
        known = way is not None and len(way) <= left
        walks.append(walk(way if way is not None else [cell], left))
        answers.append(letter(board, way[-1]) if way is not None else None)
        expected.append(answers[-1] if known else None)
    return {"step": step, "grid": [GRID, GRID], "answers": answers, "expected": expected, "walks": walks}


def case(number: int, arrows: int, failed: bool, steered: bool) -> dict[str, Any]:
    """A model that follows every trail and its latents, unless it fails; a second one that is wrong on the edited."""
    board, edited, start = boards(arrows, number)
    pair = (board, edited)
    trails = [trail(one, *start) or [] for one in pair]
    truths = [letter(one, way[-1]) for one, way in zip(pair, trails, strict=True)]
    wrong = next(one for one in LETTERS if one not in truths)
    changed = [
        cell for cell in range(GRID * GRID) if board[cell // GRID][cell % GRID] != edited[cell // GRID][cell % GRID]
    ]
    views = []
    for view, one in enumerate(pair):
        own, other = truths[view], truths[1 - view]
        parts = next(t for t, (a, b) in enumerate(zip(*(walk(way)["cells"] for way in trails), strict=True)) if a != b)
        swaps = []
        for start_of in range(LATENTS):
            # Latents of the other picture lead to its answer, unless only repetitions of the end are swapped.
            whole = walk(trails[1 - view])
            follows = start_of <= len(trails[1 - view]) - 1 or start_of <= parts
            part = {name: values[start_of:] for name, values in whole.items()}
            swaps.append({"reply": said(other if follows else own, own, other), "walk": part})
        views.append(
            {
                "picture": picture(one, start),
                "size": [GRID * CELL, GRID * CELL],
                "grid": [GRID, GRID],
                "truth": own,
                "evidence": [
                    [c % GRID / GRID, c // GRID / GRID, (c % GRID + 1) / GRID, (c // GRID + 1) / GRID]
                    for c in trails[view]
                ],
                "changed": changed,
                "replies": [
                    said(wrong if failed and view == 0 else own, own, other),
                    said(own if view == 0 and number % 2 else None if view == 0 else other, own, other),
                ],
                "walk": walk(trails[view]),
                "swaps": swaps,
                "steered": [steer(one, step) for step in (2, 4, 6)] if steered else [],
            }
        )
    return {
        "id": f"turn_on_trail-{number}",
        "ids": [f"turn_on_trail-{number}-{name}" for name in ("original", "edited")],
        "task": "trails-pairs",
        "edit": "turn_on_trail",
        "about": f"{arrows} arrows, turn on trail",
        "question": "Start at the orange arrow and follow the arrows. What color is the circle where you end?",
        "choices": list(COLORS),
        "failed": failed,
        "views": views,
    }


def single(number: int, task: str, failed: bool = False) -> dict[str, Any]:
    """A question without a pair: one view, nothing to swap in, and a second picture beside the first."""
    made = case(number, 3, failed, False)
    view = made["views"][0] | {"swaps": [], "changed": []}
    other = made["views"][1]
    view["more"] = [{name: other[name] for name in ("picture", "size", "grid", "evidence")}]
    # The walk ends in the second picture, whose cells are counted on.
    view["walk"] = view["walk"] | {"cells": [*view["walk"]["cells"][:-1], GRID * GRID + 7]}
    ids = {"id": f"{task}/{number}", "ids": [f"{task}/{number}"], "task": task, "edit": ""}
    return made | ids | {"about": task, "views": [view]}


def detail(number: int) -> dict[str, Any]:
    """What a diagnostic may have recorded of a sample for its panel: maps of z_1 … z_K and the answer in three layers
    and in their mean, bars with a hole and with negative numbers."""
    rng = random.Random(number)

    def grid() -> list[list[float]]:
        return [[float(f"{rng.random() ** 3:.6g}") for _ in range(GRID)] for _ in range(GRID)]

    queries: list[int | str] = [*range(1, LATENTS + 1), "answer"]
    maps = [[query, layer, [grid()]] for query in queries for layer in (0, 1, 2, "mean")]
    utility = [float(f"{rng.uniform(-0.4, 1.5):.6g}") for _ in range(LATENTS)]
    utility[0] = -9.53e-07 if number == 0 else utility[0]
    readout = [None, *(float(f"{rng.random() / 8:.6g}") for _ in range(LATENTS - 1))]
    matrix = [[0.1, 0.2], [None, 0.7]]
    return {"maps": maps, "utility": utility, "readout": readout, "matrix": matrix}


def make_panels(folder: Path) -> None:
    """Records of the diagnostics of ``toys/toy_panels.py`` for the cases of a folder: none of the second case, of the
    third only the edited picture; and records of samples that are no cases."""
    found = json.loads((folder / "cases.json").read_text())["cases"]
    look: list[dict[str, Any]] = [{"id": "elsewhere", "detail": {"maps": "never read"}}]
    pairs = []
    for number, one in enumerate(found):
        for place, name in enumerate(one["ids"]):
            if number != 1 and (number, place) != (2, 0):
                look.append({"id": name, "detail": detail(10 * number + place)})
        if len(one["ids"]) == 2 and number != 1:
            texts = [f"first {number}", f"second {number}"]
            pairs.append({"pair": one["id"], "both": f"both {number}", "texts": texts})
    look.append({"id": found[1]["ids"][0]})  # a record without detail
    for name, records in (("toy-look", look), ("toy-pairs", pairs)):
        settings = {"diagnostic": name, "model": {"name": "mini"}}
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        (folder / f"{name}.json").write_text(json.dumps({"count": len(records), "settings": settings}))
        (folder / f"{name}_settings.json").write_text(json.dumps(settings))


def make_cases(folder: Path, count: int = 4, singles: int = 0) -> Path:
    """``cases.json`` and its settings: ``count`` cases, of which the last failed and the first can be steered, and
    questions without a pair."""
    folder.mkdir(parents=True, exist_ok=True)
    few = {"count": 9, "of": 10, "rate": 0.9, "low": 0.6, "high": 0.98}
    content = {
        "rule": "Made for a test.",
        "examined": 10,
        "unread": 0,
        "failures": 1,
        "shown_failures": 1,
        "both_right": [few, few],
        "cases": [case(n, 7 - n % 6, n == count - 1, n < max(1, count // 4)) for n in range(count)]
        + [single(n, f"bench{n}") for n in range(singles)],
    }
    settings = {"diagnostic": "cases", "model": {"name": "mini"}, "second_model": {"name": "mini-direct"}}
    (folder / "cases.json").write_text(json.dumps(content | {"settings": settings}))
    (folder / "cases_settings.json").write_text(json.dumps(settings))
    return folder


if __name__ == "__main__":
    make_panels(make_cases(Path(sys.argv[1]), 12, 2))
