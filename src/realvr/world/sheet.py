"""Contact sheets: pictures with their evidence boxes, questions, options and answers, for a person to look at."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from PIL import Image, ImageDraw

from realvr.world.draw import font
from realvr.world.items import Item
from realvr.world.questions import LETTERS

TILE = 300
"""Width of one example on the sheet, in pixels."""
PICTURE = 220
INSET, MAX_INSETS = 44, 6
VISIBLE = 12
"""Pixels on the sheet that an object needs to be made out."""
TEXT, LINE = 12, 15
INK, FAINT, GOOD, BOX = (20, 20, 20), (110, 110, 110), (0, 110, 40), (255, 0, 200)


def _picture(item: Item, index: int, width: int) -> Image.Image:
    """One view fitted into ``width`` x `PICTURE`, with its boxes drawn in."""
    view = item.views[index]
    picture = Image.fromarray(view.pixels())
    scale = min(width / picture.width, PICTURE / picture.height)
    # Whole factors keep small pictures crisp; large ones are averaged down.
    scale = float(int(scale)) if scale >= 2 else scale
    how = Image.Resampling.NEAREST if scale >= 1 else Image.Resampling.BOX
    picture = picture.resize((max(1, int(picture.width * scale)), max(1, int(picture.height * scale))), how)
    pen = ImageDraw.Draw(picture)
    boxes = [tuple(side * scale for side in box) for owner, box in item.boxes if owner == index]
    if boxes and "trail" in item.meta:
        _way(pen, item, [((x0 + x1) / 2, (y0 + y1) / 2) for x0, y0, x1, y1 in boxes])
        return picture
    for x0, y0, x1, y1 in boxes:
        pen.rectangle((x0 - 2, y0 - 2, x1 + 1, y1 + 1), outline=BOX)
    return picture


def _way(pen: ImageDraw.ImageDraw, item: Item, middles: Sequence[tuple[float, float]]) -> None:
    """Ordered cells lie side by side: the way through them is easier to see than their borders. It begins at a dot and
    ends at a circle; after that comes another."""
    board, begins = item.meta["trail"]["board"], True
    for k, ((x, y), (row, column)) in enumerate(zip(middles, item.meta["trail"]["cells"], strict=True)):
        if begins:
            pen.ellipse((x - 3, y - 3, x + 3, y + 3), fill=BOX)
        else:
            pen.line([middles[k - 1], (x, y)], fill=BOX, width=2)
        begins = board[row][column].startswith("circle")


def _insets(item: Item) -> list[Image.Image]:
    """Supporting objects at a size that can be seen, where the picture had to be shrunk too far for that."""
    found: list[Image.Image] = []
    whole: dict[int, Image.Image] = {}
    for owner, (x0, y0, x1, y1) in item.boxes:
        view = item.views[owner]
        if min(x1 - x0, y1 - y0) * TILE / view.size[0] >= VISIBLE or len(found) == MAX_INSETS:
            continue
        half = max(x1 - x0, y1 - y0)  # as much again around it, for context
        cx, cy = (x0 + x1) // 2, (y0 + y1) // 2
        if owner not in whole:
            whole[owner] = Image.fromarray(view.pixels())
        near = whole[owner].crop((cx - half, cy - half, cx + half, cy + half))
        found.append(near.resize((INSET, INSET), Image.Resampling.BICUBIC))
    return found


def _lines(item: Item) -> list[tuple[str, tuple[int, int, int]]]:
    """Text under a picture, wrapped, with colors."""
    width = TILE // 6 - 4
    rows = [(item.id + (f"  {item.tags['stratum']}" if "stratum" in item.tags else ""), FAINT)]
    for question, reply in item.earlier:
        rows += [(line, INK) for line in textwrap.wrap(question, width)] + [(reply, GOOD)]
    rows += [(line, INK) for line in textwrap.wrap(item.text, width)]
    for letter, choice in zip(LETTERS, item.choices, strict=False):
        lines = textwrap.wrap(f"({letter}) {choice}", width)
        rows += [(line, GOOD if choice == item.answer else FAINT) for line in lines]
    if not item.choices:
        rows.append((f"answer: {item.answer}", GOOD))
    return rows


def _tile(item: Item) -> Image.Image:
    """One example."""
    lines = _lines(item)
    tile = Image.new("RGB", (TILE, PICTURE + LINE * len(lines) + 18), (255, 255, 255))
    insets = _insets(item)
    share = (TILE - 8) // len(item.views) - 4
    left = 6
    for index in range(len(item.views)):
        picture = _picture(item, index, share)
        tile.paste(picture, (left, 4 if insets else 4 + (PICTURE - picture.height) // 2))
        left += share + 4
    for k, inset in enumerate(insets):
        tile.paste(inset, (6 + k * (INSET + 4), PICTURE - INSET))
    pen = ImageDraw.Draw(tile)
    for k, (line, color) in enumerate(lines):
        pen.text((6, PICTURE + 8 + k * LINE), line, fill=color, font=font(TEXT))
    return tile


def contact_sheet(items: Sequence[Item], columns: int = 4) -> Image.Image:
    """All examples on one picture, row by row."""
    tiles = [_tile(item) for item in items]
    rows = [tiles[k : k + columns] for k in range(0, len(tiles), columns)]
    heights = [max(tile.height for tile in row) for row in rows]
    sheet = Image.new("RGB", (TILE * min(columns, len(tiles)), sum(heights)), (255, 255, 255))
    top = 0
    for row, height in zip(rows, heights, strict=True):
        for k, tile in enumerate(row):
            sheet.paste(tile, (k * TILE, top))
        top += height
    return sheet
