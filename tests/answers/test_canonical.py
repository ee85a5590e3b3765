"""Parsing, canonical answers and the set of wrong answers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realvr.answers import canonical as answers
from realvr.answers import equal
from realvr.answers.text import key

COLOURS = ("red", "dark blue", "green", "Yes.")


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("A", "A"),
        ("b", "B"),
        ("(C)", "C"),
        ("B.", "B"),
        (" D) ", "D"),
        ("a:", "A"),
        ("red", "A"),
        ("RED.", "A"),
        ("dark  \n blue", "B"),
        ("yes", "D"),
        ("B. dark blue", "B"),
        ("(B) Dark blue", "B"),
        ("C: the green one", "C"),
        ("E", None),
        ("E. red", None),
        ("A. green", None),
        ("a red one", None),
        ("A dog", None),
        ("A, B", None),
        ("purple", None),
        ("", None),
        (" . ", None),
    ],
)
def test_multiple_choice_is_canonicalised_to_a_letter(text: str, letter: str | None) -> None:
    assert answers.canonical(text, COLOURS) == letter


def test_an_option_text_that_looks_like_a_letter() -> None:
    """The letter comes first; a letter that is no option may still be the text of one."""
    options = ("B", "A", "X", "A. Smith")
    assert [answers.canonical(text, options) for text in ("A", "X", "A. Smith", "A. B")] == ["A", "C", "D", "A"]


def test_two_options_with_one_text_name_neither() -> None:
    assert answers.canonical("red", ("red", "Red", "blue")) is None
    assert answers.canonical("B. red", ("red", "Red", "blue")) == "B"


def test_more_options_than_letters() -> None:
    with pytest.raises(ValueError, match="27 options"):
        answers.canonical("A", ["x"] * 27)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("  3.5  cm. ", "3.5 cm"),
        ("Paris", "Paris"),
        ("so on...", "so on..."),
        ("a . .", "a"),
        ("\n", None),
        (".", None),
    ],
)
def test_free_answers_keep_their_wording(text: str, want: str | None) -> None:
    assert answers.canonical(text) == want


@pytest.mark.parametrize(
    ("completion", "want"),
    [
        ("It is <answer> red </answer>.", "A"),
        ("<answer>\nB\n</answer>", "B"),
        ("red", None),
        ("<answer>A</answer><answer>A</answer>", None),
        ("<answer>A", None),
        ("A</answer>", None),
        ("<answer>A</answer></answer>", None),
        ("<answer></answer>", None),
        ("<answer>purple</answer>", None),
    ],
)
def test_parse_wants_exactly_one_block(completion: str, want: str | None) -> None:
    assert answers.parse(completion, COLOURS) == want


def test_wrong_answers_follow_the_rule() -> None:
    """Parse failures, correct answers, answers without content and duplicates go; the order of the group stays."""
    group = ["C", None, "A", "B", "C", "", "b", "D"]
    assert answers.wrong(group, "A") == ["C", "B", "D"]


def test_wrong_answers_against_the_definition() -> None:
    group = ["12", "7", None, "12", "013", "13", "x"]

    def correct(answer: str, truth: str) -> bool:
        return answer.isdigit() and int(answer) == int(truth)  # "013" is 13

    def has_content(answer: str) -> bool:
        return answer != "x"

    want: list[str] = []
    for answer in group:
        if answer is None or correct(answer, "13") or not has_content(answer) or answer in want:
            continue
        want.append(answer)
    assert answers.wrong(group, "13", has_content=has_content) == want == ["12", "7"]


def test_answers_that_are_equal_as_mathematics_are_one() -> None:
    assert answers.wrong(["1/2", "0.5", "2", "1"], "1") == ["1/2", "2"]
    assert answers.wrong(["1/2", "0.5", "1.0", "\\frac{2}{2}"], "1") == ["1/2"]


@pytest.mark.parametrize("group", [[], [None, None], ["A", "a", "A."]])
def test_no_wrong_answer(group: list[str | None]) -> None:
    assert answers.wrong(group, "A") == []


def test_the_truth_must_have_content() -> None:
    with pytest.raises(ValueError, match="no content token"):
        answers.wrong(["A"], " ")


words = st.one_of(st.none(), st.text("abAB .", max_size=4))


@given(st.lists(words, max_size=8))
def test_the_set_is_distinct_wrong_and_drawn_from_the_group(group: list[str | None]) -> None:
    got = answers.wrong(group, "a")
    assert len({key(x) for x in got}) == len(got)
    assert all(x in group and x.strip() and not equal(x, "a") for x in got)
    assert answers.wrong(got, "a") == got


@given(st.lists(words, max_size=8), st.randoms())
def test_the_set_does_not_depend_on_the_order(group: list[str | None], random: object) -> None:
    shuffled = list(group)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert {key(x) for x in answers.wrong(group, "a")} == {key(x) for x in answers.wrong(shuffled, "a")}


@given(st.text("abAB .:()", max_size=6))
def test_canonical_forms_are_fixed_points(text: str) -> None:
    for options in ((), ("a", "b a")):
        form = answers.canonical(text, options)
        assert form is None or answers.canonical(form, options) == form
