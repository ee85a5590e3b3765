"""What a microbatch of a run is to the estimate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from realvr.latent.modes import is_static
from realvr.training.engine import Engine
from realvr.training.estimate.activations import Workload, regeneration
from realvr.training.estimate.peak import Setup
from realvr.training.rl_batch import RlBatch
from realvr.training.settings import TrainSettings
from realvr.training.sft_batch import SftBatch


def workload_of(settings: TrainSettings, engine: Engine, microbatch: object, microbatches: int) -> Workload | None:
    """The work of this microbatch; None for a method whose passes are not those of Stage 1 or Stage 2."""
    config: Any = getattr(settings, "method", None)
    if isinstance(microbatch, RlBatch):
        b = microbatch
        how = {"sharded": engine.shards, "lockstep": engine.lockstep}
        rows, tokens = b.batch.ids_BT.shape
        return Workload(
            stage="rl",
            rows=rows,
            tokens=tokens,
            visual=len(b.visual.features_ND) // rows,
            latents=b.latents_BKD.shape[1],
            group=b.ids_BGS.shape[1],
            answer=b.ids_BGS.shape[2],
            readout=b.answers_BYS[0].numel(),
            microbatches=microbatches,
            padded=b.batch.padded,
            together=config.rollout_batch,
            static=config.max_new if is_static(config.fast_decode, engine.device.type, **how) else 0,
            released=config.release_decode,
            **regeneration(config, engine.device.type, engine.shards, b.visual.features_ND.element_size()),
        )
    if isinstance(microbatch, SftBatch):
        rows, tokens = microbatch.ids_RT.shape
        return Workload(
            stage="sft",
            rows=rows,
            tokens=tokens,
            visual=int(microbatch.image_RT.sum()) // rows,
            labelled=len(microbatch.labels_M) // rows,
            memory="checkpointed" if config.gradient_checkpointing else "cached",
            microbatches=microbatches,
        )
    return None


def setup_of_run(settings: TrainSettings, engine: Engine) -> Setup:
    """How the engine of this run spreads the model. Asked after `Engine.prepare`, which decides on rollouts."""
    setup = Setup.of(engine.settings, engine.world, settings.optim.master_weights, settings.optim.gradients)
    return replace(setup, rollout="lockstep" if engine.lockstep else "gather") if setup.sharded else setup
