"""The latent span, slowly: stock transformers and torch only, no cache, written from the method and not from `realvr`.

`z_t` is the last hidden state after the final norm at the position before slot t, fed raw as the input of slot t; `z_1` is the
state at `<|lvr_start|>`. Every latent re-runs the *whole* sequence. Positions come from the stock `get_rope_index` (Qwen) over
the whole sequence, masks from the stock mask functions, image features from the stock `get_image_features`.

Nothing here imports `realvr`: a mistake there cannot hide here.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText


def load(path: Any, dtype: torch.dtype = torch.float32, attention: str = "eager", device: str = "cpu") -> Any:
    """A stock model with stock attention everywhere, in evaluation mode, vision frozen."""
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=dtype, attn_implementation=attention)
    model = model.to(device).eval()
    for name in ("visual", "vision_tower", "multi_modal_projector"):
        if hasattr(model.model, name):
            getattr(model.model, name).requires_grad_(False)
    return model


# ---------------------------------------------------------------------- full precision


def _norm_forward(norm: nn.Module, hidden: Tensor) -> Tensor:
    eps = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
    scale = 1 + norm.weight if type(norm).__name__.startswith("Gemma") else norm.weight
    return hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + eps) * scale


def widen_norms(model: nn.Module) -> None:
    """Stock RMSNorm computes in float32 whatever the dtype; replace its arithmetic on this instance (float64 tests only)."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = lambda hidden, norm=module: _norm_forward(norm, hidden)  # type: ignore[method-assign]


