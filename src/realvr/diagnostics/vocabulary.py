"""Vocabulary readout (fig:latent-vocabulary-readout): which token does the LM head read in a latent?

z_t is a hidden state after the final norm, so the LM head applies to it as it stands:

    p_t = softmax(W z_t),   top-1 token = argmax p_t,

over all rows of the head (``raw``), and with special tokens at -inf (``masked``, the paper's reading). Special are the
tokenizer's control tokens, the three latent markers and rows beyond the tokenizer. The *modal* token is the one that is
top-1 most often over all states; its share is the mean over questions of the share of their K states, so that the
interval resamples questions. Its probability (``modal_probability``) is the mean over the states where it is top-1;
``probability`` is the mean top-1 probability over all states, whatever the token.

Cosines of z_t to rows of the unembedding W: that of its own masked top-1 token, of ``<|lvr_end|>``, of ``<`` (with
which a tokenizer that has no marker spells it, as in the paper), and the mean over ``--rows`` rows of text tokens drawn
by seed and sample. The top-1 cosine is high by construction, because the token is chosen for its large product: read it
beside the random rows. A checkpoint whose tokenizer has no marker is measured with ``--latents K`` alone: markers are
added untrained, and the cosine to ``<|lvr_end|>`` is null.

Control: the same head over the right answer, teacher-forced behind the model's own span: the share of tokens that it
predicts, and the probability of its predictions. A greedy answer would be predicted by definition.

Only top rows are kept. The head is the one that answers are decoded with. Gemma 3's vision-language class has no final
soft cap; one would change probabilities, not the top-1 token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NotRequired

from pydantic import Field
from typing_extensions import TypedDict, override

from realvr.data.sample import Sample
from realvr.diagnostics import results as shapes
from realvr.diagnostics.base import Diagnostic
from realvr.diagnostics.model import Model
from realvr.diagnostics.numbers import mean, ratio
from realvr.diagnostics.parts import DiagnosticSettings, Highlight, Needs, OwnSummary, Samples, Shown
from realvr.runs.journal import Record
from realvr.widgets import DASH, Cell, Table, Widget, average
from realvr.widgets.browser import Facts, Panel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

READINGS = {"masked": "special tokens masked", "raw": "all rows"}
COSINES = {
    "top": "its top-1 token",
    "end": "<|lvr_end|>",
    "opening": "the token <",
    "random": "random rows",
}
_LISTED = 8


class Token(TypedDict):
    """A token that is top-1 of some states."""

    id: int
    token: shapes.Text
    states: int


class Position(TypedDict):
    """The t-th latent over questions: its modal token, the share of questions with it, the mean top-1 probability, and
    that of the modal token where it is top-1 (missing in files of earlier versions)."""

    token: shapes.Text
    share: shapes.Mean
    probability: shapes.Mean
    modal_probability: NotRequired[shapes.Mean]


class Read(TypedDict):
    """Top-1 tokens of all states. ``distinct`` counts them; ``tokens`` lists the most frequent."""

    token: shapes.Text | None
    share: shapes.Mean
    probability: shapes.Mean
    modal_probability: NotRequired[shapes.Mean]
    distinct: int
    tokens: list[Token]
    positions: list[Position]


class Predicted(TypedDict):
    """The head over the right answer: all its tokens, and those that are the answer itself."""

    right: shapes.Mean
    probability: shapes.Mean
    content_right: shapes.Mean


class Summary(TypedDict):
    """``vocabulary.json``."""

    questions: int
    latents: int
    states: int
    masked: Read
    raw: Read
    end_top1: shapes.Mean
    cosine: dict[shapes.Text, shapes.Mean]
    answer: Predicted
    errors: int
    settings: NotRequired[shapes.Settings]


class VocabularySettings(DiagnosticSettings):
    """What latents are compared with."""

    rows: int = Field(default=32, ge=1, description="Rows of the unembedding drawn for each question, as a reference.")
    seed: int = Field(default=0, description="Fixes which rows these are.")


class Vocabulary(Diagnostic[VocabularySettings]):
    """Top-1 tokens of the latents under the LM head."""

    name = "vocabulary"
    title = "Vocabulary readout"
    question = "Which token does the LM head read in a latent?"
    reading = (
        "Modal token: the one that is top-1 most often, special tokens masked and not, with its share of all latents "
        "and its mean probability there. One token at nearly all latents says that the head sees no words in them, not "
        "that they are empty. Control: the same head on the right answer behind the span."
    )
    needs = Needs(span=True, untrained=True)
    paper = (
        "with Gemma-3-12B, all 376 latents of 47 questions read as < with probability 1.0 (special tokens masked); "
        "cosine 0.41 to the unembedding of the closing tag, 0.02 to a random row (fig:latent-vocabulary-readout)"
    )
    Settings = VocabularySettings
    shape = Summary
    batch = 16
    order = 70
    examples: ClassVar[tuple[int, int]] = (100, 500)
    highlights = (
        Highlight(
            "latents read as one token",
            lambda summary: average(summary["masked"]["share"], 2, False),
            "Latents read as one token: share of latents with the modal top-1 token of the LM head, special tokens "
            "masked.",
        ),
    )

    @override
    def prepare(self, model: Model, samples: Sequence[Sample]) -> None:
        from realvr.diagnostics.measuring.vocabulary import Vocabulary as Words

        self._words = Words(model.backbone)

    @override
    def measure(self, model: Model, samples: Samples) -> Iterable[Record]:
        from realvr.diagnostics.measuring.vocabulary import vocabulary_records

        reading = model.read(samples)
        for sample, error in reading.errors:
            yield self.failed(sample, error)
        for sample, found in vocabulary_records(model, reading, self._words, self.settings.rows, self.settings.seed):
            yield {"id": sample.id, **found, "error": None}

    @override
    def summarise(self, records: Sequence[Record]) -> dict[str, Any]:
        good = [record for record in records if record["error"] is None]
        latents = max((record["latents"] for record in good), default=0)
        answers = [record["answer"] for record in good if record["answer"]]
        inside = [own for own in ([one for one in answer if one[4]] for answer in answers) if own]
        return {
            "questions": len(good),
            "latents": latents,
            "states": latents * len(good),
            **{reading: _read([record[reading] for record in good], latents) for reading in READINGS},
            "end_top1": mean([record["end"] / latents for record in good if record["end"] is not None]),
            "cosine": {name: mean(_means(good, name)) for name in COSINES},
            "answer": {
                "right": mean([_average(one[3] for one in answer) for answer in answers]),
                "probability": mean([_average(one[2] for one in answer) for answer in answers]),
                "content_right": mean([_average(one[3] for one in own) for own in inside]),
            },
            "errors": len(records) - len(good),
        }

    @override
    def notes(self, records: Sequence[Record], summary: OwnSummary, count: int) -> list[str]:
        found = super().notes(records, summary, count)
        if summary["questions"] and summary["cosine"]["end"]["mean"] is None:
            found.append("this checkpoint has no <|lvr_end|> of its own: there is no cosine to it")
        return found

    @override
    def numbers(self, summary: OwnSummary | None) -> dict[str, Any]:
        return {
            "modal_token": None if summary is None else summary["masked"]["token"],
            "modal_share": None if summary is None else summary["masked"]["share"]["mean"],
        }

    @override
    def panel(self, record: Record) -> Panel | None:
        if record["error"] is not None:
            return None
        rows = [
            [f"z_{t}", f"{shown(masked[1])} ({masked[2]:.3f}); all rows: {shown(raw[1])} ({raw[2]:.3f})"]
            for t, (masked, raw) in enumerate(zip(record["masked"], record["raw"], strict=True), start=1)
        ]
        said = " ".join(f"{shown(one[1])}{'' if one[3] else ' ✗'}" for one in record["answer"])
        return Panel([Facts([*rows, ["head over the right answer", said or DASH]])])

    # ------------------------------------------------------------------ tables and figures

    @override
    def draw(self, results: Sequence[Shown]) -> list[Widget]:
        return [_modal_table(results), _cosine_table(results), *(_token_table(one) for one in results)]

    @override
    def figure(self, results: Sequence[Shown]) -> Figure | None:
        from realvr.widgets import figures

        known = [one for one in results if one.summary["states"]]
        if not known:
            return None
        figure, axes = figures.new(1, 3, height=2.7, width_ratios=[1.15, 1, 1])
        _by_latent(axes[0][0], known)
        _bars(axes[0][1], known, "b", "Cosine to head rows", list(COSINES), "cosine")
        _bars(axes[0][2], known, "c", "Head on the answer", ["right", "probability", "content_right"], "answer")
        return figure


def _read(rows: Sequence[Sequence[Sequence[Any]]], latents: int) -> dict[str, Any]:
    """Top-1 tokens of questions, each a list of K entries [id, text, probability]."""
    counted = Counter(entry[0] for row in rows for entry in row)
    names = {entry[0]: entry[1] for row in rows for entry in row}
    most = sorted(counted.items(), key=lambda one: (-one[1], one[0]))
    modal = most[0][0] if most else None
    return {
        "token": None if modal is None else names[modal],
        "share": mean([_average(entry[0] == modal for entry in row) for row in rows]),
        "probability": mean([_average(entry[2] for entry in row) for row in rows]),
        "modal_probability": ratio(*_of_token(rows, modal)),
        "distinct": len(most),
        "tokens": [{"id": i, "token": names[i], "states": count} for i, count in most[:_LISTED]],
        "positions": [_position([row[t] for row in rows]) for t in range(latents)],
    }


def _of_token(rows: Sequence[Sequence[Sequence[Any]]], token: int | None) -> tuple[list[float], list[float]]:
    """Of each question with it: the sum of the probabilities of a token where it is top-1, and how often it is."""
    found = [[entry[2] for entry in row if entry[0] == token] for row in rows]
    return [sum(own) for own in found if own], [float(len(own)) for own in found if own]


def _position(entries: Sequence[Sequence[Any]]) -> dict[str, Any]:
    counted = Counter(entry[0] for entry in entries)
    modal = min(counted, key=lambda token: (-counted[token], token))
    return {
        "token": next(entry[1] for entry in entries if entry[0] == modal),
        "share": mean([float(entry[0] == modal) for entry in entries]),
        "probability": mean([entry[2] for entry in entries]),
        "modal_probability": mean([entry[2] for entry in entries if entry[0] == modal]),
    }


def _average(values: Iterable[float]) -> float:
    found = [float(value) for value in values]
    return sum(found) / len(found)


def _means(records: Sequence[Record], name: str) -> list[float]:
    found = [record["cosine"][name] for record in records]
    return [_average(values) for values in found if values is not None]


def shown(token: str | None) -> str:
    """A token as text that can be read: white space and quotes are written out."""
    return DASH if token is None else f"‘{_plain(token)}’"


def _plain(token: str) -> str:
    text = token.replace(" ", "␣").replace("\n", "↵").replace("\t", "⇥")
    return "".join(letter if letter.isprintable() else "�" for letter in text) or "∅"


def _modal_table(results: Sequence[Shown]) -> Table:
    rows: list[list[Cell | str]] = []
    for one in results:
        for key, words in READINGS.items():
            found = one.summary[key]
            numbers = [
                average(found["share"], 3, False),
                _its_probability(found),
                average(found["probability"], 3, False),
            ]
            distinct = Cell(str(found["distinct"]), value=found["distinct"])
            rows.append([one.name, words, str(one.summary["states"]), shown(found["token"]), *numbers, distinct])
    header = ["arm", "reading", "states", "modal token", "share of states", "its probability there"]
    header += ["top-1 probability, all states", "distinct tokens"]
    return Table("Top-1 tokens of latents", header, rows, "Intervals resample questions.")


def _its_probability(found: Mapping[str, Any]) -> Cell:
    return average(found.get("modal_probability") or mean([]), 3, False)


def _cosine_table(results: Sequence[Shown]) -> Table:
    rows: list[list[Cell | str]] = [
        [
            one.name,
            *(average(one.summary["cosine"][name], 3, False) for name in COSINES),
            average(one.summary["end_top1"], 3, False),
            average(one.summary["answer"]["content_right"], 3, False),
            average(one.summary["answer"]["right"], 3, False),
            average(one.summary["answer"]["probability"], 3, False),
        ]
        for one in results
    ]
    header = ["arm", *(f"cos to {words}" for words in COSINES.values()), "top-1 is <|lvr_end|>"]
    header += ["answer content predicted", "answer tokens predicted", "its top-1 probability"]
    note = "Cosines of latents to rows of the unembedding. Control: the head over the right answer behind the span."
    return Table("Latents against the unembedding, and the control", header, rows, note)


def _token_table(one: Shown) -> Table:
    rows: list[list[Cell | str]] = []
    for t, (masked, raw) in enumerate(
        zip(one.summary["masked"]["positions"], one.summary["raw"]["positions"], strict=True), start=1
    ):
        cells = [
            (shown(found["token"]), average(found["share"], 2, False), _its_probability(found))
            for found in (masked, raw)
        ]
        rows.append([str(t), *cells[0], *cells[1]])
    header = ["latent", "modal token", "share", "probability", "all rows: modal token", "share", "probability"]
    return Table(f"Modal token of each latent: {one.name}", header, rows)


_LABELS = {
    "top": "top-1\ntoken",
    "end": "lvr_end",
    "opening": "<",
    "random": "random\nrows",
    "right": "tokens\nright",
    "probability": "top-1\nprob.",
    "content_right": "content\nright",
}


def _by_latent(ax: Any, results: Sequence[Shown]) -> None:  # noqa: ANN401  # matplotlib's
    """Share of the modal token at each latent: special tokens masked solid, all rows dotted. One model alone has its
    masked tokens written beside the points."""
    from realvr.widgets import figures

    figures.panel(ax, "a", "Modal token by latent")
    for one in results:
        for key, more in (("masked", {}), ("raw", {"linestyle": ":", "mfc": "none"})):
            positions = one.summary[key]["positions"]
            values, low, high = ([found["share"][end] for found in positions] for end in ("mean", "low", "high"))
            label = f"{one.name}, {'masked' if key == 'masked' else 'all rows'}: {_short(one.summary[key]['token'])}"
            figures.curve(ax, range(1, len(values) + 1), values, low, high, one.number, label, **more)
            written = key == "masked" and len(results) == 1 and len(positions) <= 10
            for t, position in enumerate(positions if written else (), start=1):
                place = (t, position["share"]["mean"])
                ax.annotate(
                    _short(position["token"]), place, (2, 5), textcoords="offset points", fontsize=5.5, rotation=40
                )
    ax.set(xlabel="latent t", ylabel="share of questions", ylim=(0, 1.25 + 0.2 * len(results)))
    ax.set_yticks([0, 0.25, 0.5, 0.75, 1])
    ax.legend(loc="upper left", fontsize=6.5)


def _short(token: str | None) -> str:
    """For a figure: at most twelve letters, without what matplotlib would read as mathematics."""
    text = DASH if token is None else _plain(token).replace("$", "＄")
    return text if len(text) <= 12 else text[:11] + "…"


def _bars(ax: Any, results: Sequence[Shown], letter: str, title: str, keys: Sequence[str], part: str) -> None:  # noqa: ANN401  # matplotlib's
    from realvr.widgets import figures

    figures.panel(ax, letter, title)
    series = []
    for one in results:
        found = [one.summary[part][key] for key in keys]
        values, low, high = ([value[end] for value in found] for end in ("mean", "low", "high"))
        series.append((one.name, values, low, high))
    figures.bars(ax, [_LABELS[key] for key in keys], series, [one.number for one in results])
    if len(results) > 1:
        ax.legend()
