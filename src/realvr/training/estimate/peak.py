"""Peak memory of one device: what an engine holds of the model, and the fullest moment of a step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from realvr.latent.modes import COLUMNS, bucket
from realvr.latent.span_recording import span_bytes
from realvr.training import gradients
from realvr.training.estimate.activations import Gradients, Phase, Workload, latent_steps, phases
from realvr.training.estimate.rollout import buffer_bytes, cache_bytes, rollout_bytes, rollout_group
from realvr.training.estimate.shape import Decoder, Weight
from realvr.training.optimizer import LOT

if TYPE_CHECKING:
    from realvr.training.engine.settings import EngineSettings

GIB = 1024**3
RESERVE = 0.08
"""Share of a GPU that no estimate fills: CUDA context, communication buffers, fragmentation."""
SECOND = "second copy of gradients"
"""Autograd's sums of the gradients of one weight over all passes of a backward, as far as they are not ``.grad``."""
UNSHARDED = "gradients not sharded yet"
"""The same where ``.grad`` is a shard. FSDP2 hands them on after each pass (``engine.passes``); ZeRO-3 gets whole sums
only, so that Stage 2 holds those of all weights on every rank."""
SHARDED = ("fsdp2", "zero3")
PREFETCHED = 2
"""Layers that FSDP2 holds gathered at a time: the one that runs and the next."""
ZERO_GROUP = 10**9
"""Numbers that ZeRO-3 updates at a time (DeepSpeed's ``sub_group_size``)."""
ZERO_BUCKET = 5 * 10**8
"""Numbers in the buffer through which ZeRO-3 sums gradients over ranks (DeepSpeed's ``reduce_bucket_size``)."""
GATHERED_SHARE = {"fsdp2": 0.7, "zero3": 0.5}
"""Of the memory that is free beside weights and optimizer, how much the gathered weights of a rollout may take where
``rollout`` is auto. The rest is for keys and values."""


@dataclass(frozen=True)
class Setup:
    """How the model is spread over devices, and how it is trained."""

    engine: str = "ddp"
    world: int = 1
    master_weights: bool = True
    reshard: bool = True
    """FSDP2: whether a layer's gathered weights are freed after its pass."""
    rollout: Literal["auto", "gather", "lockstep"] = "auto"
    max_live: float = 1e9
    """ZeRO-3: gathered parameters that may stay (``stage3_max_live_parameters``)."""
    bucket: int = ZERO_BUCKET
    """ZeRO-3: numbers in the buffer of gradients (`bucket_of`)."""
    deferred: bool = False
    """DDP: whether gradients of linear layers are deferred (``optim.gradients``)."""

    @property
    def sharded(self) -> bool:
        """Whether each rank holds a part of the parameters."""
        return self.engine in SHARDED

    @property
    def cuts(self) -> bool:
        """Whether a whole gradient and a rank's part of it are different tensors. ZeRO-3 has both on one rank too."""
        return self.engine == "zero3" or (self.sharded and self.world > 1)

    @classmethod
    def of(cls, engine: EngineSettings, world: int, master_weights: bool, gradients: str = "deferred") -> Setup:
        """As the settings of an engine and ``optim`` have it."""
        zero: dict[str, Any] = getattr(engine, "zero_optimization", {})
        return cls(
            engine=engine.type,
            world=world,
            master_weights=master_weights,
            reshard=getattr(engine, "reshard_after_forward", True),
            rollout=getattr(engine, "rollout", "auto"),
            max_live=float(zero.get("stage3_max_live_parameters", 1e9)),
            bucket=bucket_of(zero),
            deferred=gradients == "deferred",
        )


@dataclass(frozen=True)
class Estimate:
    """Bytes of one device."""

    held: dict[str, int]
    """What does not depend on the batch: frozen and trained weights, gradients, optimizer."""
    moments: dict[str, dict[str, int]]
    """All that is in use at each moment of a step, by what holds it."""
    gathers: bool = False
    """Whether rollouts run with all weights gathered."""
    together: int | None = None
    """Prompts that are rolled out together."""
    cache: int = 0
    """The most that keys and values of a rollout take, whatever else is there then."""

    @property
    def moment(self) -> str:
        """The fullest one."""
        return max(self.moments, key=lambda name: sum(self.moments[name].values()))

    @property
    def parts(self) -> dict[str, int]:
        """What is in use then."""
        return self.moments[self.moment]

    @property
    def peak(self) -> int:
        """Bytes in use then."""
        return sum(self.parts.values())


