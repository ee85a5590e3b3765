"""One training on one set of GPUs: whether it fits, how long a step takes, and what would fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

from realvr.backbone.automatic import TITLES, Where
from realvr.families import Stock
from realvr.latent.modes import is_static
from realvr.planning.gpus import Gpu, find_gpu, one_of
from realvr.planning.settings import PlanSettings
from realvr.planning.speed import communication, link_of, seconds
from realvr.training.engine import ENGINES, engine_settings
from realvr.training.estimate import Decoder, Estimate, Setup, Weight, Workload, decoder_of, estimate
from realvr.training.estimate.peak import GIB
from realvr.training.estimate.shape import weights_of, with_adapters
from realvr.training.sections import LoraSettings
from realvr.zoo.presets import PRESETS, preset_config

MOST = 8192
"""GPUs up to which a number that fits is searched."""
VISUAL = {"gemma3": 256, "internvl3": 13 * 256}
"""Visual tokens of a picture where the family fixes them (InternVL: twelve tiles and the thumbnail)."""
PAPER_VISUAL = 2560
WORTH = 0.9
"""Other settings are named where a step takes at most this share of the time with them."""
SHARES = (0.25, 0.5, 1.0)
"""Of the layers that are recomputed, which are tried."""


@dataclass(frozen=True)
class Faster:
    """Settings under which the same step takes less time and fits too."""

    flags: str
    seconds: float
    """Of a step, at least."""
    peak: int
    """Bytes of one GPU."""

    def as_json(self) -> dict[str, Any]:
        """Sizes in GiB."""
        return {"flags": self.flags, "seconds": self.seconds, "peak_gib": self.peak / GIB}


@dataclass(frozen=True)
class Plan:
    """What was found for one backbone."""

    settings: PlanSettings
    backbone: str
    gpu: Gpu
    setup: Setup
    work: Workload
    weights: list[Weight]
    fast: tuple[str, ...]
    """Settings that ``auto`` switches on and the plan counts."""
    found: Estimate
    smallest: int | None
    """Fewest GPUs on which it fits, all else equal."""
    seconds: dict[str, float]
    """Of a step, at least; empty where the GPU's rates are not known."""
    communication: dict[str, float]
    would: list[str]
    """Where it does not fit: changes that make it fit."""
    faster: Faster | None
    """Where it fits: changes that take clearly less time."""

    @property
    def room(self) -> float:
        """Bytes of a GPU that may be used."""
        return room_of(self.gpu, self.settings)

    @property
    def fits(self) -> bool:
        """Whether it fits."""
        return self.found.peak <= self.room

    @property
    def parameters(self) -> int:
        """Of the model, adapters included."""
        return sum(weight.numel * weight.count for weight in self.weights)

    @property
    def trained(self) -> int:
        """Of these, how many are trained."""
        return sum(weight.numel * weight.count for weight in self.weights if weight.trained)

    def as_json(self) -> dict[str, Any]:
        """Everything, sizes in GiB."""
        return {
            "backbone": self.backbone,
            "estimate": True,
            "stage": self.settings.stage,
            "gpus": self.setup.world,
            "gpu": asdict(self.gpu),
            "engine": self.setup.engine,
            "lora": self.settings.lora,
            "parameters": self.parameters,
            "trained_parameters": self.trained,
            "workload": asdict(self.work),
            "fast_paths": list(self.fast),
            "fits": self.fits,
            "peak_gib": self.found.peak / GIB,
            "room_gib": self.room / GIB,
            "moment": self.found.moment,
            "parts_gib": {name: size / GIB for name, size in self.found.parts.items()},
            "moments_gib": {name: sum(parts.values()) / GIB for name, parts in self.found.moments.items()},
            "moment_parts_gib": {
                name: {part: size / GIB for part, size in parts.items()} for name, parts in self.found.moments.items()
            },
            "rollout_gathers": self.found.gathers,
            "keys_and_values_gib": self.found.cache / GIB if self.settings.stage == "rl" else None,
            "smallest_gpus": self.smallest,
            "would_fit": self.would,
            "faster": None if self.faster is None else self.faster.as_json(),
            "communication_gb": {name: size / 1e9 for name, size in self.communication.items()},
            "seconds": self.seconds or None,
        }


def room_of(gpu: Gpu, settings: PlanSettings) -> float:
    """Bytes of a GPU that may be used."""
    return gpu.memory * GIB * (1 - settings.reserve)


@cache
def _model(name: str) -> Stock:
    """The backbone on the meta device: shapes without weights."""
    import torch
    from transformers import AutoModelForImageTextToText

    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(preset_config(name), dtype=torch.bfloat16)


