"""Questions against an independent solver, against pixels, and in their statistics."""

from collections import Counter, defaultdict

import numpy as np
import pytest

from realvr.world.describe import caption, cell_labels, dialogue, table
from realvr.world.draw import render, visible_mask
from realvr.world.phrasing import PHRASINGS, phrase
from realvr.world.queries import Description, Query
from realvr.world.questions import (
    CLUTTER_KINDS,
    EASY_EXTRA_KINDS,
    EASY_KINDS,
    FULL_KINDS,
    sample_question,
)
from realvr.world.sampling import clutter, easy, full, sample_scene
from realvr.world.words import COLORS, SHAPES, WITHHELD_WORDS
from world_solver import Unsolvable, solve, solve_follow_up

CASES = [
    (easy(48), EASY_KINDS, 1500),
    (easy(60), EASY_EXTRA_KINDS, 500),
    (full(128), FULL_KINDS, 2500),
    (clutter(), CLUTTER_KINDS, 150),
    (clutter(96, 96), ("color", "shape", "count", "position"), 100),
]


@pytest.fixture(scope="module")
def posed():
    """(style, scene, question) for thousands of questions."""
    found = []
    for style, kinds, count in CASES:
        for k in range(count):
            found.append((style, *sample_question(np.random.default_rng([7, style.width, k]), style, kinds)))
    return found


def test_an_independent_solver_agrees_with_every_answer(posed):
    wrong = [(q.text, q.answer, solve(scene, q.text)) for _, scene, q in posed if solve(scene, q.text) != q.answer]
    assert not wrong


def test_the_solver_can_disagree(posed):
    """Not a rubber stamp: it follows the scene, and refuses what has no single answer."""
    scene = next(scene for style, scene, _ in posed if style.name == "full")
    moved = Query("color", Description(shape=scene.objects[0].shape))
    with pytest.raises(Unsolvable):
        solve(scene.edit(1, shape=scene.objects[0].shape), phrase(moved, 0))
    with pytest.raises(Unsolvable):
        solve(scene, "What is the meaning of the picture?")


def test_every_kind_and_every_wording_occurs(posed):
    kinds = {q.kind for _, _, q in posed}
    assert kinds == set(FULL_KINDS) == set(PHRASINGS)
    starts = {" ".join(q.text.split()[:2]) for _, _, q in posed}
    for wordings in PHRASINGS.values():
        assert len(wordings) >= 2
        for wording in wordings:
            assert any(
                wording.split("{")[0].startswith(start) or start.startswith(wording.split("{")[0].strip())
                for start in starts
            )


def test_options_hold_the_answer_once_and_nothing_twice(posed):
    for _, _, q in posed:
        assert len(set(q.choices)) == len(q.choices) >= 2 and q.choices["ABCDEFGH".index(q.letter)] == q.answer


def test_answers_are_balanced(posed):
    letters = defaultdict(Counter)
    words = defaultdict(Counter)
    for style, _, q in posed:
        letters[len(q.choices)][q.letter] += 1
        if style.name in ("easy", "full"):
            words[style.name, q.kind][q.answer] += 1
    for count, seen in letters.items():
        total = sum(seen.values())
        # Four standard deviations of a fair choice.
        slack = 4 * (1 / count * (1 - 1 / count) / total) ** 0.5
        assert all(abs(seen[letter] / total - 1 / count) < slack for letter in "ABCDEFGH"[:count]), (count, seen)
    for kind in ("exist", "holds", "relation_x", "relation_y", "size", "direction", "texture", "count"):
        seen = words["full", kind]
        assert max(seen.values()) < 2.6 * min(seen.values()), (kind, seen)
    for kind in EASY_KINDS:
        seen = words["easy", kind]
        assert len(seen) >= 8 and max(seen.values()) < 2.6 * min(seen.values()), (kind, seen)
    assert set(words["full", "color"]) == set(COLORS) - {"gray"}
    assert set(words["full", "shape"]) == set(SHAPES)


def test_evidence_boxes_contain_the_named_objects_in_pixels(posed):
    """Blank each supporting object out of the picture: what changes lies in its box, and its color is found there."""
    checked = 0
    for style, scene, q in posed[::4]:
        if style.name == "clutter":
            continue
        picture = render(scene)
        boxes = q.boxes(scene)
        assert len(boxes) == len(q.evidence) >= 1
        for index, (x0, y0, x1, y1) in zip(q.evidence, boxes, strict=True):
            rows, cols = np.nonzero((render(scene.without(index)) != picture).any(-1))
            assert len(rows) and cols.min() >= x0 and cols.max() < x1 and rows.min() >= y0 and rows.max() < y1
            item = scene.objects[index]
            crop = picture[max(y0, 0) : y1, max(x0, 0) : x1].reshape(-1, 3).astype(int)
            distance = np.abs(crop - np.asarray(COLORS[item.color])).sum(-1)
            assert (distance <= 3).sum() >= 6, (item, q.text)
            assert visible_mask(scene, index).pixels.any()
            checked += 1
    assert checked > 1000


