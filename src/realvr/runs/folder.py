"""A run's folder: kept by one process, with a record of what fills it, so that two runs are never mixed. No torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from realvr.errors import UserError
from realvr.runs import lock
from realvr.runs.files import differences, read_json, write_json
from realvr.runs.records import ResultFile

Content = dict[str, Any]


class RunFolder:
    """A folder of results. ``claim`` says what they are made with."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def claim(
        self,
        name: str,
        content: Mapping[str, Any],
        refuse: Callable[[Content, Content], str | None] | None = None,
        file: ResultFile[Any] | None = None,
    ) -> Content | None:
        """Write the record ``name``; where there is one, return it, or raise `UserError` if it says otherwise.

        ``refuse`` compares the record that is there with the new one and returns why the folder cannot be used.
        ``file`` is the type of the record, where it has one.
        """
        note, now = self.path / name, json.loads(json.dumps(content))
        try:
            if not note.exists():
                file.dump(note, now) if file else write_json(note, now)
                return None
            before: Content = {**(file.load(note) if file else read_json(note, "name another folder"))}
        except OSError as error:
            raise UserError(f"{note}: cannot be used ({error})") from None
        reason = self.differs(before, now) if refuse is None else refuse(before, now)
        if reason:
            raise UserError(reason)
        return before

    def differs(self, before: Content, now: Content) -> str | None:
        """Why the results of two records cannot be mixed."""
        changes = differences(before, now)
        if not changes:
            return None
        return (
            f"{self.path} holds results with other settings ({'; '.join(changes[:4])}): "
            "name another --out, or remove the folder to start again"
        )

    def content(self) -> list[Path]:
        """What is in the folder, except its lock."""
        return [path for path in self.path.iterdir() if not path.name.startswith(lock.NAME)]

    def refuse_foreign(self, name: str, reason: str) -> None:
        """Raise where the folder holds something and no record ``name``: it is not one of ours."""
        if self.path.is_dir() and not (self.path / name).exists() and self.content():
            raise UserError(reason)

    def forget(self, name: str) -> None:
        """Take back a claim that came to nothing, so that the same folder can be used with other settings."""
        if [path.name for path in self.content()] == [name]:
            (self.path / name).unlink()


@contextmanager
def open_run_folder(folder: str | Path, verb: str, take_over: bool = False) -> Iterator[RunFolder]:
    """Keep a folder for this process, and make it where it is missing. A verb inside a verb may open it again.

    ``take_over`` is the user's word that an owner on another machine is gone.
    """
    with lock.hold(folder, verb, take_over):
        yield RunFolder(folder)
