"""Pictures with boxes by category, from the files that labelling tools write: COCO instances and Pascal VOC.

Neither layout holds questions; `realvr.data.template_questions` makes or joins them.
"""

from __future__ import annotations

import json
import math
import os
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from realvr.data import reasons
from realvr.data.reasons import BadRow, FileError
from realvr.data.sample import Box, ImageRef
from realvr.data.streams import open_file
from realvr.errors import UserError
from realvr.imaging.files import LARGEST_SIDE, ImageError
from realvr.runs.files import Json

XYXY = tuple[float, float, float, float]
SIZE_MISMATCH = "size_mismatch"
IMAGE_UNKNOWN = "image_unknown"
CATEGORY_UNKNOWN = "category_unknown"
_SHAPE_TOLERANCE = 0.02
_VOC_IMAGE_FOLDERS = ("", "../JPEGImages", "../images", "../Images")
_SUFFIXES = (".jpg", ".jpeg", ".png", ".JPG", ".JPEG", ".PNG")


@dataclass
class Losses:
    """What could not be used, by reason."""

    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, detail: str) -> None:
        """Count one and keep where its reason was met first."""
        self.counts[reason] += 1
        self.first.setdefault(reason, detail[:300])


@dataclass
class Annotated:
    """One picture as a file describes it. Boxes are in pixels of the described size, if it gives one."""

    name: str
    folders: list[Path]
    """Where the image file may be."""
    size: tuple[float, float] | None
    where: str
    """The file and row that describe it, for messages."""
    boxes: dict[str, list[XYXY]] = field(default_factory=dict)
    unsure: set[str] = field(default_factory=set)
    """Categories with a box that could not be used, or that stands for a crowd: their number is not known."""
    key: str = ""
    """Another name that questions may use: the id in a COCO file."""

    @property
    def aliases(self) -> set[str]:
        """What questions may call the picture: its file name, with or without folders and suffix, or its id."""
        whole, last = self.name, self.name.rsplit("/", 1)[-1]
        return {whole, last, os.path.splitext(whole)[0], os.path.splitext(last)[0], self.key} - {""}


@dataclass(frozen=True)
class Picture:
    """A picture that can be opened, with boxes in fractions of it."""

    name: str
    aliases: frozenset[str]
    image: ImageRef
    boxes: dict[str, list[Box]]
    unsure: frozenset[str]

    def has(self, category: str) -> bool:
        """Whether the category is there, also where its boxes cannot be used."""
        return category in self.boxes or category in self.unsure


def _numbers(values: object, count: int) -> list[float] | None:
    if not isinstance(values, list | tuple) or len(values) != count:
        return None
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in values):
        return None
    try:
        found = [float(value) for value in values]
    except OverflowError:
        return None
    return found if all(map(math.isfinite, found)) else None


def _sides(values: list[Any]) -> tuple[float, float] | None:
    """(width, height), where both are those of an image."""
    size = _numbers(values, 2)
    return (size[0], size[1]) if size and min(size) >= 1 and max(size) < LARGEST_SIDE else None


def _name(value: object) -> str:
    """A category or file name: text that is not blank, else nothing."""
    return value.strip() if isinstance(value, str) else ""


# ---------------------------------------------------------------------- COCO


