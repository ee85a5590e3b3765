"""Reading the chosen option: cases written by hand, real answers with their official letters, properties."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realvr.answers import POLICIES, equal, extract_answer, extract_choice
from realvr.errors import UserError

COLOURS = ["red", "dark red", "blue", "green"]

STRICT = {
    # a block, in any usual form
    "<answer>B</answer>": "B",
    "<answer> b </answer>": "B",
    "<answer>(B)</answer>": "B",
    "<answer>B.</answer>": "B",
    "<answer>B)</answer>": "B",
    "<answer>**B**</answer>": "B",
    "<answer>B. dark red</answer>": "B",
    "<answer>\nC\n</answer>": "C",
    "<answer>DARK  RED.</answer>": "B",
    "<answer>The answer is C</answer>": "C",
    "I see (A) and (D). <answer>B</answer>": "B",
    "<answer>B</answer> so <answer>(b) dark red</answer>": "B",
    # a block that names nothing, several, or something that is not on offer
    "<answer></answer>": None,
    "<answer>E</answer>": None,
    "<answer>purple</answer>": None,
    "<answer>A and B</answer>": None,
    "<answer>B</answer><answer>C</answer>": None,
    "<answer>B</answer><answer></answer>": None,
    "(B)! <answer>purple</answer>": None,
    "<answer>A. blue</answer>": None,
    # letters without a block
    "B": "B",
    "b": "B",
    "b)": "B",
    " (B) ": "B",
    "**B**": "B",
    "Option C": "C",
    "Answer: b": "B",
    "The answer is B": "B",
    "The answer is B because it is darker.": "B",
    "The correct option is:\n\n(B) dark red": "B",
    "(A) is too light. (C) fits. Therefore, the answer is (C).": "C",
    "I choose option D.": "D",
    "D is correct": "D",
    "Based on the image, C": "C",
    "Point B moves, C": None,
    "A red ball, so B.": "B",
    "$\\boxed{\\text{C}}$": "C",
    "Thinking about it.\n\nB": "B",
    "（Ｂ）": "B",
    # two letters, a letter denied or taken back, a letter that is not on offer, an article
    "A, B": None,
    "(A) or (B)": None,
    "The answer is B or C": None,
    "The answer is B, or perhaps not": "B",
    "The answer is B, C": None,
    "The answer is B, or C in some light": None,
    "The answer is (A) or (B)": None,
    "The answer is B. Wait, it is C": None,
    "The answer is not (B)": None,
    "The answer is E": None,
    "A cat sits here": None,
    "I think so": None,
    "I": None,
    "(A) blue": None,
    # option texts
    "It is dark red": "B",
    "It is red": "A",
    "It is red, a bright red.": "A",
    "It looks red, I would say B": None,
    "It looks red, I would say A": "A",
    "The ball is a reddish thing": None,
    "red or blue": None,
    "dark red, or just red": None,
    "it is not red": None,
    # nothing
    "": None,
    "   \n": None,
    "I'm sorry, I cannot determine whether it is red.": None,
    "I can't help with that.": None,
}


@pytest.mark.parametrize(("text", "letter"), STRICT.items())
def test_strict(text: str, letter: str | None) -> None:
    assert extract_choice(text, COLOURS) == letter


def test_strict_with_other_scripts_and_numbers() -> None:
    assert extract_choice("答案是红色的", ["蓝色", "红色"]) == "B"
    assert extract_choice("Das Auto ist GRÜN.", ["rot", "grün"]) == "B"
    assert extract_choice("Es ist die Straße", ["Platz", "STRASSE"]) == "B"
    assert extract_choice("There are 3 birds.", ["2", "3", "4"]) == "B"
    assert extract_choice("Of 5 birds, 3 fly.", ["2", "3", "4"]) is None
    assert extract_choice("30 birds", ["2", "3", "4"]) is None
    assert extract_choice("Yes, it is.", ["yes", "no"]) == "A"
    assert extract_choice("Yes, there is no cat.", ["yes", "no"]) is None
    assert extract_choice("same", ["same", "same"]) is None


def test_the_text_of_the_option_counts_not_the_letter_in_it() -> None:
    """Options may be lettered against their order: "Point B" is then option A."""
    assert extract_choice("It corresponds to Point B.", ["Point B", "Point A"]) == "A"
    assert extract_choice("It corresponds to Point B.", ["Point A", "Point B"]) == "B"


OTHERS = [
    ("mme-official", "Based on the image, C", "B"),
    ("mme-official", "Answer: C", "A"),
    ("mme-official", "", "A"),
    ("mme-official", "b", "B"),
    ("mme-official", "The best answer is C", "C"),
    ("mme-official", "nothing here", None),
    ("vlmevalkit", "<answer>D</answer>", None),
    ("vlmevalkit", "b", None),
    ("vlmevalkit", "B", "B"),
    ("vlmevalkit", "It must be (C).", "C"),
    ("vlmevalkit", "B is what I would say after looking at it", None),
    ("vlmevalkit", "The answer is B after I have looked at it for long", "B"),
    ("vlmevalkit", "A or B", None),
    ("vlmevalkit", "it looks green to me", "D"),
    ("vlmevalkit", "it looks dark red to me", None),
    ("lvr", "<answer>B</answer>", "B"),
    ("lvr", "<answer>A</answer> <answer> C. blue</answer>", "C"),
    ("lvr", "B", None),
    ("lvr", "<answer>b</answer>", None),
    ("lvr", "<answer>", None),
    ("lvr", "<answer>Blue</answer>", "B"),
    ("blink-official", "(C)", "C"),
    ("blink-official", "C", "C"),
    ("blink-official", "I compare (A) and (B).\n\nSo: (B) dark red", "B"),
    ("blink-official", "The answer is (B).", None),
    ("blink-official", "(A) x (B) y", None),
    ("blink-official", "c", None),
]


@pytest.mark.parametrize(("policy", "text", "letter"), OTHERS)
def test_harness_rules(policy: str, text: str, letter: str | None) -> None:
    assert extract_choice(text, COLOURS, policy) == letter


def test_only_options_of_the_row_count() -> None:
    assert extract_choice("(C)", ["x", "y"]) is None
    assert extract_choice("(C)", ["x", "y"], "blink-official") is None
    assert extract_choice("(C) or (A) first", ["x", "y"], "blink-official") == "A"
    assert extract_choice("D", ["x", "y"], "mme-official") is None


def test_free_answers_and_correctness() -> None:
    assert extract_answer("so <answer> 12 cm. </answer>", []) == "12 cm"
    assert extract_answer("12 cm", []) is None
    assert equal("12 CM", "12 cm", [])
    assert not equal("13 cm", "12 cm", [])
    assert not equal(None, "A", ["x", "y"])
    assert equal("A", "A", ["x", "y"])
    with pytest.raises(UserError, match="blink-official"):
        extract_choice("A", ["x", "y"], "official")


pieces = st.sampled_from(
    [
        "<answer>",
        "</answer>",
        "A",
        "B",
        "E",
        "(C)",
        "b)",
        " ",
        "\n\n",
        "the answer is ",
        "red",
        "dark red",
        "not ",
        "ß",
        "é",
    ]
)


@settings(max_examples=300, deadline=None)
@given(
    text=st.one_of(st.text(max_size=60), st.lists(pieces, max_size=8).map("".join)),
    choices=st.lists(st.text(min_size=1, max_size=8), min_size=2, max_size=6),
    policy=st.sampled_from(list(POLICIES)),
)
def test_a_letter_of_the_row_or_none(text: str, choices: list[str], policy: str) -> None:
    letter = extract_choice(text, choices, policy)
    assert letter is None or letter in "ABCDEF"[: len(choices)]


@settings(max_examples=100, deadline=None)
@given(letter=st.sampled_from("ABCD"), noise=st.text(alphabet="xyz .,\n()", max_size=30))
def test_a_block_decides_whatever_surrounds_it(letter: str, noise: str) -> None:
    assert extract_choice(f"{noise}<answer>{letter}</answer>{noise}", COLOURS) == letter


TWO_OPTIONS = ("Art_Style", "Jigsaw", "Multi-view_Reasoning", "Object_Localization", "Relative_Depth")
OPTION_COUNT = dict.fromkeys((*TWO_OPTIONS, "Spatial_Relation", "Visual_Similarity"), 2) | {"Relative_Reflectance": 3}


@pytest.fixture(scope="module")
def blink_outputs() -> Path:
    named = os.environ.get("REALVR_SHARED")
    folder = (Path(named) if named else Path(__file__).resolve().parents[3] / "shared") / "data" / "blink_outputs"
    if not folder.is_dir():
        pytest.skip(f"no real answers at {folder}; set REALVR_SHARED to the folder that holds data/")
    return folder


def test_official_letters_of_real_answers(blink_outputs: Path) -> None:
    """Every letter that the BLINK rule decides is the official one, and it decides most. Where strict and the rule both
    read a letter, they differ only where the text names one option last and brackets another before."""
    decided = differ = rows = 0
    for file in sorted(blink_outputs.glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            match = re.fullmatch(r"val_(.+)_\d+", row["idx"])
            assert match is not None
            choices = ["?"] * OPTION_COUNT.get(match[1], 4)
            rows += 1
            official = extract_choice(row["text"], choices, "blink-official")
            if official is None:
                continue
            decided += 1
            assert f"({official})" == row["official"][:3], row["idx"]
            strict = extract_choice(row["text"], choices)
            if strict not in (None, official):
                differ += 1
                assert f"({strict})" in row["text"][-40:], row["idx"]
    assert rows == 6000
    assert decided == 4779
    assert differ <= 12
