"""Cases for `test_decode_kernels.py`, in a process of its own: Triton reads ``TRITON_INTERPRET`` when it is imported.

TRITON_INTERPRET=1 python tests/kernel_cases.py numbers     (runs the kernels on the CPU)
TRITON_INTERPRET=1 python tests/kernel_cases.py wired       (where the package calls them)
python tests/kernel_cases.py compile                        (compiles them for GPUs that need not be there)
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from realvr.backbone import decode_kernels

sys.path.append(str(Path(__file__).parents[1] / "scripts"))


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape)


def attention(batch: int, kv_heads: int, share: int, group: int, length: int, size: int, width: int, at: int) -> float:
    """Against softmax over all columns of a row at once, in float64; ``size`` 0: without branches."""
    new = group if size else 1
    trunk = [noise(batch, kv_heads, length, width) for _ in "kv"]
    own = [noise(batch, kv_heads, group, size, width) for _ in "kv"] if size else None
    visible = torch.rand(batch, length) > 0.3
    if not size:
        visible[:, at] = True
    query = noise(batch, new, kv_heads * share, width).transpose(1, 2)
    key, value = noise(batch, new, kv_heads, width).transpose(1, 2), noise(batch, kv_heads, new, width)
    bias = torch.zeros(batch, length).masked_fill(~visible, float("-inf"))
    if size:
        later = torch.arange(size) > at
        bias = torch.cat([bias, torch.zeros(batch, size).masked_fill(later, float("-inf"))], dim=1)

    into = [x.clone() for x in (own or trunk)]
    for x, fresh in zip(into, (key, value), strict=True):
        if size:
            x[:, :, :, at] = fresh
        else:
            x[:, :, at] = fresh[:, :, 0]
    wide = [x.double() for x in (trunk if size else into)]
    right = torch.empty(batch, new, kv_heads * share, width, dtype=torch.float64)
    for b in range(batch):
        for n in range(new):
            for head in range(kv_heads * share):
                kv = head // share
                keys, values = (x[b, kv][visible[b]] for x in wide)
                if size:
                    keys, values = (
                        torch.cat([x, y[b, kv, n, : at + 1].double()])
                        for x, y in zip((keys, values), into, strict=True)
                    )
                weights = (keys @ query[b, head, n].double() * width**-0.5).softmax(0)
                right[b, n, head] = weights @ values

    branches = None if own is None else (own[0], own[1])
    column = torch.tensor([at])
    out = decode_kernels.attend(query, key, value, (trunk[0], trunk[1]), branches, column, bias, width**-0.5)
    for x, y in zip(own or trunk, into, strict=True):
        assert torch.equal(x, y), "new keys and values are not where they belong, or others have changed"
    return float((out - right).abs().max())


def numbers() -> None:
    """Prints ``name error`` lines."""
    torch.manual_seed(0)
    cases = {
        "branches": (2, 2, 3, 4, 96, 16, 16, 5),
        "many pieces": (1, 1, 7, 8, 300, 64, 32, 63),
        "several tiles of rows": (1, 2, 7, 11, 130, 20, 16, 0),
        "one query a branch": (3, 2, 1, 2, 70, 16, 64, 9),
        "latent step": (2, 2, 4, 1, 200, 0, 16, 150),
        "latent step in the last column": (1, 2, 8, 1, 129, 0, 32, 128),
    }
    for name, case in cases.items():
        print(name, attention(*case))
    decode_kernels._processors = lambda _: 132  # type: ignore[assignment]
    print("as many pieces as on a GPU", attention(1, 2, 4, 1, 700, 0, 16, 150))
    decode_kernels.BLOCK, decode_kernels.PIECE = 16, 16
    print("small pieces", attention(*cases["branches"]))
    decode_kernels.PIECES = 4
    print("few pieces", attention(*cases["many pieces"]))

    swap = torch.zeros(32, 32)  # (x1, x2) -> (-x2, x1)
    swap[16:, :16], swap[:16, 16:] = -torch.eye(16), torch.eye(16)
    for name, batch, length in (("rotary", 2, 3), ("rotary of one column", 4, 1)):
        query, key = noise(batch, length, 5, 32), noise(batch, length, 2, 32)
        cos, sin = noise(1, length, 32), noise(batch, length, 64)[..., :32]
        turned = decode_kernels.rotate(query, key, cos, sin)
        for what, x, found in zip(("queries", "keys"), (query, key), turned, strict=True):
            right = x * cos[:, :, None] + (x @ swap) * sin[:, :, None]
            print(f"{name}, {what}", float((found - right).abs().max()))

    weight = noise(48)
    for name, x in (("norm", noise(3, 5, 48)[:, 1:4]), ("norm of every other number", noise(5, 96)[:, ::2])):
        for offset in (False, True):
            right = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (weight + offset)
            found = decode_kernels.rms_norm(x, weight, 1e-6, offset)
            print(f"{name}, offset {offset}", float((found - right).abs().max()))
    print("not finite", float(not_finite()))
    for name, gap in gaps():
        print(f"gap, {name}", gap)


def not_finite() -> bool:
    """What is in the buffers where the new column goes is not read."""
    trunk = [noise(1, 1, 20, 16) for _ in "kv"]
    own = [noise(1, 1, 3, 8, 16) for _ in "kv"]
    for x in own:
        x[:, :, :, 4:] = float("inf")
    query, (key, value) = noise(1, 2, 3, 16), (noise(1, 1, 3, 16) for _ in "kv")
    bias = torch.zeros(1, 28)
    bias[:, 25:] = float("-inf")
    for x in own:
        x[:, :, :, 5:] = 0
    column = torch.tensor([4])
    out = decode_kernels.attend(query, key, value, (trunk[0], trunk[1]), (own[0], own[1]), column, bias, 0.25)
    return not bool(out.isfinite().all())


def gaps() -> Iterator[tuple[str, float]]:
    """What the comparison at first use finds of the kernels as they are, and of broken ones: there it is 0 if it
    refuses them, in every type."""
    from realvr.backbone import kernel_checks

    def refused(gap: float) -> float:
        return float(gap <= max(map(kernel_checks.tolerance, (torch.float32, torch.bfloat16))))

    query, key, value = (noise(2, 3, heads, 16).transpose(1, 2) for heads in (6, 2, 2))
    trunk, branches = (noise(2, 2, 50, 16), noise(2, 2, 50, 16)), (noise(2, 2, 3, 8, 16), noise(2, 2, 3, 8, 16))
    both = (query, key, value, trunk, branches, torch.zeros(2, 58), 0.25)
    alone = (query[:, :, :1], key[:, :, :1], value[:, :, :1], trunk, None, torch.zeros(2, 50), 0.25)
    first = tuple(x[:1] for x in alone[:3])
    one = (*first, (trunk[0][:1], trunk[1][:1]), None, torch.zeros(1, 50), 0.25)
    for name, given in (("branches", both), ("latent step", alone), ("latent step of one prompt", one)):
        before = [x.clone() for x in (*trunk, *branches)]
        yield name, kernel_checks.attention_gap(decode_kernels.attend, *given)
        for what, broken in BROKEN.items():
            yield (
                f"{name}, {what}",
                refused(kernel_checks.attention_gap(partial(broken, decode_kernels.attend), *given)),
            )
        assert all(map(torch.equal, before, (*trunk, *branches)))  # of the caller

    turning = noise(2, 3, 5, 32), noise(2, 3, 2, 32), noise(1, 3, 32), noise(2, 3, 32)
    rotate, norm = decode_kernels.rotate, decode_kernels.rms_norm
    yield "rotary", kernel_checks.rotary_gap(rotate, *turning)
    yield "rotary backwards", refused(kernel_checks.rotary_gap(lambda q, k, c, s: rotate(q, k, c, -s), *turning))
    for offset in (False, True):
        x, weight = noise(5, 48), noise(48)
        yield f"norm, offset {offset}", kernel_checks.norm_gap(norm, x, weight, offset)
        wrong = kernel_checks.norm_gap(lambda x, w, e, offset: norm(x, w, e, not offset), x, weight, offset)
        yield f"norm with the other offset {offset}", refused(wrong)


def wired() -> None:
    """Prints ``name error`` lines: steps through the kernels beside the same through torch, where the package calls
    them."""
    torch.manual_seed(0)
    decode_kernels._processors = lambda _: 132  # type: ignore[assignment]
    for window in (None, 5, 50):
        for name, case in (("branches", (2, 2, 7, 4, 300, 64, 16, 40)), ("latent step", (2, 4, 7, 1, 257, 0, 32, 200))):
            print(f"{name}, window {window}", _static_pass(window, *case))
    for family in ("qwen2.5-vl", "qwen3-vl", "gemma3"):
        for name, gap in _rollouts(family).items():
            print(f"{family}, {name}", gap)


@contextmanager
def taken(yes: bool) -> Iterator[None]:
    """Kernels wherever they could be used, or nowhere."""
    before = decode_kernels.takes
    decode_kernels.takes = lambda kernel, x: yes and not torch.is_grad_enabled()  # type: ignore[assignment]
    decode_kernels.launched.clear()
    try:
        with torch.no_grad():
            yield
        assert bool(decode_kernels.launched) == yes and not decode_kernels._broken, decode_kernels._broken
    finally:
        decode_kernels.takes = before


def _static_pass(
    window: int | None, batch: int, kv_heads: int, share: int, group: int, length: int, size: int, width: int, at: int
) -> float:
    """The last of the prompts is a filler that sees nothing of its trunk."""
    from realvr.backbone.static import StaticPass

    visible = torch.rand(batch, length) > 0.3
    visible[-1] = False
    if not size:
        visible[:, at:] = False
        visible[:, at] = True
    place_BT, place_B = torch.arange(length).expand(batch, -1), torch.full((batch,), at + (length if size else 0))
    new = group if size else 1
    query = noise(batch, new, kv_heads * share, width).transpose(1, 2)
    key, value = (noise(batch, new, kv_heads, width).transpose(1, 2) for _ in "kv")
    trunk = [noise(batch, kv_heads, length, width) for _ in "kv"]
    own = [noise(batch, kv_heads, group, size, width) for _ in "kv"] if size else None
    found = []
    for ours in (True, False):
        keys, values = (x.clone() for x in trunk)
        branches = None if own is None else [(own[0].clone(), own[1].clone())]
        step = StaticPass([(keys, values)], visible, torch.tensor([at]), branches, place_BT, place_B)
        with taken(ours):
            found.append([step.attend(0, query, key, value, 0.2, window), keys, values, *sum(branches or (), ())])
    assert all(map(torch.equal, found[0][1:], found[1][1:])), "other keys and values"
    return float((found[0][0] - found[1][0]).abs().max())


def _rollouts(family: str) -> dict[str, float]:
    """Of a tiny model with fused layers; every norm has weights of its own."""
    from realvr.backbone import Backbone
    from realvr.latent import Sampling
    from realvr.latent.fast import FastDecode
    from realvr.latent.group_rollout import rollout

    with tempfile.TemporaryDirectory() as folder:
        import device_parity

        path = device_parity.prepare(family, Path(folder))
        backbone = Backbone.load(path, dtype=torch.float32, device="cpu")
    for name, parameter in backbone.decoder.named_parameters():
        if "norm" in name:
            parameter.data.add_(0.5 * torch.rand_like(parameter))
    backbone.fused_layers = True
    prompts = device_parity.questions(backbone)[:3]
    made = []
    for ours in (True, False):
        fast = FastDecode(backbone, recorded=False, columns=64, tokens=8)
        with taken(ours):
            sampled = rollout(backbone, prompts, group=4, sampling=Sampling(max_new=5), seed=3, latents=2, fast=fast)
            assert not ours or {"attention", "rotary embedding"} <= decode_kernels.launched.keys()
            assert not ours or sum(count for name, count in decode_kernels.launched.items() if "norm" in name)
        made.append((sampled.latents_BKD, *sampled.tensors()))
    (z, ids, _, logp), (z_right, ids_right, _, logp_right) = made
    same = ids.shape == ids_right.shape and torch.equal(ids, ids_right)
    apart = float((logp - logp_right).abs().max()) if same else 1.0
    return {"latents": float((z - z_right).norm() / z_right.norm()), "texts": float(not same), "log-probs": apart}


def _one_column_late(attend: Any, *given: Any) -> Tensor:
    *before, column, bias, scaling = given
    return attend(*before, column + 1, bias, scaling)


def _all_seen(attend: Any, *given: Any) -> Tensor:
    *before, bias, scaling = given
    return attend(*before, torch.zeros_like(bias), scaling)


def _columns_lost(attend: Any, *given: Any) -> Tensor:
    *before, bias, scaling = given
    bias = bias.clone()
    bias[:, 20:24] = float("-inf")
    return attend(*before, bias, scaling)


def _heads_exchanged(attend: Any, *given: Any) -> Tensor:
    out = attend(*given)
    out[:, :, [1, 3]] = out[:, :, [3, 1]]
    return out


def _empty_pieces(attend: Any, *given: Any) -> Tensor:
    """A softmax over nothing, where all columns of a piece are hidden."""
    out = attend(*given)
    if (given[-2] == float("-inf")).unfold(1, 16, 1).all(-1).any():
        out[-1] = float("nan")
    return out


def _not_a_number(attend: Any, *given: Any) -> Tensor:
    out = attend(*given)
    out[-1] = float("nan")
    return out


def _nothing_written(attend: Any, query: Any, key: Any, value: Any, trunk: Any, branches: Any, *more: Any) -> Tensor:
    copies = [None if pair is None else tuple(x.clone() for x in pair) for pair in (trunk, branches)]
    return attend(query, key, value, *copies, *more)


BROKEN = {
    "one column late": _one_column_late,
    "all columns seen": _all_seen,
    "columns lost": _columns_lost,
    "heads exchanged": _heads_exchanged,
    "nothing written": _nothing_written,
    "empty pieces": _empty_pieces,
    "not a number": _not_a_number,
}


def compile_all() -> None:
    """For widths and types of the paper's backbones and of tiny models."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from realvr.backbone import triton_kernels as kernels

    def made(kernel: object, types: dict[str, str], fixed: dict[str, object], arch: int, **options: object) -> int:
        signature = types | dict.fromkeys(fixed, "constexpr")
        aligned = [(i,) for i, kind in enumerate(signature.values()) if kind.startswith("*")]
        hints = dict.fromkeys(aligned, [["tt.divisibility", 16]])
        source = ASTSource(fn=kernel, signature=signature, constexprs=fixed, attrs=hints)
        return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options).metadata.shared

    def named(kernel: object, pointers: dict[str, str], floats: tuple[str, ...] = ()) -> dict[str, str]:
        names = [name for name in kernel.arg_names if name.islower()]  # type: ignore[attr-defined]
        return {name: pointers.get(name, "fp32" if name in floats else "i32") for name in names}

    for arch in (80, 86, 90):
        most = 32 if arch == 86 else 64
        for kind, width, rows in (("bf16", 128, 64), ("bf16", 256, 16), ("fp32", 128, 64), ("fp16", 64, 32)):
            rows = min(rows, most)
            tensors = "query key value trunk_k trunk_v own_k own_v"
            wide = dict.fromkeys(("bias", "partial", "largest", "total"), "*fp32") | {"column": "*i64"}
            pointers = dict.fromkeys(tensors.split(), f"*{kind}") | wide
            block = decode_kernels.block_size(width, 4 if kind == "fp32" else 2)
            for branches in (True, False):
                fixed: dict[str, object] = {"SHARE": 7, "ROWS": rows, "WIDTH": width, "BLOCK": block}
                fixed |= {"BRANCHES": branches}
                types = named(kernels.pieces, pointers, ("scaling",))
                shared = made(kernels.pieces, types, fixed, arch, num_warps=4, num_stages=decode_kernels.STAGES)
                print("pieces", arch, kind, width, branches, shared)
        wide = dict.fromkeys(("partial", "largest", "total"), "*fp32") | {"out": "*bf16"}
        made(kernels.merge, named(kernels.merge, wide), {"SHARE": 7, "WIDTH": 128, "PIECES": 32}, arch)
        types = named(kernels.norm, dict.fromkeys(("x", "weight", "out"), "*bf16"), ("epsilon",))
        made(kernels.norm, types, {"OFFSET": True, "BLOCK": 4096}, arch, num_warps=8)
        pointers = dict.fromkeys(["query", "key", "cos", "sin", "query_out", "key_out"], "*bf16")
        made(kernels.turn, named(kernels.turn, pointers), {"WIDTH": 128}, arch, num_warps=1)


if __name__ == "__main__":
    {"numbers": numbers, "wired": wired, "compile": compile_all}[sys.argv[1]]()
