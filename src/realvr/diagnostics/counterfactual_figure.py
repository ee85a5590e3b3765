"""Paired counterfactual behaviour and distances for print, from their summaries. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from realvr.diagnostics.edits import distance_panel, edits_of, flip_panel, legend, series
from realvr.diagnostics.parts import Shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FLIPS = {"strict_correct_flip": "strict flip", "false_flip": "false flip"}


def flips_figure(protocols: Sequence[tuple[str, Sequence[Shown]]]) -> Figure | None:
    """Strict and false flips per edit, a row for each protocol: (its name, models with its numbers)."""
    from realvr.widgets import figures

    known = [(label, results) for label, results in protocols if edits_of(results)]
    if not known:
        return None
    made, axes = figures.new(len(known), 2, height=0.4 + 2.2 * len(known))
    letters = iter("abcdefgh")
    for row, (label, results) in zip(axes, known, strict=True):
        edits = edits_of(results)
        for ax, key, words in zip(
            row, ("strict_correct_flip", "false_flip"), ("strict flip", "false flip"), strict=True
        ):
            figures.panel(ax, next(letters), f"{label}: {words}")
            flip_panel(ax, series(results, edits, key), edits)
    legend(made, axes[0][0])
    return made


def distances_figure(results: Sequence[Shown]) -> Figure | None:
    """Latent and final distances per edit; the summaries have ``distances``."""
    from realvr.widgets import figures

    shown = [
        Shown(one.name, {"edits": {edit: row for edit, row in found.items() if edit != "all"}}, one.number)
        for one in results
        if (found := one.summary.get("distances"))
    ]
    edits = edits_of(shown)
    if not edits:
        return None
    made, axes = figures.new(1, 2, height=2.7)
    titles = (("a", "latent", "LVR distance"), ("b", "final", "Final distance"))
    parts = [
        distance_panel(ax, series(shown, edits, k), edits, a, b) for ax, (a, k, b) in zip(axes[0], titles, strict=True)
    ]
    legend(made, *(ax for part in parts for ax in part))
    return made
