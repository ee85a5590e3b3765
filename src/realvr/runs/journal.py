"""Resumable JSONL: records appended as they come, safe against a kill at any byte, shared by several processes.

A batch of lines is written and synced at once, and a last line without a line break is cut off before anything is
appended. One process appends to the file itself. Of several, process r appends to ``NAME.rank{r}.jsonl``; the files
become one (`merge`) when the run ends, and when it starts again, with whatever number of processes. No torch.
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Generic, TypeVar

from realvr.errors import UserError
from realvr.runs.files import naming, write_atomically

Record = dict[str, Any]
Key = Callable[[Record], Hashable]
T = TypeVar("T")


def json_line(row: Record) -> str:
    """A JSON object in one line that has UTF-8: half a surrogate pair, as JSON data may hold it, is escaped."""
    text = json.dumps(row, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(row)
    return text


@dataclass(frozen=True)
class Kind(Generic[T]):
    """One kind of record: what makes two the same, and how one becomes a line and comes back.

    ``what`` and ``again`` word the error about a line that is none.
    """

    key: Callable[[T], Hashable]
    parse: Callable[[bytes], T] = json.loads
    line: Callable[[T], str] = json_line  # type: ignore[assignment]
    what: str = "a record"
    again: str = "run it again"


# ---------------------------------------------------------------------- lines


def whole_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file; a last one without its line break, as a kill leaves it, is left out."""
    try:
        source = path.open("rb")  # bytes: a kill may cut through a character, too
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None
    with source:
        for line in source:
            if line.endswith(b"\n"):
                yield line


class Appender:
    """A file that only grows. What was torn off by a kill is cut off first."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.exists():
            trim(path)
        self._file: IO[bytes] = path.open("ab")

    def write(self, lines: Iterable[str], sync: bool = True) -> None:
        """Append lines, given without their line breaks; with ``sync`` they are on the disk when this returns."""
        with naming(self.path):
            self._file.write("".join(line + "\n" for line in lines).encode())
            self._file.flush()
            if sync:
                os.fsync(self._file.fileno())

    def __enter__(self) -> Appender:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. Every line was flushed when it was written: what fails now failed then."""
        with suppress(OSError):
            self._file.close()


def trim(path: Path) -> None:
    """Cut off a last line without its line break, as a kill leaves it."""
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        kept = end
        while kept:
            start = max(0, kept - (1 << 16))
            file.seek(start)
            last = file.read(kept - start).rfind(b"\n")
            if last >= 0:
                kept = start + last + 1
                break
            kept = start
        if kept < end:
            file.truncate(kept)
            os.fsync(file.fileno())


def keep_lines(path: Path, wanted: Callable[[bytes], bool]) -> None:
    """Drop the lines of a file that are not wanted, and a last one cut short by a kill."""
    with naming(path):
        trim(path)
        kept = [line for line in whole_lines(path) if wanted(line)]
        if sum(map(len, kept)) < path.stat().st_size:
            write_atomically(path, b"".join(kept))


# ---------------------------------------------------------------------- records


def records_of(path: Path, kind: Kind[T]) -> Iterator[T]:
    """Records of a file, in order; of records with the same key the first stands."""
    seen: set[Hashable] = set()
    for number, line in enumerate(whole_lines(path), 1):
        try:
            record = kind.parse(line)
            key = kind.key(record)
            new = key not in seen
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise UserError(
                f"{path}, line {number}: not {kind.what} ({error}); delete the line to {kind.again}"
            ) from None
        if new:
            seen.add(key)
            yield record


def read_records(path: Path, key: Key) -> list[Record]:
    """Plain records of a file, all of them."""
    return list(records_of(path, Kind(key)))


class Journal:
    """A JSONL file of records with distinct keys, to be continued after a kill.

    ``key`` gives the key of a record; what has one already is not written again. Of several processes call `merge` in
    one of them before the others open the journal.
    """

    def __init__(self, path: Path, key: Key, rank: int = 0, world: int = 1) -> None:
        self.path = own_file(path, rank, world)
        self.key = key
        self.records = read_records(path, key) if path.exists() else []
        self.done = {key(record) for record in self.records}
        self.continued = bool(self.records)
        """Whether an earlier run wrote some of the records."""

    def add(self, records: Iterable[Record]) -> None:
        """Append those whose key is new, and sync."""
        fresh = [record for record in records if self.key(record) not in self.done]
        if not fresh:
            return
        try:
            with Appender(self.path) as file:
                file.write(map(json_line, fresh))
        except OSError as error:
            raise UserError(f"{self.path}: cannot be written ({error.strerror or error})") from None
        self.records += fresh
        self.done |= {self.key(record) for record in fresh}


@contextmanager
def summarising(*journals: Journal, outside: bool = False) -> Iterator[None]:
    """Around the summary of records: one that an earlier run did not write so is the file's fault, not ours.

    ``outside``: the code is a user's own, so that it may as well be at fault; the message names its line.
    """
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        files = ", ".join(str(journal.path) for journal in journals if journal.continued)
        if not files:
            raise
        what = " ".join(f"{type(error).__name__}: {error}".split())
        if outside:
            last = traceback.extract_tb(error.__traceback__)[-1]
            raise UserError(
                f"{files}: {last.filename}:{last.lineno} cannot summarise the records ({what}); correct the code, or "
                "delete the line of a damaged record to run it again"
            ) from error
        raise UserError(f"{files}: a record is damaged ({what}); delete its line to run it again") from error


# ---------------------------------------------------------------------- several processes


def own_file(path: Path, rank: int, world: int) -> Path:
    """Where process ``rank`` of ``world`` appends."""
    return path if world == 1 else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def parts_of(path: Path) -> list[Path]:
    """The files of several processes that have not become one yet."""
    return sorted(path.parent.glob(f"{path.stem}.rank*{path.suffix}"))


def merge(path: Path, kind: Kind[T] | Key, order: Callable[[T], Any] | None = None) -> int:
    """Make one file of the parts of several processes; returns how many records it holds. ``order`` sorts them.

    ``kind`` may be the key of plain records. Killed in between, the parts are still there, and records that are in two
    files count once.
    """
    chosen: Kind[Any] = kind if isinstance(kind, Kind) else Kind(kind)
    parts = parts_of(path)
    lines: dict[Hashable, tuple[Any, str]] = {}
    for file in (path, *parts):
        for record in records_of(file, chosen) if file.exists() else ():
            place = 0 if order is None else order(record)
            lines.setdefault(chosen.key(record), (place, chosen.line(record) + "\n"))
    if parts or order is not None:
        ordered = sorted(lines.values(), key=lambda entry: entry[0])  # stable: without an order as they came
        write_atomically(path, "".join(line for _, line in ordered))
    for part in parts:
        part.unlink()
    return len(lines)
