"""LVR-RL, Direct, and the ablations of ReaLVR (tab:mablation, app:mass-matched-factorial): each is ReaLVR with the few
settings that define it."""

from __future__ import annotations

from realvr.training.methods.realvr import ReaLVR


class LvrRl(ReaLVR):
    """GRPO behind latents, without the evidence loss (eq:lvr_s2)."""

    name, order = "lvr-rl", 1
    fixed = {"lambda_ev": 0.0}


class Direct(ReaLVR):
    """GRPO on the text of a model that never had a latent span."""

    name, order = "direct", 2
    from_scratch = True
    fixed = {"lambda_ev": 0.0, "model.latents": 0}


class Uniform(ReaLVR):
    """Every latent has the weight 1/K."""

    name, order = "uniform", 3
    fixed = {**ReaLVR.fixed, "routing": "uniform", "eta": 1.0}


class Selective(ReaLVR):
    """Credit alone, without the floor."""

    name, order = "selective", 4
    fixed = {**ReaLVR.fixed, "eta": 0.0}


class RawAttention(ReaLVR):
    """Credit is what the correct answer reads, whatever wrong answers read."""

    name, order = "raw-attention", 5
    fixed = {**ReaLVR.fixed, "routing": "raw"}


class NoNegatives(ReaLVR):
    """A hinge on the cosine to p+ instead of a margin over negatives."""

    name, order = "no-negatives", 6
    fixed = {**ReaLVR.fixed, "objective": "hinge-positive"}


class Undetached(ReaLVR):
    """Gradients through the weights (app:detached-credit)."""

    name, order = "undetached", 7
    fixed = {**ReaLVR.fixed, "detach": False}


class OffPolicy(ReaLVR):
    """Evidence on the latents that were saved at rollout."""

    name, order = "off-policy", 8
    fixed = {**ReaLVR.fixed, "on_policy": False}


class MassMatchedUniformPositive(ReaLVR):
    """Mass-matched factorial: uniform routing, positive only."""

    name, order = "mass-matched-u+", 9
    fixed = {**ReaLVR.fixed, "mass_matched": True, "routing": "uniform", "objective": "hinge-positive"}


class MassMatchedUniformContrast(ReaLVR):
    """Mass-matched factorial: uniform routing, contrast."""

    name, order = "mass-matched-u±", 10
    aliases = ("mass-matched-u+-",)
    fixed = {**ReaLVR.fixed, "mass_matched": True, "routing": "uniform"}


class MassMatchedCreditPositive(ReaLVR):
    """Mass-matched factorial: credit routing, positive only."""

    name, order = "mass-matched-c+", 11
    fixed = {**ReaLVR.fixed, "mass_matched": True, "objective": "hinge-positive"}


class MassMatchedCreditContrast(ReaLVR):
    """Mass-matched factorial: credit routing, contrast."""

    name, order = "mass-matched-c±", 12
    aliases = ("mass-matched-c+-",)
    fixed = {**ReaLVR.fixed, "mass_matched": True}


class Custom(ReaLVR):
    """Every setting is free."""

    name, order = "custom", 13
    fixed = {}
