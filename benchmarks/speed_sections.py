"""The sections of `speed.py`: each measures some names of the table. Stage 2 as a whole step is in `speed_steps.py`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from memory import sft_batch
from realvr.backbone.backbone import Backbone
from realvr.backbone.types import Prompt
from realvr.errors import out_of_memory
from realvr.latent.group_rollout import Rollout, decode, rollout
from realvr.latent.sampling import Sampling
from realvr.latent.span import prefill, score, splice, think
from realvr.latent.state import State
from realvr.maths import grpo
from realvr.training.method import Step
from realvr.training.methods.lvr_sft import LvrSft, LvrSftConfig
from realvr.training.methods.realvr import ReaLVR, ReaLVRConfig
from realvr.training.rl_batch import RlBatch
from speed_baseline import BASELINE, examples, generate, naive_pass, naive_seconds, stock, time_stock
from speed_kit import Bench, DoesNotFit, flops, memory_mode, step_bytes
from speed_results import Timing

TRIES = ("cached", "checkpointed-prefill 0.25", "checkpointed-prefill", "checkpointed")
"""Modes of the train part, one with a share of the layers that are recomputed, in the order in which they are tried:
the one that needs most memory first, while nothing else is held."""
QWEN_ONLY = "not measured: stock generate is set up for Qwen models only"
CACHED_TRIES = 3
"""Sizes of microbatches that are tried with `cached`; smaller ones are slower."""


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
    """The vision tower on one picture, pixels in main memory, against the stock call."""
    backbone = bench.backbone()
    (prompt,) = bench.prompts(1)
    image = prompt.images[0]
    grid = torch.tensor([[1, image.grid.rows * image.grid.merge, image.grid.cols * image.grid.merge]])
    extra = {"image_grid_thw": grid.to(bench.device)} if backbone.mrope else {}

    def plain() -> object:
        return backbone.core.get_image_features(image.pixels.to(bench.device, backbone.dtype), **extra)

    with stock(backbone):
        theirs = time_stock(bench, "vision, stock, 1 picture", plain)
        done = flops(plain)
    bench.switched()
    ours = bench.time("vision, 1 picture", lambda: backbone.encode_images(prompt.images))
    fraction = done / ours.seconds / bench.tflops / 1e12
    facts = {"seconds": ours.seconds, "stock_seconds": theirs.seconds, "matmul_fraction": round(fraction, 4)}
    bench.results.put("vision_ratio", theirs.seconds / ours.seconds, **facts, visual=image.tokens)


def against_generate(bench: Bench) -> None:
    """The same job by stock ``generate``: tower, prefill, G sampled completions, no latents."""
    sizes, backbone = bench.sizes, bench.backbone()
    prompts = bench.prompts(sizes.prompts)
    if not backbone.mrope:
        for name in ("decode_vs_generate", f"decode_vs_generate_{sizes.prompts}"):
            bench.results.put(name, None, note=QWEN_ONLY)
        return
    single, ours = generate_seconds(bench, prompts[:1]), rollout_timing(bench, prompts[:1])
    facts = {"latents": 0, "answer": sizes.answer, "group": sizes.group, "text_tokens": bench.text_tokens}
    _ratio(bench, "decode_vs_generate", ours, single, prompts=1, **facts)
    ours, several = rollout_timing(bench, prompts), _in_one_call(bench, prompts)
    each = Timing([value * sizes.prompts for value in single.each], single.peak_gib)
    beside: dict[str, Any] = {"one_by_one_seconds": each.seconds}
    if several is None:
        better, beside["taken"] = each, "one by one: all in one call do not fit"
    else:
        better = min((several, each), key=lambda timing: timing.seconds)
        beside |= {"one_call_seconds": several.seconds, "taken": "the faster of both"}
    _ratio(bench, f"decode_vs_generate_{sizes.prompts}", ours, better, prompts=sizes.prompts, **facts, **beside)


def generate_seconds(bench: Bench, prompts: list[Prompt]) -> Timing:
    """Stock ``generate`` of these prompts in one call."""
    backbone, sizes = bench.backbone(), bench.sizes
    with stock(backbone):
        run = generate(backbone, prompts, sizes.group, sizes.answer)
        return time_stock(bench, f"generate, {len(prompts)} x {sizes.group} x {sizes.answer}", run, like="generate")


def _in_one_call(bench: Bench, prompts: list[Prompt]) -> Timing | None:
    """Stock ``generate`` of all of them; None where they do not fit."""
    try:
        return generate_seconds(bench, prompts)
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


# ---------------------------------------------------------------------- the train part


class TrainPass:
    """Forward and backward over microbatches of one step; the gradients are dropped."""

    def __init__(self, bench: Bench, batches: list[RlBatch], memory: str, evidence: bool, rank: int = 0) -> None:
        self.batches, self.device = batches, bench.device
        backbone, self.backward = bench.backbone(rank), bench.switched(rank).backward
        weight = 0.2 if evidence else 0.0
        how = {**memory_mode(memory), "lambda_ev": weight}
        config = ReaLVRConfig(type="realvr", **how, **bench.options.passes())
        self.method = ReaLVR(backbone, config)
        self.module = Step(self.method)

    def __call__(self) -> torch.Tensor:
        total = torch.zeros((), device=self.device)
        for batch in self.batches:
            loss, _ = self.module(batch)
            self.backward(loss)
            total += loss.detach()
        for parameter in self.module.parameters():
            parameter.grad = None
        return total

    @property
    def span_counts(self) -> dict[str, int] | None:
        """Spans that were recorded, replayed, or run in the plain way after all; None where none is to be recorded."""
        return span_counts(self.method)


def span_counts(method: ReaLVR) -> dict[str, int] | None:
    return None if method.recorded is None else dict(method.recorded.counts)


def cut(bench: Bench, prompts: int, size: int, rank: int = 0) -> list[RlBatch]:
    """``prompts`` prompts in microbatches of ``size``, with the denominators of the whole step."""
    batches = [bench.rl_batch(size, rank) for _ in range(prompts // size)]
    whole = sum(float(grpo.normalizer(batch.real_BGS, "grpo", bench.sizes.answer)) for batch in batches)
    for batch in batches:
        batch.policy_denominator = torch.tensor(whole, device=bench.device)
        batch.prompts_total = float(prompts)
    return batches


def best_mode(bench: Bench) -> tuple[str, int] | None:
    """Memory mode and microbatch of the fastest pass that fits, None where none does; each is tried twice, and the
    second time counts. ``train_part_tries`` has them all."""
    sizes = bench.sizes.microbatches(bench.sizes.microbatch)
    tried: list[dict[str, Any]] = []
    for memory in TRIES:
        for size in sizes[:CACHED_TRIES] if memory == "cached" else sizes:
            bench.in_time()
            bench.clear()
            tried.append({"memory": memory, "microbatch": size, **_tried(bench, memory, size)})
            print(f"  try: {', '.join(f'{key} {value}' for key, value in tried[-1].items())}", flush=True)
            if "error" in tried[-1]:
                bench.drop()  # with the gradients that the pass has left
            elif memory != "cached":
                break  # smaller microbatches only where that does not fit
    bench.clear()
    fitting = [each for each in tried if "seconds" in each]
    best = min(fitting, key=lambda each: each["seconds"], default=None)
    chosen = None if best is None else f"{best['memory']}, microbatches of {best['microbatch']}"
    bench.results.put("train_part_tries", chosen, prompts=bench.sizes.prompts, tries=tried)
    return None if best is None else (best["memory"], best["microbatch"])


def _tried(bench: Bench, memory: str, size: int) -> dict[str, Any]:
    """Seconds and peaks of one way; after a return nothing of it is held any more."""
    try:
        run = TrainPass(bench, cut(bench, bench.sizes.prompts, size), memory, True)
        timing = bench.time("", run, repeats=1, keep=False)
        return {"seconds": round(timing.seconds, 5), **timing.peaks(), "span_counts": run.span_counts}
    except Exception as error:
        if not out_of_memory(error):
            raise
        return {"error": "does not fit"}


def train_part(bench: Bench) -> None:
    """Forward and backward of one step, per prompt, against the plain reading of the paper; the cost of evidence."""
    sizes = bench.sizes
    bench.drop()
    mode = best_mode(bench)
    ours = (
        None if mode is None else evidence_overhead(bench, f"evidence_overhead_{sizes.prompts}", sizes.prompts, *mode)
    )
    bench.clear()
    evidence_overhead(bench, "evidence_overhead_1_full", 1, "cached", 1)
    bench.clear()
    if mode is None or ours is None:
        raise DoesNotFit(f"passes of {sizes.prompts} prompts fit in no memory mode; see train_part_tries")
    for kind in ("paper", "release"):
        seconds, facts = naive_seconds(bench, kind)
        each = ours.seconds / sizes.prompts
        facts |= {"memory": mode[0], "microbatch": mode[1], "prompts": sizes.prompts, "our_peak_gib": ours.most_gib}
        facts["span_counts"] = bench.results.inputs(f"evidence_overhead_{sizes.prompts}")["span_counts"]
        bench.results.put(f"train_part_ratio_{kind}", seconds / each, seconds_per_prompt=each, **facts)
        bench.clear()
    loss_gap(bench)


def loss_gap(bench: Bench) -> None:
    """The relative difference between the baseline's loss and ours on the same microbatch."""
    backbone = bench.backbone()
    (batch,) = cut(bench, 1, 1)
    with stock(backbone, checkpointed=True):
        theirs = float(naive_pass(backbone, examples(backbone, batch, tower=False)).loss)
    mine = float(TrainPass(bench, [batch], "cached", True)())
    bench.results.put("loss_gap", abs(mine - theirs) / abs(theirs), ours=mine, baseline=theirs, of=BASELINE)


