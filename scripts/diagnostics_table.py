"""The paper's tables and figures of diagnostics beside ours: the last section of docs/diagnostics.md.

    python scripts/diagnostics_table.py --collect runs/mini="one H200" …  # results to docs/results/diagnostics.json
    python scripts/diagnostics_table.py --keep --collect runs/new="CPU"   # only the numbers of these results
    python scripts/diagnostics_table.py                                   # prints the section, from that file alone
    python scripts/diagnostics_table.py --write                           # puts it into docs/diagnostics.md

A folder holds the NAME.json files of ``realvr diagnose``. What follows its ``=`` is the machine, and after a second
``=`` a name for the data and what ``realvr world make`` was given, if it was more than the split. A number is taken
from the first folder that has it. Published numbers come from realvr.evaluation.published.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diagnostics_designs
import diagnostics_labels
from diagnostics_cells import Ask, Cell, Grid, Part

from realvr.diagnostics import DIAGNOSTICS
from realvr.errors import UserError
from realvr.runs.files import write_atomically

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results" / "diagnostics.json"
PAGE = ROOT / "docs" / "diagnostics.md"
TITLE = "## The paper's tables beside ours"
WIDTH = 190
INTRODUCTION = (
    "Every table and figure of the paper's analysis and of its appendices on diagnostics, under its LaTeX label. "
    "Published numbers are the paper's, measured ones ours. **This is no replication.** The paper asks 7B "
    "models about "
    "photographs (BLINK, Visual-CoT, HR-Bench). We ask `mini`, a model of under two million parameters, about "
    "trails on "
    "boards of 48 pixels (K = 8, one training seed). Models, tasks, edits and scale differ, and so do the "
    "numbers. The "
    "tables show what is implemented, number by number.",
    "Brackets are 95 % intervals over questions or pairs (bootstrap for means, Wilson for rates), n is their "
    "number. "
    '"Drawn, no number" is a figure whose values the paper does not print. The measured numbers are in '
    "`docs/results/diagnostics.json`. `scripts/diagnostics_table.py` makes that file from results of `realvr "
    "diagnose`, "
    "and this section from that file. They are those of the runs above; where a run is on a CPU, its command says so.",
)


def parts() -> list[Part]:
    """Everything, in the paper's order."""
    return [*diagnostics_labels.parts(), *diagnostics_designs.parts()]


def labels() -> list[str]:
    """Of every table and figure in sec:representation-analysis and from app:diagnostics to the end of the paper."""
    return [label for part in parts() for label in part.labels]


@dataclass
class Store:
    """``docs/results/diagnostics.json``: numbers, and the runs that they come from."""

    runs: list[dict[str, Any]] = field(default_factory=list)
    numbers: dict[str, dict[str, Any]] = field(default_factory=dict)


# ---------------------------------------------------------------------- from results to the file


