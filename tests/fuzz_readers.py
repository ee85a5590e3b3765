"""A seeded fuzzer over all readers: valid files in the real layouts, changed in cells, structure and bytes.

``fuzz(folder, seed, rows)`` reads such files until ``rows`` rows were met, and returns what became of them. As a
program: ``python tests/fuzz_readers.py [ROWS] [SEED]`` prints the same.
"""

from __future__ import annotations

import base64
import csv
import io
import json
import math
import random
import re
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from realvr.data import reasons
from realvr.data.detect import FORMATS
from realvr.data.readers.base import ReadOptions
from realvr.data.readers.jsonl import to_json
from realvr.data.reading import Report, read
from realvr.data.sample import LETTERS, Sample
from realvr.errors import UserError

LIMIT_S = 20
"""Seconds after which reading a file of a dozen rows counts as a hang."""
TABS = {"delimiter": "\t", "lineterminator": "\n"}


class Hang(BaseException):
    """Not an `Exception`: nothing between the alarm and the fuzzer may catch it."""


@dataclass
class Outcome:
    """What became of all files and rows."""

    files: int = 0
    refused: int = 0
    rows: int = 0
    accepted: int = 0
    rejected: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    layouts: Counter[str] = field(default_factory=Counter)
    crashes: list[str] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    """Rows that do not add up, unknown reasons, and accepted samples that are none."""


def picture() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (40, 30), (10, 90, 200)).save(buffer, "PNG")
    return buffer.getvalue()


PICTURE = picture()
BASE64 = base64.b64encode(PICTURE).decode()
OPTIONS = ["a vase", "two, three", "x (y)", "4", "none of these"]


def _lettered(count: int) -> list[str]:
    return [f"({LETTERS[k]}) {OPTIONS[k]}" for k in range(count)]


def own_row(k: int) -> dict[str, Any]:
    boxes = [{"image": 0, "xyxy": [0.1, 0.2, 0.5, 0.75]}]
    row = {"id": f"q{k}", "images": ["a.png"], "question": f"What is {k}?", "choices": OPTIONS[:3], "answer": "B"}
    turns = [{"role": "user", "text": "And?", "images": [0]}]
    return row | {"boxes": boxes, "turns": turns, "tags": {"kind": "x"}, "meta": {"m": [1, 2]}, "pair": "1"}


def viscot_row(k: int) -> dict[str, Any]:
    texts = (f"<image>\nWhat is {k}?", "[0.1, 0.2, 0.3, 0.4]", "<image>", "a cat")
    turns = [{"from": ("human", "gpt")[n % 2], "value": text} for n, text in enumerate(texts)]
    image = ["a.png", "a.png###[2, 3, 21, 25]"]
    return {"dataset": "gqa", "split": "train", "question_id": k, "image": image, "conversations": turns}


def viscot_metadata_row(k: int) -> dict[str, Any]:
    row = {"question": f"What is {k}?", "answer": "a cat", "image": "a.png", "width": 40, "height": 30}
    return row | {"bboxs": [[2, 3, 21, 25], [0, 0, 9, 9]], "dataset": "gqa", "split": "train", "question_id": k}


def lvr_row(k: int) -> dict[str, Any]:
    question = "<image>\nWhat?\n" + "\n".join(_lettered(3))
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": "<lvr>\nSo.\n<answer> B </answer>"}]
    return {"id": f"q{k}", "image": "a.png", "conversations": turns, "bboxes": [[0.1, 0.2, 0.5, 1.0]]}


def meta_row(k: int) -> dict[str, Any]:
    return {"ds_name": f"set{k}", "data_path": "listed.json", "image_folder": "."}


def mmvp_row(k: int) -> dict[str, Any]:
    row = {"Index": str(k + 1), "Question": f'Is it "{k}", or not?', "Options": "(a) Open (b) Closed"}
    return row | {"Correct Answer": "(a)"}


def blink_row(k: int) -> dict[str, Any]:
    images = {f"image_{n}": {"bytes": PICTURE, "path": None} if n < 3 else None for n in (1, 2, 3, 4)}
    row = {"idx": f"val_Jigsaw_{k}", "question": "Which?", "prompt": "Which? (A) …", "choices": OPTIONS[:2]}
    return row | {"answer": "(B)", "sub_task": "Jigsaw"} | images


