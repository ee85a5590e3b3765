"""Rows of TSV and CSV files, one at a time, however large the file. A damaged row never hides the rows after it."""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Literal

from realvr.data import reasons
from realvr.data.readers.base import Row
from realvr.data.reasons import BadRow, FileError
from realvr.data.streams import CHUNK, open_file

JOINED_LINES = 1000
JOINED_BYTES = 64 << 20
"""How far an open quote is followed for its end."""
REFERENCE_LENGTH = 64
"""Harnesses save space by writing another row's index where its image would stand; no image is this short."""

Spans = list[tuple[int, int]]


def table_header(path: Path, delimiter: bytes = b"\t", aliases: Mapping[str, str] | None = None) -> list[str]:
    """Column names of a TSV or CSV file; ``aliases`` maps spellings in circulation to the usual ones."""
    with open_file(path) as source:
        line = source.readline(CHUNK).removeprefix(codecs.BOM_UTF8)
    fields, _ = split_fields(line.rstrip(b"\r\n"), delimiter)
    try:
        names = [line[begin:end].decode("utf-8").strip().strip('"') for begin, end in fields]
    except UnicodeDecodeError:
        raise FileError(reasons.NOT_UTF8, f"{path}: the header is not UTF-8; save the file as UTF-8") from None
    return unambiguous(path, [(aliases or {}).get(name, name) for name in names])


def unambiguous(path: Path, names: list[str]) -> list[str]:
    """``names``, or a `FileError` where a column occurs twice: nobody can say which of the two is meant."""
    twice = sorted({name for name in names if name and names.count(name) > 1})
    if twice:
        raise FileError(
            reasons.WRONG_COLUMNS, f"{path}: column {twice[0]!r:.80} occurs twice; remove or rename one of them"
        )
    return names


def split_fields(line: bytes, delimiter: bytes = b"\t") -> tuple[Spans, Literal["whole", "open", "stray"]]:
    """(begin, end) of the fields of a row, quotes excluded, and whether its quotes make sense.

    ``open``: a quoted field does not close, so it may go on in the next line. ``stray``: text follows a closing quote,
    so the quotes are part of the text. Offsets instead of text: a field may hold tens of MB of base64 that nobody
    wants to copy.
    """
    fields: Spans = []
    at, length = 0, len(line)
    while True:
        if line[at : at + 1] == b'"':
            close = line.find(b'"', at + 1)
            while close != -1 and line[close + 1 : close + 2] == b'"':
                close = line.find(b'"', close + 2)
            if close == -1:
                return fields, "open"
            if line[close + 1 : close + 2] not in (b"", delimiter):
                return fields, "stray"
            fields.append((at + 1, close))
            at = line.find(delimiter, close)
        else:
            end = line.find(delimiter, at)
            fields.append((at, length if end == -1 else end))
            at = end
        if at == -1:
            return fields, "whole"
        at += 1


def _literal_fields(line: bytes, delimiter: bytes) -> Spans:
    """Fields of one line with quotes taken as text."""
    fields: Spans = []
    at = 0
    for part in line.split(delimiter):
        fields.append((at, at + len(part)))
        at += len(part) + 1
    return fields


class TableRow(dict[str, str]):
    """Fields of a TSV row as text, with the image column left in the file: ``image_at`` is its (offset, length)."""

    image_at: tuple[int, int] = (0, 0)
    image_digest: bytes = b""
    """Of the base64 text: rows that repeat an image, as the four cycles of HR-Bench do, are known without decoding."""


def _starts_a_row(line: bytes, columns: int, delimiter: bytes) -> bool:
    """Whether a line is a numbered row by itself, so that a quote left open before it was damage, not a line break."""
    fields, quotes = split_fields(line.rstrip(b"\r\n"), delimiter)
    return quotes == "whole" and len(fields) == columns and line[slice(*fields[0])].isdigit()


def _record(source: BinaryIO, columns: int, delimiter: bytes) -> tuple[bytes, Spans]:
    """The next record and its fields. A quoted field may hold line breaks.

    Where joining lines does not lead to a row of the right width, or meets a row on the way, the quote was damage or
    plain text: the first line then stands alone, so that it costs no row after it. The search is bounded: lines may be
    tens of MB long.
    """
    line = source.readline()
    fields, quotes = split_fields(line.rstrip(b"\r\n"), delimiter)
    if quotes == "whole":
        return line, fields
    mark = source.tell()
    joined, lines = line, 1
    while quotes == "open" and lines < JOINED_LINES and len(joined) < JOINED_BYTES:
        following = source.readline()
        if not following or _starts_a_row(following, columns, delimiter):
            break
        joined, lines = joined + following, lines + 1
        if b'"' in following:
            fields, quotes = split_fields(joined.rstrip(b"\r\n"), delimiter)
    if quotes == "whole" and len(fields) == columns:
        return joined, fields
    source.seek(mark)
    return line, _literal_fields(line.rstrip(b"\r\n"), delimiter)


def table_rows(
    path: Path, image_column: str | None, delimiter: bytes = b"\t", aliases: Mapping[str, str] | None = None
) -> Iterator[Row]:
    """Rows of a TSV or CSV file as `TableRow`."""
    header = table_header(path, delimiter, aliases)
    size = path.stat().st_size
    number = 0
    with open_file(path) as source:
        source.readline()
        while (begin := source.tell()) < size:
            line, fields = _record(source, len(header), delimiter)
            if line.strip(b"\r\n " + delimiter):  # spreadsheets leave rows of nothing but delimiters
                number += 1
                yield _table_row(line, fields, header, image_column, number, begin, source.tell() / size)


def _table_row(
    line: bytes, fields: Spans, header: list[str], image_column: str | None, number: int, begin: int, progress: float
) -> Row:
    if len(fields) != len(header):
        reason = reasons.ROW_TRUNCATED if len(fields) < len(header) else reasons.ROW_MALFORMED
        error = BadRow(reason, f"{len(fields)} columns, the header has {len(header)}")
        return Row(number, error=error, progress=progress)
    row = TableRow()
    try:
        for name, (first, last) in zip(header, fields, strict=True):
            if name == image_column:
                row.image_at = (begin + first, last - first)
                row.image_digest = hashlib.blake2b(memoryview(line)[first:last], digest_size=16).digest()
                # Short values are references to another row's image; the rest stays in the file.
                short = last - first <= REFERENCE_LENGTH
                row[name] = line[first:last].decode("ascii", "replace") if short else ""
            else:
                quoted = line[first - 1 : first] == b'"'
                text = line[first:last].decode("utf-8")
                row[name] = text.replace('""', '"') if quoted else text
    except UnicodeDecodeError as error:
        return Row(number, error=BadRow(reasons.NOT_UTF8, f"column {name!r}: {error.reason}"), progress=progress)
    return Row(number, row, progress=progress)


def csv_rows(path: Path, required: Sequence[str], aliases: Mapping[str, str] | None = None) -> Iterator[Row]:
    """Rows of a comma-separated file as dictionaries, if it has the ``required`` columns."""
    header = table_header(path, b",", aliases)
    if lost := [name for name in required if name not in header]:
        found = ", ".join(header)[:200]
        raise FileError(reasons.WRONG_COLUMNS, f"{path}: no column {', '.join(lost)}; found {found or 'none'}")
    yield from table_rows(path, None, b",", aliases)
