"""Rows of JSON and table files, one at a time, however large the file. A damaged row never hides the rows after it."""

from __future__ import annotations

import codecs
import csv
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal

from realvr.data import reasons
from realvr.data.readers.base import Row
from realvr.data.reasons import BadRow, FileError

CHUNK = 1 << 20
JOINED_LINES = 1000
JOINED_BYTES = 64 << 20
"""How far an open quote in a table is followed for its end."""
REFERENCE_LENGTH = 64
"""Harnesses save space by writing another row's index where its image would stand; no image is this short."""
_STRUCTURE = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}"]', re.DOTALL)
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_SPACE = re.compile(r"[ \t\n\r]*")


def open_file(path: Path) -> BinaryIO:
    """Open a data file for reading bytes, or say in one line why that is impossible."""
    try:
        if path.is_dir():
            raise FileError(reasons.NOT_A_FILE, f"{path}: is a folder; a file is expected")
        if path.stat().st_size == 0:
            raise FileError(reasons.FILE_EMPTY, f"{path}: the file is empty")
        return path.open("rb")
    except FileNotFoundError:
        raise FileError(reasons.FILE_MISSING, f"{path}: no such file") from None
    except OSError as error:
        raise FileError(reasons.FILE_UNREADABLE, f"{path}: cannot be opened ({error.strerror or error})") from None
    except ValueError as error:  # a NUL in a name that a meta file gives
        raise FileError(reasons.FILE_UNREADABLE, f"{str(path)!r}: cannot be opened ({error})") from None


def json_rows(path: Path) -> Iterator[Row]:
    """Rows of a JSON array or of a JSON-lines file, whichever the first character says."""
    with open_file(path) as source:
        start = source.read(4096).removeprefix(codecs.BOM_UTF8).lstrip()[:1]
    return _array_rows(path) if start == b"[" else _line_rows(path)


def _has_surrogate(value: str) -> bool:
    """Whether text decoded with ``surrogateescape`` held bytes that are not UTF-8."""
    return any("\udc80" <= character <= "\udcff" for character in value) if not value.isascii() else False


def _loads(text: str, number: int, progress: float, last: bool) -> Row:
    """One JSON object as a row; the last row of a file without its end counts as truncated, not as invalid."""
    if _has_surrogate(text):
        return Row(number, error=BadRow(reasons.NOT_UTF8, "bytes that are not UTF-8"), progress=progress)
    try:
        value = json.loads(text)
        if _escaped_surrogate(text, value):
            return Row(number, error=BadRow(reasons.NOT_UTF8, "half of a surrogate pair"), progress=progress)
        return _object_row(value, number, progress)
    except (ValueError, RecursionError) as error:
        reason = reasons.ROW_TRUNCATED if last else reasons.JSON_INVALID
        return Row(number, error=BadRow(reason, f"{error}"), progress=progress)


def _escaped_surrogate(text: str, value: Any) -> bool:
    """Whether a JSON escape such as ``\\ud800`` left half a character, which can be neither printed nor written."""
    if not _SURROGATE_ESCAPE.search(text):
        return False
    return any("\ud800" <= character <= "\udfff" for character in json.dumps(value, ensure_ascii=False))


def _object_row(value: Any, number: int, progress: float) -> Row:
    if isinstance(value, dict):
        return Row(number, value, progress=progress)
    error = BadRow(reasons.ROW_MALFORMED, f"the row is {type(value).__name__}, an object is expected")
    return Row(number, error=error, progress=progress)


def _line_rows(path: Path) -> Iterator[Row]:
    """JSON lines. Blank lines are not rows."""
    size = path.stat().st_size
    number = done = 0
    with open_file(path) as source:
        for raw in source:
            done += len(raw)
            line = raw.removeprefix(codecs.BOM_UTF8) if number == 0 else raw
            if line.strip():
                number += 1
                text = line.decode("utf-8", "surrogateescape")
                yield _loads(text, number, done / size, last=not raw.endswith(b"\n"))


