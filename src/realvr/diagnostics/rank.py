"""Effective rank (tab:diag-rank): how many directions do latents vary in?

Four clouds of vectors over all questions of a run: the visual tokens as the decoder reads them (behind the merger), all
latents z_t, the mean latent of each question, and its last latent. Of each, the eigenvalues l_1 >= l_2 >= … of the
centred covariance give

    rank_p = the smallest r with l_1 + … + l_r >= p (l_1 + … + l_D),    PR = (sum l)^2 / sum l^2,

with p = 0.90, 0.95, 0.99. A picture that several questions show counts once for each. Of a question with more than
``--visual`` visual tokens (100) so many are taken, drawn without replacement by (``--seed``, sample id) alone; the
summary says how many of how many. Each question then weighs the same in their cloud, whatever the size of its pictures.

Vectors are written batch by batch to ``rank-states``; the covariance is added up from these files in float64, so memory
is D x D and one batch, whatever the number of rows. The files take 4 D bytes per row: 2.9 GB for the 200,000 visual
tokens of 2,000 questions at width 3,584. (All 2,560 tokens of each picture would take 73 GB.)

The length of the trajectory is K of the run, or with ``--latents evidence`` the number of visual tokens inside the
evidence boxes of each question.

A rank cannot exceed rows - 1. Where there are no more rows than dimensions, ``bound`` says how far it can go and a
notice says so; the number then grows with the data. Drawing rows with replacement would repeat them and lower the rank,
so there is no bootstrap: ``halves`` has the same numbers of every other question, first those at even places. Where
the halves differ much from the whole, there are too few questions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NotRequired

import numpy as np
from pydantic import Field
from typing_extensions import TypedDict, override

from realvr.data.sample import Sample
from realvr.diagnostics import results as shapes
from realvr.diagnostics.base import Diagnostic
from realvr.diagnostics.lengths import EVIDENCE, LengthSettings, measured
from realvr.diagnostics.model import Model
from realvr.diagnostics.numbers import hashed
from realvr.diagnostics.parts import Highlight, Needs, OwnSummary, Samples, Shown
from realvr.diagnostics.states import StateFiles
from realvr.runs.journal import Record
from realvr.widgets import DASH, Cell, Table, Widget

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

CLOUDS = {"visual": "visual tokens", "latents": "latents", "mean": "mean latent", "last": "last latent"}
SHARES = {"rank90": 0.90, "rank95": 0.95, "rank99": 0.99}
STYLES = {"visual": ":", "latents": "-", "mean": "--", "last": "-."}


class Numbers(TypedDict):
    """Ranks of one cloud."""

    rank90: int
    rank95: int
    rank99: int
    pr: float


class Cloud(Numbers):
    """One cloud of vectors."""

    rows: int
    questions: int
    width: int
    bound: int
    """The largest rank that so many rows can have."""
    halves: list[Numbers]
    explained: list[list[float]]
    """Number of directions, and their share of the variance."""


class Drawn(TypedDict):
    """Visual tokens that were taken, of all."""

    kept: int
    of: int


class Summary(TypedDict):
    """``rank.json``."""

    questions: int
    clouds: dict[shapes.Text, Cloud]
    visual: NotRequired[Drawn]
    errors: int
    settings: NotRequired[shapes.Settings]


class RankSettings(LengthSettings):
    """Length of the trajectories, and how many visual tokens count."""

    visual: int = Field(
        default=100,
        ge=0,
        description="Visual tokens taken of each question, drawn at random where it has more; 0 takes all, which at 7B "
        "writes up to 37 MB a question.",
    )
    seed: int = Field(default=0, description="Fixes which visual tokens these are.")


class Rank(Diagnostic[RankSettings]):
    """Principal directions of visual tokens and latents."""

    name = "rank"
    title = "Effective rank"
    question = "How many directions do latents vary in, beside visual tokens?"
    reading = (
        "Rank90, 95, 99: principal directions with that share of the variance. PR: participation ratio. A low rank is "
        "no defect by itself: what matters is whether the directions tell questions apart."
    )
    needs = Needs(span=True)
    paper = (
        "on BLINK rank90, 95, 99 and PR of 428, 713, 1697, 54.31 for visual embeddings, 4, 5, 24, 2.60 for latents, 4, "
        "6, 56, 1.61 for their mean, 2, 3, 17, 1.35 for the last; on VISCOT 404, 675, 1641, 58.55; 51, 169, 909, 5.70; "
        "21, 65, 289, 4.70; 36, 111, 414, 5.66 (tab:diag-rank)"
    )
    Settings = RankSettings
    shape = Summary
    batch = 16
    order = 720
    examples: ClassVar[tuple[int, int]] = (512, 2000)
    highlights = (
        Highlight(
            "directions with 90 % of the variance, latents",
            lambda summary: _highlight(summary, "latents"),
            "Directions: in brackets those of two halves of the questions, no interval.",
            overview=False,
        ),
        Highlight(
            "the same, visual tokens",
            lambda summary: _highlight(summary, "visual"),
            overview=False,
        ),
    )
    _ids: tuple[str, ...] = ()
    _computed: tuple[tuple[str, ...], dict[str, Any]] | None = None

    @override
    def select(self, items: Sequence[Sample], data: Path) -> list[Sample]:
        return measured(self.settings, items, data)

    @override
    def measure(self, model: Model, samples: Samples) -> Iterable[Record]:
        import torch

        from realvr.diagnostics.measuring.reading import read_samples
        from realvr.diagnostics.measuring.similarity import lengths_of

        lengths, errors = lengths_of(model, samples, self.settings.length == EVIDENCE)
        found: dict[str, tuple[Tensor, Tensor]] = {}
        for latents, own in lengths.items():
            reading = read_samples(model.backbone, own, latents)
            errors += reading.errors
            for (sample, z_KD), images in zip(reading.spans(), reading.features(), strict=True):
                found[sample.id] = torch.cat(images) if images else torch.empty(0, model.backbone.width), z_KD
        for sample, error in errors:
            yield self.failed(sample, error)
        ids = [sample.id for sample in samples if sample.id in found]
        kept = {name: self._drawn(name, found[name][0]) for name in ids}
        clouds = {"visual": list(kept.values()), "latents": [found[name][1] for name in ids]}
        samples.keep(ids, {}, {name: [rows.float().cpu().numpy() for rows in each] for name, each in clouds.items()})
        for name in ids:
            visual, latents_KD = found[name]
            sizes = {"visual": len(kept[name]), "of": len(visual), "latents": len(latents_KD)}
            yield {"id": name, **sizes, "error": None}

    def _drawn(self, name: str, visual_ND: Tensor) -> Tensor:
        """Visual tokens of one question, by the seed and its id alone."""
        most = self.settings.visual
        if not most or len(visual_ND) <= most:
            return visual_ND
        rng = np.random.default_rng([self.settings.seed, hashed(name)])
        return visual_ND[np.sort(rng.choice(len(visual_ND), most, replace=False)).tolist()]

    @override
    def summarise(self, records: Sequence[Record]) -> dict[str, Any]:
        good = [record for record in records if record["error"] is None]
        self._ids = tuple(record["id"] for record in good)
        kept = sum(record["visual"] for record in good)
        return {
            "questions": len(good),
            "clouds": {},
            "visual": {"kept": kept, "of": sum(record.get("of", record["visual"]) for record in good)},
            "errors": len(records) - len(good),
        }

    @override
    def extend(self, summary: OwnSummary, others: Mapping[str, Any], folder: Path) -> dict[str, Any]:
        if self._computed is None or self._computed[0] != self._ids:  # a suite asks twice
            files = StateFiles(folder / f"{self.name}-states")
            clouds = {name: cloud_of(files, self._ids, name) for name in CLOUDS} if self._ids else {}
            self._computed = (self._ids, {name: found for name, found in clouds.items() if found is not None})
        return {**summary, "clouds": self._computed[1]}

    @override
    def notes(self, records: Sequence[Record], summary: OwnSummary, count: int) -> list[str]:
        found = super().notes(records, summary, count)
        told = _thinned(summary)
        found += [f"{told} (--visual)"] if told else []
        for name, cloud in summary["clouds"].items():
            if cloud["rows"] <= cloud["width"]:
                found.append(
                    f"{CLOUDS[name]}: {cloud['rows']} rows in {cloud['width']} dimensions, so no rank can be above "
                    f"{cloud['bound']}; more questions may raise it"
                )
        return found

    @override
    def draw(self, results: Sequence[Shown]) -> list[Widget]:
        rows: list[list[Cell | str]] = []
        for one in results:
            for name, cloud in one.summary["clouds"].items():
                cells = [_cell(cloud, key) for key in (*SHARES, "pr")]
                rows.append([one.name, CLOUDS[name], f"{cloud['rows']:,} x {cloud['width']:,}", *cells])
        header = ["arm", "representation", "shape", "rank90", "rank95", "rank99", "PR"]
        note = "Below each number: the same of every other question, two halves."
        note += "".join(f" {one.name}: {told}." for one in results if (told := _thinned(one.summary)))
        return [Table("Effective rank", header, rows, note)]

    @override
    def figure(self, results: Sequence[Shown]) -> Figure | None:
        from realvr.widgets import figures

        known = [one for one in results if one.summary["clouds"]]
        if not known:
            return None
        figure, axes = figures.new(1, 3, height=2.8 + 0.15 * len(known), width_ratios=[1.5, 1, 1])
        first, *others = axes[0]
        figures.panel(first, "a", "Explained variance")
        for one in known:
            for name, cloud in one.summary["clouds"].items():
                count, share = zip(*cloud["explained"], strict=True)
                label = f"{one.name}, {CLOUDS[name]}"
                figures.curve(first, count, share, number=one.number, label=label, linestyle=STYLES[name], marker="")
        first.set_xscale("log")
        first.set_xlabel("principal directions")
        first.set_ylabel("share of the variance")
        first.set_ylim(0, 1.02)
        first.axhline(0.9, color="#999999", linewidth=0.8)
        figure.legend(*first.get_legend_handles_labels(), loc="outside lower center", ncols=4)
        for ax, letter, key, title in zip(others, "bc", ("rank90", "pr"), ("Rank90", "PR"), strict=True):
            figures.panel(ax, letter, title)
            figures.bars(
                ax, list(CLOUDS.values()), [_bars(one, key) for one in known], [x.number for x in known], tilt=35
            )
            values = [cloud[key] for one in known for cloud in one.summary["clouds"].values() if cloud[key] > 0]
            if values and max(values) > 20 * min(values):
                ax.set_yscale("log")
        if len(known) > 1:
            others[0].legend()
        return figure


def cloud_of(files: StateFiles, ids: Sequence[str], name: str) -> dict[str, Any] | None:
    """Numbers of one cloud from the files of a run; None where it has no rows."""
    from realvr.diagnostics.streaming import moments, tensors
    from realvr.maths import geometry

    stored = "visual" if name == "visual" else "latents"
    chosen: dict[str, Callable[[Tensor], Tensor]] = {
        "mean": lambda z_KD: z_KD.mean(0)[None],
        "last": lambda z_KD: z_KD[-1:],
    }
    halves = [moments(tensors(files, ids[start::2], stored), chosen.get(name)) for start in (0, 1)]
    parts = [_numbers(geometry.variances(half.covariance_DD)) for half in halves if half.count]
    whole = halves[0].merge(halves[1])
    if not whole.count:
        return None
    values = geometry.variances(whole.covariance_DD)
    width = len(values)
    return {
        "rows": whole.count,
        "questions": len(ids),
        "width": width,
        "bound": min(whole.count - 1, width),
        **_numbers(values),
        "halves": parts,
        "explained": _explained(values),
    }


def _thinned(summary: OwnSummary) -> str:
    """How many visual tokens were taken, where not all were."""
    found = summary.get("visual")
    if not found or found["kept"] == found["of"]:
        return ""
    return f"{found['kept']:,} of {found['of']:,} visual tokens were drawn"


def _numbers(values_D: Tensor) -> dict[str, Any]:
    from realvr.maths import geometry

    ranks = {name: geometry.rank_at(values_D, share) for name, share in SHARES.items()}
    return {**ranks, "pr": geometry.participation_ratio(values_D)}


def _explained(values_D: Tensor, points: int = 48) -> list[list[float]]:
    """Share of the variance of the first 1, 2, … directions; at most so many points, evenly on a log scale."""
    total, width = float(values_D.sum()), len(values_D)
    counts = sorted({round(width ** (place / (points - 1))) for place in range(points)})
    sums = values_D.cumsum(0).tolist()
    return [[count, sums[count - 1] / total if total > 0 else 0.0] for count in counts]


def _text(key: str, value: float) -> str:
    return f"{value:.2f}" if key == "pr" else f"{value:,}"


def _cell(cloud: Mapping[str, Any], key: str) -> Cell:
    halves = " / ".join(_text(key, half[key]) for half in cloud["halves"])
    return Cell(_text(key, cloud[key]), f"[{halves or DASH}]", cloud["rows"] <= cloud["width"], float(cloud[key]))


def _bars(one: Shown, key: str) -> tuple[str, list[float | None], list[float | None], list[float | None]]:
    """Numbers of one model as bars; the error bars span the halves."""
    clouds = [one.summary["clouds"].get(name) for name in CLOUDS]
    values = [None if cloud is None else cloud[key] for cloud in clouds]
    ends: list[list[float | None]] = [
        [None if cloud is None else limit([cloud[key], *(half[key] for half in cloud["halves"])]) for cloud in clouds]
        for limit in (min, max)
    ]
    return one.name, values, ends[0], ends[1]


def _highlight(summary: OwnSummary, name: str) -> Cell:
    cloud = summary["clouds"].get(name)
    return Cell(DASH) if cloud is None else _cell(cloud, "rank90")
