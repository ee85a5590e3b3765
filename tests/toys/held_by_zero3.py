"""What DeepSpeed ZeRO-3 really holds, and when rollouts gather: ``python held_by_zero3.py DTYPE ENGINE_FILE``.

Prints JSON: bytes of all tensors that came into being with the engine and are alive after two steps, counted by the
garbage collector, which knows nothing of the formulas; what the engine and the plan say; and for both sharded engines
how many bytes have to be free on a pretended GPU, beside all that they hold, before they gather the model.
"""

from __future__ import annotations

import gc
import json
import sys
from bisect import bisect_left
from typing import Any

import torch
from torch import nn

from realvr.training.engine import engine_settings
from realvr.training.engine.fsdp2 import FSDP2
from realvr.training.engine.zero3 import ZeRO3
from realvr.training.estimate import Setup, weights_of
from realvr.training.estimate.peak import held_bytes
from realvr.training.sections import OptimSettings


class Net(nn.Module):
    """A frozen and a trained matrix, of sizes that two ranks cannot halve, and rows of 16 bits beside adapters."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.language_model = nn.Linear(701, 301, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        self.lm_head = nn.Linear(301, 501, bias=False, dtype=dtype)
        self.rows = nn.Parameter(torch.ones(501, 401, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor, term: str | None = None) -> tuple[torch.Tensor, dict[str, Any]]:
        y = self.lm_head(self.language_model(x).to(self.lm_head.weight.dtype))
        return (y @ self.rows.to(y.dtype)).float().square().mean(), {}


def alive() -> dict[int, int]:
    """Bytes of every storage that some tensor of this process has."""
    gc.collect()
    found = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    storages = [tensor.untyped_storage() for tensor in found if not tensor.is_meta]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def least_free(kind: type, fits: Any, later: int) -> int:
    """Bytes from which on an engine gathers. ``later``: of these, what it will take after it has decided."""
    kind.device = property(lambda self: torch.device("cuda"))

    def gathers(free: int) -> bool:
        torch.cuda.mem_get_info = lambda device=None: (free, 10**9)
        return bool(fits())

    return bisect_left(range(10**8), True, key=gathers) - later


def main() -> None:
    """One rank."""
    before = alive()
    settings: Any = engine_settings(sys.argv[2])
    dtype, optim = getattr(torch, sys.argv[1]), OptimSettings()
    engine = ZeRO3(cpu=True, settings=settings)
    engine.prepare(Net(dtype), optim)
    for _ in range(2):
        loss, _ = engine.forward(torch.ones(2, 701, dtype=torch.bfloat16))
        engine.backward(loss)
        del loss
        engine.gradient_norm(1.0)
        engine.step(1e-3)
    found: dict[str, Any] = {"real": sum(size for place, size in alive().items() if place not in before)}
    setup = Setup.of(settings, engine.world, optim.master_weights)
    found["engine"] = engine.estimate(engine.module, optim)
    found["plan"] = held_bytes(weights_of(engine.module), setup)
    found["free"] = {"zero3": least_free(ZeRO3, engine._fits, 0)}

    other = FSDP2(cpu=True)
    other.prepare(Net(dtype), optim)
    states = other.estimate(other.module, optim)["optimizer"]
    found["free"]["fsdp2"] = least_free(FSDP2, lambda: other._fits(optim), states)
    print(json.dumps(found))
    engine.exit(0)


if __name__ == "__main__":
    main()
