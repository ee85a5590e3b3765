"""What a run needs before it starts: bytes that are certain, shapes of one batch, and whether the device has room."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from realvr.backbone.loading import read_config
from realvr.errors import UserError, out_of_memory
from realvr.families import Stock
from realvr.imaging.types import ImageInput
from realvr.training.engine import Engine
from realvr.training.estimate import Estimate, Setup, Weight, decoder_of, estimate, weights_of
from realvr.training.estimate.batches import setup_of_run, workload_of
from realvr.training.estimate.peak import GIB, RESERVE, SECOND, held_bytes
from realvr.training.estimate.shape import with_adapters
from realvr.training.settings import RlSettings, SftSettings, StageSettings, TrainSettings
from realvr.training.task import Ranks, Task

MOST_RANKS = 8192
LORA_RANK = 16
"""Of the adapters that are offered where a model is too large to be trained whole."""
STATES = ("frozen weights", "trained weights", "optimizer")
"""What is there all the time, of what an engine holds."""


def refuse_before_loading(ranks: Ranks, settings: StageSettings) -> None:
    """Raise where weights, gradients and optimizer alone exceed the GPU. Nothing but the model's configuration is read:
    weights take minutes, and would end in "out of memory"."""
    if ranks.device.type != "cuda" or not isinstance(ranks, Engine):
        return
    model, rank = (
        _without_weights(settings),
        settings.lora.rank if isinstance(settings, SftSettings | RlSettings) else 0,
    )
    if model is None:
        return
    weights = _weights(model, settings, rank)
    setup = Setup.of(ranks.settings, ranks.world, settings.optim.master_weights)
    needed, total = sum(held_bytes(weights, setup).values()), _memory(ranks)
    if needed <= total:
        return
    ways = _sharded(weights, ranks, settings, total)
    if isinstance(settings, SftSettings | RlSettings) and not rank:
        adapted = held_bytes(_weights(model, settings, LORA_RANK), setup)
        ways += [f"set lora.rank {LORA_RANK}"] * (sum(adapted.values()) <= total * (1 - RESERVE))
    raise _too_large(needed, total, ranks, [*ways, "take a smaller model"])


def refuse_too_large(engine: Engine, settings: TrainSettings) -> None:
    """The same once the engine has the model, by what it really holds."""
    if engine.device.type != "cuda":
        return
    needed, total = sum(engine.estimate(engine.module, settings.optim).values()), _memory(engine)
    if needed > total:
        ways = [*_sharded(weights_of(engine.module), engine, settings, total), *_smaller_states(settings)]
        raise _too_large(needed, total, engine, ways)


def _without_weights(settings: TrainSettings) -> Stock | None:
    """The model on the meta device; None where the configuration describes none, which loading explains."""
    from transformers import AutoModelForImageTextToText

    config, _ = read_config(str(settings.model.path))
    try:
        with torch.device("meta"):
            return AutoModelForImageTextToText.from_config(config, dtype=getattr(torch, settings.model.dtype))
    except Exception:  # whatever a configuration that fits no model leads to
        return None


def _weights(model: Stock, settings: StageSettings, rank: int) -> list[Weight]:
    """Parameters of the model as this run trains them, with a copy for the KL."""
    if rank:
        targets = settings.lora.targets if isinstance(settings, SftSettings | RlSettings) else ()
        return with_adapters(model, rank, targets, markers=isinstance(settings, SftSettings))
    if not isinstance(settings, SftSettings | RlSettings):  # base training: vision too
        return weights_of(model)
    weights = weights_of(model, train_decoder=True)
    copies = [dataclasses.replace(weight, trained=False) for weight in weights]
    return weights + copies * bool(getattr(settings.method, "beta", 0.0))


def _memory(engine: Engine) -> int:
    return int(torch.cuda.get_device_properties(engine.device).total_memory)


def _too_large(needed: float, total: float, engine: Engine, ways: list[str]) -> UserError:
    return UserError(
        f"this run cannot fit: weights, gradients and optimizer need {needed / GIB:.1f} GiB, {engine.device} has "
        f"{total / GIB:.1f} GiB; {_in_words(ways)}"
    )


def _sharded(weights: Sequence[Weight], engine: Engine, settings: TrainSettings, total: int) -> list[str]:
    """The fewest GPUs over which a sharding engine could spread what does not fit here."""
    for count in range(max(2, engine.world), MOST_RANKS):
        setup = Setup("fsdp2", count, settings.optim.master_weights)
        if sum(held_bytes(weights, setup).values()) <= total * (1 - RESERVE):
            if engine.settings.type == "fsdp2" and count <= engine.world:
                return []
            return [f"shard it over at least {count} GPUs (--engine fsdp2; realvr plan counts the rest too)"]
    return []


def expected(task: Task, settings: TrainSettings, engine: Engine, microbatches: Sequence[object]) -> Estimate | None:
    """The estimate for this run; None for a method that has none."""
    work = workload_of(settings, engine, microbatches[0], len(microbatches))
    backbone = getattr(task, "backbone", None)
    if work is None or backbone is None:
        return None
    room = None
    if engine.device.type == "cuda":
        room = torch.cuda.get_device_properties(engine.device).total_memory * (1 - RESERVE)
    setup = setup_of_run(settings, engine)
    return estimate(decoder_of(backbone.model), weights_of(engine.module), work, setup, room)


def expected_lines(held: Mapping[str, int], expected: Estimate | None) -> Iterator[str]:
    """What a dry run prints before it measures: the parts of the fullest moment, and their sum. ``held`` is what the
    engine says itself (`Engine.estimate`): its weights and optimizer count."""
    if expected is None:
        for name, size in held.items():
            yield f"{name}: {size / GIB:.3f} GiB"
        return
    parts = expected.parts | {name: size for name, size in held.items() if name in STATES}
    for name, size in parts.items():
        if size or name in held:
            yield f"{name}{'' if name in held else ' (estimate)'}: {size / GIB:.3f} GiB"
    yield f"total (estimate): {sum(parts.values()) / GIB:.3f} GiB, in: {expected.moment}"


def measured_lines(
    held: Mapping[str, int], expected: Estimate | None, measured: int | None, microbatches: int
) -> Iterator[str]:
    """What it prints after that. ``measured``: activations, gradients and gathered weights of one microbatch, to which
    accumulation adds a second copy of gradients where several passes share a weight."""
    states = sum(held.values())
    if measured is None:
        if expected is None:
            yield f"total without activations: {states / GIB:.3f} GiB (no estimate of activations for this method)"
        return
    own = max(measured - sum(size for name, size in held.items() if name not in STATES), 0)
    second = 0
    if expected is not None and microbatches > 1:
        second = expected.parts.get(SECOND, 0)
    yield f"activations (measured): {own / GIB:.3f} GiB"
    if second:
        yield f"second copy of gradients, from the second microbatch on: {second / GIB:.3f} GiB"
    yield f"total: {(states + own + second) / GIB:.3f} GiB"


@contextmanager
def explain_shortage(engine: Engine, settings: TrainSettings, what: str) -> Iterator[None]:
    """Turn "out of memory" into one line that names ``what`` ran out and settings that help."""
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError) or not out_of_memory(error):
            raise
        kind = "GPU memory" if engine.device.type == "cuda" else "memory"
        raise UserError(f"{what} ran out of {kind}: {advice(settings)}") from error


def advice(settings: TrainSettings) -> str:
    """Settings that need less memory and are not in force yet, the cheapest first. Only those that this training and
    this model have: a model without limits on visual tokens has none in its settings once it is loaded."""
    model, ways = settings.model, []
    if settings.optim.microbatch > 1:
        ways.append("lower optim.microbatch")
    elif model.max_tokens is not None:
        ways.append("lower model.max_tokens")
    elif model.tiles and model.max_tiles is not None and model.max_tiles > 1:
        ways.append("lower model.max_tiles")
    if isinstance(settings, StageSettings):
        ways += settings.method.memory_advice()
    return _in_words(ways + _smaller_states(settings))


def _smaller_states(settings: TrainSettings) -> list[str]:
    """What makes weights, gradients and optimizer smaller."""
    lora = isinstance(settings, SftSettings | RlSettings) and settings.lora.rank == 0
    return ["set lora.rank"] * lora + ["take a smaller model"]


def _in_words(ways: list[str]) -> str:
    return ", or ".join(filter(None, (", ".join(ways[:-1]), ways[-1])))


def shapes(value: object, name: str = "batch") -> Iterator[tuple[str, str]]:
    """Every tensor inside a microbatch, as (path, "dtype (shape)"). Looks into dicts, lists, tuples and objects with
    plain attributes; images are summed up."""
    if isinstance(value, list | tuple) and value and all(isinstance(item, ImageInput) for item in value):
        yield name, images(value)
        return
    if isinstance(value, Tensor):
        yield name, _shape(value)
        return
    items: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        items = [(f"{name}.{key}", item) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        items = [(f"{name}[{index}]", item) for index, item in enumerate(value)]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = [(f"{name}.{field.name}", getattr(value, field.name)) for field in dataclasses.fields(value)]
    for path, item in items:
        yield from shapes(item, path)


def _shape(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"


def images(inputs: Sequence[ImageInput]) -> str:
    """How many, of how many visual tokens, and the shapes of their pixels, the commonest first."""
    tokens = [image.tokens for image in inputs]
    each = f"{tokens[0]}" if len(set(tokens)) == 1 else f"{min(tokens)} to {max(tokens)}"
    sizes = Counter(_shape(image.pixels) for image in inputs).most_common()
    listed = ", ".join(f"{count} x {size}" for size, count in sizes[:3])
    more = f" and {len(sizes) - 3} other shapes" if len(sizes) > 3 else ""
    count = f"{len(inputs)} image{'s' if len(inputs) > 1 else ''}"
    return f"{count}, {each} visual tokens each, {sum(tokens):,} in all; pixels {listed}{more}"


def measured_peak(engine: Engine, microbatch: object, kept: int = 0) -> int | None:
    """Bytes of activations, gradients and gathered weights in one forward and backward pass; None without a GPU.

    The gradients are thrown away and no parameter changes. ``kept``: bytes of gradients that the engine holds already.
    """
    if engine.device.type != "cuda":
        return None
    before = torch.cuda.memory_allocated(engine.device)
    torch.cuda.reset_peak_memory_stats(engine.device)
    with engine.accumulate(last=False):
        loss, _ = engine.forward(microbatch)
        engine.backward(loss)
    engine.drop_gradients()
    return torch.cuda.max_memory_allocated(engine.device) - before + kept
