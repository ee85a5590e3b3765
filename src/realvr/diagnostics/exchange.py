"""Fixed-context latent exchange (app:latent-exchange): does an edit reach the answer through the latent span alone?

For each pair whose right answer changes, the spans of both views are generated independently. A recipient keeps its
picture, question, markers and unselected latents; the selected latents are replaced by the donor's at the same
positions; the mixed span enters as recorded inputs, nothing is regenerated, and the answer is decoded greedily. Both
directions are tested. `measuring.exchange` does it, `exchange_summary` has the numbers. Conditions:

* ``unmodified``: the answer after the free-running span itself, as a check of the sham;
* ``sham``: the recipient's own recorded latents spliced in, the reference of every difference;
* ``swap``: k positions, chosen by ``contrast`` or at ``random`` (several seeds), or all K (``full``);
* ``unrelated``: all K from another pair's picture under the recipient's question.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from realvr.diagnostics import exchange_summary, results
from realvr.diagnostics.base import Diagnostic, Highlight, Needs, Samples, Shown
from realvr.diagnostics.counterfactual import AnswerSettings
from realvr.diagnostics.exchange_summary import record_key, summarise_exchange
from realvr.diagnostics.model import Model
from realvr.diagnostics.numbers import controls_line
from realvr.diagnostics.pairs import Pair, unrelated
from realvr.errors import UserError
from realvr.evaluation.published import published
from realvr.runs.journal import Record
from realvr.widgets import DASH, Cell, Figures, Key, Table, Text, Widget, average, number, share
from realvr.widgets.charts import Line, Point, lines

USUAL_KS = (1, 2, 4, 8)
DIRECTIONS = ("edited-to-original", "original-to-edited")


@dataclass(frozen=True)
class Condition:
    """What is replaced. ``k`` positions; ``seed`` of a random choice."""

    condition: str
    selector: str = "none"
    k: int = 0
    seed: int | None = None


@dataclass(frozen=True)
class Swaps:
    """The conditions of a run."""

    latents: int
    ks: tuple[int, ...] = USUAL_KS
    """Numbers of replaced positions; those above K are left out and K itself is always there."""
    seeds: int = 3
    """Random selections per k: seeds 0, 1, …"""

    def conditions(self, control: bool = True) -> list[Condition]:
        """All conditions of one recipient; ``control`` is whether there is an unrelated picture."""
        every = [Condition("unmodified"), Condition("sham", "full", self.latents)]
        for k in sorted({k for k in self.ks if k < self.latents}):
            every.append(Condition("swap", "contrast", k))
            every += [Condition("swap", "random", k, seed) for seed in range(self.seeds)]
        every.append(Condition("swap", "full", self.latents))
        return [*every, Condition("unrelated", "full", self.latents)] if control else every


class ExchangeSettings(AnswerSettings):
    """What is swapped, and how answers are read."""

    k: str | None = Field(
        default=None,
        description="How many positions are replaced, separated by commas; by default those of 1,2,4,8 that the span "
        "has. The whole span is always replaced as well.",
    )
    seeds: int = Field(default=3, description="Random selections of positions for each k.")
    rows: int = Field(
        default=64, description="Spans decoded together; each holds a copy of its prompt's keys and values."
    )

    @field_validator("seeds", "rows")
    @classmethod
    def _positive(cls, value: int, info: Any) -> int:
        if value < 1:
            raise UserError(f"--{info.field_name} is {value}: it must be at least 1")
        return value

    @field_validator("k")
    @classmethod
    def _numbers(cls, value: str | None) -> str | None:
        if value is not None:
            parse_ks(value)
        return value

    def positions(self, latents: int) -> tuple[int, ...]:
        """How many positions are replaced: what was asked for, or those of the usual that a span of K slots has."""
        if self.k is None:
            return tuple(k for k in USUAL_KS if k <= latents)
        asked = parse_ks(self.k)
        if asked[-1] > latents:
            raise UserError(
                f"--k asks for {asked[-1]} positions, but the span has K = {latents} slots: lower it, or leave --k out"
            )
        return asked


def parse_ks(text: str) -> tuple[int, ...]:
    """``1,2,4`` as numbers, ascending, each once."""
    try:
        parts = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise UserError(f"--k is {text!r}: write numbers of positions separated by commas, such as 1,2,4") from None
    if parts[0] < 1:
        raise UserError(f"--k is {text!r}: at least one position is replaced")
    return tuple(parts)


def about_pair(pair: Pair, condition: str, error: str | None, **more: Any) -> Record:
    """A record about a whole pair: that it could not be read, or that it has no unrelated control."""
    about = {"pair": pair.id, "edit": pair.edit, "direction": "", **asdict(Condition(condition))}
    return about | more | {"error": error}


def _full_lift(summary: Any) -> Cell:
    full = [row for row in summary["rows"] if row["condition"] == "swap" and row["selector"] == "full"]
    return average(full[0]["donor_lift"], 1) if full else Cell(DASH)


class Exchange(Diagnostic[ExchangeSettings]):
    """Latents are swapped between the two views of a pair; the answer may follow them."""

    name = "exchange"
    title = "Latent exchange"
    question = "Does the answer follow the latents while the picture stays?"
    reading = (
        "Selected latents are replaced by those of the other view of the pair, the donor. Lift: how much more often "
        "the donor's answer is given. Margin shift: how much its mean log-probability gains on the own answer's. All "
        "differences are from the sham, which puts back the recipient's own latents."
    )
    needs = Needs(pairs=True, span=True)
    paper = (
        "a donor-answer lift of +46.8 points for ReaLVR and +5.8 for LVR-RL with the whole span, +0.2 and −0.3 from an "
        "unrelated donor (tab:latent-exchange)"
    )
    Settings = ExchangeSettings
    shape = results.Exchange
    command = "realvr exchange MODEL PAIRS --out DIR"
    batch = 4
    unit = "pairs"
    order = 30
    highlights = (
        Highlight(
            "donor-answer lift (points)",
            _full_lift,
            "Donor-answer lift: the whole span taken from the other view.",
        ),
    )

    def select(self, items: Sequence[Pair], data: Path) -> list[Pair]:
        """Pairs whose right answer changes."""
        changed = [pair for pair in items if pair.changed]
        if not changed:
            raise UserError(
                f"{data}: the right answer changes in none of its {len(items)} pairs; there is nothing to swap"
            )
        return changed

    def settle(self, model: Model) -> None:
        self._swaps = Swaps(model.latents, self.settings.positions(model.latents), self.settings.seeds)

    def prepare(self, model: Model, samples: Sequence[Pair]) -> None:
        self._controls = {pair.id: other for pair, other in zip(samples, unrelated(samples), strict=True)}

    def measure(self, model: Model, samples: Samples) -> Iterable[Record]:
        from realvr.diagnostics.measuring.exchange import ExchangeOptions, exchange_pairs

        settings, controls = self.settings, [self._controls[pair.id] for pair in samples]
        more = {"policy": settings.policy, "sampling": model.sampling, "rows": settings.rows}
        options = ExchangeOptions(**vars(self._swaps), **more)
        return exchange_pairs(model.backbone, list(samples), controls, options)

    def key(self, record: Record) -> Hashable:
        return record_key(record)

    def keys(self, item: Pair) -> list[Hashable]:
        return self._keys(item, control=True)

    def _keys(self, pair: Pair, control: bool) -> list[Hashable]:
        conditions = self._swaps.conditions(control)
        return [record_key({"pair": pair.id, "direction": d, **asdict(c)}) for d in DIRECTIONS for c in conditions]

    def complete(self, item: Pair, done: Collection[Hashable]) -> bool:
        """A pair that cannot be read has one record that says so; one without a control has one instead of them."""
        if record_key(about_pair(item, "error", None)) in done:
            return True
        lacking = record_key(about_pair(item, "no-control", None)) in done
        return all(key in done for key in self._keys(item, control=not lacking))

    def fixed(self) -> dict[str, Any]:
        settings = self.settings
        return {"policy": settings.policy, "k": list(self._swaps.ks), "seeds": settings.seeds}

    def summarise(self, records: Sequence[Record]) -> dict[str, Any]:
        return summarise_exchange(records)

    def notes(self, records: Sequence[Record], summary: Any, count: int) -> list[str]:
        line = controls_line(summary.get("controls"))
        return [*super().notes(records, summary, count), *([line] if line else [])]

    def numbers(self, summary: Any | None) -> dict[str, Any]:
        def mean(row: Any, name: str) -> dict[str, Any] | None:
            if row is None:
                return None
            return {"mean": row[name]["mean"], "ci": [row[name]["low"], row[name]["high"]], "n": row[name]["pairs"]}

        full = {row["condition"]: row for row in (summary or {"rows": ()})["rows"] if row["selector"] == "full"}
        swap, other = full.get("swap"), full.get("unrelated")
        return {
            "donor_lift": mean(swap, "donor_lift"),
            "unrelated_lift": mean(other, "donor_lift"),
            "margin_shift": mean(swap, "margin_shift"),
        }

    # ------------------------------------------------------------------ tables and figures

    def table(self, summary: Any, name: str) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
        return exchange_summary.HEADER, exchange_summary.table_rows(summary)

    def markdown(self, summary: Any, name: str) -> str:
        return exchange_summary.report(summary, name)

    def csv_rows(self, summary: Any, name: str) -> list[dict[str, Any]]:
        return exchange_summary.csv_rows(summary)

    @classmethod
    def paper_tables(cls) -> list[Table]:
        digits = {"donor_answer_lift": 1, "donor_margin_shift": 2}
        rows: list[list[Cell | str]] = [
            [row.method, row.row, *(Cell(number(row.values[key][0], n, sign=True)) for key, n in digits.items())]
            for row in published("latent-exchange")
        ]
        header = ["method", "positions", "donor-answer lift (points)", "donor-margin shift (nats)"]
        return [Table("Latent exchange", header, rows)]

    def draw(self, results: Sequence[Shown]) -> list[Widget]:
        shams = [Text(_sham(result)) for result in results]
        return [_figures(results), _table(results), *_between(results), *shams]


_SERIES = (("contrast", "largest contrast"), ("random", "random positions"), ("full", "whole span"))


def _figures(results: Sequence[Shown]) -> Figures:
    """Lift and margin shift over k, one figure per model; the unrelated donor beside the whole span."""
    figures = []
    for key, words, unit in (
        ("donor_lift", "Donor-answer lift", "points"),
        ("margin_shift", "Donor-margin shift", "nats"),
    ):
        series = {result.name: _series(result.summary["rows"], key) for result in results}
        values = [p for drawn in series.values() for line in drawn for p in line.points]
        ends_of_axis = [0.0, *(end for p in values for end in (p.low, p.high) if end is not None)]
        for name, drawn in series.items():
            if not drawn:
                continue
            ends = "; ".join(
                f"{line.name} at k = {line.points[-1].x:.0f}: {number(line.points[-1].y, 2, sign=True)}"
                for line in drawn
            )
            alt = f"{name}: {words} in {unit} over the number k of replaced latents. {ends}."
            figures.append((f"{name}: {words}", lines(drawn, alt, "replaced latents k", unit, ends_of_axis)))
    keys = [Key(place, words, place == 1) for place, (_, words) in enumerate(_SERIES)] + [
        Key(3, "unrelated donor, whole span")
    ]
    return Figures("Latent exchange", figures, keys)


def _series(rows: Sequence[Any], key: str) -> list[Line]:
    def points(test: Any) -> list[Point]:
        chosen = [row for row in rows if test(row) and row[key]["mean"] is not None]
        return [Point(row["k"], row[key]["mean"], row[key]["low"], row[key]["high"]) for row in chosen]

    made = [
        Line(
            words,
            points(lambda row, s=selector: row["condition"] == "swap" and row["selector"] == s),
            place,
            place == 1,
        )
        for place, (selector, words) in enumerate(_SERIES)
    ]
    made.append(Line("unrelated donor", points(lambda row: row["condition"] == "unrelated"), 3))
    return [line for line in made if line.points]


_NAMES = {"contrast": "largest contrast", "random": "random", "full": "whole span"}


def _table(results: Sequence[Shown]) -> Table:
    rows: list[list[Cell | str]] = []
    for result in results:
        for row in result.summary["rows"]:
            name = {"unrelated": "unrelated donor", "swap": _NAMES.get(row["selector"], row["selector"])}
            cells = [average(row["donor_lift"], 1), average(row["margin_shift"], 3)]
            shares = ("donor_frequency", "recipient_frequency", "parse_coverage")
            called = name.get(row["condition"], row["condition"])
            rows.append([result.name, called, str(row["k"]), *cells, *(share(row[key]) for key in shares)])
    header = ["arm", "latents", "k", "donor-answer lift (points)", "donor-margin shift (nats)"]
    header += ["donor's answer, %", "own answer, %", "parsed, %"]
    note = "Lift and shift: bootstrap over pairs. The three shares treat directions and seeds as independent."
    return Table("Exchange", header, rows, note)


def _between(results: Sequence[Shown]) -> list[Table]:
    rows: list[list[Cell | str]] = [
        [result.name, str(row["k"]), average(row["donor_lift"], 1), average(row["margin_shift"], 3)]
        for result in results
        for row in result.summary["contrast_minus_random"]
    ]
    header = ["arm", "k", "lift: contrast − random (points)", "shift: contrast − random (nats)"]
    return [Table("Positions of largest contrast against random ones, paired", header, rows)] if rows else []


def _sham(result: Shown) -> str:
    sham = result.summary["sham"]
    equal, largest = sham["equal_replies"], sham["largest_margin_difference"]
    text = f"{result.name}: {equal['count']} of {equal['of']} shams gave the reply of the unmodified span"
    return text + ("." if largest is None else f"; margins differ by at most {_small(largest)} nats.")


def _small(value: float) -> str:
    """Two digits that no line break divides."""
    return f"{value:.2g}".replace("-", "\u2212")