def hr_row(k: int) -> dict[str, Any]:
    row = {"index": k, "question": f"What is {k}?", "answer": "C", "category": "single"}
    return row | dict(zip("ABCD", OPTIONS, strict=False)) | {"cycle_category": k % 4, "image": BASE64}


def mme_json_row(k: int) -> dict[str, Any]:
    row = {"Question_id": f"q{k}", "Image": "a.png", "Text": f"What is {k}?", "Question Type": "Multiple Choice"}
    labels = {"Category": "car", "Subtask": "Monitoring", "Task": "Perception"}
    return row | {"Answer choices": _lettered(5), "Ground truth": "E"} | labels


def mme_row(k: int) -> dict[str, Any]:
    row = {"index": k, "image": BASE64, "question": f"What is {k}?", "multi-choice options": "\n".join(_lettered(5))}
    labels = {"answer": "E", "category": "Perception/Monitoring", "l2-category": "car"}
    return row | dict(zip("ABCDE", OPTIONS, strict=True)) | labels


def mme_listed_row(k: int) -> dict[str, Any]:
    row = {
        "index": k,
        "question": f"What is {k}?",
        "multi-choice options": [str(_lettered(5)), "\n".join(_lettered(5))],
    }
    row["multi-choice options"] = row["multi-choice options"][k % 2]
    return row | {"answer": "E", "category": "Perception/Monitoring", "l2-category": "car", "bytes": BASE64}


def virl_row(k: int) -> dict[str, Any]:
    row = {"question": f"<image>What is {k}?", "answer": "\\boxed{7}", "PassRate_32BTrained": 0.5, "category": "c"}
    return row | {"PassRate_7BBase": None, "source": "s", "qid": f"q{k}", "image": ["a.png"]}


def vstar_row(k: int) -> dict[str, Any]:
    end = "Answer with the option's letter from the given choices directly."
    text = "\n".join([f"What is {k}?", *_lettered(4), end])
    return {"image": "a.png", "text": text, "category": "direct_attributes", "label": "C", "question_id": k}


def vstar_inline_row(k: int) -> dict[str, Any]:
    return vstar_row(k) | {"image": {"bytes": PICTURE, "path": None}}


LAYOUTS: list[tuple[str, str, Callable[[int], dict[str, Any]]]] = [
    ("jsonl", "x.jsonl", own_row),
    ("jsonl", "x.json", own_row),
    ("visual-cot", "x.json", viscot_row),
    ("visual-cot", "x.jsonl", viscot_row),
    ("visual-cot", "metadata.jsonl", viscot_metadata_row),
    ("lvr", "x.json", lvr_row),
    ("lvr", "x.jsonl", lvr_row),
    ("lvr-meta", "x.json", meta_row),
    ("mmvp", "Questions.csv", mmvp_row),
    ("blink", "x.parquet", blink_row),
    ("hr-bench", "x.tsv", hr_row),
    ("hr-bench", "x.parquet", hr_row),
    ("mme-realworld", "x.json", mme_json_row),
    ("mme-realworld", "x.tsv", mme_row),
    ("mme-realworld", "x.parquet", mme_row),
    ("mme-realworld", "listed.tsv", mme_listed_row),
    ("mme-realworld", "listed.parquet", mme_listed_row),
    ("virl39k", "x.parquet", virl_row),
    ("vstar", "x.jsonl", vstar_row),
    ("vstar", "x.json", vstar_row),
    ("vstar", "x.parquet", vstar_inline_row),
]


