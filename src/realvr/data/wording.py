"""How a sample is put to a model, and what its answer looks like: the same words in training and in evaluation."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from realvr.data.sample import LETTERS, Message, Sample, option

_OPTION = re.compile(r"^\(([A-Z])\) (.+)$", re.MULTILINE)
LETTER_INSTRUCTION = "Answer with the letter of the option inside <answer> and </answer>."
FREE_INSTRUCTION = "Put the final answer inside <answer> and </answer>."


def asked(question: str, choices: Sequence[str]) -> str:
    """Question, options, instruction."""
    lines = [question.strip()]
    lines += [f"({letter}) {choice}" for letter, choice in zip(LETTERS, choices, strict=False)]
    lines.append(LETTER_INSTRUCTION if choices else FREE_INSTRUCTION)
    return "\n".join(lines)


def question_text(sample: Sample) -> str:
    """The last question of a sample, as it is put to a model."""
    return asked(sample.question, sample.choices)


def asked_turns(sample: Sample) -> list[Message]:
    """The sample's turns as they are put to a model: the last question carries options and instruction."""
    last = max((i for i, turn in enumerate(sample.turns) if turn.role == "user"), default=-1)
    return [replace(turn, text=question_text(sample)) if i == last else turn for i, turn in enumerate(sample.turns)]


def formatted(answer: str) -> str:
    """``Fmt(y)``: the answer as a model is to write it."""
    return f"<answer>{answer}</answer>"


def readout_text(
    answer: str, choices: Sequence[str] = (), spell_out: bool = False
) -> tuple[str, list[tuple[int, int]]]:
    """``Fmt(y)`` as a reply of the model, and the characters of it that are the answer itself: where ``J(y)`` looks.

    A model that was taught to answer in words before the letter is read out so: the letter alone, straight after the
    span, is no reply of its.
    """
    words = option(answer, choices) if spell_out else ""
    before = f"{words}\n" if words else ""
    first = len(f"{before}<answer>")
    letter = (first, first + len(answer))
    return f"{before}{formatted(answer)}", [(0, len(words)), letter] if words else [letter]


def spelled_reply(question: str, reply: str) -> str:
    """An earlier reply that is a letter alone, in words and letter; ``question`` is the text it answers, as `asked`
    writes it. Any other reply stays as it is."""
    options = dict(_OPTION.findall(question))
    letter = next((letter for letter in options if reply == formatted(letter)), None)
    return reply if letter is None else f"{options[letter]}\n{reply}"


def response_text(sample: Sample) -> str:
    """The reply that Stage 1 teaches: the data's own where it has an answer block, else the formatted answer."""
    if "<answer>" in sample.response and "</answer>" in sample.response:
        return sample.response
    return formatted(sample.answer)


def spelled_out(sample: Sample) -> str:
    """A reply that a small model can learn: for multiple choice the answer in words before its letter."""
    if sample.choices:
        return readout_text(sample.answer, sample.choices, spell_out=True)[0]
    return response_text(sample)
