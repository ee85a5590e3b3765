"""Engines: how the processes of a run train together. `start_engine` chooses; `protocol.py` is the contract."""

from __future__ import annotations

import os

from realvr.errors import UserError, require
from realvr.registry import Registry
from realvr.training.engine.protocol import Engine, Ranks

__all__ = ["ENGINES", "Engine", "Ranks", "start_engine"]

_PACKAGE = "realvr.training.engine"
ENGINES: Registry[Engine] = Registry("engine", Engine, _PACKAGE, ("title",))  # type: ignore[type-abstract]

LAUNCHER_FLAGS = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "tensor, context or sequence parallelism",
}
"""Variables by which ``accelerate launch`` and its configuration file ask for an engine other than DDP."""


def start_engine(cpu: bool = False) -> Engine:
    """The engine that the launcher asks for; DDP, or one process, where it asks for none.

    An engine that does not exist is refused: accelerate would wrap the model in it, and the run would hang or train
    something else.
    """
    flag = next((flag for flag in LAUNCHER_FLAGS if _truthy(os.environ.get(flag, ""))), None)
    fitting = [engine for engine in ENGINES if engine.launcher_flag == flag]
    if len(fitting) > 1:
        raise UserError(
            f"two engines want to start here: {' and '.join(engine.name for engine in fitting)}; remove one"
        )
    if fitting:
        require(fitting[0].packages, "train", "training")
        return fitting[0](cpu)
    if int(os.environ.get("RANK", "0")):  # one line, not one per process
        raise SystemExit(2)
    offered = "; ".join(engine.title for engine in ENGINES)
    raise UserError(
        f"the launcher's configuration asks for {LAUNCHER_FLAGS[str(flag)]} ({flag}={os.environ[str(flag)]}), which is "
        f"not implemented here ({offered}): start with torchrun, or set distributed_type to MULTI_GPU in the "
        "configuration of accelerate"
    )


def _truthy(value: str) -> bool:
    return value.strip().lower() in ("1", "true", "yes", "on", "y", "t")