def nested(levels: int) -> str:
    """JSON text of lists in objects in lists: too deep for `json.dumps`, which is why cells hold a mark for it."""
    return '{"a":[' * (levels // 2) + "1" + "]}" * (levels // 2)


def odd_value(draw: random.Random) -> Any:
    """A cell of the wrong kind."""
    plain = [
        None,
        True,
        False,
        0,
        -1,
        10**30,
        10**400,
        1.5,
        1e308,
        math.nan,
        math.inf,
        "",
        " ",
        "\u200b",
        "\n",
        "hidden",
    ]
    texts = ["\ud800", "a\0b", "(a)", "(B) x", "A", "[", "{", "../x", "/etc/passwd", "a.png/b", "\\boxed{", "###[1]"]
    texts += [
        "é" * 300,
        "[" * 500,
        " " * 50_000 + "x",
        "1" * 5000,
        "<image>" * 50,
        "<answer>" * 5000,
        "['a', 'b'",
        "['\\x']",
    ]
    lists = [
        [],
        {},
        [None],
        [[]],
        {"a": None},
        [1, 2, 3, 4],
        [0.1, 0.2, math.nan, 1],
        ["a", "a"],
        [True, None],
        [[1] * 4] * 3,
    ]
    pools: list[list[Any]] = [
        plain,
        texts,
        lists,
        [f"@{draw.choice((4, 60, 70, 200, 900, 990, 1010, 90_000))} deep@"],
        [Decimal("1.5")],
    ]
    return draw.choice(draw.choices(pools, (6, 6, 4, 2, 1))[0])


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to everything inside a row."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield (*path, key)
        yield from places(item, (*path, key))


def change_cell(row: dict[str, Any], draw: random.Random) -> None:
    """Replace, remove, double or rename something in a row."""
    path = draw.choice(list(places(row)) or [("id",)])
    target: Any = row
    for key in path[:-1]:
        target = target[key]
    key, how = path[-1], draw.random()
    if how < 0.7:
        target[key] = odd_value(draw)
    elif how < 0.8:
        del target[key]
    elif isinstance(target, list):
        target.extend(target[:1] * draw.choice((1, 2, 40)))
    else:
        target[draw.choice(("id", "bbox", "E", "extra", ""))] = target.pop(key)


def json_text(value: Any, indent: int | None = None) -> str:
    text = json.dumps(value, default=str, indent=indent)
    return re.sub(r'"@(\d+) deep@"', lambda mark: nested(int(mark[1])), text)


def write_json(path: Path, rows: list[Any], draw: random.Random) -> None:
    if path.suffix == ".jsonl":
        path.write_text("".join(json_text(row) + "\n" for row in rows))
        return
    indent, joint = draw.choice((None, None, 2)), draw.choice((",", ",\n", ", "))
    path.write_text("[" + joint.join(json_text(row, indent) for row in rows) + "]")


def write_table(path: Path, rows: list[dict[str, Any]], header: list[str]) -> None:
    options: dict[str, Any] = TABS if path.suffix == ".tsv" else {"lineterminator": "\n"}
    with path.open("w", newline="", encoding="utf-8", errors="surrogatepass") as file:
        writer = csv.writer(file, **options)
        writer.writerow(header)
        writer.writerows([str(row.get(name, "")) for name in header] for row in rows)


def odd_column(count: int, draw: random.Random) -> pa.Array:
    """A column of a type that no reader asked for."""
    makers: list[Callable[[], pa.Array]] = [
        lambda: pa.array([2**62] * count, pa.timestamp("ns")),
        lambda: pa.array([123456789] * count, pa.timestamp("ns", tz="Nowhere/Land")),
        lambda: pa.array([2**62] * count, pa.timestamp("ms")),
        lambda: pa.array([2**62] * count, pa.duration("ms")),
        lambda: pa.array([10**9] * count, pa.date32()),
        lambda: pa.array([datetime(2020, 1, 1)] * count),
        lambda: pa.array([date(2020, 1, 1)] * count),
        lambda: pa.array([timedelta(1)] * count),
        lambda: pa.array([1] * count, pa.time64("ns")),
        lambda: pa.array([Decimal("1.50")] * count, pa.decimal256(60, 2)),
        lambda: pa.array([2**63] * count, pa.uint64()),
        lambda: pa.array([math.nan] * count, pa.float32()),
        lambda: pa.array([True, None] * count).slice(0, count),
        lambda: pa.nulls(count),
        lambda: pa.array([b"\xff\xfe"] * count, pa.binary()),
        lambda: pa.array([b"\xff\xfe"] * count, pa.binary()).view(pa.string()),
        lambda: pa.array([["a", None]] * count, pa.list_(pa.string())),
        lambda: pa.array([[["a"], None]] * count, pa.list_(pa.list_(pa.string()))),
        lambda: pa.array([[("k", 1), ("k", 2)]] * count, pa.map_(pa.string(), pa.int64())),
        lambda: pa.array([{"bytes": None, "path": "a.png"}] * count),
        lambda: pa.array(["a"] * count).dictionary_encode(),
        lambda: pa.StructArray.from_arrays([pa.array(["a"] * count)] * 2, ["x", "x"]),
    ]
    return draw.choice(makers)()


def write_parquet(path: Path, rows: list[dict[str, Any]], header: list[str], draw: random.Random, odd: bool) -> None:
    columns: dict[str, pa.Array] = {}
    for name in header:
        cells = [row.get(name) for row in rows]
        try:
            columns[name] = pa.array(cells)
            pq.write_table(pa.table({name: columns[name]}), io.BytesIO())  # an empty struct cannot be written
        except (pa.ArrowException, OverflowError, TypeError, ValueError, RecursionError):
            columns[name] = pa.array([None if cell is None else repr(cell)[:100].encode() for cell in cells])
    if odd:
        columns[draw.choice(header)] = odd_column(len(rows), draw)
    names, arrays = list(columns), list(columns.values())
    if odd and draw.random() < 0.1:
        names, arrays = [*names, draw.choice(names)], [*arrays, arrays[0]]
    pq.write_table(pa.Table.from_arrays(arrays, names), path, row_group_size=draw.choice((4, 100)))


def change_bytes(path: Path, draw: random.Random) -> None:
    """Cut, flip, insert, repeat or double bytes anywhere in the file."""
    data = bytearray(path.read_bytes())
    for _ in range(draw.choice((1, 1, 2, 5))):
        at, how = draw.randrange(len(data) + 1), draw.random()
        if how < 0.25:
            del data[at : at + draw.choice((1, 1, 2, 30))]
        elif how < 0.6:
            data[at:at] = draw.choice(
                [b'"', b"{", b"}", b"[", b"]", b",", b"\n", b"\t", b"\0", b"\xff", b"\\", b"\\ud800"]
            )
        elif how < 0.75 and data:
            data[at % len(data)] = draw.randrange(256)
        elif how < 0.85:
            del data[at:]
        elif how < 0.93:
            data[at:at] = data[max(0, at - draw.choice((5, 50, 500))) : at] * draw.choice((1, 3))
        else:
            data[at:at] = draw.choice([b"[", b'{"a":', b" ", b'"', b"(A) ", b"1", b'{"a": 1},']) * draw.choice(
                (100, 60_000)
            )
    path.write_bytes(bytes(data))


def make_file(folder: Path, draw: random.Random) -> tuple[str, Path, int | None, str]:
    """Write one changed file. Returns its format, its path, its rows where that is known, and what was done."""
    known = [layout for layout in LAYOUTS if layout[0] in FORMATS]
    fmt, name, make = draw.choice(known)
    count, path = draw.randrange(1, 14), folder / name
    rows = [make(k) for k in range(count)]
    header = list(rows[0])
    how = draw.choice(("cells", "cells", "bytes", "both", "types"))
    if how in ("cells", "both"):
        for row in draw.sample(rows, min(count, draw.choice((1, 1, 3, 14)))):
            change_cell(row, draw)
    if path.suffix == ".parquet":
        write_parquet(path, rows, header, draw, odd=how == "types")
    elif path.suffix in (".tsv", ".csv"):
        write_table(path, rows, header)
    else:
        write_json(path, rows, draw)
    if how in ("bytes", "both"):
        change_bytes(path, draw)
    counted = fmt not in ("lvr-meta", "mmvp") and how in ("cells", "types")
    return fmt, path, count if counted else None, how


@contextmanager
def alarm(seconds: int) -> Iterator[None]:
    def ring(*_: object) -> None:
        raise Hang

    old = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)


