"""What the slots of Stage 1 stand for, against plain loops over the areas of visual tokens: order, fixed spans, earlier
turns, and the rows that are left out."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from PIL import Image
from pydantic import ValidationError

from realvr.data.boxes import center_token, token_boxes
from realvr.data.sample import Box, ImageRef, Message, Sample
from realvr.imaging.types import Grid
from realvr.training.targets import SEVERAL_IMAGES, TOO_MANY_BOXES, EvidenceConfig, Spans, refusal, spans

GRIDS = (Grid(6, 6), Grid(2, 5, merge=2), Grid(3, 2, tile_rows=2, tile_cols=3, thumbnail=True))
XYXY = tuple[float, float, float, float]


def sample(*boxes: tuple[int, XYXY], turns: list[list[int]] | None = None, earlier: Any = ()) -> Sample:
    """A conversation about pictures whose user turns show these images."""
    shown = turns or [[0]]
    said: list[Message] = []
    for number, images in enumerate(shown):
        said += [Message("assistant", "I see.")] if number else []
        said.append(Message("user", "Which?", tuple(images)))
    refs = [ImageRef.from_image(f"{n}.png", Image.new("RGB", (8, 8))) for n in range(len(GRIDS))]
    before = [[Box(image, xyxy) for image, xyxy in own] for own in earlier]
    return Sample("x", refs, said, "red", boxes=[Box(*box) for box in boxes], earlier_boxes=before)


def random_box(draw: random.Random) -> XYXY:
    x0, y0 = draw.uniform(0, 0.9), draw.uniform(0, 0.9)
    return x0, y0, draw.uniform(x0 + 0.01, 1), draw.uniform(y0 + 0.01, 1)


def inside(xyxy: XYXY, grid: Grid) -> list[int]:
    """Tokens that share area with a box, one after the other; the thumbnail has none."""
    found, areas = [], token_boxes(grid)
    for token in range(len(areas) - (grid.rows * grid.cols if grid.thumbnail else 0)):
        x0, y0, x1, y1 = areas[token]
        if x0 < xyxy[2] and xyxy[0] < x1 and y0 < xyxy[3] and xyxy[1] < y1:
            found.append(token)
    return found


def at_center(xyxy: XYXY, grid: Grid) -> int:
    """The token in whose area the centre lies."""
    x, y = (xyxy[0] + xyxy[2]) / 2, (xyxy[1] + xyxy[3]) / 2
    for token, (x0, y0, x1, y1) in enumerate(token_boxes(grid)):
        if x0 <= x < x1 and y0 <= y < y1:
            return token
    raise AssertionError


def meaning(found: Spans, visual: int, turn: int = -1) -> list[list[int]]:
    """The visual tokens behind each slot."""
    pools = [pool.tolist() for pool in found.pools]
    return [[t] if t < visual else pools[t - visual] for t in found.targets[turn].tolist()]


# ---------------------------------------------------------------------- order


@pytest.mark.parametrize("grid", GRIDS)
def test_given_order_is_box_by_box_each_token_once(grid: Grid) -> None:
    draw = random.Random(1)
    other_order = 0
    for _ in range(60):
        boxes = [random_box(draw) for _ in range(draw.randint(1, 5))]
        expected: list[int] = []
        for box in boxes:
            for token in inside(box, grid):
                if token not in expected:
                    expected.append(token)
        row = sample(*((0, box) for box in boxes))
        found = spans(EvidenceConfig(evidence_order="given"), row, [grid], 8)
        assert found.targets[0].tolist() == expected and not found.pools
        reading = spans(EvidenceConfig(), row, [grid], 8).targets[0].tolist()
        assert reading == sorted(expected)
        other_order += reading != expected
    assert other_order > 10


@pytest.mark.parametrize("grid", GRIDS)
def test_a_trail_of_cells_is_its_tokens_in_order(grid: Grid) -> None:
    """One box a visual token, as trails have them: every rule but the paper's gives the trail."""
    areas = token_boxes(grid)[: grid.rows * grid.cols * grid.tile_rows * grid.tile_cols]
    trail = random.Random(2).sample(range(len(areas)), 5)
    row = sample(*((0, tuple(areas[token].tolist())) for token in trail))
    assert spans(EvidenceConfig(evidence_order="given"), row, [grid], 8).targets[0].tolist() == trail
    for target in ("center", "mean"):
        fixed = EvidenceConfig(evidence_order="given", span="fixed", target=target)
        found = spans(fixed, row, [grid], 8)
        assert found.targets[0].tolist() == [*trail, *[trail[-1]] * 3] and not found.pools
    assert spans(EvidenceConfig(), row, [grid], 8).targets[0].tolist() == sorted(trail)


