"""``eval.json``: what a directory of predictions was made with. Another evaluation is kept out of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from realvr.benchmarks.records import PREDICTIONS
from realvr.benchmarks.store import write_atomically
from realvr.errors import UserError

RECORD = "eval.json"
_COMPARED = ("responder", "benches", "settings")


def claim(directory: Path, record: Mapping[str, Any]) -> bool:
    """Write the record, or compare it with the one that is there; True where an earlier run is continued.

    A `UserError` names what differs.
    """
    path = directory / RECORD
    if not path.exists():
        if (directory / PREDICTIONS).exists():
            raise UserError(f"{directory} holds {PREDICTIONS} without {RECORD}; name another --out")
        write_atomically(path, json.dumps(record, indent=2, ensure_ascii=True) + "\n")
        return False
    earlier, now = _fixed(read_record(directory)), _fixed(json.loads(json.dumps(record)))
    found = [
        difference for part in _COMPARED for difference in _differences(part, earlier.get(part, {}), now.get(part, {}))
    ]
    if found:
        raise UserError(
            f"{directory} holds an evaluation made otherwise ({'; '.join(found[:4])}): name another --out, or give the "
            "same settings to continue it"
        )
    if changed := list(_differences("versions", earlier.get("versions", {}), now.get("versions", {}))):
        print(f"realvr: note: {directory} was begun elsewhere ({'; '.join(changed)})", file=sys.stderr)
    return True


def read_record(directory: str | Path) -> dict[str, Any]:
    """The record of a directory."""
    path = Path(directory) / RECORD
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(found, dict):
        raise UserError(f"{path}: an object is expected")
    return found


def _fixed(record: dict[str, Any]) -> dict[str, Any]:
    """The record without what may change: a model known by its weights, or a dataset, may have been moved."""
    responder = dict(record.get("responder", {}))
    responder.pop("name", None)
    if responder.get("weights"):
        responder.pop("path", None)
    benches = {
        name: {key: value for key, value in facts.items() if key != "path"}
        for name, facts in record.get("benches", {}).items()
    }
    return record | {"responder": responder, "benches": benches}


def _differences(name: str, before: Any, now: Any) -> Iterator[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in [*before, *(key for key in now if key not in before)]:
            yield from _differences(f"{name}.{key}", before.get(key), now.get(key))
    elif before != now:
        yield f"{name} was {_short(before)}, is {_short(now)}"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "…"
