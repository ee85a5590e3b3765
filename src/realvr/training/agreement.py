"""Ranks compare what they are about to train with before the first step: nodes may hold other files. No torch."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from realvr import __version__
from realvr.data import census
from realvr.errors import UserError
from realvr.training.configuration import flatten
from realvr.training.settings import TrainSettings

if TYPE_CHECKING:
    from realvr.data.sample import Sample
    from realvr.training.engine import EngineSettings, Ranks

MAY_DIFFER = ("log.", "data.workers")
"""Settings that change nothing that is trained."""
FIRST = 65536
"""Bytes of each file of a model that are compared."""
IMAGES = "images of "
PACKAGES = ("torch", "transformers")


def setting_facts(settings: TrainSettings, engine: EngineSettings) -> dict[str, Any]:
    """What must be the same on all ranks before anything is read: settings, versions, files of the model."""
    dumped = {key: value for key, value in flatten(settings.model_dump(mode="json")) if not key.startswith(MAY_DIFFER)}
    dumped |= {f"engine.{key}": value for key, value in flatten(engine.model_dump(mode="json"))}
    versions = {f"version of {name}": importlib.metadata.version(name) for name in PACKAGES}
    model = Path(settings.model.path)
    files = {f"{model / name}": fact for name, fact in model_files(model).items()}
    return {**dumped, "version of realvr": __version__, **versions, **files}


def model_files(folder: Path) -> dict[str, str]:
    """Size and a hash of the first bytes of each file of a model folder; nothing where it is no folder."""
    found = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.is_file() and not path.name.startswith("."):
            with path.open("rb") as file:
                first = hashlib.sha256(file.read(FIRST)).hexdigest()[:16]
            found[path.name] = f"{path.stat().st_size:,} bytes, beginning {first}"
    return found


def data_facts(samples: Mapping[str, Sequence[Sample]]) -> dict[str, Any]:
    """What each rank has read: rows by their content; images by their size, which one rank of each machine looks at."""
    facts: dict[str, Any] = {}
    for name, rows in samples.items():
        digest = hashlib.sha256()
        for row in rows:
            digest.update(repr((row.id, row.turns, row.answer, row.choices, row.boxes, row.response)).encode())
        facts[f"rows of {name}"] = f"{len(rows):,} with hash {digest.hexdigest()[:16]}"
        if os.environ.get("LOCAL_RANK", "0") == "0":
            sizes = census.image_stats(census.distinct_images(rows))[:, 0]
            found = f"{len(sizes):,} with sizes of hash {hashlib.sha256(sizes.tobytes()).hexdigest()[:16]}"
            facts[IMAGES + name] = found
    return facts


def agree(ranks: Ranks, facts: Mapping[str, Any]) -> str | None:
    """How the facts of the ranks differ, in one line; None where they do not. Every rank calls it."""
    common = {key: value for key, value in facts.items() if not key.startswith(IMAGES)}
    own = hashlib.sha256(json.dumps(common, sort_keys=True, default=str).encode()).hexdigest()
    said = ranks.gather_objects((own, {key: value for key, value in facts.items() if key.startswith(IMAGES)}))
    if len({each for each, _ in said}) == 1:
        return difference([each for _, each in said])
    return difference(ranks.gather_objects(common))


def difference(facts: Sequence[Mapping[str, Any]]) -> str | None:
    """The first key that two ranks do not agree on, with both values. A rank without a key of images says nothing."""
    keys = list(dict.fromkeys(key for each in facts for key in each))
    for key in keys:
        silent = key.startswith(IMAGES)
        values = [(rank, each.get(key, "missing")) for rank, each in enumerate(facts) if key in each or not silent]
        first, odd = values[0], next((pair for pair in values if pair[1] != values[0][1]), None)
        if odd is not None:
            return (
                f"the ranks would not train the same: {key} is {first[1]} on rank {first[0]} and {odd[1]} on rank "
                f"{odd[0]}; give all machines the same settings, files and versions"
            )
    return None


class RanksDiffer(UserError):
    """Ranks would train different things: all of them know, and one says it."""


def refuse_differences(ranks: Ranks, facts: Mapping[str, Any]) -> None:
    """Raise where ranks would train different things. Every rank calls it, and all raise together."""
    problem = agree(ranks, facts) if ranks.world > 1 else None
    if problem is not None:
        raise RanksDiffer(problem)
