"""Small samples and files that the data tests share."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from realvr.data.sample import Box, ImageRef, Sample


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder with real samples that are not part of the repository."""
    named = os.environ.get("REALVR_SHARED")
    folder = Path(named) if named else Path(__file__).resolve().parents[3] / "shared"
    if not (folder / "data").is_dir():
        pytest.skip(f"no real samples at {folder}; set REALVR_SHARED to the folder that holds data/")
    return folder


def encoded(width: int = 40, height: int = 30, shade: int = 0, kind: str = "PNG") -> bytes:
    """A small picture whose pixels depend on its arguments."""
    image = Image.new("RGB", (width, height), (shade % 256, 90, 200))
    image.putpixel((width // 2, height // 2), (255, shade % 256, 0))
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


@pytest.fixture(name="encoded")
def _encoded() -> Callable[..., bytes]:
    return encoded


@pytest.fixture
def five_options() -> list[Sample]:
    """Six samples with everything set; boxes on whole pixels, so that pixel layouts give them back."""
    return [
        Sample.ask(
            str(number),
            [ImageRef.from_bytes(f"scene{number}.png", encoded(40 + number, 30, number))],
            f'Which "thing"\tis number {number}, ünïcode?',
            "ABCDE"[number % 5],
            choices=["a vase", "two, three", "x (y)", "4", "The feature does not exist"],
            boxes=[Box(0, (10 / (40 + number), 3 / 30, 21 / (40 + number), 0.5)), Box(0, (0.0, 0.0, 1.0, 2 / 30))],
            task="Perception",
            category="colour",
            tags={"subtask": "Monitoring"},
            pair=str(number // 2 + 1),
            cycle=str(number % 4),
        )
        for number in range(6)
    ]
