"""Writing samples in any supported layout: our JSON lines, the training formats, and the benchmarks.

Every layout written here is read back by the reader of the same name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from realvr.data import export_benchmarks as benchmarks
from realvr.data import reasons
from realvr.data.export_common import (
    CannotHold,
    ImageStore,
    Written,
    count_lost,
    each,
    json_array,
    single_question,
)
from realvr.data.parquet import ParquetSink
from realvr.data.readers.base import join_options, split_options
from realvr.data.readers.jsonl import to_json
from realvr.data.readers.virl39k import unbox
from realvr.data.readers.visual_cot import BOX_REQUEST
from realvr.data.reasons import BadRow, FileError
from realvr.data.sample import Box, Sample
from realvr.errors import UserError
from realvr.runs.files import publish


def write(samples: Iterable[Sample], to: str, out: str | Path, strict: bool = True, link: bool = False) -> Written:
    """Write ``samples`` in layout ``to`` at ``out``: a file, or a folder for MMVP and BLINK.

    Images go into ``images/`` beside the file, unchanged, unless the layout holds them itself; with ``link`` image
    files are linked there, not copied. A sample that the layout cannot hold stops the export, or is counted and left
    out with ``strict=False``. HR-Bench, MME-RealWorld and V* follow the extension of ``out`` (.tsv, .parquet; .json,
    .tsv, .parquet; .jsonl, .parquet).
    """
    key = to.lower().replace("_", "-")
    if key not in WRITERS:
        raise FileError(reasons.FORMAT_UNKNOWN, f"no layout {to!r} to export to; choose one of {', '.join(WRITERS)}")
    path = Path(out)
    if link and (key not in LINKING or (key in ("mme-realworld", "vstar") and path.suffix in (".tsv", ".parquet"))):
        raise UserError(f"{to} holds its images itself: nothing can be linked; leave out --link")
    if path.is_dir() and key not in ("mmvp", "blink"):
        raise FileError(reasons.NOT_A_FILE, f"{path}: is a folder; name the file to write")
    if key in ("mmvp", "blink"):
        return WRITERS[key](samples, path, strict)
    # Under another name until it is whole: a damaged input or a full disk must not cost a file that was there.
    part = path.with_name(f".{path.stem}.part{path.suffix}")
    try:
        write_all = partial(WRITERS[key], link=True) if link else WRITERS[key]
        written = write_all(samples, part, strict)
        publish(part, path)
    finally:
        with suppress(OSError):  # where even the folder could not be made
            part.unlink(missing_ok=True)
    return replace(written, files=[path])


def write_jsonl(samples: Iterable[Sample], out: Path, strict: bool, link: bool = False) -> Written:
    """Our own JSON lines: everything a sample says."""
    written = Written([out])
    store = ImageStore(written, link)
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w", encoding="utf-8") as file:

        def row(sample: Sample) -> None:
            names = [store.save(image) for image in sample.images]
            file.write(json.dumps(to_json(sample, names), ensure_ascii=False) + "\n")

        each(samples, written, strict, row)
    return written


def _question_text(sample: Sample, layout: str) -> str:
    """Question with its options as closing lines, if reading it gives the same options back."""
    if not sample.choices:
        return sample.question
    text = join_options(sample.question, sample.choices)
    try:
        same = split_options(text, sample.answer) == (sample.question, sample.choices)
    except BadRow:
        same = False
    if not same:
        raise CannotHold(f"{layout} holds options as lines of the question, and these would not be read back")
    return text


def _pixels(box: Box, size: tuple[int, int]) -> tuple[int, int, int, int]:
    """Box in whole pixels, at least one pixel wide and high."""
    x0, y0, x1, y1 = (round(value * side) for value, side in zip(box.xyxy, size * 2, strict=True))
    x0, y0 = min(x0, size[0] - 1), min(y0, size[1] - 1)
    return x0, y0, max(x1, x0 + 1), max(y1, y0 + 1)


def square_frame(box: tuple[int, int, int, int], size: tuple[int, int]) -> list[float]:
    """A pixel box in fractions of the image padded to a square, as Visual-CoT writes it in turn 1."""
    longest = max(size)
    pad_x, pad_y = (longest - size[0]) // 2, (longest - size[1]) // 2
    x0, y0, x1, y1 = box
    return [(x0 + pad_x) / longest, (y0 + pad_y) / longest, (x1 + pad_x) / longest, (y1 + pad_y) / longest]


def _viscot_row(sample: Sample, names: list[str]) -> dict[str, Any]:
    question = "<image>\n" + _question_text(sample, "Visual-CoT")
    entries, boxes = list(names), []
    for box in sample.boxes:
        pixels = _pixels(box, sample.images[box.image].size)
        entries.append(f"{names[box.image]}###[{', '.join(map(str, pixels))}]")
        boxes.append((box.image, pixels))
    turns = [("human", question), ("gpt", sample.answer)]
    if boxes:
        owner = boxes[0][0]
        same = [pixels for image, pixels in boxes if image == owner]
        union = (min(b[0] for b in same), min(b[1] for b in same), max(b[2] for b in same), max(b[3] for b in same))
        shown = ", ".join(f"{value:.3f}" for value in square_frame(union, sample.images[owner].size))
        turns = [("human", f"{question} {BOX_REQUEST}"), ("gpt", f"[{shown}]"), ("human", "<image>"), turns[1]]
    dataset, split = sample.task or "realvr", sample.tags.get("split", "train")
    return {
        "dataset": dataset,
        "split": split,
        "question_id": sample.id.removeprefix(f"{dataset}/{split}/"),
        "image": entries,
        "conversations": [{"from": who, "value": text} for who, text in turns],
    }


def write_visual_cot(samples: Iterable[Sample], out: Path, strict: bool, link: bool = False) -> Written:
    """Visual-CoT rows: pixel boxes behind the image path, and the padded-square box in turn 1."""
    written = Written([out])
    store = ImageStore(written, link)
    with json_array(out) as array:

        def row(sample: Sample) -> None:
            single_question(sample, "Visual-CoT")
            count_lost(sample, written, "response", "pair", "cycle", "meta")
            _question_text(sample, "Visual-CoT")  # refuses before an image is saved
            array.add(_viscot_row(sample, [store.save(image) for image in sample.images]))

        each(samples, written, strict, row)
    return written


def _lvr_reply(sample: Sample) -> str:
    block = f"<answer> {sample.answer} </answer>"
    text = sample.response or block
    text = text if "<answer>" in text else f"{text}\n{block}"
    return f"<lvr>\n{text}" if sample.boxes else text


def _lvr_row(sample: Sample, names: list[str]) -> dict[str, Any]:
    conversation = []
    for position, turn in enumerate(sample.turns):
        last = position == len(sample.turns) - 1
        text = _question_text(sample, "LVR JSON") if last and turn.role == "user" else turn.text
        who = {"user": "human", "assistant": "gpt", "system": "system"}[turn.role]
        conversation.append({"from": who, "value": "<image>\n" * len(turn.images) + text})
    conversation.append({"from": "gpt", "value": _lvr_reply(sample)})
    row: dict[str, Any] = {
        "id": sample.id,
        "image": names[0] if len(names) == 1 else names,
        "conversations": conversation,
        "bboxes": [list(box.xyxy) for box in sample.boxes],
    }
    if any(box.image for box in sample.boxes):
        row["bbox_images"] = [box.image for box in sample.boxes]
    return row | ({"task": sample.task} if sample.task else {})


def write_lvr(samples: Iterable[Sample], out: Path, strict: bool, link: bool = False) -> Written:
    """LVR / LLaVA-style JSON: boxes in fractions, the answer in ``<answer>`` tags."""
    written = Written([out])
    store = ImageStore(written, link)
    with json_array(out) as array:

        def row(sample: Sample) -> None:
            shown = [index for turn in sample.turns for index in turn.images]
            if shown != list(range(len(sample.images))):
                raise CannotHold("LVR JSON shows every image once, in order")
            if sample.turns[-1].role != "user":
                raise CannotHold("LVR JSON needs the question as the last turn")
            _question_text(sample, "LVR JSON")
            count_lost(sample, written, "category", "tags", "pair", "cycle", "meta")
            array.add(_lvr_row(sample, [store.save(image) for image in sample.images]))

        each(samples, written, strict, row)
    return written


def _virl_row(sample: Sample, store: ImageStore) -> dict[str, Any]:
    single_question(sample, "ViRL39K")
    text = _question_text(sample, "ViRL39K")
    answer = f"\\boxed{{{sample.answer}}}"
    try:
        balanced = unbox(answer) == sample.answer
    except BadRow:
        balanced = False
    if not balanced:
        raise CannotHold("ViRL39K holds answers in \\boxed{}, and this one has unbalanced braces")
    return {
        "question": "<image>" * len(sample.images) + "\n" + text,
        "answer": answer,
        "PassRate_32BTrained": sample.meta.get("PassRate_32BTrained"),
        "PassRate_7BBase": sample.meta.get("PassRate_7BBase"),
        "category": sample.category,
        "source": sample.tags.get("source", ""),
        "qid": sample.id,
        "image": [store.save(image) for image in sample.images],
    }


def write_virl39k(samples: Iterable[Sample], out: Path, strict: bool, link: bool = False) -> Written:
    """ViRL39K parquet. The layout has no boxes: they are lost, and counted."""
    written = Written([out])
    store = ImageStore(written, link)
    text = ("question", "answer", "category", "source", "qid")
    types = dict.fromkeys(text, "string") | dict.fromkeys(("PassRate_32BTrained", "PassRate_7BBase"), "float64")
    with ParquetSink(out, types | {"image": "list<string>"}) as sink:

        def row(sample: Sample) -> None:
            sink.add(_virl_row(sample, store))
            count_lost(sample, written, "boxes", "response", "task", "pair", "cycle")

        each(samples, written, strict, row)
    return written


LINKING = ("jsonl", "visual-cot", "lvr", "virl39k", "mme-realworld", "vstar")
"""Layouts that name image files."""

WRITERS: dict[str, Callable[..., Written]] = {
    "jsonl": write_jsonl,
    "visual-cot": write_visual_cot,
    "lvr": write_lvr,
    "virl39k": write_virl39k,
    "mmvp": benchmarks.write_mmvp,
    "blink": benchmarks.write_blink,
    "hr-bench": benchmarks.write_hr_bench,
    "mme-realworld": benchmarks.write_mme,
    "vstar": benchmarks.write_vstar,
}
