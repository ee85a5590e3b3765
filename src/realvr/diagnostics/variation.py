"""Position-wise variation (fig:slot-variance-map): which latents change from example to example, and which with the
question on one picture?

The paper draws two maps and a "top-token variation gap" and states no formula; all of these are ours
(`realvr.maths.variation`). With u = z / |z|:

* ``examples``: V_t, the mean cosine distance of z_t between two examples with different pictures. One value for each
  example (its mean distance to the others), averaged;
* ``questions``: the same between two questions on one picture. One value for each picture that has at least two,
  averaged over pictures. Data without such a picture has none, and the panel says so;
* ``pooled``: the same of the mean over the K latents, in which changes of a few latents may drown;
* ``gap``: max_t V_t - mean_t V_t, with a bootstrap over examples (pictures). A maximum is never below the mean, so
  noise alone makes a gap: ``chance`` is the gap after the positions of every example are shuffled on their own
  (mean of `SHUFFLES` shuffles, seeded). With K = 1 there is no gap.

Pictures are the same where their pixels are. Intervals resample examples (pictures) and hold the others fixed.
Unit vectors are kept in ``variation-states`` as float16 (rounding of 5e-4) and summed in float64, one file at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NotRequired

import numpy as np
from pydantic import Field
from typing_extensions import TypedDict, override

from realvr.diagnostics import results as shapes
from realvr.diagnostics.base import Diagnostic, DiagnosticSettings, Highlight, Needs, OwnSummary, Samples, Shown
from realvr.diagnostics.data import picture_key
from realvr.diagnostics.model import Model
from realvr.diagnostics.numbers import RESAMPLES, mean
from realvr.diagnostics.states import Rows, StateFiles
from realvr.evaluation.statistics import interval
from realvr.maths.variation import distances, gaps, unit, within
from realvr.runs.journal import Record
from realvr.widgets import Cell, Table, Text, Widget, average

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
        across, same = _across(files, self._pictures), _same(files, self._pictures)
        found = {"examples": across, "questions": same}
        return summary | {name: _part(rows, latents, self.settings.seed) for name, rows in found.items()}

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
                chance = Cell("–" if found["chance"] is None else f"{found['chance']:.4f}", value=found["chance"])
                top = "–" if found["top"] is None else str(found["top"])
                rows.append([one.name, words, str(found["count"]), *cells, chance, top])
        header = ["arm", "variation", "n", "mean over positions", "of the mean latent", "top-token gap", "chance gap"]
        header.append("most varying latent")
        note = "n: examples, or pictures with at least two questions. Intervals resample them."
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


def _across(files: StateFiles, pictures: Mapping[str, list[str]]) -> Rows:
    """(n, K + 1): mean distance of each example to those with other pictures; empty where all show one picture."""
    ids = [one for group in pictures.values() for one in group]
    if len(pictures) < 2:
        return np.zeros((0, 0))
    total: Rows = np.zeros(())
    for _, rows in files.batches(ids, _UNITS):
        total = total + rows.astype(np.float64).sum(0)
    single = [group[0] for group in pictures.values() if len(group) == 1]
    found = [distances(u, total - u, len(ids) - 1) for u in _read(files, single)]
    for group in pictures.values():
        if len(group) > 1:
            u = files.rows(group, _UNITS).astype(np.float64)
            found.append(distances(u, total - u.sum(0), len(ids) - len(group)))
    return np.concatenate(found)


def _same(files: StateFiles, pictures: Mapping[str, list[str]]) -> Rows:
    """(pictures, K + 1): mean distance between questions on one picture, a row for each that has two or more."""
    shared = [group for group in pictures.values() if len(group) > 1]
    rows = [within(files.rows(group, _UNITS).astype(np.float64)).mean(0) for group in shared]
    return np.stack(rows) if rows else np.zeros((0, 0))


def _read(files: StateFiles, ids: Sequence[str]) -> Iterable[Rows]:
    for _, rows in files.batches(ids, _UNITS):
        yield rows.astype(np.float64)


def _part(rows: Rows, latents: int, seed: int) -> dict[str, Any]:
    """Numbers of (n, K + 1) distances, the last column that of the mean latent."""
    own = rows[:, :latents] if len(rows) else np.zeros((0, latents))
    several = bool(len(own)) and latents > 1
    return {
        "count": len(own),
        "positions": [mean(own[:, t].tolist()) for t in range(latents)] if len(own) else [],
        "all": mean(own.mean(1).tolist() if len(own) else []),
        "pooled": mean(rows[:, latents].tolist() if len(own) else []),
        "gap": _gap(own) if several else mean([]),
        "chance": _chance(own, seed) if several else None,
        "top": int(own.mean(0).argmax()) + 1 if several else None,
    }


def _gap(own: Rows) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    drawn = np.stack([own[rng.integers(0, len(own), len(own))].mean(0) for _ in range(RESAMPLES)])
    low, high = interval(gaps(drawn).astype(np.float64))
    return {"mean": float(gaps(own.mean(0))), "low": low, "high": high, "pairs": len(own)}


def _chance(own: Rows, seed: int) -> float:
    rng = np.random.default_rng([seed, 1])
    return float(np.mean([gaps(rng.permuted(own, axis=1).mean(0)) for _ in range(SHUFFLES)]))