def test_attribute_questions_are_supported_by_the_object_they_name(posed):
    for _, scene, q in posed:
        if q.kind in ("color", "shape", "texture", "size", "direction"):
            (index,) = q.evidence
            assert q.query.a.fits(scene.objects[index]) and getattr(scene.objects[index], q.kind) == q.answer


@pytest.mark.parametrize("withheld", ["exclude", "only"])
def test_withheld_words_never_or_always_refer(withheld):
    for k in range(150):
        rng = np.random.default_rng([11, k])
        _, q = sample_question(rng, easy(48), EASY_KINDS, withheld=withheld)
        found = any(f" {word}" in f" {q.text}" for word in WITHHELD_WORDS)
        assert found == (withheld == "only"), q.text


def test_withheld_words_still_occur_as_answers_and_in_captions():
    answers, captions = set(), ""
    for k in range(400):
        scene, q = sample_question(np.random.default_rng([12, k]), easy(48), EASY_KINDS, withheld="exclude")
        answers.add(q.answer)
        captions += caption(scene)
    assert set(WITHHELD_WORDS) <= answers
    assert all(word in captions for word in WITHHELD_WORDS)


def test_descriptions_say_what_is_there():
    scene = sample_scene(np.random.default_rng(4), easy(48))
    rows = table(scene)
    assert len(rows) == len(scene.objects)
    colors, shapes = cell_labels(scene)
    assert (colors > 0).sum() == (shapes > 0).sum() == len(rows)
    for row in rows:
        column, line = row["cell"]
        assert (
            list(COLORS)[colors[line, column] - 1] == row["color"] and SHAPES[shapes[line, column] - 1] == row["shape"]
        )
        assert f"{row['color']} {row['shape']} at the {row['region']}" in caption(scene)


@pytest.mark.parametrize(("style", "kinds"), [(easy(48), EASY_KINDS), (full(128), FULL_KINDS)], ids=["easy", "full"])
def test_dialogues_agree_with_the_solver_and_use_it(style, kinds):
    pronouns = total = 0
    for k in range(800):
        rng = np.random.default_rng([13, k])
        scene = sample_scene(rng, style)
        turns = dialogue(scene, rng, kinds)
        if turns is None:
            continue
        first, second = turns
        total += 1
        assert solve(scene, first.text) == first.answer
        if second.text.startswith("And "):
            pronouns += 1
            assert solve_follow_up(scene, first.text, second.text) == second.answer
        else:
            assert solve(scene, second.text) == second.answer
    assert total > 50 and pronouns > 10


def guessed(asked: list[tuple[tuple[str, ...], str]]) -> float:
    """Accuracy of the best guess from the options alone, learned on one half and tried on the other, both ways."""
    half, right = len(asked) // 2, 0
    for known, new in ((asked[:half], asked[half:]), (asked[half:], asked[:half])):
        won, offered, same = Counter(), Counter(), defaultdict(Counter)
        for choices, answer in known:
            offered.update(choices)
            won[answer] += 1
            same[frozenset(choices)][answer] += 1
        for choices, answer in new:
            seen = same[frozenset(choices)]
            often = seen.most_common(1)[0][0] if sum(seen.values()) >= 12 else ""
            right += answer == (often or max(choices, key=lambda choice: (won[choice] + 1) / (offered[choice] + 4)))
    return right / len(asked)


@pytest.mark.parametrize("kind", ["color", "at_color", "shape", "position", "count", "texture"])
def test_options_do_not_give_the_answer_away(kind):
    rng = np.random.default_rng(3)
    found = [sample_question(rng, full(), (kind,))[1] for _ in range(400)]
    assert guessed([(question.choices, question.answer) for question in found]) < 0.32  # four options: 0.25


def test_guessing_from_options_can_be_found():
    rng = np.random.default_rng(3)
    options = [tuple(str(low + k) for k in range(4)) for low in rng.integers(1, 5, 400)]
    assert guessed([(choices, "4") for choices in options]) > 0.9
