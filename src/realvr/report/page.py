"""Put the sections together and write the page: one HTML file without anything outside it, and the numbers as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
from markupsafe import Markup

from realvr import __version__
from realvr.diagnostics.base import DIAGNOSTICS
from realvr.diagnostics.card import HTML as CARD
from realvr.diagnostics.panels import Source, join
from realvr.diagnostics.parts import Shown
from realvr.errors import UserError
from realvr.report import paper
from realvr.report.find import find
from realvr.report.overview import further, overview
from realvr.report.provenance import provenance
from realvr.report.results import Arm, Results
from realvr.report.scores import ablation, benchmarks, sweep
from realvr.report.training import training
from realvr.runs.files import publish
from realvr.training.records import BASELINE, TrainingRun
from realvr.widgets import Commands, Section, Text, tables_of, together
from realvr.widgets.browser import Measured

_TEMPLATES = ("page.html", "explorer.html")
_STYLES = ("style.css", "explorer.css", "browser.css")
_SCRIPTS = ("page.js", "browser.js", "explorer.js")


def build(
    runs: Sequence[Path],
    out: Path,
    *,
    title: str = "realvr report",
    baseline: str | None = None,
    policy: str | None = None,
) -> Path:
    """Write ``out/index.html`` and ``out/data.json`` from the results below ``runs``; returns the page's path."""
    results = find(runs, policy)
    sections = make_sections(results, baseline)
    next(one for one in sections if one.id == "overview").widgets += _cards(results, out)
    page = render(sections, title)
    data = {"version": __version__, "title": title, "sections": [_data(section) for section in sections]}
    _write(out, {"index.html": page, "data.json": json.dumps(data, ensure_ascii=False, indent=1) + "\n"})
    return out / "index.html"


def make_sections(results: Results, baseline: str | None = None) -> list[Section]:
    """Every section with results, in order, and a last one that says how to get the others."""
    shown = {kind: _shown(results, kind.name) for kind in DIAGNOSTICS}
    first = [kind for kind in DIAGNOSTICS if kind.opens and shown[kind]]
    every = [
        *(kind().section(shown[kind]) for kind in first),
        overview(results, choose_baseline(results, baseline)),
        training(results),
        benchmarks(results, paper.beside),
        ablation(results),
        sweep(results),
        *(kind().section(shown[kind]) for kind in DIAGNOSTICS if kind not in first),
        further(results),
        paper.section(),
        provenance(results),
    ]
    return together(every, "not-measured", "Not measured here")


def _cards(results: Results, out: Path) -> list[Text]:
    """Links to the cards of latents that lie beside results."""
    found: dict[Path, str] = {}
    for arm in results.arms:
        for one in arm.diagnostics.values():
            if (one.folder / CARD).is_file():
                found.setdefault(one.folder / CARD, arm.name)
    return [
        Text(f"Card of the latents: {name}", link=quote(os.path.relpath(file, out.resolve()).replace(os.sep, "/")))
        for file, name in found.items()
    ]


def _shown(results: Results, diagnostic: str) -> list[Shown]:
    models = _models(results)
    return [
        Shown(arm.name, arm.diagnostics[diagnostic].summary, arm.number, _panels(arm, diagnostic), models)
        for arm in results.arms
        if diagnostic in arm.diagnostics
    ]


def _models(results: Results) -> dict[str, str]:
    """Names of arms by the hash of their weights; without weights that several arms have."""
    found: dict[str, set[str]] = {}
    for arm in results.arms:
        for _, one in arm.results():
            weights = None if isinstance(one, TrainingRun) else one.model.get("weights")
            if weights:
                found.setdefault(str(weights), set()).add(arm.name)
    return {weights: next(iter(names)) for weights, names in found.items() if len(names) == 1}


def _panels(arm: Arm, diagnostic: str) -> Callable[[Collection[str]], list[Measured]]:
    """What all diagnostics of an arm have of the samples that one of them has chosen; read when it is asked for."""
    sources = {
        name: Source(DIAGNOSTICS.get(name), one.folder, dict(one.settings)) for name, one in arm.diagnostics.items()
    }
    return partial(join, sources[diagnostic], list(sources.values()))


def choose_baseline(results: Results, name: str | None) -> Arm | None:
    """The arm that others are compared with: the named one, else the first of the baseline method (by its training run,
    or else by its name), else the first with an evaluation."""
    arms = [arm for arm in results.arms if arm.eval is not None]
    if name is not None:
        found = [arm for arm in arms if arm.name.lower() == name.lower()]
        if not found:
            known = ", ".join(arm.name for arm in arms) or "none"
            raise UserError(f"--baseline {name!r}: no such arm with an evaluation; there are {known}")
        return found[0]
    arms = [arm for arm in arms if arm.main]
    trained = [arm for arm in arms if arm.train is not None and arm.train.about["method"] == BASELINE]
    return next(iter([*trained, *(arm for arm in arms if arm.name.lower() == BASELINE), *arms]), None)


def render(sections: Sequence[Section], title: str) -> str:
    """The page. Everything that comes from results is escaped by the template."""
    folder = files("realvr.report").joinpath("templates")
    texts = {name: folder.joinpath(name).read_text(encoding="utf-8") for name in (*_TEMPLATES, *_STYLES, *_SCRIPTS)}
    environment = jinja2.Environment(
        loader=jinja2.DictLoader(texts),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    page = environment.get_template("page.html")
    return page.render(
        sections=sections,
        title=title,
        version=__version__,
        style=Markup("".join(texts[name] for name in _STYLES)),
        script=Markup("".join(texts[name] for name in _SCRIPTS)),
    )


def _data(section: Section) -> dict[str, Any]:
    found: dict[str, Any] = {
        "id": section.id,
        "title": section.title,
        "tables": [table.as_json() for table in tables_of(section.widgets)],
    }
    for part in section.widgets:
        if isinstance(part, Commands):
            found["commands"] = [dict(zip(("id", "title", "command"), one, strict=True)) for one in part.entries]
    return found


def _write(out: Path, texts: dict[str, str]) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            partial = out / f".{name}.{os.getpid()}"  # two reports may be written at once
            # Half a surrogate pair, as a folder name may hold it, has no UTF-8.
            partial.write_text(text, encoding="utf-8", errors="replace")
            publish(partial, out / name)
    except OSError as error:
        raise UserError(
            f"{out}: the report cannot be written there ({error.strerror or error}); name another --out"
        ) from None
