"""What ``accelerate launch`` asks for in its configuration: refused where the engine of the run is something else.

``accelerate launch`` passes its configuration in environment variables. None of it is used, because an engine file says
how an engine works. What contradicts the engine is an error, so that nobody trains something other than they wrote.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from realvr.errors import UserError
from realvr.training.engine.settings import EngineSettings, FSDP2Settings, ZeRO3Settings

FLAGS = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "tensor, context or sequence parallelism",
}
"""Variables that ask for an engine other than DDP."""
_STAYS = "weights and optimizer stay on the GPUs"


def refuse_other_engine(name: str, own: str | None, engines: Mapping[str, str | None]) -> None:
    """Raise where the launcher asks for another engine than ``name``, whose flag is ``own``. accelerate would wrap the
    model in it, and the run would hang or train something else. ``engines``: the flag of each engine that exists."""
    flag = next((flag for flag in FLAGS if truthy(os.environ.get(flag, ""))), None)
    if flag in (None, own):
        return
    fitting = next((each for each, asked in engines.items() if asked == flag), None)
    other = f", or give --engine {fitting}" if fitting else ""
    _refuse(
        f"the launcher's configuration asks for {FLAGS[str(flag)]} ({flag}={os.environ[str(flag)]}), but this run's "
        f"engine is {name}: start with --processes or torchrun{other}"
    )


def refuse_other_settings(settings: EngineSettings, own: str | None) -> None:
    """Raise where the launcher asks for this engine, but in another way than it works here."""
    if own is None or not truthy(os.environ.get(own, "")):
        return
    found = next(_zero3() if isinstance(settings, ZeRO3Settings) else _fsdp2(settings), None)
    if found is not None:
        variable, why = found
        _refuse(
            f"the launcher's configuration says {variable}={os.environ[variable]}, but engine {settings.type} {why}: "
            "change it there, or start with --processes or torchrun"
        )


def _zero3() -> Iterator[tuple[str, str]]:
    """Variables that contradict the engine, and why."""
    prefix = "ACCELERATE_DEEPSPEED_"
    if os.environ.get(f"{prefix}CONFIG_FILE"):
        yield f"{prefix}CONFIG_FILE", "does not read files of DeepSpeed (an engine file has zero_optimization)"
    if os.environ.get(f"{prefix}ZERO_STAGE", "3") != "3":
        yield f"{prefix}ZERO_STAGE", "is stage 3"
    for what in ("OPTIMIZER", "PARAM"):
        if os.environ.get(f"{prefix}OFFLOAD_{what}_DEVICE", "none").lower() not in ("", "none"):
            yield f"{prefix}OFFLOAD_{what}_DEVICE", f"does not offload ({_STAYS})"


def _fsdp2(settings: EngineSettings) -> Iterator[tuple[str, str]]:
    if os.environ.get("FSDP_VERSION", "2") != "2":
        yield "FSDP_VERSION", "is version 2 (fsdp_version: 2)"
    if truthy(os.environ.get("FSDP_OFFLOAD_PARAMS", "")):
        yield "FSDP_OFFLOAD_PARAMS", f"does not offload ({_STAYS})"
    asked = os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "").lower()
    reshards = not isinstance(settings, FSDP2Settings) or settings.reshard_after_forward
    if asked in ("true", "false") and truthy(asked) != reshards:
        yield "FSDP_RESHARD_AFTER_FORWARD", f"has reshard_after_forward {str(reshards).lower()} in its engine file"


def _refuse(text: str) -> None:
    if int(os.environ.get("RANK", "0")):  # one line, not one per process
        raise SystemExit(2)
    raise UserError(text)


def truthy(value: str) -> bool:
    """As accelerate reads a variable."""
    return value.strip().lower() in ("1", "true", "yes", "on", "y", "t")
