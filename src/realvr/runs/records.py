"""Typed result files. Each kind of file has one shape, and is written and read through it; nothing checks it again.

The shape of a file is a TypedDict beside the code that writes it, so the content is a plain dict of JSON values, and
mypy knows its keys. What a file is damaged in is one line that names the file. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import InstanceOf, TypeAdapter, ValidationError

from realvr.errors import UserError
from realvr.runs.files import Json, read_json, write_json

T = TypeVar("T")
Text = InstanceOf[str]
"""Any string, looked at no further: a file name may hold half a surrogate pair."""


@dataclass(frozen=True)
class ResultFile(Generic[T]):
    """One kind of result file.

    ``shape`` is the type of its content, ``version`` the newest that this code writes and reads (0: the file has none),
    ``command`` what writes it, ``remedy`` what to do about a damaged one. ``check`` may raise ValueError for what types
    cannot say, such as a row that two tables must share.
    """

    shape: type[T]
    command: str
    remedy: str
    version: int = 0
    check: Callable[[T], None] | None = field(default=None, repr=False)
    author: str = "realvr"
    """Who writes such files, in messages about damaged ones."""

    def load(self, path: Path) -> T:
        """The content of a file."""
        return self.parse(read_json(path, self.remedy), path)

    def dump(self, path: Path, content: T) -> None:
        """Write a file, whole or not at all."""
        self.validate(json.loads(json.dumps(content)))  # as it will be read
        write_json(path, content)

    def parse(self, content: Json, path: Path) -> T:
        """JSON that was read from ``path``, as its type."""
        self._refuse_newer(content, path)
        try:
            return self.validate(content)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"]))
            if first["type"] == "missing" and len(first["loc"]) == 1:
                raise UserError(
                    f"{path}: has no '{where}', so it is not what {self.command} writes; write it again or move it away"
                ) from None
            what = f"{_short(where)}: {first['msg']}" if where else str(first["msg"])
        except (ValueError, RecursionError, OverflowError) as error:
            what = str(error)
        raise UserError(f"{path}: not what {self.author} writes ({what}); {self.remedy}")

    def validate(self, content: Json) -> T:
        """The same content as its type, further keys included; ValueError where it is not of that type."""
        self._adapter.validate_python(content, strict=True)
        if self.check is not None:
            self.check(content)
        return content  # type: ignore[no-any-return]

    @cached_property
    def _adapter(self) -> TypeAdapter[T]:
        return TypeAdapter(self.shape)

    def _refuse_newer(self, content: object, path: Path) -> None:
        found = content.get("version") if isinstance(content, dict) else None
        if self.version and type(found) is int and found > self.version:
            raise UserError(
                f"{path}: version {found}, written by a newer realvr; this one reads up to {self.version}: update it"
            )


def _short(text: str) -> str:
    return text if len(text) <= 120 else text[:117] + "…"
