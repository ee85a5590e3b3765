"""Summaries as tables, on the console and in Markdown. Every number has its policy and its interval beside it.

Takes what `scoring.summarise` or `scoring.aggregate` returns; a row of the paper may be set beside it, headed as what
it is: published, not measured.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from realvr.evaluation.benchmark import title
from realvr.evaluation.effects import TITLES, effects
from realvr.evaluation.five_tasks import five_title
from realvr.evaluation.published import Row, value_of
from realvr.evaluation.scoring import ABLATIONS
from realvr.evaluation.statistics import displayed

if TYPE_CHECKING:
    from rich.console import Console, Group

PUBLISHED = "published, not measured"
WIDTH = 150
CONDITIONS = {"none": "no span", "mean": "mean latents", "other": "another's latents", "noise": "noise"}
READ = "read %: replies that can be read under the condition; one that cannot be read counts as wrong."


@dataclass(frozen=True)
class Table:
    """A table of text, for the terminal and for Markdown."""

    title: str
    header: list[str]
    rows: list[list[str]]


def tables(summary: Mapping[str, Any], beside: Row | None = None, narrow: bool = False) -> list[Table]:
    """Scores, help and dependence, conditions, the sweep over K, and details, each where the summary has it.

    ``narrow`` is for terminals: fewer columns of scores, no conditions, no details.
    """
    shown = effect_table(summary, narrow)
    if "checkpoints" in summary:
        return [_aggregate(summary, beside, narrow), *([shown] if shown.rows else [])]
    made = [_scores(summary, beside, narrow), *([shown] if shown.rows else [])]
    if _present(summary) and not narrow:
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
    five = result.get("five_task_mean")
    for name, entry in {**result["benches"], five_title(five["tasks"] if five else ()): five}.items():
        if entry:
            policies = sorted({entry.get("policy", ""), entry.get("second_policy", "")})
            row = [title(name), _number(entry["first"]), _number(entry["second"])]
            row += [_number(entry["gain"], True), *_difference({**entry, "value": entry["second"]}, "value")[2:4]]
            row += [f"{entry['only_first']} / {entry['only_second']}" if "only_first" in entry else ""]
            rows.append([*row, str(entry.get("common", "")), " / ".join(policies)])
    header = ["benchmark", first, second, "gain", "95 % interval", "p", "right in one only", "n", "policy"]
    said = ["Gain: difference of the displayed one-decimal scores. Interval and p: of the unrounded paired difference."]
    said += [f"warning: {text}" for text in result["warnings"]]
    for name, entry in result["benches"].items():
        if entry["only_in_first"] or entry["only_in_second"]:
            said.append(f"{title(name)}: {entry['only_in_first']} questions only in {first}, ")
            said[-1] += f"{entry['only_in_second']} only in {second}; they do not count."
    for run, names in ((first, result["only_in_first"]), (second, result["only_in_second"])):
        if names:
            said.append(f"Only in {run}: {', '.join(names)}.")
    return _group([Table(f"{second} - {first}, % and percentage points", header, rows)], said)


def console(summary: Mapping[str, Any], beside: Row | None = None) -> Group:
    """The tables as a rich renderable; details are left to the files."""
    metrics: dict[str, list[str]] = {}
    for name, entry in summary["benches"].items():
        metrics.setdefault(entry["metric"], []).append(title(name))
    said = "; ".join(f"{metric} ({', '.join(names)})" for metric, names in metrics.items())
    shown = tables(summary, narrow=True)
    if beside and (row := _published(summary, beside)).rows:
        shown.append(row)
    return _group(shown, [*([f"Scores: {said}."] if said else []), *notes(summary, beside)])


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
    parts += notes(summary, beside)
    return "\n\n".join(parts) + "\n"


def notes(summary: Mapping[str, Any], beside: Row | None = None) -> list[str]:
    """What a reader of the tables has to know."""
    found = [READ] if any(entry["ablation"] for entry in summary["benches"].values()) else []
    for name, entry in summary["benches"].items():
        if entry.get("complete") is False:
            found.append(f"{title(name)} is {entry.get('status', 'incomplete for some checkpoints')}.")
        if entry.get("errors"):
            found.append(
                f"{title(name)}: {entry['errors']} of {entry['replies']} answers are missing and count as "
                f"wrong, the first for question {entry['first_error']}."
            )
        if "trained_latents" in summary and entry["latents"] != summary["trained_latents"]:
            found.append(
                f"{title(name)} was run with K = {entry['latents']}, not with the trained "
                f"K = {summary['trained_latents']}: it is left out of the five-task mean."
            )
    found += _unpublished(summary, beside) if beside else []
    for name in summary.get("not_begun", []):
        found.append(f"{title(name)} has no predictions yet.")
    for name in summary.get("without_own_latents", []):
        found.append(f"{title(name)} has no predictions with the model's own latents and is not scored.")
    return found


def _number(value: float | None, sign: bool = False) -> str:
    """One decimal; a difference that rounds to zero has no sign."""
    if value is None:
        return ""
    rounded = displayed(value)
    return f"{rounded:+.1f}" if sign and rounded else f"{rounded:.1f}"


def _interval(pair: list[float] | None, sign: bool = False) -> str:
    return "" if pair is None else f"{_number(pair[0], sign)} – {_number(pair[1], sign)}"


def _with_std(mean: float | None, std: float | None) -> str:
    return _number(mean) if std is None else f"{_number(mean)} ± {_number(std)}"


def _ablation_cell(cell: Mapping[str, Any] | None, value: str) -> str:
    """Score and difference from the own latents."""
    if cell is None:
        return ""
    difference = f" ({_number(cell['difference'], True)})" if "difference" in cell else ""
    return _number(cell[value]) + difference


def effect_table(summary: Mapping[str, Any], narrow: bool) -> Table:
    """Help and dependence per benchmark, each with its interval and the share of readable replies."""
    entries = {title(name): (entry, entry["ablation"]) for name, entry in summary["benches"].items()}
    if own := summary.get("five_task_mean", {}).get("own"):
        entries[five_title(own["tasks"])] = (own, summary["five_task_mean"])
    rows = []
    for name, (entry, conditions) in entries.items():
        found = effects(conditions)
        if found:
            cells = [cell for effect in TITLES for cell in _effect_cells(found.get(effect), narrow)]
            rows.append(
                [name, _number(entry.get("headline", entry.get("mean"))), _number(entry.get("coverage")), *cells]
            )
    named = [
        text for effect in TITLES.values() for text in ([effect] if narrow else [effect, "95 % interval", "read %"])
    ]
    header = ["benchmark", "own %", "read %", *named]
    return Table("What the latents do, percentage points", header, rows)


def _effect_cells(effect: Mapping[str, Any] | None, narrow: bool) -> list[str]:
    if effect is None:
        return [""] if narrow else ["", "", ""]
    spread = _interval(effect["ci"], True) if "ci" in effect else f"± {_number(effect['std'])}" if effect["std"] else ""
    cells = [_number(effect["points"], True), spread, _number(effect["read"])]
    return [f"{cells[0]}\n{spread}\n{cells[2]} % read"] if narrow else cells


def _ablations(summary: Mapping[str, Any]) -> Table:
    """The differences with their intervals and McNemar's p."""
    rows = []
    for name, entry in summary["benches"].items():
        for condition, cell in entry["ablation"].items():
            rows.append([title(name), CONDITIONS[condition], *_difference(cell, "headline")])
    five = summary.get("five_task_mean", {})
    for condition, cell in five.items():
        if condition != "own":
            rows.append([five_title(five["own"]["tasks"]), CONDITIONS[condition], *_difference(cell, "mean")])
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


