"""What ``realvr plan`` is asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from realvr.errors import UserError


@dataclass(frozen=True)
class PlanSettings:
    """A training to plan.

    Args:
        backbone: Backbone of the paper, or the start of its name; all for a table of all six.
        gpus: Number of GPUs, one process each.
        gpu: Name of the GPU, or its start: H200, H100, A100-80GB, A100-40GB, MI250X-GCD, B200.
        gpu_memory: Memory of one GPU in GiB, instead of a name. There is no step time then, and the GPU is taken for
            one of NVIDIA, where fast paths are on (see --plain).
        engine: Name of an engine, or an engine file, as in train.
        lora: Rank of LoRA adapters; 0 trains all weights of the decoder. --lora alone is 16.
        stage: sft is Stage 1, rl Stage 2.
        batch: Prompts (Stage 1: packed rows) per step over all GPUs. Default: one microbatch per GPU.
        microbatch: Prompts (packed rows) that one GPU passes through the model at a time.
        visual_tokens: Visual tokens of a prompt. Default: the paper's limit, or what the family fixes.
        text_tokens: Text tokens of a prompt.
        row_tokens: Stage 1: tokens of a packed row.
        group: Stage 2: completions per prompt.
        latents: K.
        answer_tokens: Stage 2: tokens of a completion. Stage 1: learned tokens of a packed row.
        rollout_batch: Stage 2: prompts that one GPU rolls out together. Default: as many of its step as fit.
        evidence: Stage 2: with the evidence loss (ReaLVR), or without (LVR-RL).
        memory: What is recomputed in the backward pass; Stage 1 knows cached and the rest.
        recompute: Stage 2: share of the layers of prompts and completions that are recomputed.
        plain: Without model.fused_layers and, in Stage 2, split_attention and recorded_span, which a run
            has where auto switches them on: dense models on NVIDIA GPUs, with an engine that leaves them whole.
        master_weights: 32-bit copies of the weights in the optimizer.
        reserve: Share of the memory that is left free: CUDA context, communication buffers, fragmentation.
    """

    backbone: str
    gpus: int = 8
    gpu: str | None = None
    gpu_memory: float | None = None
    engine: str = "fsdp2"
    lora: int = 0
    stage: Literal["sft", "rl"] = "rl"
    batch: int | None = None
    microbatch: int = 1
    visual_tokens: int | None = None
    text_tokens: int = 150
    row_tokens: int = 4096
    group: int = 8
    latents: int = 8
    answer_tokens: int | None = None
    rollout_batch: int | None = None
    evidence: bool = True
    memory: Literal["cached", "checkpointed-prefill", "checkpointed"] = "checkpointed-prefill"
    recompute: float = 1.0
    plain: bool = False
    master_weights: bool = True
    reserve: float = 0.08

    def __post_init__(self) -> None:
        least = {"gpus": 1, "microbatch": 1, "text_tokens": 1, "row_tokens": 1, "group": 1, "latents": 0, "lora": 0}
        for name, low in least.items():
            value = getattr(self, name)
            if value < low:
                raise UserError(f"--{name.replace('_', '-')} is {value}: it is at least {low}")
        for name in ("visual_tokens", "answer_tokens", "batch", "rollout_batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"--{name.replace('_', '-')} is {value}: it is at least 1")
        if not 0 < self.recompute <= 1:
            raise UserError(f"--recompute is {self.recompute:g}: it is a share of the layers, above 0 and at most 1")
        if self.recompute < 1 and (self.stage != "rl" or self.memory == "cached"):
            raise UserError("--recompute is for Stage 2 (--stage rl) with another --memory than cached")
        if not 0 <= self.reserve < 1:
            raise UserError(f"--reserve is {self.reserve:g}: it is a share of the memory, such as 0.08")
        share = self.gpus * self.microbatch
        if self.batch is not None and self.batch % share:
            below, above = self.batch // share * share, -(-self.batch // share) * share
            near = f"{below} or {above}" if below else f"{above}"
            raise UserError(
                f"--batch {self.batch} does not divide into microbatches of {self.microbatch} on {self.gpus} GPUs: "
                f"take {near}"
            )
