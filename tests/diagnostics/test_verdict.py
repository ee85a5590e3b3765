"""The verdict: four models built from one checkpoint land in the four classes; thresholds and missing tests."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from realvr.backbone import Backbone
from realvr.backbone.attention import Pass
from realvr.data.sample import Sample
from realvr.diagnostics import Samples
from realvr.diagnostics.controls import ControlsTest
from realvr.diagnostics.model import Model
from realvr.diagnostics.numbers import rate
from realvr.diagnostics.verdict import ABOVE_CHANCE, CHANGED, QUESTIONS, verdict
from realvr.diagnostics.walk import Walk
from realvr.evaluation.model_responder import ModelResponder
from realvr.latent.sampling import Sampling
from realvr.world.splits import Recipe, samples

COUNT = 40
START, HIDDEN, AFTER, SLOT = 3, 1, 2, 4
"""What a column is: the marker before the span, a slot that the answer cannot see, what follows, an ordinary slot."""


@pytest.fixture(autouse=True)
def _no_graph() -> Iterator[None]:
    with torch.no_grad():
        yield


class Rebuilt:
    """The decoder of a model, changed around its slots.

    ``blind``: what follows the span cannot attend to its slots. ``turn`` (D, D): latents come out rotated, and the
    slots turn them back before the decoder reads them, so that the computation is the same in another code.
    """

    def __init__(self, backbone: Backbone, blind: bool, turn: Tensor | None) -> None:
        self.decode, self.turn, self.slot = backbone.decode, turn, HIDDEN if blind else SLOT
        self.start, self.end = (backbone.embed(torch.tensor(i)) for i in (backbone.markers.start, backbone.markers.end))

    def kinds(self, embeds_TD: Tensor, before: int) -> list[int]:
        """What each new column is, from what the column before it was."""
        found = []
        for embed_D in embeds_TD:
            if before == AFTER or (before in (START, self.slot) and torch.equal(embed_D, self.end)):
                before = AFTER
            elif before in (START, self.slot):
                before = self.slot
            else:
                before = START if torch.equal(embed_D, self.start) else 0
            found.append(before)
        return found

    def __call__(
        self, embeds_BTD: Tensor, positions: Tensor, carried: Pass, image: Any = None, deepstack: Sequence[Tensor] = ()
    ) -> Tensor:
        rows, new, _ = embeds_BTD.shape
        columns = carried.columns
        known = columns.image_visibility
        known = torch.zeros(rows, columns.length, dtype=torch.long) if known is None else known.clone()
        old = columns.length - new
        kinds = torch.tensor(self.kinds(embeds_BTD[0], int(known[0, old - 1]) if old else 0))
        known[:, old:] = kinds
        columns.image_visibility = known
        if self.turn is None:
            return self.decode(embeds_BTD, positions, carried, image, deepstack)
        slots, states = kinds == self.slot, (kinds == self.slot) | (kinds == START)
        read = torch.where(slots[:, None], embeds_BTD @ self.turn.T, embeds_BTD)
        hidden = self.decode(read, positions, carried, image, deepstack)
        return torch.where(states[:, None], hidden @ self.turn, hidden)


def rebuilt(blind: bool, turned: bool) -> Model:
    backbone = Backbone.load("mini", dtype=torch.float32, device="cpu")
    generator = torch.Generator().manual_seed(2)
    turn = torch.linalg.qr(torch.randn(backbone.width, backbone.width, generator=generator))[0] if turned else None
    if blind or turned:
        backbone.decode = Rebuilt(backbone, blind, turn)  # type: ignore[method-assign]
    return Model(ModelResponder(backbone, Sampling(temperature=0.0, max_new=24)), 8)


def trails() -> list[Sample]:
    return list(samples(Recipe("trails", seed=8, count=COUNT)))


def measured(model: Model) -> dict[str, Any]:
    """Summaries of both diagnostics, by the code that measures any model."""
    chosen = trails()
    controls = ControlsTest.configure({"conditions": ("another",)})
    controls.prepare(model, chosen)
    both = {"controls": controls, "walk": Walk()}
    return {name: test.summarise(list(test.measure(model, Samples(chosen)))) for name, test in both.items()}


@pytest.mark.parametrize(
    ("blind", "turned", "label"),
    [
        (False, False, "grounded and used"),
        (True, False, "grounded but unused"),
        (False, True, "used but ungrounded"),
        (True, True, "unused"),
    ],
)
def test_four_constructed_models_land_in_the_four_classes(blind: bool, turned: bool, label: str) -> None:
    found = verdict(measured(rebuilt(blind, turned)))
    assert found.label == label, found.sentence
    assert found.used.n == found.grounded.n == COUNT
    if blind:  # answers that cannot see the slots: not one changes
        assert found.used.value == 0 and found.accuracy_drop is not None and found.accuracy_drop["mean"] == 0
    else:
        assert found.accuracy_drop is not None and found.accuracy_drop["low"] > 0.4
    assert found.grounded.value is not None and (abs(found.grounded.value) < 0.1) == turned


# ---------------------------------------------------------------------- thresholds


def summaries(
    changed: int = 30, of: int = 40, asked: int | None = None, above: Any = (0.5, 0.4, 0.6)
) -> dict[str, Any]:
    """As the diagnostics would write them: so many changed answers, and so much above chance."""
    another = {
        "condition": "another",
        "questions": of if asked is None else asked,
        "changed": rate(changed, of),
        "difference": {"mean": -0.5, "low": -0.6, "high": -0.4, "pairs": of},
    }
    mean, low, high = above
    return {
        "controls": {"conditions": [another]},
        "walk": {
            "evidence_above_chance": {"mean": mean, "low": low, "high": high, "pairs": 40 if mean is not None else 0},
        },
    }


def test_the_whole_interval_must_be_on_one_side() -> None:
    assert verdict(summaries()).label == "grounded and used"
    assert verdict(summaries(changed=0)).label == "grounded but unused"
    between = verdict(summaries(changed=6))  # 15 % [7.1, 29.1]
    assert between.label == "not decided" and between.used.holds is None and between.grounded.holds is True
    assert "contains the threshold 10.0 %" in between.used.reason and "take more questions" in between.sentence
    above, below = ABOVE_CHANCE + 1e-6, ABOVE_CHANCE - 1e-6
    assert verdict(summaries(above=(0.2, above, 0.3))).grounded.holds is True
    assert verdict(summaries(above=(0.2, below, 0.3))).grounded.holds is None
    assert verdict(summaries(above=(0.0, -0.1, below))).label == "used but ungrounded"
    assert verdict(summaries(changed=0, above=(0.0, -0.1, below))).label == "unused"
    wilson = rate(100, 500)
    assert wilson["low"] > CHANGED and verdict(summaries(changed=100, of=500)).used.holds is True


def test_grounded_has_the_interval_of_the_differences() -> None:
    """Where boxes are large latents are in them more often, by chance as much as by the model: 30 points everywhere."""
    shares = [0.4 + 0.1 * (number % 6) for number in range(QUESTIONS)]
    records = [_walked(number, share, share - 0.3) for number, share in enumerate(shares)]
    walk = Walk().summarise(records)
    assert walk["evidence"]["high"] - walk["evidence"]["low"] > 0.1, "questions differ"
    half = verdict({"walk": walk}).grounded
    assert (half.value, half.low, half.high) == pytest.approx((0.3, 0.3, 0.3)) and half.n == QUESTIONS
    # And the other way round: latents are in boxes alike, chance is not.
    walk = Walk().summarise([_walked(number, 0.5, 0.7 * (number % 2)) for number in range(QUESTIONS)])
    assert walk["evidence"]["low"] == walk["evidence"]["high"] == 0.5
    half = verdict({"walk": walk}).grounded
    rng = np.random.default_rng(7)
    drawn = [np.mean(rng.choice([0.5, -0.2], QUESTIONS)) for _ in range(4000)]
    assert half.value == pytest.approx(0.15) and half.holds is None
    assert (half.low, half.high) == pytest.approx(np.quantile(drawn, [0.025, 0.975]), abs=0.03)


def _walked(number: int, share: float, chance: float) -> dict[str, Any]:
    """A record of ten latents."""
    inside = [place < round(10 * share) for place in range(10)]
    lists = dict.fromkeys(("chance", "cosine", "nearest_cosine", "thumbnail"), [0.0] * 10)
    about = {"id": str(number), "latents": 10, "group": "", "boxes": 1, "error": None}
    return about | lists | {"inside": inside, "evidence": inside, "chance_evidence": chance}


def test_a_walk_of_an_earlier_version_decides_nothing_and_says_so() -> None:
    earlier = summaries() | {"walk": {"evidence": {"mean": 0.9, "low": 0.8, "high": 1.0, "pairs": 40}}}
    found = verdict(earlier)
    assert found.label == "not decided" and found.used.holds is True
    assert "earlier version: run walk again" in found.sentence


def with_sham(changed: int, of: int, another: int) -> dict[str, Any]:
    """Own latents put back change so many answers, another sample's so many."""
    whole = summaries(changed=another, of=of)
    whole["controls"]["conditions"].insert(0, {"condition": "sham", "questions": of, "changed": rate(changed, of)})
    return whole


