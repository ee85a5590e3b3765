"""Splits of the world on disk, in the layouts of the real data (`make`), and a contact sheet (`show`). No torch."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from realvr.data.export import write
from realvr.data.reading import read
from realvr.data.sample import Sample
from realvr.errors import UserError
from realvr.imaging.saving import check_place, save_picture
from realvr.runs.files import differences
from realvr.runs.folder import RunFolder, open_run_folder
from realvr.runs.progress import Bar
from realvr.world.benchmarks import Resize
from realvr.world.items import Item
from realvr.world.questions import Withheld
from realvr.world.sheet import contact_sheet
from realvr.world.splits import SPLITS, Recipe, build, samples
from realvr.world.trails.plan import Answers, Plan, Start, parse_arrows, parse_grid

RECIPE = "recipe.json"
FILES = {
    "visual-cot": "viscot_world.json",
    "virl39k": "virl39k.parquet",
    "lvr": "lvr.json",
    "mmvp": "MMVP",
    "blink": "BLINK",
    "mme-realworld": "MME_RealWorld.json",
    "vstar": "test_questions.jsonl",
}
"""What the real layouts' files are called, in the split's folder (HR-Bench: see `layout_path`)."""

Format = Literal["all", "jsonl", "real"]


@dataclass(frozen=True)
class MakeSettings:
    """Which splits to write, and how they are drawn.

    Args:
        out: Folder to write to. A split that was made there in another way is never overwritten.
        split: Names of splits, or all.
        size: Canvas in pixels: 128, 640x480, 4k or 8k. Left out: each split's own.
        seed: Fixes every scene and question.
        count: Questions; pairs for mmvp; pairs of each edit; questions in four cycles for hrbench. Left out: the usual.
        format: all writes our JSONL, which holds everything, and the real layout; jsonl or real writes one of them.
        kinds: Kinds of question, for curriculum, dialogues, sequels, train-* (also trails), validation, counterfactual
            and the splits of trails (end, arrows, turn, meet).
        withheld: Whether questions may (any), must not (exclude) or must (only) refer to something by a withheld word.
        grid: Cells of a board of trails, ROWSxCOLUMNS. Left out: 6x6.
        arrows: Fewest and most arrows on a trail. Left out: 1-7.
        clutter: Trails among shapes that lead nowhere, colored arrows and arrows of several styles.
        start: What questions about trails name the start by.
        answers: Whether questions about trails come with options or want a free answer.
        resize_pixels: Pixels that a model shrinks a large image to (hrbench, vstar: decides what is visible).
        patch: Side in pixels of what one visual token covers after that.
        workers: Processes.
        take_over: Take a folder from a run on another machine that is gone for certain.
    """

    out: Path
    split: tuple[str, ...] = ("all",)
    size: str | None = None
    seed: int = 0
    count: int | None = None
    format: Format = "all"
    kinds: tuple[str, ...] = ()
    withheld: Withheld | None = None
    grid: str | None = None
    arrows: str | None = None
    clutter: bool = False
    start: Start = "color"
    answers: Answers = "options"
    resize_pixels: int | None = None
    patch: int | None = None
    workers: int = 2
    take_over: bool = False

    def recipes(self) -> list[Recipe]:
        """One for each split."""
        names = list(SPLITS) if tuple(self.split) in ((), ("all",)) else list(self.split)
        if self.format not in ("all", "jsonl", "real"):
            raise UserError(f"format {self.format!r}: choose all, jsonl or real")
        return [_recipe(name, self, self.count) for name in names]


@dataclass(frozen=True)
class ShowSettings:
    """What to put on a contact sheet.

    Args:
        out: Picture to write (.png, .jpg, .webp).
        split: Name of a split.
        size: Canvas in pixels, as for make.
        seed: As for make: the same examples.
        limit: How many examples.
        columns: How many in a row.
        kinds: Kinds of question, as for make.
        withheld: As for make.
        grid: As for make.
        arrows: As for make.
        clutter: As for make.
        start: As for make.
        answers: As for make.
        resize_pixels: As for make.
        patch: As for make.
    """

    out: Path
    split: str = "train-boxes"
    size: str | None = None
    seed: int = 0
    limit: int = 12
    columns: int = 4
    kinds: tuple[str, ...] = ()
    withheld: Withheld | None = None
    grid: str | None = None
    arrows: str | None = None
    clutter: bool = False
    start: Start = "color"
    answers: Answers = "options"
    resize_pixels: int | None = None
    patch: int | None = None


def _recipe(split: str, settings: MakeSettings | ShowSettings, count: int | None) -> Recipe:
    """The recipe that the settings stand for."""
    usual = Resize()
    resize = Resize(settings.resize_pixels or usual.max_pixels, settings.patch or usual.patch)
    size = parse_size(settings.size)
    return Recipe(split, settings.seed, count, size, tuple(settings.kinds), settings.withheld, resize, _plan(settings))


def _plan(settings: MakeSettings | ShowSettings) -> Plan:
    """What the settings say about trails; the usual where they say nothing."""
    chosen: dict[str, Any] = {"clutter": settings.clutter, "start": settings.start, "answers": settings.answers}
    if settings.grid:
        chosen["grid"] = parse_grid(settings.grid)
    if settings.arrows:
        chosen["arrows"] = parse_arrows(settings.arrows)
    return Plan(**chosen)


@dataclass(frozen=True)
class Made:
    """A split on disk."""

    split: str
    rows: int
    files: list[Path]


def make(settings: MakeSettings) -> list[Made]:
    """Write the splits, each in a folder of its own under ``settings.out``."""
    return [_make(recipe, settings) for recipe in settings.recipes()]


def _make(recipe: Recipe, settings: MakeSettings) -> Made:
    folder = Path(settings.out) / recipe.split
    with open_run_folder(folder, "world make", settings.take_over) as opened:
        try:
            _claim(opened, recipe)
            rows, files = _write(recipe, folder, settings.format, settings.workers)
        except UserError:
            opened.forget(RECIPE)
            raise
        except OSError as error:
            raise UserError(f"{folder}: cannot be written ({error.strerror or error})") from None
    return Made(recipe.split, rows, files)


def show(settings: ShowSettings) -> int:
    """Draw the first examples of a split; returns how many there are."""
    if settings.limit < 1 or settings.columns < 1:
        raise UserError(f"limit {settings.limit} and columns {settings.columns} must be at least 1")
    path = Path(settings.out)
    check_place(path)
    chosen = list(itertools.islice(_spread(_recipe(settings.split, settings, None)), settings.limit))
    try:
        save_picture(path, contact_sheet(chosen, settings.columns), optimize=True)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be written ({error})") from None
    return len(chosen)


def parse_size(text: str | None) -> tuple[int, int] | None:
    """``128``, ``640x480``, ``4k`` or ``8k`` as (width, height); None stays None: the split's own size."""
    if text is None or text == "":
        return None
    named = {"4k": (3840, 2160), "8k": (7680, 4320)}
    if text.lower() in named:
        return named[text.lower()]
    match = re.fullmatch(r"(\d+)(?:[x×](\d+))?", text.strip().lower())
    if match is None:
        raise UserError(f"size {text!r}: write a number of pixels, WIDTHxHEIGHT, 4k or 8k")
    return int(match[1]), int(match[2] or match[1])