def local(weight: Weight, setup: Setup) -> int:
    """Numbers that one rank holds of all parameters of this size (the fullest rank: shards are padded)."""
    if not setup.sharded or (weight.part == "vision" and not weight.trained):
        return weight.numel * weight.count
    if setup.engine == "fsdp2" and weight.adapter:  # added to layers that are cut already
        return weight.numel * weight.count
    if setup.engine == "fsdp2":  # cut along the first dimension, experts stacked (`engine.stacked`)
        rows = math.prod(weight.shape[: 2 if weight.part == "layer" and len(weight.shape) == 3 else 1])
        return math.ceil(rows / setup.world) * (weight.numel // max(rows, 1)) * weight.count
    return math.ceil(weight.numel / setup.world) * weight.count


def bucket_of(zero_optimization: Mapping[str, Any]) -> int:
    """Numbers that DeepSpeed's buffer of gradients holds from the start to the end, by its settings."""
    size = int(zero_optimization.get("reduce_bucket_size", ZERO_BUCKET))
    return size if zero_optimization.get("contiguous_gradients", True) else 0


def bytes_of(
    parameters: Iterable[tuple[int, int, bool]], master_weights: bool, bucket: int | None = None
) -> dict[str, int]:
    """Bytes that do not depend on the batch, by what holds them, from (numbers, bytes of one, trained) of parameters.
    Real engines count theirs by this too.

    ``bucket`` is for ZeRO-3 (`bucket_of`): DeepSpeed trains weights of one type, has masters even of 32-bit ones, sums
    gradients in 32 bits, and keeps those and the buffer all the time."""
    held = {"frozen weights": 0, "trained weights": 0, "gradients": 0, "optimizer": 0}
    given = list(parameters)
    widest = max((itemsize for _, itemsize, trained in given if trained), default=0)
    for numbers, itemsize, trained in given:
        if not trained:
            held["frozen weights"] += numbers * itemsize
            continue
        own = itemsize if bucket is None else widest
        masters = bucket is not None or (master_weights and own < 4)
        held["trained weights"] += numbers * own
        held["gradients"] += numbers * (own if bucket is None else 4)
        held["optimizer"] += numbers * (12 if masters else 2 * own)
    held["gradients"] += (bucket or 0) * widest
    return held


def held_bytes(weights: Iterable[Weight], setup: Setup) -> dict[str, int]:
    """The same for parameters that exist as shapes only, on one rank of an engine."""
    found = ((local(weight, setup), weight.itemsize, weight.trained) for weight in weights)
    return bytes_of(found, setup.master_weights, setup.bucket if setup.engine == "zero3" else None)


def estimate(
    decoder: Decoder, weights: Sequence[Weight], work: Workload, setup: Setup, room: float | None = None
) -> Estimate:
    """The memory of one device. ``room`` (bytes) decides whether ``auto`` rollouts gather all weights."""
    adapters = any(not weight.trained and weight.part == "layer" for weight in weights)
    held = held_bytes(weights, setup)
    gathered = gathered_bytes(decoder, weights, setup)
    moments: dict[str, dict[str, int]] = {}
    for phase in phases(decoder, work, adapters):
        total = _gradients(decoder, weights, work, setup, phase)
        first = min(total, held["gradients"])
        moments[phase.name] = {
            **held,
            "gradients": first,
            (UNSHARDED if setup.cuts else SECOND): total - first,
            "gathered weights": gathered,
            "activations": phase.activations,
        }
    moments["update"] = {**held, "temporary tensors of AdamW": _update(weights, setup)}
    if work.stage != "rl":
        return Estimate(held, moments)
    still, gathers = rollout_states(decoder, weights, work, setup, room)
    span = recorded_bytes(decoder, weights, work, setup)
    together = rollout_group(decoder, work, None if room is None else room - sum(still.values()) - span)
    work = replace(work, together=together)
    if not work.released:  # what rollouts leave behind is there in training too
        moments = {name: parts | buffer_bytes(decoder, work) for name, parts in moments.items()}
    moments["rollout"] = {**still, **rollout_bytes(decoder, work)}
    if span:  # held from the first step on
        moments = {name: parts | {"recorded span": span} for name, parts in moments.items()}
    return Estimate(held, moments, gathers, together, cache_bytes(decoder, work))


def recorded_bytes(decoder: Decoder, weights: Sequence[Weight], work: Workload, setup: Setup) -> int:
    """Static tensors and memory pool of the recorded span of one shape, where there is one. A prompt of another length
    may have static tensors and gradients of its own, in the same pool. Where steps join nothing, their activations
    count beside them."""
    if not work.recorded_span:
        return 0
    adapters = any(not weight.trained and weight.part == "layer" for weight in weights)
    column = work.rows * 2 * decoder.key * decoder.itemsize * decoder.layers
    inside = [w for w in weights if w.trained and (w.part == "layer" or (w.part == "root" and not _head(decoder, w)))]
    alone = [w for w in inside if not _defers(w, setup)]
    columns = bucket(work.tokens, COLUMNS)
    found = sum(span_bytes(column, columns, work.latents, decoder.layers, work.split, whole_bytes(alone)))
    return found + (sum(latent_steps(decoder, work, adapters)) if work.split else 0)


def _defers(weight: Weight, setup: Setup) -> bool:
    """Whether the gradient of a weight inside the layers is multiplied out for all passes together."""
    large = len(weight.shape) == 2 and weight.numel >= gradients.LEAST
    return setup.deferred and not setup.sharded and large and not weight.adapter


def _head(decoder: Decoder, weight: Weight) -> bool:
    return weight.part == "root" and weight.shape == (decoder.vocab, decoder.width)


def whole_bytes(weights: Iterable[Weight]) -> int:
    """Of all copies, nothing sharded."""
    return sum(weight.bytes for weight in weights)


def _gradients(decoder: Decoder, weights: Sequence[Weight], work: Workload, setup: Setup, phase: Phase) -> int:
    """``.grad`` and what is held beside it, at a moment of the backward pass."""
    trained = [weight for weight in weights if weight.trained]
    if not setup.deferred or setup.sharded:
        return _summed(decoder, trained, work, setup, phase)
    # A tied head is the embedding.
    heads = [w for w in trained if _head(decoder, w) and w.count > 1 and w.numel >= gradients.LEAST]
    head = [replace(w, count=1) for w in heads]
    inside = [w for w in trained if w.part == "layer" and _defers(w, setup)]
    rest = [replace(w, count=w.count - 1) if w in heads else w for w in trained if w not in inside]
    if head:  # of the two tables only the embedding is left
        later: dict[str, Gradients] = {"head": "none", "but a table": "all" if work.stage == "rl" else "none"}
        apart = replace(phase, gradients=later.get(phase.gradients, phase.gradients))
        reached = phase.gradients in ("head", "all") or work.stage == "sft" and phase.gradients != "none"
        total = _deferred(head, reached, work, setup) + _summed(decoder, rest, work, setup, apart)
    else:
        total = _summed(decoder, rest, work, setup, phase)
    rows = work.rows * work.latents if work.stage == "rl" and work.evidence else 0
    steps_only = phase.steps_only and rows <= gradients.MOST_ROWS and work.rows <= gradients.FEW_ROWS
    total += _deferred(inside, not steps_only and phase.gradients in ("but a table", "all"), work, setup)
    # Inputs and gradients of latent steps, until the prompt has gone backward.
    waiting = rows if phase.gradients in ("but a table", "all") else 0
    return total + waiting * sum(sum(w.shape) * w.itemsize * w.count for w in inside)


def _deferred(weights: Sequence[Weight], made: bool, work: Workload, setup: Setup) -> int:
    """Of linear layers that hand their gradients on themselves (``training.gradients``); ``made``: by now."""
    size = whole_bytes(weights)
    kept = size if work.microbatches > 1 or setup.world > 1 else 0
    if setup.world == 1:  # straight into .grad
        return max(kept, size * made)
    if work.stage == "rl":  # DDP gets the sum of all passes
        return kept + size * made
    return max(kept, size * made) + max((w.numel * w.itemsize for w in weights), default=0) * made


def _summed(decoder: Decoder, trained: Sequence[Weight], work: Workload, setup: Setup, phase: Phase) -> int:
    """Where autograd adds up what the passes contribute."""
    tables = [weight for weight in trained if _head(decoder, weight)]
    table = max((weight.numel * weight.itemsize for weight in tables), default=0)
    whole, kept = whole_bytes(trained), held_bytes(trained, setup)["gradients"]
    apart = table if sum(weight.count for weight in tables) > 1 else 0  # a tied head is the embedding
    now = {"none": 0, "head": table, "but a table": whole - apart, "all": whole}[phase.gradients]
    # The newest gradient of a weight, before it is added.
    largest = max((w.numel * w.itemsize for w in trained if w.part == "layer"), default=0)
    fresh = table * phase.table + (largest if now else 0)
    # Kept from an earlier microbatch; DDP's buckets and a shard's gradient are there from the start.
    kept = kept if work.microbatches > 1 or setup.world > 1 or setup.cuts else 0
    if setup.cuts and (work.stage == "sft" or setup.engine == "fsdp2"):  # gradients leave layer by layer
        root = root_bytes(trained) if setup.engine == "fsdp2" else table
        return kept + min(now, PREFETCHED * max_layer(trained) + root) + table * phase.table
    if work.stage == "rl":  # a weight serves several passes: its gradients are added up before they reach .grad
        return kept + now + fresh
    return max(kept, now) + fresh


def max_layer(weights: Iterable[Weight]) -> int:
    """Bytes of one decoder layer; all layers are alike."""
    inside = [weight for weight in weights if weight.part == "layer"]
    return whole_bytes(inside) // math.gcd(*(weight.count for weight in inside)) if inside else 0


def gathered_bytes(decoder: Decoder, weights: Sequence[Weight], setup: Setup) -> int:
    """Whole weights that a sharded engine holds beside its shards during a pass."""
    if not setup.sharded or setup.world == 1:
        return 0
    inside = [w for w in weights if w.part != "vision" or w.trained]
    total, layer = whole_bytes(inside), max_layer(weights)
    root = whole_bytes(w for w in inside if w.part == "root")
    if setup.engine == "fsdp2":
        return min(total, root_bytes(inside) + PREFETCHED * layer) if setup.reshard else total
    return int(min(total, max(setup.max_live * decoder.itemsize, layer + root / 2)))


def root_bytes(weights: Sequence[Weight]) -> int:
    """FSDP2's root group, whole for all of a step: embedding, head, final norm, and the last decoder layer."""
    return whole_bytes(weight for weight in weights if weight.part == "root") + max_layer(weights)


def _update(weights: Sequence[Weight], setup: Setup) -> int:
    """Temporary tensors of AdamW: 32-bit gradients and quotients of a lot (`LOT`), or of the largest parameter."""
    narrow = [w for w in weights if w.trained and w.itemsize < 4 and setup.master_weights]
    if not narrow:
        return 0
    numbers = [local(w, setup) // w.count for w in narrow]
    if setup.engine == "zero3":
        return 4 * min(ZERO_GROUP, sum(local(w, setup) for w in narrow))
    return 8 * max(min(LOT, sum(local(w, setup) for w in narrow)), *numbers)


def gathers_whole(engine: str, rollout: str, whole: int, free: float | None) -> bool:
    """Whether rollouts of a sharded engine run with all weights gathered, ``whole`` bytes. ``free``: bytes beside what
    the engine holds all the time; None on CPUs, where ``auto`` always gathers. The engines decide by this too."""
    if rollout != "auto":
        return rollout == "gather"
    return free is None or whole <= GATHERED_SHARE[engine] * free


def rollout_states(
    decoder: Decoder, weights: Sequence[Weight], work: Workload, setup: Setup, room: float | None
) -> tuple[dict[str, int], bool]:
    """What is there during a rollout whatever is rolled out: optimizer and weights, gathered ones included; and whether
    all are gathered."""
    held = held_bytes(weights, setup)
    kept = setup.engine == "zero3" or (setup.world > 1 and not setup.sharded)  # DDP's buckets, DeepSpeed's buffers
    still = {**held, "gradients": held["gradients"] if kept else 0}
    if not setup.sharded or setup.world == 1:
        return still, False
    whole = whole_bytes(w for w in weights if w.part != "vision" or w.trained)
    gathers = gathers_whole(setup.engine, setup.rollout, whole, None if room is None else room - sum(still.values()))
    return {**still, "gathered weights": whole if gathers else gathered_bytes(decoder, weights, setup)}, gathers
