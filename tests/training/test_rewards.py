"""Accuracy, format and user rewards on tables of texts."""

from __future__ import annotations

from pathlib import Path

import pytest

from realvr.data.sample import Sample, Source
from realvr.errors import UserError
from realvr.training import rewards

COLORS = ["red", "blue", "dark green"]


def choice(answer: str = "B", choices: list[str] | None = None) -> Sample:
    return Sample.ask("s", [], "Which color?", answer, choices=COLORS if choices is None else choices)


def free(answer: str) -> Sample:
    return Sample.ask("s", [], "How many?", answer)


@pytest.mark.parametrize(
    ("inside", "right"),
    [
        ("B", 1),
        ("b", 1),
        (" B\n", 1),
        ("(B)", 1),
        ("(b)", 1),
        ("B.", 1),
        ("B:", 1),
        ("B)", 1),
        ("blue", 1),
        ("Blue.", 1),
        ("  BLUE ", 1),
        ("B. blue", 1),
        ("(B) blue", 1),
        ("b) Blue.", 1),
        ("A", 0),
        ("D", 0),  # there is no fourth option
        ("red", 0),
        ("A. blue", 0),  # says two things at once
        ("yellow", 0),
        ("blue or red", 0),
        ("AB", 0),
        ("2", 0),
        ("The answer is B", 0),
    ],
)
def test_multiple_choice(inside: str, right: int) -> None:
    assert rewards.accuracy(f"I think so. <answer>{inside}</answer>", choice()) == right


@pytest.mark.parametrize("truth", ["B", "b", "(B)", "blue", "Blue"])
def test_the_truth_may_be_a_letter_or_a_text(truth: str) -> None:
    assert rewards.true_answer(choice(truth)) == "B"
    assert rewards.accuracy("<answer>blue</answer>", choice(truth)) == 1
    assert rewards.accuracy("<answer>A</answer>", choice(truth)) == 0


def test_options_of_several_words_and_equal_options() -> None:
    assert rewards.accuracy("<answer>Dark   Green</answer>", choice("C")) == 1
    assert rewards.accuracy("<answer>red</answer>", choice("A", ["red", "red"])) == 0  # names two options
    assert rewards.accuracy("<answer>A</answer>", choice("A", ["red", "red"])) == 1
    # An option that looks like another option's letter: the letter wins.
    assert rewards.accuracy("<answer>B</answer>", choice("B", ["B", "A"])) == 1


def test_a_truth_that_names_no_option_is_the_users_mistake() -> None:
    sample = Sample.ask("s", [], "?", "yellow", choices=COLORS, source=Source("train.jsonl", 7))
    with pytest.raises(UserError, match=r"train\.jsonl, row 7: the answer 'yellow' names none of its options"):
        rewards.accuracy("<answer>B</answer>", sample)
    with pytest.raises(UserError, match="^s: the answer"):
        rewards.true_answer(choice("yellow"))


@pytest.mark.parametrize(
    ("inside", "truth", "right"),
    [
        ("three", "three", 1),
        ("Three.", "three", 1),
        ("  three \n apples", "Three apples", 1),
        ("3", "3", 1),
        ("4", "3", 0),
        ("three", "four", 0),
        ("a cat", "cat", 0),
        ("B", "B", 1),
    ],
)
def test_free_answers(inside: str, truth: str, right: int) -> None:
    assert rewards.accuracy(f"<answer>{inside}</answer>", free(truth)) == right


# (text, accuracy with truth B, format)
BLOCKS = [
    ("<answer>B</answer>", 1, 1),
    ("Because it is. <answer>B</answer>", 1, 1),
    ("two\nlines\n<answer>B</answer>\n\n", 1, 1),
    ("<answer>B</answer> and then more", 1, 0),
    ("<answer>B</answer>.", 1, 0),
    ("", 0, 0),
    ("B", 0, 0),
    ("<answer>B", 0, 0),
    ("B</answer>", 0, 0),
    ("</answer>B<answer>", 0, 0),
    ("<answer></answer>", 0, 0),
    ("<answer>  \n</answer>", 0, 1),  # the format asks for characters, accuracy for an answer
    ("<answer>B</answer><answer>B</answer>", 0, 0),
    ("<answer>A</answer> no: <answer>B</answer>", 0, 0),
    ("<answer><answer>B</answer></answer>", 0, 0),
    ("<answer>B<answer></answer>", 0, 0),
    ("<answer>B</answer></answer>", 0, 0),
    ("<ANSWER>B</ANSWER>", 0, 0),
    ("<answer >B</answer>", 0, 0),
    ("<answer><b>B</b></answer>", 0, 0),
    ("<answer>B\n</answer>", 1, 1),
    ("a < b <answer>B</answer>", 1, 1),
]


