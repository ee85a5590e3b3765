"""Diagnostics from outside the package whose records make panels of the case browser: one on samples, one on pairs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from realvr.diagnostics import Diagnostic, Needs, Samples, Shown
from realvr.diagnostics.model import Model
from realvr.widgets import Text, Widget
from realvr.widgets.browser import Bars, Facts, Map, Matrix, Overlay, Panel, Series

Record = dict[str, Any]


class _Toy(Diagnostic):
    def measure(self, model: Model, samples: Samples) -> Iterable[Record]:
        raise NotImplementedError("its records are written by tests")

    def summarise(self, records: Sequence[Record]) -> Record:
        return {"count": len(records)}

    def draw(self, results: Sequence[Shown]) -> list[Widget]:
        return [Text(f"{result.name}: {result.summary['count']}") for result in results]


class ToyLook(_Toy):
    """Bars, maps and a matrix of every sample that has detail."""

    name = "toy-look"
    title = "Where latents look"
    question = "Where do the latents look?"
    reading = "Larger is more."
    needs = Needs(span=True)
    paper = ""

    def panel(self, record: Record) -> Panel | None:
        if "detail" not in record:
            return None
        detail = record["detail"]
        maps = [Map(query, layer, grids) for query, layer, grids in detail["maps"]]
        return Panel(
            [
                Bars(
                    [
                        Series("utility", detail["utility"], "nats", "What the answer loses without z_t."),
                        Series("readout", detail["readout"], "share"),
                    ]
                ),
                Overlay("attention", maps, "share of attention", "Mean over heads."),
                Overlay("saliency", maps[:2], "share of saliency", high=0.5),
                Matrix("pairs of tokens", ["z1", "z2"], ["image", "<b>question</b>"], detail["matrix"], "share"),
                Matrix("pairs of tokens", ["z1", "z2"], ["image", "<b>question</b>"], [[0, 1], [1, 0]], layer=2),
            ],
            note="A sentence below.",
        )


class ToyPairs(_Toy):
    """Facts of pairs, of either picture and of both."""

    name = "toy-pairs"
    title = "What pairs tell"
    question = "What do pairs tell?"
    reading = "By words."
    needs = Needs(pairs=True)
    paper = ""

    def panel(self, record: Record) -> Panel | None:
        first, second = record["texts"]
        return Panel(
            [
                Facts([["both", record["both"]]]),
                Facts([["own", first]], view="original"),
                Facts([["own", second]], view="edited"),
            ]
        )
