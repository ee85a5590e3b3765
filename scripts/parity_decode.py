"""Static and recorded decoding with adapters, and rows that move to smaller buffers: checks of `device_parity.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from parity_span import flat, vectors
from torch import Tensor

from realvr.backbone import Backbone, Prompt
from realvr.latent import Sampling, graphs, prefill, think
from realvr.latent.fast import FastDecode
from realvr.latent.group_rollout import Rollout, rollout
from realvr.training.adapters import Adapters
from realvr.training.sections import LoraSettings

if TYPE_CHECKING:
    from parity_paths import Found, Paths

K, ROWS = 8, 8
SAMPLING = Sampling(max_new=12)
ENDING = Sampling(max_new=24)
ENDS = range(300, 420)
"""Ids that also end a completion, so that rows end at different steps."""
MODES = ("static", "graph")
ADAPTED = [f"{mode} decode with adapters{by_default}" for mode in MODES for by_default in ("", ", as by default")]

# name -> (measure, float32 tolerance, bfloat16 floor); a floor of None means float32 only
CHECKS: dict[str, tuple[str, float, float | None]] = {
    **{f"{way}: latents": ("relative", 1e-5, 0.05) for way in ADAPTED},
    **{f"{way}: log-probs": ("absolute", 1e-4, 0.2) for way in ADAPTED},
    **{f"{way}: texts": ("absolute", 0.0, None) for way in ADAPTED},
    **{f"{way}: after an update": ("relative", 1e-5, 0.05) for way in ADAPTED},
    **{f"{mode} decode, rows move: log-probs": ("absolute", 1e-4, 0.2) for mode in MODES},
    **{f"{mode} decode, rows move: texts": ("absolute", 0.0, None) for mode in MODES},
    "graph decode after a failed recording: log-probs": ("absolute", 1e-4, 0.2),
    "graph decode after a failed recording: texts": ("absolute", 0.0, None),
}


@torch.no_grad()
def with_adapters(paths: Paths, mode: str, default: bool = False) -> Found:
    """As Stage 2 with LoRA rolls out, before and after an update of the adapters in place. ``default``: with all that
    is on by default."""
    ours, plain, truth = (
        paths.load(paths.dtype, paths.device, default),
        paths.load(paths.dtype, paths.device),
        paths.load(torch.float32, str(paths.truth.device)),
    )
    prompts, name = paths.ask(ours), f"{mode} decode with adapters" + ", as by default" * default
    kernels = default and paths.dense  # experts have none by default
    adapters = {id(backbone): _adapted(backbone, kernels and backbone is ours) for backbone in (ours, plain, truth)}
    fast = FastDecode(ours, recorded=mode == "graph", **paths.buffers)

    def sampled(backbone: Backbone, fast: FastDecode | None) -> Rollout:
        with adapters[id(backbone)].still():
            return rollout(backbone, prompts, group=4, sampling=SAMPLING, seed=5, latents=K, fast=fast)

    with paths.adapting(name, {"narrow", "widen"} if kernels else set()):
        mine = sampled(ours, fast)
    found = _compared(paths, name, plain, truth, mine, sampled(plain, None))
    for backbone in (ours, plain, truth):
        _adapt(backbone, 2)
    latents = [sampled(*way).latents_BKD for way in ((ours, fast), (plain, None))]
    right = think(truth, prefill(truth, truth.batch(prompts))[0], K)[1]
    found[f"{name}: after an update"] = (
        vectors(latents[:1]),
        vectors([right]),
        None if paths.exact else vectors(latents[1:]),
    )
    paths.count(name, fast.counts, mode == "graph")
    return found


def _adapted(backbone: Backbone, kernels: bool) -> Adapters:
    made = Adapters(backbone, LoraSettings(rank=4, alpha=8, kernels=kernels))
    _adapt(backbone, 1)
    return made


def _adapt(backbone: Backbone, seed: int) -> None:
    """The same adapters in every number format."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(backbone.model.named_parameters()):
        if "lora_" in name:
            parameter.copy_((torch.randn(parameter.shape, generator=generator) * 0.05).bfloat16())


