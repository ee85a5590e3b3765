"""Rows of parquet files, a few at a time. pyarrow is imported only when a parquet file is really there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from realvr.data import reasons
from realvr.data.readers.base import Row
from realvr.data.reasons import BadRow, FileError
from realvr.data.streams import open_file
from realvr.data.tables import unambiguous

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

BATCH_BYTES = 8 << 20
"""How much is decoded together. A row may hold an 8K photograph, or two words."""


def _open(path: Path) -> pq.ParquetFile:
    with open_file(path):
        pass
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # A buffered stream reads a column chunk page by page; without it a chunk of 1 GB is read at once.
        return pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise FileError(
            reasons.FILE_UNREADABLE, f"{path}: not a readable parquet file ({_first_line(error)})"
        ) from None


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0][:120] if str(error) else type(error).__name__


def files_in(folder: Path) -> list[Path]:
    """Parquet files of a folder and two levels below: deep enough for every published tree, safe on a home folder."""
    return sorted(file for pattern in ("*", "*/*", "*/*/*") for file in folder.glob(f"{pattern}.parquet"))


def columns(path: Path) -> list[str]:
    """Column names, from the footer."""
    with _open(path) as file:
        return _names(path, file)


def _names(path: Path, file: pq.ParquetFile) -> list[str]:
    """Column names, each of which must occur once."""
    try:
        return unambiguous(path, list(file.schema_arrow.names))
    except UnicodeDecodeError:
        raise FileError(reasons.NOT_UTF8, f"{path}: the column names are not UTF-8") from None


def parquet_rows(path: Path, wanted: Sequence[str]) -> Iterator[Row]:
    """Rows as dictionaries of the ``wanted`` columns that exist. Damage in the middle counts for every row it costs."""
    import pyarrow as pa

    with _open(path) as file:
        names = _names(path, file)
        present = [name for name in wanted if name in names]
        total = file.metadata.num_rows
        number = 0
        row_bytes = sum(file.metadata.row_group(i).total_byte_size for i in range(file.num_row_groups)) / max(1, total)
        size = max(1, min(1024, int(BATCH_BYTES / max(1.0, row_bytes))))
        batches = file.iter_batches(batch_size=size, columns=present, use_threads=False)
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                if number < total:
                    damage = BadRow(reasons.FILE_UNREADABLE, f"the file promises {total} rows and holds {number}")
                    yield Row(number + 1, error=damage, count=total - number, progress=1.0)
                return
            except (pa.ArrowException, OSError) as error:
                damage = BadRow(reasons.FILE_UNREADABLE, f"damaged parquet data ({_first_line(error)})")
                yield Row(number + 1, error=damage, count=max(1, total - number), progress=1.0)
                return
            for index in range(batch.num_rows):
                number += 1
                yield _cells(batch, index, present, number, min(1.0, number / max(1, total)))


def _cells(batch: pa.RecordBatch, index: int, names: list[str], number: int, progress: float) -> Row:
    import pyarrow as pa

    row: dict[str, Any] = {}
    for name in names:
        try:
            row[name] = batch.column(name)[index].as_py()
        except UnicodeDecodeError:
            return Row(number, error=BadRow(reasons.NOT_UTF8, f"column {name!r} is not UTF-8"), progress=progress)
        except (ArithmeticError, LookupError, TypeError, ValueError, pa.ArrowException) as error:
            # Times outside Python's range, unknown time zones, duplicate names in a struct, types without a value.
            detail = f"column {name!r} holds a value that cannot be converted ({_first_line(error)})"
            return Row(number, error=BadRow(reasons.CELL_UNREADABLE, detail), progress=progress)
    return Row(number, row, progress=progress)


class ParquetSink:
    """Writes rows to a parquet file, a group at a time, so that images do not pile up in memory.

    Types are arrow type names; ``image`` is the usual struct of bytes and path.
    """

    GROUP_ROWS = 1024
    GROUP_BYTES = 32 << 20

    def __init__(self, path: Path, types: dict[str, str]) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        special = {
            "list<string>": pa.list_(pa.string()),
            "image": pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
        }
        fields = [(name, special.get(kind) or pa.type_for_alias(kind)) for name, kind in types.items()]
        self.schema = pa.schema(fields)
        self.pending: list[dict[str, Any]] = []
        self.weight = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        # Dictionaries only pay for short repeated text, and a dictionary of photographs is held in memory.
        plain = [name for name, kind in types.items() if kind == "string" and name != "image"]
        self.writer = pq.ParquetWriter(path, self.schema, use_dictionary=plain)

    def add(self, row: dict[str, Any]) -> None:
        """Queue one row."""
        self.pending.append(row)
        cells = [cell.get("bytes") if isinstance(cell, dict) else cell for cell in row.values()]
        self.weight += sum(len(cell) for cell in cells if isinstance(cell, str | bytes))
        if len(self.pending) >= self.GROUP_ROWS or self.weight >= self.GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        import pyarrow as pa

        if self.pending:
            self.writer.write_table(pa.Table.from_pylist(self.pending, schema=self.schema))
            self.pending.clear()
            self.weight = 0

    def __enter__(self) -> ParquetSink:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._flush()
        self.writer.close()
