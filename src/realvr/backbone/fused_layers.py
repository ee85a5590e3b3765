"""Decoder layers and vision towers in fewer kernels: RMSNorms (`fused_norms`), rotary embeddings and MLP gates.

Only the ``forward`` of modules is set, on the instance: parameters, their names, classes and hooks stay, and `restore`
takes it away. Projections are called as modules, so adapters, deferred gradients and engines work as before. The
forward passes here compute what those of transformers 5.17 and later compute. A class whose own forward now uses
anything else keeps it, and a notice is printed.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import CodeType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from realvr.backbone import decode_kernels, fused_norms, kernel_checks, small_kernels
from realvr.backbone.gate_memory import made_again
from realvr.backbone.packed_attention import attend_varlen, has_varlen
from realvr.backbone.side_streams import beside
from realvr.backbone.vision import VISION_ATTENTION, attend_chunks
from realvr.families import Stock

_ATTENTION = (
    "Qwen2_5_VLAttention",
    "Qwen3VLTextAttention",
    "Qwen3VLMoeTextAttention",
    "Gemma3Attention",
    "Qwen2Attention",
)
_VISION = ("Qwen2_5_VLVisionAttention", "Qwen3VLVisionAttention", "Qwen3VLMoeVisionAttention")
_PATCHES = ("Qwen2_5_VisionPatchEmbed", "Qwen3VLVisionPatchEmbed", "Qwen3VLMoeVisionPatchEmbed")
_MLP = ("Qwen2MLP", "Qwen2_5_VLMLP", "Qwen3VLTextMLP", "Qwen3VLMoeTextMLP", "Gemma3MLP")


def fuse(module: nn.Module, compiled: bool | None = None) -> int:
    """Give every known layer inside its fused forward; how many there are. ``compiled``: see `small_kernels`."""
    count = fused_norms.fuse(module)
    kinds: dict[type, bool] = {}
    for each in module.modules():
        forward = _FORWARDS.get(type(each).__name__)
        if forward is None or "forward" in vars(each):
            continue
        kind = type(each)
        if kind not in kinds:
            kinds[kind] = _known(kind, forward)
            if not kinds[kind]:
                warnings.warn(f"fused layers: {kind.__name__} has changed and stays as it is", stacklevel=2)
        if not kinds[kind]:
            continue
        options: dict[str, Any] = {"compiled": compiled}
        if forward is _gated:
            options["act"] = _activation(each)
            if options["act"] is None:
                continue
        vars(each)["forward"] = partial(forward, each, **options)  # copied and pickled with its module
        count += 1
    return count


def restore(module: nn.Module) -> None:
    """Undo `fuse`."""
    fused_norms.restore(module)
    for each in module.modules():
        if is_fused(each):
            del vars(each)["forward"]


def is_fused(module: nn.Module) -> bool:
    """Whether the module runs through `fuse`."""
    forward = vars(module).get("forward")
    return fused_norms.is_fused(module) or (isinstance(forward, partial) and forward.func in _FORWARDS.values())


class FusedWhileRunning:
    """Some modules, fused for as long as one pass runs."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = list(modules)
        self._forwards: list[tuple[nn.Module, Any]] | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """With the fused forwards in place."""
        if self._forwards is None:  # looked through once
            inside = [each for module in self._modules for each in module.modules() if "forward" not in vars(each)]
            for module in self._modules:
                fuse(module)
            self._forwards = [(each, vars(each)["forward"]) for each in inside if is_fused(each)]
        forwards = self._forwards
        try:
            for each, forward in forwards:
                vars(each).setdefault("forward", forward)
            yield
        finally:
            for each, forward in forwards:
                if vars(each).get("forward") is forward:
                    del vars(each)["forward"]


