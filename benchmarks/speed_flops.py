"""Operations that `FlopCounterMode` does not count: attention (torch before 2.12 counts no fewer heads of keys than of
queries, and none counts it on a CPU), and the grouped products of a mixture of experts.

A causal mask is not taken into account, as torch does it: two products forward, five backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

FORWARD, BACKWARD = 2, 5
"""Products of a pass; backward, the scores are computed again."""
_aten = torch.ops.aten


def formulas() -> dict[Any, Callable[..., int]]:
    """What `FlopCounterMode` takes as ``custom_mapping``."""
    kinds = ("flash", "efficient", "cudnn")
    found: dict[Any, Callable[..., int]] = {}
    for kind in kinds:
        found[getattr(_aten, f"_scaled_dot_product_{kind}_attention")] = _dense
        found[getattr(_aten, f"_scaled_dot_product_{kind}_attention_backward")] = _dense_backward
    found[_aten._scaled_dot_product_flash_attention_for_cpu] = _dense
    found[_aten._scaled_dot_product_flash_attention_for_cpu_backward] = _dense_backward
    found |= {_aten._flash_attention_forward: _packed, _aten._flash_attention_backward: _packed_backward}
    return found | {_aten._grouped_mm: _grouped}


def _grouped(one: torch.Size, other: torch.Size, *args: object, out_shape: object = None, **kwargs: object) -> int:
    """Of stacked matrices all are multiplied. Otherwise groups share out the rows, the columns or what is summed over:
    each group has its part, and all of them together the whole."""
    stacked = one[0] if len(one) == len(other) == 3 else 1
    return 2 * stacked * one[-2] * one[-1] * other[-1]


def _raw(formula: Callable[..., int]) -> Callable[..., int]:
    """Called with tensors instead of shapes."""
    formula._get_raw = True  # type: ignore[attr-defined]
    return formula


@_raw
def _dense(query: Tensor, key: Tensor, value: Tensor, *args: object, **kwargs: object) -> int:
    batch, heads, rows, width = query.shape
    return FORWARD * batch * heads * rows * key.shape[2] * (width + value.shape[3])


@_raw
def _dense_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: object, **kwargs: object) -> int:
    return _dense(query, key, value) * BACKWARD // FORWARD


@_raw
def _packed(
    query: Tensor, key: Tensor, value: Tensor, ends_q: Tensor | None, ends_k: Tensor | None, *args: object, **kw: object
) -> int:
    width = query.shape[-1] + value.shape[-1]
    if ends_q is None or ends_k is None:  # (B, T, H, d)
        return FORWARD * query.shape[0] * query.shape[2] * query.shape[1] * key.shape[1] * width
    pairs = int((ends_q.diff().cpu() * ends_k.diff().cpu()).sum())
    return FORWARD * query.shape[1] * pairs * width


@_raw
def _packed_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    ends_q: Tensor | None,
    ends_k: Tensor | None,
    *args: object,
    **kw: object,
) -> int:
    return _packed(query, key, value, ends_q, ends_k) * BACKWARD // FORWARD
