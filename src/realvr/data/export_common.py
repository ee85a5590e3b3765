"""What all writers share: saving images, streaming JSON arrays, and refusing what a layout cannot hold."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, TextIO

from realvr.data.sample import ImageRef, Sample
from realvr.errors import UserError

_SIGNATURES = ((b"\x89PNG", ".png"), (b"\xff\xd8\xff", ".jpg"), (b"GIF8", ".gif"), (b"BM", ".bmp"), (b"II*", ".tiff"))


class CannotHold(Exception):
    """A sample that the target layout has no place for."""


@dataclass
class Written:
    """What an export did."""

    files: list[Path] = field(default_factory=list)
    rows: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    """Samples that the layout cannot hold, by why."""
    lost: Counter[str] = field(default_factory=Counter)
    """Parts of written samples that the layout has no place for, such as boxes."""
    linked: int = 0
    """Image files that were linked, not copied."""


def suffix_of(data: bytes) -> str:
    """File extension of encoded image bytes."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return ".webp"
    return next((suffix for start, suffix in _SIGNATURES if data.startswith(start)), ".img")


class ImageStore:
    """Saves encoded images unchanged under ``root / folder``, each distinct image once.

    With ``link``, image files are linked and not even read: hard links, or symbolic ones on another file system. Images
    that are no files are written all the same.
    """

    def __init__(self, written: Written, link: bool = False, folder: str = "images") -> None:
        self.written = written
        self.root = written.files[0].parent
        self.link = link
        self.folder = folder
        self.names: dict[str, str] = {}
        self.last: tuple[ImageRef, str] | None = None

    def save(self, image: ImageRef) -> str:
        """Name relative to ``root``. The image's own name is kept where it is a plain relative path."""
        if self.last is not None and self.last[0] == image:
            return self.last[1]
        if self.link and image.path is not None and os.path.isfile(image.path):
            self.last = (image, self._linked(image.id, image.path))
            return self.last[1]
        data = image.read()
        digest = hashlib.sha256(data).hexdigest()
        if digest not in self.names:
            name = self._own_name(image.id, data) or f"{self.folder}/{digest[:20]}{suffix_of(data)}"
            target = self.root / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
            self.names[digest] = name
        self.last = (image, self.names[digest])
        return self.names[digest]

    def _linked(self, name: str, path: Path) -> str:
        source = path.resolve()
        if str(source) in self.names:
            return self.names[str(source)]
        own = self._plain_name(name)
        if own is None or not self._free_for(self.root / own, source):
            own = f"{self.folder}/{hashlib.sha256(str(source).encode()).hexdigest()[:20]}{source.suffix}"
        target = self.root / own
        target.parent.mkdir(parents=True, exist_ok=True)
        if not (target.exists() and target.samefile(source)):
            target.unlink(missing_ok=True)
            try:
                os.link(source, target)
            except OSError:  # another file system, or one without hard links
                target.symlink_to(source)
        self.written.linked += 1
        self.names[str(source)] = own
        return own

    @staticmethod
    def _free_for(target: Path, source: Path) -> bool:
        return not target.is_symlink() and not target.exists() or (target.exists() and target.samefile(source))

    def _own_name(self, name: str, data: bytes) -> str | None:
        own = self._plain_name(name)
        # A different image of the same name, from this export or an earlier one in the same folder, is not overwritten.
        if own is None or ((self.root / own).exists() and (self.root / own).read_bytes() != data):
            return None
        return own

    def _plain_name(self, name: str) -> str | None:
        """The image's own name under ``folder``, where it is a plain relative path of an image."""
        path = PurePosixPath(name)
        plain = not path.is_absolute() and ".." not in path.parts and "#" not in name and "\\" not in name
        if not plain or path.suffix.lower() not in (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tiff"):
            return None
        return str(path if path.parts[0] == self.folder else self.folder / path)


@contextmanager
def json_array(path: Path) -> Iterator[JsonArray]:
    """A JSON array that is written element by element."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        array = JsonArray(file)
        file.write("[")
        yield array
        file.write("\n]\n")


class JsonArray:
    """Appends elements to an open JSON array."""

    def __init__(self, file: TextIO) -> None:
        self.file = file
        self.first = True

    def add(self, row: dict[str, Any]) -> None:
        """Write one element, on one line."""
        self.file.write(("\n" if self.first else ",\n") + json.dumps(row, ensure_ascii=False))
        self.first = False


def each(samples: Iterable[Sample], written: Written, strict: bool, row: Callable[[Sample], object]) -> None:
    """Apply ``row(sample)`` to every sample; those that raise `CannotHold` are counted, or stop a strict export."""
    for sample in samples:
        try:
            row(sample)
        except CannotHold as error:
            if strict:
                raise UserError(f"sample {sample.id!r}: {error}; choose another layout") from None
            written.skipped[str(error)] += 1
        else:
            written.rows += 1


def single_question(sample: Sample, layout: str) -> None:
    """Refuse conversations in layouts that hold one question."""
    if len(sample.turns) != 1 or sample.turns[0].images != tuple(range(len(sample.images))):
        raise CannotHold(f"{layout} holds one question, not a conversation")


def count_lost(sample: Sample, written: Written, *fields: str) -> None:
    """Count the non-empty fields of a sample that the layout drops."""
    for name in fields:
        if getattr(sample, name):
            written.lost[name] += 1
