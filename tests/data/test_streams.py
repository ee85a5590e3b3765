"""Streaming decoders against the standard library's whole-file ones."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from realvr.data import json_list, streams, tables

quick = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@pytest.fixture
def tiny_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of three bytes, so that elements, strings and characters are cut everywhere."""
    monkeypatch.setattr(json_list, "CHUNK", 3)


@quick
@given(
    rows=st.lists(st.dictionaries(st.text(), values, max_size=4), max_size=5),
    ascii_only=st.booleans(),
    indent=st.sampled_from([None, 1]),
)
def test_array_equals_whole_file_decoding(
    rows: list, ascii_only: bool, indent: int | None, tmp_path: Path, tiny_chunks: None
) -> None:
    file = tmp_path / "x.json"
    text = json.dumps(rows, ensure_ascii=ascii_only, indent=indent)
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    found = list(streams.json_rows(file))
    assert [row.number for row in found] == list(range(1, len(rows) + 1))
    for row, wanted in zip(found, rows, strict=True):
        # A lone surrogate cannot be written as UTF-8, so such a row is refused when it is not escaped.
        assert row.data == wanted or (row.error is not None and row.error.reason == "not_utf8" and not ascii_only)


@quick
@given(rows=st.lists(st.dictionaries(st.text(), values, max_size=3), max_size=5))
def test_lines_equal_whole_file_decoding(rows: list, tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text("\n\n".join(json.dumps(row) for row in rows) + "\n")
    assert [row.data for row in streams.json_rows(file)] == rows


cell = st.text(alphabet=st.sampled_from('ab "\t\nü'), max_size=6)


@quick
@given(rows=st.lists(st.lists(cell, min_size=2, max_size=2), max_size=5))
def test_table_equals_the_csv_module(rows: list[list[str]], tmp_path: Path) -> None:
    buffer = io.StringIO()
    writer = csv.writer(buffer, delimiter="\t", lineterminator="\n")
    writer.writerow(["index", "question", "other", "image"])
    writer.writerows([str(i), *row, "aGk="] for i, row in enumerate(rows))
    file = tmp_path / "x.tsv"
    file.write_text(buffer.getvalue(), newline="")
    found = list(tables.table_rows(file, "image"))
    assert [row.error for row in found] == [None] * len(rows)
    assert [[row.data["question"], row.data["other"]] for row in found] == rows
    for row in found:
        offset, length = row.data.image_at
        assert file.read_bytes()[offset : offset + length] == b"aGk="


def test_a_stray_quote_costs_no_other_row(tmp_path: Path) -> None:
    file = tmp_path / "x.tsv"
    rows = ['1\t"cut', "2\tfine\ty", '3\t"two\nlines"\tz', '4\t"size" 5\ty', '5\t"never closed\tx', "6\tfine\ty"]
    file.write_text("\n".join(["index\tquestion\timage", *rows]) + "\n")
    first, *rest = tables.table_rows(file, "image")
    assert first.error is not None and first.error.reason == "row_truncated"
    texts = ["fine", "two\nlines", '"size" 5', '"never closed', "fine"]
    assert [row.data["question"] for row in rest] == texts