def layout_path(split: str, folder: Path) -> Path:
    """Where ``make`` puts the split in its real layout."""
    layout = SPLITS[split].layout
    if layout == "hr-bench":
        return folder / f"hr_bench_{split.removeprefix('hrbench-')}.tsv"
    return folder / FILES.get(layout, "samples.jsonl")


def _claim(folder: RunFolder, recipe: Recipe) -> None:
    """Refuse to mix two recipes in one folder; remember this one."""
    path = folder.path
    folder.refuse_foreign(RECIPE, f"{path} is not empty and not one of ours; name another folder")
    said = asdict(recipe)
    if not recipe.of_trails:  # as folders of these splits say that were made before there were trails
        del said["trail"]

    def refusal(before: dict[str, Any], now: dict[str, Any]) -> str | None:
        changes = "; ".join(differences(before, now)[:4])
        return (
            f"{path} holds the split made another way ({changes}); name another folder or remove it"
            if changes
            else None
        )

    folder.claim(RECIPE, said, refusal)


def _counted(made: Iterator[Sample], title: str, total: int | None) -> Iterator[Sample]:
    with Bar(title, total) as bar:
        for sample in made:
            yield sample
            bar.advance()


def _write(recipe: Recipe, folder: Path, format: Format, workers: int) -> tuple[int, list[Path]]:
    """Write one split; the real layout is made from our own file, so everything is drawn once."""
    info = recipe.info
    per_unit = {"mmvp": 2, "counterfactual": 2, "trails-pairs": 2, "hrbench-4k": 4, "hrbench-8k": 4}.get(
        recipe.split, 1
    )
    total = len(recipe.units()) * per_unit
    made = _counted(samples(recipe, workers), recipe.split, total)
    real = layout_path(recipe.split, folder)
    if format == "real" and info.layout != "jsonl":
        done = write(made, info.layout, real)
        return done.rows, done.files
    own = folder / "samples.jsonl"
    done = write(made, "jsonl", own)
    if format == "jsonl" or info.layout == "jsonl":
        return done.rows, done.files
    again = _counted(read(own, "jsonl"), f"{recipe.split} as {info.layout}", total)
    return done.rows, done.files + write(again, info.layout, real).files


def _spread(recipe: Recipe) -> Iterator[Item]:
    """Items of a split, its parts taken in turn, HR-Bench in its first cycle only."""
    units = sorted(recipe.units(), key=lambda unit: unit[1])
    for unit in units:
        items = build(recipe, unit)
        yield from items[:1] if recipe.split.startswith("hrbench") else items
