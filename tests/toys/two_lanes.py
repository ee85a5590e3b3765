"""Stage 1 in one process on the rows that two ranks would pack: ``--plugin`` of tests."""

from __future__ import annotations

from realvr.training.methods.lvr_sft import LvrSft


class TwoLanes(LvrSft):
    """Begins as a run goes on that two ranks have started."""

    name = "two-lanes"

    def _open(self, count: int) -> None:
        super()._open(2)