def _attend(
    module: Stock,
    hidden_states: Tensor,
    *,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    past_key_values: Stock = None,
    compiled: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    """Attention of a decoder layer, all families."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # takes seconds to import

    shape = hidden_states.shape[:-1]
    projected = beside(hidden_states, module.q_proj, module.k_proj, module.v_proj)
    query, key, value = (x.view(*shape, -1, module.head_dim) for x in projected)
    if "q_norm" in module._modules:  # of each head by itself: before or after heads and columns change places
        query, key = module.q_norm(query), module.k_norm(key)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    query, key = _turned(query, key, *position_embeddings, compiled=compiled)
    if past_key_values is not None:
        key, value = past_key_values.update(key, value, module.layer_idx)
    if hasattr(module, "sliding_window"):
        kwargs["sliding_window"] = module.sliding_window
    eager = sys.modules[type(module).__module__].eager_attention_forward
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(module.config._attn_implementation, eager)
    dropout = module.attention_dropout if module.training else 0.0
    out, weights = attend(module, query, key, value, attention_mask, dropout=dropout, scaling=module.scaling, **kwargs)
    return module.o_proj(out.reshape(*shape, -1).contiguous()), weights


def _turned(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, compiled: bool | None) -> tuple[Tensor, Tensor]:
    alike = query.dtype == key.dtype == cos.dtype == sin.dtype
    if compiled is None and alike and decode_kernels.takes_heads("rotary embedding", query):
        given = (query.transpose(1, 2), key.transpose(1, 2), cos, sin)
        found = decode_kernels.tried(
            "rotary embedding",
            (query, key),
            lambda: decode_kernels.rotate(*given),
            lambda: kernel_checks.rotary_gap(decode_kernels.rotate, *given),
        )
        if found is not None:
            return found[0].transpose(1, 2), found[1].transpose(1, 2)
    return small_kernels.rotate(query, key, cos, sin, compiled=compiled)


def _attend_vision(
    module: Stock,
    hidden_states: Tensor,
    cu_seqlens: Tensor,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    max_seqlen: int | None = None,
    *,
    compiled: bool | None = None,
    **kwargs: Any,
) -> Tensor:
    """Attention of a Qwen vision tower. On a GPU in 16 bits queries, keys and values are read as they lie, chunk by
    chunk."""
    if position_embeddings is None or module.config._attn_implementation != VISION_ATTENTION:
        found: Tensor = type(module).forward(
            module, hidden_states, cu_seqlens, position_embeddings, max_seqlen, **kwargs
        )
        return found
    length = hidden_states.shape[0]
    query, key, value = module.qkv(hidden_states).view(length, 3, module.num_heads, -1).unbind(1)  # (N, H, d)
    query, key = small_kernels.rotate_vision(query, key, *position_embeddings, compiled=compiled)
    if max_seqlen is not None and has_varlen(query):
        out = attend_varlen(query, key, value, cu_seqlens, int(max_seqlen), module.scaling, causal=False)
    else:
        query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
        out, _ = attend_chunks(
            module, query, key, value, None, scaling=module.scaling, cu_seq_lens_q=cu_seqlens, **kwargs
        )
    projected: Tensor = module.proj(out.reshape(length, -1))
    return projected


def _embed_patches(module: Stock, hidden_states: Tensor, *, compiled: bool | None = None) -> Tensor:
    """Patches through a convolution that sees each by itself: one product."""
    proj = module.proj
    hooked = proj._forward_hooks or proj._forward_pre_hooks or hasattr(proj.weight, "ds_id")  # weights come in a hook
    if hooked or type(proj) is not nn.Conv3d or proj.kernel_size != proj.stride or any(proj.padding):
        found: Tensor = type(module).forward(module, hidden_states)
        return found
    weight = proj.weight.flatten(1)
    return F.linear(hidden_states.view(-1, weight.shape[1]).to(weight.dtype), weight, proj.bias)


def _gated(module: Stock, x: Tensor, *, act: Callable[[Tensor], Tensor], compiled: bool | None = None) -> Tensor:
    """A gated MLP. What its last layer keeps for the gradient of its weight is made again from what the gate keeps."""
    first, second = beside(x, module.gate_proj, module.up_proj)
    gated = small_kernels.gate(first, second, act, compiled=compiled)
    with made_again(gated, first, second, act, compiled=compiled):
        out: Tensor = module.down_proj(gated)
    return out


_FORWARDS: dict[str, Callable[..., Any]] = (
    dict.fromkeys(_ATTENTION, _attend)
    | dict.fromkeys(_VISION, _attend_vision)
    | dict.fromkeys(_PATCHES, _embed_patches)
    | dict.fromkeys(_MLP, _gated)
)


def _activation(mlp: Stock) -> Callable[[Tensor], Tensor] | None:
    """The activation of a gated MLP, by its numbers; None for one that `small_kernels` does not have."""
    x = torch.linspace(-4, 4, 33, dtype=torch.float32)
    right = mlp.act_fn(x)
    return next((act for act in (F.silu, small_kernels.gelu_tanh) if torch.equal(act(x), right)), None)


# ---------------------------------------------------------------------- what stock forwards look like

_ATTENTION_NAMES = """
    ALL_ATTENTION_FUNCTIONS _attn_implementation attention_dropout config contiguous eager_attention_forward
    get_interface reshape scaling shape training transpose
"""
_NAMES: dict[Callable[..., Any], str] = {
    _attend: _ATTENTION_NAMES
    + """
    apply_rotary_pos_emb head_dim k_norm k_proj layer_idx o_proj q_norm q_proj size sliding_window update v_proj view
    """,
    _attend_vision: _ATTENTION_NAMES
    + """
    apply_rotary_pos_emb_vision cat get_max_seqlen is_flash_attention_requested num_heads permute proj qkv split tolist
    torch unbind unsqueeze zip
    """,
    _embed_patches: "dtype embed_dim in_channels patch_size proj temporal_patch_size to view weight",
    _gated: "act_fn down_proj gate_proj up_proj",
}
"""Every name that the stock forward passes use."""


def _known(kind: type, forward: Callable[..., Any]) -> bool:
    """Whether the class comes from transformers and its forward uses nothing that ``forward`` does not stand for."""
    code = getattr(kind.forward, "__code__", None)  # type: ignore[attr-defined]
    names = set(_NAMES[forward].split())
    return kind.__module__.startswith("transformers.") and code is not None and _used(code) <= names


def _used(code: CodeType) -> set[str]:
    """Names in a function and in the comprehensions inside it."""
    inside = [each for each in code.co_consts if isinstance(each, CodeType)]
    return set(code.co_names).union(*map(_used, inside))
