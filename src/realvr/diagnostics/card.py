"""The card of a model's latents: one page from the saved results of one folder (``realvr diagnose … --card``).

``card.html`` is one file, its figures inside it; ``card.md`` links to the figures beside it. Both have the verdict, the
numbers that every diagnostic puts forward (`Diagnostic.highlights`), six figures, and what was not measured and why.
No model is read, and no torch.
"""

from __future__ import annotations

import base64
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2

from realvr import __version__
from realvr.diagnostics.base import DIAGNOSTICS, Diagnostic
from realvr.diagnostics.controls_summary import condition_of
from realvr.diagnostics.suite import RECORD, RECORD_FILE
from realvr.diagnostics.verdict import Half, Verdict, verdict
from realvr.errors import UserError
from realvr.runs.files import write_atomically
from realvr.widgets import DASH, number, share

HTML, MARKDOWN = "card.html", "card.md"
FIGURES = ("controls", "walk", "dependence", "enrichment", "vocabulary", "similarity")
"""Used? Where are they? How much is lost without them? What does the answer look at? What do they say? Are they alike?
One that has no figure makes room for the next diagnostic in order that has one."""
_FACTS = {
    "path": "model",
    "weights": "fingerprint of the weights",
    "family": "family",
    "dtype": "number format",
    "images": "pictures",
}
_CONDITIONS = {
    "free": "with its own latents",
    "another": "with another sample's latents",
    "no-span": "without a span",
    "latents-only": "where only the latents see the picture",
}
_PAGE = 504
"""Points: seven inches."""
_MARKS = re.compile(r"([\\`*_\[\]|#$~])")


@dataclass(frozen=True)
class Line:
    """A number with its interval and the diagnostic that it comes from."""

    what: str
    text: str
    below: str
    few: bool
    examples: str
    diagnostic: str
    note: str


@dataclass(frozen=True)
class Drawing:
    """A figure of one diagnostic, with what it asks and the paper's value."""

    diagnostic: str
    title: str
    question: str
    reading: str
    paper: str
    file: str
    content: bytes

    @property
    def width(self) -> int:
        """Percent of the page: a figure of seven inches takes it whole."""
        found = re.search(rb'<svg[^>]*\swidth="([0-9.]+)pt"', self.content)
        return 100 if found is None else max(30, min(100, round(100 * float(found[1]) / _PAGE)))

    @property
    def address(self) -> str:
        """The figure itself, as an address that a page can hold."""
        return f"data:image/svg+xml;base64,{base64.b64encode(self.content).decode()}"


@dataclass(frozen=True)
class Card:
    """Everything that the page says."""

    name: str
    facts: Sequence[tuple[str, str]]
    verdict: Verdict
    lines: Sequence[Line]
    drawings: Sequence[Drawing]
    skipped: Sequence[tuple[str, str]]
    absent: Sequence[str]
    command: str

    @property
    def halves(self) -> list[tuple[str, str, Half]]:
        """The two questions of the verdict: what was measured, the answer in a word, the numbers."""
        used, grounded = self.verdict.used, self.verdict.grounded
        return [
            ("answers that change with another sample's latents", _word(used, "used", "unused"), used),
            ("latents in an evidence box, beyond chance", _word(grounded, "grounded", "ungrounded"), grounded),
        ]


def read_card(folder: Path, name: str = "") -> Card:
    """The card of the results in one folder; ``name`` is what the model is called."""
    first = [kind for name in FIGURES for kind in DIAGNOSTICS if kind.name == name]
    kinds = [*first, *(kind for kind in DIAGNOSTICS if kind not in first)]
    measured = {kind: found[1] for kind in kinds if (found := kind.read(folder)) is not None}
    if not measured:
        raise UserError(
            f"{folder}: no results of a diagnostic in it; realvr diagnose MODEL --data DATA --out DIR --card"
        )
    record = RECORD_FILE.load(folder / RECORD) if (folder / RECORD).is_file() else None
    tests = {} if record is None else record["tests"]
    skipped = {test: one["reason"] for test, one in tests.items() if one["status"] == "skipped"}
    settings: Mapping[str, Any] = next((found["settings"] for found in measured.values() if found.get("settings")), {})
    model = settings.get("model") or {}
    data = str(record["data"] if record is not None else settings.get("data", ""))
    names = {kind.name for kind in measured}
    return Card(
        name=name or str(model.get("name") or folder.name),
        facts=_facts(model, settings.get("latents"), data),
        verdict=verdict({kind.name: found for kind, found in measured.items()}, skipped),
        lines=[
            line
            for kind, found in measured.items()
            for line in (*_accuracies(kind, found), *_lines(kind, found, tests))
        ],
        drawings=_drawings(folder, list(measured)),
        skipped=[(test, why) for test, why in skipped.items() if test not in names],
        absent=[kind.name for kind in DIAGNOSTICS if kind.name not in names and kind.name not in skipped],
        command=shlex.join(
            [*_command(str(model.get("path", "MODEL")), data, measured), "--out", str(folder), "--card"]
        ),
    )


def write_card(folder: Path, name: str = "") -> tuple[Path, Path]:
    """Write both files from what is in the folder; their paths."""
    card = read_card(folder, name)
    for file, text in ((HTML, as_html(card)), (MARKDOWN, as_markdown(card))):
        # Half a surrogate pair, as a folder name may hold it, has no UTF-8.
        write_atomically(folder / file, text.encode("utf-8", "replace"))
    return folder / HTML, folder / MARKDOWN


