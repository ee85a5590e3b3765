"""A question asked of a latent: what it needs, how it is measured, summarised and drawn.

A new diagnostic is one file in this package with one subclass of `Diagnostic`, or a file anywhere that ``--plugin
FILE.py`` names. `realvr.diagnostics.run` does the rest: it reads the data, checks the needs, journals the records,
continues after a kill, shares the work between processes and writes the tables. docs/diagnostics.md is the guide.

Import torch inside `measure` and `prepare`: lists, summaries and the report read diagnostics without it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar, cast, get_args

from realvr.diagnostics.files import markdown
from realvr.diagnostics.parts import DiagnosticSettings, Highlight, Item, Needs, OwnSummary, Samples, Shown
from realvr.diagnostics.settings import DiagnoseSettings
from realvr.errors import UserError
from realvr.registry import Registry, place_of
from realvr.runs.journal import Record
from realvr.runs.records import ResultFile
from realvr.widgets import Cell, Fold, Section, Table, Text, Widget, tables_of
from realvr.widgets.browser import Panel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from realvr.diagnostics.model import Model

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_TAKEN = {"summary", "eval", "demo", "settings", "metrics", "method", "predictions", "recipe", "data", "diagnose"}
"""Result files of other commands, and below the sections of the report."""
_TAKEN |= {
    "overview",
    "training",
    "train",
    "benchmarks",
    "ablation",
    "sweep",
    "further",
    "paper",
    "provenance",
    "not-measured",
}

S = TypeVar("S", bound=DiagnosticSettings)


class Diagnostic(Generic[S]):
    """Base class. A subclass states ``name``, ``title``, ``question``, ``reading``, ``needs`` and ``paper``, and has
    `measure`, `summarise` and `draw`."""

    name: ClassVar[str]
    """Word of the command line and of the files: ``NAME.jsonl``, ``NAME.json``, …"""
    title: ClassVar[str]
    """Heading of its section in the report."""
    question: ClassVar[str]
    """What it asks, in one sentence."""
    reading: ClassVar[str]
    """How its numbers are read."""
    needs: ClassVar[Needs]
    paper: ClassVar[str]
    """The paper's value and its table, in one sentence; empty where the paper has none."""

    Settings: ClassVar[type[DiagnosticSettings]] = DiagnosticSettings
    """Its own settings, a subclass of `DiagnosticSettings`."""
    shape: ClassVar[Any] = dict[str, Any]
    """Type of the summary, a TypedDict; a file that has another is refused before it is drawn."""
    batch: ClassVar[int] = 8
    """Samples per batch, unless ``--batch`` says otherwise."""
    command: ClassVar[str] = ""
    """What produces its results; by default ``realvr diagnose NAME MODEL DATA --out DIR``."""
    unit: ClassVar[str] = "questions"
    """What n counts, in messages."""
    legend: ClassVar[str] = ""
    """What the columns of its table are, printed under it; for a table whose heads do not say it."""
    order: ClassVar[int] = 1000
    """Place in lists and in the report; then by name."""
    examples: ClassVar[tuple[int, int]] = (100, 1000)
    """How many samples (pairs: of each edit) a suite of tests takes, on a CPU and on a GPU, unless ``--limit`` says
    otherwise."""
    highlights: ClassVar[tuple[Highlight, ...]] = ()
    opens: ClassVar[bool] = False
    """Whether the report opens with its section, where it has results; in a suite of tests it then runs first."""
    last: ClassVar[bool] = False
    """Whether it runs behind all others in a suite of tests, because it reads their results."""

    def __init__(self, settings: S | None = None) -> None:
        self.settings: S = cast(S, self.Settings()) if settings is None else settings

    @classmethod
    def configure(cls, values: Mapping[str, Any]) -> Self:
        """The diagnostic with these settings; a `UserError` names one that is unknown or wrong."""
        try:
            settings = cls.Settings(**values)
        except UserError as error:
            raise UserError(f"diagnostic {cls.name}: {error}") from None
        return cls(cast(S, settings))

    # ------------------------------------------------------------------ what a subclass writes

    def prepare(self, model: Model, samples: Sequence[Item]) -> None:
        """Called once in every process, before the first batch, with all samples of the run."""

    def measure(self, model: Model, samples: Samples) -> Iterable[Record]:
        """Records of one batch: JSON values, one per sample (see `keys`), `failed` for one that cannot be read."""
        raise NotImplementedError

    def summarise(self, records: Sequence[Record]) -> OwnSummary:
        """Numbers of all records, with n and intervals. A pure function without torch."""
        raise NotImplementedError

    def draw(self, results: Sequence[Shown]) -> list[Widget]:
        """Tables and figures for one model or several side by side. Without torch."""
        raise NotImplementedError

    def case_ids(self, summary: OwnSummary) -> frozenset[str]:
        """Ids of the samples that the case browser shows, of a diagnostic that chooses them (``opens``)."""
        return frozenset()

    def figure(self, results: Sequence[Shown]) -> Figure | dict[str, Figure] | None:
        """NAME.svg and NAME.png for print, models side by side; of a dict, NAME-KEY.svg each. See
        `realvr.widgets.figures`."""
        return None

    # ------------------------------------------------------------------ what it wrote, checked

    def drawn(self, results: Sequence[Shown]) -> list[Widget]:
        """What `draw` returns, where the report can show it."""
        widgets = self.draw(results)
        if not isinstance(widgets, list) or not all(isinstance(widget, Widget) for widget in widgets):
            kinds = ", ".join(sorted(kind.__name__ for kind in get_args(Widget)))
            raise UserError(f"{place_of(type(self))}: draw must return a list of widgets ({kinds})")
        return widgets

    def summarised(self, records: Sequence[Record]) -> OwnSummary:
        """What `summarise` returns, where it can be written."""
        summary = self.summarise(records)
        if not isinstance(summary, dict):
            raise UserError(f"{place_of(type(self))}: summarise must return a dict, not {type(summary).__name__}")
        self._check_json(summary, "summarise must return JSON values")
        return summary

    def _check_json(self, content: object, rule: str) -> None:
        try:
            json.dumps(content)
        except (TypeError, ValueError) as error:
            raise UserError(f"{place_of(type(self))}: {rule}: {error}") from None

    def checked(self, records: Iterable[Record], items: Sequence[Item]) -> Iterator[Record]:
        """The records of one batch, before they are written: of its samples, and JSON."""
        known = {item.id for item in items}
        for record in records or ():
            if not isinstance(record, dict) or record.get(self.item) not in known:
                raise UserError(
                    f"{place_of(type(self))}: measure must yield dicts whose '{self.item}' names a sample of the batch"
                )
            self._check_json(record, f"measure must yield JSON values; {record[self.item]}")
            yield record

    # ------------------------------------------------------------------ records

    @property
    def item(self) -> str:
        """Field of a record that names its sample or pair."""
        return "pair" if self.needs.pairs else "id"

    def key(self, record: Record) -> Hashable:
        """What a record answers; no two records of a run have the same key."""
        return record[self.item]  # type: ignore[no-any-return]

    def keys(self, item: Item) -> Iterable[Hashable]:
        """The keys that a sample is to have records for."""
        return [item.id]

    def complete(self, item: Item, done: Collection[Hashable]) -> bool:
        """Whether nothing is left to measure of a sample."""
        return all(key in done for key in self.keys(item))

    def failed(self, item: Item, error: str) -> Record:
        """The record of a sample that cannot be measured."""
        return {self.item: item.id, "error": error}

    # ------------------------------------------------------------------ may be overridden

    def select(self, items: Sequence[Item], data: Path) -> list[Item]:
        """The samples that are measured, of those that were read; raises where none is left."""
        return list(items)

    def settle(self, model: Model) -> None:
        """Work out what depends on the model, such as positions within its K latents. Called first, in every process;
        a `UserError` refuses a setting that does not fit the model."""

    def fixed(self) -> dict[str, Any]:
        """Settings that must not change when a folder is continued."""
        return dict(self.settings.model_dump(mode="json"))

    def extend(self, summary: OwnSummary, others: Mapping[str, Any], folder: Path) -> OwnSummary:
        """The summary with those of diagnostics that were run with it in the same folder, by their names."""
        return summary

    def notes(self, records: Sequence[Record], summary: OwnSummary, count: int) -> list[str]:
        """What a reader of the numbers must know, after a run over ``count`` samples."""
        errors = [(record[self.item], record["error"]) for record in records if record.get("error") is not None]
        if not errors:
            return []
        first = f"first: {errors[0][0]}: {errors[0][1]}"
        return [f"{len(dict(errors))} of {count} {self.unit} cannot be read; these are left out ({first})"]

    def table(self, summary: OwnSummary, name: str) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
        """Header and rows for the terminal; by default the first table of `draw`."""
        first = next(iter(tables_of(self.drawn([Shown(name, summary)]))), None)
        return (
            ([], []) if first is None else (list(first.header), [[_text(cell) for cell in row] for row in first.rows])
        )

    def markdown(self, summary: OwnSummary, name: str) -> str:
        """The content of NAME.md; by default every table of `draw`."""
        return self.side_by_side([Shown(name, summary)])

    def side_by_side(self, results: Sequence[Shown]) -> str:
        """Every table of `draw` for one model or several, as Markdown."""
        parts = [f"# {self.title}: {', '.join(one.name for one in results)}\n", f"{self.question} {self.reading}\n"]
        for table in tables_of(self.drawn(results)):
            rows = [[_text(cell) for cell in row] for row in table.rows]
            parts += [
                f"## {table.caption}\n",
                markdown(table.header, rows),
                *([f"{table.note}\n"] if table.note else []),
            ]
        return "\n".join(parts)

    def csv_rows(self, summary: OwnSummary, name: str) -> list[dict[str, Any]]:
        """The rows of NAME.csv; by default every cell of `draw`'s tables, unrounded where it is a number."""
        return [
            {
                "table": table.caption,
                "row": _text(row[0]),
                "column": column,
                "value": _value(cell),
                "interval": _below(cell),
            }
            for table in tables_of(self.drawn([Shown(name, summary)]))
            for row in table.rows
            for column, cell in zip(table.header[1:], row[1:], strict=True)
        ]

    def panel(self, record: Record) -> Panel | None:
        """What the case browser shows of one saved record; None where it has nothing to show. Without torch."""
        return None

    def panels(self, records: Sequence[Record]) -> Sequence[Panel | None]:
        """The same of all saved records of one sample or pair, of which a diagnostic may have several; by default a
        panel of each."""
        return [self.panel(record) for record in records]

    def numbers(self, summary: OwnSummary | None) -> dict[str, Any]:
        """The few numbers that stand for the whole in an overview of several models; None where it was not run."""
        return {}

    # ------------------------------------------------------------------ for the report and the lists

    @classmethod
    def how(cls) -> str:
        """The command that produces its results."""
        data = "PAIRS" if cls.needs.pairs and not cls.needs.singles else "DATA"
        second = " --second-model OTHER" if cls.needs.second_model or cls.needs.may_compare else ""
        return cls.command or f"realvr diagnose {cls.name} MODEL {data} --out DIR{second}"

    @classmethod
    def result_file(cls) -> ResultFile[Any]:
        """The typed file NAME.json."""
        verb = " ".join(cls.how().split(" MODEL")[0].split())
        return ResultFile(cls.shape, verb, f"run {verb} again, it keeps its records")

    @classmethod
    def read(cls, folder: Path) -> tuple[Path, Any] | None:
        """The summary that a run left in a folder, and its file; None where there is none."""
        file = folder / f"{cls.name}.json"
        return (file, cls.result_file().load(file)) if file.is_file() else None

    @classmethod
    def paper_tables(cls) -> list[Table]:
        """The paper's numbers, which the report shows apart from its own; see `realvr.evaluation.published`."""
        return []

    def section(self, results: Sequence[Shown]) -> Section:
        """Its part of the report."""
        if not results:
            return Section(self.name, self.title, command=self.how())
        widgets: list[Widget] = [Text(f"{self.question} {self.reading}"), *self.drawn(results)]
        if self.paper:
            widgets.append(Fold("In the paper", [Text(self.paper)], published=True))
        return Section(self.name, self.title, widgets)


