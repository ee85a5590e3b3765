"""What rounding in steps of one column does to a rollout, for `backbone/test_decode_kernels.py`: in a process of its
own, where Triton's interpreter runs our kernel for attention with the roundings of a GPU. Prints ``name number`` lines.

TRITON_INTERPRET=1 python tests/rounding_cases.py attention           (one step, beside float64)
TRITON_INTERPRET=1 python tests/rounding_cases.py FAMILY [ROLLOUTS]   (texts of a tiny model, beside their replay)
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

import pretend_triton
from kernel_cases import noise, taken
from realvr.backbone import Backbone, decode_kernels
from realvr.backbone.static import StaticPass
from realvr.latent import Sampling, prefill, score, splice
from realvr.latent.fast import FastDecode
from realvr.latent.group_rollout import rollout

BATCH, KV_HEADS, SHARE, GROUP, LENGTH, SIZE, WIDTH, AT = 2, 2, 4, 8, 300, 64, 64, 40


def attention() -> None:
    """The error of a row, relative to its length, in the mean: in bfloat16 through torch and through our kernel."""
    query = noise(BATCH, GROUP, KV_HEADS * SHARE, WIDTH)
    key, value = (noise(BATCH, GROUP, KV_HEADS, WIDTH) for _ in "kv")
    trunk, own = ([noise(BATCH, KV_HEADS, *size, WIDTH) for _ in "kv"] for size in ((LENGTH,), (GROUP, SIZE)))
    every = [x.bfloat16() for x in (query, key, value, *trunk, *own)]

    def attended(dtype: torch.dtype, ours: bool) -> Tensor:
        q, k, v, *kept = (x.to(dtype, copy=True) for x in every)
        columns = [(kept[0], kept[1])], torch.ones(BATCH, LENGTH, dtype=torch.bool), torch.tensor([AT])
        step = StaticPass(*columns, [(kept[2], kept[3])])
        with taken(ours):
            return step.attend(0, *(x.transpose(1, 2) for x in (q, k, v)), WIDTH**-0.5, None).double()

    right = attended(torch.float64, False)
    for name, ours in (("torch", False), ("kernel", True)):
        off = attended(torch.bfloat16, ours) - right
        print(name, float((off.norm(dim=-1) / right.norm(dim=-1)).mean()))


@torch.no_grad()
def replayed(family: str, rollouts: int) -> None:
    """How far log-probabilities recorded in a rollout are from those of the replay, which is what the loss divides by
    them: in bfloat16, layers as stock has them, the rollout decoded in the plain way and in static shapes, through
    torch and through our kernel. With the kernel by name, how often it ran."""
    import device_parity

    with tempfile.TemporaryDirectory() as folder:
        backbone = Backbone.load(device_parity.prepare(family, Path(folder)), dtype=torch.bfloat16, device="cpu")
    prompts = device_parity.questions(backbone)[:3]
    for name in ("plain", "torch", "kernel"):
        apart = []
        for seed in range(rollouts):
            fast = None if name == "plain" else FastDecode(backbone, recorded=False, columns=64, tokens=8)
            with taken(name == "kernel"):
                made = rollout(
                    backbone, prompts, group=4, sampling=Sampling(max_new=8), seed=seed, latents=4, fast=fast
                )
                launched = dict(decode_kernels.launched)
            ids, real, recorded = made.tensors()
            state, _ = prefill(backbone, backbone.batch(prompts))
            state, _ = splice(backbone, state, made.latents_BKD.to(backbone.dtype))
            options = {"temperature": made.temperature, "forbidden": backbone.forbidden_ids()}
            apart.append((score(backbone, state, ids, real, **options)[0] - recorded)[real].abs())
        found = torch.cat(apart)
        print(f"{name}, mean", float(found.mean()))
        print(f"{name}, median", float(found.median()))
    for kernel, count in launched.items():
        print(f"{kernel}, launched", count)


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    pretend_triton.round_as_a_gpu()
    decode_kernels._processors = lambda _: 132  # type: ignore[assignment]
    if sys.argv[1] == "attention":
        attention()
    else:
        replayed(sys.argv[1], int(sys.argv[2]) if sys.argv[2:] else 2)