def flaws(sample: Sample) -> Iterator[str]:
    """What no accepted sample may be."""
    if not isinstance(sample.id, str) or not sample.id.strip():
        yield f"id {sample.id!r:.40}"
    if not sample.question.strip():
        yield "blank question"
    if not sample.answer.strip():
        yield "blank answer"
    if len(set(sample.choices)) != len(sample.choices):
        yield f"equal options {sample.choices!r:.80}"
    if sample.choices and sample.answer not in LETTERS[: len(sample.choices)]:
        yield f"answer {sample.answer!r:.40} among {len(sample.choices)} options"
    if not sample.images:
        yield "no image"
    json.dumps(to_json(sample), ensure_ascii=False).encode()


def read_one(fmt: str, path: Path, written: int | None, draw: random.Random, outcome: Outcome, name: str) -> None:
    """Read a file in one of the ways in which it may be read, and account for its rows."""
    checks = draw.choice(("none", "exists", "decode"))
    options = ReadOptions(check_images=checks, broken_images=draw.choice(("drop", "keep")))
    report = Report(quarantine=path.parent / "bad.jsonl")
    with report:
        try:
            samples = list(read(path, draw.choice((fmt, fmt, None)), options, report))
        except UserError:
            outcome.refused += 1
            return
    outcome.rows += report.rows
    outcome.accepted += report.ok
    outcome.rejected += sum(report.dropped.values())
    outcome.dropped.update(report.dropped)
    if not report.rows == len(samples) + sum(report.dropped.values()) == report.ok + sum(report.dropped.values()):
        outcome.wrong.append(f"{name}: {report.rows} rows, {len(samples)} samples, {dict(report.dropped)}")
    if written is not None and report.rows != written:
        outcome.wrong.append(f"{name}: {written} rows written, {report.rows} counted")
    unknown = (set(report.dropped) - set(reasons.DROP_REASONS)) | (set(report.repaired) - set(reasons.REPAIR_REASONS))
    outcome.wrong += [f"{name}: unknown reason {reason}" for reason in unknown]
    outcome.wrong += [f"{name}: accepted {sample.source}: {flaw}" for sample in samples for flaw in flaws(sample)]