def coco(file: Path, images: Path | None, losses: Losses) -> tuple[list[Annotated], list[str]]:
    """Pictures and category names of a COCO instances file. Boxes are ``[x, y, width, height]`` from the top left."""
    with open_file(file) as source:
        try:
            content = json.load(source)
        except (ValueError, RecursionError) as error:
            raise FileError(reasons.FILE_UNREADABLE, f"{file}: not JSON ({error})") from None
    lists = [content.get(key) if isinstance(content, dict) else None for key in ("images", "annotations", "categories")]
    if not all(isinstance(found, list) for found in lists):
        raise FileError(
            reasons.FORMAT_UNKNOWN, f"{file}: a COCO instances file has lists 'images', 'annotations' and 'categories'"
        )
    pictures, annotations, categories = lists
    names: dict[Any, str] = {}
    for entry in categories or []:
        if isinstance(entry, dict) and isinstance(entry.get("id"), int | str) and _name(entry.get("name")):
            names[entry["id"]] = _name(entry["name"])
        else:
            losses.add(reasons.FIELD_MISSING, f"{file}: category {entry!r:.80} has no id or no name")
    found: dict[Any, Annotated] = {}
    for entry in pictures or []:
        known = isinstance(entry, dict) and isinstance(entry.get("id"), int | str) and _name(entry.get("file_name"))
        if not known or entry["id"] in found:
            losses.add(reasons.FIELD_MISSING, f"{file}: image {entry!r:.80} has no file_name or no id of its own")
            continue
        sized = _sides([entry.get("width"), entry.get("height")])
        where = f"{file}, image {entry['id']}"
        found[entry["id"]] = Annotated(
            _name(entry["file_name"]), [images or file.parent], sized, where, key=str(entry["id"])
        )
    if annotations and not any(isinstance(entry, dict) and "bbox" in entry for entry in annotations):
        raise FileError(reasons.FORMAT_UNKNOWN, f"{file}: no annotation has a 'bbox'; instances are expected")
    for number, entry in enumerate(annotations or [], start=1):
        _coco_box(entry, f"{file}, annotation {number}", found, names, losses)
    return list(found.values()), list(dict.fromkeys(names.values()))


def _coco_box(entry: Json, where: str, found: dict[Any, Annotated], names: dict[Any, str], losses: Losses) -> None:
    ids = (entry.get("image_id"), entry.get("category_id")) if isinstance(entry, dict) else (None, None)
    if not isinstance(ids[0], int | str) or ids[0] not in found:
        return losses.add(IMAGE_UNKNOWN, f"{where}: no image of id {ids[0]!r:.60}")
    picture = found[ids[0]]
    if not isinstance(ids[1], int | str) or ids[1] not in names:
        return losses.add(CATEGORY_UNKNOWN, f"{where}: no category of id {ids[1]!r:.60}")
    category = names[ids[1]]
    box = _numbers(entry.get("bbox"), 4)
    if box is None:
        picture.unsure.add(category)
        return losses.add(reasons.BOX_MALFORMED, f"{where}: bbox {entry.get('bbox')!r:.60}")
    if entry.get("iscrowd"):
        picture.unsure.add(category)
    x, y, width, height = box
    picture.boxes.setdefault(category, []).append((x, y, x + width, y + height))
    return None


# ---------------------------------------------------------------------- VOC


def voc(paths: Iterable[Path], images: Path | None, losses: Losses) -> tuple[list[Annotated], list[str]]:
    """Pictures and category names of Pascal VOC files, or of all ``.xml`` files in folders.

    VOC counts pixels from 1 and includes both ends: ``xmin = 1, xmax = width`` is the whole width.
    """
    pictures = [found for path in paths for file in _xml_files(path) if (found := _voc_file(file, images, losses))]
    names = sorted({category for picture in pictures for category in (*picture.boxes, *picture.unsure)})
    return pictures, names


def _xml_files(path: Path) -> list[Path]:
    if not path.exists():
        raise FileError(reasons.FILE_MISSING, f"{path}: no such file or folder")
    if not path.is_dir():
        return [path]
    found = sorted(path.rglob("*.xml"))
    if not found:
        raise FileError(reasons.NOT_A_FILE, f"{path}: is a folder without .xml files")
    return found


def _voc_file(file: Path, images: Path | None, losses: Losses) -> Annotated | None:
    try:
        text = file.read_bytes()
        if (
            b"<!DOCTYPE" in text or b"<!ENTITY" in text
        ):  # an annotation needs neither, and entities can grow without end
            raise ValueError("it declares entities")
        root = ElementTree.fromstring(text)
    except (OSError, ValueError, ElementTree.ParseError) as error:
        losses.add(reasons.FILE_UNREADABLE, f"{file}: not a VOC annotation ({error})")
        return None
    if root.tag != "annotation":
        losses.add(reasons.FORMAT_UNKNOWN, f"{file}: the root element is <{root.tag}>, <annotation> is expected")
        return None
    sized = _sides([_number(root.findtext(f"size/{key}")) for key in ("width", "height")])
    folders = [images] if images else [file.parent / other for other in _VOC_IMAGE_FOLDERS]
    name = _name(root.findtext("filename")) or f"{file.stem}.jpg"
    picture = Annotated(name.replace("\\", "/").rsplit("/", 1)[-1], folders, sized, str(file))
    for number, entry in enumerate(root.findall("object"), start=1):
        category = _name(entry.findtext("name"))
        corners = [_number(entry.findtext(f"bndbox/{key}")) for key in ("xmin", "ymin", "xmax", "ymax")]
        if not category:
            losses.add(CATEGORY_UNKNOWN, f"{file}, object {number}: no name")
        elif (box := _numbers(corners, 4)) is None:
            picture.unsure.add(category)
            losses.add(reasons.BOX_MALFORMED, f"{file}, object {number}: bndbox {corners!r:.60}")
        else:
            picture.boxes.setdefault(category, []).append((box[0] - 1, box[1] - 1, box[2], box[3]))
    return picture


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text is not None else None
    except ValueError:
        return None


