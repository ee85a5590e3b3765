"""``eval.json``: what a directory of predictions was made with. Another evaluation is kept out of it."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from realvr.errors import UserError
from realvr.evaluation.records import PREDICTIONS
from realvr.evaluation.results import EVAL_FILE, EvalRecord
from realvr.runs.files import differences
from realvr.runs.folder import RunFolder
from realvr.runs.guard import note

if TYPE_CHECKING:
    from realvr.evaluation.responder import Responder

RECORD = "eval.json"
_COMPARED = ("responder", "benches", "settings", "answers")


def claim(directory: Path, record: Mapping[str, Any]) -> bool:
    """Write the record, or compare it with the one that is there; True where an earlier run is continued.

    A `UserError` names what differs.
    """
    if not (directory / RECORD).exists() and (directory / PREDICTIONS).exists():
        raise UserError(f"{directory} holds {PREDICTIONS} without {RECORD}; name another --out")
    now = json.loads(json.dumps(record))
    earlier = RunFolder(directory).claim(RECORD, now, partial(_refusal, directory), EVAL_FILE)
    if earlier is None:
        return False
    if changed := differences(earlier.get("versions", {}), now.get("versions", {}), "versions"):
        note(f"{directory} was begun elsewhere ({'; '.join(changed)})")
    _extend(directory / RECORD, earlier, now)
    return True


def _refusal(directory: Path, before: dict[str, Any], after: dict[str, Any]) -> str | None:
    """Why an evaluation cannot go on in a directory."""
    earlier, now = _fixed(before), _fixed(after)
    # Records of earlier versions name no parser and no judge.
    compared = [part for part in _COMPARED if part != "answers" or part in earlier]
    changes = _other_model(before, after, earlier, now)
    changes += [line for part in compared for line in differences(earlier.get(part, {}), now.get(part, {}), part)]
    if moved := _renamed(earlier["benches"], now["benches"]):
        old, new = moved
        return f"{directory} holds an evaluation of {old}, which is called {new} now: name another --out"
    if not changes:
        return None
    return (
        f"{directory} holds an evaluation made otherwise ({'; '.join(changes[:4])}): name another --out, or give the "
        "same settings to continue it"
    )


def _other_model(
    before: Mapping[str, Any], after: Mapping[str, Any], earlier: dict[str, Any], now: dict[str, Any]
) -> list[str]:
    """Another model in words, by its name instead of a hash of its weights, which ``earlier`` and ``now`` then lack."""
    old, new = ({**record.get("responder", {})} for record in (before, after))
    if not old.get("weights") or not new.get("weights") or old["weights"] == new["weights"]:
        return []
    for record in (earlier, now):
        del record["responder"]["weights"]
    was, now_is = (str(one.get("path") or one.get("name")) for one in (old, new))
    return [f"model was {was}, now {now_is}" if was != now_is else f"the weights of {was} are others now"]


def _extend(path: Path, earlier: dict[str, Any], now: dict[str, Any]) -> None:
    """Add what records of earlier versions lack: the facts about the sets, and conditions that were added since."""
    conditions = now.get("settings", {}).get("conditions")
    if earlier.get("sets") != now.get("sets") or earlier.get("settings", {}).get("conditions") != conditions:
        settings = earlier.get("settings", {}) | {"conditions": conditions}
        EVAL_FILE.dump(path, cast(EvalRecord, earlier | {"sets": now.get("sets", {}), "settings": settings}))


def read_record(directory: str | Path) -> EvalRecord:
    """The record of a directory."""
    return EVAL_FILE.load(Path(directory) / RECORD)


def _fixed(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record without what may change: a model known by its weights, or a dataset, may have been moved; conditions
    follow from the other settings, and a run that lacks one of today's gets it."""
    responder = dict(record.get("responder", {}))
    responder.pop("name", None)
    if responder.get("weights"):
        responder.pop("path", None)
    benches = {
        name: {key: value for key, value in facts.items() if key != "path"}
        for name, facts in record.get("benches", {}).items()
    }
    settings = {name: value for name, value in record.get("settings", {}).items() if name != "conditions"}
    return {**record, "responder": responder, "benches": benches, "settings": settings}


def _renamed(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, str] | None:
    """(old name, new name) of the same questions."""
    for new, facts in now.items():
        for old, known in earlier.items():
            if new not in earlier and old not in now and known.get("sha256") == facts["sha256"]:
                return old, new
    return None


def versions(responder: Responder) -> dict[str, str]:
    """What the numbers were made with."""
    import torch

    from realvr import __version__

    packages = ("torch", "transformers", "tokenizers", "numpy", "pillow")
    backbone = getattr(responder, "backbone", None)
    devices = getattr(backbone, "devices", [torch.device("cpu")])
    fused = backbone is not None and getattr(backbone, "fused_layers", False)
    names = [torch.cuda.get_device_name(one) if one.type == "cuda" else one.type for one in devices]
    return {
        "python": platform.python_version(),
        "realvr": __version__,
        **{name: metadata.version(name) for name in packages},
        "device": names[0] if len(names) == 1 else f"{len(names)} x {names[0]}",
        **({"layers": "fused"} if fused else {}),
    }
