"""Forward and backward of Stage 2, for `speed.py`: ours in the best memory mode against the plain reading of the paper,
and what evidence and adapters cost."""

from __future__ import annotations

from typing import Any

import torch

from realvr.backbone.backbone import Backbone
from realvr.errors import out_of_memory
from realvr.maths import grpo
from realvr.training.method import Step
from realvr.training.methods.realvr import ReaLVR, ReaLVRConfig
from realvr.training.rl_batch import RlBatch
from speed_baseline import BASELINE, examples, loss_name, naive_pass, naive_seconds, stock
from speed_fit import passes_too_large
from speed_kit import Bench, CannotFit, DoesNotFit
from speed_results import Timing
from speed_sizes import memory_mode

TRIES = ("cached", "checkpointed-prefill 0.25", "checkpointed-prefill", "checkpointed")
"""Modes of the train part, one with a share of the layers that are recomputed, in the order in which they are tried:
the one that needs most memory first, while nothing else is held."""
CACHED_TRIES = 3
"""Sizes of microbatches that are tried with `cached`; smaller ones are slower."""
SAME_MODES = ("checkpointed-prefill", "checkpointed")
"""Ours beside a baseline that recomputes all layers of all passes. The first one keeps latent steps, the last one does
as the baseline."""
STEADY = 15
"""Repeats of quick passes whose times are compared."""


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
    second time counts. ``train_part_tries`` has them all. Not tried: what recomputes more, in microbatches no larger,
    than what fits, as it is slower; and what clearly does not fit."""
    sizes = bench.sizes.microbatches(bench.sizes.microbatch)
    tried: list[dict[str, Any]] = []
    largest = 0
    for memory in TRIES:
        for size in sizes[:CACHED_TRIES] if memory == "cached" else sizes:
            if size <= largest:
                break
            tried.append(_tried(bench, memory, size))
            if "seconds" in tried[-1]:
                largest = size
    bench.clear()
    fitting = [each for each in tried if "seconds" in each]
    best = min(fitting, key=lambda each: each["seconds"], default=None)
    chosen = None if best is None else f"{best['memory']}, microbatches of {best['microbatch']}"
    bench.results.put("train_part_tries", chosen, prompts=bench.sizes.prompts, tries=tried)
    return None if best is None else (best["memory"], best["microbatch"])


def same_modes(bench: Bench, size: int) -> dict[str, Any]:
    """Seconds of our pass in the modes that recompute as the baseline does, one warm run each."""
    inputs = bench.results.inputs("train_part_tries")
    known = {(each["memory"], each["microbatch"]): each for each in inputs["tries"]}
    found = {memory: known.get((memory, size)) or _tried(bench, memory, size) for memory in SAME_MODES}
    bench.clear()
    return {memory: each["seconds"] for memory, each in found.items() if "seconds" in each}


def _tried(bench: Bench, memory: str, size: int) -> dict[str, Any]:
    """One way, with seconds and peaks where it fits; nothing of it is held any more."""
    bench.in_time()
    bench.clear()
    found: dict[str, Any] = {"memory": memory, "microbatch": size}
    if (why := passes_too_large(bench, bench.sizes.prompts, size, memory)) is not None:
        found["error"] = f"not tried: {why}"
    else:
        found |= _run(bench, memory, size)
        if "error" in found:
            bench.drop()  # with the gradients that the pass has left
    print(f"  try: {', '.join(f'{key} {value}' for key, value in found.items())}", flush=True)
    return found


def _run(bench: Bench, memory: str, size: int) -> dict[str, Any]:
    """Seconds and peaks; after a return nothing of the pass is held any more."""
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
    sizes, results = bench.sizes, bench.results
    bench.drop()
    mode = best_mode(bench)
    ours = (
        None if mode is None else evidence_overhead(bench, f"evidence_overhead_{sizes.prompts}", sizes.prompts, *mode)
    )
    bench.clear()
    if (why := passes_too_large(bench, 1, 1, "cached")) is None:
        evidence_overhead(bench, "evidence_overhead_1_full", 1, "cached", 1)
    else:
        results.put("evidence_overhead_1_full", None, note=f"not tried: {why}")
    bench.clear()
    if mode is None or ours is None:
        tries = results.inputs("train_part_tries")["tries"]
        error = CannotFit if all(each["error"].startswith("not tried") for each in tries) else DoesNotFit
        raise error(f"passes of {sizes.prompts} prompts fit in no memory mode; see train_part_tries")
    same = same_modes(bench, mode[1])
    for kind in ("paper", "release"):
        seconds, facts = naive_seconds(bench, kind)
        each = ours.seconds / sizes.prompts
        facts |= {"memory": mode[0], "microbatch": mode[1], "prompts": sizes.prompts, "our_peak_gib": ours.most_gib}
        facts["span_counts"] = results.inputs(f"evidence_overhead_{sizes.prompts}")["span_counts"]
        facts |= same_ratios(seconds, same, sizes.prompts)
        results.put(f"train_part_ratio_{kind}", seconds / each, seconds_per_prompt=each, **facts)
        bench.clear()
    loss_gap(bench)


def same_ratios(baseline: float, seconds: dict[str, float], prompts: int) -> dict[str, Any]:
    """The ratio if ours recomputed as the baseline does; of the last of `SAME_MODES` by itself."""
    ratios = {memory: round(baseline * prompts / ours, 4) for memory, ours in seconds.items()}
    facts = {"same_mode_seconds": seconds, "same_mode_ratios": ratios, "same_mode_repeats": 1}
    return {"same_mode_ratio": ratios.get(SAME_MODES[-1]), **facts}


def loss_gap(bench: Bench) -> None:
    """The relative difference between the baseline's loss and ours on the same microbatch, which is that of its
    timing."""
    backbone = bench.backbone()
    (batch,) = cut(bench, 1, 1)
    known = bench.losses.get(loss_name(bench, "paper"))
    if known is None:
        with stock(backbone, checkpointed=True):
            known = naive_pass(backbone, examples(backbone, batch, tower=False)).loss
    theirs, mine = float(known), float(TrainPass(bench, [batch], "cached", True)())
    bench.results.put("loss_gap", abs(mine - theirs) / abs(theirs), ours=mine, baseline=theirs, of=BASELINE)


def evidence_overhead(bench: Bench, name: str, prompts: int, memory: str, size: int, rank: int = 0) -> Timing:
    """What the evidence loss costs on top of LVR-RL: (ReaLVR - LVR-RL) / LVR-RL. Returns the time of ReaLVR."""
    batches = cut(bench, prompts, size, rank)
    place = f"{prompts} prompts, {memory}, microbatches of {size}" + (f", LoRA {rank}" if rank else "")
    plain = bench.time(f"train part, LVR-RL, {place}", TrainPass(bench, batches, memory, False, rank), quick=STEADY)
    run = TrainPass(bench, batches, memory, True, rank)
    full = bench.time(f"train part, ReaLVR, {place}", run, quick=STEADY)
    facts = {"memory": memory, "microbatch": size, "rank": rank, **full.peaks(), "span_counts": run.span_counts}
    if rank:
        facts["kernel_layers"] = kernel_layers(bench.backbone(rank))
    for kind, timing in (("lvr_rl", plain), ("realvr", full)):
        facts |= {f"{kind}_seconds": timing.seconds, f"{kind}_repeats": len(timing.each)}
        facts[f"{kind}_spread"] = dict(zip(("min", "median", "max"), timing.spread, strict=True))
    bench.results.put(name, full.seconds / plain.seconds - 1, **facts, **bench.counts)
    return full


def lora_evidence(bench: Bench) -> None:
    """The same with adapters, one prompt."""
    evidence_overhead(bench, "evidence_overhead_1_lora", 1, "cached", 1, bench.sizes.rank)


def kernel_layers(backbone: Backbone) -> str:
    """Adapted layers that kernels of our own compute, of all."""
    from peft.tuners.lora import Linear  # not needed for anything else

    layers = [module for module in backbone.model.modules() if isinstance(module, Linear)]
    return f"{sum(getattr(each, 'kernels', None) is not None for each in layers)} of {len(layers)}"
