"""Does the question decide where the model looks? Two questions about one picture, each with a paraphrase.

Estimator (fig:design-question-switch). For one question: attention to the visual tokens, mean over layers, heads and
K + 1 queries: the slots of z_1 … z_K, and the query that predicts the first content token of the greedy answer (without
a span, that query alone). Divided by its mean over the picture it is a density; 1 everywhere if the model looks
everywhere alike. The tokens of thumbnails are left out, several pictures count as one. The region of a question is the
visual tokens of its boxes; its number is the mean density there.

Denominators: means over pictures. For each question of a picture: the density of the question and of its paraphrase in
its own region, and that of the other question in the same region, which is the control: a model that looks at both
regions whatever is asked has a high density in each and no difference. ``selection`` is own minus other. The sizes of
regions differ, so densities of two regions are not compared.

Which samples belong together is decided by `realvr.diagnostics.question_groups.groups`: the same picture, other boxes;
the same picture, boxes and answer in other words are paraphrases. ``realvr world make OUT --split trails --kinds
switch`` makes such data.

Ours: the queries (the paper names none), the control of the other question, numbers over many pictures. The figure
shows the first picture all of whose questions could be read. This baseline (uniform) differs from that of `enrichment`
(windows of the same shape).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from realvr.diagnostics import attention_results
from realvr.diagnostics.base import Diagnostic
from realvr.diagnostics.model import Model
from realvr.diagnostics.numbers import mean, rate, short
from realvr.diagnostics.parts import DiagnosticSettings, Highlight, Needs, OwnSummary, Samples, Shown, Skip
from realvr.diagnostics.question_groups import groups
from realvr.runs.journal import Record
from realvr.widgets import Cell, Figures, Key, Table, Widget, average, number, share
from realvr.widgets.browser import Map, Overlay, Panel
from realvr.widgets.charts import Bar, forest

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from realvr.data.sample import Sample
    from realvr.diagnostics.measuring.looking import Look
    from realvr.diagnostics.question_groups import Asked

BARS = {"question": "the question", "paraphrase": "its paraphrase", "other": "the other question"}
NAMES = {(1, 1): "Q1", (1, 2): "Q1′", (2, 1): "Q2", (2, 2): "Q2′"}


class QuestionSwitch(Diagnostic[DiagnosticSettings]):
    """Attention of different questions on one picture."""

    name = "question-switch"
    title = "The question decides where the model looks"
    question = "Does another question about the same picture move the attention, and a paraphrase not?"
    reading = (
        "Density: attention of the latents and of the query before the first answer token, over its mean on the "
        "picture; 1 if the model looks everywhere alike. In each question's region: the density of that question, of "
        "its paraphrase, and of the other question. Selection: own minus other; zero if the question does not matter."
    )
    needs = Needs(boxes=True)
    paper = ""
    shape = attention_results.QuestionSwitch
    batch = 16
    order = 53
    examples = (96, 800)
    highlights = (
        Highlight(
            "attention density, own minus other question",
            lambda summary: average(summary["selection"], 2),
            "Density: in the region of the question that is asked, beside the other question about the same picture.",
            overview=False,
        ),
    )

    @override
    def select(self, items: Sequence[Sample], data: Path) -> list[Sample]:
        found = groups(items)
        if not found:
            raise Skip(
                f"{data}: no picture has two questions with different evidence boxes, which diagnostic {self.name} "
                "compares (`realvr world make OUT --split trails --kinds switch` draws some)"
            )
        return [sample for sample in items if sample.id in found]

    def prepare(self, model: Model, samples: Sequence[Sample]) -> None:
        """Which samples belong together."""
        self._asked = groups(samples)

    @override
    def measure(self, model: Model, samples: Samples) -> Iterable[Record]:
        from realvr.diagnostics.measuring.looking import look

        looks, errors = look(model, list(samples))
        for sample, error in errors:
            yield self.failed(sample, error)
        for one in looks:
            yield _record(one, self._asked[one.sample.id], model.latents)

    def summarise(self, records: Sequence[Record]) -> dict[str, Any]:
        """Densities in regions, of each picture the mean over its two, then over pictures with bootstrap intervals."""
        good = [record for record in records if record["error"] is None and record["skipped"] is None]
        pictures: dict[str, dict[tuple[int, int], Record]] = {}
        for record in good:
            pictures.setdefault(record["picture"], {})[record["question"], record["wording"]] = record
        whole = [found for found in pictures.values() if (1, 1) in found and (2, 1) in found]
        # The regions of one picture are not independent: pictures are what is drawn again.
        regions = [[_region(found, question) for question in (1, 2)] for found in whole]
        selection = _by_picture([[one["question"] - one["other"] for one in pair] for pair in regions])
        gaps = [[abs(one["question"] - one["paraphrase"]) for one in pair if "paraphrase" in one] for pair in regions]
        return {
            "pictures": len(whole),
            "questions": len(good),
            "latents": max((record["latents"] for record in good), default=0),
            "incomplete": len(pictures) - len(whole),
            "accuracy": rate(sum(record["correct"] for record in good), len(good)),
            **{
                name: mean(_by_picture([[one[name] for one in pair if name in one] for pair in regions]))
                for name in BARS
            },
            "selection": mean(selection),
            "paraphrase_gap": mean(_by_picture(gaps)),
            "follows": rate(sum(value > 0 for value in selection), len(selection)),
            "example": _example(whole),
        }

    @override
    def notes(self, records: Sequence[Record], summary: OwnSummary, count: int) -> list[str]:
        found = super().notes(records, summary, count)
        skipped = sum(record["error"] is None and record["skipped"] is not None for record in records)
        if skipped:
            found.append(f"{skipped} of {count} questions have no attention on the picture to speak of: left out")
        if summary["incomplete"]:
            found.append(f"{summary['incomplete']} pictures lack one of their two questions: left out")
        if summary["pictures"] and summary["paraphrase"]["mean"] is None:
            found.append("no question has a paraphrase: two samples with the same boxes and answer in other words")
        return found

    @override
    def draw(self, results: Sequence[Shown]) -> list[Widget]:
        rows: list[list[Cell | str]] = []
        bars = []
        for one in results:
            found = one.summary
            cells: list[Cell | str] = [average(found[name], 2, False) for name in BARS]
            cells += [average(found["selection"], 2), average(found["paraphrase_gap"], 2, False)]
            counts = [str(found["pictures"]), str(found["questions"])]
            rows.append([one.name, *counts, share(found["accuracy"]), *cells, share(found["follows"])])
            value = found["selection"]
            if value["mean"] is not None:
                bars.append(Bar(one.name, value["mean"], value["low"], value["high"], one.number))
        header = ["arm", "pictures", "questions", "right, %", *BARS.values()]
        header += ["selection", "apart from its paraphrase", "own region first, %"]
        note = (
            "Mean density in a question's own region, 1 being the picture's mean: of a picture the mean over its two "
            "regions, with bootstrap intervals over pictures. Own region first: pictures whose selection is above zero."
        )
        table = Table("Density in each question's region", header, rows, note)
        if not bars:
            return [table]
        spoken = "; ".join(f"{bar.name} {number(bar.value, 2, sign=True)}" for bar in bars)
        chart = ("Selection: own minus other question", forest(bars, f"Selection: {spoken}.", ""))
        keys = [Key(one.number, one.name) for one in results]
        return [Figures("The question decides where the model looks", [chart], keys), table]

    @override
    def figure(self, results: Sequence[Shown]) -> Figure:
        from realvr.widgets import figures

        drawn, axes = figures.new(len(results), 5, width=9.5, height=2.3 * len(results) + 0.3, width_ratios=None)
        examples = [one.summary["example"] for one in results]
        top = max(
            (value for one in examples if one for case in one["maps"] for row in case["grid"] for value in row),
            default=2.0,
        )
        letters = (chr(ord("a") + place) for place in range(26))
        for one, example, row in zip(results, examples, axes, strict=True):
            image = None
            for (key, name), ax in zip(NAMES.items(), row, strict=False):
                figures.panel(ax, next(letters, ""), f"{one.name}: {name}")
                case = next((case for case in (example or {"maps": []})["maps"] if case["name"] == name), None)
                if case is None:
                    figures.empty(ax)
                    continue
                image = _draw_density(ax, case, example["boxes"][key[0] - 1], top)
            if image is not None and row[3].figure is not None:
                drawn.colorbar(image, ax=list(row[:4]), shrink=0.8, pad=0.01, label="density")
            figures.panel(row[4], next(letters, ""), f"regions (n = {one.summary['pictures']})")
            values = [one.summary[name] for name in BARS]
            if values[0]["mean"] is None:
                figures.empty(row[4])
                continue
            middle, low, high = ([value[end] for value in values] for end in ("mean", "low", "high"))
            figures.bars(row[4], list(BARS.values()), [("", middle, low, high)], [one.number], tilt=30)
            row[4].axhline(1.0, color="#666666", linewidth=0.8)
            row[4].set_ylabel("mean density")
        return drawn

    @override
    def panel(self, record: Record) -> Panel | None:
        if not record.get("maps"):
            return None
        overlay = Overlay(
            "density",
            [Map("latents and answer", "mean", record["maps"])],
            "times the picture's mean",
            "Attention of the latents and of the query before the first answer token.",
        )
        return Panel([overlay])


# ---------------------------------------------------------------------- records


def _record(one: Look, asked: Asked, latents: int) -> Record:
    import torch

    from realvr.diagnostics.measuring import looking
    from realvr.maths.attention import density

    queries = [one.latents_LKN[:, t] for t in range(latents)]
    queries += [one.predicting_LN] if one.predicting_LN is not None else []
    record: Record = {
        "id": one.sample.id,
        "picture": asked.picture,
        "question": asked.question,
        "wording": asked.wording,
        "text": one.sample.question,
        "latents": latents,
        "correct": one.said.correct,
        "skipped": None if queries else looking.NO_CONTENT,
        "error": None,
    }
    if not queries:
        return record
    attention_N = torch.stack(queries).mean((0, 1))
    on_tiles = looking.tiles(one.grids)
    density_N = torch.zeros_like(attention_N)
    density_N[on_tiles] = density(attention_N[on_tiles])
    if bool(density_N.isnan().any()):
        return record | {"skipped": "no attention on the picture"}
    found = [looking.region(one.sample, one.grids, boxes=looking.as_shown(one.sample, own)) for own in asked.boxes]
    regions = [float((density_N * own.target_N).sum() / own.target_N.sum()) for own in found]
    record["density"] = [short(value) for value in regions]
    record["maps"] = [looking.coarse(grid) for grid in looking.split(density_N, one.grids)]
    record["boxes"] = [[list(box.xyxy) for box in own if box.image == one.sample.shown[0]] for own in asked.boxes]
    return record


# ---------------------------------------------------------------------- numbers


def _region(found: dict[tuple[int, int], Record], question: int) -> dict[str, float]:
    """Densities in the region of one question of a picture."""
    place = question - 1
    values = {"question": found[question, 1]["density"][place], "other": found[3 - question, 1]["density"][place]}
    if (question, 2) in found:
        values["paraphrase"] = found[question, 2]["density"][place]
    return values


def _by_picture(values: Sequence[Sequence[float]]) -> list[float]:
    """Means of the pictures that have any."""
    return [sum(own) / len(own) for own in values if own]


def _example(whole: Sequence[dict[tuple[int, int], Record]]) -> dict[str, Any] | None:
    """Maps of the first picture with all four questions, else of the first."""
    if not whole:
        return None
    chosen = next((found for found in whole if len(found) == len(NAMES)), whole[0])
    return {
        "picture": chosen[1, 1]["picture"],
        "boxes": chosen[1, 1]["boxes"],
        "maps": [
            {
                "name": name,
                "question": chosen[key]["text"],
                "density": chosen[key]["density"],
                "grid": chosen[key]["maps"][0],
            }
            for key, name in NAMES.items()
            if key in chosen
        ],
    }


# ---------------------------------------------------------------------- the figure


def _draw_density(ax: Axes, case: dict[str, Any], boxes: Sequence[Sequence[float]], top: float) -> Any:  # noqa: ANN401
    """A map with the region of its question in dashes; every map of the figure has the scale 0 … ``top``."""
    from matplotlib.patches import Rectangle

    from realvr.widgets import figures

    image = figures.heatmap(ax, case["grid"], low=0.0, high=top, scale=False)
    rows, columns = len(case["grid"]), len(case["grid"][0])
    for x0, y0, x1, y1 in boxes:
        corner, width, height = (x0 * columns - 0.5, y0 * rows - 0.5), (x1 - x0) * columns, (y1 - y0) * rows
        for color, line in (("black", "-"), ("white", "--")):
            ax.add_patch(Rectangle(corner, width, height, fill=False, edgecolor=color, linestyle=line, linewidth=1.0))
    ax.set_xlabel(f"own region {case['density'][int(case['name'][1]) - 1]:.2f}", fontsize=7)
    ax.set_aspect("equal")
    return image
