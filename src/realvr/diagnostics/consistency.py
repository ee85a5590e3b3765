"""Representation consistency (tab:diag-rcs): does the mean trajectory of a question stay when its picture changes a
little?

Under a condition, a question is read several times (views), each with its pictures changed in another way. With m_r the
mean of the K latents of view r,

    RCS = mean over pairs r < s of cos(m_r, m_s),

then the mean over questions. Views of a condition are compared with each other, as the paper words it, not with the
original. Conditions (the paper names them and the ends of the sweeps; ranges, and everything else about how pictures
are changed, are ours, see `realvr.imaging.perturbing`):

* *reference*: two views, nothing changed. 1 up to rounding;
* *augmentation*: four views: brightness, contrast, rotation, crop, each by 10 to 20 % (rotation: 4.5 to 9 degrees);
* *mask*: a rectangle of 5, 10, 20, 30 % of the area covered, ``--repeats`` views each;
* *blur + jitter*: strength 0.1, 0.3, 0.5, as many views;
* *affine*: strength 0.05, 0.10, 0.20, as many views.

How a view is changed is drawn by (``--seed``, sample id, condition, number of the view, number of the picture) alone.

RCS alone says little: where the mean latents of *different questions* are as close, nothing would move them. Beside it,
ours: ``to_original``, the mean cosine of changed views to the original; ``other_questions``, the mean cosine of the
original's mean latent to those of all other questions of the run; and ``kept``, the share of changed views whose answer
stays that of the original (unparsed answers never do). A condition may change the right answer: a mask can cover the
evidence. A view of which nothing is left (a picture that had more than one colour has one) is counted as destroyed, one
that the image processor refuses as refused; neither takes part. A question whose pictures show nothing to begin with is
an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NotRequired

from pydantic import Field
from typing_extensions import TypedDict, override

from realvr.diagnostics import results as shapes
from realvr.diagnostics.base import Diagnostic
from realvr.diagnostics.counterfactual import AnswerSettings
from realvr.diagnostics.model import Model
from realvr.diagnostics.numbers import mean
from realvr.diagnostics.parts import Highlight, Needs, OwnSummary, Samples, Shown
from realvr.diagnostics.states import StateFiles
from realvr.runs.journal import Record
from realvr.widgets import DASH, Cell, Table, Widget, average, number
from realvr.widgets.browser import Facts, Panel

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

REFERENCE, AUGMENTED = "reference", "augmentation"
SWEEPS = {"mask": (0.05, 0.10, 0.20, 0.30), "blur_jitter": (0.10, 0.30, 0.50), "affine": (0.05, 0.10, 0.20)}
WORDS = {"mask": "mask", "blur_jitter": "blur + jitter", "affine": "affine"}
LIGHT = 0.2
"""Strength of the four augmentations."""


@dataclass(frozen=True)
class View:
    """One reading of a question. ``change`` names a function of `realvr.imaging.perturbing`; None changes nothing."""

    condition: str
    change: str | None
    strength: float
    number: int


@dataclass(frozen=True)
class Condition:
    """Views that are compared with each other."""

    name: str
    family: str
    strength: float | None
    views: tuple[View, ...]


def conditions_of(repeats: int) -> list[Condition]:
    """All conditions; the reference comes first."""
    plain = tuple(View(REFERENCE, None, 0.0, number) for number in range(2))
    four = ("brightness", "contrast", "rotation", "crop")
    light = tuple(View(AUGMENTED, change, LIGHT, number) for number, change in enumerate(four))
    found = [Condition(REFERENCE, REFERENCE, None, plain), Condition(AUGMENTED, AUGMENTED, None, light)]
    for family, strengths in SWEEPS.items():
        for strength in strengths:
            name = f"{family} {strength:.2f}"
            views = tuple(View(name, family, strength, number) for number in range(repeats))
            found.append(Condition(name, family, strength, views))
    return found


class Row(TypedDict):
    """One condition."""

    condition: shapes.Text
    family: shapes.Text
    strength: float | None
    rcs: shapes.Mean
    to_original: shapes.Mean
    kept: shapes.Mean
    views: int
    destroyed: int
    refused: NotRequired[int]


class Summary(TypedDict):
    """``consistency.json``."""

    questions: int
    repeats: int
    rows: list[Row]
    other_questions: shapes.Mean
    errors: int
    settings: NotRequired[shapes.Settings]


class ConsistencySettings(AnswerSettings):
    """How often pictures are changed."""

    repeats: int = Field(default=3, ge=2, description="Views of each strength of a sweep.")
    seed: int = Field(default=0, description="Fixes how pictures are changed, alike for every model.")
    answers: bool = Field(default=True, description="Also answer every view, and say whether the answer stays.")


class Consistency(Diagnostic[ConsistencySettings]):
    """Mean trajectories of one question whose pictures are changed a little."""

    name = "consistency"
    title = "Representation consistency"
    question = "Do the latents of a question stay when its picture changes a little?"
    reading = (
        "RCS: mean pairwise cosine of the mean latents of several changed views of one picture. Read it beside the "
        "cosine to other questions: only what is above that is the question's own."
    )
    needs = Needs(span=True)
    paper = (
        "0.99999997 without augmentation, 0.99917778 under brightness, contrast, rotation, crop, 0.99987373 and "
        "0.99974626 with a mask of 0.05 and 0.30, 0.99994875 and 0.99988020 with blur + jitter of 0.10 and 0.50, "
        "0.99917 to 0.99939 under affine changes (tab:diag-rcs)"
    )
    Settings = ConsistencySettings
    shape = Summary
    batch = 16
    order = 710
    examples: ClassVar[tuple[int, int]] = (12, 200)
    highlights = (
        Highlight(
            "consistency (RCS) under light augmentation",
            lambda summary: _highlight(summary),
            "RCS: cosine of the mean latents of a question under brightness, contrast, rotation, crop; read it beside "
            "that of other questions.",
            overview=False,
        ),
        Highlight(
            "cosine of mean latents of other questions",
            lambda summary: average(summary["other_questions"], 3, False),
            overview=False,
        ),
    )
    _ids: tuple[str, ...] = ()

    @override
    def measure(self, model: Model, samples: Samples) -> Iterable[Record]:
        from realvr.diagnostics.measuring.consistency import consistency_records

        policy = self.settings.policy if self.settings.answers else None
        found = list(
            consistency_records(model, samples, conditions_of(self.settings.repeats), self.settings.seed, policy)
        )
        vectors = {sample.id: vector[None].float().numpy() for sample, _, vector in found if vector is not None}
        samples.keep(list(vectors), {}, {"mean": list(vectors.values())} if vectors else {})
        for sample, content, _ in found:
            if isinstance(content, str):
                yield self.failed(sample, content)
            else:
                yield {"id": sample.id, **content, "error": None}

    @override
    def summarise(self, records: Sequence[Record]) -> dict[str, Any]:
        good = [record for record in records if record["error"] is None]
        self._ids = tuple(record["id"] for record in good)
        return {
            "questions": len(good),
            "repeats": self.settings.repeats,
            "rows": [_row(good, condition) for condition in conditions_of(self.settings.repeats)],
            "other_questions": mean([]),
            "errors": len(records) - len(good),
        }

    @override
    def extend(self, summary: OwnSummary, others: Mapping[str, Any], folder: Path) -> dict[str, Any]:
        from realvr.diagnostics.streaming import tensors, to_others

        files = StateFiles(folder / f"{self.name}-states")

        def means() -> Iterator[tuple[str, Tensor]]:
            return ((name, rows[0]) for name, rows in tensors(files, self._ids, "mean"))

        found = to_others(means, dict.fromkeys(self._ids, "")) if self._ids else {}
        return {**summary, "other_questions": mean([one["same"] for one in found.values() if "same" in one])}

    @override
    def notes(self, records: Sequence[Record], summary: OwnSummary, count: int) -> list[str]:
        found = super().notes(records, summary, count)
        every = [one for record in records if record["error"] is None for one in record["conditions"].values()]
        first = next((why for one in every for why in one.get("refused", ())), "")
        for key, words in (("destroyed", "show nothing any more"), ("refused", "could not be read")):
            lost = {row["condition"]: row[key] for row in summary["rows"] if row.get(key)}
            if lost:
                told = ", ".join(f"{name} {number}" for name, number in lost.items())
                told += f"; first: {first}" if key == "refused" else ""
                found.append(f"{sum(lost.values())} changed views {words} and were left out ({told})")
        return found

    @override
    def panel(self, record: Record) -> Panel | None:
        if record["error"] is not None:
            return None
        rows = [
            [name, _said(found["rcs"]), _said(found["to_original"]), f"{sum(found['kept'])} of {len(found['kept'])}"]
            for name, found in record["conditions"].items()
        ]
        return Panel([Facts(rows, ["condition", "RCS", "to the original", "answers kept"])])

    @override
    def draw(self, results: Sequence[Shown]) -> list[Widget]:
        rows: list[list[Cell | str]] = []
        for one in results:
            for row in one.summary["rows"]:
                family = WORDS.get(row["family"], row["family"])
                label = family if row["strength"] is None else f"{family} {row['strength']:.2f}"
                cells = [average(row[key], 6, False) for key in ("rcs", "to_original")]
                rows.append([one.name, label, *cells, average(row["kept"], 3, False), _left_out(row)])
            rows.append([one.name, "other questions", average(one.summary["other_questions"], 6, False), "", "", ""])
        header = ["arm", "condition", "RCS", "cosine to the original", "answers kept", "left out"]
        note = "Other questions: mean cosine of the mean latents of different questions, the level to read RCS against."
        return [Table("Consistency under changes of the picture", header, rows, note)]

    @override
    def figure(self, results: Sequence[Shown]) -> Figure | None:
        from realvr.widgets import figures

        known = [one for one in results if one.summary["questions"]]
        if not known:
            return None
        figure, axes = figures.new(2, 4, width=9.0, height=4.4)
        for row, key, title in zip(axes, ("rcs", "kept"), ("RCS", "answers kept"), strict=True):
            letters = "abcd" if key == "rcs" else "efgh"
            _fixed(row[0], known, key, letters[0])
            for ax, letter, family in zip(row[1:], letters[1:], SWEEPS, strict=True):
                figures.panel(ax, letter, WORDS[family])
                for one in known:
                    found = [found for found in one.summary["rows"] if found["family"] == family]
                    values, low, high = ([each[key][end] for each in found] for end in ("mean", "low", "high"))
                    figures.curve(ax, [each["strength"] for each in found], values, low, high, one.number, one.name)
                    if key == "rcs" and one.summary["other_questions"]["mean"] is not None:
                        level = one.summary["other_questions"]["mean"]
                        label = f"{one.name}, other questions"
                        ax.axhline(level, color=figures.color(one.number), linestyle=":", linewidth=1, label=label)
                ax.set_xlabel("strength")
            row[0].set_ylabel(title)
        axes[0][1].legend()
        return figure


def _fixed(ax: Any, results: Sequence[Shown], key: str, letter: str) -> None:  # noqa: ANN401  # matplotlib's
    """Reference, augmentation and (of RCS) other questions, as bars."""
    from realvr.widgets import figures

    names = [REFERENCE, AUGMENTED, *(["other questions"] if key == "rcs" else [])]
    series = []
    for one in results:
        found = [row[key] for row in one.summary["rows"] if row["family"] in names]
        found += [one.summary["other_questions"]] if key == "rcs" else []
        values, low, high = ([each[end] for each in found] for end in ("mean", "low", "high"))
        series.append((one.name, values, low, high))
    figures.panel(ax, letter, "RCS" if key == "rcs" else "Answers kept")
    figures.bars(ax, names, series, [one.number for one in results], tilt=25)


def _row(records: Sequence[Record], condition: Condition) -> dict[str, Any]:
    own = [record["conditions"][condition.name] for record in records]
    kept = [one["kept"] for one in own if one["kept"]]
    return {
        "condition": condition.name,
        "family": condition.family,
        "strength": condition.strength,
        "rcs": mean([one["rcs"] for one in own if one["rcs"] is not None]),
        "to_original": mean([one["to_original"] for one in own if one["to_original"] is not None]),
        "kept": mean([sum(one) / len(one) for one in kept]),
        "views": sum(one["views"] for one in own),
        "destroyed": sum(one["destroyed"] for one in own),
        "refused": sum(len(one.get("refused", ())) for one in own),
    }


def _left_out(row: Mapping[str, Any]) -> str:
    return f"{row['destroyed'] + row.get('refused', 0):,}"


def _said(value: float | None) -> str:
    return "none" if value is None else number(value, 6)


def _highlight(summary: OwnSummary) -> Cell:
    found = [row["rcs"] for row in summary["rows"] if row["condition"] == AUGMENTED]
    return average(found[0], 3, False) if found else Cell(DASH)
