"""Peak memory of training steps at real size against the estimate of `realvr plan`, with random weights.

    python benchmarks/memory.py --device cuda --out docs/results/memory-h200.json
    python benchmarks/memory.py --device cpu --preset tiny    (tries the script out: the peak is that of the process)

Each case builds the model on the device, runs two optimizer steps of the package's own code and records the most bytes
the allocator ever had in use. `tests/training/test_estimate_measured.py` compares the file with the estimate.
Thirteen cases take a minute and a half on one H200; the last one does not fit there, as the estimate says.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from foundation import random_backbone
from pictures import noise, pictures
from realvr.backbone.backbone import Backbone
from realvr.backbone.types import Prompt, Turn
from realvr.training.adapters import Adapters
from realvr.training.estimate import Decoder, Setup, Weight, Workload, decoder_of, estimate, weights_of
from realvr.training.gradients import defer_gradients
from realvr.training.method import Step
from realvr.training.methods.lvr_sft import LvrSft, LvrSftConfig
from realvr.training.methods.realvr import ReaLVR, ReaLVRConfig
from realvr.training.optimizer import build_optimizer
from realvr.training.rl_batch import RlBatch
from realvr.training.sections import LoraSettings, OptimSettings
from realvr.training.sft_batch import SftBatch, SftExample, pack_rows

GIB = 2**30
PLAIN: dict[str, Any] = {"split_attention": False, "recorded_span": False}
"""What the cases estimate, on a GPU too."""
PASSES = ("update", "rollout")
"""Moments of the estimate that a case without optimizer has not."""


@dataclass(frozen=True)
class Case:
    """One configuration. ``optimizer``: whether AdamW's states are there and the update is run."""

    name: str
    preset: str
    stage: str = "rl"
    memory: str = "checkpointed-prefill"
    rank: int = 0
    rows: int = 1
    grid: tuple[int, int] = (40, 64)
    microbatches: int = 1
    group: int = 8
    answer: int = 64
    latents: int = 8
    evidence: bool = True
    optimizer: bool = False
    deferred: bool = True
    """Weight gradients as training has them by default; otherwise autograd's, with a second copy in Stage 2."""
    held_out: bool = False
    """Not looked at when the estimate was made."""


SEVEN, EIGHT = "Qwen2.5-VL-7B", "Qwen3-VL-8B"
NARROW = {
    "text_config": {
        "hidden_size": 256,
        "intermediate_size": 1344,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 10752,
    },
    "vision_config": {
        "depth": 4,
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_heads": 2,
        "fullatt_block_indexes": [3],
        "out_hidden_size": 256,
    },
}
"""The 7B shape with a fourteenth of its width and 4 layers, heads of the decoder as wide as before: a CPU takes prompts
of real length. Attention's quadratic term weighs more than at full width."""
CASES = [
    Case("7B Stage 2, full, cached", SEVEN, memory="cached"),
    Case("7B Stage 2, full, cached, gradients of autograd", SEVEN, memory="cached", deferred=False),
    Case("7B Stage 2, full, checkpointed-prefill, 8 prompts", SEVEN, rows=8, held_out=True),
    Case("7B Stage 2, full, checkpointed, 5,120 visual tokens", SEVEN, memory="checkpointed", grid=(64, 80)),
    Case("7B Stage 1, full, checkpointed", SEVEN, stage="sft"),
    Case("7B Stage 2, full, AdamW, 2 microbatches", SEVEN, microbatches=2, optimizer=True),
    Case("7B Stage 1, full, AdamW", SEVEN, stage="sft", optimizer=True),
    Case("7B Stage 1, LoRA, AdamW", SEVEN, stage="sft", rank=16, optimizer=True, microbatches=2),
    Case("7B Stage 2, LoRA, AdamW, 192 answer tokens", SEVEN, rank=16, answer=192, optimizer=True, microbatches=2),
    Case("8B Stage 2, full, checkpointed-prefill, G = 16", EIGHT, group=16, held_out=True),
    Case("8B Stage 2, full, cached, K = 16", EIGHT, memory="cached", latents=16),
    Case("8B Stage 2, LoRA, cached, 2 prompts", EIGHT, memory="cached", rank=16, rows=2, optimizer=True),
    Case("8B Stage 2, LoRA, cached, 4 prompts", EIGHT, memory="cached", rank=16, rows=4, optimizer=True),
]


