"""What a latent is replaced by, to see whether the answer needs it: names and words. No torch.

The paper replaces z_t by "a replacement token vector" and does not say which; all three are ours, and are the ones that
``realvr eval`` fills whole spans with (`realvr.evaluation.ablation`). `realvr.diagnostics.measuring.replacing` has the
tensors.
"""

from __future__ import annotations

from typing import Literal

Replacement = Literal["position-mean", "another", "noise"]

REPLACEMENTS: dict[Replacement, str] = {
    "position-mean": "the mean latent of the position over the samples of the run",
    "another": "the latent of the same position of another sample, with other pictures",
    "noise": "a Gaussian direction as long as the latent",
}
