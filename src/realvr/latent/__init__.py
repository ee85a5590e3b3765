"""The latent span: prefill, latents, extend, score; group rollout; the differentiable trajectory."""

from __future__ import annotations

from realvr.lazy import lazy_names

_HOME = {
    "Interventions": "realvr.latent.span",
    "State": "realvr.latent.state",
    "decoder_pass": "realvr.latent.span",
    "extend": "realvr.latent.span",
    "prefill": "realvr.latent.span",
    "score": "realvr.latent.span",
    "splice": "realvr.latent.span",
    "think": "realvr.latent.span",
    "token_logprobs": "realvr.latent.span",
    "Memory": "realvr.latent.recurrence",
    "regenerate": "realvr.latent.recurrence",
    "trajectory": "realvr.latent.recurrence",
    "cell_box": "realvr.data.boxes",
    "region_vector": "realvr.latent.regions",
    "Completion": "realvr.latent.completions",
    "Rollout": "realvr.latent.group_rollout",
    "decode": "realvr.latent.group_rollout",
    "rollout": "realvr.latent.group_rollout",
    "GREEDY": "realvr.latent.sampling",
    "Sampling": "realvr.latent.sampling",
}
__all__ = list(_HOME)
__getattr__, __dir__ = lazy_names(__name__, _HOME, {"advance": "realvr.latent.decoder_pass"})
