"""The numbers of a demo in words: what a reader must know before believing them, and the closing table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from realvr.demo.choice import Column, choice, product
from realvr.demo.plan import DemoSettings, questions_of
from realvr.evaluation.effects import EFFECTS, beyond_noise

Json = dict[str, Any]
_WIDE = 128
_LOST = 5
"""Points by which fewer replies must be readable before a note says so."""


def notes(settings: DemoSettings, arms: Json, differences: Json) -> list[str]:
    """What a reader must know before believing a number."""
    said = choice().notes
    numbers = settings.numbers
    facts = numbers | {"questions": questions_of(settings), "pairs": round(product(said.pairs, numbers))}
    found = [said.quick] if settings.quick else []
    found += [text.format(**facts) for text in said.first]
    inside = [f"{name} {_signed(one)}" for name, one in differences.items() if _spans_zero(one["ci"])]
    outside = [f"{name} {_signed(one)}" for name, one in differences.items() if not _spans_zero(one["ci"])]
    each = [f"{name} {said.each.scale * _at(arm, said.each.value)[said.each.key]:.1f}" for name, arm in arms.items()]
    unused = [name for name, arm in arms.items() if arm["latents"] and not _used(arm)]
    broken = [text for name, arm in arms.items() for text in _broken(name, arm)]
    for text, filling in (
        (said.within, "; ".join(inside)),
        (said.beyond, "; ".join(outside)),
        (said.each.text, ", ".join(each)),
        (said.unused, ", ".join(unused)),
        (said.broken, "; ".join(broken)),
    ):
        if filling:
            found.append(text.format(found=filling))
    return [*found, *said.last]


def _at(arm: Json, place: Sequence[str]) -> Any:
    """What stands at a place among the numbers of an arm; None where there is no such place."""
    found: Any = arm
    for key in place:
        found = found.get(key) if found is not None else None
    return found


def _used(arm: Json) -> bool:
    """Whether foreign latents change what is answered beyond chance, lost formats aside."""
    if any(beyond_noise(arm[name]) for name in EFFECTS if name != "help"):
        return True
    return any(arm[name] is not None and not _spans_zero(arm[name]["ci"]) for name in choice().notes.use)


def _broken(name: str, arm: Json) -> list[str]:
    """Conditions under which clearly fewer replies can be read than with own latents."""
    own = arm["five_task_mean"]["coverage"]
    cells = {title: arm[effect]["read"] for effect, title in choice().notes.conditions.items() if arm[effect]}
    return [
        f"{name} {title} ({read:.0f} % read, {own:.0f} % own)" for title, read in cells.items() if read < own - _LOST
    ]


def _spans_zero(ci: Sequence[float | None]) -> bool:
    low, high = ci
    return low is None or high is None or low <= 0 <= high


def _signed(one: Json) -> str:
    low, high = one["ci"]
    return f"{one['gain']:+.1f} [{low:+.1f}, {high:+.1f}]"


# ---------------------------------------------------------------------- table


def table(summary: Mapping[str, Any], width: int = 132) -> Table:
    """The closing table: a row for each arm, or, where the terminal is too narrow for that, a column."""
    chosen, quick = choice(), summary["settings"]["quick"]
    title = "The demo in numbers, 95 % intervals in brackets" + (" (quick: they mean nothing)" if quick else "")
    rows = [["", *(column.heading for column in chosen.table)]]
    rows += [[name, *(_cell(arm, column) for column in chosen.table)] for name, arm in summary["arms"].items()]
    if width < _WIDE:
        rows = [list(row) for row in zip(*rows, strict=True)]
    made = Table(title=title, title_justify="left", caption=chosen.legend, caption_justify="left", box=SIMPLE_HEAD)
    for number, name in enumerate(rows[0]):
        made.add_column(name, justify="right" if number else "left", no_wrap=True)
    for row in rows[1:]:
        made.add_row(*row)
    return made


def _cell(arm: Json, column: Column) -> str:
    found = next((one for place in column.value if (one := _at(arm, place)) is not None), None)
    if found is None or found[column.key] is None:
        return "–"
    value, low, high = (column.form.format(column.scale * number) for number in (found[column.key], *found["ci"]))
    read = found.get(column.read) if column.read else None
    return f"{value}\n[{low}, {high}]" + ("" if read is None else f"\n{read:.0f} % read")
