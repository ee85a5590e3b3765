"""What a run needs per device, from shapes alone: weights, gradients, optimizer, activations. `realvr plan` and ``train
--dry-run`` both ask `estimate`."""

from realvr.training.estimate.activations import Workload
from realvr.training.estimate.peak import Estimate, Setup, estimate
from realvr.training.estimate.shape import Decoder, Weight, decoder_of, weights_of, with_adapters

__all__ = [
    "Decoder",
    "Estimate",
    "Setup",
    "Weight",
    "Workload",
    "decoder_of",
    "estimate",
    "weights_of",
    "with_adapters",
]