def published_value(beside: Row, bench: str, entry: Mapping[str, Any]) -> tuple[float, float | None] | None:
    """The paper's number for a score, only where the score is over the set behind it."""
    return value_of(beside, bench) if entry.get("not_published_set", "?") == "" else None


def published_mean(beside: Row, summary: Mapping[str, Any]) -> tuple[float, float | None] | None:
    """The paper's five-task mean, only where all five scores are over the sets behind it."""
    tasks = summary.get("five_task_mean", {}).get("own", {}).get("tasks", [])
    whole = tasks and all(published_value(beside, name, summary["benches"][name]) for name in tasks)
    return beside.values.get("average") if whole else None


def _unpublished(summary: Mapping[str, Any], beside: Row) -> list[str]:
    """Why benchmarks have no published number beside them."""
    reasons: dict[str, list[str]] = {}
    for name, entry in summary["benches"].items():
        if not published_value(beside, name, entry):
            why = str(entry.get("not_published_set", "")) or "the paper has none for this set"
            reasons.setdefault(why, []).append(title(name))
    return [f"No published number stands beside {', '.join(names)}: {why}." for why, names in reasons.items()]


def _cell(value: tuple[float, float | None] | None) -> str:
    return _with_std(*value) if value else ""


def _heading(beside: Row) -> str:
    return f"{beside.method} on {beside.backbone} ({PUBLISHED})"


_FILES_ONLY = ("metric", "K", "read %", "errors")
"""Columns of the scores that a terminal has no room for: said under the table or in its title, or in the files."""


