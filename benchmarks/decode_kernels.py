"""What the kernels of a recorded step cost on a GPU.

    python benchmarks/decode_kernels.py                  (attention of one layer, ours beside torch's operations)
    python benchmarks/decode_kernels.py --profile        (kernels of a latent and of a decoding step at the 7B shape)

The first replays CUDA graphs of a dozen layers, each with keys and values of its own, so that nothing is left in the
cache. The second runs a profiler: nothing should be timed after it in the same process.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernel_profile import kernels
from realvr.backbone import decode_kernels, small_kernels
from realvr.backbone.static import StaticPass
from realvr.latent.group_rollout import decode
from realvr.latent.span import prefill
from speed_kit import Bench, Results, about, quiet
from speed_options import parse_options
from speed_sections import sampling
from speed_sizes import FULL

LAYERS = 12
COLUMNS, SEEN = 2816, 2709  # of the trunk, rounded up; of them in use


def layers(prompts: int, branches: bool, device: torch.device) -> Callable[[], Tensor]:
    """Attention of a dozen layers of the 7B shape: 28 heads, 4 of keys and values, 128 wide."""
    kind: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    new = FULL.group if branches else 1

    def pair(*shape: int) -> tuple[Tensor, Tensor]:
        return torch.randn(*shape, **kind), torch.randn(*shape, **kind)

    trunk = [pair(prompts, 4, COLUMNS, 128) for _ in range(LAYERS)]
    own = [pair(prompts, 4, new, FULL.answer, 128) for _ in range(LAYERS)] if branches else None
    visible = torch.zeros(prompts, COLUMNS, dtype=torch.bool, device=device)
    visible[:, :SEEN] = True
    query = torch.randn(prompts, new, 28, 128, **kind).transpose(1, 2)
    key, value = (x.transpose(1, 2) for x in pair(prompts, new, 4, 128))
    column = torch.tensor([FULL.answer // 2 if branches else SEEN - 1], device=device)

    def step() -> Tensor:
        carried = StaticPass(trunk, visible, column, own)
        return [carried.attend(layer, query, key, value, 128**-0.5, None) for layer in range(LAYERS)][-1]

    return step


def recorded(step: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    with torch.no_grad(), small_kernels.recorded():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step()
    graph.replay()
    return graph, out


def microseconds(graph: torch.cuda.CUDAGraph, times: int = 20) -> float:
    """Of one layer."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    begin.record()
    for _ in range(times):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / times / LAYERS * 1e3


def attention(device: torch.device) -> None:
    print(f"{'attention of one layer':<32} {'torch':>9} {'ours':>9} {'apart':>9}")
    for branches in (True, False):
        for prompts in (1, 8):
            step = layers(prompts, branches, device)
            ours = recorded(step)
            if why := decode_kernels.why_not():
                raise SystemExit(f"there are no kernels of our own here: {why}")
            taken, decode_kernels.takes_heads = decode_kernels.takes_heads, lambda kernel, query: False
            try:
                theirs = recorded(step)
            finally:
                decode_kernels.takes_heads = taken
            apart = float((ours[1] - theirs[1]).float().norm() / theirs[1].float().norm())
            name = f"{'decoding' if branches else 'latent'} step, {prompts} prompts"
            print(f"{name:<32} {microseconds(theirs[0]):6.1f} µs {microseconds(ours[0]):6.1f} µs {apart:9.1e}")


@torch.no_grad()
def profile(device: torch.device, preset: str) -> None:
    quiet()
    results = Results(Path("profile.json"), about(FULL, preset, device, torch.bfloat16, 1), resume=False)  # not written
    bench = Bench(preset, device, torch.bfloat16, FULL, 1, time.monotonic() + 600, results)
    bench.options = parse_options("fast", device)
    backbone, fast = bench.backbone(), bench.switched().fast
    assert fast is not None
    state, _ = prefill(backbone, backbone.batch(bench.prompts(1)))
    after, _ = fast.think(state, FULL.latents)
    runs: dict[str, tuple[Callable[[], object], int]] = {
        "latent step": (lambda: fast.think(state, FULL.latents), FULL.latents + 2),
        "decoding step": (partial(decode, backbone, after, FULL.group, sampling(bench), fast=fast), FULL.answer - 1),
    }
    for name, (run, steps) in runs.items():
        print("\n".join(kernels(name, run, steps)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", action="store_true", help="kernels of whole steps instead")
    parser.add_argument("--preset", default="Qwen2.5-VL-7B")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/decode_kernels.py: CUDA graphs need a CUDA device, and there is none")
    device = torch.device("cuda")
    profile(device, args.preset) if args.profile else attention(device)


if __name__ == "__main__":
    main()
