"""Position-wise variation (fig:slot-variance-map): which latents change from example to example, and which with the
question on one picture?

The paper draws two maps and a "top-token variation gap" and states no formula; all of these are ours
(`realvr.maths.variation`). With u = z / |z|:

* ``examples``: V_t, the mean cosine distance of z_t between two examples with different pictures: the mean over
  examples of the mean distance to the others;
* ``questions``: the same between two questions on one picture. One value for each picture that has at least two,
  averaged over pictures. Data without such a picture has none, and the panel says so;
* ``pooled``: the same of the mean over the K latents, in which changes of a few latents may drown;
* ``gap``: max_t V_t - mean_t V_t, with a bootstrap over pictures. A maximum is never below the mean, so noise alone
  makes a gap: ``chance`` is the gap after the positions of every picture are shuffled on their own, alike for all its
  questions (mean of `SHUFFLES` shuffles, seeded). With K = 1 there is no gap.

Pictures are the same where their pixels are. Intervals resample pictures with all their questions. Across examples a
picture counts as one of each pair and as the other (`realvr.maths.pairs`).
Unit vectors are kept in ``variation-states`` as float16 (rounding of 5e-4) and summed in float64, one file at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NotRequired

import numpy as np
from pydantic import Field
from typing_extensions import TypedDict, override

from realvr.diagnostics import results as shapes
from realvr.diagnostics.base import Diagnostic
from realvr.diagnostics.data import picture_key
from realvr.diagnostics.model import Model
from realvr.diagnostics.numbers import mean, resampled
from realvr.diagnostics.parts import DiagnosticSettings, Highlight, Needs, OwnSummary, Samples, Shown
from realvr.diagnostics.states import Rows, StateFiles
from realvr.evaluation.statistics import interval
from realvr.maths.pairs import OtherGroups
from realvr.maths.variation import gaps, unit, within
from realvr.runs.journal import Record
from realvr.widgets import Cell, Table, Text, Widget, average, number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PARTS = {"examples": "across examples", "questions": "across questions on one picture"}
SHUFFLES = 20
_UNITS = "units"


class Part(TypedDict):
    """Variation across one kind of pairs; ``count`` examples or pictures."""

    count: int
    positions: list[shapes.Mean]
    all: shapes.Mean
    pooled: shapes.Mean
    gap: shapes.Mean
    chance: float | None
    top: int | None


class Summary(TypedDict):
    """``variation.json``."""

    examples_read: int
    pictures: int
    shared: int
    latents: int
    errors: int
    examples: NotRequired[Part]
    questions: NotRequired[Part]
    settings: NotRequired[shapes.Settings]


class VariationSettings(DiagnosticSettings):
    """What is drawn at random."""

    seed: int = Field(default=0, description="Fixes the shuffles of positions for the chance gap.")


class Variation(Diagnostic[VariationSettings]):
    """How much each latent changes between examples, and between questions on one picture."""

    name = "variation"
    title = "Position-wise variation"
    question = "Which latents change from example to example, and which with the question on one picture?"
    reading = (
        "Mean cosine distance of the t-th latent between two examples with different pictures, and between two "
        "questions on one picture. Gap: that of the position that varies most minus the mean over positions; chance is "
        "what shuffled positions give."
    )
    needs = Needs(span=True)
    paper = (
        "a top-token variation gap of 0.07 for ReaLVR, 0.02 for Monet and 0.01 for each LVR variant, by a formula that "
        "the paper does not print (fig:slot-variance-map)"
    )
    Settings = VariationSettings
    shape = Summary
    batch = 16
    order = 75
    unit = "examples"
    examples: ClassVar[tuple[int, int]] = (200, 1000)
    highlights = (
        Highlight(
            "top-token variation gap",
            lambda summary: average(summary["examples"]["gap"], 3, False),
            "Variation gap: of the latent that varies most across examples, minus the mean over latents.",
        ),
    )

    @override
    def measure(self, model: Model, samples: Samples) -> Iterable[Record]:
        reading = model.read(samples)
        ids, rows = [], []
        for sample, z_KD in reading.spans():
            ids.append(sample.id)
            z = z_KD.double().cpu().numpy()
            rows.append(unit(np.concatenate([z, z.mean(0, keepdims=True)])))
        if ids:
            samples.keep(ids, {_UNITS: np.stack(rows).astype(np.float16)})
        for sample, error in reading.errors:
            yield self.failed(sample, error)
        for sample in reading.samples:
            yield {"id": sample.id, "latents": model.latents, "picture": picture_key(sample), "error": None}

    @override
    def summarise(self, records: Sequence[Record]) -> dict[str, Any]:
        good = [record for record in records if record["error"] is None]
        self._pictures: dict[str, list[str]] = {}
        for record in good:
            self._pictures.setdefault(record["picture"], []).append(record["id"])
        return {
            "examples_read": len(good),
            "pictures": len(self._pictures),
            "shared": sum(len(ids) > 1 for ids in self._pictures.values()),
            "latents": max((record["latents"] for record in good), default=0),
            "errors": len(records) - len(good),
        }

    @override
    def extend(self, summary: OwnSummary, others: Mapping[str, Any], folder: Path) -> OwnSummary:
        files, latents = StateFiles(folder / f"{self.name}-states"), summary["latents"]
        own, chance = _across(files, self._pictures, latents, self.settings.seed)
        same = _same(files, self._pictures)
        count = summary["examples_read"] if len(own) else 0
        return summary | {
            "examples": _part(own, latents, count, chance),
            "questions": _part(same, latents, len(same), _shuffled(same[:, :latents], self.settings.seed)),
        }

    @override
    def notes(self, records: Sequence[Record], summary: OwnSummary, count: int) -> list[str]:
        found = super().notes(records, summary, count)
        if summary["examples_read"] and not summary["shared"]:
            found.append("no two questions share a picture: there is no variation across questions on one picture")
        if summary["latents"] == 1:
            found.append("K = 1: a single position has no gap")
        return found

    @override
    def numbers(self, summary: OwnSummary | None) -> dict[str, Any]:
        return {"variation_gap": None if summary is None else summary["examples"]["gap"]["mean"]}

    # ------------------------------------------------------------------ tables and figures

    @override
    def draw(self, results: Sequence[Shown]) -> list[Widget]:
        rows: list[list[Cell | str]] = []
        for one in results:
            for name, words in PARTS.items():
                found = one.summary[name]
                cells = [average(found[key], 4, False) for key in ("all", "pooled", "gap")]
                chance = Cell(number(found["chance"], 4), value=found["chance"])
                top = "–" if found["top"] is None else str(found["top"])
                rows.append([one.name, words, str(found["count"]), *cells, chance, top])
        header = ["arm", "variation", "n", "mean over positions", "of the mean latent", "top-token gap", "chance gap"]
        header.append("most varying latent")
        note = "n: examples, or pictures with at least two questions. Intervals resample pictures."
        told: list[Widget] = [
            Text(f"{one.name}: no two questions share a picture, so there is no variation across questions.")
            for one in results
            if not one.summary["shared"]
        ]
        steps = max((one.summary["latents"] for one in results), default=0)
        by_step: list[list[Cell | str]] = [
            [one.name, words, *(average(found, 3, False) for found in positions), *[""] * (steps - len(positions))]
            for one in results
            for name, words in PARTS.items()
            for positions in [one.summary[name]["positions"]]
        ]
        head = ["arm", "variation", *map(str, range(1, steps + 1))]
        return [
            Table("Variation of latents", [*header], rows, note),
            *told,
            Table("Variation by latent", head, by_step),
        ]

    @override
    def figure(self, results: Sequence[Shown]) -> Figure | None:
        from realvr.widgets import figures

        known = [one for one in results if one.summary["examples_read"]]
        if not known:
            return None
        figure, axes = figures.new(1, 3, height=1.5 + 0.35 * len(known), width_ratios=[1.3, 1.3, 1])
        most = max(
            (m["mean"] or 0.0 for one in known for part in PARTS for m in one.summary[part]["positions"]), default=0
        )
        for letter, part, title, ax in zip(
            "ab", PARTS, ("Across examples", "Questions on one picture"), axes[0], strict=False
        ):
            figures.panel(ax, letter, title)
            if not any(one.summary[part]["count"] for one in known):
                figures.empty(ax, "none: no two questions\nshare a picture" if part == "questions" else "none")
                continue
            steps = max(one.summary["latents"] for one in known)
            cells = [[m["mean"] for m in one.summary[part]["positions"]] for one in known]
            padded = [row + [None] * (steps - len(row)) for row in cells]
            names = [one.name for one in known] if letter == "a" else [""] * len(known)
            labels = [str(t) if steps <= 16 or t % 4 == 1 else "" for t in range(1, steps + 1)]
            digits = 2 if steps <= 10 else None
            figures.heatmap(ax, padded, names, labels, low=0, high=most or 1, digits=digits, scale=letter == "b")
            ax.set_xlabel("latent t")
        _gaps(axes[0][2], known)
        return figure


def _gaps(ax: Any, results: Sequence[Shown]) -> None:  # noqa: ANN401  # matplotlib's
    """The gap of each model across examples, and what shuffled positions give."""
    from realvr.widgets import figures

    figures.panel(ax, "c", "Top-token gap")
    for place, one in enumerate(results):
        found = one.summary["examples"]
        value = found["gap"]
        if value["mean"] is None:
            ax.text(0, place, " none", va="center", color="#666666")
            continue
        ends = [[value["mean"] - value["low"]], [value["high"] - value["mean"]]]
        hatch = figures.HATCHES[one.number % len(figures.HATCHES)]
        ax.barh(
            place, value["mean"], xerr=ends, color=figures.color(one.number), hatch=hatch, edgecolor="white", height=0.6
        )
        ax.plot([found["chance"]] * 2, [place - 0.38, place + 0.38], color="black", linestyle=":")
    ax.set_yticks(range(len(results)), [one.name for one in results])
    ax.set_ylim(len(results) - 0.4, -0.6)
    ax.set_xlim(left=0)
    ax.locator_params(axis="x", nbins=4)
    ax.set_xlabel("max − mean; dotted: chance")


# ---------------------------------------------------------------------- from the files


def _across(files: StateFiles, pictures: Mapping[str, list[str]], latents: int, seed: int) -> tuple[Rows, float]:
    """(pictures, K + 1): values whose mean is V_t and whose resampling is that of pictures; and the gap of shuffled
    positions. Empty where all examples show one picture."""
    if len(pictures) < 2:
        return np.zeros((0, latents + 1)), 0.0
    count, rng = sum(map(len, pictures.values())), np.random.default_rng([seed, 1])
    found, shuffled = OtherGroups(count), OtherGroups(count)
    for units in _by_picture(files, pictures):
        total = units.sum(0)
        found.add(total, len(units))
        shuffled.add(np.stack([total[rng.permutation(latents)] for _ in range(SHUFFLES)]), len(units))
    sums, sizes = [], []
    for units in _by_picture(files, pictures):
        sums.append(found.shares(units, units.sum(0), len(units)).sum(0))
        sizes.append(len(units))
    return 1 - found.settled(np.stack(sums), np.array(sizes)), float(gaps(1 - shuffled.mean).mean())


def _same(files: StateFiles, pictures: Mapping[str, list[str]]) -> Rows:
    """(pictures, K + 1): mean distance between questions on one picture, a row for each that has two or more."""
    shared = [group for group in pictures.values() if len(group) > 1]
    rows = [within(files.rows(group, _UNITS).astype(np.float64)).mean(0) for group in shared]
    return np.stack(rows) if rows else np.zeros((0, 0))


def _by_picture(files: StateFiles, pictures: Mapping[str, list[str]]) -> Iterator[Rows]:
    """Unit vectors (questions, K + 1, D) of one picture after the other; one file is alive at a time."""
    single = [group[0] for group in pictures.values() if len(group) == 1]
    for _, rows in files.batches(single, _UNITS):
        yield from rows.astype(np.float64)[:, None]
    for group in pictures.values():
        if len(group) > 1:
            yield files.rows(group, _UNITS).astype(np.float64)


def _part(rows: Rows, latents: int, count: int, chance: float) -> dict[str, Any]:
    """Numbers of (n, K + 1) distances, the last column that of the mean latent; ``count`` is what n stands for."""
    own = rows[:, :latents]
    several = bool(len(own)) and latents > 1

    def counted(values: Rows) -> dict[str, Any]:
        return mean(values.tolist()) | {"pairs": count}

    return {
        "count": count,
        "positions": [counted(own[:, t]) for t in range(latents)] if len(own) else [],
        "all": counted(own.mean(1)) if len(own) else mean([]),
        "pooled": counted(rows[:, latents]) if len(own) else mean([]),
        "gap": _gap(own, count) if several else mean([]),
        "chance": chance if several else None,
        "top": int(own.mean(0).argmax()) + 1 if several else None,
    }


def _gap(own: Rows, count: int) -> dict[str, Any]:
    drawn = resampled(own.astype(np.float64), np.random.default_rng(0))
    low, high = interval(gaps(drawn).astype(np.float64))
    return {"mean": float(gaps(own.mean(0))), "low": low, "high": high, "pairs": count}


def _shuffled(own: Rows, seed: int) -> float:
    """The gap after the positions of each row are shuffled on their own."""
    if not own.size:
        return 0.0
    rng = np.random.default_rng([seed, 1])
    return float(np.mean([gaps(rng.permuted(own, axis=1).mean(0)) for _ in range(SHUFFLES)]))