def fuzz_file(folder: Path, seed: str, outcome: Outcome) -> None:
    """One file, made and read from its seed alone."""
    draw = random.Random(seed)
    for old in folder.glob("*"):
        old.unlink()
    (folder / "a.png").write_bytes(PICTURE)
    (folder / "listed.json").write_text(json.dumps([lvr_row(k) for k in range(3)]))
    fmt, path, written, how = make_file(folder, draw)
    name = f"{seed} {fmt} {path.name} {how}"
    outcome.files += 1
    outcome.layouts[f"{fmt} {path.suffix}"] += 1
    try:
        with alarm(LIMIT_S):
            read_one(fmt, path, written, draw, outcome, name)
    except Hang:
        outcome.hangs.append(name)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        outcome.crashes.append(
            f"{name}: {type(error).__name__}: {str(error)[:80]} ({Path(where.filename).name}:{where.lineno})"
        )


def fuzz(folder: Path, seed: int, rows: int, files: int | None = None) -> Outcome:
    """Fuzz until ``rows`` rows were read, or ``files`` files were."""
    outcome = Outcome()
    while outcome.rows < rows if files is None else outcome.files < files:
        fuzz_file(folder, f"{seed}/{outcome.files}", outcome)
    return outcome


def main() -> int:
    rows, seed = (int(value) for value in (*sys.argv[1:], *("20000", "0")[len(sys.argv) - 1 :]))
    with tempfile.TemporaryDirectory() as folder:
        outcome = fuzz(Path(folder), seed, rows)
    print(f"{outcome.files} files, {outcome.refused} refused; {outcome.rows} rows = ", end="")
    print(f"{outcome.accepted} accepted + {outcome.rejected} rejected")
    print(dict(outcome.layouts), dict(outcome.dropped), sep="\n")
    for title in ("crashes", "hangs", "wrong"):
        found = getattr(outcome, title)
        print(f"{len(found)} {title}", *found[:30], sep="\n  ")
    return bool(outcome.crashes or outcome.hangs or outcome.wrong)


if __name__ == "__main__":
    sys.exit(main())