class _Window:
    """A sliding window of decoded text over a file."""

    def __init__(self, source: BinaryIO) -> None:
        self.source = source
        self.decoder = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")
        self.text = ""
        self.at = 0
        self.ended = False

    def more(self) -> bool:
        """Read on, at least doubling what is pending, so that long elements cost linear time. False at the end."""
        if self.ended:
            return False
        pending = self.text[self.at :]
        raw = self.source.read(max(CHUNK, len(pending)))
        self.ended = not raw
        self.text = pending + self.decoder.decode(raw, final=self.ended)
        self.at = 0
        return not self.ended

    def skip_space(self) -> str:
        """Move to the next character that is not white space and return it; empty at the end of the file."""
        while True:
            match = _SPACE.match(self.text, self.at)
            self.at = match.end() if match else self.at
            if self.at < len(self.text):
                return self.text[self.at]
            if not self.more():
                return ""


def _element_end(text: str, start: int) -> int | None:
    """Where the bracketed element at ``start`` closes, by counting brackets outside strings; None if it does not."""
    depth = 0
    for match in _STRUCTURE.finditer(text, start):
        token = match[0]
        if token == '"':
            return None  # a string that does not end in this window
        if token in "[{":
            depth += 1
        elif token in "]}":
            depth -= 1
            if depth <= 0:
                return match.end()
    return None


def _next_element(window: _Window, number: int, progress: Callable[[], float]) -> Row:
    """Decode the element at the window's position and move past it."""
    decode = json.JSONDecoder().raw_decode
    while True:
        text, start = window.text, window.at
        try:
            value, window.at = decode(text, start)
        except (ValueError, RecursionError) as failure:
            end = _element_end(text, start) if text[start] in "{[" else _scalar_end(text, start)
            if end is None and window.more():
                continue
            window.at = len(text) if end is None else end
            reason = reasons.ROW_TRUNCATED if end is None else reasons.JSON_INVALID
            return Row(number, error=BadRow(reason, str(failure)), progress=progress())
        if window.at == len(text) and text[start] not in "{[" and window.more():
            window.at = 0  # a bare number may go on in the next chunk
            continue
        if _has_surrogate(text[start : window.at]):
            return Row(number, error=BadRow(reasons.NOT_UTF8, "bytes that are not UTF-8"), progress=progress())
        if _escaped_surrogate(text[start : window.at], value):
            return Row(number, error=BadRow(reasons.NOT_UTF8, "half of a surrogate pair"), progress=progress())
        return _object_row(value, number, progress())


def _scalar_end(text: str, start: int) -> int | None:
    """Where something that is neither an object nor a list ends: before the next separator."""
    match = re.compile(r"[,\]{\[]").search(text, start + 1)
    return match.start() if match else None


def _array_rows(path: Path) -> Iterator[Row]:
    """Elements of a JSON array, decoded one at a time from a sliding window."""
    size = path.stat().st_size
    with open_file(path) as source:
        window = _Window(source)
        window.skip_space()
        window.at += 1
        number = 0

        def progress() -> float:
            return source.tell() / size

        while (mark := window.skip_space()) != "]":
            if mark == ",":
                window.at += 1
                continue
            number += 1
            if not mark:
                yield Row(number, error=BadRow(reasons.ROW_TRUNCATED, "the file ends inside its list"), progress=1.0)
                return
            row = _next_element(window, number, progress)
            yield row
            if row.error is not None and row.error.reason == reasons.ROW_TRUNCATED:
                return  # the file ended inside this element


def table_header(path: Path) -> list[str]:
    """Column names of a TSV file."""
    with open_file(path) as source:
        line = source.readline(CHUNK).removeprefix(codecs.BOM_UTF8)
    fields, _ = split_fields(line.rstrip(b"\r\n"))
    try:
        return [line[begin:end].decode("utf-8").strip().strip('"') for begin, end in fields]
    except UnicodeDecodeError:
        raise FileError(reasons.NOT_UTF8, f"{path}: the header is not UTF-8; save the file as UTF-8") from None


Spans = list[tuple[int, int]]


