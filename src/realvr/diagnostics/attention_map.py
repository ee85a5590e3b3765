"""Who looks at whom: attention between bins of image, question, latents and answer.

Estimator (fig:attention-grounding-schematic). The visual tokens of a question are cut into 8 runs, the question (with
its options and instruction) into 4, the generated greedy reply into 4; the K latents stand alone. For bins q and k,

    m_{q,k} = mean over layers, heads and queries i of q, of the sum over keys j of k of A_{i,j}

and each row is divided by its sum over the bins, so that it sums to one over the keys that the causal mask allows; what
that leaves out (system and template text, markers, the end of the turn) is printed as omitted mass. Rows are the mean
over questions of these rows. A bin that is empty in a question (a reply of fewer than four tokens) has no row there.

Evidence bins: of each image bin, the share of the evidence's visual tokens that lie in it, mean over questions. One
that holds more than its even share is marked. Bins run in the order in which the model reads tokens: row by row, tile
by tile, the thumbnail of a tiled image last, one picture after the other.

Ours: keys are summed, not averaged; rows are normalised question by question; which bins are marked; and the links,
raw shares of attention from latents and answer, with the share of the latents' image attention that lies in bins with
evidence beside that of a latent that looks everywhere alike. Bins of 8 are coarse; `evidence-readout` is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field
from typing_extensions import override

from realvr.diagnostics import attention_results
from realvr.diagnostics.base import Diagnostic
from realvr.diagnostics.data import with_shown_boxes
from realvr.diagnostics.model import Model
from realvr.diagnostics.numbers import mean, short
from realvr.diagnostics.parts import DiagnosticSettings, Highlight, Needs, OwnSummary, Samples, Shown
from realvr.runs.journal import Record
from realvr.widgets import DASH, Cell, Fold, Table, Widget, average, number
from realvr.widgets.browser import Matrix, Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LINKS = {
    "latents_on_image": "latents on the image",
    "answer_on_image": "answer on the image",
    "answer_on_latents": "answer on the latents",
    "answer_on_question": "answer on the question",
    "evidence_share": "latents' image attention in evidence bins",
    "evidence_even": "if they looked everywhere alike",
}


class MapSettings(DiagnosticSettings):
    """How many bins."""

    image_bins: int = Field(default=8, ge=1, description="Bins of the visual tokens.")
    question_bins: int = Field(default=4, ge=1, description="Bins of the question.")
    answer_bins: int = Field(default=4, ge=1, description="Bins of the generated reply.")


class AttentionMap(Diagnostic[MapSettings]):
    """Attention of all layers and heads between parts of the sequence."""

    name = "attention-map"
    title = "Attention between image, question, latents and answer"
    question = "Where does attention go between image, question, latents and answer?"
    reading = (
        "A row is a bin of queries, a column a bin of keys; each row sums to one over the bins that it may see. "
        "Omitted: the share of attention that went to system text, template and markers. Marked image bins hold more "
        "than their even share of the evidence."
    )
    needs = Needs()
    paper = ""
    Settings = MapSettings
    shape = attention_results.AttentionMap
    batch = 8
    order = 51
    examples = (80, 200)
    highlights = (
        Highlight(
            "attention of the answer on the picture",
            lambda summary: average(summary["links"]["answer_on_image"], 3, False),
            overview=False,
        ),
        Highlight(
            "attention of the answer on the latents",
            lambda summary: average(summary["links"]["answer_on_latents"], 3, False),
            "Attention of the answer: share of all bins, mean over layers and heads.",
            overview=False,
        ),
    )

    @override
    def measure(self, model: Model, samples: Samples) -> Iterable[Record]:
        from realvr.diagnostics.measuring.binning import binned
        from realvr.diagnostics.measuring.looking import digits

        shown, hidden = with_shown_boxes(samples)
        sizes = self.settings
        found, errors = binned(model, shown, sizes.image_bins, sizes.question_bins, sizes.answer_bins)
        for sample, error in [*hidden, *errors]:
            yield self.failed(sample, error)
        for one in found:
            yield {
                "id": one.sample.id,
                "latents": model.latents,
                "bins": [sizes.image_bins, sizes.question_bins, model.latents, sizes.answer_bins],
                "sizes": one.sizes,
                "correct": one.said.correct,
                "mass": digits(one.mass),
                "evidence": None if one.evidence is None else [short(share) for share in one.evidence],
                "question_found": one.found,
                "error": None,
            }

    def summarise(self, records: Sequence[Record]) -> dict[str, Any]:
        """The map with what it omits, evidence by image bin, and the links, over questions."""
        good = [record for record in records if record["error"] is None]
        bins = good[0]["bins"] if good else [0, 0, 0, 0]
        total = sum(bins)
        rows = [_normalised(record) for record in good]
        evidence = [record["evidence"] for record in good if record["evidence"] is not None]
        shares = [mean([one[place] for one in evidence]) for place in range(bins[0])]
        links = [_links(record) for record in good]
        return {
            "questions": len(good),
            "latents": bins[2],
            "bins": bins,
            "labels": labels(bins),
            "map": [[_cell(rows, query, key) for key in range(total)] for query in range(total)],
            "omitted": [
                mean([1 - sum(record["mass"][query]) for record in good if record["sizes"][query]])
                for query in range(total)
            ],
            "evidence": shares,
            "marked": [one["mean"] is not None and one["mean"] > 1 / bins[0] for one in shares],
            "links": {name: mean([one[name] for one in links if name in one]) for name in LINKS},
            "question_not_found": sum(not record["question_found"] for record in good),
        }

    @override
    def notes(self, records: Sequence[Record], summary: OwnSummary, count: int) -> list[str]:
        found = super().notes(records, summary, count)
        if summary["question_not_found"]:
            found.append(
                f"the question of {summary['question_not_found']} prompts was not found in their text: all text behind "
                "the picture stands for it"
            )
        if summary["questions"] and not any(one["pairs"] for one in summary["evidence"]):
            found.append("no sample has evidence boxes: no image bin is marked")
        return found

    @override
    def draw(self, results: Sequence[Shown]) -> list[Widget]:
        return [_overall(results), *(Fold(f"Map of {one.name}", [_map_table(one)]) for one in results)]

    @override
    def figure(self, results: Sequence[Shown]) -> Figure:
        from realvr.widgets import figures

        drawn, axes = figures.new(1, len(results), width=4.6 * len(results), height=4.3)
        known = [cell["mean"] for one in results for row in one.summary["map"] for cell in row if cell is not None]
        highest = max((value for value in known if value is not None), default=1.0)
        for place, (one, ax) in enumerate(zip(results, axes[0], strict=True)):
            title = f"{one.name} (n = {one.summary['questions']})"
            figures.panel(ax, chr(ord("a") + place) if place < 26 else "", title)
            _draw_map(ax, one.summary, highest)
        return drawn

    @override
    def panel(self, record: Record) -> Panel | None:
        if record["error"] is not None:
            return None
        names = labels(record["bins"])
        values = [
            [None if row is None or (key > query and not row[key]) else round(row[key], 3) for key in range(len(names))]
            for query, row in enumerate(_normalised(record))
        ]
        about = "A row is a bin of queries; it sums to one over the bins. Mean over layers and heads."
        return Panel([Matrix("attention between bins", names, names, values, "share of attention", about)])


# ---------------------------------------------------------------------- numbers


def labels(bins: Sequence[int]) -> list[str]:
    """Short names of the bins, in order."""
    return [f"{letter}{place + 1}" for letter, count in zip("IQzA", bins, strict=True) for place in range(count)]


def _normalised(record: Record) -> list[list[float] | None]:
    """Rows divided by their sums; None for a bin without tokens."""
    totals = [sum(row) if size else 0.0 for row, size in zip(record["mass"], record["sizes"], strict=True)]
    rows = zip(record["mass"], totals, strict=True)
    return [[value / total for value in row] if total > 0 else None for row, total in rows]


def _cell(rows: Sequence[list[list[float] | None]], query: int, key: int) -> dict[str, Any] | None:
    """Mean over questions; None where no query of the bin sees the key. Later keys are seen in both directions only:
    among the tokens of one image, by some families."""
    values = [row[key] for one in rows if (row := one[query]) is not None]
    return mean(values) if values and (key <= query or any(values)) else None


def _links(record: Record) -> dict[str, float]:
    """Raw shares of attention from the latents and from the reply to parts of the sequence."""
    image, question, latents, answer = record["bins"]
    parts = {"image": (0, image), "question": (image, image + question)}
    parts["latents"] = (image + question, image + question + latents)
    parts["answer"] = (image + question + latents, image + question + latents + answer)

    def on(queries: str, keys: str) -> float | None:
        rows = [record["mass"][query] for query in range(*parts[queries]) if record["sizes"][query]]
        return sum(sum(row[slice(*parts[keys])]) for row in rows) / len(rows) if rows else None

    pairs = {
        "latents_on_image": ("latents", "image"),
        "answer_on_image": ("answer", "image"),
        "answer_on_latents": ("answer", "latents"),
        "answer_on_question": ("answer", "question"),
    }
    found = {name: value for name, pair in pairs.items() if (value := on(*pair)) is not None}
    if not latents:
        found.pop("answer_on_latents", None)
    evidence, sizes = record["evidence"], record["sizes"][:image]
    if evidence is not None and latents and found.get("latents_on_image", 0) > 0:
        inside = [place for place, share in enumerate(evidence) if share > 0]
        rows = record["mass"][slice(*parts["latents"])]
        own = sum(row[place] for row in rows for place in inside)
        found["evidence_share"] = own / sum(sum(row[:image]) for row in rows)
        found["evidence_even"] = sum(sizes[place] for place in inside) / sum(sizes)
    return found


# ---------------------------------------------------------------------- tables and figures


def _overall(results: Sequence[Shown]) -> Table:
    rows: list[list[Cell | str]] = []
    for one in results:
        found = one.summary
        cells: list[Cell | str] = [average(found["links"][name], 3, False) for name in LINKS]
        marked = [name for name, mark in zip(found["labels"], found["marked"], strict=False) if mark]
        rows.append([one.name, str(found["questions"]), *cells, ", ".join(marked) or DASH])
    note = (
        "Shares of attention, means over layers, heads, positions and questions; rows are not normalised here. "
        "Evidence bins of a question hold any of its evidence; marked ones hold more than their even share over all."
    )
    return Table("Links", ["arm", "questions", *LINKS.values(), "marked image bins"], rows, note)


def _map_table(one: Shown) -> Table:
    found = one.summary
    rows: list[list[Cell | str]] = [
        [
            name,
            *(Cell("") if cell is None else Cell(number(cell["mean"], 3), value=cell["mean"]) for cell in row),
            average(omitted, 3, False),
        ]
        for name, row, omitted in zip(found["labels"], found["map"], found["omitted"], strict=True)
    ]
    spread = ", ".join(
        f"{name} {number(share['mean'], 2)}"
        for name, share in zip(found["labels"], found["evidence"], strict=False)
        if share["mean"] is not None
    )
    note = f"Rows sum to one. Evidence by image bin: {spread}." if spread else "Rows sum to one."
    return Table(f"{one.name}: attention between bins", ["queries", *found["labels"], "omitted"], rows, note)


def _draw_map(ax: Axes, summary: OwnSummary, highest: float) -> None:
    """Cells in colours of their square roots, which shows small shares too; evidence bins are green with a star."""
    from matplotlib.colors import PowerNorm
    from matplotlib.patches import Rectangle

    from realvr.widgets import figures

    if not summary["questions"]:
        figures.empty(ax)
        return
    values = [[None if cell is None else cell["mean"] for cell in row] for row in summary["map"]]
    names = [
        f"{name}*" if place < len(summary["marked"]) and summary["marked"][place] else name
        for place, name in enumerate(summary["labels"])
    ]
    image = figures.heatmap(ax, values, names, names, scale=False)
    image.set_norm(PowerNorm(0.5, 0.0, highest))
    if ax.figure is not None:
        ax.figure.colorbar(image, ax=ax, shrink=0.85, pad=0.13, label="share of attention (over the bins)")
    ax.tick_params(labelsize=6)
    for ticks in (ax.get_xticklabels(), ax.get_yticklabels()):
        for tick in ticks:
            if tick.get_text().endswith("*"):
                tick.set(color="#007A5A", fontweight="bold")
    for tick in ax.get_xticklabels():
        tick.set_rotation(90)
    ax.set_xlabel("keys")
    ax.set_ylabel("queries")
    for place, one in enumerate(summary["omitted"]):
        text = "–" if one["mean"] is None else f"{one['mean']:.2f}"
        ax.text(len(names) - 0.3, place, text, va="center", fontsize=5.5, color="#444444")
    ax.text(len(names) - 0.3, -1.0, "omitted", fontsize=5.5, va="center", color="#444444")
    image_bins, question, latents, answer = summary["bins"]
    before = image_bins + question
    if latents:
        frames = [((0, before), image_bins, latents), ((before, before + latents), latents, answer)]
        for (x, y), width, height in frames:
            ax.add_patch(Rectangle((x - 0.5, y - 0.5), width, height, fill=False, edgecolor="#D55E00", linewidth=1.2))
