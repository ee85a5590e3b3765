"""Which option an answer names: its letter, its text, or both. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Sequence

from realvr.answers.text import LETTERS, compatible, key, tidy

_LETTER = re.compile(r"\(?([A-Za-z])\)?[.:]?")
_LETTER_AND_TEXT = re.compile(r"(?:\(([A-Za-z])\)|([A-Za-z])[.:)])\s*(.+)", re.DOTALL)


def canonical(answer: str, options: Sequence[str] = ()) -> str | None:
    """The canonical form of an answer: its option's letter or, without ``options``, the tidied text; None if empty."""
    if not options:
        return tidy(answer) or None
    if len(options) > len(LETTERS):
        raise ValueError(f"{len(options)} options, but only {len(LETTERS)} letters")
    letters = LETTERS[: len(options)]
    text = tidy(compatible(answer))
    letter = bare_letter(text)
    if letter is not None and letter in letters:
        return letter
    named = _named(text, options)
    if named or (both := letter_and_text(text)) is None:
        return named[0] if len(named) == 1 else None
    letter, rest = both
    named = _named(rest, options)
    # "A. blue" where blue is option B says two things at once.
    return letter if letter in letters and (not named or letter in named) else None


def bare_letter(text: str) -> str | None:
    """B of "B", "b", "(B)", "B." and the like."""
    match = _LETTER.fullmatch(text)
    return match[1].upper() if match else None


def letter_and_text(text: str) -> tuple[str, str] | None:
    """(B, dark blue) of "B. dark blue", "(B) dark blue" and the like."""
    match = _LETTER_AND_TEXT.fullmatch(text)
    return ((match[1] or match[2]).upper(), match[3]) if match else None


def _named(text: str, options: Sequence[str]) -> list[str]:
    """Letters of the options with this text."""
    return [letter for letter, option in zip(LETTERS, options, strict=False) if key(option) == key(text)]
