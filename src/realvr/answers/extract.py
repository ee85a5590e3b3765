"""Reading the answer out of a reply. One table of parsers, named by purpose; each record names the one it used.

Harnesses disagree about the same text, so the parser is named beside every number. ``strict`` never guesses: what it
cannot read is a parse failure (None). The others follow their harness (`harnesses`). No parser returns a letter that
the row does not offer. Whether the answer is right is decided elsewhere, by one judge for all (`judge`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from realvr.answers import canonical, harnesses
from realvr.answers.strict import strict_choice
from realvr.answers.text import LETTERS
from realvr.errors import UserError

Purpose = Literal["reward", "evaluation", "ask"]
_FIRST_BLOCK = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@dataclass(frozen=True)
class Parser:
    """A way to read a reply. ``version`` changes when a reading can."""

    name: str
    purpose: Purpose
    version: int
    description: str
    read: Callable[[str, Sequence[str]], str | None]
    """(reply, option texts without letters) -> the answer: a letter where there are options; None is a failure."""

    def __str__(self) -> str:
        return f"{self.name}/{self.version}"


def _policy(name: str, description: str, choice: Callable[[str, Sequence[str]], str | None]) -> Parser:
    """An evaluation policy. A free answer is read in the same way under each: the content of the one answer block."""

    def read(text: str, choices: Sequence[str]) -> str | None:
        if not choices:
            return canonical.parse(text)
        if len(choices) > len(LETTERS):
            raise ValueError(f"{len(choices)} options, but only {len(LETTERS)} letters")
        letter = choice(text, choices)
        return letter if letter is not None and letter in LETTERS[: len(choices)] else None

    return Parser(name, "evaluation", 1, description, read)


def _shown(text: str, choices: Sequence[str]) -> str:
    block = _FIRST_BLOCK.search(text)
    return (block[1] if block else text).strip()


PARSERS: dict[str, Parser] = {
    parser.name: parser
    for parser in (
        Parser(
            "reward",
            "reward",
            1,
            "exactly one <answer> block: a letter, the text of an option, or both",
            canonical.parse,
        ),
        _policy(
            "strict",
            "the <answer> block, else an unambiguous letter, else an unambiguous option text, else a parse failure",
            strict_choice,
        ),
        _policy(
            "blink-official",
            "BLINK: bare letter or (X), else one (X) token in the last paragraph, else in the text",
            harnesses.blink_official,
        ),
        _policy(
            "vlmevalkit",
            "VLMEvalKit: one capital option letter near the end, else 'answer is X', else one option text",
            harnesses.vlmevalkit,
        ),
        _policy(
            "mme-official",
            "MME-RealWorld: known prefixes removed, then the first of A to E anywhere, even inside a word",
            harnesses.mme_official,
        ),
        _policy("lvr", "LVR: the first character after the last <answer>", harnesses.lvr),
        Parser("ask", "ask", 1, "the first <answer> block as it is, else the whole reply", _shown),
    )
}
POLICIES: dict[str, str] = {name: one.description for name, one in PARSERS.items() if one.purpose == "evaluation"}
"""Extraction policies: the parsers of evaluations."""


def parser(name: str, purpose: Purpose | None = None) -> Parser:
    """The parser of a name, which must serve ``purpose``."""
    found = PARSERS.get(name)
    if found is None or purpose not in (None, found.purpose):
        names = [one.name for one in PARSERS.values() if purpose in (None, one.purpose)]
        kind = "an extraction policy" if purpose == "evaluation" else "a parser"
        raise UserError(f"'{name}' is not {kind}; there are {', '.join(names)}")
    return found


def extract_choice(text: str, choices: Sequence[str], policy: str = "strict") -> str | None:
    """Upper-case letter of the option that ``text`` chooses among ``choices`` (texts without letters), or None."""
    chosen = parser(policy, "evaluation")
    return chosen.read(text, choices) if choices else None


def extract_answer(text: str, choices: Sequence[str], policy: str = "strict") -> str | None:
    """The option's letter where there are choices, else the tidied content of the one answer block; None if neither."""
    return parser(policy, "evaluation").read(text, choices)


def parsers_table() -> str:
    """All parsers in Markdown, as docs/evaluation.md shows them."""
    rows = [f"| `{one.name}` | {one.purpose} | {one.version} | {one.description} |" for one in PARSERS.values()]
    return "\n".join(["| parser | purpose | version | reads |", "|---|---|---|---|", *rows]) + "\n"
