"""Sections of `speed.py`: each measures some names of the table. Passes of Stage 2 with gradient are in
`speed_passes.py`, its whole steps in `speed_steps.py`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from memory import sft_batch
from realvr.backbone.types import Prompt
from realvr.errors import out_of_memory
from realvr.latent.group_rollout import Rollout, decode, rollout
from realvr.latent.sampling import Sampling
from realvr.latent.span import prefill, score, splice, think
from realvr.latent.state import State
from realvr.training.method import Step
from realvr.training.methods.lvr_sft import LvrSft, LvrSftConfig
from speed_baseline import (
    generate,
    grid_thw,
    pixels_of,
    stock,
    time_stock,
)
from speed_fit import row_too_large
from speed_kit import Bench, CannotFit, flops, step_bytes
from speed_results import Timing

QWEN_ONLY = "not measured: stock generate is set up for Qwen models only"
ONE_CALL = "stock generate of all prompts in one call: measured once, without a warm run"


def sampling(bench: Bench) -> Sampling:
    """Completions of one length."""
    return Sampling(temperature=1.0, max_new=bench.sizes.answer, stop=None)


@torch.no_grad()
def short_passes(bench: Bench) -> None:
    """Decode and latent steps of one prompt, as a share of the bandwidth."""
    backbone, sizes, results, fast = bench.backbone(), bench.sizes, bench.results, bench.switched().fast
    batch = backbone.batch(bench.prompts(1))
    visual = backbone.encode_images(batch.images)
    timing = bench.time("prefill, 1 prompt", lambda: prefill(backbone, batch, visual))
    done = flops(lambda: prefill(backbone, batch, visual))
    fraction = done / timing.seconds / bench.tflops / 1e12
    results.put("prefill_matmul_fraction", fraction, tokens=batch.ids_BT.shape[1], seconds=timing.seconds)
    state, _ = prefill(backbone, batch, visual)
    span = partial(think, backbone) if fast is None else fast.think
    timing = bench.time(f"{sizes.latents} latents, 1 prompt", lambda: span(state, sizes.latents))
    passes, columns = sizes.latents + 1 + (fast is not None), batch.ids_BT.shape[1]
    _bandwidth(bench, "latent_bandwidth_fraction", timing, passes, step_bytes(backbone, 1, columns, head=False), rows=1)
    after, _ = think(backbone, state, sizes.latents)
    run = partial(decode, backbone, after, sizes.group, sampling(bench), fast=fast)
    timing = bench.time(f"decode {sizes.group} x {sizes.answer}, 1 prompt", run)
    needed = step_bytes(backbone, sizes.group, after.length + sizes.group * sizes.answer // 2, head=True)
    counts = {} if fast is None else {"counts": dict(fast.counts)}
    _bandwidth(bench, "decode_bandwidth_fraction", timing, sizes.answer - 1, needed, rows=sizes.group, **counts)
    _logp_gap(bench, state)


def _logp_gap(bench: Bench, state: State) -> None:
    """How far log-probabilities of a rollout are from those that the plain path gives the same text. Rounding alone
    makes a gap: what matters is that options do not change its size."""
    backbone, sizes, fast = bench.backbone(), bench.sizes, bench.switched().fast
    after, z_BKD = (partial(think, backbone) if fast is None else fast.think)(state, sizes.latents)
    made = Rollout(decode(backbone, after, sizes.group, sampling(bench), seed=5, fast=fast), z_BKD, 1.0)
    ids, real, recorded = made.tensors(bench.device)
    replayed, _ = splice(backbone, state, z_BKD)
    right = score(backbone, replayed, ids, real, temperature=1.0, forbidden=backbone.forbidden_ids())[0]
    gap = (recorded - right)[real].abs()
    bench.results.put("decode_logp_gap", float(gap.mean()), largest=float(gap.max()), tokens=int(real.sum()))


def _bandwidth(bench: Bench, name: str, timing: Timing, passes: int, needed: int, rows: int, **more: object) -> None:
    step, floor = timing.seconds / passes, needed / bench.bandwidth
    facts = {"step_ms": round(step * 1e3, 3), "floor_ms": round(floor * 1e3, 3), "bytes": needed, "passes": passes}
    bench.results.put(name, floor / step, **facts, rows=rows, **timing.peaks(), **more)


@torch.no_grad()
def vision(bench: Bench) -> None:
    """The vision tower on the pictures of a prompt, pixels in main memory, against the stock call."""
    backbone = bench.backbone()
    (prompt,) = bench.prompts(1)
    pixels, count = pixels_of(prompt.images), len(prompt.images)
    what = f"{count} picture" + "s" * (count > 1)
    extra = {"image_grid_thw": grid_thw(prompt.images).to(bench.device)} if backbone.mrope else {}

    def plain() -> object:
        return backbone.core.get_image_features(pixels.to(bench.device, backbone.dtype), **extra)

    with stock(backbone):
        theirs = time_stock(bench, f"vision, stock, {what}", plain)
        done = flops(plain)
    bench.switched()
    ours = bench.time(f"vision, {what}", lambda: backbone.encode_images(prompt.images))
    fraction = done / ours.seconds / bench.tflops / 1e12
    facts = {"seconds": ours.seconds, "stock_seconds": theirs.seconds, "matmul_fraction": round(fraction, 4)}
    facts |= {"visual": bench.counts["visual_tokens"], "pictures": count}
    bench.results.put("vision_ratio", theirs.seconds / ours.seconds, **facts)


def against_generate(bench: Bench) -> None:
    """The same job by stock ``generate``: tower, prefill, G sampled completions, no latents."""
    sizes = bench.sizes
    if not generates(bench):
        for name in ("decode_vs_generate", f"decode_vs_generate_{sizes.prompts}"):
            bench.results.put(name, None, note=QWEN_ONLY)
        return
    prompts = bench.prompts(sizes.prompts)
    single, ours = generate_seconds(bench, prompts[:1]), rollout_timing(bench, prompts[:1])
    facts = {"latents": 0, "answer": sizes.answer, "group": sizes.group, **bench.counts}
    _ratio(bench, "decode_vs_generate", ours, single, prompts=1, **facts)
    ours, several = rollout_timing(bench, prompts), _in_one_call(bench, prompts)
    each = Timing([value * sizes.prompts for value in single.each], single.peak_gib)
    beside: dict[str, Any] = {"one_by_one_seconds": each.seconds}
    if several is None:
        better, beside["taken"] = each, "one by one: all in one call do not fit"
    else:
        better = min((several, each), key=lambda timing: timing.seconds)
        beside |= {"one_call_seconds": several.seconds, "one_call_repeats": len(several.each), "note": ONE_CALL}
        beside["taken"] = "the faster of both"
    _ratio(bench, f"decode_vs_generate_{sizes.prompts}", ours, better, prompts=sizes.prompts, **facts, **beside)


def generates(bench: Bench) -> bool:
    """Whether stock ``generate`` is set up for this family."""
    return bench.family.name.startswith("qwen")


def generate_seconds(bench: Bench, prompts: list[Prompt], **how: Any) -> Timing:
    """Stock ``generate`` of these prompts in one call, timed like `time_stock`."""
    backbone, sizes = bench.backbone(), bench.sizes
    with stock(backbone):
        run = generate(backbone, prompts, sizes.group, sizes.answer)
        label = f"generate, {len(prompts)} x {sizes.group} x {sizes.answer}"
        return time_stock(bench, label, run, like="generate", **how)


def _in_one_call(bench: Bench, prompts: list[Prompt]) -> Timing | None:
    """Stock ``generate`` of all of them, once and cold: it takes long. None where they do not fit."""
    try:
        return generate_seconds(bench, prompts, repeats=1, warm=0)
    except Exception as error:
        if not out_of_memory(error):
            raise
    bench.clear()
    return None


def rollout_timing(bench: Bench, prompts: list[Prompt]) -> Timing:
    """Our rollout of the same, without latents."""
    backbone, sizes, fast = bench.backbone(), bench.sizes, bench.switched().fast

    def run() -> object:
        return rollout(backbone, prompts, group=sizes.group, sampling=sampling(bench), latents=0, fast=fast)

    return bench.time(f"rollout, {len(prompts)} x {sizes.group} x {sizes.answer}, K = 0", run)


def _ratio(bench: Bench, name: str, ours: Timing, theirs: Timing, **facts: Any) -> None:
    peaks = {**ours.peaks(), "baseline_peak_gib": theirs.peak_gib}
    seconds = {"seconds": ours.seconds, "baseline_seconds": theirs.seconds}
    bench.results.put(name, theirs.seconds / ours.seconds, **seconds, **peaks, **facts)


# ---------------------------------------------------------------------- Stage 1


def stage1(bench: Bench) -> None:
    """One packed row, checkpointed, as a share of the matrix products; recomputed layers do not count as work."""
    if (why := row_too_large(bench)) is not None:
        raise CannotFit(f"a row of Stage 1 {why}")
    backbone, sizes = bench.backbone(), bench.sizes
    text = max(1, (sizes.row - sizes.visual - 100) // sizes.group)
    variable = bench.options.packed == "variable"
    batch = sft_batch(backbone, sizes.case(rows=1, stage="sft", answer=text), variable)
    batch.tokens_total = float(len(batch.labels_M))
    module = Step(LvrSft(backbone, LvrSftConfig(gradient_checkpointing=True)))
    backward = bench.switched().backward

    def run() -> None:
        loss, _ = module(batch)
        backward(loss)
        for parameter in module.parameters():
            parameter.grad = None

    timing = bench.time(f"Stage 1, one row of {batch.ids_RT.shape[1]} tokens", run)
    with torch.no_grad():
        forward = flops(lambda: module(batch))
        tower = flops(lambda: backbone.encode_images(batch.images))
    needed = 3 * (forward - tower) + tower
    facts = {"tokens": batch.ids_RT.shape[1], "labelled": len(batch.labels_M), "flops": needed}
    fraction = needed / timing.seconds / bench.tflops / 1e12
    bench.results.put("stage1_matmul_fraction", fraction, seconds=timing.seconds, **timing.peaks(), **facts)