@contextmanager
def wide_softmax() -> Iterator[None]:
    """Stock routers and eager attention ask `softmax` for float32; never let it be narrower than its input."""
    stock = F.softmax

    def softmax(input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Tensor:
        if dtype is not None:
            dtype = torch.promote_types(dtype, input.dtype)
        return stock(input, dim=dim, dtype=dtype)

    F.softmax = softmax
    try:
        yield
    finally:
        F.softmax = stock


def double(model: Any) -> Any:
    """The model in float64, without the float32 islands of the stock code (except MoE routers, see `wide_softmax`)."""
    model.double()
    widen_norms(model)
    if hasattr(model.config.get_text_config(), "num_experts"):
        model.set_experts_implementation("eager")
    return model


# ---------------------------------------------------------------------- the sequence


@dataclass(frozen=True)
class Sequence:
    """Everything a stock model needs to run the whole sequence: B rows, T columns."""

    ids: Tensor  # (B, T); a latent slot has any text id
    mask: Tensor  # (B, T) long, 0 for padding
    embeds: Tensor  # (B, T, D)
    image: Tensor  # (B, T) bool
    grid_thw: Tensor | None = None
    deepstack: tuple[Tensor, ...] = ()


def begin(
    model: Any,
    ids: Tensor,
    mask: Tensor | None = None,
    pixel_values: Tensor | None = None,
    grid_thw: Tensor | None = None,
) -> Sequence:
    """The prompt as input embeddings, with stock image features in the places of the image tokens."""
    core = model.model
    image = ids == model.config.image_token_id
    mask = torch.ones_like(ids) if mask is None else mask.long()
    image = image & mask.bool()
    embeds = core.get_input_embeddings()(ids.masked_fill(image, 0))
    deepstack: tuple[Tensor, ...] = ()
    if pixel_values is not None:
        extra = {} if grid_thw is None else {"image_grid_thw": grid_thw}
        with torch.no_grad():
            output = core.get_image_features(pixel_values.to(embeds), return_dict=True, **extra)
        features = _flat(output.pooler_output, embeds.shape[-1])
        embeds = embeds.clone()
        embeds[image] = features.to(embeds.dtype)
        deepstack = tuple(_flat(x, embeds.shape[-1]) for x in getattr(output, "deepstack_features", None) or ())
    return Sequence(ids, mask, embeds, image, grid_thw, deepstack)


def _flat(features: Any, width: int) -> Tensor:
    return features.reshape(-1, width) if isinstance(features, Tensor) else torch.cat(list(features))


def append(model: Any, sequence: Sequence, ids: Tensor, embeds: Tensor | None = None, mask: Tensor | None = None) -> Sequence:
    """The sequence with further columns: text ids (B, n), or raw `embeds` (B, n, D) under these ids."""
    embeds = model.model.get_input_embeddings()(ids) if embeds is None else embeds
    mask = torch.ones_like(ids) if mask is None else mask.long()
    return replace(
        sequence,
        ids=torch.cat([sequence.ids, ids], 1),
        mask=torch.cat([sequence.mask, mask], 1),
        embeds=torch.cat([sequence.embeds, embeds], 1),
        image=torch.cat([sequence.image, torch.zeros_like(ids, dtype=torch.bool)], 1),
    )


def with_embeds(sequence: Sequence, where: Tensor, values: Tensor) -> Sequence:
    """The sequence with the columns `where` (B, T) fed `values` (n, D): saved latents in their slots."""
    embeds = sequence.embeds.clone()
    embeds[where] = values.to(embeds)
    return replace(sequence, embeds=embeds)


def positions(model: Any, sequence: Sequence) -> Tensor:
    core = model.model
    if hasattr(core, "get_rope_index"):
        ids = sequence.ids.masked_fill(sequence.ids == model.config.image_token_id, 0)
        ids = ids.masked_fill(sequence.image, model.config.image_token_id)
        found, _ = core.get_rope_index(
            ids, sequence.image.int(), image_grid_thw=sequence.grid_thw, attention_mask=sequence.mask
        )
        return found
    return (sequence.mask.cumsum(-1) - 1).clamp(min=0)


def run(model: Any, sequence: Sequence, at: Tensor | None = None, **options: Any) -> Any:
    """One stock pass over the whole sequence without a cache. `at` overrides the positions."""
    core = model.model
    common = {
        "inputs_embeds": sequence.embeds,
        "attention_mask": sequence.mask,
        "position_ids": positions(model, sequence) if at is None else at,
        "use_cache": False,
        "return_dict": True,
        **options,
    }
    if "token_type_ids" in inspect.signature(core.forward).parameters:
        return core(token_type_ids=sequence.image.long(), **common)
    if sequence.deepstack:
        common |= {"visual_pos_masks": sequence.image, "deepstack_visual_embeds": list(sequence.deepstack)}
    return core.language_model(**common)


def hidden(model: Any, sequence: Sequence, at: Tensor | None = None) -> Tensor:
    """Hidden states (B, T, D) after the final norm."""
    return run(model, sequence, at).last_hidden_state


def attentions(model: Any, sequence: Sequence, at: Tensor | None = None) -> Tensor:
    """Post-softmax attention (L, B, H, T, T) of a model loaded with eager attention."""
    return torch.stack(run(model, sequence, at, output_attentions=True).attentions)


# ---------------------------------------------------------------------- the span


def think(model: Any, sequence: Sequence, latents: int, start: int, slot: int, end: int) -> tuple[Sequence, Tensor]:
    """Markers and K free-running latents; returns the sequence up to `<|lvr_end|>` and z (B, K, D)."""
    rows = sequence.ids.shape[0]

    def column(token: int) -> Tensor:
        return torch.full((rows, 1), token, dtype=torch.long, device=sequence.ids.device)

    sequence = append(model, sequence, column(start))
    found = []
    for _ in range(latents):
        z = hidden(model, sequence)[:, -1]
        found.append(z)
        sequence = append(model, sequence, column(slot), embeds=z[:, None])
    return append(model, sequence, column(end)), torch.stack(found, 1)


def answer_logprobs(model: Any, sequence: Sequence, ids: Tensor, temperature: float = 1.0) -> Tensor:
    """Teacher-forced log-probabilities (B, S) of `ids` (B, S) after the sequence."""
    states = hidden(model, append(model, sequence, ids))[:, -ids.shape[1] - 1 : -1]
    logits = model.lm_head(states) / temperature
    return logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
