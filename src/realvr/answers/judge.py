"""The one judge: whether two parsed answers are equal.

Rewards, wrong-answer sets, ``realvr ask``, evaluation and the diagnostics all call `equal`; nothing else compares
answers. In order:

1. A parse failure (None) equals nothing, not even another one.
2. Where there are options, both answers are reduced to the option's letter. Two options are never equal, whatever they
   say: an option "1/2" is not the option "0.5".
3. The same text, without case, white space, a final period, Unicode variants, and the LaTeX, Markdown or quotes around
   it; or a letter and the same letter with its text ("B", "(B)", "B. blue").
4. Two numbers, compared exactly, with their units (`realvr.answers.quantity`).
5. Two mathematical expressions, by math-verify in both directions. Words are no expressions: to an algebra system
   "left" and "felt" are the same product of letters.

The verdict is symmetric. It is not transitive, since a unit may be left out: 12 cm = 12 = 12 m.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from realvr.answers import quantity
from realvr.answers.mathematics import expressions_equal
from realvr.answers.options import bare_letter, canonical, letter_and_text
from realvr.answers.text import key, undressed

NAME = "realvr"
VERSION = 1
JUDGE = f"{NAME}/{VERSION}"
"""Name and version, as they stand in every record. The version changes when a verdict can."""

LONGEST = 200
"""Longer answers are compared as text only."""

How = Literal["unread", "option", "text", "number", "mathematics", "limit"]
"""What decided. ``unread``: a parse failure; ``limit``: math-verify did not finish, so the answers differ."""


@dataclass(frozen=True)
class Verdict:
    """True where two answers are equal; ``how`` says what decided."""

    equal: bool
    how: How

    def __bool__(self) -> bool:
        return self.equal


def equal(one: str | None, other: str | None, choices: Sequence[str] = ()) -> Verdict:
    """Whether two parsed answers are the same answer to a question with these options (texts without letters)."""
    if one is None or other is None:
        return Verdict(False, "unread")
    if choices:
        first, second = canonical(one, choices), canonical(other, choices)
        if first is not None or second is not None:
            return Verdict(first == second, "option")
        return Verdict(key(one) == key(other), "text")
    if one == other:
        return Verdict(True, "text")
    return _free(min(one, other), max(one, other))


@lru_cache(maxsize=1 << 16)  # a check may take milliseconds, and a group gives the same few answers again and again
def _free(one: str, other: str) -> Verdict:
    """Two answers to a question without options."""
    if key(one) == key(other):
        return Verdict(True, "text")
    one, other = undressed(one), undressed(other)
    if key(one) == key(other) or _same_letter(one, other):
        return Verdict(True, "text")
    if max(len(one), len(other)) > LONGEST:
        return Verdict(False, "text")
    first, second = quantity.read(one), quantity.read(other)
    if first is not None and second is not None:
        return Verdict(quantity.same_value(first, second), "number")
    if _times(one) and _times(other):
        return Verdict(_times(one) == _times(other), "number")
    if _date(one) or _date(other):
        return Verdict(_date(one) == _date(other), "number")
    pair = quantity.without_units(one, other)
    if pair is None or not _mathematical(*pair) or _different_units(*pair):
        return Verdict(False, "text")
    verdict = expressions_equal(*(_latex(text) for text in pair))
    return Verdict(bool(verdict), "limit" if verdict is None else "mathematics")


def _same_letter(one: str, other: str) -> bool:
    """Whether both name one option, as "(B)", "B" and "B. blue" do, of a question whose options are not known here."""
    letters = (bare_letter(one), bare_letter(other))
    if None not in letters:
        return letters[0] == letters[1]
    for letter, text in zip(letters, (other, one), strict=True):
        if letter is not None and (both := letter_and_text(text)) is not None:
            named, rest = both  # "B. A" names two letters, "B.A" is one word
            return named == letter and text.endswith(f" {rest}") and bare_letter(rest) is None
    return False


def _times(text: str) -> list[int]:
    """[3, 5] of "3:05": a time or a ratio, which an algebra system would divide."""
    return [int(part) for part in text.split(":")] if re.fullmatch(r"[0-9]{1,6}(:[0-9]{1,6}){1,2}", text) else []


_DATE = re.compile(r"[0-9]{4}([-/])[0-9]{1,2}\1[0-9]{1,2}|[0-9]{1,2}([-/])[0-9]{1,2}\2[0-9]{4}")


def _date(text: str) -> list[int]:
    """[2024, 1, 2] of "2024-01-02", which an algebra system would subtract; the order is as written."""
    return [int(part) for part in re.split("[-/]", text)] if _DATE.fullmatch(text) else []


_COUNTED = re.compile(r"[0-9.,]+\s*([A-Za-z.]+)")


def _different_units(one: str, other: str) -> bool:
    """Whether both are numbers before different letters, "3 kW" and "3 MW", which math-verify takes for left-out units.
    The same letters in another order may be a product, "2xy" and "2yx"."""
    letters = [sorted(match[1].replace(".", "")) for match in map(_COUNTED.fullmatch, (one, other)) if match]
    return len(letters) == 2 and letters[0] != letters[1]


_COMMAND = re.compile(r"\\[A-Za-z]+")
_WORD = re.compile(r"[^\W\d_]+")
_SIGN = re.compile(r"[0-9+*/^=<>√π∞]|-|\\[A-Za-z]")
_FUNCTIONS = re.compile(r"(?:arc|a)?(?:sin|cos|tan)h?|cot|sec|csc|log|exp|sqrt|max|min|gcd|lcm|mod|inf", re.IGNORECASE)
_SHORT_WORDS = re.compile(r"an|b[ey]|do|go|he|i[fst]|m[ey]|no|o[fnr]|so|to|up|us|we", re.IGNORECASE)
"""Words that could be a product of two letters: "no 1" is not "on 1"."""


def _is_word(letters: str) -> bool:
    if not letters.isascii():
        return letters != "π"
    if len(letters) > 2:
        return not _FUNCTIONS.fullmatch(letters)
    return _SHORT_WORDS.fullmatch(letters) is not None


def _mathematical(one: str, other: str) -> bool:
    """Whether both may be expressions: no word in either, and a sign of mathematics in one."""
    words = (word for text in (one, other) for word in _WORD.findall(_COMMAND.sub(" ", text)))
    if any(_is_word(word) for word in words):
        return False
    return any(_SIGN.search(text) for text in (one, other))


_SYMBOLS = {"×": r"\times ", "·": r"\cdot ", "÷": "/", "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge "}


def _latex(text: str) -> str:
    """An expression as math-verify reads it."""
    text = text.replace("**", "^")
    text = re.sub(r"√\s*(\{[^{}]*\}|\([^()]*\)|[0-9.]+|[A-Za-z])", lambda match: rf"\sqrt{{{match[1]}}}", text)
    text = re.sub(r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi ", text)
    return "".join(_SYMBOLS.get(character, character) for character in text)
