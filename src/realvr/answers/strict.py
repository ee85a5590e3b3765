"""The ``strict`` extraction policy: read what is said, never guess. `extract.extract_choice` is the way in.

In order: the ``<answer>`` blocks, which must all name one option; without a block, a letter that is stated ("the answer
is B"), then a letter written as a label ("(B)", "B." at the start of a line), then the text of an option. Each step
decides or, having found two different options, gives up; only a step that finds nothing passes on to the next.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from realvr.answers.text import LETTERS, visible

_BLOCK = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL | re.IGNORECASE)
_TAG = re.compile(r"</?answer>|</?s>|<\|[a-z_]+\|>", re.IGNORECASE)
_STYLE = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\{([^{}]*)\}")
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")

# A letter with the brackets people put around it. The brackets need not match: "B)" is common.
_BARE = re.compile(
    r"(?:the )?(?:final )?(?:option |choice |answer:? )?[(\[{]?\s*([a-z])\s*[)\]}]?[.:,]?", re.IGNORECASE
)
_LETTER_AND_TEXT = re.compile(
    r"(?:[(\[]([a-z])[)\]]|([a-z])\s*[.:)\]]|([a-z]) [-–—])\s*(\S.*)", re.IGNORECASE | re.DOTALL
)

# "answer is B", "correct option: (b)", "I choose C", "B is correct". A letter without brackets may not run on into a
# phrase where it could be an article: "the answer is a red ball" states nothing. "Option B" alone is a label.
_VERB = r"(?: (?:is|are|would be|should be|must be|will be))"
_SAYS = (
    rf"(?:answer(?: to (?:this|the)(?: [\w-]+){{0,3}})?{_VERB}?|(?:option|choice)(?:{_VERB}|\s*:))"
    r"|(?:choose|chose|pick|select|go with|answer with)"
)
_FILLER = r"(?:(?:the |an )?(?:correct |right |best |final )?(?:answer|option|choice|letter) )?"
_STATED = re.compile(
    rf"\b(?:{_SAYS})\s*[:=]?\s*{_FILLER}[\"'“‘]?"
    r"(?:[(\[](?P<bracketed>[a-z])[)\]]"
    r"|(?P<plain>[a-z])(?=\s*(?:[.,;:!?)\"'”’]|$|\n)| (?:because|since|as|which|given)\b))",
    re.IGNORECASE,
)
_STATED_CAPITAL = re.compile(
    rf"\b(?i:{_SAYS})\s*[:=]?\s*(?i:{_FILLER})(?P<plain>[B-HJ-Z])(?=\s)(?!\s+(?i:or|and)\b)"
    r"|(?<![\w'’])[(\[]?(?P<subject>[A-Z])[)\]]? is (?:the )?(?:correct|right|best)"
    r"(?: (?:answer|option|choice)| one)?\b"
)
_ALTERNATIVE = re.compile(
    r"[)\]]?\s*(?:,|/|\bor\b|\band\b)\s*(?:\bor\b|\band\b)?\s*[(\[]?([A-Z])\b(?! (?:is|are|has)\b)"
)
_LABELS = (
    re.compile(r"(?<!\w)[(\[]([A-Za-z])[)\]]"),
    re.compile(r"^[ \t]*([A-Z])(?:[.:)](?=\s|$)|[ \t]*$)|^[ \t]*([a-z])\)(?=\s|$)", re.MULTILINE),
    re.compile(r"\b(?:[Oo]ption|[Cc]hoice) ([A-Z])\b"),
)
_LAST = re.compile(r"(?:[,:;.]|\b(?:so|thus|hence|therefore))\s+[A-Z]\.?\s*\Z", re.IGNORECASE)
_ENDS = re.compile(r"(?<![\w'’])([A-Z])[.!?\"')]*\s*\Z")
_CAPITAL = re.compile(r"(?<![\w'’])([B-HJ-Z]|A(?! [a-z]))(?![\w'’])")
_DENIED = re.compile(
    r"(?:\bnot|n['’]t|\bneither|\bnor|\bthan|\bexcept|\beliminate|\brules? out)(?:\W+\w+){0,2}\W*$", re.I
)
_RETRACTION = re.compile(r"\b(?:wait|actually|correction|on second thought|i was wrong|my mistake)\b", re.IGNORECASE)
_REFUSAL = re.compile(
    r"\b(?:cannot|can['’]?t|could not|couldn['’]t|unable|impossible|not possible|not sure|unclear|unsure|uncertain"
    r"|sorry|(?:do not|don['’]t) (?:know|see)|(?:difficult|hard) to (?:tell|say|determine))\b",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


@dataclass(frozen=True)
class _Found:
    letter: str
    start: int
    end: int


def strict_choice(text: str, choices: Sequence[str]) -> str | None:
    """Letter of the option that ``text`` names among ``choices``, or None where it names none or more than one."""
    text = _plain(text)
    options = [_fold(_plain(option)) for option in choices]
    blocks = [match[1] for match in _BLOCK.finditer(text)]
    if not blocks:
        return _read(_TAG.sub(" ", text), options)
    named = {_read(_TAG.sub(" ", block), options) for block in blocks}
    return named.pop() if len(named) == 1 else None


def _plain(text: str) -> str:
    r"""Unicode's compatibility form without Markdown and LaTeX dress; ``\boxed{B}`` becomes a statement."""
    text = visible(unicodedata.normalize("NFKC", text))
    text = re.sub(r"[*`$]|__", "", text)
    return _BOXED.sub(r" Answer: \1\n", _STYLE.sub(r"\1", text))


