"""One table of replies: what each parser reads out of them, and whether that is right. Written by hand from the rules.

``-`` is a parse failure. ``right`` is the verdict on what ``strict`` reads, the default of evaluations, against the
true answer. A second table holds pairs of answers for the judge alone.
"""

from __future__ import annotations

import pytest

from realvr.answers import PARSERS, equal

COLOURS = ["red", "dark red", "blue", "green"]
NUMBERS = ["1/2", "0.5", "2", "4"]
FREE: list[str] = []
NAMES = ("reward", "strict", "blink-official", "vlmevalkit", "mme-official", "lvr", "ask")

# fmt: off
REPLIES = [
    # choices, true answer, reply, then one column a parser, then the verdict
    #                                             reward strict blink vlmev mme  lvr  ask                    right
    # one block with a letter
    (COLOURS, "B", "<answer>B</answer>",            "B", "B", "-", "-", "B", "B", "B",                       True),
    (COLOURS, "B", "<answer> B </answer>",          "B", "B", "-", "B", "B", "B", "B",                       True),
    (COLOURS, "B", "<answer>b</answer>",            "B", "B", "-", "-", "-", "-", "b",                       True),
    (COLOURS, "B", "<answer>(B)</answer>",          "B", "B", "-", "B", "B", "-", "(B)",                     True),
    (COLOURS, "B", "<answer>(b)</answer>",          "B", "B", "-", "-", "-", "-", "(b)",                     True),
    (COLOURS, "B", "<answer>B.</answer>",           "B", "B", "-", "-", "B", "B", "B.",                      True),
    (COLOURS, "B", "<answer>\nB\n</answer>",        "B", "B", "-", "B", "B", "B", "B",                       True),
    (COLOURS, "C", "<answer>B</answer>",            "B", "B", "-", "-", "B", "B", "B",                       False),
    (COLOURS, "B", "It is dark. <answer>B</answer>", "B", "B", "-", "-", "B", "B", "B",                      True),
    (COLOURS, "B", "<answer>B</answer> I am sure.", "B", "B", "-", "-", "B", "B", "B",                       True),
    # a block with a letter and its text, or the text alone
    (COLOURS, "B", "<answer>B. dark red</answer>",  "B", "B", "-", "-", "B", "B", "B. dark red",             True),
    (COLOURS, "B", "<answer>(B) dark red</answer>", "B", "B", "-", "B", "B", "-", "(B) dark red",            True),
    (COLOURS, "B", "<answer>b) Dark Red.</answer>", "B", "B", "-", "-", "D", "-", "b) Dark Red.",            True),
    (COLOURS, "C", "<answer>blue</answer>",         "C", "C", "-", "C", "-", "-", "blue",                    True),
    (COLOURS, "C", "<answer>BLUE.</answer>",        "C", "C", "-", "C", "B", "B", "BLUE.",                   True),
    (COLOURS, "B", "<answer>dark  red</answer>",    "B", "B", "-", "A", "-", "-", "dark  red",               True),
    (COLOURS, "A", "<answer>A. blue</answer>",      "-", "-", "-", "C", "A", "A", "A. blue",                 False),
    # a sentence, two letters, nothing or a stranger in the block
    (COLOURS, "C", "<answer>The answer is C</answer>", "-", "C", "-", "C", "C", "-", "The answer is C",      True),
    (COLOURS, "B", "<answer>A and B</answer>",      "-", "-", "-", "-", "A", "A", "A and B",                 False),
    (COLOURS, "B", "<answer>E</answer>",            "-", "-", "-", "-", "-", "-", "E",                       False),
    (COLOURS, "B", "<answer>purple</answer>",       "-", "-", "-", "-", "-", "-", "purple",                  False),
    (COLOURS, "B", "<answer></answer>",             "-", "-", "-", "-", "-", "-", "",                        False),
    # two blocks, half a block, a block in capitals
    (COLOURS, "B", "<answer>B</answer><answer>B</answer>", "-", "B", "-", "-", "B", "B", "B",                True),
    (COLOURS, "C", "<answer>B</answer> no, <answer>C</answer>", "-", "-", "-", "-", "B", "C", "B",           False),
    (COLOURS, "B", "<answer>B",                     "-", "B", "-", "-", "B", "B", "<answer>B",               True),
    (COLOURS, "B", "B</answer>",                    "-", "B", "-", "-", "B", "-", "B</answer>",              True),
    (COLOURS, "B", "<ANSWER>B</ANSWER>",            "-", "B", "-", "-", "A", "-", "<ANSWER>B</ANSWER>",      True),
    # no block: a letter
    (COLOURS, "B", "B",                             "-", "B", "B", "B", "B", "-", "B",                       True),
    (COLOURS, "B", "b",                             "-", "B", "-", "-", "B", "-", "b",                       True),
    (COLOURS, "B", "(B)",                           "-", "B", "B", "B", "B", "-", "(B)",                     True),
    (COLOURS, "B", "**B**",                         "-", "B", "-", "B", "B", "-", "**B**",                   True),
    (COLOURS, "B", "The answer is B.",              "-", "B", "-", "B", "B", "-", "The answer is B.",        True),
    (COLOURS, "B", "the answer is b.",              "-", "B", "-", "-", "-", "-", "the answer is b.",        True),
    (COLOURS, "B", "The answer is (B).",            "-", "B", "-", "B", "B", "-", "The answer is (B).",      True),
    (COLOURS, "B", "The answer is (B) dark red",    "-", "B", "B", "B", "B", "-", "The answer is (B) dark red", True),
    (COLOURS, "C", "Based on the image, C",         "-", "C", "-", "C", "B", "-", "Based on the image, C",   True),
    (COLOURS, "B", "B. dark red",                   "-", "B", "-", "B", "B", "-", "B. dark red",             True),
    (COLOURS, "C", r"$\boxed{\text{C}}$",           "-", "C", "-", "C", "C", "-", r"$\boxed{\text{C}}$",     True),
    (COLOURS, "B", "The answer is B or C",          "-", "-", "-", "B", "B", "-", "The answer is B or C",    False),
    (COLOURS, "A", "The answer is not (B)",         "-", "-", "B", "B", "B", "-", "The answer is not (B)",   False),
    (COLOURS, "A", "A cat sits here",               "-", "-", "-", "A", "A", "-", "A cat sits here",         False),
    # no block: words, or nothing at all
    (COLOURS, "D", "It is green.",                  "-", "D", "-", "D", "-", "-", "It is green.",            True),
    (COLOURS, "B", "It is dark red",                "-", "B", "-", "-", "-", "-", "It is dark red",          True),
    (COLOURS, "A", "It is not red",                 "-", "-", "-", "A", "-", "-", "It is not red",           False),
    (COLOURS, "A", "I cannot tell.",                "-", "-", "-", "-", "-", "-", "I cannot tell.",          False),
    (COLOURS, "A", "",                              "-", "-", "-", "-", "A", "-", "",                        False),
    # Unicode
    (COLOURS, "B", "<answer>Ｂ</answer>",           "B", "B", "-", "-", "-", "-", "Ｂ",                      True),
    (COLOURS, "B", "（Ｂ）",                        "-", "B", "-", "-", "-", "-", "（Ｂ）",                  True),
    (COLOURS, "C", "<answer>ｂｌｕｅ</answer>",     "C", "C", "-", "-", "-", "-", "ｂｌｕｅ",                True),
    (COLOURS, "B", "<answer>\u200bB</answer>",      "B", "B", "-", "-", "B", "-", "\u200bB",                 True),
    # options that are equal as numbers stay two options
    (NUMBERS, "A", "<answer>0.5</answer>",          "B", "B", "-", "B", "-", "-", "0.5",                     False),
    (NUMBERS, "A", "<answer>1/2</answer>",          "A", "A", "-", "-", "-", "-", "1/2",                     True),
    (NUMBERS, "D", "<answer>(D) 4</answer>",        "D", "D", "-", "D", "D", "-", "(D) 4",                   True),
    # free answers: every policy of an evaluation takes the content of the one block
    (FREE, "0.5", "<answer>1/2</answer>",           "1/2", "1/2", "1/2", "1/2", "1/2", "1/2", "1/2",         True),
    (FREE, "1/2", r"<answer>\frac{1}{2}</answer>",  *[r"\frac{1}{2}"] * 7,                                   True),
    (FREE, "0.5", "<answer> 50 % </answer>",        *["50 %"] * 7,                                           True),
    (FREE, "12", "<answer>12 cm.</answer>",         *["12 cm"] * 6, "12 cm.",                                True),
    (FREE, "12 m", "<answer>12 cm</answer>",        *["12 cm"] * 7,                                          False),
    (FREE, "-3", "<answer>−3</answer>",             *["−3"] * 7,                                             True),
    (FREE, "12", "<answer>１２</answer>",           *["１２"] * 7,                                           True),
    (FREE, "a red ball", "<answer>A  Red\nBall.</answer>", *["A Red Ball"] * 6, "A  Red\nBall.",             True),
    (FREE, "left", "<answer>felt</answer>",         *["felt"] * 7,                                           False),
    (FREE, "7", "7",                                *["-"] * 6, "7",                                         False),
    (FREE, "7", "<answer>7</answer><answer>7</answer>", *["-"] * 6, "7",                                     False),
    (FREE, "7", "<answer> </answer>",               *["-"] * 6, "",                                          False),
    (FREE, "B", "<answer>B. the second</answer>",   *["B. the second"] * 7,                                  True),
]
# fmt: on


