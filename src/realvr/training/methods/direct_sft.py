"""Direct-SFT: the control of Stage 1 without latents."""

from __future__ import annotations

from realvr.training.methods.lvr_sft import LvrSft


class DirectSft(LvrSft):
    """The same data and steps as LVR-SFT without a latent span: cross-entropy only."""

    name, order = "direct-sft", 1
    fixed = {"model.latents": 0}
