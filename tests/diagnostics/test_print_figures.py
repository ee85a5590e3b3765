"""Figures of pairs, exchange, walk and grounding for print: their panels, curves and files, from summaries."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

from realvr.diagnostics.counterfactual import Counterfactual
from realvr.diagnostics.counterfactual_summary import summarise_pairs
from realvr.diagnostics.distances import Distances
from realvr.diagnostics.exchange import Exchange
from realvr.diagnostics.exchange_summary import summarise_exchange
from realvr.diagnostics.grounding import Grounding
from realvr.diagnostics.parts import Shown
from realvr.diagnostics.walk import Walk
from realvr.widgets import figures

NONE = {"mean": None, "low": None, "high": None, "pairs": 0}


def value(middle: float) -> dict[str, Any]:
    return {"mean": middle, "low": middle - 0.1, "high": middle + 0.1, "pairs": 9}


def titles(figure: Any) -> list[str]:
    return [axes.get_title(loc="left") or axes.get_title() for axes in figure.axes]


def swap(pair: str, selector: str, k: int, said: str, margin: float, **more: Any) -> dict[str, Any]:
    condition = more.pop("condition", "swap")
    about = {
        "pair": pair,
        "edit": "e",
        "direction": "d",
        "condition": condition,
        "selector": selector,
        "k": k,
        "seed": None,
    }
    truths = {"recipient_truth": "red", "donor_truth": "blue", "choices": [], "text": said, "extracted": said}
    return about | truths | {"margin": margin, "positions": list(range(9 - k, 9))} | more


def exchange(steps: bool, parts_at: int | None = None) -> Any:
    records = []
    for pair in "ab":
        records += [swap(pair, "full", 8, "red", 0.0, condition="sham"), swap(pair, "full", 8, "blue", 4.0)]
        records += [swap(pair, "contrast", k, "blue", float(k)) for k in (1, 2)]
        records += [swap(pair, "random", k, "red", float(k)) for k in (1, 2)]
        records += [swap(pair, "full", 8, "red", 0.5, condition="unrelated")]
        more = {} if parts_at is None else {"parts_at": parts_at}
        records += [swap(pair, "from-step", k, "blue", 1.0, **more) for k in (6, 4)] if steps else []
    return summarise_exchange(records)


def test_the_exchange_has_panels_for_what_was_swapped() -> None:
    draw = Exchange().figure
    plain = draw([Shown("one", exchange(False)), Shown("two", exchange(False), 1)])
    assert plain is not None and titles(plain) == ["(a) Donor-answer lift", "(b) Donor-margin shift"]
    # Largest contrast, random positions, the whole span, an unrelated donor.
    assert [list(line.get_ydata()) for line in plain.axes[0].lines[:4]] == [[100.0, 100.0], [0.0, 0.0], [100.0], [0.0]]
    stepped = draw([Shown("one", exchange(True))])
    assert stepped is not None and len(stepped.axes) == 4
    assert list(stepped.axes[2].lines[0].get_xdata()) == [1, 3, 5]
    assert "do not say where the views part" in stepped.axes[3].texts[0].get_text()
    parted = draw([Shown("one", exchange(True, parts_at=4))])
    assert parted is not None and list(parted.axes[3].lines[0].get_xdata()) == [-1, 1] and not parted.axes[3].texts
    assert draw([Shown("nothing", summarise_exchange([]))]) is None


def test_flips_have_a_row_for_each_protocol() -> None:
    def record(pair: str, protocol: str, said: list[str]) -> dict[str, Any]:
        about = {"pair": pair, "edit": "turn", "protocol": protocol, "first_span": "keep", "errors": [None, None]}
        return about | {"truths": ["A", "B"], "extracted": said, "choices": ["x", "y"]}

    both = [record("1", "two-turn", ["A", "B"]), record("1", "separate", ["A", "A"])]
    figure = Counterfactual().figure([Shown("m", summarise_pairs(both))])
    assert figure is not None and titles(figure)[2:] == ["(c) Separate: strict flip", "(d) Separate: false flip"]
    heights = [axes.patches[0].get_height() for axes in figure.axes]
    assert heights == [100.0, 0.0, 0.0, 0.0] and [t.get_text() for t in figure.axes[1].texts] == ["–"], "no pair in U"
    assert Counterfactual().figure([Shown("m", summarise_pairs([]))]) is None


def test_distances_are_drawn_beside_each_other_or_broken() -> None:
    def summary(size: float) -> Any:
        row = {"latent": value(size), "final": value(0.5), "latent_unrelated": NONE, "final_unrelated": NONE}
        return {"distances": {"turn": row, "all": row}}

    near = Distances().figure([Shown("a", summary(0.5)), Shown("b", summary(0.4), 1)])
    far = Distances().figure([Shown("a", summary(0.5)), Shown("b", summary(0.001), 1)])
    assert near is not None and far is not None and (len(near.axes), len(far.axes)) == (2, 3)
    assert Distances().figure([Shown("a", {"distances": None})]) is None


def test_walk_and_grounding() -> None:
    def rate(share: float) -> dict[str, Any]:
        return {"count": 1, "of": 2, "rate": share, "low": share, "high": share}

    steps = [{"step": t, "inside": rate(1 / t), "cosine": value(0.5), "chance": value(0.2)} for t in (1, 2, 4)]
    groups = {str(n): {"inside": value(0.5), "chance": value(0.2)} for n in (1, 2)}
    summary = {"questions": 3, "steps": steps, "groups": groups, "by": "arrows"}
    figure = Walk().figure([Shown("m", summary), Shown("n", summary, 1)])
    assert figure is not None and len(figure.axes) == 3 and [len(axes.lines) for axes in figure.axes] == [3, 2, 3]
    assert list(figure.axes[0].lines[0].get_ydata()) == [100.0, 50.0, 25.0]
    alone = Walk().figure([Shown("m", summary | {"groups": {}})])
    assert alone is not None and len(alone.axes) == 2 and Walk().figure([Shown("m", {"questions": 0})]) is None
    found = {"questions": 2, "margin": value(0.1), "cos_positive": value(0.5), "oracle_margin": NONE}
    drawn = Grounding().figure([Shown("m", found)])
    assert drawn is not None and len(drawn.axes) == 3 and drawn.axes[2].texts[0].get_text() == "none"
    assert Grounding().figure([Shown("m", {"questions": 0})]) is None


def test_the_files_are_readable_and_the_same_twice() -> None:
    first, second = (figures.files(lambda: Exchange().figure([Shown("m", exchange(True, 3))]), "x") for _ in range(2))
    assert first == second and {file.name for file in first} == {"x.svg", "x.png"}
    for file, content in first.items():
        if file.suffix == ".svg":
            text = "".join(ElementTree.fromstring(content).itertext())
            assert "Donor-answer lift" in text and "replaced latents k" in text
        else:
            assert content.startswith(b"\x89PNG") and len(content) > 20_000
