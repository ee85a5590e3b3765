"""Residual injection (tab:diag-credit-residual): how far must latents be pushed toward the other view's for the answer
to follow?

For each pair whose right answer changes, the spans z (recipient) and z' (the other view, donor) are generated
independently. The recipient keeps its picture, question and markers, and its latents become

    z_t + alpha (z'_t - z_t),   t = 1 … K,   alpha in a stated grid,

spliced in as recorded inputs (nothing is regenerated), and the answer is decoded greedily. Both directions. Each value
is a difference from alpha = 0, one value a pair (the mean of its directions and seeds), with n and a bootstrap interval
over pairs:

* ``lift``: frequency of the other view's *right* answer, in points; at alpha = 1 the donor-answer lift of the full
  exchange;
* ``toward``: frequency of the model's own *prediction* for the other view (the paper's "toward counterfactual
  prediction"), over pairs for which that prediction can be read in both directions;
* ``margin``: log-probability margin of the other view's right answer over the own one, in nats (the mean over the
  answers' content tokens, as in the exchange).

Control (ours): the same with a random direction of the same norm at every slot, ``--seeds`` of them.

"Best" is the alpha > 0 with the largest value. The paper does not say on which data it is chosen. Here alpha is chosen
on one half of the pairs and reported on the other (halves by the hash of the pair's id); the best on all pairs, which
looks too good by the choice, stands beside it. The paper states neither its grid nor its slots: the grid 0 to 4 and all
K slots are ours. A step beyond 1 leaves the segment between the two views, and may leave the data.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NotRequired

from pydantic import Field, ValidationInfo, field_validator
from typing_extensions import TypedDict, override

from realvr.diagnostics import results as shapes
from realvr.diagnostics.base import Diagnostic
from realvr.diagnostics.counterfactual import AnswerSettings
from realvr.diagnostics.model import Model
from realvr.diagnostics.pair_panels import residual_panel
from realvr.diagnostics.pairs import Pair, changed_pairs
from realvr.diagnostics.parts import Highlight, Needs, Samples, Shown
from realvr.diagnostics.residual_summary import MEASURES, summarise_residual
from realvr.errors import UserError
from realvr.runs.journal import Record
from realvr.widgets import DASH, Cell, Figures, Key, Table, Text, Widget, average, number, share
from realvr.widgets.browser import Panel
from realvr.widgets.charts import Line, Point, lines

if TYPE_CHECKING:
    from matplotlib.figure import Figure

USUAL_ALPHAS = "0,0.25,0.5,0.75,1,1.5,2,4"
_DIGITS = {"lift": 1, "toward": 1, "margin": 3}
_TITLES = {"lift": "Right answer", "toward": "Prediction", "margin": "Margin"}
_UNITS = {"lift": "points", "toward": "points", "margin": "nats"}


class CurvePoint(TypedDict):
    """One value of alpha."""

    alpha: float
    lift: shapes.Mean
    toward: shapes.Mean
    margin: shapes.Mean
    donor: shapes.Rate
    recipient: shapes.Rate
    parsed: shapes.Rate


class BestAlpha(TypedDict):
    """The best alpha of one measure: chosen on one half, reported on the other; and on all pairs."""

    alpha: float | None
    value: shapes.Mean
    chosen_on: int
    reason: shapes.Text | None
    same_pairs: dict[shapes.Text, Any] | None


class Curves(TypedDict):
    """The curves of one set of pairs."""

    pairs: int
    inject: list[CurvePoint]
    random: list[CurvePoint]
    minus_random: list[dict[shapes.Text, Any]]


class Summary(Curves):
    """``residual.json``."""

    latents: int
    seeds: int
    relative_step: shapes.Mean
    best: dict[shapes.Text, BestAlpha]
    edits: dict[shapes.Text, Curves]
    errors: int
    settings: NotRequired[shapes.Settings]


class ResidualSettings(AnswerSettings):
    """What is injected."""

    alphas: str = Field(
        default=USUAL_ALPHAS,
        description="Multiples of the step to the other view's latents, separated by commas; 0, the reference, is "
        "always among them.",
    )
    seeds: int = Field(default=1, description="Random directions of the same norm for each alpha.")
    rows: int = Field(
        default=64, description="Spans decoded together; each holds a copy of its prompt's keys and values."
    )

    @field_validator("seeds", "rows")
    @classmethod
    def _positive(cls, value: int, info: ValidationInfo) -> int:
        if value < 1:
            raise UserError(f"--{info.field_name} is {value}: it must be at least 1")
        return value

    @field_validator("alphas")
    @classmethod
    def _numbers(cls, value: str) -> str:
        parse_alphas(value)
        return value


def parse_alphas(text: str) -> tuple[float, ...]:
    """Multiples of the step, ascending, each once, 0 among them."""
    try:
        found = sorted({0.0, *(float(part) for part in text.split(","))})
    except ValueError:
        raise UserError(f"--alphas is {text!r}: write numbers separated by commas, such as {USUAL_ALPHAS}") from None
    if found[0] < 0 or not all(map(math.isfinite, found)) or len(found) < 2:
        raise UserError(f"--alphas is {text!r}: give at least one number above 0, and none below")
    return tuple(found)


class Residual(Diagnostic[ResidualSettings]):
    """Latents are moved by alpha times the step to the other view's; the answer may follow."""

    name = "residual"
    title = "Residual injection"
    question = "How far must latents be pushed toward the other view's for the answer to follow?"
    reading = (
        "The latents become z + α(z′ − z), with z′ those of the other view; the picture stays. α = 0 is the reference, "
        "α = 1 the full exchange. The control pushes as far in a random direction."
    )
    needs = Needs(pairs=True, span=True)
    paper = (
        "best changes of +0.0068 to +0.0137 toward the counterfactual prediction, margins up to +0.0358, over 47,012 "
        "rollout records (tab:diag-credit-residual)"
    )
    Settings = ResidualSettings
    shape = Summary
    batch = 4
    unit = "pairs"
    order = 31
    examples: ClassVar[tuple[int, int]] = (16, 128)
    highlights = (
        Highlight(
            "lift of the best residual injection (points)",
            lambda summary: average(summary["best"]["lift"]["value"], 1),
            "Residual injection: answers that become those of the other view, at the best strength; it is chosen on "
            "the other half of the pairs.",
            overview=False,
        ),
    )

    @override
    def select(self, items: Sequence[Pair], data: Path) -> list[Pair]:
        return changed_pairs(items, data)

    @override
    def measure(self, model: Model, samples: Samples) -> Iterable[Record]:
        from realvr.diagnostics.measuring.residual import ResidualOptions, residual_pairs

        settings = self.settings
        options = ResidualOptions(
            model.latents,
            parse_alphas(settings.alphas),
            settings.seeds,
            settings.policy,
            model.sampling,
            settings.rows,
        )
        return residual_pairs(model.backbone, list(samples), options)

    @override
    def fixed(self) -> dict[str, Any]:
        settings = self.settings
        return {"policy": settings.policy, "alphas": list(parse_alphas(settings.alphas)), "seeds": settings.seeds}

    @override
    def summarise(self, records: Sequence[Record]) -> dict[str, Any]:
        return summarise_residual(records)

    # ------------------------------------------------------------------ tables and figures

    @override
    def panel(self, record: Record) -> Panel | None:
        return residual_panel(record)

    @override
    def draw(self, results: Sequence[Shown]) -> list[Widget]:
        return [*_charts(results), _curves(results), _best(results), *_against_random(results)]

    @override
    def figure(self, results: Sequence[Shown]) -> Figure | None:
        from realvr.widgets import figures

        known = [one for one in results if one.summary["pairs"]]
        if not known:
            return None
        figure, axes = figures.new(1, len(MEASURES), height=2.6)
        for letter, key, ax in zip("abc", MEASURES, axes[0], strict=True):
            figures.panel(ax, letter, _TITLES[key])
            for one in known:
                for name, more in _STYLES.items():
                    points = one.summary[name]
                    values, low, high = ([p[key][end] for p in points] for end in ("mean", "low", "high"))
                    label = f"{one.name}, {name}" if name == "random" else one.name
                    figures.curve(ax, range(len(points)), values, low, high, one.number, label, **more)
                chosen = one.summary["best"][key]
                if chosen["alpha"] is not None:
                    place = [p["alpha"] for p in one.summary["inject"]].index(chosen["alpha"])
                    value = one.summary["inject"][place][key]["mean"]
                    ax.plot([place], [value], "o", ms=9, mfc="none", mec=figures.color(one.number))
            alphas = [p["alpha"] for p in known[0].summary["inject"]]
            ax.set_xticks(range(len(alphas)), [f"{alpha:g}" for alpha in alphas])
            ax.axhline(0, color="#999999", linewidth=0.8)
            ax.set_xlabel("α (1: the other view's latents)")
            ax.set_ylabel(f"change toward the other view, {_UNITS[key]}")
        axes[0][0].legend()
        return figure