# ---------------------------------------------------------------------- fixed spans


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("target", ["center", "mean"])
@pytest.mark.parametrize("order", ["given", "reading"])
def test_a_fixed_span_has_one_slot_a_box_and_repeats_the_last(grid: Grid, target: Any, order: Any) -> None:
    draw = random.Random(3)
    config = EvidenceConfig(evidence_order=order, span="fixed", target=target)
    for _ in range(40):
        boxes = [random_box(draw) for _ in range(draw.randint(1, 6))]
        latents = draw.randint(len(boxes), 8)
        found = spans(config, sample(*((0, box) for box in boxes)), [grid], latents)
        ordered = boxes if order == "given" else sorted(boxes, key=lambda box: at_center(box, grid))
        each = [[at_center(box, grid)] if target == "center" else inside(box, grid) for box in ordered]
        while len(each) < latents:
            each.append(each[-1])
        assert meaning(found, grid.tokens) == each
        assert len(found.pools) <= len(boxes), "the repeated one is one pool"


def test_center_of_every_token_area_is_that_token() -> None:
    for grid in GRIDS:
        canvas = grid.rows * grid.cols * grid.tile_rows * grid.tile_cols
        for token, area in enumerate(token_boxes(grid)[:canvas]):
            assert center_token(area.tolist(), grid) == token
    assert center_token((0.5, 0.5, 0.5, 0.9), GRIDS[0]) is None
    assert center_token((0.9, 0.9, 1.3, 1.3), GRIDS[0]) == 35


@pytest.mark.parametrize(("boxes", "latents"), list(itertools.product((5, 6, 9, 20, 36), (1, 2, 3, 4, 8))))
def test_thinning_is_even_and_keeps_both_ends(boxes: int, latents: int) -> None:
    grid = GRIDS[0]
    row = sample(*((0, tuple(area.tolist())) for area in token_boxes(grid)[:boxes]))
    config = EvidenceConfig(evidence_order="given", span="fixed", too_many_boxes="thin")
    assert refusal(config, row, latents) is None
    kept = spans(config, row, [grid], latents).targets[0].tolist()
    assert len(kept) == latents
    if boxes <= latents:
        assert kept == [*range(boxes), *[boxes - 1] * (latents - boxes)]
    elif latents == 1:
        assert kept == [boxes - 1], "the end of a trail is where its answer is"
    else:
        assert kept[0] == 0 and kept[-1] == boxes - 1 and len(set(kept)) == latents
        for number, place in enumerate(kept):  # the nearest box to the even place
            assert abs(Fraction(number * (boxes - 1), latents - 1) - place) <= Fraction(1, 2)


def test_rows_without_boxes() -> None:
    row = sample(turns=[[2, 0]])
    for config in (EvidenceConfig(), EvidenceConfig(span="fixed"), EvidenceConfig(evidence_order="given")):
        assert spans(config, row, GRIDS, 4).targets[0].tolist() == []
    whole = EvidenceConfig(span="fixed", without_boxes="whole-image")
    visual = GRIDS[2].tokens + GRIDS[0].tokens
    found = spans(whole, row, GRIDS, 4)
    assert meaning(found, visual) == [list(range(visual))] * 4 and len(found.pools) == 1
    assert spans(whole, row, GRIDS, 0).targets[0].tolist() == [], "without latents there is no span"
    flat = sample((0, (0.5, 0.2, 0.5, 0.4)))  # without area, as if there were no box
    assert meaning(spans(whole, flat, GRIDS, 2), GRIDS[0].tokens) == [list(range(36))] * 2


# ---------------------------------------------------------------------- several images


