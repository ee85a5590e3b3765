"""What engines on accelerate have in common."""

from __future__ import annotations

from typing import Any

import torch


class Accelerated:
    """The processes, as accelerate knows them. Comes before `Engine` among the bases of an engine."""

    accelerator: Any

    @property
    def rank(self) -> int:
        """Number of this process."""
        return int(self.accelerator.process_index)

    @property
    def world(self) -> int:
        """Number of processes."""
        return int(self.accelerator.num_processes)

    @property
    def device(self) -> torch.device:
        """Where batches have to be."""
        found: torch.device = self.accelerator.device
        return found

    @property
    def distributed_type(self) -> str:
        """How the processes train together, in accelerate's words."""
        return str(self.accelerator.distributed_type.value)
