"""Which option did the model choose? One policy of our own, and the rules of four public harnesses. No torch.

Harnesses disagree about the same text, so the policy is named beside every number. ``strict`` never guesses: what it
cannot read is a parse failure (None). The others follow their harness, misreadings included, so that a number can be
set beside one that was measured there; where a harness asks a judge model or draws at random, they return None.
No policy returns a letter that the row does not offer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from realvr.answers import canonical as answers
from realvr.answers.strict import strict_choice
from realvr.data.sample import LETTERS
from realvr.errors import UserError

POLICIES: dict[str, str] = {
    "strict": "the <answer> block, else an unambiguous letter, else an unambiguous option text, else a parse failure",
    "blink-official": "BLINK: bare letter or (X), else one (X) token in the last paragraph, else in the text",
    "vlmevalkit": "VLMEvalKit: one capital option letter near the end, else 'answer is X', else one option text",
    "mme-official": "MME-RealWorld: known prefixes removed, then the first of A to E anywhere, even inside a word",
    "lvr": "LVR: the first character after the last <answer>",
}


def extract_choice(text: str, choices: Sequence[str], policy: str = "strict") -> str | None:
    """Upper-case letter of the option that ``text`` chooses among ``choices`` (texts without letters), or None."""
    if len(choices) > len(LETTERS):
        raise ValueError(f"{len(choices)} options, but only {len(LETTERS)} letters")
    letter = _rule(policy)(text, choices)
    return letter if letter is not None and letter in LETTERS[: len(choices)] else None


def extract_answer(text: str, choices: Sequence[str], policy: str = "strict") -> str | None:
    """The option's letter where there are choices, else the tidied content of the one answer block; None if neither.

    A free answer is read in the same way under every policy.
    """
    if choices:
        return extract_choice(text, choices, policy)
    _rule(policy)
    return answers.parse(text)


def is_correct(extracted: str | None, answer: str, choices: Sequence[str]) -> bool:
    """Whether an extracted answer is right: the same letter, or the same free answer without case and white space."""
    if extracted is None:
        return False
    return extracted == answer.upper() if choices else answers.same(extracted, answer)


def _rule(policy: str) -> Callable[[str, Sequence[str]], str | None]:
    if policy not in _RULES:
        raise UserError(f"'{policy}' is not an extraction policy; there are {', '.join(POLICIES)}")
    return _RULES[policy]


def _blink_official(text: str, choices: Sequence[str]) -> str | None:
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


def _vlmevalkit(text: str, choices: Sequence[str]) -> str | None:
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


def _mme_official(text: str, choices: Sequence[str]) -> str | None:
    """Without a capital A to E, the first label "(A)" … "(E)" that contains the rest of the text in small letters:
    "b" is B, and the empty text, which every label contains, is A."""
    rest = text.strip()
    for prefix in _MME_PREFIXES:
        rest = rest.replace(prefix, "")
    if found := re.search(f"[{_MME_LETTERS}]", rest):
        return found[0]
    return next((letter for letter in _MME_LETTERS if rest.lower() in f"({letter.lower()})"), None)


def _lvr(text: str, choices: Sequence[str]) -> str | None:
    """White space after the tag is skipped: LVR's own training replies have it. No tag is no answer."""
    _, tag, after = text.rpartition("<answer>")
    return after.lstrip()[:1] or None if tag else None


_RULES: dict[str, Callable[[str, Sequence[str]], str | None]] = {
    "strict": strict_choice,
    "blink-official": _blink_official,
    "vlmevalkit": _vlmevalkit,
    "mme-official": _mme_official,
    "lvr": _lvr,
}