@pytest.mark.parametrize("row", REPLIES, ids=lambda row: repr(row[2])[:40])
def test_replies(row: tuple[object, ...]) -> None:
    choices, truth, reply, *readings, right = row
    assert isinstance(choices, list) and isinstance(truth, str) and isinstance(reply, str)
    expected = {name: None if reading == "-" else reading for name, reading in zip(NAMES, readings, strict=True)}
    assert {name: PARSERS[name].read(reply, choices) for name in NAMES} == expected
    assert bool(equal(expected["strict"], truth, choices)) is right  # type: ignore[arg-type]


def test_every_parser_has_its_column() -> None:
    assert set(NAMES) == set(PARSERS) and len(REPLIES) >= 60
    assert len({repr(row[:3]) for row in REPLIES}) == len(REPLIES)


# fmt: off
ANSWERS = [
    # one answer, another, whether they are the same answer to a question without options
    ("red", "Red.", True), ("  dark\n red ", "Dark red", True), ("Straße", "STRASSE", True),
    ("so on...", "so on", False), ("cat", "dog", False), ("a cat", "cat", False), ("", "red", False),
    ("left", "felt", False), ("cat", "act", False), ("no", "on", False), ("yes", "no", False),
    ("no 1", "on 1", False), ("No. 3", "3", False),
    ("three", "3", False),  # number words are words
    ("“red”", "red", True), ("**red**", "red", True), (r"\text{red}", "red", True), ("twenty–one", "twenty-one", True),
    ("ｒｅｄ", "red", True), ("caf\u00e9", "cafe\u0301", True), ("ﬁve", "five", True), ("re\u00add", "red", True),
    # letters of options that are not known
    ("B", "b", True), ("(B)", "B", True), ("B.", "B", True), ("B. blue", "B", True), ("(B) blue", "b", True),
    ("B. blue", "C", False), ("B. blue", "C. blue", False), ("B. A", "B", False), ("B", "C", False),
    # numbers
    ("3", "3.0", True), ("3", "4", False), ("007", "7", True), ("1,000", "1000", True), ("1,000.50", "1000.5", True),
    ("1.5e3", "1500", True), ("1.5 × 10³", "1500", True), (r"1.5 \times 10^{3}", "1500", True), (".5", "0.5", True),
    ("-3", "−3", True), ("-3", "3", False), ("+3", "3", True), ("１２", "12", True), ("٣", "3", True),
    ("2000000", "2000001", False), ("1e-7", "2e-7", False), ("1/0", "1", False),
    # fractions
    ("1/2", "0.5", True), (r"\frac{1}{2}", "0.5", True), (r"\dfrac12", "1/2", True), ("½", "0.5", True),
    ("2/4", "1/2", True), ("3/2", "0.5", False), ("1 1/2", "1.5", True), ("1½", "1.5", True), ("1½", "5.5", False),
    (r"1\frac{1}{2}", "1.5", True), (r"-\frac{1}{2}", "-0.5", True), ("$1/2$", r"\boxed{0.5}", True),
    ("1/3", "0.33", False), ("1/3", "0.333333", True), ("2/3", "0.666667", True), ("0.1234567", "0.1234568", False),
    # percentages and units
    ("50%", "0.5", True), ("50 %", "50", True), (r"50\%", "50 percent", True),
    ("50%", "5", False), ("50%", "50 cm", False),
    ("12 cm", "12", True), ("12cm", "12 centimeters", True), ("12 cm", "12 m", False), ("1 m", "100 cm", True),
    (r"12\text{ cm}", "12 cm", True), ("12 cm²", "12 cm^2", True), ("12 cm²", "12 cm", False),
    ("0.5 kg", "500 g", True),
    ("12 square meters", "12 m^2", True), ("90°", r"90^\circ", True), ("90 degrees", "90", True),
    ("25°C", "25 degrees Celsius", True), ("25°C", "25°F", False), ("$5", "5 dollars", True), ("$5", "€5", False),
    ("3 apples", "3", True), ("3 apples", "3 oranges", False), ("3 apples", "4", False), ("1 million", "1000000", True),
    ("1 million", "1", False), ("3 kW", "3 MW", False), ("3 am", "3 pm", False), ("3 less", "3", False),
    # times
    ("3:05", "3:05", True), ("3:15", "1:05", False), ("03:05", "3:05", True),
    # expressions
    ("2x + 1", "1 + 2x", True), ("x + 1", "y + 1", False), ("2(x+1)", "2x+2", True), ("2xy", "2yx", True),
    ("2x", "2", False),
    ("x = 3", "3", True), (r"\sqrt{16}", "4", True), (r"\sqrt{16} cm", "4 cm", True), (r"\sqrt{16} cm", "4 m", False),
    ("2^3", "8", True), ("2**3", "8", True), ("5²", "25", True), ("5²", "52", False), ("10⁻³", "0.001", True),
    (r"\pi", "π", True), ("2π", r"2\pi", True), ("x < 3", "3 > x", True), ("(3, 4)", "(4, 3)", False),
]
OPTIONS = [
    # options, one answer, another, whether they name the same option
    (COLOURS, "B", "b", True), (COLOURS, "B", "dark red", True), (COLOURS, "(b) Dark red.", "B.", True),
    (COLOURS, "red", "dark red", False), (COLOURS, "A", "B", False), (COLOURS, "Ｂ", "B", True),
    (COLOURS, "A. blue", "A", False), (COLOURS, "purple", "A", False), (COLOURS, "purple", "Purple", True),
    (NUMBERS, "A", "B", False), (NUMBERS, "1/2", "0.5", False), (NUMBERS, "4", "D", True), (NUMBERS, "4.0", "D", False),
]
# fmt: on


@pytest.mark.parametrize(("one", "other", "same"), ANSWERS)
def test_equality_of_free_answers(one: str, other: str, same: bool) -> None:
    assert bool(equal(one, other)) is same
    assert equal(other, one) == equal(one, other)


@pytest.mark.parametrize(("options", "one", "other", "same"), OPTIONS)
def test_equality_of_options(options: list[str], one: str, other: str, same: bool) -> None:
    assert bool(equal(one, other, options)) is same
    assert equal(other, one, options) == equal(one, other, options)


def test_a_parse_failure_equals_nothing() -> None:
    assert not equal(None, "B") and not equal("B", None, COLOURS) and not equal(None, None)
