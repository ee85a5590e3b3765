"""The shapes of the summaries of diagnostics (``counterfactual.json``, ``exchange.json``, …): what they write and what
the report and the demo read. No torch."""

from __future__ import annotations

from typing import Any, NotRequired

from typing_extensions import TypedDict

from realvr.evaluation.results import Answering
from realvr.runs.records import ResultFile, Text


class Rate(TypedDict):
    """A share with its interval; None without a denominator. ``edits`` instead of counts: a mean over edits."""

    count: NotRequired[int]
    of: NotRequired[int]
    edits: NotRequired[int]
    rate: float | None
    low: float | None
    high: float | None


class Mean(TypedDict):
    """Mean of one value per pair (or question) with its bootstrap interval."""

    mean: float | None
    low: float | None
    high: float | None
    pairs: int


class Controls(TypedDict):
    """Pairs that lack the unrelated control, by reason."""

    pairs: int
    without: int
    reasons: dict[Text, dict[Text, Any]]


class Rates(TypedDict):
    """The paper's rates of one set of pairs."""

    original_accuracy: Rate
    edited_accuracy: Rate
    prediction_change: Rate
    strict_correct_flip: Rate
    false_flip: Rate
    parse_coverage: Rate
    should_flip: Rate
    model_flip: Rate
    correct_flip_of_all: Rate
    correct_flip_of_changed: Rate


class EditRates(Rates):
    """Rates of the pairs of one kind of edit, with their counts."""

    pairs: int
    changed: int
    unchanged: int
    errors: int


class Protocol(TypedDict):
    """Rates by edit, their mean over edits, and over all pairs."""

    edits: dict[Text, EditRates]
    macro: Rates
    all: EditRates


class Distances(TypedDict):
    """How far edits move latents and last hidden states, beside unrelated pictures."""

    latent: Mean
    latent_unrelated: Mean
    final: Mean
    final_unrelated: Mean


class Settings(TypedDict):
    """``NAME_settings.json``: what decides the records of a run. Diagnostics add settings of their own."""

    diagnostic: NotRequired[Text]
    model: NotRequired[Answering]
    data: NotRequired[Text]
    limit: NotRequired[int | None]
    latents: NotRequired[int | None]


SETTINGS_FILE = ResultFile(Settings, "realvr diagnose", "name another --out, or remove the folder to start again")


class Counterfactual(TypedDict):
    """``counterfactual.json``."""

    protocols: dict[Text, Protocol]
    distances: NotRequired[dict[Text, Distances] | None]
    controls: NotRequired[Controls]
    settings: NotRequired[Settings]


class ExchangeRow(TypedDict):
    """One condition: which latents were swapped, and whose answer followed."""

    condition: Text
    selector: Text
    k: int
    from_step: NotRequired[int]
    answers: int
    donor_frequency: Rate
    recipient_frequency: Rate
    parse_coverage: Rate
    donor_lift: Mean
    margin_shift: Mean


class Between(TypedDict):
    """Latents chosen by contrast minus as many chosen at random."""

    k: int
    donor_lift: Mean
    margin_shift: Mean


class Parting(TypedDict):
    """Latents swapped from a step on, counted from the step at which the two views part."""

    offset: int
    answers: int
    donor_lift: Mean
    margin_shift: Mean


class Sham(TypedDict):
    """Latents swapped for themselves: whatever differs is the arithmetic of the splice."""

    equal_replies: Rate
    largest_margin_difference: float | None


class ExchangeNumbers(TypedDict):
    """The numbers of one set of pairs."""

    rows: list[ExchangeRow]
    contrast_minus_random: list[Between]
    sham: Sham


class Exchange(ExchangeNumbers):
    """``exchange.json``."""

    edits: dict[Text, ExchangeNumbers]
    parting: NotRequired[list[Parting]]
    errors: int
    controls: NotRequired[Controls]
    settings: NotRequired[Settings]


class Grounding(TypedDict):
    """``grounding.json``."""

    questions: int
    latents: int
    negatives: int
    margin: Mean
    cos_positive: Mean
    oracle_margin: Mean


class WalkNumbers(TypedDict):
    """Means over questions of the share (or mean) over their latents."""

    questions: int
    inside: Mean
    on_the_way: Mean
    at_the_end: Mean
    whole: Rate
    evidence: Mean
    chance: Mean
    chance_evidence: Mean
    evidence_above_chance: NotRequired[Mean]
    """Of the differences, question by question; files of earlier versions do not have it."""
    cosine: Mean
    nearest_cosine: Mean
    thumbnail: Mean


class WalkStep(TypedDict):
    """One latent of the walk, over questions."""

    step: int
    inside: Rate
    evidence: Rate
    chance: Mean
    cosine: Mean
    nearest_cosine: Mean


class Walk(WalkNumbers):
    """``walk.json``."""

    latents: int
    by: Text
    longer: int
    """Questions with more boxes than latents."""
    steps: list[WalkStep]
    groups: dict[Text, WalkNumbers]


class Outcomes(TypedDict):
    """What answers do once a latent was replaced: shares of all of them."""

    new: Rate
    old: Rate
    neither: Rate
    unreadable: Rate


class SteerStep(TypedDict):
    """What happens when one latent is moved."""

    step: int
    questions: int
    moved: Outcomes
    own_place: Outcomes
    free: Outcomes
    later_moved: Mean
    later_own_place: Mean
    later_free: Mean
    unchanged: Rate
    under_way: Outcomes
    ended: Outcomes
    random: NotRequired[Outcomes]
    later_random: NotRequired[Mean]
    skipped: dict[Text, int]


class SteerDistance(TypedDict):
    """Moves over ``near`` … ``far`` cells: percentage of answers that follow, by condition."""

    near: int
    far: int
    moved: Mean
    own_place: Mean
    random: Mean
    later_moved: Mean


class Steer(TypedDict):
    """``steer.json``."""

    latents: int
    questions: int
    follows: Mean
    steps: list[SteerStep]
    distances: NotRequired[list[SteerDistance]]
    errors: int
    settings: NotRequired[Settings]
