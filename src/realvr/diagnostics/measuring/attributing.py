"""``|A dL/dA|`` of a generated answer on a model's tensors, streamed over layers; see `realvr.diagnostics.saliency`.

Two passes, both teacher-forced behind the latents that the model fed itself: z_1 … z_K are inputs of the pass, so what
a latent's query does counts through the keys and values that later columns read, not through the next latent.

* `attribute`: the rows that predict the answer, for a whole batch. The prompt and the span stay what their cached keys
  and values are: no column before the answer depends on a row of the answer, so ``dL/dA`` of these rows is that of the
  whole sequence. Only the last column before the answer is fed once more: it is the query of the first token.
* `attribute_whole`: every query of one example, for maps of token pairs and the rows of the latents.

A layer's attention is recomputed when its gradient arrives, multiplied, averaged over heads, and freed: one layer's
matrices are alive at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from realvr.backbone.attention import Columns, Matrix, Segments
from realvr.backbone.backbone import Backbone
from realvr.backbone.types import Prompt
from realvr.latent.span import decoder_pass, extend, token_logprobs
from realvr.latent.state import State
from realvr.maths import credit, saliency
from realvr.maths.precision import at_least_float32

Context = Any
"""What autograd gives a function to keep things in."""
Take = Callable[[int, Tensor, Tensor], None]
"""Gets a layer's number, its attention (B, H, R, N) and the gradient of the loss by it."""


class _Watched(torch.autograd.Function):
    """Attention on its way through a layer: unchanged forwards, handed out with its gradient backwards.

    The weights are kept by ``save_for_backward`` and by nothing else, so a checkpointed layer recomputes and frees
    them.
    """

    @staticmethod
    def forward(ctx: Context, weights: Tensor, layer: int, take: Take) -> Tensor:
        ctx.save_for_backward(weights)
        ctx.layer, ctx.take = layer, take
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (weights,) = ctx.saved_tensors
        ctx.take(ctx.layer, weights.detach(), gradients[0].detach())
        return gradients[0], None, None


def watching(take: Take) -> Matrix:
    """What a pass is asked for, so that ``take`` gets every layer's attention with its gradient."""
    return Matrix(watch=lambda layer, weights: _Watched.apply(weights, layer, take))  # type: ignore[no-untyped-call]


# ---------------------------------------------------------------------- the rows that predict the answer


@dataclass
class Attributed:
    """Scores of a batch, by layer: (B, N) means over heads and content rows, N the absolute columns."""

    loss_B: Tensor
    """Summed cross-entropy of the content tokens."""
    saliency: dict[int, Tensor] = field(default_factory=dict)
    attention: dict[int, Tensor] = field(default_factory=dict)

    def mean(self, name: str) -> Tensor:
        """``saliency`` or ``attention`` (B, N), the mean over layers."""
        layers: dict[int, Tensor] = getattr(self, name)
        return torch.stack([layers[layer] for layer in sorted(layers)]).mean(0)


