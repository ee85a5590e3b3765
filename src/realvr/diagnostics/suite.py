"""Several diagnostics on one model, or on several models side by side: ``realvr diagnose MODEL --tests …``.

Data and model are read once; each diagnostic takes as many samples as it needs by default, and one that the data or the
model cannot serve is skipped with the reason. Every model has a folder with what `realvr.diagnostics.run` writes for
each diagnostic, ``diagnose.json`` (what was measured, what was skipped and why) and ``verdict.json``. Of several
models, the folder above has the figures and tables side by side, and a ``diagnose.json`` of its own. The same command
continues a stopped run. No torch before a model is loaded.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from realvr.diagnostics.base import DIAGNOSTICS, Diagnostic
from realvr.diagnostics.data import Source
from realvr.diagnostics.model import Model
from realvr.diagnostics.parts import Shown, Skip
from realvr.diagnostics.run import Run, chosen_latents, load_responder, takes_untrained, write_figures
from realvr.diagnostics.settings import DiagnoseSettings
from realvr.diagnostics.verdict import NEEDED, verdict
from realvr.errors import UserError
from realvr.evaluation.processes import Ranks
from realvr.runs.files import read_json, write_atomically, write_json
from realvr.runs.folder import open_run_folder
from realvr.runs.guard import note
from realvr.runs.launching import check_count, launch
from realvr.runs.records import ResultFile

ALL = "all"


class Outcome(TypedDict):
    """What became of one diagnostic on one model."""

    status: str
    """``measured`` or ``skipped``."""
    reason: str
    """Why it was skipped."""
    examples: int
    """Samples or pairs."""
    seconds: float
    """Of the last run that measured something; a continued one measures only what is missing."""
    peak_gib: float | None
    """Most memory of the GPU during that run; None on a CPU."""


class SuiteRecord(TypedDict):
    """``diagnose.json`` of one model."""

    model: str
    latents: int
    data: str
    tests: dict[str, Outcome]


class SuiteOverview(TypedDict):
    """``diagnose.json`` above the folders of several models."""

    models: dict[str, str]
    """Folder of each model, by its name."""
    data: str
    tests: dict[str, dict[str, Outcome]]
    """Outcomes by test and model."""
    verdicts: dict[str, str]
    """A sentence for each model."""


RECORD = "diagnose.json"
VERDICT = "verdict.json"
RECORD_FILE: ResultFile[Any] = ResultFile(SuiteRecord, "realvr diagnose", "run it again, it keeps its records")
OVERVIEW_FILE: ResultFile[Any] = ResultFile(SuiteOverview, "realvr diagnose", "run it again, it keeps its records")


@dataclass(frozen=True)
class Suite:
    """Diagnostics with their settings, and what they are run on. ``run`` names the first model and the folder."""

    run: DiagnoseSettings
    tests: tuple[str, ...] = (ALL,)
    against: tuple[str, ...] = ()
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Settings of single diagnostics, by their names."""
    card: bool = False
    """Whether every model gets a card (`realvr.diagnostics.card`)."""

    def diagnostics(self) -> list[Diagnostic]:
        """The chosen ones, in the order in which they run: those that choose cases for the others first."""
        names = list(dict.fromkeys(self.tests))
        if not names:
            raise UserError(f"--tests is empty: name diagnostics ({', '.join(DIAGNOSTICS.names())}), or all")
        kinds = list(DIAGNOSTICS) if ALL in names else [DIAGNOSTICS.get(name) for name in names]
        foreign = sorted(set(self.options) - {kind.name for kind in kinds})
        if foreign:
            raise UserError(f"--set {foreign[0]}: this diagnostic is not among --tests")
        made = [kind.configure(self.options.get(kind.name, {})) for kind in kinds]
        return sorted(made, key=lambda one: (not one.opens, one.last, one.order, one.name))

    @property
    def folders(self) -> dict[str, Path]:
        """Folder of each model, by the name that figures give it; one model alone has the whole folder."""
        out, paths = Path(self.run.out), (str(self.run.model), *self.against)
        if len(paths) == 1:
            return {model_name(paths[0]): out}
        made: dict[str, Path] = {}
        for path in paths:
            name, number = model_name(path), 1
            while name in made:
                number += 1
                name = f"{model_name(path)}-{number}"
            made[name] = out / name
        return made

    def to_json(self) -> str:
        """For a process that does a share of the work."""
        content = asdict(self) | {"run": json.loads(self.run.to_json())}
        return json.dumps({"suite": content})

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Suite:
        """The opposite."""
        values = dict(content)
        run = DiagnoseSettings(**values.pop("run"))
        return cls(run, tuple(values["tests"]), tuple(values["against"]), values["options"])


