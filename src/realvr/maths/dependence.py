"""Whether an answer depends on its latents: the utility of one, and the order in which several are replaced.

Implements eq:slot_utility and the ranking of app:diag-latent-dependence, fig:accuracy-utility and
fig:design-latent-intervention.

Departures from the paper, and what it leaves open:

* The replacement ``z-bar`` is "a replacement token vector"; `realvr.diagnostics.replacements` names ours.
* Latents of equal rank (zero contrasts among them) are taken from the first slot on, or in a given order.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from realvr.maths.precision import at_least_float32


def utility(logp_B: Tensor, replaced_BK: Tensor) -> Tensor:
    """``u_t`` (B, K): log-probability of the right answer behind its latents, minus that with latent t replaced."""
    return at_least_float32(logp_B)[:, None] - at_least_float32(replaced_BK)


def ranked(scores_K: Tensor, ties: Sequence[int] | None = None) -> list[int]:
    """Slots, counted from 0, by falling score; of equal ones the first slot first, or the first in ``ties``."""
    before = list(range(len(scores_K))) if ties is None else list(ties)
    order = scores_K.detach().cpu()[before].sort(descending=True, stable=True).indices.tolist()
    return [before[place] for place in order]
