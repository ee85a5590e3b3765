"""Conversations and images of the processor goldens, shared by ``scripts/make_processor_goldens.py`` and the tests.

Images are made from integers alone, so that every machine makes the same bytes and none has to be stored. Their sizes
give InternVL one tile, wide, tall and square grids of tiles, and Qwen grids that its windows do not divide.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from PIL import Image


@dataclass(frozen=True)
class CaseImage:
    """A synthetic image, in pixels."""

    width: int
    height: int
    seed: int


@dataclass(frozen=True)
class CaseTurn:
    """One message; images precede the text."""

    role: str
    text: str
    images: tuple[CaseImage, ...] = ()


Case = tuple[CaseTurn, ...]

CASES: dict[str, Case] = {
    "one image": (CaseTurn("user", "What color is the small circle?", (CaseImage(84, 56, 1),)),),
    "two images": (CaseTurn("user", "What has changed between them?", (CaseImage(100, 70, 2), CaseImage(63, 130, 3))),),
    "system": (
        CaseTurn("system", "Answer with a single word."),
        CaseTurn("user", "Is the cube above the sphere?", (CaseImage(120, 120, 4),)),
    ),
    "two turns": (
        CaseTurn("user", "How many triangles are there?", (CaseImage(90, 60, 5),)),
        CaseTurn("assistant", "There are three triangles."),
        CaseTurn("user", "And here?", (CaseImage(57, 60, 6),)),
    ),
    "no image": (CaseTurn("user", "Count to three: 1, 2, 3."),),
    "odd text": (
        # Spaces and line breaks at both ends, composed and decomposed accents, an emoji of several code points.
        CaseTurn(
            "user", " \n  Où est l'été — e\u0301te\u0301?\r\n\n\tÜber 東京 👩‍🚀🚀 naïve  \n ", (CaseImage(200, 40, 7),)
        ),
    ),
    "odd text, no image": (
        CaseTurn("system", "  Be brief.\n"),
        CaseTurn("user", "\n\nline one\nline two  \n\n"),
        CaseTurn("assistant", " ok 👍\n"),
        CaseTurn("user", "don't  stop 100%"),
    ),
}


def make_image(image: CaseImage) -> Image.Image:
    """A gradient, a checkerboard and noise, all from ``image.seed`` by integer arithmetic."""
    y, x = np.mgrid[0 : image.height, 0 : image.width].astype(np.uint32)
    channels = []
    for channel in range(3):
        key = np.uint32(image.seed * 3 + channel + 1)
        ramp = (x * (key % np.uint32(5) + np.uint32(1)) + y * (key % np.uint32(3) + np.uint32(1))) % np.uint32(160)
        check = ((x // np.uint32(9) + y // np.uint32(7) + key) % np.uint32(2)) * np.uint32(60)
        noise = ((x * np.uint32(73856093)) ^ (y * np.uint32(19349663)) ^ (key * np.uint32(83492791))) >> np.uint32(7)
        channels.append((ramp + check + noise % np.uint32(32)).astype(np.uint8))
    return Image.fromarray(np.stack(channels, axis=-1), "RGB")


def messages(case: Case, with_images: bool = False) -> list[dict[str, Any]]:
    """The case as transformers takes it; ``with_images`` puts the PIL images in, which a processor wants and a bare
    template does not. A user turn is a list of parts and any other a string: templates must take both."""
    out: list[dict[str, Any]] = []
    for turn in case:
        if turn.role != "user":
            out.append({"role": turn.role, "content": turn.text})
            continue
        parts: list[dict[str, Any]] = [
            {"type": "image", "image": make_image(image)} if with_images else {"type": "image"} for image in turn.images
        ]
        out.append({"role": turn.role, "content": [*parts, {"type": "text", "text": turn.text}]})
    return out


def images(case: Case) -> list[Image.Image]:
    """All images of the case, in order."""
    return [make_image(image) for turn in case for image in turn.images]


def as_json(case: Case) -> list[dict[str, Any]]:
    """The case in plain types, as the golden file records it."""
    return [{**asdict(turn), "images": [asdict(image) for image in turn.images]} for turn in case]
