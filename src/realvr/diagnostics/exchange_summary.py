"""Latent exchange from its records: the numbers of tab:latent-exchange. Pure functions, no torch.

* donor-answer lift: frequency of the donor's right answer under a swap minus that under the sham, in points;
* donor-margin shift: mean of margin(swap) - margin(sham), in nats; the margin is the score of the donor's right answer
  minus that of the recipient's.

The two directions of a pair and the seeds of a random choice are not independent, so a pair is one value (their mean)
and intervals resample pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from realvr.answers import equal
from realvr.diagnostics.files import markdown
from realvr.diagnostics.numbers import controls, controls_line, mean, rate
from realvr.runs.journal import Record

_Row = tuple[str, str, int]
"""Condition, selector, k."""
_NAMES = {"contrast": "Contrast", "random": "Random", "full": "Full span"}


def record_key(record: Record) -> tuple[Any, ...]:
    """What a record answers: (pair, direction, condition, k, selector, seed)."""
    return tuple(record[name] for name in ("pair", "direction", "condition", "k", "selector", "seed"))


def summarise_exchange(records: Iterable[Record]) -> dict[str, Any]:
    """``{"rows": […], "contrast_minus_random": […], "sham": …, "edits": {edit: the first three}, "errors": n,
    "controls": …}``, and ``"parting"`` where the data says at which step the views part.

    A row has condition, selector, k, answers, donor_frequency, recipient_frequency, parse_coverage, donor_lift (points)
    and margin_shift (nats), the last two as mean, low, high, pairs; ``from_step`` where all latents from a step on were
    replaced. Pairs without both shams, as a run in progress may
    have them, are left out. ``controls`` says how many of the pairs lack the unrelated donor, and why.
    """
    everything = list(records)
    good = [record for record in everything if record["condition"] not in ("error", "no-control")]
    lacking = [record["no_control"] for record in everything if record["condition"] == "no-control"]
    edits = list(dict.fromkeys(record["edit"] for record in good))
    by_edit = {edit: _summary([record for record in good if record["edit"] == edit]) for edit in edits}
    errors = sum(record["condition"] == "error" for record in everything)
    found = controls(len({record["pair"] for record in good}), lacking)
    parting = _parting(good)
    more = {"parting": parting} if parting else {}
    return {**_summary(good), "edits": by_edit, "errors": errors, "controls": found, **more}


def _summary(records: Sequence[Record]) -> dict[str, Any]:
    sham = {(record["pair"], record["direction"]): record for record in records if record["condition"] == "sham"}
    groups: dict[_Row, list[Record]] = {}
    for record in records:
        if (record["pair"], record["direction"]) in sham:
            groups.setdefault((record["condition"], record["selector"], record["k"]), []).append(record)
    lifts = {row: _per_pair(found, sham, _lift) for row, found in groups.items()}
    shifts = {row: _per_pair(found, sham, _shift) for row, found in groups.items()}
    rows = [_row(row, found, lifts[row], shifts[row]) for row, found in sorted(groups.items(), key=_order)]
    return {
        "rows": rows,
        "contrast_minus_random": [
            {"k": k, "donor_lift": _between(lifts, k), "margin_shift": _between(shifts, k)}
            for k in sorted({k for _, selector, k in groups if selector == "contrast"})
        ],
        "sham": _sham(groups.get(("unmodified", "none", 0), []), sham),
    }


def _order(item: tuple[_Row, Any]) -> tuple[int, bool, int, str]:
    """Swaps from a step on stand behind the others, the earliest step first."""
    condition, selector, k = item[0]
    late = selector == "from-step"
    return ["unmodified", "sham", "swap", "unrelated"].index(condition), late, -k if late else k, selector


def _parting(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Swaps from step t on, by t minus the step at which the two views part."""
    sham = {(record["pair"], record["direction"]): record for record in records if record["condition"] == "sham"}
    groups: dict[int, list[Record]] = {}
    for record in records:
        if record.get("parts_at") is not None and (record["pair"], record["direction"]) in sham:
            groups.setdefault(record["positions"][0] - record["parts_at"], []).append(record)
    return [
        {
            "offset": offset,
            "answers": len(found),
            "donor_lift": mean(list(_per_pair(found, sham, _lift).values())),
            "margin_shift": mean(list(_per_pair(found, sham, _shift).values())),
        }
        for offset, found in sorted(groups.items())
    ]


def _follows(record: Record, truth: str) -> bool:
    return bool(equal(record["extracted"], record[truth], record.get("choices", ())))


def _donor(record: Record) -> bool:
    return _follows(record, "donor_truth")


def _lift(record: Record, sham: Record) -> float:
    return 100.0 * (_donor(record) - _donor(sham))


def _shift(record: Record, sham: Record) -> float:
    return record["margin"] - sham["margin"]


def _per_pair(
    records: Sequence[Record], sham: dict[Any, Record], value: Callable[[Record, Record], float]
) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for record in records:
        found.setdefault(record["pair"], []).append(value(record, sham[record["pair"], record["direction"]]))
    return {pair: sum(values) / len(values) for pair, values in found.items()}


