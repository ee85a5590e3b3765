"""Latent health (ours; readout, credit and weights are the paper's): are the latents alive, and is there anything for
routing to act on?

For one question with latents z_1 … z_K and visual tokens v_n:

* norm ``|z_t|``, and its ratio to the mean norm of the question's visual tokens. Far from 1, the slots get inputs of
  another size than pictures give.
* adjacent cosine ``cos(z_t, z_{t+1})``, K - 1 of them: near 1 everywhere, the latents repeat one vector.
* drift from Stage 1: cosine of z_t to the z_t of the checkpoint that ``--second-model`` names, on the same prompt, and
  ``|z_t - z'_t| / |z'_t|``. Of models with another K the first latents are compared, as many as both have; another
  width or no span cannot be compared, which the summary says.
* restored gain: ``log p_k`` is the log-probability of the whole formatted right answer, teacher-forced, with z_1 … z_k
  in their slots and the mean of each position (`realvr.diagnostics.replacements`) in the others. The gain of the
  latents is ``log p_K - log p_0``. **Smallest k with 95 % of the gain**: the first k with ``log p_k - log p_0 >= 0.95
  (log p_K - log p_0)``. The curve need not rise at every step. A question whose latents gain nothing (at most 0.001
  nats) has no such k; these are counted. Also that of the mean curve.
* readout mass ``sum_t r_t(y*)`` of the right answer, and credit mass ``sum_t gamma_t``, ``gamma_t = [r_t^+ - r_t^-]+``
  (sec:method_readout_gate). Wrong answers twice: ``sampled``, the distinct wrong answers of G completions as Stage 2
  draws them (``--group``, ``--temperature``; without a wrong one the credit is 0, as there), and ``options``, all wrong
  options of a multiple-choice question, which every such question has.
* movable share ``(1 - eta) sum gamma / (eta + (1 - eta) sum gamma)``: how much of the weight on the evidence of an
  example routing can move; the rest is uniform (sec:method_objective; eta = 0.3, tab:hp-rl).

Everything is a mean over questions with a bootstrap interval.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from markupsafe import Markup
from pydantic import Field
from typing_extensions import override

from realvr.diagnostics.base import Diagnostic
from realvr.diagnostics.health_summary import MODELS_DIFFER, Health, summarise_health
from realvr.diagnostics.model import Model
from realvr.diagnostics.parts import DiagnosticSettings, Highlight, Needs, OwnSummary, Samples, Shown
from realvr.errors import UserError
from realvr.runs.journal import Record
from realvr.widgets import DASH, Cell, Figures, Fold, Key, Table, Text, Widget, average, number, significant
from realvr.widgets.browser import Bars, Facts, Panel, Series
from realvr.widgets.charts import Line, Point, lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_Values = Sequence[float | None]
_Bars = tuple[str, _Values, _Values, _Values]
"""Label, values, low and high."""


class HealthSettings(DiagnosticSettings):
    """How wrong answers are drawn, and the baseline of the weights."""

    eta: float = Field(default=0.3, ge=0, le=1, description="Uniform baseline of the weights (0.3 in the paper).")
    group: int = Field(default=8, ge=0, description="Completions sampled for wrong answers; 0 samples none.")
    temperature: float = Field(default=0.6, gt=0, description="Temperature of these completions (0.6 in the paper).")
    seed: int = Field(default=0, description="Fixes the sampled completions.")
    by: str = Field(default="arrows", description="Tag whose values get rows of their own.")


class HealthTest(Diagnostic[HealthSettings]):
    """Norms, neighbours, drift, restored gain, readout and credit of the latents."""

    name = "health"
    title = "Latent health"
    question = "Are the latents alive, and is there anything for routing to act on?"
    reading = (
        "Ratio: norm of a latent over the mean norm of visual tokens. Adjacent: cosine of neighbouring latents; near "
        "1, the span repeats one vector. Smallest k: how many latents from the first on give 95 % of what all K add to "
        "the log-probability of the right answer, over the mean latents. Readout mass: attention of the right answer "
        "to all latents; credit mass: what of it the wrong answers lack. Movable: share of the weight that routing "
        "decides."
    )
    needs = Needs(span=True, may_compare=True)
    paper = ""
    Settings = HealthSettings
    shape = Health
    batch = 16
    order = 55
    examples = (64, 500)
    highlights = (
        Highlight(
            "gain of the latents, nats",
            lambda summary: average(summary["gain"], 2, True),
            "Gain: log-probability of the right answer with the own latents minus with the mean latents.",
        ),
    )

    @override
    def prepare(self, model: Model, samples: Sequence[Any]) -> None:
        from realvr.diagnostics.measuring.replacing import Replacing

        self._mean = Replacing(model, samples, ["position-mean"], self.settings.seed, batch=self.batch).mean_KD

    @override
    def measure(self, model: Model, samples: Samples) -> Iterable[Record]:
        from realvr.diagnostics.measuring.health import HealthOptions, health_records, incomparable, truth_tokens

        settings, usable = self.settings, []
        for sample in samples:
            try:
                truth_tokens(model.backbone, sample)
                usable.append(sample)
            except UserError as error:
                yield self.failed(sample, str(error))
        reading = model.read(usable)
        for sample, why in reading.errors:
            yield self.failed(sample, why)
        options = HealthOptions(
            settings.eta, settings.group, settings.temperature, settings.seed, model.sampling.max_new
        )
        reason = incomparable(model)
        groups = {sample.id: sample.tags.get(settings.by, "") for sample in samples}
        if reading.samples:
            assert self._mean is not None
            for record in health_records(model, reading, self._mean, options):
                yield record | {MODELS_DIFFER: reason, "group": groups[record["id"]]}

    @override
    def summarise(self, records: Sequence[Record]) -> dict[str, Any]:
        settings = self.settings
        return summarise_health(records, settings.eta, settings.group, settings.seed, settings.by)

    @override
    def notes(self, records: Sequence[Record], summary: OwnSummary, count: int) -> list[str]:
        found = super().notes(records, summary, count)
        if summary["without_gain"]:
            found.append(
                f"{summary['without_gain']} of {summary['questions']} questions gain nothing from their latents: they "
                "have no smallest k"
            )
        drift = summary["drift"]
        if drift["reason"] and drift["reason"] != "no second model was given":
            found.append(f"no drift: {drift['reason']}")
        elif not drift["reason"] and drift["latents"] < summary["latents"]:
            found.append(f"drift: the first {drift['latents']} of {summary['latents']} latents have a counterpart")
        return found

    @override
    def numbers(self, summary: OwnSummary | None) -> dict[str, Any]:
        called = {"latent_norm_ratio": "ratio", "latent_gain": "gain", "readout_mass": "readout_mass"}
        if summary is None:
            return dict.fromkeys(called)
        values = {name: summary[key] for name, key in called.items()}
        return {
            name: {"mean": one["mean"], "ci": [one["low"], one["high"]], "n": one["pairs"]}
            for name, one in values.items()
        }

    @override
    def draw(self, results: Sequence[Shown]) -> list[Widget]:
        told = [Text(f"{one.name}: {line}") for one in results if (line := _drift_line(one.summary))]
        folded = Fold("Every latent", [_steps(results)])
        shown = [one for one in results if one.summary["questions"]]
        tables = [_overall(results), _routing(results), *_by_group(results)]
        return [*([_page_figures(shown)] if shown else []), *tables, *told, folded]

    @override
    def figure(self, results: Sequence[Shown]) -> Figure | None:
        from realvr.widgets import figures

        drawing, axes = figures.new(2, 3, height=4.8)
        for place, (title, draw) in enumerate(_PANELS):
            here = axes[place // 3, place % 3]
            figures.panel(here, "abcdef"[place], title)
            draw(here, results)
        if len(results) > 1:
            handles, labels = axes[0, 0].get_legend_handles_labels()
            drawing.legend(handles, labels, loc="outside upper center", ncols=len(results))
        return drawing

    @override
    def panel(self, record: Record) -> Panel | None:
        if record.get("error") is not None:
            return None
        gained = [b - a for a, b in zip(record["logp"], record["logp"][1:], strict=False)]
        series = [
            Series("norm", record["norm"], "length", "Length of the latent."),
            Series("to the next", [*record["adjacent"], None], "cosine", "Cosine to the following latent."),
            Series("readout", record["readout"], "share of attention", "Attention of the right answer to it."),
            Series("gain when restored", gained, "nats", "Change of log p of the right answer when z_t is put back."),
        ]
        if record["drift"] is not None:
            cosines = record["drift"]["cosine"]
            padded = [*cosines, *[None] * (record["latents"] - len(cosines))]
            series.append(Series("drift", padded, "cosine", "Cosine to the latent of the second model."))
        facts = [["mean norm of the visual tokens", significant(record["visual_norm"])]]
        facts += [["log p of the right answer, own latents", number(record["logp"][-1], 3)]]
        facts += [["with the mean latents", number(record["logp"][0], 3)]]
        return Panel([Bars(series), Facts(facts)])


# ---------------------------------------------------------------------- tables


def _overall(results: Sequence[Shown]) -> Table:
    header = ["arm", "questions", "K", "norm", "ratio to visual tokens", "adjacent cosine", "gain, nats"]
    header += ["smallest k with 95 %", "of the mean curve", "no gain", "drift: cosine", "drift: distance"]
    rows: list[list[Cell | str]] = []
    for one in results:
        found = one.summary
        curve = found["k95_of_mean"]
        rows.append(
            [one.name, str(found["questions"]), str(found["latents"])]
            + [average(found[key], 3, False) for key in ("norm", "ratio", "adjacent")]
            + [average(found["gain"], 2, True), average(found["k95"], 1, False)]
            + [DASH if curve is None else str(curve), str(found["without_gain"])]
            + [average(found["drift"][key], 3, False) for key in ("cosine", "relative")]
        )
    note = "Means over questions (of the mean over their latents) with bootstrap intervals."
    return Table("Latents", header, rows, note)


def _routing(results: Sequence[Shown]) -> Table:
    rows: list[list[Cell | str]] = []
    for one in results:
        for kind, words in (("sampled", f"sampled, G = {one.summary['group']}"), ("options", "all wrong options")):
            found = one.summary[kind]
            row: list[Cell | str] = [one.name, average(one.summary["readout_mass"], 4, False), words]
            row += [str(found["questions"]), str(found["with_wrong"])]
            row += [average(found[key], 5, False) for key in ("gamma", "gamma_with_wrong")]
            rows.append([*row, *(_percent(found[key]) for key in ("movable", "movable_with_wrong"))])
    header = ["arm", "readout mass", "wrong answers", "questions", "with a wrong answer", "Σγ", "Σγ of those"]
    header += ["movable, %", "movable of those, %"]
    eta = f"{results[0].summary['eta']:g}" if results else ""
    return Table("What routing can move", header, rows, f"Movable: (1 - η) Σγ / (η + (1 - η) Σγ), η = {eta}.")


def _by_group(results: Sequence[Shown]) -> list[Widget]:
    rows: list[list[Cell | str]] = [
        [one.name, group, str(found["questions"]), average(found["gain"], 2, True), average(found["k95"], 1, False)]
        + [str(found["without_gain"])]
        for one in results
        for group, found in one.summary["groups"].items()
    ]
    tag = results[0].summary["by"] if results else ""
    header = ["arm", tag, "questions", "gain, nats", "smallest k with 95 %", "no gain"]
    return [Table(f"Gain by {tag}", header, rows)] if rows else []


def _percent(found: dict[str, Any]) -> Cell:
    if found["mean"] is None:
        return Cell(DASH)
    scaled = {key: 100 * found[key] for key in ("mean", "low", "high")}
    return average(found | scaled, 2, False)


def _steps(results: Sequence[Shown]) -> Table:
    rows: list[list[Cell | str]] = [
        [one.name, f"z{step['step']}"]
        + [average(step[key], 3, False) for key in ("norm", "ratio", "adjacent", "readout", "drift")]
        + [average(step["gain"], 3, True)]
        for one in results
        for step in one.summary["steps"]
    ]
    header = ["arm", "latent", "norm", "ratio", "cosine to the next", "readout", "drift: cosine", "gain up to it, nats"]
    return Table("By step", header, rows)


def _drift_line(summary: OwnSummary) -> str:
    drift = summary["drift"]
    if drift["reason"]:
        return "" if drift["reason"] == "no second model was given" else f"no drift ({drift['reason']})."
    return f"drift over the first {drift['latents']} latents of {drift['cosine']['pairs']} questions."


# ---------------------------------------------------------------------- figures


def _page_figures(results: Sequence[Shown]) -> Figures:
    def picture(key: str, label: str) -> Markup | None:
        drawn = []
        for one in results:
            found = [(step["step"], step[key]) for step in one.summary["steps"] if step[key]["mean"] is not None]
            drawn.append(Line(one.name, [Point(x, m["mean"], m["low"], m["high"]) for x, m in found], one.number))
        drawn = [line for line in drawn if line.points]
        spoken = "; ".join(
            f"{line.name} " + ", ".join(f"{point.x:g}: {number(point.y, 3)}" for point in line.points) for line in drawn
        )
        return lines(drawn, f"{label} by latent: {spoken}.", "latent", label) if drawn else None

    wanted = (("Norm over visual tokens", "ratio"), ("Cosine to the next", "adjacent"), ("Gain up to it, nats", "gain"))
    pictures = [(title, drawn) for title, key in wanted if (drawn := picture(key, title.lower())) is not None]
    return Figures("Latent health", pictures, [Key(one.number, one.name) for one in results])


def _curve(key: str, y_label: str, start: bool = False) -> Callable[[Axes, Sequence[Shown]], None]:
    """A panel of one number by latent. ``start``: k = 0 is 0."""

    def draw(axes: Axes, results: Sequence[Shown]) -> None:
        from realvr.widgets import figures

        drawn = False
        for one in results:
            found = [(step["step"], step[key]) for step in one.summary["steps"] if step[key]["mean"] is not None]
            if start and found:
                found = [(0, {"mean": 0.0, "low": 0.0, "high": 0.0}), *found]
            if not found:
                continue
            drawn = True
            middle, low, high = ([numbers[end] for _, numbers in found] for end in ("mean", "low", "high"))
            figures.curve(axes, [x for x, _ in found], middle, low, high, one.number, one.name)
        if not drawn:
            figures.empty(axes)
            return
        axes.set_xlabel("latents restored, k" if start else "latent t")
        axes.set_ylabel(y_label)
        bottom, top = axes.get_ylim()
        axes.set_ylim(min(0.0, bottom), top + 0.06 * (top - min(0.0, bottom)))
        axes.locator_params(axis="x", integer=True)

    return draw


def _histogram(axes: Axes, results: Sequence[Shown]) -> None:
    """Questions by their smallest k, and those without gain."""
    from realvr.widgets import figures

    most = max((one.summary["latents"] for one in results), default=0)
    if not most:
        figures.empty(axes)
        return
    names = [*map(str, range(1, most + 1)), "no\ngain"]
    series = []
    for one in results:
        found = one.summary["k95_shares"]
        shares = [found.get(str(k)) for k in range(1, most + 1)] + [found.get("none")]
        series.append(_column(one.name, shares, "rate"))
    figures.bars(axes, names, series, [one.number for one in results])
    axes.set_xlabel("smallest k with 95 % of the gain")
    axes.set_ylabel("% of questions")


def _column(name: str, entries: Sequence[dict[str, Any] | None], centre: str) -> _Bars:
    """The bars of one model in percent; None where there is no number."""

    def values(key: str) -> list[float | None]:
        return [None if one is None or one[key] is None else 100 * one[key] for one in entries]

    return name, values(centre), values("low"), values("high")


def _masses(axes: Axes, results: Sequence[Shown]) -> None:
    """Readout mass, credit masses and the movable share, in percent, on a logarithmic axis."""
    from realvr.widgets import figures

    names = ["readout\nmass", "Σγ\nsampled", "Σγ\noptions", "movable\nsampled", "movable\noptions"]
    series = []
    for one in results:
        found = one.summary
        entries = [found["readout_mass"]]
        entries += [found[kind][key] for key in ("gamma", "movable") for kind in ("sampled", "options")]
        series.append(_column(one.name, entries, "mean"))
    figures.bars(axes, names, series, [one.number for one in results])
    axes.set_yscale("symlog", linthresh=0.01)
    axes.tick_params(axis="x", labelsize=5.5)
    axes.set_ylabel("% (log above 0.01)")


_PANELS: tuple[tuple[str, Callable[[Axes, Sequence[Shown]], None]], ...] = (
    ("norm over visual tokens", _curve("ratio", "ratio")),
    ("neighbouring latents", _curve("adjacent", "cosine to the next")),
    ("drift", _curve("drift", "cosine to the other model")),
    ("gain of the first k latents", _curve("gain", "nats", start=True)),
    ("latents that are enough", _histogram),
    ("readout, credit, weight", _masses),
)
