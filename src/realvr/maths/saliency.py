"""Answer-conditioned saliency, ``S(n)`` of app:diag-saliency: how much each attention entry carries of the loss of an
answer.

What the paper leaves open:

* Row j of the attention is the query that predicts ``o_j``, one column before it. At its own column the last token of
  the answer has no effect on the loss, and an answer of one token would have no saliency at all.
* The derivative is taken by the weights after the softmax, each entry on its own: rows are not renormalised.
"""

from __future__ import annotations

from torch import Tensor

from realvr.maths.credit import readout
from realvr.maths.precision import at_least_float32


def attribution(weights: Tensor, gradient: Tensor) -> Tensor:
    """``|A dL/dA|``, entry by entry."""
    if weights.shape != gradient.shape:
        raise ValueError(f"attention {tuple(weights.shape)} and its gradient {tuple(gradient.shape)} differ in shape")
    return (at_least_float32(weights) * at_least_float32(gradient)).abs()


def saliency(weights_LBHRN: Tensor, gradient_LBHRN: Tensor, content_BR: Tensor) -> Tensor:
    """``S(n)`` (B, N): mean of the attribution over layers, heads and the content rows J of each example.

    An example without a content row gets zeros.
    """
    return readout(attribution(weights_LBHRN, gradient_LBHRN), content_BR)