def collect(folders: Sequence[str], about: str, kept: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The numbers that the section asks for, each from the first result that has it, or else ``kept`` as it was."""
    results = [result for named in folders for result in _results(named)]
    store = Store()
    for ask in dict.fromkeys(asked()):
        found = next(_found(ask, results), None)
        if found is None and kept is not None and ask.key in kept["numbers"]:
            number = dict(kept["numbers"][ask.key])
            found = kept["runs"][number.pop("run")], number
        if found is not None:
            run, number = found
            if run not in store.runs:
                store.runs.append(run)
            store.numbers[ask.key] = {**number, "run": store.runs.index(run)}
    return {"about": about, "runs": store.runs, "numbers": store.numbers}


def _found(ask: Ask, results: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> Iterator[tuple[Any, Any]]:
    for run, summary in results:
        if (run["test"], run["model"]) == (ask.test, ask.model) and ask.fits(summary["settings"]):
            number = _number(summary, ask)
            if number is not None:
                yield run, number


def _results(named: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    folder, _, rest = named.partition("=")
    machine, _, world = rest.partition("=")
    made, _, arguments = world.partition(" ")
    tests = {ask.test for ask in asked()}
    files = [file for file in sorted(Path(folder).glob("*.json")) if file.stem in tests]
    if not files:
        raise UserError(f"{folder} holds no results of realvr diagnose that the tables use")
    for file in files:
        summary = json.loads(file.read_text(encoding="utf-8"))
        settings = summary["settings"]
        data = Path(settings["data"]).parent.name
        options, model = _options(settings), settings["model"]["name"]
        yield (
            {
                "test": settings["diagnostic"],
                "model": model,
                "world": f"realvr world make runs/{made or 'world'} {arguments or f'--split {data}'}",
                "command": f"realvr diagnose {settings['diagnostic']} {model} "
                f"runs/{made or 'world'}/{data}/samples.jsonl{options} --out runs/{model}-{made or data}",
                "dtype": settings["model"]["dtype"],
                "machine": machine,
            },
            summary,
        )


def _options(settings: Mapping[str, Any]) -> str:
    """What the command of one diagnostic needs to measure the same: it chooses samples as a suite of tests does."""
    found = {"limit": settings.get("limit"), "second-model": (settings.get("second_model") or {}).get("name")}
    for name, about in DIAGNOSTICS.get(settings["diagnostic"]).Settings.model_fields.items():
        if name in settings and settings[name] != json.loads(json.dumps(about.default)):
            found[name.replace("_", "-")] = settings[name]
    words = {name: " ".join(map(str, value)) if isinstance(value, list) else value for name, value in found.items()}
    return "".join(f" --{name} {value}" for name, value in words.items() if value is not None)


def _number(summary: Mapping[str, Any], ask: Ask) -> dict[str, Any] | None:
    found = ask.find(summary, ask.path)
    if isinstance(found, str):
        return {"value": found}
    if isinstance(found, int | float):
        return {"value": _short(found), "n": ask.find(summary, ask.n) if ask.n else None}
    if not isinstance(found, dict) or (value := found.get("mean", found.get("rate"))) is None:
        return None
    return {
        "value": _short(value),
        "low": _short(found["low"]),
        "high": _short(found["high"]),
        "n": found.get("pairs", found.get("of")),
    }


def _short(value: float) -> float:
    return float(f"{value:.6g}") if isinstance(value, float) else value


# ---------------------------------------------------------------------- from the file to the section


def asked() -> list[Ask]:
    """Every number that the section shows."""
    return [
        cell for part in parts() for grid in part.grids for row in grid.rows for cell in row if isinstance(cell, Ask)
    ]


def section(stored: Mapping[str, Any]) -> str:
    """The Markdown from its title to the end."""
    store = Store(list(stored["runs"]), dict(stored["numbers"]))
    return (
        "\n\n".join(
            [TITLE, *(textwrap.fill(text, WIDTH) for text in INTRODUCTION), *(_part(part, store) for part in parts())]
        )
        + "\n"
    )


def _part(part: Part, store: Store) -> str:
    named = part.labels if len(part.labels) < 3 else (f"{part.labels[0]} to {part.labels[-1]}",)
    lines = ["### " + ", ".join(named), textwrap.fill(part.about, WIDTH)]
    used: dict[int, None] = {}
    for grid in part.grids:
        lines.append(_grid(grid, store))
        for cell in (cell for row in grid.rows for cell in row if isinstance(cell, Ask)):
            if cell.key in store.numbers:
                used[store.numbers[cell.key]["run"]] = None
    runs = [store.runs[number] for number in used]
    worlds = dict.fromkeys(run["world"] for run in runs)
    commands = [*worlds, *(f"{run['command']}   # {run['dtype']}, {run['machine']}" for run in runs)]
    lines += ["\n".join(f"    {command}" for command in commands)] if commands else []
    return "\n\n".join(lines)


def _grid(grid: Grid, store: Store) -> str:
    asks = [cell for row in grid.rows for cell in row if isinstance(cell, Ask)]
    counts = {store.numbers[ask.key].get("n") for ask in asks if ask.key in store.numbers} - {None}
    inside = grid.n and len(counts) > 1
    lines = ["| " + " | ".join(grid.header) + " |", "|" + "---|" * len(grid.header)]
    lines += ["| " + " | ".join(_cell(cell, store, inside) for cell in row) + " |" for row in grid.rows]
    if grid.n and len(counts) == 1:
        lines.append(f"\nMeasured with n = {counts.pop():,}.")
    return "\n".join(lines)


def _cell(cell: Cell, store: Store, with_n: bool) -> str:
    if not isinstance(cell, Ask):
        return cell
    number = store.numbers.get(cell.key)
    if number is None:
        return "not measured"
    if isinstance(number["value"], str):
        return f"`{number['value'].strip()}`".replace("|", "\\|")
    text = cell.shown(number["value"])
    if cell.counts and number.get("n"):
        text += f" ({round(number['value'] * number['n']):,})"
    if number.get("low") is not None:
        text += f" [{cell.shown(number['low'])}, {cell.shown(number['high'])}]"
    return text + (f", n {number['n']:,}" if with_n and number.get("n") is not None else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collect", nargs="+", metavar="FOLDER=MACHINE", default=[])
    parser.add_argument("--about", default="mini and its control, numbers of the tables in docs/diagnostics.md")
    parser.add_argument("--keep", action="store_true", help="numbers that no folder has stay as they are")
    parser.add_argument("--write", action="store_true", help="put the section into docs/diagnostics.md")
    options = parser.parse_args()
    if options.collect:
        before = json.loads(RESULTS.read_text(encoding="utf-8")) if options.keep else None
        stored = collect(options.collect, options.about, before)
        write_atomically(RESULTS, json.dumps(stored, indent=1, ensure_ascii=False) + "\n")
        missing = [ask.key for ask in dict.fromkeys(asked()) if ask.key not in stored["numbers"]]
        print(f"{len(stored['numbers'])} numbers of {len(stored['runs'])} runs, {len(labels())} labels")
        print("\n".join(f"not measured: {key}" for key in missing))
        return
    made = section(json.loads(RESULTS.read_text(encoding="utf-8")))
    if options.write:
        before = PAGE.read_text(encoding="utf-8").partition(TITLE)[0].rstrip()
        write_atomically(PAGE, f"{before}\n\n{made}")
    else:
        print(made, end="")


if __name__ == "__main__":
    main()
