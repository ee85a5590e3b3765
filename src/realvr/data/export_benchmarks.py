"""Writers of the benchmark layouts, so that any samples can be scored by tools that read the real files."""

from __future__ import annotations

import base64
import csv
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from realvr.data.export_common import (
    CannotHold,
    ImageStore,
    Written,
    count_lost,
    each,
    json_array,
    single_question,
    suffix_of,
)
from realvr.data.parquet import ParquetSink
from realvr.data.readers import blink, hr_bench, mme_realworld, mmvp, vstar
from realvr.data.readers.base import join_options
from realvr.data.reasons import BadRow
from realvr.data.sample import LETTERS, ImageRef, Sample

_LOST = ("boxes", "response", "meta")


def _multiple_choice(sample: Sample, layout: str, options: int | None, images: int | None) -> None:
    """Refuse what a multiple-choice layout has no place for."""
    single_question(sample, layout)
    if not sample.choices or (options is not None and len(sample.choices) != options):
        raise CannotHold(f"{layout} needs {options or 'at least two'} options")
    if sample.answer not in LETTERS[: len(sample.choices)]:
        raise CannotHold(f"{layout} needs the letter of an option as the answer")
    if images is not None and len(sample.images) != images:
        raise CannotHold(f"{layout} holds {images} image per question")


class _Base64:
    """Images as base64, the last one remembered: the four cycles of a question come in a row and share theirs."""

    def __init__(self) -> None:
        self.image: ImageRef | None = None
        self.text = ""

    def __call__(self, image: ImageRef) -> str:
        if image != self.image:
            self.image, self.text = image, base64.b64encode(image.read()).decode("ascii")
        return self.text


@contextmanager
def _table(out: Path, columns: list[str], types: dict[str, str]) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A function that adds a row to a TSV or parquet file, whichever the extension says."""
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.suffix == ".parquet":
        with ParquetSink(out, {name: types.get(name, "string") for name in columns}) as sink:
            yield sink.add
        return
    with out.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter="\t", lineterminator="\n")
        writer.writerow(columns)
        yield lambda row: writer.writerow([row[name] for name in columns])


def _reads_back(options: str, choices: list[str]) -> bool:
    """Whether MMVP's one-line options give the same options back: an option may itself hold a "(b)"."""
    try:
        return mmvp.parse_options(options) == choices
    except BadRow:
        return False


def write_mmvp(samples: Iterable[Sample], out: Path, strict: bool) -> Written:
    """``Questions.csv`` and ``MMVP Images/<Index>.jpg``, numbered in order; two samples in a row are a pair.

    Encoded images are kept as they are: JPEG as ``.jpg``, anything else as ``.png`` (converted if it is not PNG).
    """
    folder = out / mmvp.FOLDERS[0]
    folder.mkdir(parents=True, exist_ok=True)
    written = Written([out / mmvp.QUESTIONS])
    pairs: list[str | None] = []
    with (out / mmvp.QUESTIONS).open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(mmvp.REQUIRED)

        def row(sample: Sample) -> None:
            _multiple_choice(sample, "MMVP", None, 1)
            options = " ".join(f"({LETTERS[i].lower()}) {choice}" for i, choice in enumerate(sample.choices))
            if not _reads_back(options, sample.choices):
                raise CannotHold("MMVP holds options as '(a) … (b) …', and these would not be read back")
            if len(pairs) % 2 and pairs[-1] != sample.pair:
                raise CannotHold("MMVP rows 2i-1 and 2i are a pair, and this sample is not its predecessor's partner")
            pairs.append(sample.pair)
            data = sample.images[0].read()
            target = folder / f"{len(pairs)}{'.jpg' if suffix_of(data) == '.jpg' else '.png'}"
            # The reader takes the first spelling it finds: one left by an earlier export would be the wrong picture.
            for other in mmvp.SUFFIXES:
                (folder / f"{len(pairs)}{other}").unlink(missing_ok=True)
            if suffix_of(data) in (".jpg", ".png"):
                target.write_bytes(data)
            else:
                sample.images[0].open().save(target)
            writer.writerow([len(pairs), sample.question, options, f"({sample.answer.lower()})"])
            count_lost(sample, written, *_LOST, "category", "tags")

        each(samples, written, strict, row)
    return written


def _blink_row(sample: Sample) -> dict[str, Any]:
    _multiple_choice(sample, "BLINK", None, None)
    if len(sample.images) > len(blink.IMAGES):
        raise CannotHold(f"BLINK holds {len(blink.IMAGES)} images per question")
    prompt = join_options(f"{sample.question}\nSelect from the following choices.", sample.choices)
    images = dict.fromkeys(blink.IMAGES) | {
        name: _image_cell(image) for name, image in zip(blink.IMAGES, sample.images, strict=False)
    }
    return {
        "idx": sample.id,
        "question": sample.question,
        "prompt": sample.meta.get("prompt", prompt),
        "choices": sample.choices,
        "answer": f"({sample.answer})",
        "sub_task": sample.task,
        **images,
    }


def write_blink(samples: Iterable[Sample], out: Path, strict: bool) -> Written:
    """A tree ``<task>/val-00000-of-00001.parquet``; the sub-task is the sample's ``task``."""
    written = Written()
    types = dict.fromkeys(("idx", "question", "prompt", "answer", "sub_task"), "string") | {"choices": "list<string>"}
    types |= dict.fromkeys(blink.IMAGES, "image")
    with ExitStack() as stack:
        sinks: dict[str, ParquetSink] = {}

        def row(sample: Sample) -> None:
            if not sample.task or "/" in sample.task or sample.task.startswith("."):
                raise CannotHold("BLINK needs a sub-task, which becomes a folder name, in 'task'")
            cells = _blink_row(sample)
            if sample.task not in sinks:
                path = out / sample.task / "val-00000-of-00001.parquet"
                sinks[sample.task] = stack.enter_context(ParquetSink(path, types))
                written.files.append(path)
            sinks[sample.task].add(cells)
            count_lost(sample, written, "boxes", "response", "category", "tags", "pair", "cycle")

        each(samples, written, strict, row)
    return written