def evidence_overhead(bench: Bench, name: str, prompts: int, memory: str, size: int, rank: int = 0) -> Timing:
    """What the evidence loss costs on top of LVR-RL: (ReaLVR - LVR-RL) / LVR-RL. Returns the time of ReaLVR."""
    batches = cut(bench, prompts, size, rank)
    place = f"{prompts} prompts, {memory}, microbatches of {size}" + (f", LoRA {rank}" if rank else "")
    plain = bench.time(f"train part, LVR-RL, {place}", TrainPass(bench, batches, memory, False, rank))
    run = TrainPass(bench, batches, memory, True, rank)
    full = bench.time(f"train part, ReaLVR, {place}", run)
    facts = {"memory": memory, "microbatch": size, "rank": rank, **full.peaks(), "span_counts": run.span_counts}
    if rank:
        facts["kernel_layers"] = kernel_layers(bench.backbone(rank))
    seconds = {"lvr_rl_seconds": plain.seconds, "realvr_seconds": full.seconds, "text_tokens": bench.text_tokens}
    bench.results.put(name, full.seconds / plain.seconds - 1, **seconds, **facts)
    return full


def lora_evidence(bench: Bench) -> None:
    """The same with adapters, one prompt."""
    evidence_overhead(bench, "evidence_overhead_1_lora", 1, "cached", 1, bench.sizes.rank)


def kernel_layers(backbone: Backbone) -> str:
    """Adapted layers that kernels of our own compute, of all."""
    from peft.tuners.lora import Linear  # not needed for anything else

    layers = [module for module in backbone.model.modules() if isinstance(module, Linear)]
    return f"{sum(getattr(each, 'kernels', None) is not None for each in layers)} of {len(layers)}"


# ---------------------------------------------------------------------- Stage 1


def stage1(bench: Bench) -> None:
    """One packed row, checkpointed, as a share of the matrix products; recomputed layers do not count as work."""
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