def model_name(path: str) -> str:
    """What figures and folders call a model: the last telling part of its path."""
    parts = [part for part in re.split(r"[/\\]+", path.rstrip("/\\")) if part not in ("", ".", "..")]
    telling = [part for part in parts if part not in ("final", "best", "train", "model", "checkpoints")] or parts
    return re.sub(r"[^A-Za-z0-9._@+-]+", "-", telling[-1] if telling else "model")


def run_suite(suite: Suite) -> SuiteOverview | None:
    """Run everything; what became of each test. Under torchrun every process but the first returns nothing."""
    check_count(suite.run.processes)
    suite.run.check()
    suite.diagnostics()  # names and settings are checked before anything is read
    paths = (str(suite.run.model), *suite.against)
    for (name, folder), path in zip(suite.folders.items(), paths, strict=True):
        one = replace(suite, run=replace(suite.run, model=path, out=folder), against=())
        if len(paths) > 1 and name != path and Ranks.from_environment().rank == 0:
            note(f"{name}: {path}")
        if suite.run.processes > 1:
            launch(["-m", "realvr.diagnostics.worker", one.to_json()], suite.run.processes)
        else:
            suite_share(one)
    if Ranks.from_environment().rank:
        return None
    overview = _overview(suite)
    if suite.card:
        _write_cards(suite)
    if len(paths) > 1:
        with open_run_folder(suite.run.out, "diagnose", suite.run.take_over):
            side_by_side(suite)
            OVERVIEW_FILE.dump(Path(suite.run.out) / RECORD, overview)
    return overview


def _write_cards(suite: Suite) -> None:
    from realvr.diagnostics.card import write_card  # which reads what is written here

    for name, folder in suite.folders.items():
        with open_run_folder(folder, "diagnose", suite.run.take_over):
            write_card(folder, name)


def _overview(suite: Suite) -> SuiteOverview:
    records = {name: RECORD_FILE.load(folder / RECORD) for name, folder in suite.folders.items()}
    tests = list(dict.fromkeys(test for record in records.values() for test in record["tests"]))
    outcomes = {
        test: {name: record["tests"][test] for name, record in records.items() if test in record["tests"]}
        for test in tests
    }
    return {
        "models": {name: str(folder) for name, folder in suite.folders.items()},
        "data": str(suite.run.data),
        "tests": outcomes,
        "verdicts": {
            name: read_json(folder / VERDICT)["sentence"]
            for name, folder in suite.folders.items()
            if (folder / VERDICT).is_file()
        },
    }


def results(suite: Suite, diagnostic: Diagnostic) -> list[Shown]:
    """What the models have of one diagnostic, in order."""
    found = []
    for number, (name, folder) in enumerate(suite.folders.items()):
        measured = diagnostic.read(folder)
        if measured is not None:
            found.append(Shown(name, measured[1], number))
    return found


def side_by_side(suite: Suite) -> None:
    """Figures and tables of several models, above their folders."""
    out = Path(suite.run.out)
    for diagnostic in suite.diagnostics():
        shown = results(suite, diagnostic)
        if shown:
            write_figures(diagnostic, shown, out)
            write_atomically(out / f"{diagnostic.name}.md", diagnostic.side_by_side(shown))


# ---------------------------------------------------------------------- one process, one model


def suite_share(suite: Suite) -> None:
    """Everything one process does for one model; the first also summarises."""
    settings, ranks = suite.run, Ranks.from_environment()
    show = ranks.rank == 0
    source = Source(settings.data)
    diagnostics = suite.diagnostics()
    for line in source.lines() if show and source.samples else ():
        note(line)
    with open_run_folder(settings.out, "diagnose", settings.take_over) if show else nullcontext():
        ranks.start()
        share = _Share(suite, source, _load(settings, ranks, takes_untrained(diagnostics)), ranks)
        for kind in DIAGNOSTICS:
            share.choose_cases(kind())  # an earlier run may have left them
        for number, diagnostic in enumerate(diagnostics, start=1):
            share.test(diagnostic, f"{number}/{len(diagnostics)} " if len(diagnostics) > 1 else "")
        ranks.stop()
        if show:
            share.write_again(diagnostics)
            share.judge()


def _load(settings: DiagnoseSettings, ranks: Ranks, untrained: bool) -> Model:
    def load(path: str, latents: int | None, second: Model | None = None) -> Model:
        responder = load_responder(settings, path, ranks)
        return Model(responder, chosen_latents(None, path, responder, latents, ranks.rank == 0, untrained), second)

    second = load(settings.second_model, None) if settings.second_model else None
    return load(str(settings.model), settings.latents, second)


