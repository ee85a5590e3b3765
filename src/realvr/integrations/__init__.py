"""Models of realvr inside other evaluation harnesses: lmms-eval and VLMEvalKit. No torch, and no harness, is imported
here."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmms_eval.models.registry_v2 import ModelManifest


def lmms_eval_manifest() -> ModelManifest:
    """What lmms-eval reads through its entry point ``lmms_eval.models``: the name of the model, and where its class is.

    lmms-eval calls it while it starts, for every model that is asked for, so it imports nothing else.
    """
    from lmms_eval.models.registry_v2 import ModelManifest

    return ModelManifest(model_id="realvr", chat_class_path="realvr.integrations.lmms_eval.RealVR")
