"""Places of a picture that are put into the span of a question: ``--put 4=2,5`` (``realvr ask``). No torch.

``STEP=ROW,COL`` names one visual token, row and column counted from 1; ``STEP=x0,y0,x1,y1`` a box, as fractions of the
picture's width and height like the boxes of our JSONL. Of several pictures one is named before it: ``4=2:3,5``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from realvr.data.boxes import XYXY, cell_box, clip_box
from realvr.errors import UserError
from realvr.imaging.types import Grid

_FORM = re.compile(r"\s*(\d+)\s*=\s*(?:(\d+)\s*:)?([^=:]*)")
_HOW = (
    "write STEP=ROW,COL (row and column of the visual tokens, counted from 1) or STEP=x0,y0,x1,y1 (a box in fractions "
    "of the picture)"
)


@dataclass(frozen=True)
class Put:
    """One intervention: which latent is replaced, and by which place of which picture."""

    step: int
    image: int
    """From 0."""
    cell: tuple[int, int] | None = None
    """Row and column, from 0."""
    box: XYXY | None = None
    text: str = ""
    """As it was written."""

    def area(self, grid: Grid) -> XYXY:
        """The box on a picture with this grid; a place outside it is refused."""
        if self.cell is None:
            assert self.box is not None
            return self.box
        try:
            return cell_box(grid, *self.cell)
        except UserError as error:
            raise UserError(f"--put {self.text}: {error}") from None

    def __str__(self) -> str:
        """``z_4 at row 2, column 5``; the picture too where it was named."""
        cell = self.cell and f"row {self.cell[0] + 1}, column {self.cell[1] + 1}"
        place = cell or f"box {','.join(f'{value:g}' for value in self.box or ())}"
        return f"z_{self.step} at {place}" + (f" of picture {self.image + 1}" if ":" in self.text else "")


def parse_puts(texts: Sequence[str], images: int) -> list[Put]:
    """What ``--put`` names, for a question about so many pictures; each step once."""
    puts = [_parse(text, images) for text in texts]
    seen: dict[int, str] = {}
    for put in puts:
        if put.step in seen:
            raise UserError(f"--put {put.text}: step {put.step} is replaced already (--put {seen[put.step]})")
        seen[put.step] = put.text
    return sorted(puts, key=lambda put: put.step)


def _parse(text: str, images: int) -> Put:
    found = _FORM.fullmatch(text)
    numbers = _numbers(found[3]) if found else None
    if found is None or numbers is None or len(numbers) not in (2, 4):
        raise UserError(f"--put {text}: {_HOW}")
    step, image = int(found[1]), _image(text, found[2], images)
    if step < 1:
        raise UserError(f"--put {text}: latents are counted from 1")
    if len(numbers) == 4:
        x0, y0, x1, y1 = numbers
        if not (0 <= x0 < x1 <= 1 and 0 <= y0 < y1 <= 1) or clip_box(numbers) is None:
            raise UserError(
                f"--put {text}: a box is x0,y0,x1,y1 in fractions from 0 to 1 of the picture, with x0 < x1 and y0 < y1"
            )
        return Put(step, image, box=(x0, y0, x1, y1), text=text)
    if any(value != int(value) for value in numbers):
        raise UserError(f"--put {text}: {_HOW}")
    row, column = (int(value) - 1 for value in numbers)
    return Put(step, image, cell=(row, column), text=text)


def _numbers(text: str) -> list[float] | None:
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)", part) for part in parts):
        return None
    return [float(part) for part in parts]


def _image(text: str, named: str | None, images: int) -> int:
    if images == 0:
        raise UserError(f"--put {text}: the question shows no picture")
    if named is None and images > 1:
        raise UserError(
            f"--put {text}: the question shows {images} pictures; name one, counted from 1: "
            f"{text.replace('=', '=1:', 1)} is the first"
        )
    number = 1 if named is None else int(named)
    if not 1 <= number <= images:
        raise UserError(f"--put {text}: there is no picture {number}; the question shows {images}")
    return number - 1
