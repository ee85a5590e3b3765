"""Samples as they will be used, with boxes and visual tokens drawn in (``realvr data show``). No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from PIL import Image

from realvr.data import overlay
from realvr.data.boxes import preview_grid
from realvr.data.checking import Policy
from realvr.data.readers.base import BoxUnit, ReadOptions
from realvr.data.readers.jsonl import column_pairs
from realvr.data.reading import Report, read
from realvr.data.sample import Sample
from realvr.errors import UserError
from realvr.families import FAMILIES
from realvr.imaging.cache import ImageCache
from realvr.imaging.files import ImageError
from realvr.imaging.types import Grid

Grids = Callable[[Image.Image], Grid]
"""Image to the grid of its visual tokens."""


@dataclass(frozen=True)
class ShowSettings:
    """Which samples to show, and whether to draw them.

    Args:
        path: Data file or folder in any supported format, or a dataset of the hub, hf:OWNER/NAME#SPLIT.
        limit: How many samples.
        save: Folder for the images, with boxes and the covered visual tokens drawn in and the question under them.
        format: Name of the format, where it should not be detected.
        policy: skip drops bad rows; strict stops at the first, naming file and row.
        images: Folder that image paths are relative to and stay inside; by default that of the data file. / admits
            absolute paths.
        boxes: What the numbers of boxes are; by default the format's own rule (fractions for our JSON lines).
        family: Without a model: the family whose typical token grid is drawn; qwen2.5-vl by default.
        max_tokens: Visual tokens per image, at most, for families whose grid follows the image size. By default the
            checkpoint's, or 1280 without a model.
        columns: For rows of questions and answers in columns with other names: question=problem answer=solution.
        split: Split to read from a BLINK tree.
        mmvp_corrected: Correct the answers that the original MMVP file swaps at Index 99/100 and 279/280.
    """

    path: Path
    limit: int = 5
    save: Path | None = None
    format: str | None = None
    policy: Policy = "skip"
    images: Path | None = None
    boxes: BoxUnit | None = None
    family: str | None = None
    max_tokens: int | None = None
    split: str = "val"
    mmvp_corrected: bool = False
    columns: Sequence[str] = ()


@dataclass
class Shown:
    """What became of the rows that were read, complete once every sample has been taken."""

    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    undrawn: list[ImageError] = field(default_factory=list)
    """Why images could not be drawn."""


def show(settings: ShowSettings, shown: Shown | None = None, grids: Grids | None = None) -> Iterator[Sample]:
    """The first samples of a file, drawn into ``settings.save`` as they come.

    ``grids`` gives the visual tokens of an image, as a checkpoint's processor does
    (`realvr.backbone.loading.token_grids`); by default those typical of ``settings.family``.
    """
    if settings.limit < 1:
        raise UserError(f"--limit is {settings.limit}: show at least 1 sample")
    if settings.family is not None and settings.family not in FAMILIES:
        raise UserError(f"no family {settings.family!r}; choose one of {', '.join(FAMILIES)}")
    family, most = settings.family or "qwen2.5-vl", settings.max_tokens or 1280
    chosen = grids or (lambda image: preview_grid(family, image.size, most))
    options = ReadOptions(
        settings.images,
        settings.policy,
        "none",
        split=settings.split,
        mmvp_corrected=settings.mmvp_corrected,
        boxes=settings.boxes,
        columns=column_pairs(settings.columns),
    )
    shown, report = shown or Shown(), Report()
    shown.dropped, shown.examples = report.dropped, report.examples
    return _draw(settings, options, report, shown, chosen)


def _draw(settings: ShowSettings, options: ReadOptions, report: Report, shown: Shown, grids: Grids) -> Iterator[Sample]:
    opened = ImageCache()
    samples = islice(read(settings.path, settings.format, options, report), settings.limit)
    for number, sample in enumerate(samples, start=1):
        yield sample
        if settings.save is None:
            continue
        try:
            overlay.save(sample, number, settings.save, grids, opened)
        except ImageError as error:
            shown.undrawn.append(error)
        except OSError as error:
            raise UserError(f"{settings.save}: cannot be written ({error.strerror or error})") from None