def _complaint(kind: type[Diagnostic]) -> str:
    """What the seam cannot use about a class; empty where there is nothing."""
    if not _NAME.fullmatch(kind.name):
        return f"name is {kind.name!r}: write small letters, digits and hyphens; it becomes a file name"
    if not isinstance(kind.needs, Needs):
        return f"needs is {kind.needs!r}: write Needs(...)"
    if not (isinstance(kind.Settings, type) and issubclass(kind.Settings, DiagnosticSettings)):
        return "Settings must be a subclass of DiagnosticSettings"
    if kind.name in _TAKEN:
        return f"name is {kind.name!r}, which another command's files or a section of the report have: choose another"
    for name, about in kind.Settings.model_fields.items():
        if about.is_required():
            return f"setting '{name}' has no default; give it one"
        if name in DiagnoseSettings.names():
            return f"setting '{name}' is an option of every diagnostic: call it otherwise"
    return ""


def _text(cell: Cell | str) -> str:
    if isinstance(cell, str):
        return cell
    return f"{cell.text} {cell.below}".strip()


def _value(cell: Cell | str) -> str | float:
    return cell if isinstance(cell, str) else cell.text if cell.value is None else cell.value


def _below(cell: Cell | str) -> str:
    return "" if isinstance(cell, str) else cell.below


DIAGNOSTICS: Registry[Diagnostic] = Registry(
    "diagnostic",
    Diagnostic,
    "realvr.diagnostics",
    required=("title", "question", "reading", "needs", "paper", "measure", "summarise", "draw"),
    check=_complaint,
)
"""All diagnostics: those of this package and those of ``--plugin`` files."""