def _published(summary: Mapping[str, Any], beside: Row) -> Table:
    """A row of the paper beside the scores, as a table of its own."""
    value = "mean" if "checkpoints" in summary else "headline"
    rows = [
        [title(name), _with_std(entry[value], entry["std"]), _cell(found)]
        for name, entry in summary["benches"].items()
        if (found := published_value(beside, name, entry))
    ]
    if average := published_mean(beside, summary):
        own = summary["five_task_mean"]["own"]
        rows.append(["five-task mean", _with_std(own["mean"], own["std"]), _cell(average)])
    return Table(f"Beside {_heading(beside)}, {beside.table}", ["benchmark", "measured", PUBLISHED], rows)


def _scores(summary: Mapping[str, Any], beside: Row | None, narrow: bool) -> Table:
    conditions = [] if narrow else _present(summary)
    header = ["benchmark", "score", "95 % interval", "metric", "policy", "K", "n", "read %", "unread", "errors"]
    header += [CONDITIONS[name] for name in conditions] + ([_heading(beside)] if beside else [])
    kept = [n for n, name in enumerate(header) if not (narrow and name in _FILES_ONLY)]
    rows = []
    for name, entry in summary["benches"].items():
        mark = f" ({entry['status']})" if entry["complete"] is False else ""
        row = [
            title(name) + mark,
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
        row += [_ablation_cell(entry["ablation"].get(condition), "headline") for condition in conditions]
        rows.append(row + ([_cell(published_value(beside, name, entry))] if beside else []))
    five = summary.get("five_task_mean", {})
    if "own" in five:
        own = five["own"]
        row = [five_title(own["tasks"]), _with_std(own["mean"], own["std"]), _interval(own["ci"]), "mean of the five"]
        row += ["", str(summary["trained_latents"]), "", "", "", ""]
        row += [_ablation_cell(five.get(condition), "mean") for condition in conditions]
        rows.append(row + ([_cell(published_mean(beside, summary))] if beside else []))
    lengths = sorted({entry["latents"] for entry in summary["benches"].values()})
    heading = f"Scores, %, K = {', '.join(map(str, lengths))}" if narrow else "Scores, %"
    return Table(heading, [header[n] for n in kept], [[row[n] for n in kept] for row in rows])


def _sweep(sweep: Mapping[str, Any]) -> Table:
    """As the paper's table of latent budgets."""
    keys = [str(k) for k in sweep["latents"]]
    rows = [
        [title(name), *(_number(row.get(k), True) for k in keys), str(sweep["best"][name])]
        for name, row in sweep["rows"].items()
    ]
    rows.append(
        ["mean", *(_number(sweep["mean"].get(k), True) for k in keys), f"oracle {_number(sweep['oracle'], True)}"]
    )
    heading = f"Difference from the trained K = {sweep['reference']}, percentage points"
    return Table(heading, ["benchmark", *(f"K = {k}" for k in keys), "best K, post hoc"], rows)


def _details(bench: str, metrics: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[list[str]]:
    """Nested metrics as rows: the path to a number, the number, and how many questions it is over."""
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            if "accuracy" in value:
                score = _number(value["accuracy"]) + (f" (Avg-C {_number(value['avg_c'])})" if "avg_c" in value else "")
                yield [title(bench), " / ".join((*path, name)), score, str(value["n"])]
            else:
                yield from _details(bench, value, (*path, name))
        elif isinstance(value, float):
            # Some come with their own interval (pair_ci) and number (pairs).
            beside = f" ({_interval(metrics[f'{name}_ci'])})" if f"{name}_ci" in metrics else ""
            n = str(metrics.get(f"{name}s", ""))
            yield [title(bench), " / ".join((*path, name)), _number(value) + beside, n]


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
        row = [title(name) + mark, _with_std(entry["mean"], entry["std"]), str(entry["n"])]
        row += [entry["metric"], entry["policy"], *cells(entry["ablation"])]
        rows.append(row + ([_cell(published_value(beside, name, entry))] if beside else []))
    five = summary.get("five_task_mean", {})
    if "own" in five:
        own = five["own"]
        row = [
            five_title(own["tasks"]),
            _with_std(own["mean"], own["std"]),
            str(own["n"]),
            "mean of the five",
            "",
            *cells(five),
        ]
        rows.append(row + ([_cell(published_mean(beside, summary))] if beside else []))
    heading = f"Mean over {len(summary['checkpoints'])} checkpoints, %"
    return Table(heading, [header[n] for n in kept], [[row[n] for n in kept] for row in rows])
