"""Elements of a JSON list, decoded one at a time from a sliding window, with the damaged ones between them.

After damage (a missing quote, a lost brace) brackets and quotes cannot be trusted any more, so the next element is
looked for instead: an object that begins as the elements before it did, or that is followed by what follows an element
of the whole list and not of a list inside an element. What is skipped on the way is one damaged element.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

CHUNK = 1 << 20
LONGEST = 256 << 20
"""Characters after which something that has not ended is damage, not an element."""
AHEAD = 8 << 20
"""Characters that are read ahead to tell an element from an object inside one."""
RUN = 256
"""Values in a row after which a list counts as the whole one, not as one inside an element."""
BEHIND = 64
"""Characters before an object that are looked at."""
_SPACE = re.compile(r"[ \t\n\r]*")
_OBJECT = re.compile(r'\{\s*"([^"\\]{0,200})"\s*:')
_decode = json.JSONDecoder().raw_decode


@dataclass(frozen=True)
class Element:
    """One element, or damage in place of one."""

    value: Any = None
    text: str = ""
    damage: str = ""
    """What is wrong, where nothing could be decoded."""
    last: bool = False
    """Nothing follows: the damage reaches to the end of the file."""
    truncated: bool = False
    """The file ends without the end of its list."""


@dataclass(frozen=True)
class _Known:
    """Keys of the elements so far."""

    first: set[str]
    any: set[str]

    def learn(self, element: dict[str, Any]) -> None:
        if element and len(self.any) < RUN:
            self.first.add(next(iter(element)))
            self.any.update(element)

    def resembles(self, keys: Iterable[str]) -> bool:
        """Whether at least half of ``keys`` are those of elements."""
        found = list(keys)
        return 2 * len(self.any.intersection(found)) >= len(found)


class _Window:
    """A sliding window of decoded text over a file."""

    def __init__(self, source: BinaryIO) -> None:
        self.source = source
        self.decoder = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")
        self.text = ""
        self.at = 0
        self.ended = False

    def more(self) -> bool:
        """Read on, at least doubling what is pending, so that long elements cost linear time. False at the end."""
        if self.ended:
            return False
        pending = self.text[self.at :]
        raw = self.source.read(max(CHUNK, len(pending)))
        self.ended = not raw
        self.text = pending + self.decoder.decode(raw, final=self.ended)
        self.at = 0
        return not self.ended

    def skip_space(self) -> str:
        """Move to the next character that is not white space and return it; empty at the end of the file."""
        while True:
            self.at = _after_space(self.text, self.at)
            if self.at < len(self.text):
                return self.text[self.at]
            if not self.more():
                return ""

    def nothing_follows(self) -> bool:
        """Whether the character at the window's position is the last one, apart from white space."""
        while _after_space(self.text, self.at + 1) == len(self.text):
            if not self.more():
                return True
        return False

    def drop(self, until: int) -> None:
        """Forget the text before ``until``."""
        self.text, self.at = self.text[until:], 0


def elements(source: BinaryIO) -> Iterator[Element]:
    """Elements of the list in ``source``, in order. The opening bracket and the commas may be missing."""
    window = _Window(source)
    opened = window.skip_space() == "["
    window.at += opened
    known = _Known(set(), set())
    while mark := window.skip_space():
        if mark == ",":
            window.at += 1
            continue
        if mark == "]" and window.nothing_follows():
            return
        if mark == "[" and _after_bracket(window) == "{":
            window.at += 1
            yield Element(damage="a list begins inside the list")
            continue
        element = _next(window, known)
        if isinstance(element.value, dict):
            known.learn(element.value)
        yield element
        if element.last:
            return
    if opened:
        yield Element(damage="the file ends inside its list", last=True, truncated=True)


def _after_bracket(window: _Window) -> str:
    """The first character after the one at the window's position, apart from white space."""
    return "" if window.nothing_follows() else window.text[_after_space(window.text, window.at + 1)]