def attribute(
    backbone: Backbone, state: State, last_B: Tensor, answers: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> Attributed:
    """``S(n)`` of every column for a batch of answers, each (ids, numbers of its content ids; at least one).

    ``state`` has read everything before the answers; its last column holds the tokens ``last_B``.
    """
    if any(not content for _, content in answers):
        raise ValueError("an answer without a content token has no loss: leave it out")
    ids_BR, real_BR, target_BR, content_BR = _rows(answers, last_B)
    embeds = backbone.embed(ids_BR).detach().requires_grad_()
    found = Attributed(torch.zeros(len(answers)))

    def take(layer: int, weights: Tensor, gradient: Tensor) -> None:
        content = content_BR.to(weights.device)
        found.saliency[layer] = saliency.saliency(weights[None], gradient[None], content).to(embeds.device)
        found.attention[layer] = credit.readout(weights[None], content).to(embeds.device)

    with torch.enable_grad():
        _, hidden = extend(
            backbone,
            _without_last(state),
            embeds_BSD=embeds,
            real_BS=None if bool(real_BR.all()) else real_BR,
            matrix=watching(take),
            checkpointed=True,
        )
        loss_B = _losses(backbone, hidden, target_BR, content_BR)
        torch.autograd.grad(loss_B.sum(), embeds)
    found.loss_B = loss_B.detach()
    return found


def _rows(answers: Sequence[tuple[Sequence[int], Sequence[int]]], last_B: Tensor) -> tuple[Tensor, ...]:
    """(B, R) ids that are fed, which are real, what each is to predict, and whether that is content.

    Row i is the query that predicts id i. Nothing behind the last content token is fed: it has no part in the loss.
    """
    sizes = [max(content) + 1 for _, content in answers]
    shape = (len(answers), max(sizes))
    ids, target = (torch.zeros(shape, dtype=torch.long) for _ in range(2))
    real, inside = (torch.zeros(shape, dtype=torch.bool) for _ in range(2))
    for row, ((tokens, content), size) in enumerate(zip(answers, sizes, strict=True)):
        ids[row, 1:size] = torch.tensor(list(tokens[: size - 1]), dtype=torch.long)
        target[row, :size] = torch.tensor(list(tokens[:size]), dtype=torch.long)
        real[row, :size] = True
        inside[row, list(content)] = True
    ids, target, real, inside = (x.to(last_B.device) for x in (ids, target, real, inside))
    ids[:, 0] = last_B
    return ids, real, target, inside


def _losses(backbone: Backbone, hidden_BRD: Tensor, target_BR: Tensor, content_BR: Tensor) -> Tensor:
    """(B,) summed cross-entropy of the content tokens."""
    logp_N, _ = token_logprobs(backbone, hidden_BRD[content_BR], target_BR[content_BR])
    return (
        -torch.zeros(content_BR.shape, dtype=logp_N.dtype, device=logp_N.device)
        .masked_scatter(content_BR, logp_N)
        .sum(-1)
    )


def _without_last(state: State) -> State:
    """The state before its last column, which is then fed again. Its ``last_BD`` is not of that column."""
    kept = state.length - 1
    columns = Columns(kept, *(None if fact is None else fact[:, :kept] for fact in state.columns.facts()))
    return replace(
        state,
        kv=[_cut(pieces) for pieces in state.kv],
        columns=columns,
        next_B=state.next_B - 1,
        image_BT=state.image_BT[:, :kept],
    )


def _cut(pieces: Segments) -> Segments:
    *before, (key, value) = pieces
    return (*before, (key[:, :, :-1], value[:, :, :-1])) if key.shape[2] > 1 else tuple(before)


# ---------------------------------------------------------------------- every row of one example


@dataclass
class Whole:
    """One example, every query and key (T, T): means over layers and heads."""

    saliency: Tensor
    attention: Tensor
    loss: float


def attribute_whole(
    backbone: Backbone, prompt: Prompt, latents_KD: Tensor, ids: Sequence[int], content: Sequence[int]
) -> Whole:
    """Token pairs of one example: prompt, span and answer up to the token before its last content token.

    Row and column c are the c-th input of the sequence; the rows behind the query of the last content token do not
    exist.
    """
    size = max(content) + 1
    with torch.no_grad():
        embeds, positions, image, deepstack = _inputs(backbone, prompt, latents_KD, ids[: size - 1])
    embeds.requires_grad_()
    length = embeds.shape[1]
    wide = torch.promote_types(embeds.dtype, torch.float32)
    zeros = torch.zeros(length, length, dtype=wide, device=embeds.device)
    found = Whole(zeros, zeros.clone(), loss=0.0)

    def take(layer: int, weights: Tensor, gradient: Tensor) -> None:
        share = 1 / (backbone.layers * weights.shape[1])
        for own, slope in zip(weights[0], gradient[0], strict=True):  # head by head: a product of all would double it
            found.saliency += (share * saliency.attribution(own, slope)).to(embeds.device)
            found.attention += (share * at_least_float32(own)).to(embeds.device)

    with torch.enable_grad():
        _, hidden = decoder_pass(
            backbone,
            None,
            embeds,
            positions,
            image_BT=image,
            deepstack=deepstack,
            matrix=watching(take),
            checkpointed=True,
        )
        target = torch.tensor([list(ids[:size])], device=embeds.device)
        inside = torch.zeros_like(target, dtype=torch.bool)
        inside[0, list(content)] = True
        loss = _losses(backbone, hidden[:, -size:], target, inside).sum()
        torch.autograd.grad(loss, embeds)
    found.loss = float(loss.detach())
    return found


def _inputs(
    backbone: Backbone, prompt: Prompt, latents_KD: Tensor, ids: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor | None, list[Tensor]]:
    """Embeddings (1, T, D) of prompt, span and answer, their positions, image columns, and DeepStack features."""
    batch = backbone.batch([prompt])
    visual = backbone.encode_images(batch.images)
    parts = [backbone.embed_batch(batch, visual)]
    if len(latents_KD):
        start, end = (
            backbone.embed(torch.tensor([[marker]], device=backbone.device))
            for marker in (backbone.markers.start, backbone.markers.end)
        )
        parts += [start, latents_KD[None].to(start), end]
    if ids:
        parts.append(backbone.embed(torch.tensor([list(ids)], device=backbone.device)))
    embeds = torch.cat(parts, dim=1).detach()
    further = embeds.shape[1] - batch.ids_BT.shape[1]
    after = batch.next_B[:, None] + torch.arange(further, device=embeds.device)
    positions = torch.cat([batch.positions, after.expand(*batch.positions.shape[:-1], -1)], dim=-1)
    image = torch.nn.functional.pad(batch.image_BT, (0, further)) if batch.images else None
    return embeds, positions, image, list(visual.deepstack) if batch.images else []
