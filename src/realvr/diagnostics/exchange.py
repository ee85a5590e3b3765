"""Fixed-context latent exchange (app:latent-exchange): does an edit reach the answer through the latent span alone?

For each pair whose right answer changes, the spans of both views are generated independently. A recipient keeps its
picture, question, markers and unselected latents; the selected latents are replaced by the donor's at the same
positions; the mixed span enters as recorded inputs, nothing is regenerated, and the answer is decoded greedily. Both
directions are tested. `measuring.exchange` does it, `exchange_summary` has the numbers. Conditions:

* ``unmodified``: the answer after the free-running span itself, as a check of the sham;
* ``sham``: the recipient's own recorded latents spliced in, the reference of every difference;
* ``swap``: k positions, chosen by ``contrast`` or at ``random`` (several seeds), all K (``full``), or those from step t
  to K (``from-step``, ours; spliced like the others, the recurrence does not go on from them). Where the evidence of
  the data has an order, so that a step is a place on the way, this is measured by default;
* ``unrelated``: all K from another pair's picture under the recipient's question.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, ValidationInfo, field_validator
from typing_extensions import override

from realvr.diagnostics import exchange_drawing, exchange_summary, results
from realvr.diagnostics.base import Diagnostic
from realvr.diagnostics.counterfactual import AnswerSettings
from realvr.diagnostics.exchange_summary import record_key, summarise_exchange
from realvr.diagnostics.model import Model
from realvr.diagnostics.numbers import controls_line
from realvr.diagnostics.pair_panels import exchange_panel
from realvr.diagnostics.pairs import Pair, changed_pairs, unrelated
from realvr.diagnostics.parts import Highlight, Needs, OwnSummary, Samples, Shown
from realvr.errors import UserError
from realvr.evaluation.published import published
from realvr.latent.steps import check_steps, parse_numbers, parse_steps
from realvr.runs.journal import Record
from realvr.widgets import DASH, Cell, Table, Widget, average, number
from realvr.widgets.browser import Panel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

USUAL_KS = (1, 2, 4, 8)
AUTO, AUTO_STEPS = "auto", 7
"""Swaps from step t on where the evidence is ordered, and at how many steps."""
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
    from_steps: tuple[int, ...] = ()
    """Steps t, from 1, from which on all latents are the donor's."""

    def conditions(self, control: bool = True) -> list[Condition]:
        """All conditions of one recipient; ``control`` is whether there is an unrelated picture."""
        every = [Condition("unmodified"), Condition("sham", "full", self.latents)]
        for k in sorted({k for k in self.ks if k < self.latents}):
            every.append(Condition("swap", "contrast", k))
            every += [Condition("swap", "random", k, seed) for seed in range(self.seeds)]
        every += [Condition("swap", "from-step", self.latents - t + 1) for t in self.from_steps]
        every.append(Condition("swap", "full", self.latents))
        return [*every, Condition("unrelated", "full", self.latents)] if control else every


class ExchangeSettings(AnswerSettings):
    """What is swapped, and how answers are read."""

    k: str | None = Field(
        default=None,
        description="How many positions are replaced, separated by commas; by default those of 1,2,4,8 that the span "
        "has. The whole span is always replaced as well.",
    )
    from_step: str | None = Field(
        default=AUTO,
        description="Also replace the latents from step t to K, for each t of this list (2,4,6); auto: from every step "
        f"(of more than {AUTO_STEPS + 1} latents, from {AUTO_STEPS} steps) where the data orders its evidence, None: "
        "not at all. Steps may be added to a folder later.",
    )
    seeds: int = Field(default=3, description="Random selections of positions for each k.")
    rows: int = Field(
        default=64, description="Spans decoded together; each holds a copy of its prompt's keys and values."
    )

    @field_validator("seeds", "rows")
    @classmethod
    def _positive(cls, value: int, info: ValidationInfo) -> int:
        if value < 1:
            raise UserError(f"--{info.field_name} is {value}: it must be at least 1")
        return value

    @field_validator("k")
    @classmethod
    def _numbers(cls, value: str | None) -> str | None:
        if value is not None:
            parse_ks(value)
        return value

    @field_validator("from_step")
    @classmethod
    def _steps(cls, value: str | None) -> str | None:
        if value not in (None, AUTO):
            parse_steps(value, "--from-step")
        return value

    def steps(self, latents: int, ordered: bool = False) -> tuple[int, ...]:
        """The steps from which on a span of K latents is swapped, where the evidence of the data is ``ordered`` or
        not."""
        if self.from_step == AUTO:
            return usual_steps(latents) if ordered else ()
        steps = () if self.from_step is None else parse_steps(self.from_step, "--from-step")
        check_steps(steps, latents, "--from-step")
        return steps

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


