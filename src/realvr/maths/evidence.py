"""What a latent should preserve: prototypes, margins and the evidence loss.

Implements ``Pool`` and ``g_t`` (sec:method_evidence_target, app:construction-prototypes), the per-example loss
eq:realvr_batch_evidence and its mean over a batch (sec:method_objective), the violation ``h_t``
(app:gradient-undetached), both losses of eq:where-what-losses (app:mass-matched-factorial) and the "no negatives" row
of tab:mablation.

Departures from the paper, and what it leaves open:

* The paper requires nonzero prototypes and at least one negative. A batch may offer neither, so an example with a zero
  ``p+``, or in the contrastive loss without a valid negative, contributes exactly zero and stays in the graph. Zero
  negatives are dropped. Positive-only losses need no negative.
* The cosine of a zero latent is 0 with a zero gradient; the paper does not say.
* At the hinge ``g_t = m`` the subgradient is 0, as ``1{g_t < m}`` in app:gradient-undetached says. Negatives that tie
  for the maximum share its gradient equally, so the loss does not depend on their order.
* "No negatives" is called a plain cosine alignment in tab:mablation and a hinge in eq:where-what-losses. Both are here:
  ``positive_loss`` (hinge) and ``alignment_loss`` (1 - cos).
* The paper has one ``p+`` for all latents of an example. Everywhere below there may also be one for each latent: ``p+``
  as (B, K, D), negatives as (B, M, K, D), the t-th of each against latent t. Ours, and off by default.
"""

from __future__ import annotations

import torch
from torch import Tensor

from realvr.maths.precision import at_least_float32, masked, safe_divide


