"""The model as a diagnostic meets it: its answers, its tensors, the K of the run. No torch before `read`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from realvr.errors import UserError
from realvr.evaluation.responder import Responder

if TYPE_CHECKING:
    from realvr.backbone.backbone import Backbone
    from realvr.backbone.types import Prompt
    from realvr.data.sample import Sample
    from realvr.diagnostics.measuring.reading import Reading
    from realvr.latent.sampling import Sampling


class Model:
    """``responder`` answers questions; ``latents`` is K of this run (0: no span); ``second`` the model that
    ``--second-model`` names, where the diagnostic needs one."""

    def __init__(self, responder: Responder, latents: int, second: Model | None = None) -> None:
        self.responder, self.latents, self.second = responder, latents, second

    @property
    def name(self) -> str:
        """What messages call it: the path it was given by."""
        return str(getattr(self.responder, "path", "") or self.responder.name)

    @property
    def backbone(self) -> Backbone:
        """The network."""
        found: Backbone | None = getattr(self.responder, "backbone", None)
        if found is None:
            raise UserError(f"{self.name} answers questions only; this diagnostic looks inside a model")
        return found

    @property
    def sampling(self) -> Sampling:
        """How answers are decoded."""
        return self.responder.sampling  # type: ignore[attr-defined]

    def prompt(self, sample: Sample, pictures: Sample | None = None) -> Prompt:
        """The sample's question about its own pictures or those of another sample; a `UserError` where it cannot be
        read, or leaves no room for the span and an answer."""
        from realvr.diagnostics.measuring.reading import prompt_of

        return prompt_of(self.backbone, sample, pictures or sample, self.latents)

    def read(self, samples: Sequence[Sample]) -> Reading:
        """Prompts and free-running spans of these samples, in one batch; what cannot be read is in ``errors``."""
        from realvr.diagnostics.measuring.reading import read_samples

        return read_samples(self.backbone, samples, self.latents)
