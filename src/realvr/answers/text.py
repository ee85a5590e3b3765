"""Text of an answer made comparable: white space, case, Unicode. Standard library only."""

from __future__ import annotations

import re
import unicodedata

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

_SAME = str.maketrans(
    {
        **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212", "-"),  # hyphens, dashes, the minus sign
        **dict.fromkeys("\u2018\u2019\u201a\u2032`", "'"),
        **dict.fromkeys("\u201c\u201d\u201e\u2033", '"'),
        "\u2044": "/",  # the fraction slash, which NFKC makes of a vulgar fraction
    }
)


def tidy(answer: str) -> str:
    """White space collapsed, without a final period; an ellipsis stays."""
    text = " ".join(answer.split())
    while text.endswith(".") and not text.endswith(".."):
        text = text[:-1].rstrip()
    return text


def compatible(text: str) -> str:
    """Unicode's compatibility form (full-width letters, ligatures) with plain dashes, quotes and digits.

    What NFKC alone would make a different number of is written out first: ``5²`` is ``5^2``, ``1½`` is ``1 1/2``.
    Invisible format characters go.
    """
    if text.isascii():  # almost every text
        return text.translate(_SAME)
    parts: list[str] = []
    raised = ""
    for character in text:
        kind = unicodedata.decomposition(character).partition(" ")[0]
        form = unicodedata.normalize("NFKC", character) if kind else character
        if kind == "<super>" and (form.isdecimal() or form in "+-\u2212"):
            raised += form.translate(_SAME)
            continue
        if raised:
            parts.append(f"^{raised}" if len(raised) == 1 else f"^{{{raised}}}")
            raised = ""
        if kind == "<fraction>" and parts and parts[-1][-1:].isdecimal():
            parts.append(" ")
        parts.append(form)
    if raised:
        parts.append(f"^{raised}" if len(raised) == 1 else f"^{{{raised}}}")
    text = unicodedata.normalize("NFKC", "".join(parts)).translate(_SAME)
    return text if text.isascii() else "".join(map(_digit, visible(text)))


def visible(text: str) -> str:
    """Without invisible format characters: zero-width spaces, soft hyphens, marks of direction."""
    return text if text.isascii() else "".join(c for c in text if unicodedata.category(c) != "Cf")


def _digit(character: str) -> str:
    """A decimal digit of any script as that of ASCII; any other character as it is."""
    return str(unicodedata.decimal(character)) if character.isdecimal() else character


def key(answer: str) -> str:
    """Two texts with the same key are the same text: case, white space, a final period and dress do not count."""
    return tidy(compatible(answer).casefold())


_WRAPPED = tuple(
    re.compile(pattern, re.DOTALL)
    for pattern in (
        r"\$\$(.+)\$\$",
        r"\$([^$]+)\$",
        r"\\\((.+)\\\)",
        r"\\\[(.+)\\\]",
        r"\\boxed\{(.+)\}",
        r"\\(?:text|textbf|mathrm|mathbf)\{([^{}]*)\}",
        r"\*\*([^*]+)\*\*",
        r"\*([^*]+)\*",
        r"'([^']+)'",
        r'"([^"]+)"',
    )
)


def undressed(answer: str) -> str:
    """``compatible`` and tidy text without the LaTeX, Markdown or quotes that stand around the whole of it."""
    text = tidy(compatible(answer))
    for _ in range(8):  # "**$\\boxed{2}$**" has three layers; no answer has eight
        for pattern in _WRAPPED:
            if (match := pattern.fullmatch(text)) and _balanced(match[1]):
                text = tidy(match[1])
                break
        else:
            break
    return text


def _balanced(text: str) -> bool:
    r"""Whether no brace closes that was not opened: "\boxed{1}, \boxed{2}" is no single box."""
    depth = 0
    for character in text:
        depth += (character == "{") - (character == "}")
        if depth < 0:
            return False
    return depth == 0
