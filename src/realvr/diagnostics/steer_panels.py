"""What the case browser shows of one steered question: the answer for every moved latent and its controls. From
records, no torch."""

from __future__ import annotations

from collections.abc import Sequence

from realvr.diagnostics.pair_panels import named, told
from realvr.runs.journal import Record
from realvr.widgets import DASH, number
from realvr.widgets.browser import Facts, Panel, View


def steer_panel(records: Sequence[Record]) -> Panel | None:
    """A latent moved to another place whose answer is known."""
    rows = []
    for record in _moved(records):
        later = record["later"]["moved"]
        answers = dict(record["extracted"])
        if "random" in record:  # records of earlier versions have none
            answers["random"] = record["random"]["extracted"]
        meanings = {record["new_truth"]: "follows", record["old_truth"]: "keeps"}
        cells = [
            told(answers[name], meanings, record["choices"]) if name in answers else DASH
            for name in ("moved", "own_place", "random")
        ]
        rows.append([f"z_{record['step']}", _place(record), *cells, f"{sum(later)} of {len(later)}" if later else DASH])
    header = ("", "moved to", "moved", "own place", "random", "later latents on the new trail")
    note = "Follows: the answer that belongs to the new place. Keeps: the question's own. Random: a vector as long."
    return _panel(records, rows, header, note=note)


def steer_edit_panel(records: Sequence[Record]) -> Panel | None:
    """A latent made of the edited object, while the model sees the original picture."""
    rows = []
    for record in _moved(records):
        meanings = {record["new_truth"]: "follows", record["old_truth"]: "keeps"}
        names = ("edited", "original", "random", "free")
        answers = [told(record["extracted"][name], meanings, record["choices"]) for name in names]
        rows.append([f"z_{record['step']}", *answers, number(record["toward"]["edited"], 3, sign=True)])
    header = ("", "edited object", "same place", "random", "free", "later latents toward the edit")
    note = "Follows: the edited picture's answer. Same place: as it is in the original. Free: nothing is replaced. "
    note += "Toward the edit: gain in cosine to the latents of the edited view."
    return _panel(records, rows, header, "original", note)


def steer_region_panel(records: Sequence[Record]) -> Panel | None:
    """A latent put to another region, whose answer is not known."""
    rows = []
    for record in _moved(records):
        answers = [
            named(record["extracted"][name], record["choices"], "right" if record["right"][name] else "wrong")
            for name in ("moved", "own_place", "random", "free")
        ]
        rows.append([f"z_{record['step']}", _place(record), *answers, number(record["toward"]["moved"], 3, sign=True)])
    header = ("", "moved to", "moved", "own box", "random", "free", "later latents toward it")
    note = "Own box: the evidence itself. Free: nothing is replaced. Toward it: gain in cosine to the region."
    return _panel(records, rows, header, note=note)


def _moved(records: Sequence[Record]) -> list[Record]:
    found = [one for one in records if one["error"] is None and one["skipped"] is None]
    return sorted(found, key=lambda one: int(one["step"]))


def _place(record: Record) -> str:
    """The middle of the place in percent of the picture, and how far that is."""
    x0, y0, x1, y1 = record["box"]
    where = f"x {50 * (x0 + x1):.0f} %, y {50 * (y0 + y1):.0f} %"
    if record.get("cell") is not None:
        where = f"row {record['cell'][0] + 1}, column {record['cell'][1] + 1}"
    return where if record.get("distance") is None else f"{where} ({record['distance']} away)"


def _panel(
    records: Sequence[Record],
    rows: Sequence[Sequence[str]],
    header: Sequence[str],
    view: View | None = None,
    note: str = "",
) -> Panel | None:
    """The table, and below it why some steps are not in it."""
    left = [
        f"z_{one['step']}: {one['skipped']}" for one in records if one["error"] is None and one["skipped"] is not None
    ]
    if rows:
        return Panel([Facts(rows, header, view)], note=" ".join([note, *(f"{line}." for line in left)]))
    return Panel([Facts([[line] for line in left], view=view)]) if left else None
