"""Starting DeepSpeed: its configuration, its process group, and its chatter."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from datetime import timedelta
from typing import Any

from pydantic import ValidationError

from realvr.errors import UserError
from realvr.runs.launching import held_port
from realvr.training.engine.settings import ZeRO3Settings

LAUNCHERS = ("ACCELERATE_DEEPSPEED_", "ACCELERATE_CONFIG_DS_FIELDS")
"""Variables in which ``accelerate launch`` hands over a DeepSpeed configuration of its own: the engine file counts.
Those that contradict it have been refused by now (``launchers.py``)."""


def start(cpu: bool, settings: ZeRO3Settings) -> Any:  # noqa: ANN401  (Accelerator)
    """Join the processes that the launcher has started; one process is a group of one."""
    os.environ["DS_ACCELERATOR"] = "cpu" if cpu else "cuda"  # otherwise it looks for devices, and warns without one
    if "LOCAL_RANK" not in os.environ:
        with held_port() as port:
            os.environ |= _alone(port)
            return _join(cpu, settings)
    return _join(cpu, settings)


def _join(cpu: bool, settings: ZeRO3Settings) -> Any:  # noqa: ANN401  (Accelerator)
    for name in [name for name in os.environ if name.startswith(LAUNCHERS)]:
        del os.environ[name]
    _quiet()
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin, GradientAccumulationPlugin, InitProcessGroupKwargs

    if cpu:
        import deepspeed.ops

        # It would compile a kernel for sums in shared memory, which needs a compiler and half a minute and is not used.
        deepspeed.ops.__compatible_ops__ = {}
    _check(settings)
    plugin = DeepSpeedPlugin(hf_ds_config=configuration(settings), zero3_init_flag=False)
    group = InitProcessGroupKwargs(backend="gloo" if cpu else "nccl", timeout=timedelta(seconds=settings.timeout))
    # All explicit: otherwise variables of a launcher could switch on autocast or compilation, or scale the loss.
    accelerator = Accelerator(
        deepspeed_plugin=plugin,
        mixed_precision="no",
        dynamo_backend="no",
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        kwargs_handlers=[group],
    )
    from transformers.integrations import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()  # accelerate asks transformers to slice every model that it loads
    return accelerator


def configuration(settings: ZeRO3Settings) -> dict[str, Any]:
    """DeepSpeed's configuration. Batches, clipping, types and the optimizer are ours."""
    return {
        "train_micro_batch_size_per_gpu": 1,  # DeepSpeed wants to know; it only counts samples with it
        "gradient_accumulation_steps": 1,  # microbatches are accumulated by the loop
        "gradient_clipping": 0.0,  # explicit: its default of 1.0 would clip a second time
        "steps_per_print": sys.maxsize,
        # Without leaf modules: a mixture of experts that passes twice before a backward would fail.
        "zero_optimization": {"stage": 3, "leaf_module": {"classes": []}, **settings.zero_optimization},
    }


def _check(settings: ZeRO3Settings) -> None:
    """Keys and values that DeepSpeed does not know."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    try:
        DeepSpeedZeroConfig(**settings.zero_optimization)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"engine zero3: zero_optimization.{first['loc'][0]}: {first['msg']} (DeepSpeed)") from error


def _alone(port: int) -> dict[str, str]:
    return {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def _quiet() -> None:
    """Errors only, and none of the names that torch is about to replace."""
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
