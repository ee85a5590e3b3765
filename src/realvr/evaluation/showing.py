"""The picture that ``realvr ask --show`` writes: where the latents of one answer are. No torch."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from realvr.errors import UserError
from realvr.runs.files import write_atomically

if TYPE_CHECKING:
    from PIL import Image

    from realvr.latent.walk import Walk

FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}


def check_place(path: Path, option: str = "--show") -> None:
    """Refuse a file that cannot be written before a model is read; its folder is made where it is missing."""
    if path.is_dir():
        raise UserError(f"{option} {path} is a folder: name a file in it")
    if path.suffix.lower() not in FORMATS:
        known = ", ".join(FORMATS)
        raise UserError(f"{option} {path}: the name of the picture must end in one of {known}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = "a file is where a folder should be" if isinstance(error, FileExistsError) else error.strerror or error
        raise UserError(f"{option} {path}: its folder cannot be made ({why}); choose another place") from None
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"{option} {path}: {path.parent} cannot be written to; choose another place")


@dataclass(frozen=True)
class Drawn:
    """One walk, the answer behind it, and what was put where: step to its name."""

    walk: Walk
    answer: str
    put: Mapping[int, str]


def save_picture(path: Path, picture: Image.Image) -> None:
    """The picture in the format of its suffix, whole or not at all."""
    target = io.BytesIO()
    picture.save(target, FORMATS[path.suffix.lower()], quality=92)
    write_atomically(path, target.getvalue())


def save_walks(path: Path, pictures: Sequence[Image.Image], question: str, walks: Sequence[Drawn]) -> None:
    """Draw walks into a file, side by side, those with latents put into them under their names."""
    from realvr.imaging.drawing import beside
    from realvr.latent.drawing import draw_walk

    names = [f"with {', '.join(one.put.values())}" if one.put else "without" for one in walks]
    panels = [
        draw_walk(
            pictures,
            one.walk,
            question=question,
            answer=one.answer,
            heading=name if len(walks) > 1 else "",
            put=one.put,
        )
        for one, name in zip(walks, names, strict=True)
    ]
    save_picture(path, beside(panels))


def walk_rows(walk: Walk) -> list[dict[str, Any]]:
    """The walk as JSON: for each latent its picture, row and column, counted from 1 as ``--put`` does, and cosine."""
    return [
        {
            "step": step,
            "picture": place.image + 1,
            "row": place.row + 1,
            "column": place.col + 1,
            "cosine": round(cosine, 4),
        }
        for step, (place, cosine) in enumerate(zip(walk.places(), walk.cosine.tolist(), strict=True), 1)
    ]
