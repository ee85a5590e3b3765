"""What the case browser shows of one pair: its answers, distances, swapped and pushed latents. From records, no torch.

Each function takes what one diagnostic has recorded of a pair. Where the model saw one picture of it, the part belongs
to that picture. Records of earlier versions may lack a field; what it would have said is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from realvr.answers import equal
from realvr.answers.text import LETTERS
from realvr.runs.journal import Record
from realvr.widgets import number, significant
from realvr.widgets.browser import Bars, Facts, Panel, Part, Series, View, short

RECIPIENTS: dict[str, View] = {"edited-to-original": "original", "original-to-edited": "edited"}
"""The picture that stays, by the direction of an exchange."""
_PROTOCOLS = {
    "two-turn/keep": "one conversation, span kept",
    "two-turn/drop": "one conversation, span dropped",
    "two-turn/none": "one conversation",
    "separate": "two conversations",
}
_SHARE = "share of its norm"


def told(said: str | None, meanings: Mapping[str, str], choices: Sequence[str], other: str = "neither") -> str:
    """An answer and what it is, of ``meanings``: words by answer, ``other`` for the rest. ``B, blue (right)``."""
    words = (words for answer, words in meanings.items() if equal(said, answer, choices))
    return named(said, choices, next(words, other))


def named(said: str | None, choices: Sequence[str], words: str) -> str:
    """An answer with the text of its option, and ``words`` on it."""
    if said is None:
        return "not readable"
    place = LETTERS.find(said) if choices and len(said) == 1 else -1
    return f"{said}, {choices[place]} ({words})" if 0 <= place < len(choices) else f"{said} ({words})"


def counterfactual_panel(records: Sequence[Record]) -> Panel | None:
    """Both answers under every protocol."""
    rows = []
    for record in records:
        named = record["protocol"] if record["protocol"] == "separate" else f"two-turn/{record['first_span']}"
        rows.append([_PROTOCOLS.get(named, named), *_answers(record)])
    return Panel([Facts(rows, ("asked in", "original picture", "edited picture"))]) if rows else None


def _answers(record: Record) -> list[str]:
    """The answers to the original and to the edited picture."""
    choices, (first, second) = record.get("choices", ()), record["truths"]
    same = bool(equal(first, second, choices))
    views = (
        {first: "right"} if same else {first: "right", second: "right for the edited one"},
        {second: "right"} if same else {second: "right", first: "right for the original"},
    )
    errors = record.get("errors") or [None, None]
    return [
        told(said, meanings, choices, "wrong") if error is None else "cannot be read"
        for said, meanings, error in zip(record["extracted"], views, errors, strict=True)
    ]


def sensitivity_panel(record: Record) -> Panel | None:
    """Both answers, each picture on its own, and how far the states lie apart."""
    if record["error"] is not None:
        return None
    answers = Facts([list(row) for row in zip(("original picture", "edited picture"), _answers(record), strict=True)])
    return Panel([answers, *_distances(record)])


def distances_panel(record: Record) -> Panel | None:
    """How far the edit moves the states, with the distance to an unrelated picture."""
    parts = _distances(record) if record["error"] is None else []
    return Panel(parts) if parts else None


def _distances(record: Record) -> list[Part]:
    names = {"latent": "mean of the latents", "per_slot": "slot by slot", "final": "state before the answer"}
    rows = [
        [words, significant(record[name]), significant(record.get(f"{name}_unrelated"))]
        for name, words in names.items()
        if record.get(name) is not None
    ]
    return [Facts(rows, ("cosine distance to", "the edited picture", "an unrelated one"))] if rows else []


def exchange_panel(records: Sequence[Record]) -> Panel | None:
    """For each recipient: credit of its latents, margin from step t on, and the answer under every swap."""
    parts: list[Part] = []
    for direction, view in RECIPIENTS.items():
        found = [one for one in records if one["direction"] == direction]
        sham = next((one for one in found if one["condition"] == "sham"), None)
        if sham is not None:
            parts += [*_swap_bars(found, sham, view), _swap_table(found, sham, view)]
    note = "The picture stays. Margin: log-probability of the other picture's right answer minus that of the own one."
    return Panel(parts, note=f"{note} Its shift is from the sham, which puts the own latents back.") if parts else None


def _swap_bars(records: Sequence[Record], sham: Record, view: View) -> list[Part]:
    series = []
    contrast = next((one["contrast"] for one in records if one.get("contrast")), None)
    if contrast is not None:
        about = "readout of the own right answer minus that of the other picture's, where it is positive"
        series.append(Series("contrast", [short(value) for value in contrast], "share of attention", about))
    late = {one["positions"][0]: one for one in records if one["selector"] == "from-step"}
    if late:
        late |= {one["positions"][0]: one for one in records if (one["condition"], one["selector"]) == ("swap", "full")}
        shifts = [_shift(late.get(step), sham) for step in range(1, sham["latents"] + 1)]
        parted = next((one["parts_at"] for one in late.values() if one.get("parts_at") is not None), None)
        about = "margin shift with all latents from this one on taken from the other picture"
        about += f"; the pictures part at step {parted}" if parted is not None else ""
        series.append(Series("swapped from here on", shifts, "nats", about))
    return [Bars(series, view=view)] if series else []


def _shift(record: Record | None, sham: Record) -> float | None:
    return None if record is None else short(record["margin"] - sham["margin"])


def _swap_table(records: Sequence[Record], sham: Record, view: View) -> Facts:
    meanings = {sham["recipient_truth"]: "own", sham["donor_truth"]: "the other picture's"}
    rows, random = [], dict[int, list[Record]]()
    for record in records:
        if record["selector"] == "random":
            random.setdefault(record["k"], []).append(record)
        elif (words := _swap_words(record)) is not None:
            answer = told(record["extracted"], meanings, record.get("choices", ()))
            rows.append([words, answer, number(_shift(record, sham), 2, sign=True)])
    for k, found in random.items():
        follow = sum(bool(equal(one["extracted"], one["donor_truth"], one.get("choices", ()))) for one in found)
        shift = sum(one["margin"] for one in found) / len(found) - sham["margin"]
        said = f"the other picture's {_times(follow)}"
        rows.append([f"{k} at random, {_times(len(found))}", said, number(shift, 2, sign=True)])
    return Facts(rows, ("replaced latents", "answer", "margin shift, nats"), view)


def _times(count: int) -> str:
    return "1 time" if count == 1 else f"{count} times"


def _swap_words(record: Record) -> str | None:
    """What was replaced; None for a record that is no swap."""
    places = ", ".join(str(place) for place in sorted(record.get("positions", ())))
    words = {
        ("sham", "full"): "none (sham)",
        ("swap", "contrast"): f"largest contrast: {places}",
        ("swap", "from-step"): f"from {places.partition(',')[0]} on",
        ("swap", "full"): "all",
        ("unrelated", "full"): "all, of an unrelated picture",
    }
    return words.get((record["condition"], record["selector"]))


def residual_panel(record: Record) -> Panel | None:
    """For each recipient: how far the other picture's latents are, and answer and margin by alpha."""
    parts: list[Part] = []
    for direction, view in RECIPIENTS.items():
        found = record["directions"].get(direction)
        if record["error"] is not None or found is None:
            continue
        steps = [short(step / norm) if norm else None for step, norm in zip(found["step"], found["norm"], strict=True)]
        about = "distance of this latent from the other picture's"
        parts.append(Bars([Series("step to the other picture", steps, _SHARE, about)], view=view))
        parts += _alphas(found, record["alphas"], record.get("choices", ()), view)
    return Panel(parts, note="The picture stays; its latents become z + α (z′ − z).") if parts else None


def _alphas(found: Mapping[str, Any], alphas: Sequence[float], choices: Sequence[str], view: View) -> list[Part]:
    meanings = {found["recipient_truth"]: "own", found["donor_truth"]: "the other picture's"}
    curves = [("toward the other picture", found["inject"])]
    curves += [
        (f"random direction {n}" if n > 1 else "random direction", one) for n, one in enumerate(found["random"], 1)
    ]
    labels = [f"α = {significant(alpha, 6)}" for alpha in alphas]
    series = [
        Series(
            name, [short(value - curve["margin"][0]) for value in curve["margin"]], "nats", "margin shift from α = 0"
        )
        for name, curve in curves
    ]
    rows = [
        [label, *(told(curve["extracted"][place], meanings, choices) for _, curve in curves)]
        for place, label in enumerate(labels)
    ]
    return [Bars(series, labels, view), Facts(rows, ("", *(name for name, _ in curves)), view)]