_STYLES: dict[str, dict[str, Any]] = {"inject": {}, "random": {"linestyle": ":", "marker": "", "linewidth": 1.0}}


def _charts(results: Sequence[Shown]) -> list[Widget]:
    figures = []
    for key in ("lift", "margin"):
        series = []
        for one in results:
            for name, dashed in (("inject", False), ("random", True)):
                found = [(p["alpha"], p[key]) for p in one.summary[name] if p[key]["mean"] is not None]
                points = [Point(alpha, value["mean"], value["low"], value["high"]) for alpha, value in found]
                if points:
                    series.append(Line(f"{one.name}, {name}", points, one.number, dashed))
        if series:
            spoken = "; ".join(
                f"{line.name} " + ", ".join(f"{number(p.y, 2, sign=True)} at {p.x:g}" for p in line.points)
                for line in series
            )
            alt = f"{MEASURES[key]} in {_UNITS[key]} by alpha. {spoken}."
            figures.append((MEASURES[key], lines(series, alt, "α", _UNITS[key], [0.0])))
    keys = [key for one in results for key in (Key(one.number, one.name), Key(one.number, f"{one.name}, random", True))]
    return [Figures("Residual injection", figures, keys)] if figures else []


def _cells(point: Mapping[str, Any]) -> list[Cell]:
    return [average(point[key], digits) for key, digits in _DIGITS.items()]


