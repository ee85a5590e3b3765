"""Options of a verb from a command line. A value that cannot be read is refused in one line: the option, the value, and
what is expected. Options that do not exist keep tyro's message, which suggests others. No torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn, TypeVar, get_args, get_type_hints

from realvr.errors import UserError

T = TypeVar("T")

_KINDS = {"INT": "a whole number", "FLOAT": "a number", "PATH": "a path", "STR": ""}
_SEVERAL = {"INT": "whole numbers", "FLOAT": "numbers", "PATH": "paths", "STR": ""}
_SPELLED = {"True": "true", "False": "false"}
_PLAIN = re.compile(r"(\{[^{}\[\]]*\}|[A-Z]+)(\|(\{[^{}\[\]]*\}|[A-Z]+))*")


def parse(options: type[T], args: Sequence[str], prog: str, description: str | None, **more: Any) -> T:
    """The arguments as an instance of ``options``; ``more`` is tyro's. Raises `UserError` for a value that cannot be
    read, and exits as tyro does for an option that does not exist or is missing."""
    import tyro

    with _explained(_positionals(options), args):
        return tyro.cli(options, prog=prog, description=description, args=list(args), **more)


def _explained(positionals: dict[str, str], args: Sequence[str]) -> AbstractContextManager[None]:
    """Explain what is wrong in our words, where this version of tyro tells us what it is."""
    try:
        from tyro import _errors as events

        listen, refused = events.on_parse_error, (events.BadValue, events.InvalidChoice, events.InstantiationFailure)
    except (ImportError, AttributeError):  # an earlier or a later one: its own words are not wrong
        return nullcontext()

    def explain(event: events.ParseErrorEvent) -> None:
        prog = event.prog.removesuffix(" CONFIG")
        if flag := next((flag for flag in map(_flag, args) if flag in positionals), None):
            name = positionals[flag]
            _refuse(prog, f"{flag} is no option: {name} stands without a flag, {prog} {' '.join(positionals.values())}")
        if not isinstance(event, refused):
            return
        if event.argument is None or event.argument.is_positional():
            return
        flags, wanted = event.argument.lowered.name_or_flags, expected(event.argument.lowered.metavar or "")
        given = " ".join(_given(args, flags))
        if not isinstance(event, events.BadValue):
            wanted = wanted or getattr(event, "message", "another value")
            _refuse(prog, f"{flags[0]} is {given!r}: {_needed(wanted)} expected")
        if event.reason == "too_few_values":
            what = f"is {given!r}" if given and wanted else "needs a value"
            _refuse(prog, f"{flags[0]} {what}" + (f": {_needed(wanted)} expected" if wanted else ""))

    return listen(explain)


def _refuse(prog: str, text: str) -> NoReturn:
    raise UserError(f"{text} ({prog} --help explains it)") from None


def _needed(wanted: str) -> str:
    several = any(kind and wanted.endswith(kind) for kind in _SEVERAL.values())
    return f"{wanted} {'are' if several else 'is'}"


def _flag(word: str) -> str:
    """A word of a command line as tyro compares it with its flags."""
    return word.partition("=")[0].replace("_", "-") if word.startswith("--") else ""


def _given(args: Sequence[str], flags: Sequence[str]) -> list[str]:
    """The words that were given to an option, the last time it was."""
    known, found = {_flag(flag) for flag in flags}, []
    for place, word in enumerate(args):
        if _flag(word) in known:
            rest = list(args[place + 1 :])
            end = next((index for index, other in enumerate(rest) if other.startswith("--")), len(rest))
            found = [word.partition("=")[2]] if "=" in word else rest[:end]
    return found


def expected(metavar: str) -> str:
    """What tyro's placeholder stands for, in words: ``{None}|INT`` is a whole number, ``FLOAT FLOAT`` 2 numbers.
    Nothing where any word would do."""
    if not _PLAIN.fullmatch(metavar):
        kinds = re.findall(r"\w+|[^\w\s\[\].]", metavar)
        if len(set(kinds)) != 1 or kinds[0] not in _SEVERAL:
            return metavar
        several = _SEVERAL[kinds[0]]
        return several if "[" in metavar or not several else f"{len(kinds)} {several}"
    words: list[str] = []
    for choices, kind in re.findall(r"\{([^{}]*)\}|([A-Z]+)", metavar):
        words += [_SPELLED.get(word, word) for word in choices.split(",") if word and word != "None"]
        words += [_KINDS.get(kind, kind)] if kind else []
    return ", ".join(words[:-1]) + f" or {words[-1]}" if len(words) > 1 else "".join(words)


def _positionals(options: type[Any]) -> dict[str, str]:
    """Flags that someone might write for what has none -> its placeholder."""
    import tyro

    (marker,) = get_args(tyro.conf.Positional[int])[1:]
    found = {}
    for name, annotation in get_type_hints(options, include_extras=True).items():
        notes = get_args(annotation)[1:] if hasattr(annotation, "__metadata__") else ()
        if marker in notes:
            shown = next((note.metavar for note in notes if getattr(note, "metavar", None)), None)
            found["--" + name.replace("_", "-")] = shown or name.upper()
    return found
