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
MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
POINTED = ("triangle", "pentagon", "chevron")


def look(pixels, rows, columns):
    """Each cell as (color, kind): kind is "circle", a direction (of an arrow) or such as "triangle up"."""
    height, width, _ = pixels.shape
    ys, xs = (np.rint(np.arange(n + 1) * side / n).astype(int) for n, side in ((rows, height), (columns, width)))
    return [[_cell(pixels[ys[r] : ys[r + 1], xs[c] : xs[c + 1]]) for c in range(columns)] for r in range(rows)]


def described(item):
    """What `look` should see, from the item's own table of its cells."""
    rows, columns = item.meta["trail"]["grid"]
    board = [[None] * columns for _ in range(rows)]
    for entry in item.meta["objects"]:
        row, column = entry["cell"]
        board[row][column] = entry["color"], entry["shape"].removeprefix("arrow ")
    return board


def _cell(pixels):
    pixels = pixels.astype(float)
    middle, ground = pixels[(pixels.shape[0] - 1) // 2, (pixels.shape[1] - 1) // 2], pixels[-1, -1]
    color = min(PALETTE, key=lambda name: np.abs(middle - PALETTE[name]).sum())
    ink = np.abs(pixels - ground).sum(2) / np.abs(middle - ground).sum()
    if len(pixels) >= 16:  # large enough to ignore smoothed edges, which say most in small ones
        ink = (ink > 0.5).astype(float)
    ys, xs = np.nonzero(ink > 0.1)
    ink = ink[ys.min() : ys.max() + 1, xs.min() : xs.max() + 1]
    filled = ink.mean()  # a circle fills 79 % of its box, a pentagon 77, a chevron 64, an arrow about half
    if filled > 0.62 and color != "black":
        return color, "circle"
    # The blunt end is the fullest side of the box.
    sides = {"down": ink[0].mean(), "left": ink[:, -1].mean(), "up": ink[-1].mean(), "right": ink[:, 0].mean()}
    kind = max(sides, key=sides.get)
    if filled > 0.72:
        return color, f"pentagon {kind}"
    if filled > 0.6:
        return color, f"chevron {kind}"
    return color, kind if sides[kind] < 0.7 else f"triangle {kind}"


def _next(cell, kind):
    down, right = MOVES[kind.split()[-1]]
    return cell[0] + down, cell[1] + right


def _find(board, fits):
    (place,) = [(r, c) for r, row in enumerate(board) for c, thing in enumerate(row) if fits(*thing)]
    return place


def _named(board, text):
    """Cells that a question names, in order."""
    found = []
    words = "|".join(PALETTE)
    for match in re.finditer(rf"row (\d+), column (\d+)|the ({words}) (arrow|circle)|the ({'|'.join(POINTED)})", text):
        row, column, color, noun, shape = match.groups()
        if row:
            found.append((int(row) - 1, int(column) - 1))
        elif shape:
            found.append(_find(board, lambda _, kind, shape=shape: kind.startswith(shape)))
        elif noun == "circle":
            found.append(_find(board, lambda its, kind, color=color: its == color and kind == "circle"))
        else:
            found.append(_find(board, lambda its, kind, color=color: its == color and kind in MOVES))
    return found


def _name(thing):
    color, kind = thing
    words = f"a {color} circle" if kind == "circle" else f"a {kind} arrow"
    return words.replace("a orange", "an orange").replace("a up", "an up")


def _walk(board, cell):
    way = [cell]
    while board[way[-1][0]][way[-1][1]][1] != "circle":
        way.append(_next(way[-1], board[way[-1][0]][way[-1][1]][1]))
        assert len(way) == len(set(way)), "the trail crosses itself"
    return way


def _last_turn(way):
    answer = "no turn"
    for a, b, c in zip(way, way[1:], way[2:], strict=False):
        cross = (b[1] - a[1]) * (c[0] - b[0]) - (b[0] - a[0]) * (c[1] - b[1])  # y points down
        answer = "right" if cross > 0 else "left" if cross < 0 else answer
    return answer


def solve(board, text):
    """(answer in words, cells in the order one looks at them) of a question about a board that `look` gave."""
    cell, *rest = _named(board, text)
    kind = board[cell[0]][cell[1]][1]
    if "one step" in text:
        there = _next(cell, kind)
        return _name(board[there[0]][there[1]]), [cell, there]
    if re.search(r"point\?|pointing\?", text):
        return kind.split()[-1], [cell]
    if text.startswith(("Where is", "In which row")):
        return f"row {cell[0] + 1}, column {cell[1] + 1}", [cell]
    if text.startswith(("What is at", "Look at")):
        return _name(board[cell[0]][cell[1]]), [cell]
    way = _walk(board, cell)
    if "the same circle" in text:
        other = _walk(board, rest[0])
        return "yes" if way[-1] == other[-1] else "no", way + other
    if "How many" in text:
        return str(len(way) - 1), way
    if "turn" in text:
        return _last_turn(way), way
    return board[way[-1][0]][way[-1][1]][0], way
