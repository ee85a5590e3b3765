"""Files that survive a kill, records that are read back, and what differs between two of them. No torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from realvr.errors import UserError

Json = Any
"""A JSON value whose shape whoever reads it checks."""


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, have reached the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """What the operating system refuses inside names the file: of a failed write or sync it does not say which."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def write_atomically(path: Path, data: str | bytes) -> None:
    """The file is there whole or not at all, even after a kill, a power cut or on a full disk."""
    temporary = path.with_name(path.name + ".tmp")
    with naming(path):
        try:
            with temporary.open("wb") as target:
                target.write(data.encode() if isinstance(data, str) else data)
                target.flush()
                os.fsync(target.fileno())
            publish(temporary, path)
        except OSError:
            with suppress(OSError):
                temporary.unlink()  # half a file only takes the space that is missing
            raise


def publish(part: Path, path: Path) -> None:
    """Give what was written under another name, a file or a folder, its own: whole or not at all."""
    with naming(path):
        os.replace(part, path)
        sync(path.parent)


def write_json(path: Path, content: object) -> None:
    """Write a JSON file, whole or not at all, in a folder that is made where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(content, indent=2) + "\n")


def read_json(path: Path, remedy: str = "write it again with the command that made it") -> dict[str, Any]:
    """The object in a JSON file; ``remedy`` is what to do where it is damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: damaged ({error}); {remedy}") from None
    if not isinstance(found, dict):
        raise UserError(f"{path}: a JSON object is expected; {remedy}")
    return found


def differences(before: object, now: object, name: str = "") -> list[str]:
    """What differs between two records, in words, value by value."""
    if isinstance(before, dict) and isinstance(now, dict):
        keys = [*before, *(key for key in now if key not in before)]
        return [
            line for key in keys for line in differences(before.get(key), now.get(key), f"{name}.{key}".lstrip("."))
        ]
    return [] if before == now else [f"{name} was {_short(before)}, now {_short(now)}"]


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "…"
