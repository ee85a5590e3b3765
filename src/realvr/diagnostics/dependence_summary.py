"""The numbers of diagnostic ``dependence`` from its records. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from typing_extensions import TypedDict

from realvr.diagnostics import results
from realvr.diagnostics.numbers import by_number, columns, mean, rate
from realvr.diagnostics.replacements import REPLACEMENTS
from realvr.runs.journal import Record
from realvr.runs.records import Text


class Replaced(TypedDict):
    """The numbers of one replacement. ``probability`` has one entry for each k = 0 … K, ``utility`` one a latent."""

    questions: int
    probability: list[results.Mean]
    content_probability: list[results.Mean]
    drop: results.Mean
    """Probability at k = 0 minus that at k = K."""
    content_drop: results.Mean
    loss: results.Mean
    """Nats that the answer loses where all K are replaced."""
    summed: results.Mean
    """Sum of the utilities of a question. Far below the loss, latents hold the same; far above, each is needed."""
    utility: list[results.Mean]
    before_last: results.Mean
    """Mean utility of latents before the last box, where boxes are a trail."""
    on_last: results.Mean
    """The same of latents on the last box, where several are."""
    only_last: results.Mean
    """Utility of the latent on the last box, where it is the only one."""


class Group(TypedDict):
    """Questions with one value of the tag."""

    questions: int
    utility: dict[Text, list[results.Mean]]
    loss: dict[Text, results.Mean]


class Summary(TypedDict):
    """``dependence.json``."""

    questions: int
    latents: int
    by: Text
    readout: list[results.Mean]
    replacements: dict[Text, Replaced]
    groups: dict[Text, Group]
    donors_same_answer: results.Rate


def summarise_dependence(records: Sequence[Record], by: str) -> dict[str, Any]:
    """Means over questions, each with a bootstrap interval; ``by`` is the tag of their groups."""
    good = [record for record in records if record["error"] is None]
    donors = [record["donor_same"] for record in good if record["donor_same"] is not None]
    groups = sorted({record["group"] for record in good} - {""}, key=by_number)
    return {
        "questions": len(good),
        "latents": max((record["latents"] for record in good), default=0),
        "by": by,
        "readout": columns([record["readout"] for record in good]),
        "replacements": {kind: _replaced(good, kind) for kind in REPLACEMENTS},
        "groups": {group: _group([one for one in good if one["group"] == group]) for group in groups},
        "donors_same_answer": rate(sum(donors), len(donors)),
    }


def _replaced(records: Sequence[Record], kind: str) -> dict[str, Any]:
    known = [record for record in records if record["utility"][kind] is not None]
    whole, content = ([probabilities(record, kind, name) for record in known] for name in ("loss", "content"))

    def over(chosen: Sequence[list[float]]) -> dict[str, Any]:
        return mean([math.fsum(values) / len(values) for values in chosen if values])

    trails = [(record["utility"][kind], record["boxes"]) for record in known if record["boxes"] is not None]
    return {
        "questions": len(known),
        "probability": columns(whole),
        "content_probability": columns(content),
        "drop": mean([row[0] - row[-1] for row in whole]),
        "content_drop": mean([row[0] - row[-1] for row in content]),
        "loss": mean([record["top"][kind]["loss"][-1] for record in known]),
        "summed": mean([math.fsum(record["utility"][kind]) for record in known]),
        "utility": columns([record["utility"][kind] for record in known]),
        "before_last": over([u[: boxes - 1] for u, boxes in trails]),
        "on_last": over([u[boxes - 1 :] for u, boxes in trails if boxes < len(u)]),
        "only_last": over([u[boxes - 1 :] for u, boxes in trails if boxes == len(u)]),
    }


def probabilities(record: Record, kind: str, name: str) -> list[float]:
    """By k = 0 … K: of the whole formatted answer (``loss``), or per content token."""
    before = record["logp" if name == "loss" else "content"]
    return [math.exp(before - loss) for loss in record["top"][kind][name]]


def _group(records: Sequence[Record]) -> dict[str, Any]:
    known = {kind: [record for record in records if record["utility"][kind] is not None] for kind in REPLACEMENTS}
    return {
        "questions": len(records),
        "utility": {kind: columns([record["utility"][kind] for record in known[kind]]) for kind in REPLACEMENTS},
        "loss": {kind: mean([record["top"][kind]["loss"][-1] for record in known[kind]]) for kind in REPLACEMENTS},
    }
