"""What an adapted layer costs on a GPU: by our kernels, as one node with operations of torch, and with peft's forward.

    python benchmarks/adapter_kernels.py            (layers of the 7B shape, rank 16, beside the layer without adapter)
    python benchmarks/adapter_kernels.py --tiles    (each kernel with other tiles, as gigabytes per second)

Few rows are a forward pass without gradient, replayed from a CUDA graph; many are forward and backward. Inputs are
larger than the cache, or there are several of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import product
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from realvr.training import adapter_kernels

SHAPES = {"queries": (3584, 3584), "keys": (3584, 512), "gate": (3584, 18944), "down": (18944, 3584)}
FEW, MANY = (1, 8, 64), (2709, 8 * 2709)
RANK = 16
COPIES = 8
"""Layers that are passed one after the other, so that no weight is in the cache."""
TILES = tuple(product((32, 64, 128), (64, 128)))


def layers(inputs: int, outputs: int, how: str) -> list[nn.Module]:
    """``how``: base, peft, thin or kernels."""
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import Linear

    from realvr.training.thin_lora import thin

    made: list[nn.Module] = []
    device = torch.device("cuda", torch.cuda.current_device())
    for _ in range(COPIES):
        net = nn.Sequential(nn.Linear(inputs, outputs, device=device, dtype=torch.bfloat16)).requires_grad_(False)
        if how == "base":
            made.append(net[0])
            continue
        config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=["0"])
        layer: Any = get_peft_model(net, thin(config)).base_model.model[0]
        layer.lora_B["default"].weight.data.normal_()
        if how == "peft":
            layer.__class__ = Linear
        layer.kernels = device if how == "kernels" else None
        made.append(layer)
    return made


def milliseconds(run: Callable[[], object], repeats: int = 7) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    found = []
    for _ in range(3):
        run()
    for _ in range(repeats):
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end))
    return median(found)


def without_gradient(made: list[nn.Module], x: Tensor) -> float:
    """Microseconds of one layer."""

    def step() -> None:
        for layer in made:
            layer(x)

    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
    return milliseconds(graph.replay) / len(made) * 1e3


def with_gradient(made: list[nn.Module], x: Tensor, grad: Tensor) -> float:
    """Microseconds of one layer, forward and backward."""

    def step() -> None:
        for layer in made:
            x.grad = None
            layer(x).backward(grad)

    return milliseconds(step) / len(made) * 1e3


def table() -> None:
    ways = ("base", "peft", "thin", "kernels")
    print(f"{'layer, rows':<32}" + "".join(f"{way:>12}" for way in ways) + "    (µs; the first is without adapter)")
    for name, (inputs, outputs) in SHAPES.items():
        if why := adapter_kernels.wrong(torch.device("cuda"), RANK, inputs, outputs):
            print(f"{name}: no kernels of our own ({why})")
        for rows in (*FEW, *MANY):
            x = torch.randn(rows, inputs, device="cuda").bfloat16().requires_grad_(rows in MANY)
            grad = torch.randn(rows, outputs, device="cuda").bfloat16()
            found = []
            for way in ways:
                made = layers(inputs, outputs, way)
                found.append(with_gradient(made, x, grad) if rows in MANY else without_gradient(made, x.detach()))
                del made
            what = "forward and backward" if rows in MANY else "forward"
            print(f"{f'{name}, {rows}, {what}':<32}" + "".join(f"{us:12.1f}" for us in found), flush=True)


def tiles() -> None:
    """Each kernel over 8 prompts: what it has to read and write, over its time."""
    rows, rank = MANY[-1], RANK
    for columns in (3584, 18944):
        x = torch.randn(rows, columns, device="cuda").bfloat16()
        inner = torch.randn(rows, rank, device="cuda")
        weight = torch.randn(columns, rank, device="cuda")
        runs: dict[str, tuple[Callable[[], object], int]] = {
            "NARROW": (lambda x=x, w=weight: adapter_kernels.narrow(x, w), 1),
            "WIDEN": (lambda x=x, w=weight, i=inner: adapter_kernels.widen(i[None], w.t(), 1.0, x), 2),
            "SUMMED": (lambda x=x, i=inner: adapter_kernels.summed(i, x), 1),
        }
        for name, (run, times) in runs.items():
            before = getattr(adapter_kernels, name)
            for tile in TILES:
                setattr(adapter_kernels, name, tile)
                rate = times * x.nbytes / milliseconds(run) / 1e6
                print(f"{name:<8} {columns:>6} columns, tiles of {tile}: {rate:7.0f} GB/s", flush=True)
            setattr(adapter_kernels, name, before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiles", action="store_true", help="each kernel with other tiles instead")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/adapter_kernels.py: these kernels need a CUDA device, and there is none")
    tiles() if args.tiles else table()


if __name__ == "__main__":
    main()
