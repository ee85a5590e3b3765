"""Run diagnostics: read data, check needs, measure what is missing, summarise and write, on one process or several.

``NAME_settings.json`` holds what decides the records, ``NAME.jsonl`` the records as they come, ``NAME.json``, ``.md``
and ``.csv`` the summary, ``NAME-states`` hidden states of diagnostics that need those of all samples at
once. Batches are cut from the whole list, not from what is missing, so that a resumed run and one on several processes
repeat the same arithmetic. No torch before the model is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from realvr.diagnostics.base import DIAGNOSTICS, Diagnostic
from realvr.diagnostics.data import Data, read_data
from realvr.diagnostics.files import write_csv
from realvr.diagnostics.model import Model
from realvr.diagnostics.parts import DETAILED, Item, Samples, Shown
from realvr.diagnostics.settings import DiagnoseSettings
from realvr.diagnostics.states import StateFiles
from realvr.errors import UserError
from realvr.evaluation.processes import Ranks
from realvr.families import LVR_END
from realvr.imaging.reference import ImageRef
from realvr.runs.files import write_atomically
from realvr.runs.folder import RunFolder, open_run_folder
from realvr.runs.guard import note
from realvr.runs.journal import Journal, merge, summarising
from realvr.runs.launching import check_count, launch
from realvr.runs.progress import Bar, busy
from realvr.widgets.figures import files

if TYPE_CHECKING:
    from realvr.evaluation.model_responder import ModelResponder


def diagnose(
    diagnostics: Sequence[Diagnostic | str], settings: DiagnoseSettings, verb: str = "diagnose"
) -> dict[str, dict[str, Any]]:
    """Measure what the folder lacks, then summarise and write everything; the summaries by name.

    A diagnostic may be named; it then has its default settings. Several share data, model and folder, and need the same
    of them. Under torchrun every process but the first returns nothing.
    """
    chosen = [DIAGNOSTICS.get(one)() if isinstance(one, str) else one for one in diagnostics]
    check_count(settings.processes)
    settings.check()
    for one in chosen[1:]:
        if one.needs.data != chosen[0].needs.data:
            raise UserError(f"{chosen[0].name} and {one.name} need different data: run one after the other")
    if settings.processes == 1:
        return diagnose_share(chosen, settings, verb)
    launch(["-m", "realvr.diagnostics.worker", share_to_json(chosen, settings, verb)], settings.processes)
    files = [one.result_file().load(Path(settings.out) / f"{one.name}.json") for one in chosen]
    return {one.name: content for one, content in zip(chosen, files, strict=True)}


def diagnose_share(
    diagnostics: Sequence[Diagnostic], settings: DiagnoseSettings, verb: str = "diagnose"
) -> dict[str, dict[str, Any]]:
    """Everything one process does; the first also summarises."""
    ranks = Ranks.from_environment()
    first, show = diagnostics[0], ranks.rank == 0
    data = read_data(first, settings)
    for line in data.lines if show else ():
        note(line)
    for diagnostic in diagnostics:
        diagnostic.select(data.items, Path(settings.data))
    out = Path(settings.out)
    with open_run_folder(out, verb, settings.take_over) if show else nullcontext():
        ranks.start()
        model = load_model(diagnostics, settings, ranks)
        run = Run(settings, data, model, ranks)
        for diagnostic in diagnostics:
            diagnostic.settle(model)
            run.claim(diagnostic)
        journals = [run.measure(diagnostic) for diagnostic in diagnostics]
        ranks.stop()
        return run.finish(diagnostics, journals) if show else {}


# ---------------------------------------------------------------------- model


def load_model(diagnostics: Sequence[Diagnostic], settings: DiagnoseSettings, ranks: Ranks) -> Model:
    """The model with the K of the run, and the second where a diagnostic needs one."""
    comparing = [one.name for one in diagnostics if one.needs.second_model]
    if comparing and not settings.second_model:
        raise UserError(f"diagnostic {comparing[0]} compares two models: name the other with --second-model")
    if settings.second_model and not comparing and not any(one.needs.may_compare for one in diagnostics):
        raise UserError(f"--second-model: diagnostic {diagnostics[0].name} looks at one model; leave it out")
    spans = next((one.name for one in diagnostics if one.needs.span), None)

    def load(path: str, needing: str | None, latents: int | None, second: Model | None = None) -> Model:
        responder = load_responder(settings, path, ranks)
        chosen = chosen_latents(needing, path, responder, latents, ranks.rank == 0, takes_untrained(diagnostics))
        return Model(responder, chosen, second)

    second = None
    if settings.second_model:  # one that is only compared with may have another K, or no span
        second = load(settings.second_model, *((spans, settings.latents) if comparing else (None, None)))
    return load(settings.model, spans, settings.latents, second)


def load_responder(settings: DiagnoseSettings, path: str, ranks: Ranks) -> ModelResponder:
    """A model as the settings say, answering greedily."""
    from realvr.backbone.backbone import Backbone
    from realvr.evaluation.model_responder import ModelResponder
    from realvr.latent.sampling import Sampling
    from realvr.runs.quiet import quiet_transformers

    sampling = Sampling(temperature=0.0, max_new=settings.max_new)
    quiet_transformers()
    with busy(f"reading {path}", ranks.rank == 0):
        backbone = Backbone.load(
            path,
            device=ranks.device(settings.device),
            dtype=settings.dtype,
            sharded=settings.sharded,
            min_tokens=settings.min_tokens,
            max_tokens=settings.max_tokens,
            announce=ranks.rank == 0,
        )
    return ModelResponder(backbone, sampling, path=path)


def takes_untrained(diagnostics: Sequence[Diagnostic]) -> bool:
    """Whether all of them also look at a span whose markers were never trained."""
    return all(one.needs.untrained for one in diagnostics)


def chosen_latents(
    needing: str | None, path: str, responder: ModelResponder, asked: int | None, show: bool, untrained: bool = False
) -> int:
    """K to measure with: what was asked for where that makes sense, else the checkpoint's. ``needing``: the diagnostic
    that needs a span; ``untrained``: whether markers that the checkpoint does not have may be used."""
    trained, added = int(responder.latents), responder.backbone.markers_added
    if asked and untrained and added:
        if show:
            note(f"the tokenizer of {path} has no {LVR_END}: its {asked} latents stand between untrained markers")
        return asked
    if needing and (trained == 0 or asked == 0):
        why = f". Its tokenizer has no {LVR_END}" if added else ""
        why += "; --latents K measures it with untrained markers" if added and untrained and asked is None else ""
        raise UserError(
            f"{path} has no trained latent span (K = {min(trained, trained if asked is None else asked)}), which "
            f"diagnostic {needing} needs: train Stage 1 first (realvr train sft), and do not ask for "
            f"--latents 0{why}"
        )
    if asked and not trained:
        raise UserError(
            f"{path} was never trained with latent slots, so --latents {asked} would read untrained markers: "
            "use --latents 0, or train Stage 1 first (realvr train sft)"
        )
    if show and asked is None and added:
        note(f"{path} was never trained with latent slots: it answers directly, K = 0")
    if show and asked is not None and asked not in (0, trained):
        note(f"{path} was trained with K = {trained}; K = {asked} was chosen explicitly")
    return trained if asked is None else asked


# ---------------------------------------------------------------------- records


@dataclass(frozen=True)
class Run:
    """One process of a run."""

    settings: DiagnoseSettings
    data: Data
    model: Model
    ranks: Ranks = field(default_factory=Ranks)

    @property
    def out(self) -> Path:
        """The folder that is written."""
        return Path(self.settings.out)

    def record(self, diagnostic: Diagnostic) -> dict[str, Any]:
        """What decides the records, beside the version of realvr."""
        second = self.model.second
        return {
            "diagnostic": diagnostic.name,
            "model": self.model.responder.describe(),
            "data": str(self.settings.data),
            "pairs" if diagnostic.needs.pairs else "samples": len(self.data.items),
            "questions": self.data.digest,
            "left_out": self.data.left_out,
            "limit": self.settings.limit,
            "latents": self.model.latents,
            **({"second_model": second.responder.describe()} if second is not None else {}),
            **diagnostic.fixed(),
        }

    def claim(self, diagnostic: Diagnostic) -> None:
        """Keep other settings out of the folder, and make one journal of what several processes left."""
        if self.ranks.rank == 0:
            folder, named = RunFolder(self.out), {"diagnostic": diagnostic.name}
            folder.claim(
                f"{diagnostic.name}_settings.json",
                self.record(diagnostic),
                lambda before, now: folder.differs(named | before, now),  # earlier versions did not write the name
            )
            merge(self._journal(diagnostic), diagnostic.key)
        self.ranks.barrier()

    def _journal(self, diagnostic: Diagnostic) -> Path:
        return self.out / f"{diagnostic.name}.jsonl"

    def complete(self, diagnostic: Diagnostic) -> bool:
        """Whether the journal already has every record; asked after `claim`, which makes one file of several."""
        done = Journal(self._journal(diagnostic), diagnostic.key).done
        items = diagnostic.select(self.data.items, Path(self.settings.data))
        return all(diagnostic.complete(item, done) for item in items)

    def measure(self, diagnostic: Diagnostic, detailed: Collection[str] | None = None, number: str = "") -> Journal:
        """Records of everything that the journal lacks; in the first process the journal is then complete.

        ``detailed``: ids of the samples that the case browser shows, by default the first. ``number``: which of several
        diagnostics this is, for the bar.
        """
        items = diagnostic.select(self.data.items, Path(self.settings.data))
        size = self.settings.batch or diagnostic.batch
        ranks, path = self.ranks, self._journal(diagnostic)
        journal = Journal(path, diagnostic.key, ranks.rank, ranks.world)
        own = sum(map(len, share_of(items, size, ranks)))
        with Bar(f"{number}{diagnostic.name}, {diagnostic.unit}", own, show=ranks.rank == 0) as bar:
            measure_all(diagnostic, self.model, items, journal, size, ranks, bar, detailed)
        ranks.barrier()
        if ranks.rank:
            return journal
        places = {item.id: place // size for place, item in enumerate(items)}
        order = [places.get(record[diagnostic.item], len(places)) for record in journal.records]
        if ranks.world == 1 and order == sorted(order):
            return journal
        merge(path, diagnostic.key, lambda record: places.get(record[diagnostic.item], len(places)))
        return Journal(path, diagnostic.key)

    def finish(
        self,
        diagnostics: Sequence[Diagnostic],
        journals: Sequence[Journal],
        others: Mapping[str, Any] | None = None,
        show: bool = True,
    ) -> dict[str, dict[str, Any]]:
        """Summaries from the journals, as files and by name. ``others`` are those of diagnostics that were run before
        in this folder; with ``show``, what a reader of the numbers must know is printed."""
        summaries: dict[str, Any] = {}
        outside = any(not type(one).__module__.startswith("realvr.") for one in diagnostics)
        with summarising(*journals, outside=outside):
            for diagnostic, journal in zip(diagnostics, journals, strict=True):
                summaries[diagnostic.name] = diagnostic.summarised(journal.records)
            for diagnostic in diagnostics:
                whole = diagnostic.extend(summaries[diagnostic.name], {**(others or {}), **summaries}, self.out)
                summaries[diagnostic.name] = whole | {"settings": self.record(diagnostic)}
                self._write(diagnostic, summaries[diagnostic.name])
        for diagnostic, journal in zip(diagnostics, journals, strict=True) if show else ():
            count = len(diagnostic.select(self.data.items, Path(self.settings.data)))
            for line in diagnostic.notes(journal.records, summaries[diagnostic.name], count):
                note(line)
        return summaries

    def _write(self, diagnostic: Diagnostic, summary: dict[str, Any]) -> None:
        name, title = self.out / diagnostic.name, self.model.name
        text, rows = diagnostic.markdown(summary, title), diagnostic.csv_rows(summary, title)
        diagnostic.result_file().dump(name.with_name(f"{name.name}.json"), summary)
        write_atomically(name.with_name(f"{name.name}.md"), text)
        write_csv(name.with_name(f"{name.name}.csv"), rows)
        write_figures(diagnostic, [Shown(title, summary)], self.out)


def write_figures(diagnostic: Diagnostic, results: Sequence[Shown], folder: Path) -> list[Path]:
    """NAME.svg and NAME.png of one model or several; the files."""
    written = []
    for file, content in files(lambda: diagnostic.figure(results), diagnostic.name).items():
        write_atomically(folder / file, content)
        written.append(folder / file)
    return written


def share_of(items: Sequence[Item], batch: int, ranks: Ranks) -> list[Sequence[Item]]:
    """The batches of one process."""
    return [items[start : start + batch] for start in range(0, len(items), batch)][ranks.rank :: ranks.world]


def measure_all(
    diagnostic: Diagnostic,
    model: Model,
    items: Sequence[Item],
    journal: Journal,
    batch: int,
    ranks: Ranks = Ranks(),  # noqa: B008  # frozen
    bar: Bar | None = None,
    detailed: Collection[str] | None = None,
) -> None:
    """Measure what the journal lacks, batch by batch; of several processes, the share of this one."""
    diagnostic.settle(model)
    batches = share_of(items, batch, ranks)
    chosen = [item.id for item in items[:DETAILED]] if detailed is None else detailed
    lacking = [not all(diagnostic.complete(item, journal.done) for item in part) for part in batches]
    if any(lacking):
        diagnostic.prepare(model, items)
    states = StateFiles(journal.path.parent / f"{diagnostic.name}-states")
    with _pictures_ahead(
        model, [part for part, wanted in zip(batches, lacking, strict=True) if wanted], ranks
    ) as taken:
        for number, (part, wanted) in enumerate(zip(batches, lacking, strict=True)):
            if wanted:
                place = (ranks.rank + number * ranks.world) * batch
                records = diagnostic.measure(model, Samples(part, frozenset(journal.done), chosen, place, states))
                journal.add(diagnostic.checked(records, part))
                taken(part)
                for item in part:
                    if not diagnostic.complete(item, journal.done):
                        raise UserError(
                            f"diagnostic {diagnostic.name} left {item.id} without a record: measure must yield what "
                            "keys() names, or failed(sample, error)"
                        )
            if bar is not None:
                bar.advance(len(part))


@contextmanager
def _pictures_ahead(
    model: Model, batches: Sequence[Sequence[Item]], ranks: Ranks
) -> Iterator[Callable[[Sequence[Item]], None]]:
    """Meanwhile threads prepare the pictures of the next batch, where the diagnostic asks the model for pictures; call
    what this gives with each batch that is done."""
    backbone = getattr(model.responder, "backbone", None)
    if backbone is None:
        yield lambda part: None
        return
    pictures = [list(dict.fromkeys(_pictures(part))) for part in batches]
    order = (picture for part in pictures for picture in part)
    with backbone.prepared_ahead(order, 2 * max(map(len, pictures), default=1), ranks.local_world) as ahead:
        yield lambda part: ahead.discard(dict.fromkeys(_pictures(part)))


def _pictures(part: Sequence[Item]) -> Iterator[ImageRef]:
    for item in part:
        for view in getattr(item, "views", (item,)):
            yield from getattr(view, "images", ())


# ---------------------------------------------------------------------- several processes


def share_to_json(diagnostics: Sequence[Diagnostic], settings: DiagnoseSettings, verb: str) -> str:
    """A run as text, for a process that does a share of it."""
    chosen = [[one.name, one.settings.model_dump(mode="json")] for one in diagnostics]
    return json.dumps({"diagnostics": chosen, "settings": json.loads(settings.to_json()), "verb": verb})


def share_from_json(text: str) -> tuple[list[Diagnostic], DiagnoseSettings, str]:
    """The opposite."""
    content = json.loads(text)
    diagnostics = [DIAGNOSTICS.get(name).configure(values) for name, values in content["diagnostics"]]
    return diagnostics, DiagnoseSettings(**content["settings"]), content["verb"]