def test_answers_that_change_by_rounding_are_not_called_used() -> None:
    rounded = verdict(with_sham(25, 100, another=30))  # both above the threshold
    assert rounded.label == "not decided" and rounded.used.holds is None and rounded.grounded.holds is True
    assert rounded.used.value == 0.3 and "--dtype float32" in rounded.sentence
    assert "25.0 % [17.5, 34.3] (n = 100) change by rounding" in rounded.used.reason
    reaching = with_sham(5, 100, another=90)
    assert rate(5, 100)["low"] < CHANGED < rate(5, 100)["high"] and verdict(reaching).used.holds is None
    between = verdict(with_sham(25, 100, another=12)).used  # more questions would not help
    assert between.holds is None and "--dtype float32" in between.reason and "more questions" not in between.reason


def test_little_rounding_and_none_decide_as_ever() -> None:
    assert rate(2, 100)["high"] < CHANGED and verdict(with_sham(2, 100, another=90)).used.holds is True
    assert rate(0, QUESTIONS)["high"] > CHANGED  # so few questions: but not one answer changed
    assert verdict(with_sham(0, QUESTIONS, another=QUESTIONS)).used.holds is True
    assert verdict(with_sham(25, 100, another=0)).label == "grounded but unused", "rounding hides no use"
    unreadable = verdict(with_sham(0, 0, another=0)).used
    assert unreadable.holds is None and "0 questions are too few" in unreadable.reason