def pool(tokens_ND: Tensor, mask_N: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Prototype (D,): mean of the visual tokens (N, D) weighted by a mask (N,) in [0, 1], which may be fractional.

    Without a mask, or with one that is zero everywhere, it is the mean of the whole image. No token at all gives zeros,
    which the losses count as "no prototype".
    """
    tokens = at_least_float32(tokens_ND)
    if mask_N is None:
        mask_N = tokens.new_ones(tokens.shape[0])
    if mask_N.shape != tokens.shape[:1]:
        raise ValueError(f"a mask of shape {tuple(mask_N.shape)} does not fit {tokens.shape[0]} visual tokens")
    mask = mask_N.to(tokens.dtype)
    if not ((mask >= 0) & (mask <= 1)).all():
        raise ValueError("an evidence mask has values outside [0, 1]")
    mask = torch.where(mask.sum() > 0, mask, torch.ones_like(mask))
    return (mask[:, None] * tokens).sum(0) / (mask.sum() + eps)


def nonzero(vectors: Tensor) -> Tensor:
    """Which vectors (..., D) are not exactly zero: (...), bool."""
    return (vectors != 0).any(-1)


def unit(vectors: Tensor) -> Tensor:
    """Vectors (..., D) scaled to length 1; a zero vector stays zero and gets a zero gradient.

    The largest entry is divided out first, so that squares neither overflow nor vanish. It cancels in the result, hence
    it carries no gradient.
    """
    x = at_least_float32(vectors)
    largest = x.detach().abs().amax(-1, keepdim=True) if x.shape[-1] else x.new_zeros((*x.shape[:-1], 1))
    filled = largest != 0  # true for NaN, which must not be hidden
    scaled = x / torch.where(filled, largest, torch.ones_like(largest))
    square = scaled.square().sum(-1, keepdim=True)
    return masked(scaled / torch.where(filled, square, torch.ones_like(square)).sqrt(), filled)


def similarity(z_BKD: Tensor, prototype_BD: Tensor) -> Tensor:
    """Cosine (B, K) of each latent with its example's prototype; 0 where either is zero."""
    prototype_BKD = prototype_BD if prototype_BD.dim() == 3 else prototype_BD[:, None]
    return (unit(z_BKD) * unit(prototype_BKD)).sum(-1)


def usable(negatives_BMD: Tensor, valid_BM: Tensor | None = None) -> Tensor:
    """Negatives that count: marked valid (all of them by default) and not zero. (B, M), or (B, M, K) with one a
    latent."""
    counts = nonzero(negatives_BMD)
    if valid_BM is None:
        return counts
    return (valid_BM.bool() if counts.dim() == 2 else valid_BM.bool()[..., None]) & counts


def defined(positive_BD: Tensor, negatives_BMD: Tensor, valid_BM: Tensor | None = None) -> Tensor:
    """What has a margin: a nonzero ``p+`` and at least one usable negative. Examples (B,), or their latents (B, K)."""
    return nonzero(positive_BD) & usable(negatives_BMD, valid_BM).any(1)


def of_latents(values_B: Tensor) -> Tensor:
    """Values of examples (B,) as those of their latents, (B, 1); values of latents (B, K) stay as they are."""
    return values_B if values_B.dim() == 2 else values_B[:, None]


def hardest(z_BKD: Tensor, negatives_BMD: Tensor, valid_BM: Tensor | None = None) -> Tensor:
    """Largest cosine (B, K) with a usable negative; 0 in an example that has none.

    Products and sums instead of a matrix product: autocast and TF32 would coarsen the latter.
    """
    z = unit(z_BKD)
    counts = usable(negatives_BMD, valid_BM)
    if counts.shape[1] == 0:
        return z.sum(-1) * 0
    own = negatives_BMD.dim() == 4  # one a latent: to (B, K, M, D); else the same for all latents: (B, 1, M, D)
    negatives_BKMD = unit(negatives_BMD).transpose(1, 2) if own else unit(negatives_BMD)[:, None]
    counts_BKM = counts.transpose(1, 2) if own else counts[:, None]
    cosine_BKM = (z[:, :, None] * negatives_BKMD).sum(-1)
    # -2 is below every cosine and finite, unlike -inf, whose difference with anything would poison the gradient.
    best = torch.where(counts_BKM, cosine_BKM, cosine_BKM.new_tensor(-2.0)).amax(-1)
    return masked(best, counts_BKM.any(-1))


def margin(z_BKD: Tensor, positive_BD: Tensor, negatives_BMD: Tensor, valid_BM: Tensor | None = None) -> Tensor:
    """``g_t`` (B, K): cosine with ``p+`` minus the largest cosine with a negative.

    ``negatives_BMD`` are each example's M prototypes, ``valid_BM`` says which are real. Examples for which
    ``defined`` is false get 0, connected to the graph.
    """
    g_BK = similarity(z_BKD, positive_BD) - hardest(z_BKD, negatives_BMD, valid_BM)
    return masked(g_BK, of_latents(defined(positive_BD, negatives_BMD, valid_BM)))


_margin = margin  # ``loss`` has a parameter of that name


def violation(score_BK: Tensor, margin: float) -> Tensor:
    """``h_t = [m - g_t]+`` (B, K). ``score`` is the margin ``g_t``, or the cosine with ``p+`` without negatives."""
    if not 0 < margin <= 2:
        raise ValueError(f"the target margin must lie in (0, 2], not {margin}")
    # relu, not clamp: its gradient at the kink is 0.
    return torch.relu(margin - at_least_float32(score_BK))


def weighted(losses_BK: Tensor, weights_BK: Tensor, detach: bool = True, counts: Tensor | None = None) -> Tensor:
    """``sum_t sg(w_t) l_t`` (B,). ``detach=False`` drops the stop-gradient: the undetached ablation. Examples (B,) or
    latents (B, K) that do not count contribute exactly zero."""
    if losses_BK.shape != weights_BK.shape:
        raise ValueError(f"weights {tuple(weights_BK.shape)} do not fit losses {tuple(losses_BK.shape)}")
    each_BK = at_least_float32(weights_BK.detach() if detach else weights_BK) * losses_BK
    return (each_BK if counts is None else masked(each_BK, of_latents(counts))).sum(-1)


def loss(
    z_BKD: Tensor,
    positive_BD: Tensor,
    negatives_BMD: Tensor,
    weights_BK: Tensor,
    margin: float,
    valid_BM: Tensor | None = None,
    *,
    detach: bool = True,
) -> Tensor:
    """Evidence loss of each example (B,): ``sum_t sg(w_t) [m - g_t]+``.

    Prototypes are constants. An example without a margin contributes exactly zero, connected to the graph.
    """
    positive, negatives = positive_BD.detach(), negatives_BMD.detach()
    violation_BK = violation(_margin(z_BKD, positive, negatives, valid_BM), margin)
    return weighted(violation_BK, weights_BK, detach, counts=defined(positive, negatives, valid_BM))


def positive_loss(
    z_BKD: Tensor, positive_BD: Tensor, weights_BK: Tensor, margin: float, *, detach: bool = True
) -> Tensor:
    """Positive-only hinge of each example (B,): ``sum_t sg(w_t) [m - cos(z_t, p+)]+``; zero where ``p+`` is zero."""
    positive = positive_BD.detach()
    return weighted(violation(similarity(z_BKD, positive), margin), weights_BK, detach, counts=nonzero(positive))


def alignment_loss(z_BKD: Tensor, positive_BD: Tensor, weights_BK: Tensor, *, detach: bool = True) -> Tensor:
    """Plain alignment of each example (B,): ``sum_t sg(w_t) (1 - cos(z_t, p+))``; zero where ``p+`` is zero."""
    positive = positive_BD.detach()
    return weighted(1 - similarity(z_BKD, positive), weights_BK, detach, counts=nonzero(positive))


def batch_mean(losses_B: Tensor, examples: Tensor | float | None = None) -> Tensor:
    """``L_ev``, a scalar: mean of the examples' losses; ``examples`` are those of the whole optimizer step (default:
    of this call)."""
    return safe_divide(at_least_float32(losses_B).sum(), len(losses_B) if examples is None else examples)