# ---------------------------------------------------------------------- from the results


def _facts(model: Mapping[str, Any], latents: object, data: str) -> list[tuple[str, str]]:
    known = [(words, str(model[key])) for key, words in _FACTS.items() if model.get(key)]
    return [*known, ("latents K", DASH if latents is None else str(latents)), ("data", data or DASH)]


def _lines(kind: type[Diagnostic], summary: Mapping[str, Any], tests: Mapping[str, Any]) -> list[Line]:
    examples = tests.get(kind.name, {}).get("examples") or summary.get("questions")
    counted = f"{examples} {kind.unit}" if isinstance(examples, int) and examples else DASH
    cells = [(one, one.cell(summary)) for one in kind.highlights]
    known = [(one, cell) for one, cell in cells if cell.text != DASH]
    return [
        Line(one.heading, cell.text, cell.below, cell.few, counted, kind.name, one.note)
        for one, cell in known or cells[:1]  # what was measured has a line, though it be without a number
    ]


def _accuracies(kind: type[Diagnostic], summary: Mapping[str, Any]) -> list[Line]:
    """How well the model answers, and what is left without its latents: what a reader asks first."""
    if kind.name != "controls":
        return []
    found = [(words, condition_of(summary, name)) for name, words in _CONDITIONS.items()]
    cells = [(words, one["questions"], share(one["accuracy"])) for words, one in found if one is not None]
    return [
        Line(f"accuracy {words}, %", cell.text, cell.below, cell.few, f"{count} {kind.unit}", kind.name, "")
        for words, count, cell in cells
    ]


def _command(model: str, data: str, measured: Mapping[type[Diagnostic], Any]) -> list[str]:
    """What measures the same: the tests, and the settings that are not the usual ones."""
    words = ["realvr", "diagnose", model, "--data", data or "DATA", "--tests", ",".join(kind.name for kind in measured)]
    settings = {kind: found.get("settings") or {} for kind, found in measured.items()}
    limits = {one.get("limit") for one in settings.values()}
    if len(limits) == 1 and None not in limits:
        words += ["--limit", str(limits.pop())]
    for kind, own in settings.items():
        for name, usual in kind.Settings().model_dump(mode="json").items():
            value = own.get(name, usual)
            if value != usual and value is not None:
                text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
                words += ["--set", f"{kind.name}.{name}={text}"]
    return words


def _drawings(folder: Path, measured: Sequence[type[Diagnostic]]) -> list[Drawing]:
    drawn: list[Drawing] = []
    for kind in measured:
        file = next(iter([*folder.glob(f"{kind.name}.svg"), *sorted(folder.glob(f"{kind.name}-*.svg"))]), None)
        if file is not None and len(drawn) < len(FIGURES):
            about = (kind.name, kind.title, kind.question, kind.reading, kind.paper.rstrip("."))
            drawn.append(Drawing(*about, file.name, file.read_bytes()))
    return drawn


def _word(half: Half, yes: str, no: str) -> str:
    return "not decided" if half.holds is None else yes if half.holds else no


def percent(value: float | None) -> str:
    """A share as a percentage."""
    return DASH if value is None else f"{number(100 * value)} %"


# ---------------------------------------------------------------------- pages


def as_html(card: Card) -> str:
    """One file; everything that comes from results is escaped by the template."""
    text = files("realvr.diagnostics").joinpath("card.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    return environment.from_string(text).render(card=card, version=__version__, percent=percent, number=number)


def as_markdown(card: Card) -> str:
    """The same with links to the figures' files."""
    said = _plain(card.verdict.sentence)
    parts = [
        f"# Latents of {_plain(card.name)}",
        f"**Verdict:** {said}.",
        _rows(["", ""], [[what, value] for what, value in card.facts]),
        "## Numbers",
        _rows(
            ["number", "value", "95 % interval", "n", "diagnostic"],
            [
                [one.what, one.text + ("†" if one.few else ""), one.below, one.examples, one.diagnostic]
                for one in card.lines
            ],
        ),
        "† over few samples. " + " ".join(_plain(one.note) for one in card.lines if one.note),
        "## Figures" if card.drawings else "",
    ]
    for one in card.drawings:
        published = f" In the paper: {_plain(one.paper)}." if one.paper else ""
        parts += [
            f"### {_plain(one.title)}",
            f"![{_plain(one.title)}]({one.file})",
            f"{_plain(one.question)} {_plain(one.reading)}{published}",
        ]
    if card.skipped:
        parts += ["## Skipped", "\n".join(f"- {_plain(name)}: {_plain(why)}" for name, why in card.skipped)]
    if card.absent:
        parts += ["## Not measured", _plain(", ".join(card.absent))]
    fence = "`" * (3 + max((len(run) for run in re.findall("`+", card.command)), default=0))
    parts += [
        "## Again",
        f"{fence}\n{' '.join(card.command.split())}\n{fence}",
        f"Written by realvr {__version__} from saved results.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _rows(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *([_plain(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _plain(text: str) -> str:
    """Text that Markdown shows as it is: no markup of its own, no HTML, one line."""
    return _MARKS.sub(r"\\\1", " ".join(text.split())).replace("<", "&lt;").replace(">", "&gt;")
