"""Resumable JSONL: records appended as they come, safe against a kill at any byte, shared by several processes.

A batch of lines is written and synced at once, and a last line without a line break is cut off before anything is
appended. One process appends to the file itself. Of several, process r appends to ``NAME.rank{r}.jsonl``; the files
become one (`merge`) when the run ends, and when it starts again, with whatever number of processes. No torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from realvr.errors import UserError
from realvr.runs.files import write_atomically

Record = dict[str, Any]
Key = Callable[[Record], Hashable]


class Journal:
    """A JSONL file of records with distinct keys, to be continued after a kill.

    ``key`` gives the key of a record; what has one already is not written again. Of several processes call `merge` in
    one of them before the others open the journal.
    """

    def __init__(self, path: Path, key: Key, rank: int = 0, world: int = 1) -> None:
        self.path = path if world == 1 else _part(path, rank)
        self.key = key
        self.records = read_records(path, key) if path.exists() else []
        self.done = {key(record) for record in self.records}
        self.continued = bool(self.records)
        """Whether an earlier run wrote some of the records."""
        if self.path.exists():
            trim(self.path)

    def add(self, records: Iterable[Record]) -> None:
        """Append those whose key is new, and sync."""
        fresh = [record for record in records if self.key(record) not in self.done]
        if not fresh:
            return
        try:
            with self.path.open("ab") as target:
                target.write("".join(json_line(record) + "\n" for record in fresh).encode())
                target.flush()
                os.fsync(target.fileno())
        except OSError as error:
            raise UserError(f"{self.path}: cannot be written ({error.strerror or error})") from None
        self.records += fresh
        self.done |= {self.key(record) for record in fresh}


def _part(path: Path, rank: int) -> Path:
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def merge(path: Path, key: Key, order: Callable[[Record], int] | None = None) -> None:
    """Make one file of the parts of several processes, where there are any; ``order`` sorts the records.

    Killed in between, the parts are still there, and records that are in two files count once.
    """
    parts = sorted(path.parent.glob(_part(path, 0).name.replace(".rank0", ".rank*")))
    if not parts:
        return
    found: dict[Hashable, Record] = {}
    for file in (path, *parts):
        for record in read_records(file, key) if file.exists() else ():
            found.setdefault(key(record), record)
    records = list(found.values()) if order is None else sorted(found.values(), key=order)
    write_atomically(path, "".join(json_line(record) + "\n" for record in records))
    for part in parts:
        part.unlink()


def read_records(path: Path, key: Key) -> list[Record]:
    """Whole lines of a record file, in order; of records with the same key the first stands."""
    records: dict[Hashable, Record] = {}
    with path.open("rb") as source:  # a kill may cut through a character, too
        for number, line in enumerate(source, 1):
            if not line.endswith(b"\n"):
                break
            try:
                record = json.loads(line)
                records.setdefault(key(record), record)
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                raise UserError(
                    f"{path}, line {number}: not a record ({error}); delete the line to run it again"
                ) from None
    return list(records.values())


@contextmanager
def summarising(*journals: Journal) -> Iterator[None]:
    """Around the summary of records: one that an earlier run did not write so is the file's fault, not ours."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        files = ", ".join(str(journal.path) for journal in journals if journal.continued)
        if not files:
            raise
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{files}: a record is damaged ({what}); delete its line to run it again") from error


def trim(path: Path) -> None:
    """Cut off a last line without its line break, as a kill leaves it."""
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        kept = end
        while kept:
            start = max(0, kept - (1 << 16))
            file.seek(start)
            found = file.read(kept - start).rfind(b"\n")
            if found >= 0:
                kept = start + found + 1
                break
            kept = start
        if kept < end:
            file.truncate(kept)
            os.fsync(file.fileno())


def json_line(row: Record) -> str:
    """A JSON object in one line that has UTF-8: half a surrogate pair, as JSON data may hold it, is escaped."""
    text = json.dumps(row, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(row)
    return text
