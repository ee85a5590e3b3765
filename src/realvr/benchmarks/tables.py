"""Summaries as tables, on the console and in Markdown. Every number has its policy and its interval beside it.

Takes what `scoring.summarise` or `scoring.aggregate` returns; a row of the paper may be set beside it, headed as what
it is: published, not measured.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from realvr.benchmarks.published import Row
from realvr.benchmarks.scoring import ABLATIONS

if TYPE_CHECKING:
    from rich.console import Console, Group

PUBLISHED = "published, not measured"
WIDTH = 150
NAMES = {
    "mmvp": "MMVP",
    "blink": "BLINK",
    "hrbench-4k": "HR-Bench 4K",
    "hrbench-8k": "HR-Bench 8K",
    "mme-realworld": "MME-RealWorld",
    "mme-realworld-lite": "MME-RealWorld-Lite",
}
CONDITIONS = {"none": "no span", "mean": "mean latents", "other": "other's latents"}


@dataclass(frozen=True)
class Table:
    title: str
    header: list[str]
    rows: list[list[str]]


def tables(summary: Mapping[str, Any], beside: Row | None = None, narrow: bool = False) -> list[Table]:
    """Scores, the sweep over K, and details, each where the summary has it.

    ``narrow`` is for terminals: fewer columns of scores, no details.
    """
    if "checkpoints" in summary:
        return [_aggregate(summary, beside, narrow)]
    made = [_scores(summary, beside, narrow)]
    if _present(summary):
        made.append(_ablations(summary))
    # K = 0 beside one other K is the ablation, and has been shown.
    if "sweep" in summary and len([k for k in summary["sweep"]["latents"] if k]) > 1:
        made.append(_sweep(summary["sweep"]))
    if narrow:
        return made
    details = [row for name, entry in summary["benches"].items() for row in _details(name, entry["metrics"])]
    return [*made, Table("Details, %", ["benchmark", "part", "score", "n"], details)] if details else made


def comparison(result: Mapping[str, Any], first: str, second: str) -> Group:
    """What `comparison.compare` returns, as a rich renderable."""
    rows = []
    for name, entry in {**result["benches"], "five-task mean": result.get("five_task_mean")}.items():
        if entry:
            policies = sorted({entry.get("policy", ""), entry.get("second_policy", "")})
            row = [NAMES.get(name, name), _number(entry["first"]), _number(entry["second"])]
            row += _difference({**entry, "value": entry["second"]}, "value")[1:4]
            row += [f"{entry['only_first']} / {entry['only_second']}" if "only_first" in entry else ""]
            rows.append([*row, str(entry.get("common", "")), " / ".join(policies)])
    header = ["benchmark", first, second, "difference", "95 % interval", "p", "right in one only", "n", "policy"]
    said = [f"warning: {text}" for text in result["warnings"]]
    for name, entry in result["benches"].items():
        if entry["only_in_first"] or entry["only_in_second"]:
            said.append(f"{NAMES.get(name, name)}: {entry['only_in_first']} questions only in {first}, ")
            said[-1] += f"{entry['only_in_second']} only in {second}; they do not count."
    for run, names in ((first, result["only_in_first"]), (second, result["only_in_second"])):
        if names:
            said.append(f"Only in {run}: {', '.join(names)}.")
    return _group([Table(f"{second} - {first}, % and percentage points", header, rows)], said)


def console(summary: Mapping[str, Any], beside: Row | None = None) -> Group:
    """The tables as a rich renderable; details are left to the files."""
    metrics: dict[str, list[str]] = {}
    for name, entry in summary["benches"].items():
        metrics.setdefault(entry["metric"], []).append(NAMES.get(name, name))
    said = "; ".join(f"{metric} ({', '.join(names)})" for metric, names in metrics.items())
    shown = tables(summary, narrow=True)
    if beside:
        shown.append(_published(summary, beside))
    return _group(shown, [*([f"Scores: {said}."] if said else []), *notes(summary)])


def wide_console() -> Console:
    """Standard output, wide enough for the tables where it is a file or a pipe without a width of its own."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=WIDTH)


def _group(shown: Sequence[Table], said: Sequence[str]) -> Group:
    from rich import box
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table as RichTable

    made = []
    for table in shown:
        drawn = RichTable(title=escape(table.title), box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0))
        for number, name in enumerate(table.header):
            side: Any = {"justify": "left", "no_wrap": True} if number == 0 else {"justify": "right"}
            # Words of the header stay whole.
            drawn.add_column(escape(name), overflow="fold", min_width=max(map(len, name.split())), **side)
        for row in table.rows:
            drawn.add_row(*(escape(cell) for cell in row))
        made.append(drawn)
    return Group(*made, *(escape(text) for text in said))


