"""What an answer is and whether it is right: parsers by purpose, and the one judge. No torch.

    extract_choice("The answer is (B).", ["red", "blue"])   # "B"
    bool(equal("1/2", "0.5"))                               # True
    bool(equal("blue", "B", ["red", "blue"]))               # True

`PARSERS` lists every way to read a reply, `equal` is the only way to compare two answers.
"""

from __future__ import annotations

from realvr.answers.canonical import parse, unique, wrong
from realvr.answers.extract import PARSERS, POLICIES, Parser, extract_answer, extract_choice, parser
from realvr.answers.judge import JUDGE, Verdict, equal
from realvr.answers.options import canonical as canonical_answer

__all__ = [
    "JUDGE",
    "PARSERS",
    "POLICIES",
    "Parser",
    "Verdict",
    "canonical_answer",
    "equal",
    "extract_answer",
    "extract_choice",
    "parse",
    "parser",
    "unique",
    "wrong",
]