def _row(row: _Row, records: Sequence[Record], lifts: dict[str, float], shifts: dict[str, float]) -> dict[str, Any]:
    def share(test: Callable[[Record], bool]) -> dict[str, Any]:
        return rate(sum(map(test, records)), len(records))

    return {
        "condition": row[0],
        "selector": row[1],
        "k": row[2],
        **({"from_step": records[0]["positions"][0]} if row[1] == "from-step" else {}),
        "answers": len(records),
        "donor_frequency": share(_donor),
        "recipient_frequency": share(lambda record: _follows(record, "recipient_truth")),
        "parse_coverage": share(lambda r: r["extracted"] is not None),
        "donor_lift": mean(list(lifts.values())),
        "margin_shift": mean(list(shifts.values())),
    }


def _between(values: dict[_Row, dict[str, float]], k: int) -> dict[str, Any]:
    contrast, random = (values.get(("swap", selector, k), {}) for selector in ("contrast", "random"))
    return mean([contrast[pair] - random[pair] for pair in contrast if pair in random])


def _sham(unmodified: Sequence[Record], sham: dict[Any, Record]) -> dict[str, Any]:
    """How well the sham stands for the unmodified answer: equal replies, largest difference of margins."""
    both = [(record, sham[record["pair"], record["direction"]]) for record in unmodified]
    differences = [abs(_shift(*one)) for one in both]
    equal = rate(sum(first["text"] == second["text"] for first, second in both), len(both))
    return {"equal_replies": equal, "largest_margin_difference": max(differences, default=None)}


# ---------------------------------------------------------------------- tables

HEADER = [
    "positions",
    "k",
    "donor-answer lift (pp)",
    "donor-margin shift (nats)",
    "donor answers",
    "own answers",
    "parsed",
]


def table_rows(summary: dict[str, Any]) -> list[list[str]]:
    """Cells of the table: sham first (its frequencies), then the swaps, then the unrelated donor."""
    rows = []
    for row in summary["rows"]:
        if row["condition"] == "unmodified":
            continue
        name = {"sham": "Sham", "unrelated": "Unrelated donor"}.get(row["condition"])
        name = name or (f"From step {row['from_step']}" if "from_step" in row else _NAMES[row["selector"]])
        shares = [row[key]["rate"] for key in ("donor_frequency", "recipient_frequency", "parse_coverage")]
        rows.append(
            [name, str(row["k"]), _signed(row["donor_lift"], 1), _signed(row["margin_shift"], 3)]
            + [f"{100 * share:.1f}" for share in shares]
        )
    return rows


def _signed(found: dict[str, Any], digits: int) -> str:
    if found["mean"] is None:
        return "–"
    return f"{found['mean']:+.{digits}f} [{found['low']:+.{digits}f}, {found['high']:+.{digits}f}]"


def csv_rows(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per edit (and ``all``) and condition."""
    rows = []
    for edit, found in {"all": summary, **summary["edits"]}.items():
        for row in found["rows"]:
            flat = {"edit": edit, **{key: row[key] for key in ("condition", "selector", "k", "answers")}}
            for key in ("donor_frequency", "recipient_frequency", "parse_coverage"):
                flat[key] = row[key]["rate"]
            for key in ("donor_lift", "margin_shift"):
                flat |= {key: row[key]["mean"], f"{key}_low": row[key]["low"], f"{key}_high": row[key]["high"]}
            rows.append(flat)
    return rows


def report(summary: dict[str, Any], title: str) -> str:
    """The whole summary in Markdown."""
    pairs = max((row["donor_lift"]["pairs"] for row in summary["rows"]), default=0)
    sham = summary["sham"]["equal_replies"]
    parts = [
        f"# Fixed-context latent exchange: {title}\n",
        markdown(HEADER, table_rows(summary)),
        f"{pairs} pairs, both directions. Lift and shift are differences from the sham, with 95 % bootstrap intervals "
        f"over pairs. {sham['count']} of {sham['of']} shams gave the reply of the unmodified span.\n",
    ]
    if line := controls_line(summary["controls"]):
        parts.append(f"{line}.\n")
    between = [
        [str(row["k"]), _signed(row["donor_lift"], 1), _signed(row["margin_shift"], 3)]
        for row in summary["contrast_minus_random"]
    ]
    if between:
        header = ["k", "lift: contrast minus random (pp)", "shift: contrast minus random (nats)"]
        parts += ["## Contrast against random, paired\n", markdown(header, between)]
    parting = [
        [f"{row['offset']:+d}", str(row["answers"]), _signed(row["donor_lift"], 1), _signed(row["margin_shift"], 3)]
        for row in summary.get("parting", ())
    ]
    if parting:
        header = ["t minus the step of parting", "answers", "donor-answer lift (pp)", "donor-margin shift (nats)"]
        parts += ["## From step t on, counted from where the trails part\n", markdown(header, parting)]
    for edit, found in summary["edits"].items():
        parts += [f"## {edit}\n", markdown(HEADER, table_rows(found))]
    return "\n".join(parts)
