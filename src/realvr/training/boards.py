"""Where the metrics of a run go beside its ``metrics.jsonl``: TensorBoard, Weights & Biases, trackio (``log.to``).

A board gets the scalars of every step, from the main process only. The names under which a run is known to others are
kept in ``trackers.json`` of its folder, so that a resumed run goes on where it stood instead of beginning another.
"""

from __future__ import annotations

import math
import sys
import uuid
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import yaml
from typing_extensions import TypedDict

from realvr.errors import UserError, require
from realvr.runs.records import ResultFile, Text
from realvr.training.records import SETTINGS

IDENTITIES = "trackers.json"


class Identities(TypedDict):
    """The content of ``trackers.json``."""

    runs: dict[Text, Text]
    """Name of the board -> id of the run there."""


IDENTITIES_FILE = ResultFile(Identities, "realvr train", "remove it, the run then goes on as a new one in its trackers")


class Board(Protocol):
    """Takes the scalars of one run."""

    def add(self, step: int, values: dict[str, float]) -> None:
        """The scalars of one step."""

    def close(self) -> None:
        """Finish what was written."""


@dataclass(frozen=True)
class Place:
    """What a board may know about its run."""

    out: Path
    project: str
    identity: str
    """The same in every process of the run."""
    first: int
    """The step that comes next; earlier records of it and of later ones are superseded."""

    def settings(self) -> dict[str, Any]:
        """The resolved settings of the run."""
        file = self.out / SETTINGS
        return dict(yaml.safe_load(file.read_text(encoding="utf-8"))) if file.is_file() else {}


class WandbBoard:
    """A run of Weights & Biases. ``WANDB_MODE=offline`` keeps it in ``run.out/wandb``."""

    def __init__(self, place: Place) -> None:
        import wandb

        self._run = wandb.init(
            project=place.project,
            name=place.out.resolve().name,
            id=place.identity,
            resume="allow",
            dir=place.out,
            config=place.settings(),
            settings=wandb.Settings(console="off", silent=True),  # the console is ours
        )

    def add(self, step: int, values: dict[str, float]) -> None:
        """The finite scalars of one step."""
        self._run.log({name: value for name, value in values.items() if math.isfinite(value)}, step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class TrackioBoard:
    """A run of trackio, in its own folder (``TRACKIO_DIR``) or wherever ``TRACKIO_SPACE_ID`` says."""

    def __init__(self, place: Place) -> None:
        import trackio

        with redirect_stdout(sys.stderr):  # what a verb prints there is its result
            self._run = trackio.init(
                project=place.project,
                name=f"{place.out.resolve().name}-{place.identity}",
                resume="allow",
                config=place.settings(),
                embed=False,
            )

    def add(self, step: int, values: dict[str, float]) -> None:
        """The finite scalars of one step."""
        self._run.log({name: value for name, value in values.items() if math.isfinite(value)}, step=step)

    def close(self) -> None:
        """Finish the run."""
        import trackio

        with redirect_stdout(sys.stderr):
            trackio.finish()  # not that of the run, which trackio would finish once more when the process ends


def _tensorboard(place: Place) -> Board:
    from realvr.training.tensorboard_files import TensorBoard

    return TensorBoard(place.out / "tensorboard", place.first)


@dataclass(frozen=True)
class Kind:
    """A kind of board: the package it needs, the extra that installs it, and what opens it."""

    package: str
    extra: str
    open: Callable[[Place], Board]
    local: bool = False
    """Whether it lives in the run's folder alone and supersedes steps by itself."""
    advice: str = ""


BOARDS: dict[str, Kind] = {
    "tensorboard": Kind("tensorboard", "train", _tensorboard, local=True),
    "wandb": Kind("wandb", "trackers", WandbBoard, advice="run `wandb login`, or set WANDB_MODE=offline"),
    "trackio": Kind("trackio", "trackers", TrackioBoard, advice="unset TRACKIO_SPACE_ID to keep it on this machine"),
}


def check_installed(names: Sequence[str]) -> None:
    """Refuse a board whose package is missing, before the model is read."""
    for name in names:
        require([BOARDS[name].package], BOARDS[name].extra, f"log.to: {name}")


class Boards:
    """The boards of one run. ``seen`` is the last step that an earlier process of it has recorded.

    A board that the run had before keeps what it got: steps that are made again after a kill are not sent twice.
    """

    def __init__(self, names: Sequence[str], out: Path, project: str, first: int, seen: int) -> None:
        check_installed(names)
        file = out / IDENTITIES
        known = IDENTITIES_FILE.load(file)["runs"] if file.is_file() else {}
        new = {name: uuid.uuid4().hex[:8] for name in names if name not in known and not BOARDS[name].local}
        if new:
            IDENTITIES_FILE.dump(file, {"runs": known | new})
        self._boards: list[tuple[Board, int]] = []
        for name in names:
            place = Place(out, project, (known | new).get(name, ""), first)
            self._boards.append((_opened(name, place), seen if name in known else 0))

    def add(self, step: int, values: dict[str, float]) -> None:
        """The scalars of one step."""
        for board, seen in self._boards:
            if step > seen:
                board.add(step, values)

    def close(self) -> None:
        """Close every board, also after one that fails."""
        while self._boards:
            self._boards.pop()[0].close()


def _opened(name: str, place: Place) -> Board:
    """A board; where its package refuses, one line says so."""
    kind = BOARDS[name]
    try:
        return kind.open(place)
    except Exception as error:  # each package has its own kinds
        if kind.local:
            raise
        why = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"log.to: {name} does not start ({why[:200]}); {kind.advice}") from error
