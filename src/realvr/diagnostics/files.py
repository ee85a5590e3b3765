"""Tables as files: CSV and Markdown. Nothing here imports torch."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from realvr.runs.files import write_atomically


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
