"""``eval.json``: what a directory of predictions was made with. Another evaluation is kept out of it."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from realvr.benchmarks.records import PREDICTIONS
from realvr.errors import UserError
from realvr.files import differences, read_json, write_json

if TYPE_CHECKING:
    from realvr.benchmarks.responder import Responder

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
        write_json(path, record)
        return False
    earlier, now = _fixed(read_record(directory)), _fixed(json.loads(json.dumps(record)))
    found = [line for part in _COMPARED for line in differences(earlier.get(part, {}), now.get(part, {}), part)]
    if found:
        raise UserError(
            f"{directory} holds an evaluation made otherwise ({'; '.join(found[:4])}): name another --out, or give the "
            "same settings to continue it"
        )
    if changed := differences(earlier.get("versions", {}), now.get("versions", {}), "versions"):
        print(f"realvr: note: {directory} was begun elsewhere ({'; '.join(changed)})", file=sys.stderr)
    return True


def read_record(directory: str | Path) -> dict[str, Any]:
    """The record of a directory."""
    return read_json(Path(directory) / RECORD)


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


def versions(responder: Responder) -> dict[str, str]:
    """What the numbers were made with."""
    import torch

    from realvr import __version__

    packages = ("torch", "transformers", "tokenizers", "numpy", "pillow")
    device = getattr(getattr(responder, "backbone", None), "device", torch.device("cpu"))
    return {
        "python": platform.python_version(),
        "realvr": __version__,
        **{name: metadata.version(name) for name in packages},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    }