def _next(window: _Window, known: _Known) -> Element:
    """Decode the element at the window's position and move past it, or past the damage that is there."""
    while True:
        text, start = window.text, window.at
        try:
            value, end = _decode(text, start)
        except RecursionError as error:
            return _resume(window, known, str(error))
        except ValueError as error:
            if _cut_short(error, text) and len(text) - start < LONGEST and window.more():
                continue
            return _resume(window, known, str(error))
        if not isinstance(value, dict):
            follows = _after_space(text, end)
            if follows == len(text) and window.more():
                continue  # a number may go on in the next chunk
            if text[follows : follows + 1] not in ("", ",", "]"):
                return _resume(window, known, f"{text[start:end]!r:.40} is not an element")
        window.at = end
        return Element(value, text[start:end])


def _cut_short(error: ValueError, text: str) -> bool:
    """Whether decoding failed because the text ends, so that more of it may help."""
    unfinished = getattr(error, "msg", "").startswith("Unterminated string")
    return unfinished or getattr(error, "pos", 0) >= len(text) - len('"\\u1234",')


def _after_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at


def _resume(window: _Window, known: _Known, damage: str) -> Element:
    """Move from a damaged element to the next one, keeping no more of the file than is needed to recognise it."""
    window.drop(window.at)
    own = _OBJECT.match(window.text)
    begins = known.first or ({own[1]} if own else set())
    at = 1
    while True:
        match = _OBJECT.search(window.text, at)
        if match is None:
            brace = window.text.rfind("{", at)
            at = len(window.text) if brace < 0 or len(window.text) - brace > LONGEST else brace
            back = max(0, at - BEHIND)
            window.drop(back)
            at -= back
            if not window.more():
                break
            continue
        verdict, end = _judge(window, match, known, begins)
        if verdict == "cut":
            window.more()
        elif verdict == "element":
            window.at = match.start()
            return Element(damage=damage)
        else:
            at = max(end, match.start() + 1)
    closed = window.text.rstrip().endswith("]")
    window.at = len(window.text)
    return Element(damage=damage, last=True, truncated=not closed)


def _judge(window: _Window, match: re.Match[str], known: _Known, begins: set[str]) -> tuple[str, int]:
    """Whether the object at ``match`` is an ``element`` of the whole list, or ``other``, and then where to look on;
    ``cut`` if the window is too small to tell. ``begins``: keys that elements begin with."""
    text, at = window.text, match.start()
    before = text[max(0, at - BEHIND) : at].rstrip()
    if before.endswith(":") or (before.endswith("[") and not before[:-1].rstrip().endswith("]")):
        return "other", at  # the value of a key, or the first object of a list inside an element
    damaged = ("element" if match[1] in begins | known.any else "other"), at
    try:
        value, end = _decode(text, at)
    except RecursionError:
        return damaged
    except ValueError as error:
        if not window.ended and len(text) - at < LONGEST and _cut_short(error, text):
            return "cut", at
        return damaged
    alike = match[1] in begins
    if known.first and not alike and not known.resembles(value):
        return "other", end
    place, after = _place(window, at, end)
    if place == "cut":
        return "cut", at
    if place == "inside":
        return "other", after
    return ("element" if alike or place == "outside" or not begins else "other"), end


def _place(window: _Window, at: int, end: int) -> tuple[str, int]:
    """Whether the object from ``at`` to ``end`` lies ``inside`` an element or ``outside``, by how the list that it
    belongs to ends; ``unclear`` where that is damaged too, ``cut`` if the window is too small to tell."""
    text = window.text
    for _ in range(RUN):
        end = _after_space(text, end)
        if text[end : end + 1] == "]":
            last = _after_space(text, end + 1)
            if last < len(text):
                return ("inside" if text[last] in ",]}" else "unclear"), end
            return ("outside" if window.ended else "cut"), end
        if end < len(text) and text[end] != ",":
            return ("inside" if text[end] in "}:" else "unclear"), end
        wait = not window.ended and len(text) - at < AHEAD
        try:
            _, end = _decode(text, _after_space(text, end + 1))
        except RecursionError:
            return "unclear", end
        except ValueError as error:
            return ("cut" if wait and _cut_short(error, text) else "unclear"), end
    return "outside", end
