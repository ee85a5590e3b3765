"""Flash attention of a GPU, as torch declares its operators, by the formulas in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def attention(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of (…, H, T, d)."""
    group = query.shape[-3] // key.shape[-3]
    scores = query @ key.repeat_interleave(group, dim=-3).mT * scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), float("-inf"))
    return scores.softmax(-1) @ value.repeat_interleave(group, dim=-3), scores.logsumexp(-1)


def share(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool
) -> tuple[Tensor, ...]:
    """Gradients of a part by the formulas of flash attention, for any output and log-sum-exp."""
    group = query.shape[-3] // key.shape[-3]
    keys, values = (x.repeat_interleave(group, dim=-3) for x in (key, value))
    p = (query @ keys.mT * scale - lse[..., None]).exp()
    p = p.tril() if causal else p
    ds = p * (grad @ values.mT - (grad * out).sum(-1, keepdim=True)) * scale
    found = (ds @ keys, ds.mT @ query, p.mT @ grad)
    return found[0], *(x.unflatten(-3, (-1, group)).sum(-3) for x in found[1:])


class OnGpu:
    """As much of a query on a GPU as decides whether there is flash attention for it."""

    is_cuda, device, shape = True, torch.device("cuda"), (1, 2, 3, 64)

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


class Gpu:
    """The flash operators of a GPU as torch declares them, in float64. Dense ones take (B, H, T, d), the others (total,
    H, d) with boundaries; these write nothing to the gradients of keys that no query has read."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def _scaled_dot_product_flash_attention(
        self, query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
        return_debug_mask: bool = False, *, scale: float | None = None,
    ) -> tuple[Any, ...]:  # fmt: skip
        assert scale is not None and not dropout_p and not return_debug_mask
        self.called.append("dense")
        out, lse = attention(query, key, value, scale, is_causal)
        # Undefined boundaries are None in Python; memory has heads behind columns.
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
        return out, lse, None, None, query.shape[2], key.shape[2], "state", "unused", torch.empty(0)

    def _scaled_dot_product_flash_attention_backward(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
        cum_seq_q: None, cum_seq_k: None, max_q: int, max_k: int, dropout_p: float, is_causal: bool,
        philox_seed: str, philox_offset: str, *, scale: float | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert scale is not None and logsumexp.is_contiguous() and cum_seq_q is None and cum_seq_k is None
        assert (max_q, max_k, philox_seed, philox_offset) == (query.shape[2], key.shape[2], "state", "unused")
        return share(grad_out, query, key, value, out, logsumexp, scale, is_causal)

    @staticmethod
    def _sequences(ends_q: Tensor, ends_k: Tensor, max_q: int, max_k: int) -> list[tuple[slice, slice]]:
        assert ends_q.dtype == ends_k.dtype == torch.int32
        assert int(ends_q.diff().max()) <= max_q and int(ends_k.diff().max()) <= max_k
        both = [[slice(a, b) for a, b in ends.unfold(0, 2, 1).tolist()] for ends in (ends_q, ends_k)]
        return [(q, k) for q, k in zip(*both, strict=True) if q.start < q.stop]

    def _flash_attention_forward(
        self, query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor, cum_seq_k: Tensor, max_q: int, max_k: int,
        dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: float | None = None,
    ) -> tuple[Any, ...]:  # fmt: skip
        assert scale is not None and not dropout_p and not is_causal and not return_debug_mask
        self.called.append("sequences")
        out, lse = torch.full_like(query, torch.nan), torch.full(query.shape[:2], torch.nan, dtype=query.dtype).mT
        for q, k in self._sequences(cum_seq_q, cum_seq_k, max_q, max_k):
            part = attention(query[q].transpose(0, 1), key[k].transpose(0, 1), value[k].transpose(0, 1), scale, False)
            out[q], lse[:, q] = part[0].transpose(0, 1), part[1]
        return out, lse.contiguous(), "state", "unused", torch.empty(0)

    def _flash_attention_backward(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
        cum_seq_q: Tensor, cum_seq_k: Tensor, max_q: int, max_k: int, dropout_p: float, is_causal: bool,
        rng_state: str, unused: str, *, scale: float | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert scale is not None and not is_causal and (rng_state, unused) == ("state", "unused")
        assert logsumexp.is_contiguous() and logsumexp.shape == query.shape[1::-1]
        found = [torch.full_like(x, torch.nan) for x in (query, key, value)]
        for q, k in self._sequences(cum_seq_q, cum_seq_k, max_q, max_k):
            rows = [x[at].transpose(0, 1) for x, at in ((grad_out, q), (query, q), (key, k), (value, k), (out, q))]
            part = share(*rows, logsumexp[:, q], scale, False)  # type: ignore[call-arg, arg-type]
            for all_of, at, grad in zip(found, (q, k, k), part, strict=True):
                all_of[at] = grad.transpose(0, 1)
        return tuple(found)