def _indexed(sample: Sample, out: Path) -> str | int:
    """The id as the real files have it: a number where it is one. Parquet columns hold one type, TSV holds text."""
    if out.suffix != ".parquet":
        return sample.id
    if not sample.id.isdecimal():
        raise CannotHold("this parquet layout needs numbers as ids")
    return int(sample.id)


def write_hr_bench(samples: Iterable[Sample], out: Path, strict: bool) -> Written:
    """HR-Bench TSV or parquet: four options, one base64 image, category and cycle."""
    written, encoded = Written([out]), _Base64()
    with _table(out, list(hr_bench.REQUIRED), {"index": "int64"}) as add:

        def row(sample: Sample) -> None:
            _multiple_choice(sample, "HR-Bench", len(hr_bench.OPTIONS), 1)
            if sample.cycle is None or not sample.category:
                raise CannotHold("HR-Bench needs a category and a cycle")
            cells = {"index": _indexed(sample, out), "question": sample.question, "answer": sample.answer}
            cells |= {"category": sample.category, "cycle_category": sample.cycle, "image": encoded(sample.images[0])}
            add(cells | dict(zip(hr_bench.OPTIONS, sample.choices, strict=True)))
            count_lost(sample, written, *_LOST, "tags", "pair")

        each(samples, written, strict, row)
    return written


def _mme_json_row(sample: Sample, image: str) -> dict[str, Any]:
    return {
        "Question_id": sample.id,
        "Image": image,
        "Text": sample.question,
        "Question Type": sample.meta.get("question_type", "Multiple Choice"),
        "Answer choices": [f"({LETTERS[index]}) {choice}" for index, choice in enumerate(sample.choices)],
        "Ground truth": sample.answer,
        "Category": sample.category,
        "Subtask": sample.tags.get("subtask", ""),
        "Task": sample.task,
    }


def _mme_table_row(sample: Sample, out: Path, image: str) -> dict[str, Any]:
    options = "\n".join(f"({LETTERS[index]}) {choice}" for index, choice in enumerate(sample.choices))
    return {
        "index": _indexed(sample, out),
        "image": image,
        "question": sample.question,
        "multi-choice options": options,
        **dict(zip(mme_realworld.OPTIONS, sample.choices, strict=True)),
        "answer": sample.answer,
        "category": f"{sample.task}/{sample.tags.get('subtask', '')}".rstrip("/"),
        "l2-category": sample.category,
    }


def write_mme(samples: Iterable[Sample], out: Path, strict: bool, link: bool = False) -> Written:
    """MME-RealWorld JSON (images beside it), or TSV or parquet (images inside). Five options, one image."""
    written = Written([out])
    with ExitStack() as stack:
        if out.suffix == ".json":
            store, array = ImageStore(written, link), stack.enter_context(json_array(out))

            def add(sample: Sample) -> None:
                array.add(_mme_json_row(sample, store.save(sample.images[0])))

        else:
            columns = ["index", "image", "question", "multi-choice options", *mme_realworld.OPTIONS]
            columns += ["answer", "category", "l2-category"]
            table, encoded = stack.enter_context(_table(out, columns, {"index": "int64"})), _Base64()

            def add(sample: Sample) -> None:
                table(_mme_table_row(sample, out, encoded(sample.images[0])))

        def row(sample: Sample) -> None:
            _multiple_choice(sample, "MME-RealWorld", len(mme_realworld.OPTIONS), 1)
            add(sample)
            count_lost(sample, written, "boxes", "response", "pair", "cycle")

        each(samples, written, strict, row)
    return written


def _vstar_text(sample: Sample) -> str:
    """Question, options and instruction, if reading it gives question and options back."""
    _multiple_choice(sample, "V*", None, 1)
    if not sample.category:
        raise CannotHold("V* needs a category")
    text = f"{join_options(sample.question, sample.choices)}\n{vstar.INSTRUCTION}"
    try:
        same = vstar.split_text(text) == (sample.question, sample.choices)
    except BadRow:
        same = False
    if not same:
        raise CannotHold("V* holds options as lines of the question, and these would not be read back")
    return text


def _add_line(file: TextIO, cells: dict[str, Any]) -> None:
    file.write(json.dumps(cells, ensure_ascii=False) + "\n")


def _image_cell(image: ImageRef) -> dict[str, Any]:
    return {"bytes": image.read(), "path": None}


def write_vstar(samples: Iterable[Sample], out: Path, strict: bool, link: bool = False) -> Written:
    """V* JSON lines (images beside it) or parquet (images inside)."""
    written = Written([out])
    out.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        add: Callable[[dict[str, Any]], object]
        image: Callable[[ImageRef], object]
        if out.suffix == ".parquet":
            types = {"image": "image", **dict.fromkeys(("text", "category", "label", "question_id"), "string")}
            add, image = stack.enter_context(ParquetSink(out, types)).add, _image_cell
        else:
            file = stack.enter_context(out.open("w", encoding="utf-8"))
            image = ImageStore(written, link).save

            add = partial(_add_line, file)

        def row(sample: Sample) -> None:
            text = _vstar_text(sample)  # refuses before an image is saved
            cells = {"image": image(sample.images[0]), "text": text, "category": sample.category}
            add(cells | {"label": sample.answer, "question_id": sample.id})
            count_lost(sample, written, "boxes", "response", "tags", "pair", "cycle")

        each(samples, written, strict, row)
    return written
