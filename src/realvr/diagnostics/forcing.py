"""Target forcing (tab:diag-teacher-forcing): are free-running latents what they were trained to reconstruct?

For k = 0 (free-running) and each k of ``--forced``, the first k latents are replaced by their targets v_1 … v_k and the
recurrence continues by itself. The resulting trajectory is compared with the targets, latent by latent:

    MSE_t = |z_t - v_t|^2 / D,    cos_t = cos(z_t, v_t),

and averaged over the K latents of a question, then over questions. A forced position is fed the target, so it scores as
the target itself: MSE 0, cosine 1. With k = K the trajectory equals the targets by construction.

The cosine over all K latents therefore rises with k by itself. Ours, to separate the two: ``rest`` averages over the
K - k latents that are not forced, and ``rest_free`` over the same latents of the free-running trajectory. Only the
difference between them is an effect of forcing. ``nearest`` is the share of latents whose nearest visual token (by
cosine, as in the walk) is their target, where a target is one token. ``predicted`` compares the states one position
before each slot with the targets while all slots hold targets: what the loss of Stage 1 measures. ``others`` is the
mean cosine of free-running latents with the visual tokens that are no target, the level without any alignment.

Targets are those of Stage 1 (`realvr.data.targets`). The checkpoint does not record how it was trained, so
``--targets`` chooses, and the summary names and separates what was used:

* ``boxes``: the visual token at the centre of each evidence box, in the order of the boxes (in reading order where the
  data says that the order means nothing), the last repeated; more than K boxes are thinned evenly.
* ``evidence``: the visual tokens of the evidence in reading order, as in the paper; the first K of them, the last
  repeated.
* ``image``: data without boxes has K times the mean of all visual tokens. The paper reports BLINK, which has no boxes,
  and does not say with which targets.

``auto`` takes ``boxes`` where a sample has several boxes in order, else ``evidence``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NotRequired

from pydantic import Field, field_validator
from typing_extensions import TypedDict, override

from realvr.diagnostics import results as shapes
from realvr.diagnostics.base import Diagnostic
from realvr.diagnostics.model import Model
from realvr.diagnostics.numbers import mean
from realvr.diagnostics.parts import DiagnosticSettings, Highlight, Needs, OwnSummary, Samples, Shown
from realvr.errors import UserError
from realvr.latent.steps import parse_steps
from realvr.runs.journal import Record
from realvr.widgets import DASH, Cell, Table, Widget, average
from realvr.widgets.browser import Bars, Facts, Panel, Series

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = {
    "boxes": "the token at the centre of each box, in order",
    "evidence": "the tokens of the evidence, in reading order",
    "image": "the mean of all visual tokens: no boxes",
}


class Schedule(TypedDict):
    """The first k latents forced, the others free-running."""

    forced: int
    mse: shapes.Mean
    cosine: shapes.Mean
    nearest: shapes.Mean
    rest_mse: shapes.Mean
    rest_cosine: shapes.Mean
    rest_nearest: shapes.Mean
    rest_free_mse: shapes.Mean
    rest_free_cosine: shapes.Mean
    rest_free_nearest: shapes.Mean
    steps: list[shapes.Mean]
    """Cosine of each latent."""


class Predicted(TypedDict):
    """States before the slots while every slot holds its target."""

    mse: shapes.Mean
    cosine: shapes.Mean
    nearest: shapes.Mean
    steps: list[shapes.Mean]


class Group(TypedDict):
    """Questions with one kind of target."""

    questions: int
    cut: int
    schedules: list[Schedule]
    predicted: Predicted
    others: shapes.Mean


class Summary(TypedDict):
    """``forcing.json``."""

    latents: int
    targets: dict[shapes.Text, Group]
    errors: int
    settings: NotRequired[shapes.Settings]


class ForcingSettings(DiagnosticSettings):
    """Which latents are forced, and to what."""

    forced: str | None = Field(
        default=None,
        description="How many of the first latents are forced, separated by commas, such as 4,8,16; by default K/4, "
        "K/2 and K.",
    )
    targets: Literal["auto", "boxes", "evidence"] = Field(
        default="auto",
        description="What latents are compared with: a token for each box in order, the tokens of the evidence in "
        "reading order, or (auto) the first where a sample has several boxes in order. Without boxes: the mean of all "
        "visual tokens.",
    )

    @field_validator("forced")
    @classmethod
    def _numbers(cls, value: str | None) -> str | None:
        if value is not None:
            parse_steps(value, "--forced")
        return value


class Forcing(Diagnostic[ForcingSettings]):
    """Distance of trajectories from their targets, free-running and with the first k latents forced."""

    name = "forcing"
    title = "Target forcing"
    question = "Are free-running latents what they were trained to reconstruct, and do they come back when forced?"
    reading = (
        "MSE and cosine to the targets of Stage 1. Forced latents are the targets themselves, so the numbers over all "
        "latents improve with k by construction; compare the rest with the same latents free-running."
    )
    needs = Needs(span=True)
    paper = (
        "cosine 0.2145 free-running, 0.4221, 0.6145 and 1.0000 with 4, 8 and 16 of 16 forced, MSE 1.4218 on BLINK; "
        "0.2863, 0.4898, 0.6619, 1.0000 and 1.7700 on VISCOT (tab:diag-teacher-forcing)"
    )
    Settings = ForcingSettings
    shape = Summary
    batch = 16
    order = 730
    examples: ClassVar[tuple[int, int]] = (128, 1000)
    highlights = (
        Highlight(
            "cosine of latents to their targets",
            lambda summary: _highlight(summary),
            "Targets: what Stage 1 trains latents to reconstruct; free-running.",
            overview=False,
        ),
    )

    @override
    def settle(self, model: Model) -> None:
        wrong = [count for count in self.counts(model.latents) if count > model.latents]
        if wrong:
            raise UserError(f"--forced {wrong[0]}: at most K = {model.latents} latents can be forced")

    def counts(self, latents: int) -> tuple[int, ...]:
        """How many latents are forced, ascending."""
        usual = [count for count in (latents // 4, latents // 2, latents) if count]
        asked = self.settings.forced
        return tuple(sorted(set(usual if asked is None else parse_steps(asked, "--forced"))))

    @override
    def measure(self, model: Model, samples: Samples) -> Iterable[Record]:
        from realvr.diagnostics.measuring.targets import forcing_records

        reading = model.read(samples)
        for sample, error in reading.errors:
            yield self.failed(sample, error)
        found = forcing_records(model, reading, self.counts(model.latents), self.settings.targets)
        for sample, content in found:
            if isinstance(content, str):
                yield self.failed(sample, content)
            else:
                yield {"id": sample.id, **content, "error": None}

    @override
    def summarise(self, records: Sequence[Record]) -> dict[str, Any]:
        good = [record for record in records if record["error"] is None]
        kinds = {kind: [record for record in good if record["target"] == kind] for kind in KINDS}
        return {
            "latents": max((len(record["predicted"]["cosine"]) for record in good), default=0),
            "targets": {kind: _group(own) for kind, own in kinds.items() if own},
            "errors": len(records) - len(good),
        }

    @override
    def notes(self, records: Sequence[Record], summary: OwnSummary, count: int) -> list[str]:
        found = super().notes(records, summary, count)
        for kind, group in summary["targets"].items():
            if kind == "image":
                found.append(
                    f"{group['questions']} questions have no evidence boxes: their target is the mean of all "
                    "visual tokens, K times"
                )
            if group["cut"]:
                found.append(
                    f"{group['cut']} of {group['questions']} questions have more {kind} than "
                    f"{summary['latents']} latents; some have no latent"
                )
        return found

    @override
    def panel(self, record: Record) -> Panel | None:
        if record["error"] is not None:
            return None
        series = [
            Series("free-running" if count == "0" else f"first {count} forced", found["cosine"], "cosine to the target")
            for count, found in record["schedules"].items()
            if int(count) < len(found["cosine"])
        ]
        return Panel([Bars(series), Facts([["targets", KINDS[record["target"]]]])])

    @override
    def draw(self, results: Sequence[Shown]) -> list[Widget]:
        rows: list[list[Cell | str]] = []
        for one in results:
            for kind, group in one.summary["targets"].items():
                for found in group["schedules"]:
                    label = f"force k = {found['forced']}" if found["forced"] else "free-running"
                    keys = (
                        "mse",
                        "cosine",
                        "nearest",
                        "rest_cosine",
                        "rest_free_cosine",
                        "rest_nearest",
                        "rest_free_nearest",
                    )
                    rows.append([one.name, kind, label, *(average(found[key], 4, False) for key in keys)])
                cells = [average(group["predicted"][key], 4, False) for key in ("mse", "cosine", "nearest")]
                rows.append([one.name, kind, "predicted, all forced", *cells, *[""] * 4])
                rows.append([one.name, kind, "other visual tokens", "", average(group["others"], 4, False), *[""] * 5])
        header = [
            "arm",
            "targets",
            "schedule",
            "MSE",
            "cosine",
            "nearest is target",
            "cosine, rest",
            "cosine, rest free-running",
            "nearest, rest",
            "nearest, rest free-running",
        ]
        used = dict.fromkeys(kind for one in results for kind in one.summary["targets"])
        note = "Targets: " + "; ".join(f"{kind}, {KINDS[kind]}" for kind in used) + "." if used else ""
        return [Table("Alignment with targets under forcing", header, rows, note)]

    @override
    def figure(self, results: Sequence[Shown]) -> Figure | None:
        from realvr.widgets import figures

        known = [(one, _largest(one.summary)) for one in results if one.summary["targets"]]
        if not known:
            return None
        figure, axes = figures.new(1, 3, height=2.8 + 0.15 * len(known))
        for ax, letter, key, title in zip(axes[0], "ab", ("cosine", "mse"), ("Cosine to targets", "MSE"), strict=False):
            figures.panel(ax, letter, title)
            for one, group in known:
                _curves(ax, one, group, key)
            ax.set_xlabel("latents forced (k)")
            ax.set_ylabel(title.split(" ")[0].lower() if key == "cosine" else "MSE")
        figures.panel(axes[0][2], "c", "Cosine by latent")
        for one, group in known:
            lines: tuple[tuple[str, Any, dict[str, Any]], ...] = (
                ("free-running", group["schedules"][0]["steps"], {}),
                ("predicted", group["predicted"]["steps"], {"linestyle": ":", "mfc": "none"}),
            )
            for label, steps, more in lines:
                values, low, high = ([step[end] for step in steps] for end in ("mean", "low", "high"))
                places = range(1, len(steps) + 1)
                figures.curve(axes[0][2], places, values, low, high, one.number, f"{one.name}, {label}", **more)
        axes[0][2].set_xlabel("latent t")
        axes[0][2].legend()
        figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
        return figure


def _group(records: Sequence[Record]) -> dict[str, Any]:
    counts = sorted(int(count) for count in records[0]["schedules"])
    return {
        "questions": len(records),
        "cut": sum(record["cut"] for record in records),
        "schedules": [_schedule(records, count) for count in counts],
        "predicted": _means([record["predicted"] for record in records], 0)
        | {"steps": _steps([record["predicted"] for record in records])},
        "others": mean([record["others"] for record in records if record["others"] is not None]),
    }


def _schedule(records: Sequence[Record], count: int) -> dict[str, Any]:
    own, free = ([record["schedules"][key] for record in records] for key in (str(count), "0"))
    rest = {f"rest_{key}": found for key, found in _means(own, count).items()}
    rest |= {f"rest_free_{key}": found for key, found in _means(free, count).items()}
    return {"forced": count, **_means(own, 0), **rest, "steps": _steps(own)}


def _means(scores: Sequence[Mapping[str, Any]], skipped: int) -> dict[str, Any]:
    """Mean over a question's latents after the first ``skipped``, then over questions."""
    found = {}
    for key in ("mse", "cosine", "nearest"):
        rows = [[float(value) for value in one[key][skipped:] if value is not None] for one in scores]
        found[key] = mean([sum(row) / len(row) for row in rows if row])
    return found