@cache
def _shapes(name: str, lora: int, markers: bool, fused: bool, narrow: bool) -> tuple[Decoder, list[Weight]]:
    """``narrow``: adapters keep 16-bit inputs."""
    model = _model(name)
    decoder = decoder_of(model)
    gates, adapters = fused and not decoder.experts, narrow and bool(lora)
    decoder = replace(decoder, fused_norms=fused, fused_gates=gates, narrow_adapters=adapters)
    if lora:
        return decoder, with_adapters(model, lora, LoraSettings().targets, markers=markers)
    return decoder, weights_of(model, train_decoder=True)


def _shapes_of(settings: PlanSettings, name: str, gpu: Gpu) -> tuple[Decoder, list[Weight]]:
    narrow = setup_of(settings).engine != "zero3"  # which gathers adapters in hooks of their layers
    fused = "fused_layers" in fast_paths(settings, name, gpu)
    return _shapes(name, settings.lora, settings.stage == "sft", fused, narrow)


def fast_paths(settings: PlanSettings, name: str, gpu: Gpu) -> tuple[str, ...]:
    """Settings that ``auto`` switches on in such a run, of those that a plan counts."""
    if settings.plain:
        return ()
    dense = not _shapes(name, 0, False, False, False)[0].experts
    where = Where(cuda=gpu.nvidia, flash=True, dense=dense, whole=not setup_of(settings).sharded)
    rl = settings.stage == "rl"
    counted = {"fused_layers": True, "split_attention": rl}
    counted["recorded_span"] = rl and settings.evidence and settings.memory != "checkpointed"
    return tuple(path for path in TITLES if counted.get(path) and where.takes(path))


def workload(settings: PlanSettings, name: str, gpu: Gpu) -> Workload:
    """One microbatch of the training."""
    family, fast = PRESETS[name].family, fast_paths(settings, name, gpu)
    visual = settings.visual_tokens or VISUAL.get(family, PAPER_VISUAL)
    rl = settings.stage == "rl"
    microbatches = (settings.batch or settings.gpus * settings.microbatch) // (settings.gpus * settings.microbatch)
    answer = settings.answer_tokens or 192
    static = is_static("auto", "cuda", sharded=setup_of(settings).sharded)
    return Workload(
        stage=settings.stage,
        rows=settings.microbatch,
        tokens=visual + settings.text_tokens if rl else settings.row_tokens,
        visual=visual if rl else min(visual, settings.row_tokens),
        labelled=settings.answer_tokens or 512,
        latents=settings.latents,
        group=settings.group,
        answer=answer,
        evidence=settings.evidence,
        memory=settings.memory,
        recompute=settings.recompute,
        microbatches=microbatches,
        padded=settings.microbatch > 1,
        together=settings.rollout_batch,
        static=answer if rl and static else 0,
        recorded="recorded_span" in fast,
        split="split_attention" in fast,
    )


def setup_of(settings: PlanSettings) -> Setup:
    """How the engine spreads the model."""
    return Setup.of(engine_settings(settings.engine), settings.gpus, settings.master_weights)


def _estimate(settings: PlanSettings, name: str, gpu: Gpu) -> Estimate:
    decoder, weights = _shapes_of(settings, name, gpu)
    room = room_of(gpu, settings)
    return estimate(decoder, weights, workload(settings, name, gpu), setup_of(settings), room)


def plan(settings: PlanSettings) -> list[Plan]:
    """The plan for one backbone, or for all."""
    gpu = find_gpu(settings.gpu, settings.gpu_memory)
    setup_of(settings)  # refuses an odd engine file before any model is built
    names = list(PRESETS) if settings.backbone == "all" else [one_of(settings.backbone, PRESETS, "--backbone")]
    return [_plan(settings, name, gpu) for name in names]


def _plan(settings: PlanSettings, name: str, gpu: Gpu) -> Plan:
    _, weights = _shapes_of(settings, name, gpu)
    setup, fast = setup_of(settings), fast_paths(settings, name, gpu)
    found = _estimate(settings, name, gpu)
    work = replace(workload(settings, name, gpu), together=found.together)
    sent, times = _times(settings, name, gpu, found)
    smallest = smallest_number(settings, name, gpu)
    fits = found.peak <= room_of(gpu, settings)
    would = [] if fits else list(alternatives(settings, name, gpu, smallest))
    better = faster(settings, name, gpu, sum(times.values())) if fits and times else None
    return Plan(settings, name, gpu, setup, work, weights, fast, found, smallest, times, sent, would, better)


