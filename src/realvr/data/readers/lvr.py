"""LVR / LLaVA-style JSON, and the meta file that lists several of them with their image folders."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from realvr.data import reasons
from realvr.data.readers import visual_cot
from realvr.data.readers.base import Context, Format, ReadOptions, Row, id_text, label_of, split_options
from realvr.data.readers.conversation import answer_of, messages_of, turns_of
from realvr.data.reasons import BadRow, FileError
from realvr.data.sample import Box, ImageRef, Message, Sample
from realvr.data.streams import json_rows


def _images(row: dict[str, Any], ctx: Context) -> list[ImageRef]:
    names = row.get("image", row.get("images"))
    if names is None or names == []:
        raise BadRow(reasons.IMAGE_LIST_EMPTY, "the row names no image")
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list):
        raise BadRow(reasons.FIELD_TYPE, f"'image' is {type(names).__name__}")
    return [ctx.image(name) for name in names]


def _boxes(row: dict[str, Any], images: list[ImageRef], ctx: Context) -> list[Box]:
    """``bboxes`` are fractions, or pixels where any value exceeds 1. They lie in the first image unless
    ``bbox_images``, our own addition for several images, says otherwise."""
    raw = row.get("bboxes") or []
    if not isinstance(raw, list):
        raise BadRow(reasons.BOX_MALFORMED, f"'bboxes' is {type(raw).__name__}")
    if raw and not isinstance(raw[0], list):
        raw = [raw]
    owners = row.get("bbox_images") or [0] * len(raw)
    if not isinstance(owners, list) or len(owners) != len(raw):
        raise BadRow(reasons.BOX_MALFORMED, "'bbox_images' must name one image per box")
    found: list[tuple[object, int]] = []
    for values, owner in zip(raw, owners, strict=True):
        if isinstance(owner, bool) or not isinstance(owner, int) or not 0 <= owner < len(images):
            raise BadRow(reasons.BOX_MALFORMED, f"a box is in image {owner!r} of {len(images)}")
        found.append((values, owner))
    return list(dict.fromkeys(ctx.read_boxes(found, images, own="auto", above=1.0)))


def parse(row: dict[str, Any], ctx: Context) -> Sample:
    """One row -> sample. A row listed by a meta file may also be a Visual-CoT row."""
    if isinstance(row.get("image"), list) and any("###" in str(entry) for entry in row["image"]):
        return visual_cot.parse(row, ctx)
    images = _images(row, ctx)
    turns = turns_of(row)
    if turns[-1][0] != "assistant":
        raise BadRow(reasons.ANSWER_EMPTY, "the last turn is not a reply")
    answer, response = answer_of(turns[-1][1])
    messages = messages_of(turns[:-1], len(images), ctx)
    choices: list[str] = []
    if messages[-1].role == "user":
        question, choices = split_options(messages[-1].text, answer)
        messages[-1] = Message("user", question, messages[-1].images)
    name = row.get("id", row.get("question_id"))
    return Sample(
        id=f"{ctx.file.stem}/{ctx.row}" if name is None else id_text(name, "id"),
        images=images,
        turns=messages,
        answer=answer,
        choices=choices,
        boxes=_boxes(row, images, ctx),
        response=response,
        task=label_of(row, "task") or label_of(row, "dataset"),
        source=ctx.source,
    )


def _listed(meta: Path, entry: dict[str, Any], options: ReadOptions) -> tuple[Path, Path]:
    """Data file and image folder of an entry. Both stay inside the folder of the meta file, or inside ``--images``.

    A meta file comes with the data of others: without a bound it could have any file of this machine read. Names are
    compared as written, like those of images: links inside the folder are followed. With ``--images`` an image folder
    that lies elsewhere is replaced by it.
    """
    own, wider = os.path.abspath(meta.parent), options.images and os.path.abspath(options.images)
    data = os.path.normpath(os.path.join(own, entry["data_path"]))
    folder = os.path.normpath(os.path.join(own, entry["image_folder"]))
    if wider and not _inside(folder, wider):
        folder = str(wider)
    for name, wanted in (("data_path", data), ("image_folder", folder)):
        if not (_inside(wanted, own) or (wider and _inside(wanted, wider))):
            detail = f"{name} {entry[name]!r:.100} is outside {own}; --images / allows any place, --images DIR that one"
            raise BadRow(reasons.LISTED_PATH_ESCAPES, detail)
    return Path(data), Path(folder)


def _inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)


def meta_rows(path: Path, options: ReadOptions) -> Iterator[Row]:
    """Rows of every file that a meta file lists. A listed file that cannot be read, or may not be, costs one row."""
    entries = list(json_rows(path))
    for position, entry in enumerate(entries):
        if entry.error is not None:
            yield entry
            continue
        missing = [key for key in ("ds_name", "data_path", "image_folder") if not isinstance(entry.data.get(key), str)]
        if missing:
            error = BadRow(reasons.FIELD_MISSING, f"no {', '.join(missing)}")
            yield replace(entry, data=None, error=error)
            continue
        try:
            data, folder = _listed(path, entry.data, options)
        except BadRow as error:
            yield replace(entry, data=None, error=error)
            continue
        try:
            for row in json_rows(data):
                share = (position + row.progress) / len(entries)
                yield replace(row, file=data, images=folder, prefix=f"{entry.data['ds_name']}/", progress=share)
        except FileError as error:
            reason = error.reason if error.reason in reasons.DROP_REASONS else reasons.FILE_UNREADABLE
            yield replace(entry, data=None, error=BadRow(reason, str(error)))


FORMAT = Format("lvr", "LVR / LLaVA-style JSON", lambda path, options: json_rows(path), parse)
META_FORMAT = Format("lvr-meta", "meta file listing LVR / LLaVA-style JSON files", meta_rows, parse)