# ---------------------------------------------------------------------- pictures


def opened(
    annotated: Iterable[Annotated], losses: Losses, on_progress: Callable[[], None] | None = None
) -> Iterator[Picture]:
    """The pictures whose image file is there, is whole, and has the shape that the boxes were drawn on."""
    for found in annotated:
        if on_progress is not None:
            on_progress()
        try:
            image = _find(found)
            actual = image.verify()
        except ImageError as error:
            losses.add(error.reason, f"{found.where}: {error}")
            continue
        except BadRow as error:
            losses.add(error.reason, f"{found.where}: {error.detail}")
            continue
        size = found.size or actual
        if abs(math.log(size[0] / size[1] * actual[1] / actual[0])) > _SHAPE_TOLERANCE:
            losses.add(
                SIZE_MISMATCH,
                f"{found.where}: drawn on {size[0]:.0f} x {size[1]:.0f}, the upright image {found.name} is "
                f"{actual[0]} x {actual[1]}",
            )
            continue
        yield _picture(found, image, size, losses)


def _find(found: Annotated) -> ImageRef:
    """The image file, inside one of the folders; several spellings of its suffix are tried."""
    stem, suffix = os.path.splitext(found.name)
    names = [found.name, *(stem + other for other in _SUFFIXES if other != suffix)]
    for folder in found.folders:
        root = os.path.abspath(folder)
        for name in names:
            wanted = os.path.normpath(os.path.join(root, name))
            if "\0" in name or not wanted.startswith(root.rstrip(os.sep) + os.sep):
                detail = f"{found.name!r:.80} is not inside {folder}; --images / allows absolute paths"
                raise BadRow(reasons.IMAGE_PATH_ESCAPES, detail)
            if os.path.isfile(wanted):
                return ImageRef(name, path=Path(wanted))
    raise BadRow(
        reasons.IMAGE_MISSING, f"no image file {found.name} in {found.folders[0]}; name the folder with --images"
    )


def _picture(found: Annotated, image: ImageRef, size: tuple[float, float], losses: Losses) -> Picture:
    """Boxes in fractions, clipped; a box without area makes the number of its category unsure."""
    unsure = set(found.unsure)
    boxes: dict[str, list[Box]] = {}
    for category, pixels in found.boxes.items():
        for x0, y0, x1, y1 in pixels:
            scaled = (x0 / size[0], y0 / size[1], x1 / size[0], y1 / size[1])
            left, top, right, bottom = (min(1.0, max(0.0, value)) for value in scaled)
            if left < right and top < bottom:
                boxes.setdefault(category, []).append(Box(0, (left, top, right, bottom)))
            else:
                unsure.add(category)
                losses.add(reasons.BOX_DEGENERATE, f"{found.where}: box {(x0, y0, x1, y1)} of {category!r}")
    return Picture(found.name, frozenset(found.aliases), image, boxes, frozenset(unsure))


def read_annotations(
    layout: str, files: list[Path], images: Path | None, losses: Losses
) -> tuple[list[Annotated], list[str]]:
    """Pictures and categories of all files; names of pictures are made unique by their order."""
    if layout == "voc":
        return voc(files, images, losses)
    pictures: list[Annotated] = []
    categories: dict[str, None] = {}
    for file in files:
        found, names = coco(file, images, losses)
        pictures += found
        categories |= dict.fromkeys(names)
    if not pictures:
        raise UserError(f"{', '.join(map(str, files))}: no image is described")
    return pictures, list(categories)