def _times(settings: PlanSettings, name: str, gpu: Gpu, found: Estimate) -> tuple[dict[str, float], dict[str, float]]:
    """Bytes that a GPU sends in a step, and the seconds that it takes, where the GPU's rates are known."""
    decoder, weights = _shapes_of(settings, name, gpu)
    work, setup = replace(workload(settings, name, gpu), together=found.together), setup_of(settings)
    sent = communication(weights, work, setup, found.gathers)
    if not gpu.flops:
        return sent, {}
    times = seconds(decoder, weights, work, setup, gpu, fused="fused_layers" in fast_paths(settings, name, gpu))
    return sent, times | {"communication": sum(sent.values()) / link_of(gpu, setup.world)}


def faster(settings: PlanSettings, name: str, gpu: Gpu, now: float) -> Faster | None:
    """The fastest engine, microbatch and memory mode for the same step that fit, if they are worth a change."""
    best: tuple[float, int] | None = None
    found = None
    for flags, tried in _variants(settings):
        peak = _estimate(tried, name, gpu)
        if peak.peak > room_of(gpu, settings):
            continue
        _, times = _times(tried, name, gpu, peak)
        rank = round(sum(times.values()), 3), len(flags)  # of two that are level, the one that changes less
        if best is None or rank < best:
            best, found = rank, Faster(" ".join(flags), sum(times.values()), peak.peak)
    return found if found is not None and found.seconds <= WORTH * now else None


def _variants(settings: PlanSettings) -> Iterator[tuple[list[str], PlanSettings]]:
    """Other ways to take the same step, with the flags that ask for them."""
    batch = settings.batch or settings.gpus * settings.microbatch
    prompts = batch // settings.gpus
    engines = [settings.engine, *(["ddp"] if setup_of(settings).sharded else [])]
    modes: list[tuple[str, float]] = [("cached", 1.0), ("checkpointed-prefill", 1.0)]
    if settings.stage == "rl":
        modes = [("cached", 1.0), *(("checkpointed-prefill", share) for share in SHARES)]
    own = settings.memory, settings.recompute
    for engine in engines:
        for microbatch in (size for size in range(1, prompts + 1) if prompts % size == 0):
            for memory, recompute in dict.fromkeys([own, *modes]):
                changes: dict[str, Any] = {
                    "engine": engine,
                    "microbatch": microbatch,
                    "memory": memory,
                    "recompute": recompute,
                }
                if microbatch != settings.microbatch:  # another one has another default
                    changes["batch"] = batch
                flags = [
                    f"--{key} {value:g}" if isinstance(value, float) else f"--{key} {value}"
                    for key, value in changes.items()
                    if value != getattr(settings, key)
                ]
                yield flags, replace(settings, **changes)


def numbers(per_node: int) -> Iterator[int]:
    """Numbers of GPUs to try: up to one node, then whole nodes."""
    yield from range(1, per_node + 1)
    yield from range(2 * per_node, MOST + 1, per_node)


def smallest_number(settings: PlanSettings, name: str, gpu: Gpu) -> int | None:
    """Fewest GPUs on which it fits with one microbatch each; None where no number does."""
    room = room_of(gpu, settings)
    several = workload(settings, name, gpu).microbatches
    for count in numbers(gpu.per_node):
        tried = replace(settings, gpus=count, batch=count * settings.microbatch * several)
        if _estimate(tried, name, gpu).peak <= room:
            return count
    return None


def alternatives(settings: PlanSettings, name: str, gpu: Gpu, smallest: int | None) -> Iterator[str]:
    """Changes that make it fit on these GPUs, or more of them."""
    room = room_of(gpu, settings)
    changes: dict[str, dict[str, Any]] = {"--memory checkpointed": {"memory": "checkpointed"}}
    if settings.microbatch > 1:
        changes["--microbatch 1"] = {"microbatch": 1}
    if settings.recompute < 1:
        changes["--recompute 1"] = {"recompute": 1.0}
    if fast_paths(settings, name, gpu):
        changes["--plain"] = {"plain": True}
    own = setup_of(settings).engine
    others = [engine for engine in ENGINES.names() if engine != own]
    changes |= {f"--engine {other}": {"engine": other} for other in others}
    if not settings.lora:
        changes["--lora 16"] = {"lora": 16}
        changes |= {f"--lora 16 --engine {other}": {"lora": 16, "engine": other} for other in others}
    found = [
        flags for flags, change in changes.items() if _estimate(replace(settings, **change), name, gpu).peak <= room
    ]
    shortest = [flags for flags in found if not any(other != flags and other in flags for other in found)]
    yield from shortest
    if smallest is not None and smallest > settings.gpus:
        yield f"--gpus {smallest}"
