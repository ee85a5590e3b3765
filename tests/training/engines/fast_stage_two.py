"""Stage 2 with the fast paths of a GPU, on a CPU: ``--plugin`` of `test_fast_paths.py`.

Threads prepare the prompts of the next step, and latent steps are recorded as an `op_tape`, as CUDA graphs are.
``RUN.prepared-RANK.jsonl`` beside the run's folder: prompts that were prepared when each step began.
"""

from __future__ import annotations

import json
from typing import Any

import op_tape
from realvr.latent.recorded_span import RecordedSpan
from realvr.training.method import Run
from realvr.training.methods.realvr import ReaLVR, ReaLVRConfig
from realvr.training.task import Collected


class FastRl(ReaLVR):
    """Stage 2 as on a GPU."""

    name = "fast-rl"

    def __init__(self, backbone: Any, config: ReaLVRConfig) -> None:
        super().__init__(backbone, config)
        self.recorded = RecordedSpan(backbone, record=op_tape.record)

    def _threads(self, run: Run[Any]) -> int:
        return 2

    def collect(self, step: int) -> Collected[Any]:
        waiting = self.prompts._next
        assert waiting is not None
        found = sum(made.result() is not None for _, made in waiting._made.values())
        out = self.settings.run.out
        with out.with_name(f"{out.name}.prepared-{self.ranks.rank}.jsonl").open("a") as file:
            file.write(json.dumps(found) + "\n")
        return super().collect(step)