def split_fields(line: bytes) -> tuple[Spans, Literal["whole", "open", "stray"]]:
    """(begin, end) of the tab-separated fields of a row, quotes excluded, and whether its quotes make sense.

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
            if line[close + 1 : close + 2] not in (b"", b"\t"):
                return fields, "stray"
            fields.append((at + 1, close))
            at = line.find(b"\t", close)
        else:
            end = line.find(b"\t", at)
            fields.append((at, length if end == -1 else end))
            at = end
        if at == -1:
            return fields, "whole"
        at += 1


def _literal_fields(line: bytes) -> Spans:
    """Fields of one line with quotes taken as text."""
    fields: Spans = []
    at = 0
    for part in line.split(b"\t"):
        fields.append((at, at + len(part)))
        at += len(part) + 1
    return fields


class TableRow(dict[str, str]):
    """Fields of a TSV row as text, with the image column left in the file: ``image_at`` is its (offset, length)."""

    image_at: tuple[int, int] = (0, 0)
    image_digest: bytes = b""
    """Of the base64 text: rows that repeat an image, as the four cycles of HR-Bench do, are known without decoding."""


def _record(source: BinaryIO, columns: int) -> tuple[bytes, Spans]:
    """The next record and its fields. A quoted field may hold line breaks.

    Where joining lines does not lead to a row of the right width, the quote was damage or plain text: the first line
    then stands alone, so that it costs no row after it. The search is bounded: lines may be tens of MB long.
    """
    line = source.readline()
    fields, quotes = split_fields(line.rstrip(b"\r\n"))
    if quotes == "whole":
        return line, fields
    mark = source.tell()
    joined, lines = line, 1
    while quotes == "open" and lines < JOINED_LINES and len(joined) < JOINED_BYTES:
        following = source.readline()
        if not following:
            break
        joined, lines = joined + following, lines + 1
        if b'"' in following:
            fields, quotes = split_fields(joined.rstrip(b"\r\n"))
    if quotes == "whole" and len(fields) == columns:
        return joined, fields
    source.seek(mark)
    return line, _literal_fields(line.rstrip(b"\r\n"))


def table_rows(path: Path, image_column: str) -> Iterator[Row]:
    """Rows of a TSV file as `TableRow`."""
    header = table_header(path)
    size = path.stat().st_size
    number = 0
    with open_file(path) as source:
        source.readline()
        while (begin := source.tell()) < size:
            line, fields = _record(source, len(header))
            if line.strip(b"\r\n"):
                number += 1
                yield _table_row(line, fields, header, image_column, number, begin, source.tell() / size)


def _table_row(
    line: bytes, fields: Spans, header: list[str], image_column: str, number: int, begin: int, progress: float
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


def csv_rows(path: Path, required: Sequence[str]) -> Iterator[Row]:
    """Rows of a comma-separated file as dictionaries, if it has the ``required`` columns. Meant for small files."""
    with open_file(path):
        pass
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as source:
        reader = csv.reader(source)
        header = [name.strip() for name in next(reader, [])]
        if lost := [name for name in required if name not in header]:
            found = ", ".join(header).encode("utf-8", "replace").decode()[:200]
            raise FileError(reasons.WRONG_COLUMNS, f"{path}: no column {', '.join(lost)}; found {found or 'none'}")
        number = 0
        while True:
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                number += 1
                yield Row(number, error=BadRow(reasons.ROW_MALFORMED, str(error)))
                continue
            if not any(field.strip() for field in fields):
                continue
            number += 1
            yield _csv_row(number, header, fields)


def _csv_row(number: int, header: list[str], fields: list[str]) -> Row:
    if any(_has_surrogate(field) for field in fields):
        return Row(number, error=BadRow(reasons.NOT_UTF8, "bytes that are not UTF-8"))
    if len(fields) != len(header):
        reason = reasons.ROW_TRUNCATED if len(fields) < len(header) else reasons.ROW_MALFORMED
        return Row(number, error=BadRow(reason, f"{len(fields)} columns of {len(header)}"))
    return Row(number, dict(zip(header, fields, strict=True)))
