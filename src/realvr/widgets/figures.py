"""Figures for print, by matplotlib: one style for every diagnostic, readable in black and white and for colour-blind
readers. A model has one colour, line style and marker in every figure. matplotlib is imported when a figure is drawn.

The charts of the report's page are drawn by `realvr.widgets.charts`.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import count, product
from pathlib import Path
from string import ascii_lowercase
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette without its yellow, which vanishes on paper."""
STYLES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
HATCHES = ("", "///", "...", "xx", "\\\\\\", "++", "oo")
SEQUENTIAL = "cividis"
"""Colour map of values from low to high."""
DIVERGING = "PuOr"
"""Colour map of values around a middle."""
SUFFIXES = (".svg", ".png")

_STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "axes.titlesize": 8.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 7.5,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "svg.hashsalt": "realvr",  # the same figure gives the same file
    "svg.fonttype": "none",  # text stays text
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}


def new(
    rows: int = 1, columns: int = 1, width: float = 7.0, height: float | None = None, **options: Any
) -> tuple[Figure, np.ndarray]:
    """A figure and its axes, as a (rows, columns) array. ``width`` and ``height`` are inches; 7 is a page."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with style():
        figure = Figure(figsize=(width, height or 2.4 * rows), layout="constrained")
        FigureCanvasAgg(figure)
        return figure, figure.subplots(rows, columns, squeeze=False, **options)


def style() -> AbstractContextManager[None]:
    """The house style, as a context; `files` draws inside it."""
    import matplotlib

    return matplotlib.rc_context(cast(Any, _STYLE))


def color(number: int) -> str:
    """Colour of a model."""
    return COLORS[number % len(COLORS)]


def panel(axes: Axes, letter: str, title: str) -> None:
    """Letter and title above a panel."""
    axes.set_title(f"({letter}) {title}" if letter else title)


def letters() -> Iterator[str]:
    """a, b, …, z, aa, ab, …: for panels whose number depends on the models."""
    for length in count(1):
        yield from map("".join, product(ascii_lowercase, repeat=length))


def empty(axes: Axes, why: str = "none") -> None:
    """A panel without a number says so."""
    axes.text(0.5, 0.5, why, ha="center", va="center", transform=axes.transAxes, color="#666666", wrap=True)
    axes.set_xticks([])
    axes.set_yticks([])


def curve(
    axes: Axes,
    x: Sequence[float],
    values: Sequence[float | None],
    low: Sequence[float | None] | None = None,
    high: Sequence[float | None] | None = None,
    number: int = 0,
    label: str = "",
    **options: Any,
) -> None:
    """A line with its interval as a band; points without a value are gaps."""
    line = {"color": color(number), "linestyle": STYLES[number % len(STYLES)], "marker": MARKERS[number % len(MARKERS)]}
    points = [math.nan if value is None else value for value in values]
    axes.plot(list(x), points, label=label or None, **(line | options))
    if low is not None and high is not None:
        below, above = ([math.nan if value is None else value for value in end] for end in (low, high))
        axes.fill_between(list(x), below, above, color=(line | options)["color"], alpha=0.15, linewidth=0)
    axes.grid(axis="y", visible=True)


def bars(
    axes: Axes,
    names: Sequence[str],
    series: Sequence[tuple[str, Sequence[float | None], Sequence[float | None], Sequence[float | None]]],
    numbers: Sequence[int] | None = None,
    percent: bool = False,
    tilt: int = 0,
) -> None:
    """Groups of bars with error bars: ``series`` are (label, values, low, high), one bar of each in every group. A
    missing value is a dash."""
    width = 0.8 / max(1, len(series))
    for place, (label, values, low, high) in enumerate(series):
        number = place if numbers is None else numbers[place]
        left = [group - 0.4 + width * (place + 0.5) for group in range(len(names))]
        shown = [0.0 if value is None else value for value in values]
        error = [
            [0.0 if value is None or end is None else abs(value - end) for value, end in zip(values, ends, strict=True)]
            for ends in (low, high)
        ]
        axes.bar(
            left,
            shown,
            width * 0.92,
            yerr=error,
            label=label or None,
            color=color(number),
            hatch=HATCHES[number % len(HATCHES)],
            edgecolor="white",
            linewidth=0.4,
            error_kw={"elinewidth": 0.8, "capsize": 1.5},
        )
        for x, value in zip(left, values, strict=True):
            if value is None:
                axes.text(x, 0, "–", ha="center", va="bottom", color="#666666")
    axes.set_xticks(range(len(names)), names, rotation=tilt, ha="right" if tilt else "center")
    axes.grid(axis="y", visible=True)
    if percent:
        axes.set_ylim(0, 105)
        axes.set_ylabel("%")


def heatmap(
    axes: Axes,
    values: Sequence[Sequence[float | None]],
    rows: Sequence[str] = (),
    columns: Sequence[str] = (),
    low: float | None = None,
    high: float | None = None,
    middle: float | None = None,
    digits: int | None = None,
    scale: bool = True,
    label: str = "",
) -> AxesImage:
    """Cells with a colour bar, and their numbers where ``digits`` says how many. ``middle`` makes the colours diverge
    around it. A missing value is grey. Returns the image."""
    import numpy as np
    from matplotlib import colormaps

    cells = np.array([[math.nan if value is None else value for value in row] for row in values], dtype=float)
    known = cells[np.isfinite(cells)]
    low = float(known.min()) if low is None and known.size else 0.0 if low is None else low
    high = float(known.max()) if high is None and known.size else 1.0 if high is None else high
    if middle is not None:
        reach = max(abs(high - middle), abs(middle - low), 1e-12)
        low, high = middle - reach, middle + reach
    colors = colormaps[SEQUENTIAL if middle is None else DIVERGING].with_extremes(bad="#eeeeee")
    image = axes.imshow(cells, cmap=colors, vmin=low, vmax=high, aspect="auto", interpolation="nearest")
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    if digits is not None:
        for (row, column), value in np.ndenumerate(cells):
            text = "–" if math.isnan(value) else f"{value:.{digits}f}"
            dark = sum(image.cmap(image.norm(value))[:3]) < 1.5 if not math.isnan(value) else False
            axes.text(column, row, text, ha="center", va="center", color="white" if dark else "black", fontsize=7)
    if scale and axes.figure is not None:
        axes.figure.colorbar(image, ax=axes, shrink=0.85, pad=0.02, label=label or None)
    return image


def rendered(figure: Figure, suffix: str) -> bytes:
    """The file: ``.svg``, or ``.png`` at 200 dots per inch."""
    target = io.BytesIO()
    if suffix == ".svg":
        figure.savefig(target, format="svg", metadata={"Date": None, "Creator": "realvr"})
    else:
        figure.savefig(target, format="png", dpi=200, metadata={"Software": "realvr"})
    return target.getvalue()


def files(draw: Callable[[], Figure | dict[str, Figure] | None], name: str) -> dict[Path, bytes]:
    """Names and contents of the files of what ``draw`` returns: NAME.svg and .png, NAME-KEY.svg and .png where it
    returns several. The same numbers give the same bytes."""
    with style():
        drawn = draw()
        named = {} if drawn is None else drawn if isinstance(drawn, dict) else {"": drawn}
        return {
            Path(f"{name}-{key}{suffix}" if key else f"{name}{suffix}"): rendered(figure, suffix)
            for key, figure in named.items()
            for suffix in SUFFIXES
        }
