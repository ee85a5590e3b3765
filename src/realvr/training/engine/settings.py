"""Settings of an engine, one YAML file: ``--engine fsdp2`` is ``configs/engines/fsdp2.yaml`` of this package.

``type`` names the engine; the other settings are those of its ``Config``.
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, Literal

import yaml
from pydantic import Field, ValidationError, field_validator

from realvr.errors import UserError
from realvr.training.packaged import FOLDER
from realvr.training.sections import Section

ENGINE_FOLDER = FOLDER / "engines"
Rollout = Literal["auto", "gather", "lockstep"]

FOREIGN = {
    "distributed_type": "a configuration of accelerate",
    "fsdp_config": "a configuration of accelerate",
    "deepspeed_config": "a configuration of accelerate",
    "zero_optimization": "a configuration of DeepSpeed",
    "optim": "settings of a training",
    "model": "settings of a training",
}
"""Keys by which a file of another program is recognised."""


class EngineSettings(Section):
    """What every engine has."""

    type: str
    """Name of the engine."""
    elsewhere: ClassVar[dict[str, str]] = {}
    """Keys that users look for here, and where the setting is instead."""
    timeout: float = Field(default=1800.0, gt=0)
    """Seconds that a rank waits for another one; then the run ends, with the stacks of its threads."""


class DDPSettings(EngineSettings):
    """The whole model on every rank."""

    type: Literal["ddp"] = "ddp"


class FSDP2Settings(EngineSettings):
    """Parameters, gradients and optimizer in shards (``torch.distributed.fsdp.fully_shard``)."""

    type: Literal["fsdp2"] = "fsdp2"
    reshard_after_forward: bool = True
    """Free the gathered parameters of a layer after its pass. False is faster and keeps all of them until the backward
    pass is over."""
    rollout: Rollout = "auto"
    """``gather`` collects all parameters once per rollout, ``lockstep`` one layer at a time in each decoding step;
    ``auto`` gathers where they fit."""


_OFFLOAD = "weights and optimizer stay on the GPUs: use more of them, or LoRA"


class ZeRO3Settings(EngineSettings):
    """Parameters, gradients and optimizer in shards (DeepSpeed ZeRO stage 3)."""

    elsewhere: ClassVar[dict[str, str]] = {
        "optimizer": "the settings of the training have it (optim)",
        "scheduler": "the settings of the training have it (optim.schedule, optim.warmup)",
        "gradient_clipping": "the settings of the training have it (optim.clip)",
        "bf16": "weights have the type that the model is loaded with (model.dtype), masters are 32-bit",
        "fp16": "weights have the type that the model is loaded with (model.dtype: bfloat16 or float32)",
        "train_batch_size": "the settings of the training have it (optim.batch)",
        "train_micro_batch_size_per_gpu": "the settings of the training have it (optim.microbatch)",
        "gradient_accumulation_steps": "it follows from optim.batch, optim.microbatch and the number of processes",
        "activation_checkpointing": "the method has it (gradient_checkpointing in Stage 1, memory in Stage 2)",
        "communication_data_type": "gradients are summed in the type of the trained weights",
    }
    ours: ClassVar[dict[str, str]] = {
        "stage": "this engine is stage 3",
        "leaf_module": "leaf modules cannot pass several times before a backward pass, as experts do in Stage 2",
        "offload_optimizer": _OFFLOAD,
        "offload_param": _OFFLOAD,
        "zenflow": _OFFLOAD,
        "stage3_gather_16bit_weights_on_model_save": "every run writes its model whole, in final",
    }
    """Keys of ``zero_optimization`` that the engine decides, and why."""
    type: Literal["zero3"] = "zero3"
    rollout: Rollout = "auto"
    """As for FSDP2."""
    zero_optimization: dict[str, Any] = {}
    """Keys of DeepSpeed's ``zero_optimization``, on top of ``stage: 3``."""

    @field_validator("zero_optimization")
    @classmethod
    def _theirs(cls, given: dict[str, Any]) -> dict[str, Any]:
        for key, value in given.items():
            if key in cls.ours:
                raise ValueError(f"{key} is not set here: {cls.ours[key]}")
            if value == "auto":
                raise ValueError(f"{key}: write a number; 'auto' is filled in by trainers that know the model's width")
        return given


def find_engine_file(engine: str) -> Path:
    """The file that ``--engine`` means: an existing file, else the packaged one of this name."""
    path = Path(engine)
    if path.is_file():
        return path
    known = sorted(file.stem for file in ENGINE_FOLDER.glob("*.yaml"))
    name = path.as_posix().removeprefix("configs/").removeprefix("engines/").removesuffix(".yaml")
    if name in known:
        return ENGINE_FOLDER / f"{name}.yaml"
    close = get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"those with a name: {', '.join(known)}"
    raise UserError(f"engine: {engine} is neither a file nor the name of an engine; {hint}")


def read_engine(engine: str, configs: dict[str, type[EngineSettings]]) -> EngineSettings:
    """The settings in an engine file. ``configs`` are the engines that exist, by name."""
    path = find_engine_file(engine)
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{path}: the engine file cannot be read ({' '.join(str(error).split())})") from error
    kind = raw.get("type") if isinstance(raw, dict) else None
    if kind not in configs:
        other = next((FOREIGN[key] for key in raw if key in FOREIGN), "") if isinstance(raw, dict) else ""
        seen = f"this is {other}" if other and kind is None else f"type is {kind!r}"
        raise UserError(
            f"{path}: {seen}, not an engine file: it has a line 'type: {'|'.join(configs)}' "
            f"(examples in {ENGINE_FOLDER})"
        )
    config = configs[kind]
    for key in raw:
        if key in config.elsewhere:
            raise UserError(f"{path}: {key} is not set here: {config.elsewhere[key]}")
        if key not in config.model_fields:
            close = get_close_matches(str(key), list(config.model_fields), n=1)
            hint = f"did you mean '{close[0]}'?" if close else f"known here: {', '.join(config.model_fields)}"
            owner = next((name for name, each in configs.items() if key in each.model_fields), None)
            hint = f"it is a setting of engine {owner}" if owner and not close else hint
            raise UserError(f"{path}: engine {kind} has no setting '{key}'; {hint}")
    try:
        return config.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{path}: {where}: {first['msg'].removeprefix('Value error, ')}") from error
