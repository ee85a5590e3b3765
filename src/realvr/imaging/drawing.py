"""Drawing on pictures and laying them out on a sheet, with Pillow: smooth lines, text that fits. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

from PIL import Image, ImageDraw, ImageFont

Font = ImageFont.ImageFont | ImageFont.FreeTypeFont

FACTOR = 3
"""How much larger lines and text are drawn before they are scaled down."""
SMALL = 160
"""A picture up to this side is enlarged by a whole factor, pixel by pixel."""
PAPER, FAINT = (255, 255, 255), (113, 113, 122)
GAP = 14

RGB = tuple[int, int, int]
Point = tuple[float, float]
Rectangle = tuple[float, float, float, float]


class Pen:
    """Draws on a transparent layer, `FACTOR` times as large as the picture it is laid over."""

    def __init__(self, size: tuple[int, int]) -> None:
        self.size = size
        self.layer = Image.new("RGBA", (size[0] * FACTOR, size[1] * FACTOR), (*PAPER, 0))
        self.pen = ImageDraw.Draw(self.layer)

    def line(self, a: Point, b: Point, color: RGB, width: float, dashed: bool = False) -> None:
        """A line with round ends, or a row of dashes."""
        dashes = max(1, round(math.dist(a, b) / (5 * width))) if dashed else 1
        for k in range(dashes):
            u, v = (k + 0.25 * dashed) / dashes, (k + 1 - 0.25 * dashed) / dashes
            ends = [(a[0] + (b[0] - a[0]) * t, a[1] + (b[1] - a[1]) * t) for t in (u, v)]
            self.pen.line([(x * FACTOR, y * FACTOR) for x, y in ends], fill=color, width=max(1, round(width * FACTOR)))
            for x, y in ends:
                self.dot(x, y, color, width / 2)

    def dot(self, x: float, y: float, color: RGB, radius: float) -> None:
        """A filled circle."""
        box = [(value * FACTOR) for value in (x - radius, y - radius, x + radius, y + radius)]
        self.pen.ellipse(box, fill=color)

    def ring(self, x: float, y: float, color: RGB, radius: float, width: float) -> None:
        """A circle's outline."""
        box = [(value * FACTOR) for value in (x - radius, y - radius, x + radius, y + radius)]
        self.pen.ellipse(box, outline=color, width=round(width * FACTOR))

    def polygon(self, points: Sequence[Point], color: RGB) -> None:
        """A filled polygon."""
        self.pen.polygon([(x * FACTOR, y * FACTOR) for x, y in points], fill=color)

    def pill(self, box: Rectangle, color: RGB, radius: float) -> None:
        """A filled box with round corners, behind a label."""
        self.pen.rounded_rectangle([value * FACTOR for value in box], radius * FACTOR, fill=color)

    def text(
        self, x: float, y: float, text: str, color: RGB, size: float, anchor: str = "mm", bold: bool = False
    ) -> None:
        """A label in a font that has all its letters."""
        font, weight = font_for(text, round(size * FACTOR)), round(0.02 * size * FACTOR) if bold else 0
        self.pen.text((x * FACTOR, y * FACTOR), text, color, font, anchor, stroke_width=weight, stroke_fill=color)

    def length(self, text: str, size: float) -> float:
        """Width of a label in pixels of the picture."""
        return float(self.pen.textlength(text, font=font_for(text, round(size * FACTOR)))) / FACTOR

    def over(self, picture: Image.Image) -> Image.Image:
        """The picture with the layer on top."""
        layer = self.layer.resize(self.size, Image.Resampling.BOX)
        return Image.alpha_composite(picture.convert("RGBA"), layer).convert("RGB")


@cache
def font_for(text: str, size: int) -> Font:
    """Pillow's own font; where that lacks a letter of the text, the first of the machine's that has all of them."""
    own = ImageFont.load_default(size)
    if _writes(own, text):
        return own
    for name in ("DejaVuSans.ttf", "NotoSans-Regular.ttf", "NotoSansCJK-Regular.ttc", "Arial Unicode.ttf", "msyh.ttc"):
        try:
            other = ImageFont.truetype(name, size)
        except OSError:
            continue
        if _writes(other, text):
            return other
    return own


def _writes(font: Font, text: str) -> bool:
    """Whether a font has all letters of a text: what it lacks looks like a character that no font has."""
    unknown = bytes(font.getmask("\uffff"))
    return all(letter.isspace() or bytes(font.getmask(letter)) != unknown for letter in set(text))


def wrapped(line: str, width: int, font: Font, pen: ImageDraw.ImageDraw) -> list[str]:
    """One line as several that are no wider than ``width``; a word that is wider is broken."""
    done: list[str] = []
    current = ""
    for word in line.split():
        joined = f"{current} {word}".strip()
        if pen.textlength(joined, font=font) <= width:
            current = joined
            continue
        if current:
            done.append(current)
        while pen.textlength(word, font=font) > width and len(word) > 1:
            fits = max(n for n in range(1, len(word)) if n == 1 or pen.textlength(word[:n], font=font) <= width)
            done.append(word[:fits])
            word = word[fits:]
        current = word
    return [*done, current]


def paragraph(text: str, width: int, size: int) -> list[str]:
    """A text in the lines of `Pen.text` that are no wider than ``width``."""
    pen, font = Pen((1, 1)), font_for(text, size * FACTOR)
    return [part for line in text.split("\n") for part in wrapped(line, width * FACTOR, font, pen.pen)]


def enlarged(picture: Image.Image, side: int) -> Image.Image:
    """A picture with its longest side near ``side``: small ones grow by a whole factor, their pixels stay visible."""
    longest = max(picture.size)
    if longest <= SMALL and longest <= side:
        factor = max(1, side // longest)
        return picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)
    scale = side / longest
    size = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
    return picture.resize(size, Image.Resampling.LANCZOS)


def titled(picture: Image.Image, text: str) -> Image.Image:
    """The picture with a line of text above it."""
    pen = Pen((max(picture.width, 40), 22))
    pen.text(0, 11, text, FAINT, 13, "lm")
    head = pen.over(Image.new("RGB", pen.size, PAPER))
    return column([head, picture], 2)


def beside(panels: Sequence[Image.Image], gap: int = GAP) -> Image.Image:
    """Pictures side by side."""
    width = sum(one.width for one in panels) + gap * (len(panels) - 1)
    sheet = Image.new("RGB", (width, max(one.height for one in panels)), PAPER)
    left = 0
    for one in panels:
        sheet.paste(one, (left, 0))
        left += one.width + gap
    return sheet


def column(panels: Sequence[Image.Image], gap: int = GAP) -> Image.Image:
    """Pictures below each other."""
    height = sum(one.height for one in panels) + gap * (len(panels) - 1)
    sheet = Image.new("RGB", (max(one.width for one in panels), height), PAPER)
    top = 0
    for one in panels:
        sheet.paste(one, (0, top))
        top += one.height + gap
    return sheet


def framed(picture: Image.Image, width: int = 0, margin: int = 18) -> Image.Image:
    """The picture on paper at least ``width`` wide, with margins."""
    sheet = Image.new("RGB", (max(width, picture.width) + 2 * margin, picture.height + 2 * margin), PAPER)
    sheet.paste(picture, (margin, margin))
    return sheet
