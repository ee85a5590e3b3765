"""Engines: how the processes of a run train together. `start_engine` starts one; `protocol.py` is the contract."""

from __future__ import annotations

import os

from realvr.errors import require
from realvr.registry import Registry
from realvr.training.engine.launchers import refuse_other_engine, refuse_other_settings
from realvr.training.engine.protocol import Engine, Ranks
from realvr.training.engine.settings import EngineSettings, read_engine

__all__ = ["ENGINES", "Engine", "EngineSettings", "Ranks", "engine_settings", "start_engine"]

_PACKAGE = "realvr.training.engine"
ENGINES: Registry[Engine] = Registry("engine", Engine, _PACKAGE, ("title",))  # type: ignore[type-abstract]


def start_engine(cpu: bool = False, engine: str = "ddp") -> Engine:
    """Join the processes that the launcher has started, under the engine that the settings name. A launcher that asks
    for something else is refused."""
    settings = engine_settings(engine)
    chosen = ENGINES.get(settings.type)
    refuse_other_engine(chosen.name, chosen.launcher_flag, {each.name: each.launcher_flag for each in ENGINES})
    refuse_other_settings(settings, chosen.launcher_flag)
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # a collective that times out aborts the process
    require(chosen.packages, chosen.extra, f"engine {chosen.name}")
    return chosen(cpu, settings)


def engine_settings(engine: str) -> EngineSettings:
    """What an engine file says, or the packaged one of this name."""
    return read_engine(engine, {each.name: each.Config for each in ENGINES})