def markdown(summary: Mapping[str, Any], beside: Row | None = None) -> str:
    """The tables in Markdown."""
    parts = []
    for table in tables(summary, beside):
        lines = [f"## {table.title}", "", "| " + " | ".join(table.header) + " |", "|---" * len(table.header) + "|"]
        lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in table.rows]
        parts.append("\n".join(lines))
    parts += notes(summary)
    return "\n\n".join(parts) + "\n"


def notes(summary: Mapping[str, Any]) -> list[str]:
    """What a reader of the tables has to know."""
    found = []
    for name, entry in summary["benches"].items():
        if entry.get("complete") is False:
            found.append(f"{NAMES.get(name, name)} is {entry.get('status', 'incomplete for some checkpoints')}.")
        if entry.get("errors"):
            found.append(
                f"{NAMES.get(name, name)}: {entry['errors']} of {entry['replies']} answers are missing and count as "
                f"wrong, the first for question {entry['first_error']}."
            )
        if "trained_latents" in summary and entry["latents"] != summary["trained_latents"]:
            found.append(
                f"{NAMES.get(name, name)} was run with K = {entry['latents']}, not with the trained "
                f"K = {summary['trained_latents']}: it is left out of the five-task mean."
            )
    for name in summary.get("not_begun", []):
        found.append(f"{NAMES.get(name, name)} has no predictions yet.")
    for name in summary.get("without_own_latents", []):
        found.append(f"{NAMES.get(name, name)} has no predictions with the model's own latents and is not scored.")
    return found


def _number(value: float | None, sign: bool = False) -> str:
    """One decimal; a difference that rounds to zero has no sign."""
    if value is None:
        return ""
    rounded = round(value, 1) + 0.0
    return f"{rounded:+.1f}" if sign and rounded else f"{rounded:.1f}"


def _interval(pair: list[float] | None, sign: bool = False) -> str:
    return "" if pair is None else f"{_number(pair[0], sign)} – {_number(pair[1], sign)}"


def _with_std(mean: float | None, std: float | None) -> str:
    return _number(mean) if std is None else f"{_number(mean)} ± {_number(std)}"


def _ablation_cell(cell: Mapping[str, Any] | None, value: str, narrow: bool) -> str:
    """Score and, where there is room, difference from the own latents."""
    if cell is None:
        return ""
    difference = f" ({_number(cell['difference'], True)})" if "difference" in cell and not narrow else ""
    return _number(cell[value]) + difference


def _ablations(summary: Mapping[str, Any]) -> Table:
    """The differences with their intervals and McNemar's p."""
    rows = []
    for name, entry in summary["benches"].items():
        for condition, cell in entry["ablation"].items():
            rows.append([NAMES.get(name, name), CONDITIONS[condition], *_difference(cell, "headline")])
    for condition, cell in summary.get("five_task_mean", {}).items():
        if condition != "own":
            rows.append(["five-task mean", CONDITIONS[condition], *_difference(cell, "mean")])
    header = ["benchmark", "instead of own latents", "score", "difference", "95 % interval", "p", "n", "read %"]
    return Table("Without the model's own latents, % and percentage points", header, rows)


def _difference(cell: Mapping[str, Any], value: str) -> list[str]:
    p = cell.get("p")
    return [
        _number(cell[value]),
        _number(cell.get("difference"), True),
        _interval(cell.get("difference_ci"), True),
        "" if p is None else f"{p:.2g}",
        str(cell.get("common", "")),
        _number(cell.get("coverage")),
    ]


def _present(summary: Mapping[str, Any]) -> list[str]:
    return [name for name in ABLATIONS if any(name in entry["ablation"] for entry in summary["benches"].values())]


def _published_cell(beside: Row, bench: str) -> str:
    value = beside.values.get(bench) or beside.values.get(bench.removesuffix("-lite"))
    return _with_std(*value) if value else ""


def _heading(beside: Row) -> str:
    return f"{beside.method} on {beside.backbone} ({PUBLISHED})"


_FILES_ONLY = ("metric", "K", "read %", "errors")
"""Columns of the scores that a terminal has no room for: said under the table or in its title, or in the files."""


def _published(summary: Mapping[str, Any], beside: Row) -> Table:
    """A row of the paper beside the scores, as a table of its own."""
    value = "mean" if "checkpoints" in summary else "headline"
    rows = [
        [NAMES.get(name, name), _with_std(entry[value], entry["std"]), _published_cell(beside, name)]
        for name, entry in summary["benches"].items()
    ]
    if own := summary.get("five_task_mean", {}).get("own"):
        rows.append(["five-task mean", _with_std(own["mean"], own["std"]), _published_cell(beside, "average")])
    return Table(f"Beside {_heading(beside)}, {beside.table}", ["benchmark", "measured", PUBLISHED], rows)


