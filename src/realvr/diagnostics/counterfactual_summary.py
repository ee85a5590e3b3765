"""Paired counterfactual behavior: the numbers of tab:complete-counterfactual and tab:diag-counterfactual, from records.

With C the pairs whose right answer changes and U the others, for each edit (app:complete-counterfactual):

* on C, each over |C|: accuracy on the original (A0) and on the edited view (A1), prediction change (both answers
  parse and differ), strict paired correct flip (both answers right);
* false flip over |U|: both answers parse and differ although the right answer does not change;
* parse coverage over all 2N views.

From app:diag-counterfactual, over all N pairs: "should flip" |C| / N, "model flip" (prediction change), "correct flip".
The paper says of the last that it "counts predictions that reach the edited ground-truth answer" and prints values
above the model flip, so it does not require a change; it is counted on C and given over N and over |C|.

A parse failure is never right and never a change. A rate without a denominator is None. Pure functions, no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from realvr.answers import equal
from realvr.diagnostics.files import markdown
from realvr.diagnostics.numbers import controls, controls_line, macro, mean, percent, rate
from realvr.runs.journal import Record

RATES = {
    "original_accuracy": "A0",
    "edited_accuracy": "A1",
    "prediction_change": "change",
    "strict_correct_flip": "correct flip",
    "false_flip": "false flip",
    "parse_coverage": "parsed",
}
DIAGNOSTIC_RATES = {
    "should_flip": "should flip",
    "model_flip": "model flip",
    "correct_flip_of_all": "edited answer reached, of all",
    "correct_flip_of_changed": "edited answer reached, of changed",
}
DISTANCES = ("latent", "latent_unrelated", "final", "final_unrelated")


def record_key(record: Record) -> tuple[str, str, str]:
    """What a record answers: (pair, protocol, first_span)."""
    return record["pair"], record["protocol"], record["first_span"]


def summarise_pairs(records: Iterable[Record], distances: Iterable[Record] = ()) -> dict[str, Any]:
    """``{"protocols": {name: {"edits": {edit: numbers}, "macro": …, "all": numbers}}, "distances": … or None}``.

    ``records`` are lines of counterfactual.jsonl, ``distances`` those of distances.jsonl. Protocols are named
    ``two-turn/keep``, ``two-turn/drop``, ``two-turn/none`` (a model without a span) and ``separate``. Beside
    distances, ``controls`` says how many of the measured pairs lack the unrelated picture, and why.
    """
    by_protocol: dict[str, list[Record]] = {}
    for record in records:
        name = record["protocol"]
        by_protocol.setdefault(name if name == "separate" else f"{name}/{record['first_span']}", []).append(record)
    summary: dict[str, Any] = {"protocols": {name: _protocol(found) for name, found in by_protocol.items()}}
    return summary | summarise_distances(list(distances))


def summarise_distances(records: Sequence[Record]) -> dict[str, Any]:
    """``{"distances": {edit: means} or None, "controls": …}`` from the lines of distances.jsonl."""
    lacking = [record["no_control"] for record in records if record.get("no_control")]
    measured = sum(record["error"] is None for record in records)
    return {"distances": _distances(records)} | ({"controls": controls(measured, lacking)} if records else {})


def _by_edit(records: Sequence[Record]) -> dict[str, list[Record]]:
    edits: dict[str, list[Record]] = {}
    for record in records:
        edits.setdefault(record["edit"], []).append(record)
    return edits


def _protocol(records: Sequence[Record]) -> dict[str, Any]:
    edits = {edit: numbers(found) for edit, found in _by_edit(records).items()}
    names = [*RATES, *DIAGNOSTIC_RATES]
    return {
        "edits": edits,
        "macro": {name: macro([found[name] for found in edits.values()]) for name in names},
        "all": numbers(records),
    }


def numbers(records: Sequence[Record]) -> dict[str, Any]:
    """Counts and rates of these pairs."""
    seen = [_outcome(record) for record in records]
    changed = [outcome for outcome in seen if outcome["should"]]
    unchanged = [outcome for outcome in seen if not outcome["should"]]
    inside, outside, total = len(changed), len(unchanged), len(seen)

    def count(outcomes: Sequence[dict[str, Any]], name: str) -> int:
        return sum(outcome[name] for outcome in outcomes)

    reached = count(changed, "right_1")
    return {
        "pairs": total,
        "changed": inside,
        "unchanged": outside,
        "original_accuracy": rate(count(changed, "right_0"), inside),
        "edited_accuracy": rate(reached, inside),
        "prediction_change": rate(count(changed, "changes"), inside),
        "strict_correct_flip": rate(count(changed, "both"), inside),
        "false_flip": rate(count(unchanged, "changes"), outside),
        "parse_coverage": rate(count(seen, "parsed"), 2 * total),
        "should_flip": rate(inside, total),
        "model_flip": rate(count(seen, "changes"), total),
        "correct_flip_of_all": rate(reached, total),
        "correct_flip_of_changed": rate(reached, inside),
        "errors": count(seen, "errors"),
    }


def _outcome(record: Record) -> dict[str, Any]:
    (first, second), (y0, y1) = record["extracted"], record["truths"]
    choices = record.get("choices", ())
    right_0, right_1 = bool(equal(first, y0, choices)), bool(equal(second, y1, choices))
    return {
        "should": not equal(y0, y1, choices),
        "right_0": right_0,
        "right_1": right_1,
        "both": right_0 and right_1,
        "changes": first is not None and second is not None and not equal(first, second, choices),
        "parsed": (first is not None) + (second is not None),
        "errors": sum(error is not None for error in record["errors"]),
    }


def _distances(records: Sequence[Record]) -> dict[str, Any] | None:
    if not records:
        return None
    groups = {**_by_edit(records), "all": records}
    return {edit: {name: mean(_values(found, name)) for name in DISTANCES} for edit, found in groups.items()}


def _values(records: Sequence[Record], name: str) -> list[float]:
    return [record[name] for record in records if record[name] is not None]


# ---------------------------------------------------------------------- tables


def table_rows(summary: dict[str, Any]) -> list[list[str]]:
    """Cells of the table of paired behavior: protocol, edit, |C|/|U|, then `RATES`."""
    rows = []
    for name, found in summary["protocols"].items():
        for edit, row in found["edits"].items():
            cells = [percent(row[key]) for key in RATES]
            rows.append([name, edit, f"{row['changed']} / {row['unchanged']}", *cells])
        rows.append([name, "macro", "", *(percent(found["macro"][key], counts=False) for key in RATES)])
    return rows


HEADER = ["protocol", "edit", "C / U", *RATES.values()]
LEGEND = (
    "Percent, counts in parentheses. C: pairs whose right answer the edit changes, U: the others. A0, A1: right on the "
    "original and on the edited picture. change: both answers can be read and differ; correct flip: both are right; "
    "false flip: a change in U. A0, A1, change and correct flip are over C, false flip over U, parsed over all views; "
    "macro is the mean over edits. 95 % intervals are in the CSV and JSON files."
)
"""What the columns are."""


def csv_rows(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per protocol, edit and rate."""
    rows = []
    for name, found in summary["protocols"].items():
        groups = {**found["edits"], "all": found["all"], "macro": found["macro"]}
        for edit, row in groups.items():
            for key in (*RATES, *DIAGNOSTIC_RATES):
                rows.append({"protocol": name, "edit": edit, "number": key, **row[key]})
    for edit, row in (summary["distances"] or {}).items():
        for key in DISTANCES:
            found = dict(row[key])
            rows.append({"protocol": "spans", "edit": edit, "number": key, "rate": found.pop("mean"), **found})
    return rows


def report(summary: dict[str, Any], title: str) -> str:
    """The whole summary in Markdown."""
    parts = [f"# Paired counterfactual behavior: {title}\n", markdown(HEADER, table_rows(summary))]
    parts.append(f"{LEGEND}\n")
    names = ["protocol", "edit", *DIAGNOSTIC_RATES.values()]
    rows = [
        [name, edit, *(percent(row[key]) for key in DIAGNOSTIC_RATES)]
        for name, found in summary["protocols"].items()
        for edit, row in found["edits"].items()
    ]
    parts += ["## Sensitivity\n", markdown(names, rows)]
    if summary["distances"]:
        names = ["edit", "LVR distance", "to an unrelated image", "final distance", "to an unrelated image"]
        rows = [[edit, *(_distance(row[key]) for key in DISTANCES)] for edit, row in summary["distances"].items()]
        parts += ["## Cosine distances, independent spans\n", markdown(names, rows)]
    if line := controls_line(summary.get("controls")):
        parts.append(f"{line}.\n")
    return "\n".join(parts)


def _distance(found: dict[str, Any]) -> str:
    return "–" if found["mean"] is None else f"{found['mean']:.6f}"
