"""Direct-SFT: the control of Stage 1 without latents."""

from __future__ import annotations

from realvr.training.methods.lvr_sft import LvrSft


class DirectSft(LvrSft):
    """The same data and steps as LVR-SFT without a latent span: cross-entropy only.

    It takes the settings of LVR-SFT's spans, so that one file serves both, and leaves out the rows whose boxes are no
    trail. It has no K: no row has too many boxes.
    """

    name, order = "direct-sft", 1
    fixed = {"model.latents": 0}
