"""How four public harnesses read the chosen option out of a reply; `realvr.answers.extract` is the way in.

Each follows its harness, misreadings included, so that a number can be set beside one that was measured there. Where a
harness asks a judge model or draws at random, the rule returns None.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from realvr.answers.text import LETTERS


def blink_official(text: str, choices: Sequence[str]) -> str | None:
    """Only this row's options count, and "(X)" only as a token between white space: "(A)." does not."""
    letters = LETTERS[: len(choices)]
    bare = text.strip()
    for letter in letters:
        if bare in (letter, f"({letter})"):
            return letter
    for part in (text.split("\n\n")[-1], text):
        tokens = set(part.split())
        found = [letter for letter in letters if f"({letter})" in tokens]
        if len(found) == 1:
            return found[0]
    return None


_VLMEVALKIT_PUNCTUATION = re.compile(r"[.()\[\],:;!*#{}]")
_VLMEVALKIT_NEAR_END = 4
_ANSWER_IS = re.compile(r"answer is\W*([A-Z])\b", re.IGNORECASE)


def vlmevalkit(text: str, choices: Sequence[str]) -> str | None:
    """Angle brackets are no punctuation here, so ``<answer>D</answer>`` is one token and no letter."""
    letters = LETTERS[: len(choices)]
    tokens = _VLMEVALKIT_PUNCTUATION.sub(" ", text).split()
    found = {token for token in tokens if token in letters and len(token) == 1}
    if len(found) == 1:
        letter = found.pop()
        if tokens.index(letter) >= len(tokens) - _VLMEVALKIT_NEAR_END:
            return letter
    stated = {match[1] for match in _ANSWER_IS.finditer(text)} & set(letters)
    if len(stated) == 1:
        return stated.pop()
    named = [letter for letter, option in zip(letters, choices, strict=False) if option.lower() in text.lower()]
    return named[0] if len(named) == 1 else None


_MME_PREFIXES = (
    "The best answer is",
    "The correct answer is",
    "The answer is",
    "The answer",
    "The best option is",
    "The correct option is",
    "Best answer",
    "Best option",
)
_MME_LETTERS = "ABCDE"


def mme_official(text: str, choices: Sequence[str]) -> str | None:
    """Without a capital A to E, the first label "(A)" … "(E)" that contains the rest of the text in small letters:
    "b" is B, and the empty text, which every label contains, is A."""
    rest = text.strip()
    for prefix in _MME_PREFIXES:
        rest = rest.replace(prefix, "")
    if found := re.search(f"[{_MME_LETTERS}]", rest):
        return found[0]
    return next((letter for letter in _MME_LETTERS if rest.lower() in f"({letter.lower()})"), None)


def lvr(text: str, choices: Sequence[str]) -> str | None:
    """White space after the tag is skipped: LVR's own training replies have it. No tag is no answer."""
    _, tag, after = text.rpartition("<answer>")
    return after.lstrip()[:1] or None if tag else None
