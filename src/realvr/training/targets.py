"""What the latent slots of Stage 1 stand for: from evidence boxes to the targets of each span. numpy only.

The paper's reading is the default: a slot for each visual token of the evidence, in reading order. Everything else here
is ours: targets in the order of the boxes, spans of exactly K slots, spans in earlier turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from pydantic import model_validator

from realvr.data import reasons
from realvr.data.boxes import before_each_reply, prompt_boxes, unshown_box, with_area
from realvr.data.sample import Sample
from realvr.data.targets import Tokens, as_evidence, fixed
from realvr.imaging.types import Grid
from realvr.training.sections import MethodConfig

TOO_MANY_BOXES = "too_many_boxes"
SEVERAL_IMAGES = "boxes_on_several_images"


class EvidenceConfig(MethodConfig):
    """How evidence boxes become the targets of a latent span."""

    evidence_order: Literal["reading", "given"] = "reading"
    """Order of the targets. ``reading``: row by row over the image, as in the paper. ``given``: box by box, in the
    order of the row's boxes, each visual token once; boxes on several images are no trail, and such a row is left out
    and counted. Rows and sources that are not ``ordered`` keep the reading order. Not in the paper."""
    span: Literal["as-evidence", "fixed"] = "as-evidence"
    """Length of the span. ``as-evidence``: a slot for each visual token of the evidence, as in the paper. ``fixed``:
    exactly K = ``model.latents`` slots, one for each box and the last repeated, so that K is the same in training and
    at inference. Not in the paper."""
    target: Literal["center", "mean"] = "center"
    """With ``span: fixed``, what the slot of a box stands for: the visual token at its centre, or the mean of its
    visual tokens."""
    too_many_boxes: Literal["refuse", "thin"] = "refuse"
    """With ``span: fixed``, a row with more boxes than K: left out and counted, or thinned evenly to K boxes, the first
    and the last among them."""
    without_boxes: Literal["no-span", "whole-image"] = "no-span"
    """With ``span: fixed``, a row without boxes: no span, or K times the mean of all visual tokens shown so far."""
    earlier_spans: bool = False
    """Rows with earlier assistant turns: a span in these turns too, from ``earlier_boxes``, as a conversation whose
    spans are kept has at inference. Its states are trained to reconstruct its targets; the earlier replies themselves
    are not learned. With ``spell_out`` they are in words too. Not in the paper."""

    @model_validator(mode="after")
    def _used(self) -> EvidenceConfig:
        """Refuse a choice that would have no effect."""
        for name, value in (("target", "mean"), ("too_many_boxes", "thin"), ("without_boxes", "whole-image")):
            if self.span != "fixed" and getattr(self, name) == value:
                raise ValueError(f"{name}: {value} has no effect with span: {self.span}; set span: fixed")
        return self


@dataclass(frozen=True)
class Spans:
    """Targets of each reply's span, the last being the one that is learned; empty where a reply has none.

    A target below the number of visual tokens is that token of the prompt; those from there on are ``pools``, each the
    mean of several.
    """

    targets: list[Tokens]
    pools: list[Tokens]


def replies(config: EvidenceConfig, sample: Sample) -> list[Sample]:
    """The sample before each reply that may have a span."""
    return before_each_reply(sample) if config.earlier_spans else [sample]


def refusal(config: EvidenceConfig, sample: Sample, latents: int) -> tuple[str, str] | None:
    """Why a row is left out, as reason and sentence; None where it is not. Without latents none has too many boxes."""
    if (problem := unshown_box(sample)) is not None:
        return reasons.BOX_NOT_SHOWN, problem
    for part in replies(config, sample):
        boxes = with_area(part.boxes)
        if config.span == "fixed" and config.too_many_boxes == "refuse" and 0 < latents < len(boxes):
            return TOO_MANY_BOXES, f"{len(boxes)} boxes, more than the {latents} targets of a span"
        images = sorted({box.image for box in boxes})
        if _in_given_order(config, sample) and len(images) > 1:
            shown = ", ".join(str(image) for image in images)
            return SEVERAL_IMAGES, f"boxes on images {shown}; those of a trail are on one image"
    return None


def spans(config: EvidenceConfig, sample: Sample, grids: Sequence[Grid], latents: int) -> Spans:
    """Targets of a row that is not left out; ``grids`` are those of `Sample.images`."""
    starts = [0, *accumulate(grids[index].tokens for index in sample.shown)]
    given = _in_given_order(config, sample)
    found = Spans([], [])
    for part in replies(config, sample):
        shown = [grids[index] for index in part.shown]
        boxes = with_area(prompt_boxes(part)) if latents else []
        if config.span == "fixed":
            whole = config.without_boxes == "whole-image"
            own = fixed(boxes, given, shown, starts, latents, found.pools, target=config.target, whole_image=whole)
        else:
            own = as_evidence(boxes, given, shown, starts)
        found.targets.append(own)
    return found


def _in_given_order(config: EvidenceConfig, sample: Sample) -> bool:
    return config.evidence_order == "given" and sample.ordered
