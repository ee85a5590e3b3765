"""The picture that ``realvr ask --show`` writes: where the latents of one answer are. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from realvr.imaging.saving import save_picture

if TYPE_CHECKING:
    from PIL import Image

    from realvr.latent.walk import Walk


@dataclass(frozen=True)
class Drawn:
    """One walk, the answer behind it, and what was put where: step to its name."""

    walk: Walk
    answer: str
    put: Mapping[int, str]


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
