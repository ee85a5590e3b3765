"""Stage 2 that notes what each rank had to do in each step: ``--plugin`` of tests, for any engine.

``RUN.work-RANK.jsonl`` beside the run's folder: wrong answers and longest completion of each microbatch.
"""

from __future__ import annotations

import json
from typing import Any

from realvr.training.methods.realvr import ReaLVR
from realvr.training.task import Collected


class NotingRl(ReaLVR):
    """Stage 2 as it is."""

    name = "noting-rl"

    def collect(self, step: int) -> Collected[Any]:
        made = super().collect(step)
        found = {
            "wrong": [int(batch.wrong_BY.sum()) for batch in made.microbatches],
            "tokens": [int(batch.real_BGS.sum(-1).max()) for batch in made.microbatches],
        }
        out = self.settings.run.out
        with out.with_name(f"{out.name}.work-{self.ranks.rank}.jsonl").open("a") as file:
            file.write(json.dumps(found) + "\n")
        return made
