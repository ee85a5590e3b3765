"""SHA-256 of files, and of the weights of a saved model. Streamed: no file is held in memory. No torch."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from realvr.runs.files import write_atomically

WEIGHTS = "weights.sha256"
"""Lists the weight files of a saved model in the format of ``sha256sum``, which can check it too."""

_LINE = re.compile(r"(?P<digest>[0-9a-fA-F]{64}) [ *](?P<name>.+)")


def digests(files: Iterable[Path]) -> dict[str, str]:
    """SHA-256 of each file by its name, several at a time: hashing leaves the interpreter free."""
    found = sorted(files)
    with ThreadPoolExecutor(max_workers=4) as pool:
        return dict(zip((file.name for file in found), pool.map(_digest, found), strict=True))


def _digest(file: Path) -> str:
    with file.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def difference(before: dict[str, str], now: dict[str, str]) -> str | None:
    """How recorded files differ from those there are, in words; None where they are the same."""
    if missing := sorted(before.keys() - now.keys()):
        return f"{missing[0]} is missing"
    if extra := sorted(now.keys() - before.keys()):
        return f"{extra[0]} was not there when it was saved"
    if changed := [name for name in sorted(now) if before[name] != now[name]]:
        return f"{changed[0]} is not the file that was saved (its SHA-256 differs)"
    return None


def record_weights(directory: Path) -> None:
    """Write the hashes of the weight files of a model folder."""
    lines = [f"{digest}  {name}\n" for name, digest in digests(directory.glob("*.safetensors")).items()]
    write_atomically(directory / WEIGHTS, "".join(lines))


def changed_weights(directory: Path) -> str | None:
    """A message where the weights of a model folder are not those that were saved; None where they are, or where
    nothing was recorded."""
    try:
        lines = (directory / WEIGHTS).read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{directory / WEIGHTS} cannot be read ({error.strerror}), so the weights were not checked"
    read = {number: _LINE.fullmatch(line) for number, line in enumerate(lines, 1) if line.strip()}
    unread = next((f", line {number}," for number, found in read.items() if found is None), "" if not read else None)
    if unread is not None:
        return (
            f"{directory / WEIGHTS}{unread} holds no SHA-256 hash, so the weights were not checked; write it again "
            f"(sha256sum *.safetensors > {WEIGHTS}) or remove it"
        )
    before = {found["name"]: found["digest"].lower() for found in read.values() if found}
    found = difference(before, digests(directory.glob("*.safetensors")))
    if found is None:
        return None
    return (
        f"{directory}: {found}: the weights were changed or mixed with those of another checkpoint; remove {WEIGHTS} "
        "if that is intended"
    )


def fingerprint(folder: Path) -> str:
    """SHA-256 over names and sizes of the weight files and the bytes of their first and last megabyte; empty where
    there is none. Enough to tell two checkpoints apart without reading hundreds of gigabytes."""
    digest = hashlib.sha256()
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as source:
            digest.update(source.read(1 << 20))
            source.seek(max(size - (1 << 20), 0))
            digest.update(source.read(1 << 20))
    return digest.hexdigest() if files else ""
