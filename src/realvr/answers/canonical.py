"""Canonical answers: the option's letter or the tidied text, and the set ``Y_x^-`` of wrong ones. No torch.

Implements ``Unique{...}`` of app:construction-wrong-answers, and the canonical answer ``y_i`` with its parse failure
that sec:prelim_vanilla_objective refers to (None stands for the bottom symbol).

Departures from the paper, and what it leaves open:

* An answer parses if the completion has exactly one ``<answer>`` block with something in it.
* The canonical form of a multiple-choice answer is its letter, whether the letter or the option's text was given. A
  text that names no option, or two, does not parse.
* Other answers keep their wording, since they are teacher-forced; only surrounding and repeated white space and a final
  period go.
* ``Correct`` and ``Unique`` are decided by the one judge (`realvr.answers.judge`), so that "1/2" and "0.5" are one
  answer. Of equal answers the first wording is kept.
* The order is that of the completions, so that the set does not depend on hashing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from realvr.answers.judge import equal
from realvr.answers.options import canonical

_BLOCK = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def parse(completion: str, options: Sequence[str] = ()) -> str | None:
    """The canonical answer of a completion, or None: no block, several, an empty one, or one that names no option."""
    blocks = _BLOCK.findall(completion)
    if len(blocks) != 1 or completion.count("<answer>") != 1 or completion.count("</answer>") != 1:
        return None
    return canonical(blocks[0], options)


def unique(answers: Iterable[str], options: Sequence[str] = ()) -> list[str]:
    """The answers in order, each that equals an earlier one left out."""
    first: list[str] = []
    for answer in answers:
        if not any(equal(answer, kept, options) for kept in first):
            first.append(answer)
    return first


def wrong(
    answers: Iterable[str | None],
    truth: str,
    options: Sequence[str] = (),
    *,
    has_content: Callable[[str], bool] = lambda answer: bool(answer.strip()),
) -> list[str]:
    """``Y_x^-``: the distinct wrong answers among the canonical answers of a group, None being a parse failure.

    ``has_content(answer)`` says whether the formatted answer has a content token, which depends on the tokenizer. The
    truth must have one.
    """
    if not has_content(truth):
        raise ValueError(f"the true answer {truth!r} has no content token: reject the example when reading the data")
    parsed = (answer for answer in answers if answer is not None)
    return unique((answer for answer in parsed if not equal(answer, truth, options) and has_content(answer)), options)