def test_boxes_on_several_images() -> None:
    first, last = (0.0, 0.0, 0.01, 0.01), (0.99, 0.99, 1.0, 1.0)
    row = sample((0, last), (1, first), (0, first), turns=[[1, 0]])
    second = GRIDS[1].tokens
    given = EvidenceConfig(evidence_order="given", span="fixed")
    found = refusal(given, row, 8)
    assert found is not None and found[0] == SEVERAL_IMAGES and "images 0, 1" in found[1]
    assert refusal(EvidenceConfig(span="fixed"), row, 8) is None
    unordered = replace(row, ordered=False)
    expected = [0, second, second + 35]
    for config in (
        EvidenceConfig(span="fixed"),
        EvidenceConfig(evidence_order="given", span="fixed"),
        EvidenceConfig(evidence_order="given"),
    ):
        assert refusal(config, unordered, 3) is None
        assert spans(config, unordered, GRIDS, 3).targets[0].tolist() == expected
    alone = sample((0, last), (0, first), turns=[[1, 0]])
    assert refusal(given, alone, 8) is None, "two images are shown, the boxes are on one"
    assert spans(given, alone, GRIDS, 2).targets[0].tolist() == [second + 35, second]
    assert spans(given, replace(alone, ordered=False), GRIDS, 2).targets[0].tolist() == [second, second + 35]


def test_more_boxes_than_latents() -> None:
    row = sample(*((0, tuple(area.tolist())) for area in token_boxes(GRIDS[0])[:5]))
    config = EvidenceConfig(span="fixed")
    assert refusal(config, row, 4) == (TOO_MANY_BOXES, "5 boxes, more than the 4 targets of a span")
    assert refusal(config, row, 5) is None
    assert refusal(config, row, 0) is None, "Direct has no K"
    assert refusal(EvidenceConfig(), row, 4) is None


# ---------------------------------------------------------------------- earlier turns


def test_earlier_turns_have_spans_of_their_own() -> None:
    first, last = (0.0, 0.0, 0.01, 0.01), (0.99, 0.99, 1.0, 1.0)
    row = sample((1, last), turns=[[0], [], [1]], earlier=[[(0, last), (0, first)], []])
    config = EvidenceConfig(evidence_order="given", span="fixed", without_boxes="whole-image", earlier_spans=True)
    found = spans(config, row, GRIDS, 3)
    visual = 36 + GRIDS[1].tokens
    assert meaning(found, visual, 0) == [[35], [0], [0]]
    assert meaning(found, visual, 1) == [list(range(36))] * 3, "what was shown by then, not the picture to come"
    assert meaning(found, visual, 2) == [[visual - 1]] * 3
    assert len(spans(config.model_copy(update={"earlier_spans": False}), row, GRIDS, 3).targets) == 1
    unknown = spans(config, sample((1, last), turns=[[0], [1]]), GRIDS, 3)
    assert meaning(unknown, visual, 0) == [list(range(36))] * 3, "a reply whose evidence is unknown"
    plain = spans(EvidenceConfig(earlier_spans=True), row, GRIDS, 3)
    assert [targets.tolist() for targets in plain.targets] == [[0, 35], [], [visual - 1]]


def test_an_earlier_box_on_a_picture_yet_to_come_is_refused() -> None:
    row = sample(turns=[[0], [1]], earlier=[[(1, (0.0, 0.0, 0.5, 0.5))]])
    found = refusal(EvidenceConfig(), row, 3)
    assert found is not None and found[0] == "box_not_shown"
    assert "box 1 of earlier reply 1 is on image 1 (1.png), which no turn before that reply shows" in found[1]


def test_earlier_boxes_are_counted_like_others() -> None:
    box = (0.0, 0.0, 0.5, 0.5)
    row = sample((0, box), turns=[[0], []], earlier=[[(0, box)] * 3])
    assert refusal(EvidenceConfig(span="fixed"), row, 2) is None
    assert refusal(EvidenceConfig(span="fixed", earlier_spans=True), row, 2) is not None


# ---------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"target": "mean"}, "target: mean has no effect with span: as-evidence; set span: fixed"),
        ({"too_many_boxes": "thin"}, "too_many_boxes: thin has no effect"),
        ({"without_boxes": "whole-image"}, "without_boxes: whole-image has no effect"),
    ],
)
def test_a_choice_without_effect_is_refused(settings: Any, told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        EvidenceConfig(**settings)
