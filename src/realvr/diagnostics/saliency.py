"""Answer-conditioned saliency (app:diag-saliency): which keys carry the loss of the answer that a model generated.

Estimator. The model answers greedily; ``L = -sum over j in J of log pi(o_j | x, z_1..K, o_<j)`` is the summed
cross-entropy of the content tokens J of *that* answer, right or wrong, in one teacher-forced pass. The score of a key n
is ``S(n) = mean over decoder layers, heads and j in J of |A_{j,n} dL/dA_{j,n}|`` (`realvr.maths.saliency`), over the
keys that row j sees: visual tokens, the other tokens of the prompt, latents, and the markers and reply before it. The
attention beside it is the mean of ``A_{j,n}`` over the same layers, heads and rows.

Denominators. Shares are of the sum of S over all keys of an example (image + text + latents + reply = 1). *Inside* is
the share of the pictures' sum on the visual tokens of the evidence boxes, *area* the share of visual tokens there,
*concentration* their ratio, one for each example, then averaged; *pointing*: is the largest visual token in a box
(chance: the area). Examples without boxes count in the first, not in these. An answer whose loss has no slope anywhere
has no shares; one without content tokens has no loss: both are counted, and left out.

Maps. The visual tokens of an example are laid over its picture and divided by their largest (``peak`` is kept).
Token-pair maps keep rows (queries) and columns (keys) of the whole text; long runs of tokens are pooled to bins (mean
over queries, sum over keys). The twelve cases are the first of the run, alike for every model, whatever their answers
are.

Ours, where the paper is silent: row j is the query that predicts ``o_j``, one column before it (at its own column the
last token has no effect on L, and a one-letter answer would have no saliency); content is what stands in the
``<answer>`` block, and the option spelt out before it; normalisation by the largest; all numbers, the paper only shows
pictures. The latents are inputs of the pass: dL does not flow through the recurrence, so evidence that reached the
answer *through* a latent is saliency of that latent, never of the picture. The rows of the latents in the token-pair
map are those of the same pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NotRequired

from pydantic import Field
from typing_extensions import TypedDict, override

from realvr.diagnostics import results
from realvr.diagnostics.base import Diagnostic
from realvr.diagnostics.counterfactual import AnswerSettings
from realvr.diagnostics.model import Model
from realvr.diagnostics.numbers import mean, rate
from realvr.diagnostics.parts import Highlight, Needs, OwnSummary, Samples, Shown
from realvr.diagnostics.saliency_maps import GROUPS, KINDS, values
from realvr.runs.journal import Record
from realvr.runs.records import Text as AnyText
from realvr.widgets import Cell, Table, Text, Widget, average, share
from realvr.widgets.browser import Bars, Facts, Map, Matrix, Overlay, Panel, Series

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CASES = 12
OUTCOMES = ("all", "correct", "incorrect")


class Where(TypedDict):
    """Where one kind of score lies, as means over questions."""

    image: results.Mean
    text: results.Mean
    latents: results.Mean
    reply: results.Mean
    inside: results.Mean
    concentration: results.Mean
    pointing: results.Rate


class Group(TypedDict):
    """The numbers of all questions, or of those with one outcome."""

    questions: int
    area: results.Mean
    loss: results.Mean
    attention: Where
    saliency: Where
    latents: dict[AnyText, list[results.Mean]]
    """Share of each latent z_1 … z_K, by kind."""


class SaliencyFile(TypedDict):
    """``saliency.json``."""

    questions: int
    latents: int
    unread: int
    without_content: int
    """Answers without a content token."""
    without_slope: int
    """Answers whose loss does not change with any attention weight: a probability of 1."""
    without_boxes: int
    groups: dict[AnyText, Group]
    """all, correct, incorrect."""
    rule: AnyText
    """How the cases were chosen."""
    cases: list[dict[AnyText, Any]]
    settings: NotRequired[results.Settings]


class SaliencySettings(AnswerSettings):
    """How answers are read, and what is computed for the cases."""

    pair_tokens: int = Field(
        default=4096,
        ge=0,
        description="Longest sequence that gets a token-pair map: it needs one layer's whole attention at a time.",
    )


class Saliency(Diagnostic[SaliencySettings]):
    """``|A dL/dA|`` of the generated answer, as numbers and as maps."""

    name = "saliency"
    title = "Saliency of the answer"
    question = "Which visual tokens, words and latents carry the loss of the answer that the model gave?"
    reading = (
        "Shares of |attention x gradient| (and of attention alone) by what the answer reads: pictures, text, latents, "
        "its own tokens. Inside: of the part on the pictures, the share on the evidence boxes; concentration is that "
        "over their area. Latents are inputs here: evidence that came through them is not saliency of the picture."
    )
    needs = Needs()
    paper = ""
    Settings = SaliencySettings
    shape = SaliencyFile
    batch = 8
    order = 58
    examples = (160, 500)
    highlights = (
        Highlight(
            "saliency on latents, %",
            lambda summary: _percent(summary["groups"]["all"]["saliency"]["latents"]),
            "Saliency on latents: share of |attention x gradient| of the answer that lies on the latent span.",
        ),
    )

    @override
    def measure(self, model: Model, samples: Samples) -> Iterable[Record]:
        from realvr.diagnostics.measuring.saliency import measure_saliency

        first = {sample.id for sample in samples[: max(0, CASES - samples.place)]}
        how = self.settings.policy, self.settings.pair_tokens
        return measure_saliency(model, list(samples), first, samples.detailed, *how)

    # ------------------------------------------------------------------ numbers

    @override
    def summarise(self, records: Sequence[Record]) -> dict[str, Any]:
        read = [record for record in records if record.get("error") is None]
        scored = [record for record in read if "saliency" in record]
        # The case browser may have asked for detail of others, which differ from model to model.
        detailed = [record for record in scored if record.get("detail") and record.get("first", True)][:CASES]
        chosen = {"all": scored}
        chosen |= {name: [one for one in scored if one["correct"] == (name == "correct")] for name in OUTCOMES[1:]}
        wrong = sum(not record["correct"] for record in detailed)
        return {
            "questions": len(scored),
            "latents": max((record["latents"] for record in read), default=0),
            "unread": len(records) - len(read),
            "without_content": len(read) - len(scored),
            "without_slope": sum(record["saliency"]["total"] == 0 for record in scored),
            "without_boxes": sum(record["area"] is None for record in scored),
            "groups": {name: _group(some) for name, some in chosen.items()},
            "rule": f"The first {min(CASES, len(records))} questions of the run, in the order of the data, alike for "
            f"every model and whatever the answers are. {len(detailed)} of them have saliency, and {wrong} of these "
            "answers are wrong.",
            "cases": [_case(record) for record in detailed],
        }

    @override
    def notes(self, records: Sequence[Record], summary: OwnSummary, count: int) -> list[str]:
        lines = super().notes(records, summary, count)
        told = {
            "without_content": "answers have no content tokens, hence no saliency; these are left out",
            "without_slope": "answers have a loss without any slope, hence no shares of saliency",
            "without_boxes": "questions have no evidence boxes; they count in the shares, not inside boxes",
        }
        return lines + [f"{summary[name]} of {count} {text}" for name, text in told.items() if summary[name]]

    # ------------------------------------------------------------------ tables

    @override
    def draw(self, results: Sequence[Shown]) -> list[Widget]:
        shares: list[list[Cell | str]] = []
        boxes: list[list[Cell | str]] = []
        for result in results:
            for outcome in OUTCOMES:
                group = result.summary["groups"][outcome]
                for kind in KINDS:
                    found = group[kind]
                    first: list[Cell | str] = [result.name, outcome, kind]
                    shares.append([*first, str(group["questions"]), *(_percent(found[name]) for name in GROUPS)])
                    boxes.append(
                        [
                            *first,
                            _percent(found["inside"]),
                            _percent(group["area"]),
                            average(found["concentration"], 2, False),
                            share(found["pointing"]),
                        ]
                    )
        head = ["model", "answers", "score"]
        return [
            Table(
                "What the answer's saliency and attention lie on, %",
                [*head, "n", "pictures", "text", "latents", "reply"],
                shares,
                "Each row sums to 100. Text: the prompt without pictures. Reply: markers of the span and the answer.",
            ),
            Table(
                "Evidence boxes",
                [*head, "inside boxes, %", "area, %", "concentration", "largest token inside, %"],
                boxes,
                "Of the part on the pictures. Concentration: inside over area, averaged over questions; 1 is blind.",
            ),
            *(Text(f"{result.name}: {result.summary['rule']}") for result in results if result.summary["cases"]),
        ]

    @override
    def figure(self, results: Sequence[Shown]) -> Figure | dict[str, Figure] | None:
        from realvr.diagnostics.saliency_figures import figures

        return figures(results)

    # ------------------------------------------------------------------ one case

    @override
    def panel(self, record: Record) -> Panel | None:
        detail = record.get("detail")
        if not detail:
            return None
        parts: list[Any] = [
            Overlay(
                kind,
                [Map(one["query"], one["layer"], _grids(one)) for one in detail["maps"][kind]],
                "attention" if kind == "attention" else "|attention x gradient|",
                "Of the queries that predict the answer, or of one latent; mean over heads.",
            )
            for kind in reversed(KINDS)
            if detail["maps"]
        ]
        if record["saliency"]["each"]:
            about = "Share of the answer's {} that lies on this latent."
            series = [Series(kind, record[kind]["each"], "share", about.format(kind)) for kind in reversed(KINDS)]
            parts.append(Bars(series))
        parts.append(Facts(_facts(record), ("the answer reads", *reversed(KINDS))))
        if (pairs := detail["pairs"]) is not None:
            names = [label or group for label, group in zip(pairs["labels"], pairs["groups"], strict=True)]
            parts += [
                Matrix(f"{kind} of token pairs", names, names, _grids(pairs[kind])[0], "per query")
                for kind in reversed(KINDS)
            ]
        note = "Latents are inputs of this pass: what reached the answer through them is not saliency of the picture."
        return Panel(parts, note)


def _group(records: Sequence[Record]) -> dict[str, Any]:
    boxed = [record for record in records if record["area"] is not None]
    most = max((len(record["saliency"]["each"]) for record in records), default=0)
    return {
        "questions": len(records),
        "area": mean([record["area"] for record in boxed]),
        "loss": mean([record["loss"] for record in records]),
        **{kind: _where(records, boxed, kind) for kind in KINDS},
        "latents": {
            kind: [
                mean([record[kind]["each"][place] for record in records if record[kind]["each"]])
                for place in range(most)
            ]
            for kind in KINDS
        },
    }


def _where(records: Sequence[Record], boxed: Sequence[Record], kind: str) -> dict[str, Any]:
    known = [record for record in boxed if record[kind]["inside"] is not None]
    return {
        **{name: mean([one[kind][name] for one in records if one[kind][name] is not None]) for name in GROUPS},
        "inside": mean([record[kind]["inside"] for record in known]),
        "concentration": mean([record[kind]["inside"] / record["area"] for record in known]),
        "pointing": rate(sum(record[kind]["hit"] for record in known), len(known)),
    }


def _case(record: Record) -> dict[str, Any]:
    """What a figure shows of one question: the maps of the answer, means over layers."""
    detail = record["detail"]
    kept = {name: detail[name] for name in ("question", "choices", "truth", "shown", "boxes", "pairs", "no_pairs")}
    picture = detail["pictures"][detail["shown"]] if detail["pictures"] else None
    maps = {kind: _of_answer(detail["maps"][kind], detail["shown"]) for kind in KINDS} if detail["maps"] else None
    said = {name: record[name] for name in ("id", "answer", "text", "correct")}
    return {**said, **kept, "picture": picture, "maps": maps}


def _of_answer(maps: Sequence[dict[str, Any]], image: int) -> dict[str, Any]:
    found = next(one for one in maps if (one["query"], one["layer"]) == ("answer", "mean"))
    return {"peak": found["peak"], "levels": [found["levels"][image]]}


def _grids(found: dict[str, Any]) -> list[list[list[float]]]:
    """Levels as numbers."""
    return [[[float(f"{found['peak'] * value:.3g}") for value in row] for row in grid] for grid in values(found)]


def _facts(record: Record) -> list[list[str]]:
    rows = [[name, *(_share_text(record[kind][name]) for kind in reversed(KINDS))] for name in GROUPS]
    if record["area"] is not None:
        inside = [_share_text(record[kind]["inside"]) for kind in reversed(KINDS)]
        rows.append([f"evidence boxes, of the pictures (area {_share_text(record['area'])})", *inside])
    return rows


def _share_text(value: float | None) -> str:
    return "none" if value is None else f"{100 * value:.1f} %"


def _percent(found: dict[str, Any]) -> Cell:
    """A mean of shares in percent."""
    ends = {name: None if found[name] is None else 100 * found[name] for name in ("mean", "low", "high")}
    return average({**found, **ends}, 1, False)
