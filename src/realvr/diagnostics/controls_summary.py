"""Controls from their records: accuracy, readable share and changed answers of each condition. Pure, no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from typing_extensions import TypedDict

from realvr.answers import equal
from realvr.diagnostics.numbers import by_number, mean, rate
from realvr.diagnostics.results import Mean, Rate
from realvr.runs.journal import Record
from realvr.runs.records import Text

CONDITIONS: dict[str, str] = {
    "free": "own latents",
    "sham": "own latents, put back",
    "another": "another sample's",
    "position-mean": "mean of the position",
    "repeated": "own mean, repeated",
    "noise": "noise of the same norm",
    "dummies": "dummy tokens",
    "removed": "slots removed",
    "no-span": "no span",
    "image-hidden": "image hidden from the answer",
    "latents-only": "only latents see the image",
}
"""What fills the span, or what is taken away, in the words of tables and figures."""


class Condition(TypedDict):
    """The answers under one condition."""

    condition: Text
    questions: int
    accuracy: Rate
    readable: Rate
    accuracy_readable: Rate
    """Right answers of those that can be read."""
    difference: Mean
    """Right or not (1, 0) minus the same with the own latents, question by question."""
    changed: Rate
    """Answers that differ from the one with the own latents, of questions with both readable."""


class Sham(TypedDict):
    """Own latents put back: whatever differs is the arithmetic of the splice."""

    equal_replies: Rate


class Controls(TypedDict):
    """``controls.json``."""

    latents: int
    questions: int
    errors: int
    dummy: Text
    seed: int
    guessing: Mean
    """One over the number of options, of questions that have options."""
    conditions: list[Condition]
    sham: Sham
    by: Text
    groups: dict[Text, list[Condition]]
    """The same of the questions with each value of a tag; empty where none has it."""


def summarise_controls(records: Iterable[Record], dummy: str, seed: int, by: str = "") -> dict[str, Any]:
    """Numbers of each condition over the questions that have it."""
    everything = list(records)
    good = [record for record in everything if record["error"] is None]
    groups = sorted({record["group"] for record in good} - {""}, key=by_number)
    put_back = [record for record in good if "sham" in record["texts"]]
    same = sum(record["texts"]["sham"] == record["texts"]["free"] for record in put_back)
    return {
        "latents": max((record["latents"] for record in good), default=0),
        "questions": len(good),
        "errors": len(everything) - len(good),
        "dummy": dummy,
        "seed": seed,
        "guessing": mean([1 / len(record["choices"]) for record in good if record["choices"]]),
        "conditions": _conditions(good),
        "sham": {"equal_replies": rate(same, len(put_back))},
        "by": by,
        "groups": {group: _conditions([record for record in good if record["group"] == group]) for group in groups},
    }


def _conditions(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Those that any of the records has, in the order of tables."""
    having = {name: [record for record in records if name in record["texts"]] for name in CONDITIONS}
    return [_condition(name, found) for name, found in having.items() if found]


def _condition(name: str, records: Sequence[Record]) -> dict[str, Any]:
    right = [_right(record, name) for record in records]
    free = [_right(record, "free") for record in records]
    readable = [record["extracted"][name] is not None for record in records]
    both = [record for record in records if None not in (record["extracted"][name], record["extracted"]["free"])]
    changed = sum(
        not equal(record["extracted"][name], record["extracted"]["free"], record["choices"]) for record in both
    )
    return {
        "condition": name,
        "questions": len(records),
        "accuracy": rate(sum(right), len(records)),
        "readable": rate(sum(readable), len(records)),
        "accuracy_readable": rate(sum(right), sum(readable)),
        "difference": mean([float(one) - float(own) for one, own in zip(right, free, strict=True)]),
        "changed": rate(changed, len(both)),
    }


def _right(record: Record, condition: str) -> bool:
    return bool(equal(record["extracted"][condition], record["truth"], record["choices"]))


def condition_of(summary: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """The numbers of one condition; None where it was not measured."""
    return next((one for one in summary["conditions"] if one["condition"] == name), None)
