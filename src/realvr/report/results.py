"""What a report is made of: the results of one model after the other, as the other commands left them on the disk."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from realvr.errors import UserError
from realvr.runs.files import read_json

Kind = Literal["train", "eval", "sweep", "counterfactual", "exchange", "grounding"]
KINDS: tuple[Kind, ...] = ("train", "eval", "sweep", "counterfactual", "exchange", "grounding")
AGAIN = {
    "train": "train the model again",
    "eval": "compute it again with realvr score",
    "sweep": "compute it again with realvr score",
    "counterfactual": "run realvr counterfactual again, it keeps its answers",
    "exchange": "run realvr exchange again, it keeps its answers",
    "grounding": "remove the folder and run realvr demo again",
}
Json = dict[str, Any]


@dataclass(frozen=True)
class Result:
    """One folder that a command wrote."""

    kind: Kind
    folder: Path
    content: Json
    """summary.json (or summary.POLICY.json), counterfactual.json or exchange.json; of a training run ``{"steps":
    lines of metrics.jsonl}``."""
    settings: Json
    """eval.json, counterfactual_settings.json, exchange_settings.json or settings.yaml; empty where there is none."""
    file: Path

    @property
    def model(self) -> Json:
        """What answered: name, path, weights (a hash), family, latents, …"""
        found = self.settings.get("responder" if self.kind in ("eval", "sweep") else "model")
        return found if isinstance(found, dict) else {}

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Turn whatever damaged content does to a reader into one line that names the file."""
        try:
            yield
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            what = f"{type(error).__name__}: {error}"
            raise UserError(f"{self.file}: not what realvr writes ({what}); {AGAIN[self.kind]}") from None


@dataclass
class Arm:
    """One model of the comparison and what is known about it."""

    name: str
    main: bool = True
    """Part of the headline comparison; the others are shown as further arms."""
    results: dict[Kind, Result] = field(default_factory=dict)
    number: int = 0
    """Place in the report, which decides its colour."""

    def get(self, kind: Kind) -> Result | None:
        return self.results.get(kind)


@dataclass
class Results:
    """Everything found, arms in display order."""

    arms: list[Arm]
    notes: list[str] = field(default_factory=list)
    """What the demo has to say about its numbers."""
    demo: bool = False
    unfinished: list[Path] = field(default_factory=list)
    """Folders of evaluations without a summary."""
    policy: str | None = None
    """The policy that was asked for; None: each run's own."""

    def having(self, *kinds: Kind) -> list[Arm]:
        """Arms that have at least one of these."""
        return [arm for arm in self.arms if any(kind in arm.results for kind in kinds)]


# ---------------------------------------------------------------------- files


def read_settings(path: Path) -> Json:
    """settings.yaml of a training run, or the JSON record of an evaluation; empty where there is no such file."""
    if not path.is_file():
        return {}
    if path.suffix != ".yaml":
        return read_json(path)
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{path}: damaged ({' '.join(str(error).split())})") from None
    return found if isinstance(found, dict) else {}


def read_steps(path: Path) -> list[Json]:
    """Steps of a metrics.jsonl, in order. A last line that a kill cut short is left out."""
    steps = []
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None
    for number, line in enumerate(lines[:-1], 1):  # behind the last line break there is nothing, or half a line
        try:
            step = json.loads(line)
            steps.append(step | {"step": int(step["step"])})
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
            raise UserError(f"{path}, line {number}: not the metrics of a step ({error}); delete the line") from None
    return steps