def _fold(text: str) -> str:
    """For comparing: no case, single spaces, no final period."""
    return " ".join(text.casefold().split()).rstrip(".").strip("\"'“”‘’ ")


def _read(text: str, options: Sequence[str]) -> str | None:
    """One answer block, or a reply without any."""
    text = text.strip()
    letters = LETTERS[: len(options)]
    if bare := _BARE.fullmatch(text):
        return _known(bare[1], letters)
    whole = [letter for letter, option in zip(letters, options, strict=False) if option == _fold(text)]
    if whole:
        return whole[0] if len(whole) == 1 else None
    if "\n" not in text and (match := _LETTER_AND_TEXT.fullmatch(text)):
        exact = [letter for letter, option in zip(letters, options, strict=False) if option == _fold(match[4])]
        letter = (match[1] or match[2] or match[3]).upper()
        if exact:
            # "A. blue" where blue is option B says two things at once.
            return _known(letter, letters) if letter in exact else None
    stated = _stated(text)
    if stated:
        return _decide_stated(stated, text, letters, options)
    labels = _labels(text)
    if labels:
        return None if _REFUSAL.search(text) else _decide(labels, text, letters, options)
    return None if _REFUSAL.search(text) else _by_text(text, options)


def _known(letter: str, letters: str) -> str | None:
    return letter.upper() if letter.upper() in letters else None


def _stated(text: str) -> list[_Found]:
    """Letters given as the answer, in order."""
    found = [_found(match) for pattern in (_STATED, _STATED_CAPITAL) for match in pattern.finditer(text)]
    return sorted(found, key=lambda item: item.start)


def _found(match: re.Match[str]) -> _Found:
    name = next(name for name, value in match.groupdict().items() if value)
    return _Found(match[name].upper(), match.start(name), match.end(name))


def _labels(text: str) -> list[_Found]:
    """Letters written as labels, in order: in brackets, with a stop at the start of a line, after "option", or alone at
    the end, where every other lone capital counts as well."""
    patterns = (*_LABELS, _CAPITAL) if _LAST.search(text) else _LABELS
    found = []
    for pattern in patterns:
        for match in pattern.finditer(text):
            group = match.lastindex or 1
            found.append(_Found(match[group].upper(), match.start(group), match.end(group)))
    return sorted(found, key=lambda item: item.start)


def _decide_stated(stated: Sequence[_Found], text: str, letters: str, options: Sequence[str]) -> str | None:
    """Labels before the statement are the discussion; one after it, or a change of mind, takes it back."""
    last = stated[-1]
    if _RETRACTION.search(text, stated[0].end) and not _RETRACTION.search(text[stated[0].end : last.end]):
        return None
    if _ALTERNATIVE.match(text, last.end):
        return None
    after = [label for label in _labels(text) if label.start > last.end]
    return _decide([*stated, *after], text, letters, options)


def _decide(found: Sequence[_Found], text: str, letters: str, options: Sequence[str]) -> str | None:
    """The one letter of ``found``, unless it is denied or stands before the text of another option."""
    if len({item.letter for item in found}) != 1 or found[0].letter not in letters:
        return None
    for item in found:
        if _DENIED.search(text[max(0, item.start - 40) : item.start]):
            return None
        beside = _fold(re.sub(r"^[)\]]?[.:,]?\s*", "", text[item.end : item.end + 200]))
        named = [
            (len(option), letter)
            for letter, option in zip(letters, options, strict=False)
            if len(option) > 1 and re.match(_words(option), beside)
        ]
        if named and (max(named)[0], item.letter) not in named:
            return None
    return found[0].letter


def _by_text(text: str, options: Sequence[str]) -> str | None:
    """The one option whose text occurs, where an occurrence inside that of a longer option does not count."""
    folded = " ".join(text.casefold().split())
    numbers = [option for option in options if _NUMBER.fullmatch(option)]
    if numbers and len(set(_NUMBER.findall(folded))) > 1:
        return None  # a count among other numbers: which of them is the answer is a guess
    taken: list[tuple[int, int]] = []
    named: set[str] = set()
    for letter, option in sorted(zip(LETTERS, options, strict=False), key=lambda pair: -len(pair[1])):
        if not option or (len(option) == 1 and option.isascii() and option.isalpha()):
            continue  # a lone letter in prose is no option text
        for match in re.finditer(_words(option), folded):
            start, end = match.span()
            if any(a <= start and end <= b and (a, b) != (start, end) for a, b in taken):
                continue
            if _DENIED.search(folded[max(0, start - 40) : start]):
                return None
            taken.append((start, end))
            named.add(letter)
    if len(named) != 1:
        return None
    letter = named.pop()
    # "It looks red, I would say B" names two options unless the letter belongs to the option's text ("Point B").
    last = _ENDS.search(text)
    inside = last is not None and any(end >= len(folded.rstrip(".!?\"') ")) for _, end in taken)
    return None if last and not inside and last[1] != letter else letter


def _words(option: str) -> str:
    """Pattern for an option's text at word boundaries. Scripts written without spaces have none."""
    begin = r"(?<!\w)" if _spaced(option[0]) else ""
    end = r"(?!\w)" if _spaced(option[-1]) else ""
    return begin + re.escape(option) + end


def _spaced(character: str) -> bool:
    return character.isalnum() and unicodedata.east_asian_width(character) not in ("W", "F")
