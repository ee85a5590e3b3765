"""Files of a diagnostic: the settings that its records were made with, and tables. Nothing here imports torch."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from realvr.errors import UserError
from realvr.runs.files import differences, read_json, write_atomically, write_json


def claim(folder: Path, name: str, settings: dict[str, Any], added: Collection[str] = ()) -> None:
    """Remember the settings in ``folder/name``; refuse a folder whose records were made with others. What an earlier
    version did not write (``added``) is not compared."""
    note = folder / name
    settings = json.loads(json.dumps(settings))
    try:
        if note.exists():
            changes = differences({name: settings[name] for name in added} | read_json(note), settings)
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