def _steps(scores: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [mean(list(values)) for values in zip(*(one["cosine"] for one in scores), strict=True)]


def _largest(summary: Mapping[str, Any]) -> Mapping[str, Any]:
    """The kind of target that most questions have."""
    groups: Mapping[str, Mapping[str, Any]] = summary["targets"]
    return max(groups.values(), key=lambda group: group["questions"])


def _curves(ax: Any, one: Shown, group: Mapping[str, Any], key: str) -> None:  # noqa: ANN401  # matplotlib's
    """All latents, those that are not forced, and the same latents free-running."""
    from realvr.widgets import figures

    lines: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("all", key, {}),
        ("rest", f"rest_{key}", {"linestyle": "--", "mfc": "none"}),
        ("rest, free-running", f"rest_free_{key}", {"linestyle": ":", "mfc": "none", "alpha": 0.7}),
    )
    for label, name, more in lines:
        found = [schedule[name] for schedule in group["schedules"]]
        values, low, high = ([value[end] for value in found] for end in ("mean", "low", "high"))
        places = [schedule["forced"] for schedule in group["schedules"]]
        figures.curve(ax, places, values, low, high, one.number, f"{one.name}, {label}", **more)


def _highlight(summary: OwnSummary) -> Cell:
    """Free-running, of the kind of target that most questions have."""
    kinds = sorted(summary["targets"].values(), key=lambda one: -one["questions"])
    free = [one for kind in kinds for one in kind["schedules"] if one["forced"] == 0]
    return average(free[0]["cosine"], 3, False) if free else Cell(DASH)
