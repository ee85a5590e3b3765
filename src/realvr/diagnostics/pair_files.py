"""Files of a pair evaluation: records appended as they come, the settings they were made with, and tables.

A record file survives a kill at any moment: a batch of lines is written and synced at once, and a last line without a
line break is cut off before anything is appended. Nothing here imports torch.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from realvr.errors import UserError
from realvr.evaluation.records import json_line
from realvr.evaluation.store import trim
from realvr.runs.files import differences, read_json, write_atomically, write_json

Record = dict[str, Any]


class Journal:
    """A JSONL file of records with distinct keys, to be continued after a kill.

    ``key`` gives the key of a record; what has one already is not written again.
    """

    def __init__(self, path: Path, key: Callable[[Record], Hashable]) -> None:
        self.path = path
        self.key = key
        self.records = read_records(path, key) if path.exists() else []
        self.done = {key(record) for record in self.records}
        self.continued = bool(self.records)
        """Whether an earlier run wrote some of the records."""
        if path.exists():
            trim(path)

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


def read_records(path: Path, key: Callable[[Record], Hashable]) -> list[Record]:
    """Whole lines of a record file, in order; of records with the same key the first stands."""
    found: dict[Hashable, Record] = {}
    with path.open("rb") as source:  # a kill may cut through a character, too
        for number, line in enumerate(source, 1):
            if not line.endswith(b"\n"):
                break
            try:
                record = json.loads(line)
                found.setdefault(key(record), record)
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                raise UserError(
                    f"{path}, line {number}: not a record ({error}); delete the line to run it again"
                ) from None
    return list(found.values())


def claim(folder: Path, name: str, settings: dict[str, Any]) -> None:
    """Remember the settings in ``folder/name``; refuse a folder whose records were made with others."""
    note = folder / name
    settings = json.loads(json.dumps(settings))
    try:
        if note.exists():
            changes = differences(read_json(note), settings)
            if changes:
                raise UserError(
                    f"{folder} holds results with other settings ({'; '.join(changes[:4])}): "
                    "name another --out, or remove the folder to start again"
                )
            return
        folder.mkdir(parents=True, exist_ok=True)
        write_json(note, settings)
    except OSError as error:
        raise UserError(f"{note}: cannot be used ({error})") from None


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """One line per row; the columns are those of all rows, in order of appearance."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    target = io.StringIO(newline="")
    writer = csv.DictWriter(target, columns)
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, target.getvalue())


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"
