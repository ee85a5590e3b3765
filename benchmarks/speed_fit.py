"""What `speed.py` leaves out: tries that clearly do not fit on the GPU, by the estimate of `realvr plan`. A try takes
long.

Nothing is left out if the GPU or the shape of the model is not known, as on a CPU or with small models.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch

from realvr.latent.modes import is_static
from realvr.training.estimate import Decoder, Setup, Weight, Workload, decoder_of, estimate, weights_of, with_adapters
from realvr.training.methods.realvr import ReaLVRConfig
from realvr.training.sections import LoraSettings
from realvr.zoo.presets import PRESETS, preset_config
from speed_kit import GIB, Bench
from speed_sizes import memory_mode

SURE = 1.1
"""An estimate this far above the memory of the GPU is believed: those that were measured are off by less."""


def room_gib(device: torch.device) -> float | None:
    """Of the GPU; None off one."""
    return torch.cuda.get_device_properties(device).total_memory / GIB if device.type == "cuda" else None


def step_too_large(bench: Bench, rank: int, microbatch: int, answer: int) -> str | None:
    """Why a whole step does not fit in microbatches of this size; None where it may."""
    how = _passes(bench, bench.sizes.prompts, microbatch, bench.sizes.memory)
    together = None if bench.options.rollouts == "together" else microbatch
    static = answer if is_static(bench.options.decode, "cuda") else 0  # type: ignore[arg-type]
    return _too_large(bench, rank, Workload("rl", answer=answer, static=static, together=together, **how), False)


def passes_too_large(bench: Bench, prompts: int, microbatch: int, memory: str, rank: int = 0) -> str | None:
    """The same of forward and backward alone, without rollout and optimizer."""
    how = _passes(bench, prompts, microbatch, memory)
    return _too_large(bench, rank, Workload("rl", answer=bench.sizes.answer, **how), True)


def row_too_large(bench: Bench) -> str | None:
    """The same of one packed row of Stage 1, its layers recomputed."""
    sizes = bench.sizes
    work = Workload("sft", tokens=sizes.row, visual=sizes.visual, labelled=sizes.row - sizes.visual)
    return _too_large(bench, 0, work, True)


def _passes(bench: Bench, prompts: int, microbatch: int, memory: str | None) -> dict[str, Any]:
    """Passes with gradient, as parts of a `Workload`. Options that are ``auto`` count as what needs less."""
    sizes, options = bench.sizes, bench.options
    return {
        "rows": microbatch,
        "microbatches": prompts // microbatch,
        "tokens": sizes.visual + sizes.text,
        "visual": sizes.visual,
        "latents": sizes.latents,
        "group": sizes.group,
        "readout": 32,  # four answers of eight tokens
        "split": options.replay != "mask",
        "recorded": options.span == "recorded",
        **memory_mode(memory or ReaLVRConfig(type="realvr").memory),
    }


def _too_large(bench: Bench, rank: int, work: Workload, alone: bool) -> str | None:
    if bench.room is None or bench.preset not in PRESETS:
        return None
    needed = needed_gib(bench, rank, work, alone)
    if needed <= SURE * bench.room:
        return None
    return f"needs {needed:.0f} GiB by the estimate, the GPU has {bench.room:.0f}"


def needed_gib(bench: Bench, rank: int, work: Workload, alone: bool) -> float:
    """Peak by the estimate. ``alone``: forward and backward without rollout and optimizer."""
    options = bench.options
    decoder, weights = shapes(bench.preset, rank)
    fused = options.layers != "stock"
    gates, narrow = fused and not decoder.experts, rank > 0 and options.lora != "peft"
    decoder = replace(decoder, fused_norms=fused, fused_gates=gates, narrow_adapters=narrow)
    room = None if bench.room is None else bench.room * GIB
    found = estimate(decoder, weights, work, Setup(deferred=options.gradients == "deferred"), room)
    if not alone:
        return found.peak / GIB
    moments = [parts for name, parts in found.moments.items() if name not in ("update", "rollout")]
    return max(sum(parts.values()) - parts["optimizer"] for parts in moments) / GIB


@cache
def shapes(preset: str, rank: int) -> tuple[Decoder, list[Weight]]:
    """Of a paper backbone, without weights."""
    from transformers import AutoModelForImageTextToText

    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(preset_config(preset), dtype=torch.bfloat16)
    if rank:
        return decoder_of(model), with_adapters(model, rank, LoraSettings().targets, markers=False)
    return decoder_of(model), weights_of(model, train_decoder=True)
