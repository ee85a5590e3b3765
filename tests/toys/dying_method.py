"""The two stages on ranks that die or hang: ``--plugin`` of tests, for any engine.

``REALVR_DIE="kill terms 3 1"`` kills rank 1 in the forward pass of step 3; ``hang`` leaves it in an endless loop,
``stop`` sends it SIGSTOP, ``sleep8`` makes it slow. Places: ``collect``, ``gather`` (the other ranks wait in a
collective), ``terms`` (in the step), ``save`` (in a checkpoint), ``export``. ``RUN.died`` beside the run's folder is
written right before.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from realvr.training.method import Term
from realvr.training.methods.lvr_sft import LvrSft
from realvr.training.methods.realvr import ReaLVR
from realvr.training.task import Collected


def endless() -> None:
    """What a rank does that is stuck in Python."""
    while True:
        time.sleep(0.1)


class Dies:
    """The moments at which a rank may end."""

    step_now = 0

    def _at(self, place: str) -> None:
        how, where, step, rank = (os.environ.get("REALVR_DIE") or "no no 0 0").split()
        if (where, int(step), int(rank)) != (place, self.step_now, int(os.environ.get("RANK", "0"))):
            return
        if how == "hang":
            endless()
        if how.startswith("sleep"):
            return time.sleep(float(how.removeprefix("sleep")))
        if place == "gather":
            time.sleep(0.5)  # the others are in the collective by now
        out = self.settings.run.out  # type: ignore[attr-defined]
        out.with_name(f"{out.name}.died").touch()
        os.kill(os.getpid(), signal.SIGSTOP if how == "stop" else signal.SIGKILL)

    def collect(self, step: int) -> Collected[Any]:
        self.step_now = step + 1
        self._at("collect")
        made = super().collect(step)  # type: ignore[misc]
        self._at("gather")
        self.ranks.gather_objects(0)  # type: ignore[attr-defined]
        return made

    def terms(self, batch: Any) -> Iterator[Term]:
        yield from super().terms(batch)  # type: ignore[misc]
        self._at("terms")

    def state_dict(self) -> dict[str, Any]:
        self._at("save")
        return super().state_dict()  # type: ignore[misc]

    def export(self, directory: Path) -> None:
        self._at("export")
        super().export(directory)  # type: ignore[misc]


class DyingSft(Dies, LvrSft):
    """Stage 1."""

    name = "dying-sft"


class DyingRl(Dies, ReaLVR):
    """Stage 2."""

    name = "dying-rl"
