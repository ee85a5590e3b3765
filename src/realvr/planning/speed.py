"""Time and communication of a step, from products, bytes and launches. Take it as a lower bound: no rank waits, nothing
is padded, loaded, logged or saved. That nothing overlaps does not make up for it (docs/engines.md).

The rates below come from measurements on one H200 (docs/speed.md); they are shares of a data sheet's numbers, so that
they carry over to other GPUs as far as these do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from realvr.planning.gpus import Gpu
from realvr.training.estimate import Decoder, Setup, Weight, Workload
from realvr.training.estimate.peak import local, whole_bytes

FORWARD = 0.56
"""Share of the peak that a long pass without gradient reaches: prefill, 2,709 tokens, 7B, fused layers."""
TRAINING = 0.47
"""The same with gradients and recomputation: Stage 2, LVR-RL, 8 prompts at once, 7B. Stage 1 reaches 0.33."""
FUSED_TRAINING = 0.55
"""The same with fused layers and split attention, without recomputation."""
READING = 0.55
"""Share of the memory's bandwidth: recorded latent and decoding steps, 7B."""
LAUNCHES = 0.8e-3
"""Seconds that the host needs to launch one layer of a short pass that is not recorded: 20 to 30 ms for the 28 layers
of 7B."""
ADAPTER_LAUNCHES = 2.4e-3
"""The same with LoRA: 66 ms."""


def active(decoder: Decoder, weights: Sequence[Weight]) -> float:
    """Parameters that a token passes through, embedding and head aside."""
    inside = [weight for weight in weights if weight.part == "layer"]
    share = decoder.experts_per_token / decoder.experts if decoder.experts else 1.0
    return sum(w.numel * w.count * (share if len(w.shape) == 3 else 1.0) for w in inside)


def _products(decoder: Decoder, parameters: float, tokens: float, keys: float) -> float:
    """Floating-point operations of a forward pass over tokens that each see ``keys`` columns."""
    return tokens * (2 * parameters + 4 * keys * decoder.query * decoder.layers)


def seconds(
    decoder: Decoder, weights: Sequence[Weight], work: Workload, setup: Setup, gpu: Gpu, fused: bool = False
) -> dict[str, float]:
    """Seconds of one optimizer step, at least; communication not included. ``fused``: with fused layers."""
    parameters = active(decoder, weights)
    adapters = any(not w.trained and w.part == "layer" for w in weights)
    launch = (ADAPTER_LAUNCHES if adapters else LAUNCHES) * decoder.layers
    passes = (2 if adapters else 3) + work.recomputed
    replay = work.group * work.answer if work.stage == "rl" else 0
    tokens = work.rows * (work.tokens + (work.span + replay if work.stage == "rl" else 0))
    head = 2 * decoder.vocab * decoder.width * work.rows * (replay or work.labelled)
    products = passes * _products(decoder, parameters, tokens, work.tokens / 2) + 4 * head
    vision = 2 * decoder.vision_parameters * work.rows * work.visual * decoder.patches_per_token / gpu.flops / FORWARD
    training = max(products / gpu.flops / (FUSED_TRAINING if fused else TRAINING), 3 * launch)
    found = {"vision": vision * work.microbatches}
    if work.stage == "rl":
        if work.evidence and work.latents:  # short passes: forward, and twice that backward
            again = 1 if work.memory == "checkpointed" else 0
            short = 0.0 if work.recorded_span else launch  # a recorded step is launched as a whole
            training += work.latents * (3 + again) * max(short, step_seconds(decoder, weights, work, gpu, 1)) + launch
        group = replace(work, rows=work.together or work.prompts)  # rolled out together, whatever the microbatch
        prefill = _products(decoder, parameters, group.rows * work.tokens, work.tokens / 2) / gpu.flops / FORWARD
        short = 0.0 if work.static else launch
        latent, step = (max(short, step_seconds(decoder, weights, group, gpu, n)) for n in (1, work.group))
        rollout = max(prefill, launch) + (work.latents + 1) * latent + work.answer * step
        found["rollout"] = rollout * work.rollouts
    found["passes"] = training * work.microbatches
    updated = sum(local(w, setup) for w in weights if w.trained)
    found["update"] = updated * 40 / gpu.bandwidth / READING  # reads and writes of weights, moments and gradients
    return found


def step_seconds(decoder: Decoder, weights: Sequence[Weight], work: Workload, gpu: Gpu, branches: int) -> float:
    """One token on each branch of each prompt, bound by reading weights, keys and values."""
    inside = [weight for weight in weights if weight.part == "layer"]
    share = 1.0
    if decoder.experts:
        missed = (1 - decoder.experts_per_token / decoder.experts) ** (work.rows * branches)
        share = 1 - missed
    size = sum(w.bytes * (share if len(w.shape) == 3 else 1.0) for w in inside)
    head = decoder.vocab * decoder.width * decoder.itemsize
    cache = work.rows * work.tokens * 2 * decoder.key * decoder.itemsize * decoder.layers
    return (size + head + cache) / gpu.bandwidth / READING


def communication(weights: Sequence[Weight], work: Workload, setup: Setup, gathers: bool) -> dict[str, float]:
    """Bytes that one device sends, and as many that it receives, in one step."""
    if setup.world == 1:
        return {}
    share = (setup.world - 1) / setup.world
    gradients = whole_bytes(w for w in weights if w.trained)
    if not setup.sharded:
        return {"gradients (all-reduce)": 2 * gradients * share}
    whole = whole_bytes(w for w in weights if w.part != "vision" or w.trained)
    forward, backward = (1, 1)
    found: dict[str, float] = {}
    if work.stage == "rl":
        steps = work.latents + 1 if work.evidence and work.latents else 0
        spliced = 1 if work.latents else 0
        forward = 2 + spliced + steps + (1 if steps else 0)
        backward = 2 + spliced + (work.latents if steps else 0)
        alone = 1 if gathers else 1 + work.latents + 1 + work.answer
        found["weights for rollouts (all-gather)"] = whole * share * alone * (1 if gathers else work.rollouts)
    found["weights for passes (all-gather)"] = whole * share * (forward + backward) * work.microbatches
    each = backward if setup.engine == "fsdp2" else 1  # FSDP2 hands gradients on after each pass
    found["gradients (reduce-scatter)"] = gradients * share * each * work.microbatches
    return found


def link_of(gpu: Gpu, world: int) -> float:
    """Bytes per second and direction of the slowest link on the way."""
    return gpu.link if world <= gpu.per_node else min(gpu.link, gpu.network)
