"""The shapes of the summaries of diagnostics of attention (``enrichment.json``, …). No torch."""

from __future__ import annotations

from typing_extensions import TypedDict

from realvr.diagnostics.results import Mean, Rate
from realvr.runs.records import Text


class EnrichedLayer(TypedDict):
    """One layer of a curve, over questions."""

    layer: int
    ratio: Mean
    ratio_of_means: Mean
    target: Mean
    background: Mean
    image: Mean


class EnrichedGroup(TypedDict):
    """A curve over layers; ``ratio`` is the mean over them."""

    questions: int
    ratio: Mean
    layers: list[EnrichedLayer]


class Enrichment(TypedDict):
    """``enrichment.json``."""

    questions: int
    latents: int
    windows: Text
    skipped: dict[Text, int]
    unparsed: int
    accuracy: Rate
    answers: Mean
    correct: EnrichedGroup
    incorrect: EnrichedGroup
    latents_curve: EnrichedGroup


class EvidenceCell(TypedDict):
    """One layer and latent, over questions."""

    layer: int
    step: int
    ratio: Mean
    ratio_of_means: Mean
    target: Mean


class EvidenceStep(TypedDict):
    """One latent, over questions."""

    step: int
    image: Mean
    read: Mean


class EvidenceReadout(TypedDict):
    """``evidence-readout.json``."""

    questions: int
    latents: int
    skipped: dict[Text, int]
    maps: dict[Text, list[list[EvidenceCell]]]
    steps: list[EvidenceStep]
    on_latents: Mean


class AttentionMap(TypedDict):
    """``attention-map.json``."""

    questions: int
    latents: int
    bins: list[int]
    labels: list[Text]
    map: list[list[Mean | None]]
    omitted: list[Mean]
    evidence: list[Mean]
    marked: list[bool]
    links: dict[Text, Mean]
    question_not_found: int


class SwitchMap(TypedDict):
    """Density of one question on the picture that the figure shows."""

    name: Text
    question: Text
    density: list[float]
    grid: list[list[float]]


class SwitchExample(TypedDict):
    """The picture that the figure shows."""

    picture: Text
    boxes: list[list[list[float]]]
    maps: list[SwitchMap]


class QuestionSwitch(TypedDict):
    """``question-switch.json``."""

    pictures: int
    questions: int
    latents: int
    incomplete: int
    accuracy: Rate
    question: Mean
    paraphrase: Mean
    other: Mean
    selection: Mean
    paraphrase_gap: Mean
    follows: Rate
    example: SwitchExample | None
