"""Which wrong answers are contrasted: parsing, canonical answers, the set ``Y_x^-``. Standard library only.

Implements ``Unique{...}`` of app:construction-wrong-answers, and the canonical answer ``y_i`` with its parse failure
that sec:prelim_vanilla_objective refers to (None stands for the bottom symbol).

Departures from the paper, and what it leaves open:

* An answer parses if the completion has exactly one ``<answer>`` block with something in it.
* The canonical form of a multiple-choice answer is its letter, whether the letter or the option's text was given. A
  text that names no option, or two, does not parse.
* Other answers keep their wording, since they are teacher-forced; only surrounding and repeated white space and a final
  period go. ``Unique`` also ignores case and keeps the first wording. Answers that are equal only
  as mathematics ("1/2", "0.5") count as two; pass a ``key`` that knows better where that matters.
* The order is that of the completions, so that the set does not depend on hashing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_BLOCK = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_LETTER = re.compile(r"\(?([A-Za-z])\)?[.:]?")
_LETTER_AND_TEXT = re.compile(r"(?:\(([A-Za-z])\)|([A-Za-z])[.:)])\s*(.+)", re.DOTALL)


def parse(completion: str, options: Sequence[str] = ()) -> str | None:
    """The canonical answer of a completion, or None: no block, several, an empty one, or one that names no option."""
    blocks = _BLOCK.findall(completion)
    if len(blocks) != 1 or completion.count("<answer>") != 1 or completion.count("</answer>") != 1:
        return None
    return canonical(blocks[0], options)


def canonical(answer: str, options: Sequence[str] = ()) -> str | None:
    """The canonical form of an answer: its option's letter or, without ``options``, the tidied text; None if empty."""
    text = _tidy(answer)
    if not options:
        return text or None
    if len(options) > len(LETTERS):
        raise ValueError(f"{len(options)} options, but only {len(LETTERS)} letters")
    letters = LETTERS[: len(options)]
    if (match := _LETTER.fullmatch(text)) and match[1].upper() in letters:
        return match[1].upper()
    named = _named(text, options)
    if named or not (match := _LETTER_AND_TEXT.fullmatch(text)):
        return named[0] if len(named) == 1 else None
    letter = (match[1] or match[2]).upper()
    named = _named(_tidy(match[3]), options)
    # "A. blue" where blue is option B says two things at once.
    return letter if letter in letters and (not named or letter in named) else None


def key(answer: str) -> str:
    """Two answers with the same key are the same answer."""
    return _tidy(answer).casefold()


def same(answer: str, truth: str) -> bool:
    """``Correct`` for canonical answers without mathematics: equal keys."""
    return key(answer) == key(truth)


def unique(answers: Iterable[str], key: Callable[[str], Hashable] = key) -> list[str]:
    """The first answer of each key, in order."""
    first: dict[Hashable, str] = {}
    for answer in answers:
        first.setdefault(key(answer), answer)
    return list(first.values())


def wrong(
    answers: Iterable[str | None],
    truth: str,
    *,
    correct: Callable[[str, str], bool] = same,
    has_content: Callable[[str], bool] = lambda answer: bool(answer.strip()),
    key: Callable[[str], Hashable] = key,
) -> list[str]:
    """``Y_x^-``: the distinct wrong answers among the canonical answers of a group, None being a parse failure.

    ``correct(answer, truth)`` is the judge of the accuracy reward; ``has_content(answer)`` says whether the formatted
    answer has a content token, which depends on the tokenizer. The truth must have one.
    """
    if not has_content(truth):
        raise ValueError(f"the true answer {truth!r} has no content token: reject the example when reading the data")
    parsed = (answer for answer in answers if answer is not None)
    return unique((answer for answer in parsed if not correct(answer, truth) and has_content(answer)), key)


def _tidy(answer: str) -> str:
    """White space collapsed, without a final period; an ellipsis stays."""
    text = " ".join(answer.split())
    while text.endswith(".") and not text.endswith(".."):
        text = text[:-1].rstrip()
    return text


def _named(text: str, options: Sequence[str]) -> list[str]:
    """Letters of the options with this text."""
    return [letter for letter, option in zip(LETTERS, options, strict=False) if key(option) == key(text)]
