"""Task structure (tab:diag-task-structure): is the task written in the states, and in which?

Four representations of every sample: ``prompt`` (h_pre, the state at the last prompt token), ``mean`` (of the K
latents), ``last`` (z_K) and ``final`` (the state that predicts the first content token of the generated answer; see
`measuring.attending`). A model without a span has the first and the fourth.

Each is asked for the label (``--by``: task, category, answer or a tag) in three ways, which
`realvr.diagnostics.probing` states in full: the adjusted Rand index (ARI) of k-means clusters, with a bootstrap over
samples that clusters again; a linear probe; an MLP. Probes have 5-fold cross-validation, and their accuracy an interval
over samples. The paper names the tests; clusterer, number of clusters, probes and folds are ours.

Controls: the same with shuffled labels (``chance``), and the share of the largest class (``majority``), which a probe
reaches that has learned nothing. Classes with fewer than 5 samples are left out and counted, as are samples without a
label. With fewer samples than dimensions a linear probe separates any training data: only held-out samples count, and
the penalty is what keeps it from fitting noise; a notice says so.

A probe that succeeds says that the label *can* be read from a state, not that the model uses it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NotRequired

import numpy as np
from pydantic import Field
from typing_extensions import TypedDict, override

from realvr.data.sample import Sample
from realvr.diagnostics import probing
from realvr.diagnostics import results as shapes
from realvr.diagnostics.base import Diagnostic
from realvr.diagnostics.data import picture_key
from realvr.diagnostics.model import Model
from realvr.diagnostics.parts import DiagnosticSettings, Highlight, Needs, OwnSummary, Samples, Shown, Skip
from realvr.diagnostics.readout import group_of
from realvr.diagnostics.states import StateFiles
from realvr.runs.journal import Record
from realvr.widgets import DASH, Cell, Table, Widget, average, number, share

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REPRESENTATIONS = {"prompt": "h_pre", "mean": "latent mean", "last": "last latent", "final": "final hidden"}
FEWEST = 5
NONE = "none"


class Chance(TypedDict):
    """The same with shuffled labels."""

    ari: float
    linear: shapes.Rate
    mlp: shapes.Rate


class Decoded(TypedDict):
    """One representation."""

    samples: int
    dimensions: int
    ari: float
    bootstrap_ari: shapes.Mean
    linear: shapes.Rate
    mlp: shapes.Rate
    chance: Chance


class Summary(TypedDict):
    """``task-structure.json``."""

    by: shapes.Text
    classes: dict[shapes.Text, int]
    left_out: dict[shapes.Text, int]
    unlabelled: int
    unanswered: int
    majority: float | None
    grouped: bool
    errors: int
    representations: NotRequired[dict[shapes.Text, Decoded]]
    settings: NotRequired[shapes.Settings]


class TaskStructureSettings(DiagnosticSettings):
    """Which label is looked for, and how."""

    by: str = Field(
        default="task",
        description="The label: task (the file's name where the data states none), category, source (the file), "
        "answer (in words), or the name of a tag.",
    )
    resamples: int = Field(default=50, ge=2, description="Draws of the bootstrap of the ARI; each clusters again.")
    seed: int = Field(default=0, description="Fixes clusters, probes, folds and shuffled labels.")


def label_of(sample: Sample, by: str) -> str:
    """The class of a sample; ``none`` where it has no such label."""
    return (sample.answer_text or NONE) if by == "answer" else group_of(sample, by)


class TaskStructure(Diagnostic[TaskStructureSettings]):
    """Clusters and probes of the label in the states before, in and behind the span."""

    name = "task-structure"
    title = "Task structure"
    question = "Is the task written in the states before, in and behind the latent span?"
    reading = (
        "ARI: agreement of k-means clusters with the labels, 0 at chance and 1 where they coincide. Accuracy of linear "
        "and MLP probes on held-out samples (5 folds). Shuffled labels and the largest class show what chance gives. A "
        "label that can be read need not be used."
    )
    needs = Needs()
    paper = (
        "ARI 0.9489 and linear accuracy 0.9994 for h_pre, 0.3885 and 0.9991 for the latent mean, 0.1298 and 0.9966 for "
        "the last latent, 0.2714 and 0.9954 for the final state, on 697 questions of BLINK (tab:diag-task-structure)"
    )
    Settings = TaskStructureSettings
    shape = Summary
    batch = 16
    order = 80
    unit = "samples"
    examples: ClassVar[tuple[int, int]] = (150, 1000)
    highlights = (
        Highlight(
            "label in the mean latent, linear probe, %",
            lambda summary: _probed(summary, "mean"),
            "Linear probe: accuracy on held-out samples; read it beside shuffled labels and the largest class.",
        ),
    )
    _found: tuple[list[Record], dict[str, Any]] | None = None

    @override
    def select(self, items: Sequence[Sample], data: Path) -> list[Sample]:
        probing.check()
        by = self.settings.by
        classes = Counter(label_of(sample, by) for sample in items)
        kept = [name for name, count in classes.items() if name != NONE and count >= FEWEST]
        if len(kept) < 2:
            tags = sorted({name for sample in items for name in sample.tags})
            raise Skip(
                f"{data}: {len(kept)} {'class' if len(kept) == 1 else 'classes'} of '{by}' with at least {FEWEST} "
                f"samples, but two are needed to tell apart: choose another label (--by task, category, source, answer"
                f"{', ' + ', '.join(tags) if tags else ''}), or take more samples (--limit)"
            )
        return list(items)

    @override
    def measure(self, model: Model, samples: Samples) -> Iterable[Record]:
        from realvr.diagnostics.measuring.task_structure import states_of

        reading = model.read(samples)
        states, answered = states_of(model, reading)
        samples.keep([sample.id for sample in reading.samples], states)
        for sample, error in reading.errors:
            yield self.failed(sample, error)
        for sample, has in zip(reading.samples, answered, strict=True):
            label, picture = label_of(sample, self.settings.by), picture_key(sample)
            found = {"latents": model.latents, "label": label, "answered": has, "picture": picture}
            yield {"id": sample.id, **found, "error": None}

    @override
    def summarise(self, records: Sequence[Record]) -> dict[str, Any]:
        good = [record for record in records if record["error"] is None]
        classes = Counter(record["label"] for record in good if record["label"] != NONE)
        kept = {name: count for name, count in sorted(classes.items()) if count >= FEWEST}
        self._used = [record for record in good if record["label"] in kept]
        pictures = [record["picture"] for record in self._used]
        return {
            "by": self.settings.by,
            "classes": kept,
            "left_out": {name: count for name, count in sorted(classes.items()) if name not in kept},
            "unlabelled": sum(record["label"] == NONE for record in good),
            "unanswered": sum(not record["answered"] for record in self._used),
            "majority": max(kept.values()) / sum(kept.values()) if kept else None,
            "grouped": len(set(pictures)) < len(pictures),
            "errors": len(records) - len(good),
        }

    @override
    def extend(self, summary: OwnSummary, others: Mapping[str, Any], folder: Path) -> OwnSummary:
        if self._found is None or self._found[0] != self._used:  # a suite asks twice
            self._found = (self._used, self._decoded(StateFiles(folder / f"{self.name}-states")))
        return summary | {"representations": self._found[1]}

    def _decoded(self, files: StateFiles) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name in REPRESENTATIONS:
            used = [record for record in self._used if name != "final" or record["answered"]]
            counts = Counter(record["label"] for record in used)
            used = [record for record in used if counts[record["label"]] >= FEWEST]
            spans = all(record["latents"] for record in used)
            if len({record["label"] for record in used}) < 2 or (name in ("mean", "last") and not spans):
                continue
            rows = files.rows([record["id"] for record in used], name)
            labels = np.array([record["label"] for record in used])
            one = probing.Probed(rows, labels, [record["picture"] for record in used], self.settings.seed)
            chance = one.shuffled()
            found[name] = {
                "samples": len(rows),
                "dimensions": int(rows.shape[1]),
                "ari": one.ari(),
                "bootstrap_ari": one.bootstrap(self.settings.resamples),
                "linear": one.linear(),
                "mlp": one.mlp(),
                "chance": {"ari": chance.ari(), "linear": chance.linear(), "mlp": chance.mlp()},
            }
        return found

    @override
    def notes(self, records: Sequence[Record], summary: OwnSummary, count: int) -> list[str]:
        found = super().notes(records, summary, count)
        if summary["left_out"]:
            names = ", ".join(f"{name} ({few})" for name, few in summary["left_out"].items())
            found.append(f"classes with fewer than {FEWEST} samples are left out: {names}")
        if summary["unlabelled"]:
            found.append(f"{summary['unlabelled']} samples have no '{summary['by']}' and are left out")
        if summary["unanswered"]:
            found.append(f"{summary['unanswered']} replies are empty: they have no final state")
        small = [one for one in summary.get("representations", {}).values() if one["samples"] < one["dimensions"]]
        if small:
            found.append(
                f"{small[0]['samples']} samples are fewer than {small[0]['dimensions']} dimensions: the linear probe "
                "is held by its L2 penalty (C = 1); compare it with shuffled labels"
            )
        return found

    @override
    def numbers(self, summary: OwnSummary | None) -> dict[str, Any]:
        decoded = {} if summary is None else summary.get("representations", {})
        return {"linear_probe": {name: one["linear"]["rate"] for name, one in decoded.items()} or None}

    # ------------------------------------------------------------------ tables and figures

    @override
    def draw(self, results: Sequence[Shown]) -> list[Widget]:
        rows: list[list[Cell | str]] = []
        for one in results:
            for name, words in REPRESENTATIONS.items():
                found = one.summary.get("representations", {}).get(name)
                if found is None:
                    rows.append([one.name, words, *[DASH] * 7])
                    continue
                chance = found["chance"]
                rows.append(
                    [
                        one.name,
                        words,
                        Cell(number(found["ari"], 4), value=found["ari"]),
                        average(found["bootstrap_ari"], 4, False),
                        share(found["linear"]),
                        share(found["mlp"]),
                        Cell(number(chance["ari"], 4), value=chance["ari"]),
                        share(chance["linear"]),
                        share(chance["mlp"]),
                    ]
                )
        header = ["arm", "representation", "ARI", "bootstrap ARI", "linear, %", "MLP, %"]
        header += ["shuffled: ARI", "shuffled: linear, %", "shuffled: MLP, %"]
        return [Table("Task structure of states", header, rows, "; ".join(_about(one) for one in results) + ".")]

    @override
    def figure(self, results: Sequence[Shown]) -> Figure | None:
        from realvr.widgets import figures

        known = [one for one in results if one.summary.get("representations")]
        if not known:
            return None
        figure, axes = figures.new(1, 3, height=2.6)
        figures.panel(axes[0][0], "a", f"Clusters by {known[0].summary['by']}")
        figures.panel(axes[0][1], "b", "Linear probe")
        figures.panel(axes[0][2], "c", "MLP probe")
        names = ["h_pre", "latent\nmean", "last\nlatent", "final\nhidden"]
        colours = [one.number for one in known]
        for ax, key in zip(axes[0], ("ari", "linear", "mlp"), strict=True):
            figures.bars(ax, names, [_series(one, key) for one in known], colours, percent=key != "ari")
            _chance_marks(ax, known, key)
        axes[0][0].set_ylabel("ARI (dotted: shuffled labels)")
        axes[0][0].set_ylim(min(0.0, axes[0][0].get_ylim()[0]), 1.05)
        if len(known) > 1:
            axes[0][0].legend()
        for ax in axes[0][1:]:
            ax.axhline(100 * known[0].summary["majority"], color="#999999", linewidth=0.8)
        return figure


def _probed(summary: OwnSummary, name: str) -> Cell:
    found = summary.get("representations", {}).get(name)
    return Cell(DASH) if found is None else share(found["linear"])


def _about(one: Shown) -> str:
    classes = one.summary["classes"]
    largest = one.summary["majority"]
    folds = "folds keep pictures together" if one.summary["grouped"] else "5 folds"
    return (
        f"{one.name}: {sum(classes.values())} samples, {len(classes)} classes of '{one.summary['by']}', the largest "
        f"{number(None if largest is None else 100 * largest)} %, {folds}"
    )


def _series(one: Shown, key: str) -> tuple[str, list[float | None], list[float | None], list[float | None]]:
    values: list[list[float | None]] = [[], [], []]
    for name in REPRESENTATIONS:
        found = one.summary["representations"].get(name)
        three: Sequence[float | None] = (None, None, None)
        if found is not None and key == "ari":
            three = (found["ari"], found["bootstrap_ari"]["low"], found["bootstrap_ari"]["high"])
        elif found is not None:
            three = tuple(100 * found[key][end] for end in ("rate", "low", "high"))
        for column, value in zip(values, three, strict=True):
            column.append(value)
    return one.name, values[0], values[1], values[2]


def _chance_marks(ax: Any, results: Sequence[Shown], key: str) -> None:  # noqa: ANN401  # matplotlib's
    """What shuffled labels give, as a dotted line over each bar."""
    width = 0.8 / len(results)
    for place, one in enumerate(results):
        for group, name in enumerate(REPRESENTATIONS):
            found = one.summary["representations"].get(name)
            if found is not None:
                chance = found["chance"]
                value = chance["ari"] if key == "ari" else 100 * chance[key]["rate"]
                left = group - 0.4 + width * place
                ax.plot([left, left + width], [value, value], color="black", linestyle=":", linewidth=1.2)