def tiny(case: Case, preset: str) -> Case:
    """The same at a size for a CPU."""
    return replace(
        case, preset=preset, grid=(4, 6), answer=5, group=2, latents=min(case.latents, 3), rank=case.rank // 8
    )


# ---------------------------------------------------------------------- batches


QUESTION = "What is the small sign on the left? "


def _prompt(backbone: Backbone, grid: tuple[int, int], question: str = QUESTION * 8, seed: int = 0) -> Prompt:
    """A question about noise with as many visual tokens as the grid has, or as near as whole tiles come."""
    count, width, height = pictures(backbone.processor, grid)
    images = [noise(seed * count + number, width, height) for number in range(count)]
    return backbone.prompt([Turn("user", question, images=images)])


def rl_batch(backbone: Backbone, case: Case, prompt: Prompt | None = None) -> RlBatch:
    """One microbatch of Stage 2 with random completions, latents and prototypes."""
    device, rows, width = backbone.device, case.rows, backbone.width
    batch = backbone.batch([prompt or _prompt(backbone, case.grid)] * rows)
    ids = torch.randint(40, 200, (rows, case.group, case.answer), device=device)
    answers = torch.randint(40, 200, (rows, 4, 8), device=device)
    ones = torch.ones(rows, 4, 8, dtype=torch.bool, device=device)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device)

    with torch.no_grad():
        visual = backbone.encode_images(batch.images)
    return RlBatch(
        batch=batch,
        visual=visual,
        latents_BKD=normal(rows, case.latents, width).to(backbone.dtype),
        ids_BGS=ids,
        real_BGS=torch.ones_like(ids, dtype=torch.bool),
        old_logp_BGS=normal(rows, case.group, case.answer) - 5,
        advantages_BG=normal(rows, case.group),
        policy_denominator=torch.ones((), device=device),
        positive_BD=normal(rows, width),
        negatives_BMD=normal(rows, 16, width),
        valid_BM=torch.ones(rows, 16, dtype=torch.bool, device=device),
        answers_BYS=answers,
        answers_real_BYS=ones,
        content_BYS=ones.clone(),
        wrong_BY=ones[:, :3, 0].clone(),
        prompts_total=float(rows * case.microbatches),
    )


def sft_batch(backbone: Backbone, case: Case, variable_length: bool = False) -> SftBatch:
    """Packed rows of Stage 1: each one prompt, a span over eight visual tokens, and a response."""
    prompt, markers = _prompt(backbone, case.grid), backbone.markers
    targets = torch.arange(8)
    response = torch.randint(40, 200, (case.group * case.answer,))
    span = torch.tensor([markers.start, *[markers.slot] * len(targets), markers.end])
    ids = torch.cat([prompt.ids, span, response])
    example = SftExample(Prompt(ids, prompt.images), len(prompt), targets)
    return pack_rows(backbone, [[example]] * case.rows, variable_length=variable_length).to(backbone.device)


def workload(backbone: Backbone, case: Case, batch: RlBatch | SftBatch) -> Workload:
    """What the estimate is told of a case."""
    if isinstance(batch, SftBatch):
        labelled, tokens = len(batch.labels_M) // case.rows, batch.ids_RT.shape[1]
        visual = int(batch.image_RT.sum()) // case.rows
    else:
        labelled, tokens = 0, batch.batch.ids_BT.shape[1]
        visual = len(batch.visual.features_ND) // case.rows
    return Workload(
        stage=case.stage,  # type: ignore[arg-type]
        rows=case.rows,
        tokens=tokens,
        visual=visual,
        labelled=labelled,
        latents=case.latents,
        group=case.group,
        answer=case.answer,
        evidence=case.evidence,
        readout=32,
        memory=case.memory,  # type: ignore[arg-type]
        microbatches=case.microbatches,
    )


# ---------------------------------------------------------------------- measuring


