"""What a reader must know before believing the numbers of a demo, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from realvr.demo.choice import choice, product
from realvr.demo.leading import at
from realvr.demo.plan import DemoSettings, questions_of
from realvr.evaluation.effects import EFFECTS, beyond_noise

Json = dict[str, Any]
_LOST = 5
"""Points by which fewer replies must be readable before a note says so."""


def notes(settings: DemoSettings, arms: Json, differences: Json) -> list[str]:
    """What a reader must know before believing a number."""
    said = choice().notes
    numbers = settings.numbers
    facts = numbers | {"questions": questions_of(settings), "pairs": round(product(said.pairs, numbers))}
    found = [said.quick] if settings.quick else []
    found += [text.format(**facts) for text in said.first]
    for over in dict.fromkeys(one["over"] for one in differences.values()):
        found += _compared(over, [one for one in differences.values() if one["over"] == over])
    values = {name: at(arm, (*said.each.value, said.each.key)) for name, arm in arms.items()}
    each = [f"{name} {said.each.scale * value:.1f}" for name, value in values.items() if value is not None]
    unused = [name for name, arm in arms.items() if _measured(arm) and not _used(arm)]
    broken = [text for name, arm in arms.items() for text in _broken(name, arm)]
    for text, filling in (
        (said.each.text, ", ".join(each)),
        (said.unused, ", ".join(unused)),
        (said.broken, "; ".join(broken)),
    ):
        if filling:
            found.append(text.format(found=filling))
    return [*found, *said.last]


def _compared(over: str, differences: Sequence[Json]) -> list[str]:
    """Comparisons over the same questions: those within noise, and those beyond it."""
    said, found = choice().notes, []
    for text, within in ((said.within, True), (said.beyond, False)):
        listed = [
            f"{one['second']} minus {one['first']} {_signed(one)}" for one in differences if _noise(one) == within
        ]
        if listed:
            found.append(text.format(over=over[:1].upper() + over[1:], found="; ".join(listed)))
    return found


def _measured(arm: Json) -> bool:
    """Whether it was asked with latents that are not its own."""
    return any(arm[name] is not None for name in EFFECTS)


def _used(arm: Json) -> bool:
    """Whether foreign latents change what is answered beyond chance, lost formats aside."""
    return any(beyond_noise(arm[name]) for name in EFFECTS if name != "help")


def _broken(name: str, arm: Json) -> list[str]:
    """Conditions under which clearly fewer replies can be read than with own latents."""
    own = arm["five_task_mean"]["coverage"]
    cells = {title: arm[effect]["read"] for effect, title in choice().notes.conditions.items() if arm[effect]}
    return [
        f"{name} {title} ({read:.0f} % read, {own:.0f} % own)" for title, read in cells.items() if read < own - _LOST
    ]


def _noise(one: Json) -> bool:
    low, high = one["ci"]
    return low is None or high is None or low <= 0 <= high


def _signed(one: Json) -> str:
    # Nothing is "-0.0": a number that rounds to zero is a positive zero.
    gain, low, high = (round(value, 1) + 0.0 for value in (one["gain"], *one["ci"]))
    return f"{gain:+.1f} [{low:+.1f}, {high:+.1f}]"
