"""How far the kernels of `realvr.backbone.decode_kernels` are from their definitions, which are computed in float64.

Compilers and GPUs differ. A kernel is compared on random numbers before it is first used for a shape on a device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from realvr.backbone.noise import Noise, worst

KeysValues = tuple[Tensor, Tensor]
Attend = Callable[[Tensor, Tensor, Tensor, KeysValues, KeysValues | None, Tensor, Tensor, float], Tensor]


def tolerance(dtype: torch.dtype) -> float:
    """Largest distance of a row from its definition, relative to its length; rounding is several times smaller."""
    return 1e-4 if dtype == torch.float32 else 2e-2


# ---------------------------------------------------------------------- attention


def attention_gap(
    attend: Attend,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    trunk: KeysValues,
    branches: KeysValues | None,
    bias_BT: Tensor,
    scaling: float,
) -> float:
    """Largest relative error of a row for tensors laid out like these; hidden are a third of the trunk, what is behind
    the new column, and of the last of several prompts the whole trunk. Infinite if new keys and values are not where
    they belong, or others have changed."""
    noise = Noise(query.device)
    query, key, value = noise.like(query), noise.like(key), noise.like(value)
    trunk = noise.like(trunk[0]), noise.like(trunk[1])
    branches = None if branches is None else (noise.like(branches[0]), noise.like(branches[1]))
    own = trunk if branches is None else branches
    length, size = trunk[0].shape[-2], own[0].shape[-2]
    at = size // 2
    hidden_BT = noise.uniform(len(query), length) < 1 / 3
    if len(query) > 1:
        hidden_BT[-1] = True
    if branches is None:
        hidden_BT[:, at + 1 :] = True
        hidden_BT[:, at] = False
    else:
        later = torch.arange(size, device=query.device) > at
        hidden_BT = torch.cat([hidden_BT, later.expand(len(query), -1)], dim=1)
    bias_BT = torch.zeros_like(bias_BT).masked_fill(hidden_BT, float("-inf"))
    right = [x.clone() for x in own]
    for x, new in zip(right, (key, value), strict=True):
        x.select(-2, at).copy_(new[:, :, 0] if branches is None else new)
    found = attend(query, key, value, trunk, branches, torch.tensor([at], device=query.device), bias_BT, scaling)
    if not all(map(torch.equal, own, right)):
        return float("inf")
    gaps = []
    for b in range(len(query)):  # one prompt at a time: float64 takes four times the room
        seen = None if branches is None else (branches[0][b], branches[1][b])
        gaps.append(_gap(found[b], _attention(query[b], (trunk[0][b], trunk[1][b]), seen, bias_BT[b], scaling)))
    return worst(gaps)


def _attention(query: Tensor, trunk: KeysValues, branches: KeysValues | None, bias_T: Tensor, scaling: float) -> Tensor:
    """(N, H, d) of one prompt: ``query`` (H, N, d), trunk (H_kv, T, d), branches (H_kv, N, S, d)."""
    keys, values = (x.double() for x in trunk)
    q = query.double().unflatten(0, (len(keys), -1)) * scaling  # (H_kv, H / H_kv, N, d)
    scores = [torch.einsum("hsnd,htd->hsnt", q, keys)]
    own = None if branches is None else [x.double() for x in branches]
    if own is not None:
        scores.append(torch.einsum("hsnd,hnud->hsnu", q, own[0]))
    weights = (torch.cat(scores, dim=-1) + bias_T.double()).softmax(-1)
    on_trunk, on_own = weights.tensor_split([keys.shape[1]], dim=-1)
    out = torch.einsum("hsnt,htd->hsnd", on_trunk, values)
    if own is not None:
        out += torch.einsum("hsnu,hnud->hsnd", on_own, own[1])
    return out.flatten(0, 1).transpose(0, 1)


# ---------------------------------------------------------------------- rotary embedding, norms


def rotary_gap(
    rotate: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> float:
    """The same for (B, T, H, d) queries and (B, T, H_kv, d) keys, turned by (B or 1, T, d)."""
    noise = Noise(query.device)
    query, key = noise.like(query), noise.like(key)
    angles = 7 * noise.uniform(*cos.shape)
    cos, sin = angles.cos().to(cos.dtype), angles.sin().to(sin.dtype)

    def turned(x: Tensor) -> Tensor:
        first, second = x.double().chunk(2, dim=-1)
        return x.double() * cos.double()[:, :, None] + torch.cat([-second, first], dim=-1) * sin.double()[:, :, None]

    found = rotate(query, key, cos, sin)
    return worst([_gap(one, turned(x)) for one, x in zip(found, (query, key), strict=True)])


def norm_gap(norm: Callable[[Tensor, Tensor, float, bool], Tensor], x: Tensor, weight: Tensor, offset: bool) -> float:
    """The same for ``weight * x / rms(x)``, or ``(1 + weight) * …``."""
    noise, epsilon = Noise(x.device), 1e-6
    x, weight = noise.like(x), noise.like(weight)
    wide = x.double()
    right = wide / (wide.square().mean(-1, keepdim=True) + epsilon).sqrt() * (weight.double() + offset)
    return _gap(norm(x, weight, epsilon, offset), right)


# ---------------------------------------------------------------------- numbers


def _gap(found: Tensor, right: Tensor) -> float:
    """Largest distance of a row, over its length."""
    return float(((found.double() - right).norm(dim=-1) / right.norm(dim=-1)).max())
