"""The objective of a stage: its terms, weighted and added.

Implements eq:realvr_difference (sec:method_objective), ``L_S2^LVR + lambda_ev L_ev``, and the Stage-1 sum of
sec:prelim_vanilla_objective with the weight of tab:hp-sft.

Departures from the paper: none. Means over a batch are taken by the terms themselves, with the denominator of the whole
optimizer step.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from realvr.maths.precision import at_least_float32


def total(terms: Mapping[str, tuple[float, Tensor]]) -> Tensor:
    """Loss of a stage, a scalar: the sum of ``weight * term`` over its named terms, in their order."""
    if not terms:
        raise ValueError("an objective needs at least one term")
    first, *others = [weight * at_least_float32(term) for weight, term in terms.values()]
    return sum(others, first)
