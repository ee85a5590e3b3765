"""Rows of parquet files, a few at a time. pyarrow is imported only when a parquet file is really there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from realvr.data import reasons
from realvr.data.readers.base import Row
from realvr.data.reasons import BadRow, FileError
from realvr.data.streams import open_file

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

BATCH = 8
"""Rows decoded together: small, because a row may hold an 8K photograph."""


def _open(path: Path) -> pq.ParquetFile:
    with open_file(path):
        pass
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # A buffered stream reads a column chunk page by page; without it a chunk of 1 GB is read at once.
        return pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False)
    except (pa.ArrowException, OSError) as error:
        raise FileError(
            reasons.FILE_UNREADABLE, f"{path}: not a readable parquet file ({_first_line(error)})"
        ) from None


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0][:120] if str(error) else type(error).__name__


def columns(path: Path) -> list[str]:
    """Column names, from the footer."""
    with _open(path) as file:
        return list(file.schema_arrow.names)


def parquet_rows(path: Path, wanted: Sequence[str]) -> Iterator[Row]:
    """Rows as dictionaries of the ``wanted`` columns that exist. Damage in the middle counts for every row it costs."""
    import pyarrow as pa

    with _open(path) as file:
        present = [name for name in wanted if name in file.schema_arrow.names]
        total = file.metadata.num_rows
        number = 0
        batches = file.iter_batches(batch_size=BATCH, columns=present, use_threads=False)
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            except (pa.ArrowException, OSError) as error:
                damage = BadRow(reasons.FILE_UNREADABLE, f"damaged parquet data ({_first_line(error)})")
                yield Row(number + 1, error=damage, count=total - number, progress=1.0)
                return
            for index in range(batch.num_rows):
                number += 1
                yield _cells(batch, index, present, number, number / total)


def _cells(batch: pa.RecordBatch, index: int, names: list[str], number: int, progress: float) -> Row:
    row: dict[str, Any] = {}
    for name in names:
        try:
            row[name] = batch.column(name)[index].as_py()
        except UnicodeDecodeError:
            return Row(number, error=BadRow(reasons.NOT_UTF8, f"column {name!r} is not UTF-8"), progress=progress)
    return Row(number, row, progress=progress)