def _curves(results: Sequence[Shown]) -> Table:
    rows: list[list[Cell | str]] = []
    for one in results:
        for name in ("inject", "random"):
            for point in one.summary[name]:
                shares = [share(point[key], counts=False) for key in ("donor", "recipient", "parsed")]
                rows.append([one.name, name, f"{point['alpha']:g}", *_cells(point), *shares])
    header = ["arm", "direction", "α", *(f"{words} ({_UNITS[key]})" for key, words in MEASURES.items())]
    header += ["other view's answer, %", "own answer, %", "parsed, %"]
    note = "Differences from α = 0: bootstrap over pairs. The three shares treat directions as independent."
    return Table("Curve over α", header, rows, note)


def _best(results: Sequence[Shown]) -> Table:
    rows: list[list[Cell | str]] = []
    for one in results:
        for key, words in MEASURES.items():
            found = one.summary["best"][key]
            same = found["same_pairs"]
            rows.append(
                [one.name, f"{words} ({_UNITS[key]})"]
                + [DASH if found["alpha"] is None else f"{found['alpha']:g}"]
                + [average(found["value"], _DIGITS[key]) if found["reason"] is None else Cell(DASH, found["reason"])]
                + ([f"{same['alpha']:g}", average(same["value"], _DIGITS[key])] if same else [DASH, Cell(DASH)])
            )
    header = [
        "arm",
        "measure",
        "best α of one half",
        "its value on the other",
        "best α of all",
        "its value on the same",
    ]
    return Table("Best α", header, rows, "The last column looks too good: α was chosen on the same pairs.")


def _against_random(results: Sequence[Shown]) -> list[Widget]:
    rows: list[list[Cell | str]] = [
        [one.name, f"{point['alpha']:g}", *_cells(point)] for one in results for point in one.summary["minus_random"]
    ]
    told = [
        Text(
            f"{one.name}: the step to the other view is {100 * one.summary['relative_step']['mean']:.1f} % of the norm "
            "of a latent, mean over slots."
        )
        for one in results
        if one.summary["relative_step"]["mean"] is not None
    ]
    header = ["arm", "α", *(f"{words} ({_UNITS[key]})" for key, words in MEASURES.items())]
    return [Table("Minus the random direction, paired", header, rows), *told] if rows else []