def steps(backbone: Backbone, case: Case, batch: RlBatch | SftBatch, module: Step) -> None:
    """Two optimizer steps, or two times forward and backward."""
    deferral = defer_gradients(module) if case.deferred else None
    optimizer = build_optimizer(module, OptimSettings(lr=1e-6)) if case.optimizer else None
    for _ in range(2):
        for _ in range(case.microbatches):
            loss, _ = module(batch)
            with nullcontext() if deferral is None else deferral.into_grad():
                loss.backward()
            del loss
        if optimizer is not None:
            torch.nn.utils.clip_grad_norm_([p for p in module.parameters() if p.requires_grad], 1.0)
            optimizer.step()
        for parameter in module.parameters():
            parameter.grad = None


def predicted(decoder: Decoder, weights: list[Weight], case: Case, work: Workload) -> tuple[float, str]:
    """(GiB, the fullest moment) by the estimate; a case without optimizer has no update and no states."""
    found = estimate(decoder, weights, work, Setup(deferred=case.deferred))
    moments = {name: dict(parts) for name, parts in found.moments.items() if name != "rollout"}
    if not case.optimizer:
        del moments["update"]
        for parts in moments.values():
            parts["optimizer"] = 0
    name = max(moments, key=lambda each: sum(moments[each].values()))
    return sum(moments[name].values()) / GIB, name


def measure(case: Case, device: torch.device) -> dict[str, Any]:
    """One row of the file."""
    torch.manual_seed(0)
    cuda = device.type == "cuda"
    backbone = model(case.preset, device)
    Adapters(backbone, LoraSettings(rank=case.rank), markers=case.stage == "sft")
    if case.stage == "sft":
        config = LvrSftConfig(gradient_checkpointing=case.memory != "cached")
        module, batch = Step(LvrSft(backbone, config)), sft_batch(backbone, case)
    else:
        settings = ReaLVRConfig(type="realvr", memory=case.memory, lambda_ev=0.2 if case.evidence else 0.0, **PLAIN)
        module, batch = Step(ReaLVR(backbone, settings)), rl_batch(backbone, case)
    work = workload(backbone, case, batch)
    decoder, weights = decoder_of(backbone.model), weights_of(backbone.model)
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    guess, moment = predicted(decoder, weights, case, work)
    row = {
        "name": case.name,
        "case": asdict(case),
        "workload": asdict(work),
        "estimate_gib": round(guess, 3),
        "moment": moment,
        "held_out": case.held_out,
    }
    begun = time.perf_counter()
    try:
        steps(backbone, case, batch, module)
        if cuda:
            torch.cuda.synchronize()
    except torch.OutOfMemoryError as error:
        return {**row, "error": str(error).split(". GPU")[0]}
    seconds = time.perf_counter() - begun
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak = torch.cuda.max_memory_allocated() if cuda else kilobytes * 1024
    return {**row, "measured_gib": round(peak / GIB, 3), "seconds": round(seconds, 2)}


def model(preset: str, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Backbone:
    """Random weights of a preset, a small model (``tiny:FAMILY``, ``mini:FAMILY``), or the 7B shape made ``narrow``."""
    size, _, family = preset.partition(":")
    if preset == "narrow":
        return random_backbone(SEVEN, device, dtype, 4, NARROW)
    if not family:
        return random_backbone(preset, device, dtype, None)
    import tempfile

    from realvr.zoo.tiny import build

    with tempfile.TemporaryDirectory() as folder:
        return Backbone.load(build(family, size, Path(folder) / family), dtype=dtype, device=device)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--preset", help="tiny: every case with a tiny model instead")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    families = {SEVEN: "tiny:qwen2.5-vl", EIGHT: "tiny:qwen3-vl"}
    cases = [case for case in CASES if args.only in case.name]
    if args.preset == "tiny":
        cases = [tiny(case, families[case.preset]) for case in cases]
    rows = []
    for case in cases:
        row = measure(case, device)
        rows.append(row)
        got, want = row.get("measured_gib"), row.get("estimate_gib")
        off = f"{want / got - 1:+.1%}" if got and want and device.type == "cuda" else ""
        print(f"{case.name:<58} {got} GiB, estimate {want} {off} {row.get('error', '')}", flush=True)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if args.out:  # after every case: a run that is cut off keeps what it has
            gpu = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
            size = torch.cuda.get_device_properties(device).total_memory / GIB if device.type == "cuda" else 0.0
            head = {
                "gpu": gpu,
                "gpu_gib": round(size, 2),
                "torch": torch.__version__,
                "transformers": version("transformers"),
            }
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps({**head, "rows": rows}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