def test_too_few_questions_and_unreadable_answers_decide_nothing() -> None:
    few = verdict(summaries(changed=QUESTIONS - 1, of=QUESTIONS - 1))
    assert few.label == "not decided" and f"{QUESTIONS - 1} questions are too few" in few.sentence
    assert verdict(summaries(changed=QUESTIONS, of=QUESTIONS)).used.holds is True
    broken = verdict(summaries(changed=40, of=40, asked=81))
    assert broken.used.holds is None and "only 40 of 81 questions" in broken.used.reason
    assert verdict(summaries(changed=40, of=40, asked=80)).used.holds is True
    nothing = verdict(summaries(changed=0, of=0))
    assert nothing.used.holds is None and nothing.used.value is None and "0 questions are too few" in nothing.sentence


def test_a_test_that_was_skipped_is_the_reason() -> None:
    whole = summaries()
    without = verdict({"controls": whole["controls"]}, {"walk": "the data has no evidence boxes"})
    assert without.label == "not decided" and without.used.holds is True
    assert "the data has no evidence boxes" in without.sentence
    assert verdict({}).label == "not decided" and "controls was not measured" in verdict({}).sentence
    partly = verdict({"controls": {"conditions": []}, "walk": whole["walk"]})
    assert "no answers with another sample's latents" in partly.used.reason and partly.accuracy_drop is None
    boxless = verdict(summaries(above=(None, None, None)))
    assert boxless.label == "not decided" and "no question with an evidence box" in boxless.sentence


def test_what_is_written_is_json_with_the_thresholds() -> None:
    for found in (verdict(summaries()), verdict({}), verdict(summaries(changed=0, of=0, above=(None, None, None)))):
        written = json.loads(json.dumps(found.as_json(), allow_nan=False))
        assert written["label"] == found.label and written["thresholds"]["changed"] == CHANGED
        assert written["sentence"].startswith(found.label)
    drop = verdict(summaries()).accuracy_drop
    assert drop is not None and (drop["mean"], drop["low"], drop["high"]) == (0.5, 0.4, 0.6)
