"""Visual-CoT: four-turn rows whose evidence box is written behind the image path, ``path###[x0, y0, x1, y1]``.

The box after ``###`` is in pixels of the original image. The box in turn 1 is normalised in the frame padded to a
square, so reading it as a fraction of the image is wrong on every image that is not square: it is never used here.

The files of ``metadata/`` hold the same questions without a conversation: ``question``, ``answer``, ``image`` (a name
inside the folder of its ``dataset``) and ``bboxs``, in pixels too.
"""

from __future__ import annotations

import os
import re
from typing import Any, TypeGuard

from realvr.data import reasons
from realvr.data.readers.base import (
    Context,
    Format,
    asked_text,
    id_text,
    is_blank,
    label_of,
    normal_box,
    parse_boxes,
    question_of,
    require,
    split_options,
    text_of,
)
from realvr.data.readers.conversation import turns_of
from realvr.data.reasons import BadRow
from realvr.data.sample import Box, ImageRef, Message, Sample, strip_image_tags
from realvr.data.streams import json_rows
from realvr.imaging.files import LARGEST_SIDE

BOX_REQUEST = "Please provide the bounding box coordinate of the region that can help you answer the question better."
_REQUEST = re.compile(re.escape(BOX_REQUEST) + r"\s*")


def _images(row: dict[str, Any], ctx: Context) -> tuple[list[ImageRef], list[tuple[int, list[float]]]]:
    """Distinct images in order, and (image index, pixel box) for every ``###`` entry."""
    entries = require(row, "image")
    entries = [entries] if isinstance(entries, str) else entries
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise BadRow(reasons.FIELD_TYPE, "'image' is not a list of paths")
    if not entries:
        raise BadRow(reasons.IMAGE_LIST_EMPTY, "'image' is empty")
    names: list[str] = []
    boxes: list[tuple[int, list[float]]] = []
    for entry in entries:
        name, mark, tail = entry.partition("###")
        if name not in names:
            names.append(name)
        if mark:
            found = parse_boxes(tail)
            if not found:
                raise BadRow(reasons.BOX_MALFORMED, f"no box in {entry[-60:]!r}")
            boxes.extend((names.index(name), values) for values in found)
    return [ctx.image(name) for name in names], boxes


def _is_side(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 < value < LARGEST_SIDE


def _size(row: dict[str, Any], images: list[ImageRef], index: int) -> tuple[int, int]:
    """Size that a pixel box refers to: the row's own, where it is given for a single image, else the image's header."""
    width, height = row.get("width"), row.get("height")
    if len(images) == 1 and _is_side(width) and _is_side(height):
        return width, height
    return images[index].size


def _conversation(row: dict[str, Any], boxed: bool) -> tuple[str, str]:
    """Question and answer of the four turns."""
    turns = turns_of(row)
    question = next((text for role, text in turns if role == "user"), "")
    reply = next((text for role, text in reversed(turns) if role == "assistant"), "").strip()
    question, _ = strip_image_tags(_REQUEST.sub("", question))
    if is_blank(reply) or turns[-1][0] != "assistant" or (boxed and len(turns) < 4):
        raise BadRow(reasons.ANSWER_EMPTY, "the last turn gives no answer")
    return asked_text(question, "turn 0"), reply


def _metadata(row: dict[str, Any], ctx: Context) -> tuple[ImageRef, list[tuple[int, list[float]]]]:
    """Image and pixel boxes of a row of ``metadata/``. The image may lie in the folder that the ``cot/`` tree has."""
    name, dataset = require(row, "image"), label_of(row, "dataset")
    if isinstance(name, str) and dataset:
        places = (name, f"cot/{dataset}/{name}", f"{dataset}/{name}")
        name = next((place for place in places if os.path.isfile(os.path.join(ctx.images, place))), name)
    boxes = row.get("bboxs") or []
    if not isinstance(boxes, list):
        raise BadRow(reasons.BOX_MALFORMED, f"'bboxs' is {type(boxes).__name__}, a list is expected")
    if boxes and not isinstance(boxes[0], list):
        boxes = [boxes]
    return ctx.image(name), [(0, values) for values in boxes]


def parse(row: dict[str, Any], ctx: Context) -> Sample:
    """One row of either layout -> sample."""
    if row.get("conversations") is None and "bboxs" in row:
        image, pixel_boxes = _metadata(row, ctx)
        images = [image]
        question, reply = question_of(row, "question"), text_of(row, "answer")
        if is_blank(reply):
            raise BadRow(reasons.ANSWER_EMPTY, "'answer' is empty")
    else:
        images, pixel_boxes = _images(row, ctx)
        question, reply = _conversation(row, bool(pixel_boxes))
    question, choices = split_options(question, reply)
    boxes: list[Box] = []
    ctx.boxes = "pixels" if pixel_boxes else None
    for index, values in pixel_boxes:
        box = normal_box(values, index, ctx, _size(row, images, index))
        if box is not None and box not in boxes:
            boxes.append(box)
    dataset, split = label_of(row, "dataset"), label_of(row, "split")
    number = row.get("question_id")
    name = str(ctx.row) if number is None else id_text(number, "question_id")
    return Sample(
        id=f"{dataset or ctx.file.stem}/{split or 'train'}/{name}",
        images=images,
        turns=[Message("user", question, tuple(range(len(images))))],
        answer=reply,
        choices=choices,
        boxes=boxes,
        task=dataset or ctx.file.stem,
        tags={"split": split} if split else {},
        source=ctx.source,
    )


FORMAT = Format("visual-cot", "Visual-CoT rows", lambda path, options: json_rows(path), parse, pixels_only=True)