@pytest.mark.parametrize(("text", "accurate", "formatted"), BLOCKS)
def test_blocks(text: str, accurate: int, formatted: int) -> None:
    assert rewards.accuracy(text, choice()) == accurate
    assert rewards.format(text, choice()) == formatted
    assert rewards.format(text, free("7")) == formatted, "format does not look at the sample"


def test_values_are_floats() -> None:
    for reward in rewards.BUILT_IN.values():
        assert type(reward("<answer>B</answer>", choice())) is float


@pytest.mark.parametrize(
    ("given", "truth", "right"),
    [
        ("1/2", "0.5", True),
        (r"\frac{1}{2}", "0.5", True),
        ("2x + 1", "1 + 2x", True),
        ("3/2", "0.5", False),
        ("cat", "dog", False),
        ("(", "0.5", False),
    ],
)
def test_symbolic_answers(given: str, truth: str, right: bool) -> None:
    assert rewards.correct(given, free(truth)) is right
    assert rewards.accuracy(f"<answer>{given}</answer>", free(truth)) == float(right)


def test_symbols_do_not_turn_one_option_into_another() -> None:
    """Two options that are equal as numbers stay two options."""
    assert not rewards.correct("A", choice("B", ["1/2", "0.5"]))


# ---------------------------------------------------------------------- loading


def test_built_in_rewards_with_weights() -> None:
    loaded = rewards.load_rewards({"accuracy": 1, "format": 0.5})
    assert loaded == {"accuracy": (rewards.accuracy, 1.0), "format": (rewards.format, 0.5)}
    assert rewards.load_rewards({}) == {}


def test_a_reward_of_the_user(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "BONUS = 0.25\n\ndef short(text, sample):\n    return BONUS * (len(text) < 10) * (sample.id == 's')\n"
    )
    name = f"{path}:short"
    loaded = rewards.load_rewards({"accuracy": 1, name: 2})
    function, weight = loaded[name]
    assert weight == 2.0
    assert function("brief", choice()) == 0.25 and function("much too long", choice()) == 0


def test_two_files_of_one_name(tmp_path: Path) -> None:
    names = []
    for value in (1, 2):
        path = tmp_path / str(value) / "mine.py"
        path.parent.mkdir()
        path.write_text(f"def f(text, sample):\n    return {value}\n")
        names.append(f"{path}:f")
    loaded = rewards.load_rewards(dict.fromkeys(names, 1.0))
    assert [loaded[name][0]("", choice()) for name in names] == [1, 2]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("acuracy", "reward 'acuracy' is neither accuracy nor format nor path.py:function"),
        (":f", "neither accuracy nor format nor path.py:function"),
        ("{dir}/missing.py:f", "missing.py does not exist"),
        ("{dir}:f", "does not exist"),
        ("{dir}/mine.py:g", "mine.py has no function 'g'"),
        ("{dir}/mine.py:", "mine.py has no function ''"),
        ("{dir}/mine.py:NUMBER", "mine.py has no function 'NUMBER'"),
        ("{dir}/mine.txt:f", "mine.txt is not a Python file"),
    ],
)
def test_rewards_that_cannot_be_loaded(tmp_path: Path, name: str, message: str) -> None:
    for ending in ("py", "txt"):
        (tmp_path / f"mine.{ending}").write_text("NUMBER = 1\n\ndef f(text, sample):\n    return 1.0\n")
    with pytest.raises(UserError) as caught:
        rewards.load_rewards({name.format(dir=tmp_path): 1.0})
    assert message in str(caught.value)
