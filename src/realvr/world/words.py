"""The vocabulary of the world: what objects can look like, and which words are withheld from base training.

Names are the words that appear in questions, so the spelling is the one visual question answering data uses ("color").
"""

from __future__ import annotations

RGB = tuple[int, int, int]

COLORS: dict[str, RGB] = {
    "red": (216, 38, 38),
    "green": (44, 150, 58),
    "blue": (44, 84, 214),
    "yellow": (246, 214, 44),
    "orange": (246, 134, 22),
    "purple": (132, 56, 178),
    "cyan": (64, 206, 222),
    "pink": (248, 138, 196),
    "brown": (128, 78, 40),
    "white": (250, 250, 250),
    "black": (24, 24, 24),
    "gray": (150, 150, 150),
}
"""Color word to RGB. ``gray`` only appears in the relative-brightness task, where its shade varies."""

SHAPES: tuple[str, ...] = (
    "circle",
    "square",
    "triangle",
    "star",
    "heart",
    "cross",
    "ring",
    "moon",
    "arrow",
    "hexagon",
)
TEXTURES: tuple[str, ...] = ("plain", "striped", "dotted", "checkered")
SIZES: tuple[str, ...] = ("small", "large")
DIRECTIONS: tuple[str, ...] = ("up", "right", "down", "left")
"""Where an arrow points; index times 90 degrees clockwise from up."""

EASY_COLORS: tuple[str, ...] = ("red", "green", "blue", "yellow", "orange", "purple", "cyan", "pink")
EASY_SHAPES: tuple[str, ...] = ("circle", "square", "triangle", "star", "heart", "cross", "ring", "moon")

RARE_COLORS: tuple[str, ...] = ("pink", "brown", "white", "black")
RARE_SHAPES: tuple[str, ...] = ("moon", "arrow", "hexagon")

REGIONS: tuple[str, ...] = (
    "top left",
    "top center",
    "top right",
    "middle left",
    "center",
    "middle right",
    "bottom left",
    "bottom center",
    "bottom right",
)
"""Thirds of the canvas, row-major."""

WITHHELD_WORDS: tuple[str, ...] = ("purple", "cyan", "heart", "cross", "top right", "bottom left")
"""Words that never *refer* to something in a question of the base splits.

They still occur in captions, attribute tables, options and answers, so a model learns what they look like but not to
look things up by them: the headroom that later stages can win.
"""


def plural(noun: str) -> str:
    """Plural of a phrase whose last word is a shape or ``object``."""
    return noun + ("es" if noun.endswith(("s", "x")) else "s")


def with_article(noun: str) -> str:
    """``a red circle`` / ``an orange star``."""
    return ("an " if noun[0] in "aeiou" else "a ") + noun