@torch.no_grad()
def moving(paths: Paths, mode: str) -> Found:
    """Prompts that go on move to buffers of half the rows, several times."""
    ours, truth = paths.ours, paths.truth
    asked = paths.ask(ours)
    prompts = [asked[i % len(asked)] for i in range(ROWS)]
    before = ours.eos_ids
    try:
        ours.eos_ids = [*before, *ENDS]
        for first in range(0, 16 * ROWS, ROWS):  # when texts end depends on family, numbers and device
            seeds = list(range(first, first + ROWS))
            fast = FastDecode(ours, recorded=mode == "graph", compact=2, **paths.buffers)
            mine = rollout(ours, prompts, sampling=ENDING, seed=seeds, latents=K, fast=fast)
            if fast.counts["moved"] > 1 or fast.counts["plain"]:
                break
        else:
            raise AssertionError("rows did not move twice in 16 tries: other seeds are needed")
        plain = rollout(ours, prompts, sampling=ENDING, seed=seeds, latents=K)
    finally:
        ours.eos_ids = before
    name = f"{mode} decode, rows move"
    paths.count(name, fast.counts, mode == "graph")
    found = _compared(paths, name, ours, truth, mine, plain, prompts)
    del found[f"{name}: latents"]
    return found


@torch.no_grad()
def after_a_failure(paths: Paths) -> Found:
    """A recording that breaks off in the middle of a layer leaves nothing behind that the next one would meet."""
    ours, prompts = paths.ours, paths.ask(paths.ours)

    def sampled(fast: FastDecode | None) -> Rollout:
        return rollout(ours, prompts, group=4, sampling=SAMPLING, seed=6, latents=K, fast=fast)

    def fail(*_: object) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("broken off on purpose")

    fast = FastDecode(ours, recorded=True, **paths.buffers)
    survey = graphs.Survey.of(ours)
    hook = ours.decoder.layers[-1].register_forward_pre_hook(fail)
    try:
        fast._survey, fast._settled = survey, True  # as it was: a hook would be seen and nothing recorded
        sampled(fast)
    finally:
        hook.remove()
    if fast.recorded or fast.counts["recorded"]:
        raise AssertionError("the recording did not break off")
    fast = FastDecode(ours, recorded=True, **paths.buffers)
    name = "graph decode after a failed recording"
    mine = sampled(fast)
    paths.count(name, fast.counts, True)
    found = _compared(paths, name, ours, paths.truth, mine, sampled(None), prompts)
    del found[f"{name}: latents"]
    return found


def _compared(
    paths: Paths,
    name: str,
    ours: Backbone,
    truth: Backbone,
    mine: Rollout,
    plain: Rollout,
    prompts: list[Prompt] | None = None,
) -> Found:
    """Latents and log-probabilities against the truth, texts against the plain way."""
    prompts = paths.ask(ours) if prompts is None else prompts
    states = {id(each): prefill(each, each.batch(prompts))[0] for each in (ours, truth)}
    z_right = think(truth, states[id(truth)], K)[1]
    ids, real, recorded = mine.tensors()

    def scored(backbone: Backbone) -> Tensor:
        return flat([paths._scored(backbone, states[id(backbone)], mine)[real]])

    exact = paths.exact
    found: Found = {
        f"{name}: latents": (
            vectors([mine.latents_BKD]),
            vectors([z_right]),
            None if exact else vectors([plain.latents_BKD]),
        ),
        f"{name}: log-probs": (flat([recorded[real]]), scored(truth), None if exact else scored(ours)),
    }
    if exact:
        other = plain.tensors()[0]
        size = max(ids.shape[-1], other.shape[-1])
        both = [torch.nn.functional.pad(x, (0, size - x.shape[-1]), value=-1) for x in (ids, other)]
        found[f"{name}: texts"] = (flat(both[:1]), flat(both[1:]), None)
    return found
