"""Engines: how the processes of a run train together. `start_engine` starts one; `protocol.py` is the contract."""

from __future__ import annotations

import os

from realvr.errors import UserError, require
from realvr.registry import Registry
from realvr.training.engine.protocol import Engine, Ranks
from realvr.training.engine.settings import EngineSettings, read_engine

__all__ = ["ENGINES", "Engine", "EngineSettings", "Ranks", "engine_settings", "start_engine"]

_PACKAGE = "realvr.training.engine"
ENGINES: Registry[Engine] = Registry("engine", Engine, _PACKAGE, ("title",))  # type: ignore[type-abstract]

LAUNCHER_FLAGS = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "tensor, context or sequence parallelism",
}
"""Variables by which ``accelerate launch`` and its configuration file ask for an engine other than DDP."""


def start_engine(cpu: bool = False, engine: str = "ddp") -> Engine:
    """Join the processes that the launcher has started, under the engine that the settings name.

    A launcher that asks for another engine is refused: accelerate would wrap the model in it, and the run would hang or
    train something else.
    """
    settings = engine_settings(engine)
    chosen = ENGINES.get(settings.type)
    flag = next((flag for flag in LAUNCHER_FLAGS if _truthy(os.environ.get(flag, ""))), None)
    if flag not in (None, chosen.launcher_flag):
        if int(os.environ.get("RANK", "0")):  # one line, not one per process
            raise SystemExit(2)
        fitting = next((each.name for each in ENGINES if each.launcher_flag == flag), None)
        other = f", or give --engine {fitting}" if fitting else ""
        raise UserError(
            f"the launcher's configuration asks for {LAUNCHER_FLAGS[str(flag)]} ({flag}={os.environ[str(flag)]}), but "
            f"this run's engine is {chosen.name}: start with --processes or torchrun{other}"
        )
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # a collective that times out aborts the process
    require(chosen.packages, chosen.extra, f"engine {chosen.name}")
    return chosen(cpu, settings)


def engine_settings(engine: str) -> EngineSettings:
    """What an engine file says, or the packaged one of this name."""
    return read_engine(engine, {each.name: each.Config for each in ENGINES})


def _truthy(value: str) -> bool:
    return value.strip().lower() in ("1", "true", "yes", "on", "y", "t")
