"""Rows of JSON files, one at a time, however large the file. A damaged row never hides the rows after it."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from realvr.data import reasons
from realvr.data.json_list import CHUNK, LONGEST, elements
from realvr.data.readers.base import Row
from realvr.data.reasons import BadRow, FileError

DEEPEST = 64
"""Levels of lists and objects in a row: far more than any format has, far fewer than what Python can print."""
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


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
    """Rows of a JSON array or of a JSON-lines file, whichever its first line says."""
    with open_file(path) as source:
        line = _filled_line(source).removeprefix(codecs.BOM_UTF8).strip()
        following = _filled_line(source)[:1] if line[:1] == b"[" else b""
    lost = path.suffix.lower() == ".json" and line[:1] == b"{" and not _is_whole(line)
    # A first line that is a whole list, with an object after it, is one bad row of a JSON-lines file.
    stray = path.suffix.lower() == ".jsonl" and following == b"{" and _is_whole(line)
    return _array_rows(path) if lost or (line[:1] == b"[" and not stray) else _line_rows(path)


def _filled_line(source: BinaryIO) -> bytes:
    """The next line that is not blank; empty at the end of the file."""
    while line := source.readline(CHUNK):
        if line.removeprefix(codecs.BOM_UTF8).strip():
            return line.strip()
    return b""


def _is_whole(line: bytes) -> bool:
    """Whether a line is one whole value. If not, the file is a list that lost its bracket, or was broken up."""
    text = line.decode("utf-8", "surrogateescape")
    try:
        return not text[json.JSONDecoder().raw_decode(text)[1] :].strip()
    except (ValueError, RecursionError):
        return False


def _array_rows(path: Path) -> Iterator[Row]:
    size = path.stat().st_size
    with open_file(path) as source:
        for number, element in enumerate(elements(source), 1):
            progress = source.tell() / size
            if element.damage:
                reason = reasons.ROW_TRUNCATED if element.truncated else reasons.JSON_INVALID
                yield Row(number, error=BadRow(reason, element.damage), progress=progress)
            else:
                yield _checked(element.value, element.text, number, progress)


def _line_rows(path: Path) -> Iterator[Row]:
    """JSON lines. Blank lines are not rows."""
    size = path.stat().st_size
    number = 0
    with open_file(path) as source:
        while raw := source.readline(LONGEST):
            line = raw.removeprefix(codecs.BOM_UTF8) if number == 0 else raw
            if not line.strip():
                continue
            number += 1
            if len(raw) == LONGEST and not raw.endswith(b"\n"):
                while (rest := source.readline(CHUNK)) and not rest.endswith(b"\n"):
                    pass
                error = BadRow(reasons.ROW_MALFORMED, f"the line is longer than {LONGEST >> 20} MB")
                yield Row(number, error=error, progress=source.tell() / size)
            else:
                text = line.decode("utf-8", "surrogateescape")
                yield _line_row(text, number, source.tell() / size, last=not raw.endswith(b"\n"))


def _line_row(text: str, number: int, progress: float, last: bool) -> Row:
    """One line as a row; the last row of a file without its end counts as truncated, not as invalid."""
    try:
        return _checked(json.loads(text), text, number, progress)
    except RecursionError as error:
        return Row(number, error=BadRow(reasons.ROW_TOO_DEEP, str(error)), progress=progress)
    except ValueError as error:
        reason = reasons.ROW_TRUNCATED if last else reasons.JSON_INVALID
        reason = reasons.NOT_UTF8 if _has_surrogate(text) else reason
        return Row(number, error=BadRow(reason, str(error)), progress=progress)


def _checked(value: object, text: str, number: int, progress: float) -> Row:
    """A decoded row, or what is wrong with it apart from its fields."""
    error = None
    if _has_surrogate(text):
        error = BadRow(reasons.NOT_UTF8, "bytes that are not UTF-8")
    elif text.count("[") + text.count("{") > DEEPEST and _depth(value) > DEEPEST:
        error = BadRow(reasons.ROW_TOO_DEEP, f"more than {DEEPEST} levels of lists and objects")
    elif _SURROGATE_ESCAPE.search(text) and _half_character(value):
        error = BadRow(reasons.NOT_UTF8, "half of a surrogate pair")
    elif not isinstance(value, dict):
        error = BadRow(reasons.ROW_MALFORMED, f"the row is {type(value).__name__}, an object is expected")
    return Row(number, None if error else value, error, progress)


def _has_surrogate(value: str) -> bool:
    """Whether text decoded with ``surrogateescape`` held bytes that are not UTF-8."""
    return any("\udc80" <= character <= "\udcff" for character in value) if not value.isascii() else False


def _half_character(value: object) -> bool:
    r"""Whether a JSON escape such as ``\ud800`` left half a character, which can be neither printed nor written."""
    return any("\ud800" <= character <= "\udfff" for character in json.dumps(value, ensure_ascii=False))


def _depth(value: object) -> int:
    """Levels of lists and objects. Without recursion: values near the recursion limit come here."""
    level, depth = [value], 0
    while level := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item)]
    return depth