def usual_steps(latents: int) -> tuple[int, ...]:
    """Every step behind the first, which is the whole span; of many, `AUTO_STEPS` evenly with the last among them."""
    count = min(latents - 1, AUTO_STEPS)
    return (
        tuple(2 + round(place * (latents - 2) / (count - 1)) for place in range(count)) if count > 1 else (2,) * count
    )


def ordered_evidence(pairs: Sequence[Pair]) -> bool:
    """Whether a step is a place on a way: the data says where two views part, or every view lists several boxes and
    none is marked as unordered."""
    several = all(view.ordered and len(view.boxes) > 1 for pair in pairs for view in pair.views)
    return several or any(pair.parts_at is not None for pair in pairs)


def parse_ks(text: str) -> tuple[int, ...]:
    """Numbers of positions."""
    return parse_numbers(text, "--k", "numbers of positions", "at least one position is replaced")


def about_pair(pair: Pair, condition: str, error: str | None, **more: Any) -> Record:
    """A record about a whole pair: that it could not be read, or that it has no unrelated control."""
    about = {"pair": pair.id, "edit": pair.edit, "direction": "", **asdict(Condition(condition))}
    return about | more | {"error": error}


def _full_lift(summary: OwnSummary) -> Cell:
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
    examples: ClassVar[tuple[int, int]] = (16, 512)
    _ordered = False
    highlights = (
        Highlight(
            "donor-answer lift (points)",
            _full_lift,
            "Donor-answer lift: the whole span taken from the other view.",
        ),
    )

    def select(self, items: Sequence[Pair], data: Path) -> list[Pair]:
        """Pairs whose right answer changes."""
        chosen = changed_pairs(items, data)
        self._ordered = ordered_evidence(chosen)
        return chosen

    @override
    def settle(self, model: Model) -> None:
        settings, latents = self.settings, model.latents
        steps = settings.steps(latents, self._ordered)
        self._swaps = Swaps(latents, settings.positions(latents), settings.seeds, steps)

    @override
    def prepare(self, model: Model, samples: Sequence[Pair]) -> None:
        self._controls = {pair.id: other for pair, other in zip(samples, unrelated(samples), strict=True)}

    @override
    def measure(self, model: Model, samples: Samples) -> Iterable[Record]:
        from realvr.diagnostics.measuring.exchange import ExchangeOptions, exchange_pairs

        settings, controls = self.settings, [self._controls[pair.id] for pair in samples]
        options = ExchangeOptions(
            **vars(self._swaps), policy=settings.policy, sampling=model.sampling, rows=settings.rows
        )
        return exchange_pairs(model.backbone, list(samples), controls, options)

    @override
    def key(self, record: Record) -> Hashable:
        return record_key(record)

    @override
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

    @override
    def fixed(self) -> dict[str, Any]:
        settings = self.settings
        return {"policy": settings.policy, "k": list(self._swaps.ks), "seeds": settings.seeds}

    @override
    def summarise(self, records: Sequence[Record]) -> dict[str, Any]:
        return summarise_exchange(records)

    @override
    def notes(self, records: Sequence[Record], summary: OwnSummary, count: int) -> list[str]:
        line = controls_line(summary.get("controls"))
        return [*super().notes(records, summary, count), *([line] if line else [])]

    @override
    def numbers(self, summary: OwnSummary | None) -> dict[str, Any]:
        def mean(row: Mapping[str, Any] | None, name: str) -> dict[str, Any] | None:
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

    @override
    def table(self, summary: OwnSummary, name: str) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
        return exchange_summary.HEADER, exchange_summary.table_rows(summary)

    @override
    def markdown(self, summary: OwnSummary, name: str) -> str:
        return exchange_summary.report(summary, name)

    @override
    def csv_rows(self, summary: OwnSummary, name: str) -> list[dict[str, Any]]:
        return exchange_summary.csv_rows(summary)

    @classmethod
    @override
    def paper_tables(cls) -> list[Table]:
        digits = {"donor_answer_lift": 1, "donor_margin_shift": 2}
        rows: list[list[Cell | str]] = [
            [row.method, row.row, *(Cell(number(row.values[key][0], n, sign=True)) for key, n in digits.items())]
            for row in published("latent-exchange")
        ]
        header = ["method", "positions", "donor-answer lift (points)", "donor-margin shift (nats)"]
        return [Table("Latent exchange", header, rows)]

    @override
    def panels(self, records: Sequence[Record]) -> list[Panel | None]:
        return [exchange_panel(records)]

    @override
    def draw(self, results: Sequence[Shown]) -> list[Widget]:
        return exchange_drawing.drawn(results)

    @override
    def figure(self, results: Sequence[Shown]) -> Figure | None:
        return exchange_drawing.figure(results)