@dataclass
class _Share:
    """One process of a suite on one model."""

    suite: Suite
    source: Source
    model: Model
    ranks: Ranks
    summaries: dict[str, Any] = field(default_factory=dict)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    runs: dict[str, tuple[Run, Any]] = field(default_factory=dict)
    detailed: frozenset[str] | None = None

    def test(self, diagnostic: Diagnostic, number: str) -> None:
        """One diagnostic: measured, or skipped with the reason."""
        begun, outcome = time.monotonic(), self._outcome()
        self._reset_peak()
        try:
            run = self._run(diagnostic)
            outcome["examples"] = len(diagnostic.select(run.data.items, Path(self.suite.run.data)))
            diagnostic.settle(run.model)
        except UserError as error:  # what select and settle refuse depends on data and model only: every process agrees
            self._skip(diagnostic, outcome, error)
            return
        run.claim(diagnostic)
        try:
            complete = self.ranks.rank == 0 and run.complete(diagnostic)  # for the record, which the first writes
            journal = run.measure(diagnostic, self.detailed, number)
            if self.ranks.rank == 0:
                self.summaries |= run.finish([diagnostic], [journal], self.summaries)
        except Skip as error:
            self._skip(diagnostic, outcome, error)
            return
        self.choose_cases(diagnostic)
        self.runs[diagnostic.name] = (run, journal)
        outcome |= {"seconds": round(time.monotonic() - begun, 1), "peak_gib": self._peak()}
        self._record(diagnostic, outcome, complete)

    def _run(self, diagnostic: Diagnostic) -> Run:
        """Data and model as one diagnostic gets them; raises `Skip` where they lack what it needs."""
        needs, settings = diagnostic.needs, self.suite.run
        if needs.span and not self.model.latents:
            raise Skip(f"{self.model.name} has no latent span (K = 0)")
        if needs.second_model and self.model.second is None:
            raise Skip("it compares two models: name the other with --second-model")
        usual = diagnostic.examples[self.model.backbone.device.type == "cuda"]
        limit = settings.limit or usual
        data = self.source.take(diagnostic, limit)
        model = self.model
        if not (needs.second_model or needs.may_compare):
            model = Model(model.responder, model.latents)
        return Run(replace(settings, limit=limit), data, model, self.ranks)

    def choose_cases(self, diagnostic: Diagnostic) -> None:
        """The samples that the case browser shows, where this diagnostic chose them: the same in every process."""
        if diagnostic.opens:
            self.ranks.barrier()  # the first process has written them
            measured = diagnostic.read(Path(self.suite.run.out))
            self.detailed = self.detailed if measured is None else diagnostic.case_ids(measured[1])

    def _outcome(self) -> Outcome:
        return {"status": "measured", "reason": "", "examples": 0, "seconds": 0.0, "peak_gib": None}

    def _skip(self, diagnostic: Diagnostic, outcome: Outcome, error: UserError) -> None:
        outcome |= {"status": "skipped", "reason": str(error), "examples": 0}
        if self.ranks.rank == 0:
            note(f"{diagnostic.name} skipped: {error}")
        self._record(diagnostic, outcome)

    def _record(self, diagnostic: Diagnostic, outcome: Outcome, complete: bool = False) -> None:
        """After every test, so that a stopped run also says what it has. What an earlier run needed stays where
        its records were ``complete``."""
        self.outcomes[diagnostic.name] = outcome
        if self.ranks.rank == 0:
            path = Path(self.suite.run.out) / RECORD
            before = RECORD_FILE.load(path)["tests"] if path.is_file() else {}
            earlier = before.get(diagnostic.name)
            if complete and earlier is not None and earlier["status"] == "measured":
                outcome |= {"seconds": earlier["seconds"], "peak_gib": earlier["peak_gib"]}
            record: SuiteRecord = {
                "model": str(self.suite.run.model),
                "latents": self.model.latents,
                "data": str(self.suite.run.data),
                "tests": {**before, **self.outcomes},
            }
            RECORD_FILE.dump(path, record)

    def write_again(self, diagnostics: Sequence[Diagnostic]) -> None:
        """Diagnostics that take numbers of others are written once all of them are there."""
        for diagnostic in diagnostics:
            if diagnostic.name in self.runs and type(diagnostic).extend is not Diagnostic.extend:
                run, journal = self.runs[diagnostic.name]
                self.summaries |= run.finish([diagnostic], [journal], self.summaries, show=False)

    def judge(self) -> None:
        """One verdict on the model, of what is in the folder; not where nothing was asked that could decide it."""
        folder = Path(self.suite.run.out)
        tests = RECORD_FILE.load(folder / RECORD)["tests"]
        if any(name in tests for name in NEEDED):
            found = {name: DIAGNOSTICS.get(name).read(folder) for name in NEEDED}
            summaries = {name: one[1] for name, one in found.items() if one is not None}
            skipped = {name: one["reason"] for name, one in tests.items() if one["status"] == "skipped"}
            write_json(folder / VERDICT, verdict(summaries, skipped).as_json())

    def _reset_peak(self) -> None:
        import torch

        for device in self.model.backbone.devices:
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)

    def _peak(self) -> float | None:
        import torch

        gpus = [device for device in self.model.backbone.devices if device.type == "cuda"]
        return round(max(map(torch.cuda.max_memory_allocated, gpus)) / 2**30, 2) if gpus else None