def _scores(summary: Mapping[str, Any], beside: Row | None, narrow: bool) -> Table:
    conditions = _present(summary)
    header = ["benchmark", "score", "95 % interval", "metric", "policy", "K", "n", "read %", "unread", "errors"]
    header += [CONDITIONS[name] for name in conditions] + ([_heading(beside)] if beside else [])
    kept = [n for n, name in enumerate(header) if not (narrow and name in _FILES_ONLY)]
    rows = []
    for name, entry in summary["benches"].items():
        mark = f" ({entry['status']})" if entry["complete"] is False else ""
        row = [
            NAMES.get(name, name) + mark,
            _with_std(entry["headline"], entry["std"]),
            _interval(entry["ci"]),
            entry["metric"],
            entry["policy"],
            str(entry["latents"]),
            str(entry["n"]),
            _number(entry["coverage"]),
            str(entry["parse_failures"]),
            str(entry["errors"]),
        ]
        row += [_ablation_cell(entry["ablation"].get(condition), "headline", narrow) for condition in conditions]
        rows.append(row + ([_published_cell(beside, name)] if beside else []))
    five = summary.get("five_task_mean", {})
    if "own" in five:
        own = five["own"]
        row = ["five-task mean", _with_std(own["mean"], own["std"]), _interval(own["ci"]), "mean of the five"]
        row += ["", str(summary["trained_latents"]), "", "", "", ""]
        row += [_ablation_cell(five.get(condition), "mean", narrow) for condition in conditions]
        rows.append(row + ([_published_cell(beside, "average")] if beside else []))
    lengths = sorted({entry["latents"] for entry in summary["benches"].values()})
    title = f"Scores, %, K = {', '.join(map(str, lengths))}" if narrow else "Scores, %"
    return Table(title, [header[n] for n in kept], [[row[n] for n in kept] for row in rows])


def _sweep(sweep: Mapping[str, Any]) -> Table:
    """As the paper's table of latent budgets."""
    keys = [str(k) for k in sweep["latents"]]
    rows = [
        [NAMES.get(name, name), *(_number(row.get(k), True) for k in keys), str(sweep["best"][name])]
        for name, row in sweep["rows"].items()
    ]
    rows.append(
        ["mean", *(_number(sweep["mean"].get(k), True) for k in keys), f"oracle {_number(sweep['oracle'], True)}"]
    )
    title = f"Difference from the trained K = {sweep['reference']}, percentage points"
    return Table(title, ["benchmark", *(f"K = {k}" for k in keys), "best K, post hoc"], rows)


def _details(bench: str, metrics: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[list[str]]:
    """Nested metrics as rows: the path to a number, the number, and how many questions it is over."""
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            if "accuracy" in value:
                score = _number(value["accuracy"]) + (f" (Avg-C {_number(value['avg_c'])})" if "avg_c" in value else "")
                yield [NAMES.get(bench, bench), " / ".join((*path, name)), score, str(value["n"])]
            else:
                yield from _details(bench, value, (*path, name))
        elif isinstance(value, float):
            # MMVP's pairs come with their own number and interval.
            beside = f" ({_interval(metrics['pair_ci'])})" if name == "pair" and "pair_ci" in metrics else ""
            n = str(metrics["pairs"]) if name == "pair" else ""
            yield [NAMES.get(bench, bench), " / ".join((*path, name)), _number(value) + beside, n]


def _aggregate(summary: Mapping[str, Any], beside: Row | None, narrow: bool) -> Table:
    conditions = _present(summary)
    header = ["benchmark", "mean ± std", "checkpoints", "metric", "policy"]
    header += [CONDITIONS[name] for name in conditions] + ([_heading(beside)] if beside else [])
    kept = [n for n, name in enumerate(header) if not (narrow and name in _FILES_ONLY)]

    def cells(entry: Mapping[str, Any]) -> list[str]:
        found = [entry.get(condition) for condition in conditions]
        return [_with_std(cell["mean"], cell["std"]) if cell else "" for cell in found]

    rows = []
    for name, entry in summary["benches"].items():
        mark = "" if entry["complete"] else " (incomplete)"
        row = [NAMES.get(name, name) + mark, _with_std(entry["mean"], entry["std"]), str(entry["n"])]
        row += [entry["metric"], entry["policy"], *cells(entry["ablation"])]
        rows.append(row + ([_published_cell(beside, name)] if beside else []))
    five = summary.get("five_task_mean", {})
    if "own" in five:
        own = five["own"]
        row = [
            "five-task mean",
            _with_std(own["mean"], own["std"]),
            str(own["n"]),
            "mean of the five",
            "",
            *cells(five),
        ]
        rows.append(row + ([_published_cell(beside, "average")] if beside else []))
    title = f"Mean over {len(summary['checkpoints'])} checkpoints, %"
    return Table(title, [header[n] for n in kept], [[row[n] for n in kept] for row in rows])
