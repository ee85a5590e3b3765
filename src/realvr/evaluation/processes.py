"""Several processes on one evaluation, each with its share of the questions: started by
``runs.launching`` or by torchrun/accelerate."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

from realvr.errors import UserError
from realvr.runs.launching import processes_here

PATIENCE = timedelta(days=7)
"""How long processes wait for one another: shares of a benchmark may differ by hours."""


@dataclass(frozen=True)
class Ranks:
    """This process among all. ``local`` numbers the processes of this machine: it picks the GPU. ``local_world`` is how
    many they are: they share its cores."""

    rank: int = 0
    world: int = 1
    local: int = 0
    local_world: int = 1

    @classmethod
    def from_environment(cls) -> Ranks:
        """From RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, as torchrun and accelerate set them."""
        rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        return cls(rank, world, int(os.environ.get("LOCAL_RANK", rank)), processes_here(world))

    def start(self) -> None:
        """Meet the other processes."""
        if self.world > 1:
            if "MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ:
                raise UserError(
                    f"WORLD_SIZE is {self.world}, but MASTER_ADDR or MASTER_PORT is not set: start with torchrun or "
                    "--processes, or unset WORLD_SIZE"
                )
            import torch.distributed as dist

            dist.init_process_group("gloo", timeout=PATIENCE)

    def barrier(self) -> None:
        """Wait until every process is here."""
        if self.world > 1:
            import torch.distributed as dist

            dist.barrier()

    def stop(self) -> None:
        """Part from the others."""
        if self.world > 1:
            import torch.distributed as dist

            dist.destroy_process_group()

    def device(self, asked: str | None) -> str | None:
        """The device of this process: with several, process r takes GPU r, unless a single device was named."""
        if self.world == 1 or asked not in (None, "cuda"):
            return asked
        import torch

        return f"cuda:{self.local % torch.cuda.device_count()}" if torch.cuda.is_available() else asked
