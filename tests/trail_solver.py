"""Answers questions about trails from the pixels and the English alone. Shares no code with the generator."""

import re

import numpy as np

PALETTE = {
    "red": (216, 38, 38),
    "green": (44, 150, 58),
    "blue": (44, 84, 214),
    "yellow": (246, 214, 44),
    "orange": (246, 134, 22),
    "purple": (132, 56, 178),
    "cyan": (64, 206, 222),
    "pink": (248, 138, 196),
    "black": (24, 24, 24),
}


def look(pixels, rows, columns):
    """Each cell as (color, kind): kind is a direction or "circle"."""
    height, width, _ = pixels.shape
    return [
        [
            _cell(
                pixels[r * height // rows : (r + 1) * height // rows, c * width // columns : (c + 1) * width // columns]
            )
            for c in range(columns)
        ]
        for r in range(rows)
    ]


def _cell(pixels):
    pixels = pixels.astype(float)
    middle, ground = pixels[(pixels.shape[0] - 1) // 2, (pixels.shape[1] - 1) // 2], pixels[-1, -1]
    color = min(PALETTE, key=lambda name: np.abs(middle - PALETTE[name]).sum())
    ink = np.abs(pixels - ground).sum(2) / np.abs(middle - ground).sum()
    ys, xs = np.nonzero(ink > 0.1)
    ink = ink[ys.min() : ys.max() + 1, xs.min() : xs.max() + 1]
    if ink.mean() > 0.62:  # a circle fills 79 % of its box, an arrow about half
        return color, "circle"
    # The blunt end of an arrow is the fullest side of its box.
    sides = {"down": ink[0].sum(), "left": ink[:, -1].sum(), "up": ink[-1].sum(), "right": ink[:, 0].sum()}
    return color, max(sides, key=sides.get)


def _next(cell, kind):
    row, column = cell
    return {"up": (row - 1, column), "down": (row + 1, column)}.get(kind) or (
        row,
        column + (1 if kind == "right" else -1),
    )


def _find(board, color, circle):
    places = [(r, c) for r, row in enumerate(board) for c, (name, _) in enumerate(row) if name == color]
    (place,) = [(r, c) for r, c in places if (board[r][c][1] == "circle") == circle]
    return place


def _name(thing):
    color, kind = thing
    return (
        f"a {color} circle".replace("a o", "an o") if kind == "circle" else f"a {kind} arrow".replace("a up", "an up")
    )


def solve(board, text):
    """(answer in words, cells in the order one looks at them) of a question about a board that `look` gave."""
    color = re.search(r"the (\w+) (arrow|circle)", text)
    place = re.search(r"row (\d+), column (\d+)", text)
    cell = (int(place[1]) - 1, int(place[2]) - 1) if place else _find(board, color[1], color[2] == "circle")
    kind = board[cell[0]][cell[1]][1]
    if "one step" in text:
        there = _next(cell, kind)
        return _name(board[there[0]][there[1]]), [cell, there]
    if "point?" in text or "pointing?" in text:
        return kind, [cell]
    if text.startswith(("Where is", "In which row")):
        return f"row {cell[0] + 1}, column {cell[1] + 1}", [cell]
    if place:
        return _name(board[cell[0]][cell[1]]), [cell]
    way = [cell]
    while board[way[-1][0]][way[-1][1]][1] != "circle":
        way.append(_next(way[-1], board[way[-1][0]][way[-1][1]][1]))
        assert len(way) == len(set(way)), "the trail crosses itself"
    return board[way[-1][0]][way[-1][1]][0], way
