"""One evaluation: every question under every budget and condition, then the summary.

Phase 1 asks with the model's own latents, at every K from one reading of the prompt. Phase 2 asks again with the mean
latents, with those of another question and with noise (see `ablation`), all from one more reading; it needs phase 1 to
be complete. Batches are fixed by
the order of the questions and their size, not by what has been answered or by the number of processes, so that a
resumed run and one on several processes repeat the same arithmetic; a batch of which something is missing is asked as a
whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from realvr.answers import JUDGE
from realvr.data.sample import Sample
from realvr.errors import UserError
from realvr.evaluation.ablation import donors, matched_noise, mean_latents
from realvr.evaluation.asking import Asked, Asker, ImageLoader, Waiting, prediction, prefetch
from realvr.evaluation.benchmark import benchmark_of
from realvr.evaluation.finished import summarise_run
from realvr.evaluation.latent_store import LatentStore
from realvr.evaluation.processes import Ranks
from realvr.evaluation.progress import Meter
from realvr.evaluation.questions import Questions, image_key
from realvr.evaluation.records import Condition, Prediction, read_predictions
from realvr.evaluation.responder import Plan, Reply, Responder
from realvr.evaluation.run_folder import claim
from realvr.evaluation.store import Key, Store, merge
from realvr.evaluation.summary_files import write_summary
from realvr.runs.files import write_atomically
from realvr.runs.folder import open_run_folder

TIMING = "timing.json"
EXCHANGED: tuple[Condition, ...] = ("mean", "other", "noise")


@dataclass(frozen=True)
class EvalSettings:
    """What decides the predictions, beside model and data."""

    latents: tuple[int, ...] | None = None
    """Budgets K to evaluate; None is the checkpoint's own."""
    ablation: bool = True
    """Also K = 0, the mean latents, those of another question, and noise."""
    seeds: tuple[int, ...] = (0,)
    """Seeds of sampling; one for greedy decoding."""
    policy: str | None = None
    """Extraction policy; None: each benchmark's own, which is strict for those of the package."""
    exchange_seed: int = 0
    """Fixes who gets whose latents in the condition ``other``, and the numbers of ``noise``."""


@dataclass(frozen=True)
class Budgets:
    """K of every own-latent pass, and the one at which latents are exchanged (None: nowhere)."""

    own: tuple[int, ...]
    exchanged: int | None

    def conditions(self, exchanged: Sequence[Condition] = EXCHANGED) -> list[tuple[Condition, int]]:
        """Everything a question is asked under, in the order of the predictions."""
        found: list[tuple[Condition, int]] = [("own", latents) for latents in self.own]
        if self.exchanged is not None:
            found += [(condition, self.exchanged) for condition in exchanged]
        return found


def budgets(settings: EvalSettings, trained: int) -> Budgets:
    """Which K are evaluated on a checkpoint trained with ``trained`` latents (0: it never saw the markers)."""
    asked = (trained,) if settings.latents is None else tuple(dict.fromkeys(settings.latents))
    if any(latents < 0 for latents in asked):
        raise UserError(f"--latents: {min(asked)} is negative; K is the number of latent slots")
    if not asked:
        raise UserError("--latents names no budget")
    if not trained and (settings.latents is None or any(asked)):
        raise UserError(
            "the model was not trained with latent slots: evaluate it with --latents 0, or train Stage 1 first"
        )
    spans = [latents for latents in asked if latents]
    if not settings.ablation or not spans:
        return Budgets(asked, None)
    exchanged = trained if trained in spans else spans[0] if len(spans) == 1 else None
    return Budgets(asked if 0 in asked else (*asked, 0), exchanged)


@dataclass
class _Bench:
    """A benchmark during a run."""

    questions: Questions
    batches: list[list[Sample]]
    exchanged: tuple[Condition, ...]
    """Conditions of phase 2: ``other`` needs questions about different images."""
    donors: dict[str, str] = field(default_factory=dict)
    mean: Tensor | None = None

    @property
    def name(self) -> str:
        return self.questions.bench


def _bench(questions: Questions, batch: int) -> _Bench:
    batches = [questions.samples[k : k + batch] for k in range(0, len(questions), batch)]
    # By reference: whether two files show the same picture is only known when they have been opened, in phase 1.
    alone = not donors(questions.samples, pictures={s.id: list(map(image_key, s.images)) for s in questions.samples})
    return _Bench(questions, batches, tuple(name for name in EXCHANGED if not (alone and name == "other")))


def evaluate(
    responder: Responder,
    benches: Sequence[Questions],
    out: str | Path,
    settings: EvalSettings | None = None,
    *,
    batch: int = 16,
    ranks: Ranks | None = None,
    notes: Mapping[str, Any] | None = None,
    versions: Mapping[str, Any] | None = None,
    show: bool = True,
    loader: ImageLoader | None = None,
) -> dict[str, Any]:
    """Ask everything that has not been answered in ``out`` yet, and score it. Returns the summary (rank 0).

    ``notes`` are further settings that must not change when a run is continued; they go into ``eval.json``.
    ``show=False`` prints no progress. A ``loader`` that has prepared pictures for this model before gives them again.
    """
    settings, ranks = settings or EvalSettings(), ranks or Ranks()
    directory = Path(out)
    _check(benches, settings, batch)
    chosen = budgets(settings, responder.latents)
    with open_run_folder(directory, "eval") if ranks.rank == 0 else nullcontext():
        if ranks.rank == 0:
            record = _record(responder, benches, settings, chosen, notes or {})
            record |= {"versions": dict(versions or {}), "run": {"batch": batch, "processes": ranks.world}}
            claim(directory, record)
            merge(directory)
        ranks.barrier()
        run = Run(responder, benches, directory, settings, chosen, batch, ranks, show, loader)
        run.all()
        ranks.barrier()
        if ranks.rank:
            return {}
        if run.waiting.seconds:
            write_atomically(directory / TIMING, json.dumps(run.waiting.record(), indent=2) + "\n")
        merge(directory, run.order())
        summary = summarise_run(directory)
        write_summary(directory, summary)
        return summary


def _alone(item: Asked) -> Asked:
    """A question that no latents can be exchanged with: all that could be asked are about its own images."""
    return Asked(item.sample, [], item.error or "no question about another image could be asked: nothing to exchange")


def _check(benches: Sequence[Questions], settings: EvalSettings, batch: int) -> None:
    if not benches:
        raise UserError("no benchmark named: --bench NAME=PATH")
    names = [questions.bench for questions in benches]
    if len(set(names)) < len(names):
        raise UserError(f"--bench: {max(names, key=names.count)} is named twice; names must differ")
    for name in names:
        benchmark_of(name).policy_or(settings.policy)
    if batch < 1:
        raise UserError(f"--batch is {batch}: at least one question must be asked at a time")


def _record(
    responder: Responder,
    benches: Sequence[Questions],
    settings: EvalSettings,
    chosen: Budgets,
    notes: Mapping[str, Any],
) -> dict[str, Any]:
    asked = [benchmark_of(questions.bench) for questions in benches]
    policies = {bench.policy_or(settings.policy) for bench in asked}
    parsers = {str(bench.parser(bench.policy_or(settings.policy))) for bench in asked}
    return {
        "responder": responder.describe(),
        "benches": {questions.bench: questions.describe() for questions in benches},
        "sets": {questions.bench: questions.set_facts() for questions in benches},
        "expected": {questions.bench: len(questions) for questions in benches},
        "answers": {"parser": " + ".join(sorted(parsers)), "judge": JUDGE},
        "settings": asdict(settings)
        | {
            "policy": " + ".join(sorted(policies)),
            "latents": list(chosen.own),
            "trained_latents": responder.latents,
            "exchanged_latents": chosen.exchanged,
            "conditions": [f"{condition}@{latents}" for condition, latents in chosen.conditions()],
        }
        | dict(notes),
    }


class Run:
    """The asking of one process."""

    def __init__(
        self,
        responder: Responder,
        benches: Sequence[Questions],
        directory: Path,
        settings: EvalSettings,
        chosen: Budgets,
        batch: int,
        ranks: Ranks,
        show: bool = True,
        loader: ImageLoader | None = None,
    ) -> None:
        self.settings = settings
        self.show = show and ranks.rank == 0
        self.budgets = chosen
        self.ranks = ranks
        self.benches = [_bench(questions, batch) for questions in benches]
        self.store = Store(directory, ranks.rank, ranks.world)
        self.latents = LatentStore(directory, ranks.rank)
        self.asker = Asker(responder, batch)
        self.loader = loader or ImageLoader(getattr(responder, "prepare", None))
        self.waiting = Waiting()

    def all(self) -> None:
        """Both phases."""
        total = sum(
            1 for bench, batch in self._share() for key in self._keys(bench, batch) if key not in self.store.done
        )
        try:
            with Meter(total, show=self.show) as meter:
                self._own(meter)
                if self.budgets.exchanged is not None:
                    self.ranks.barrier()
                    self.latents.refresh()
                    self._exchanged(meter, self.budgets.exchanged)
        finally:
            self.store.close()

    def order(self) -> list[Key]:
        """Keys of all predictions of the run, question by question."""
        return [key for bench in self.benches for key in self._keys(bench, bench.questions.samples)]

    def _keys(self, bench: _Bench, samples: Sequence[Sample]) -> Iterator[Key]:
        for sample in samples:
            for condition, latents in self.budgets.conditions(bench.exchanged):
                for seed in self.settings.seeds:
                    yield (bench.name, sample.id, condition, latents, seed)

    def _share(self) -> Iterator[tuple[_Bench, list[Sample]]]:
        """The batches of this process."""
        every = [(bench, batch) for bench in self.benches for batch in bench.batches]
        yield from every[self.ranks.rank :: self.ranks.world]

    def _loaded(
        self, share: Sequence[tuple[_Bench, list[Sample]]]
    ) -> Iterator[tuple[_Bench, list[Sample], list[Asked]]]:
        """The batches, each with its images, which threads have prepared meanwhile."""
        batches = [batch for _, batch in share]
        with closing(prefetch(batches, self.loader, self.waiting, self.ranks.local_world)) as loaded:
            for (bench, batch), asked in zip(share, loaded, strict=True):
                yield bench, batch, asked

    # ------------------------------------------------------------------ phase 1

    def _own(self, meter: Meter) -> None:
        share = [(bench, batch) for bench, batch in self._share() if any(self._own_missing(bench, batch).values())]
        for bench, batch, asked in self._loaded(share):
            for seed, missing in self._own_missing(bench, batch).items():
                if missing:
                    replies = self.asker.ask(bench.name, asked, [Plan(latents) for latents in missing], seed)
                    self._keep_latents(bench, asked, missing, replies)
                    self._append(bench, asked, [("own", latents) for latents in missing], replies, seed, meter)

    def _own_missing(self, bench: _Bench, batch: Sequence[Sample]) -> dict[int, list[int]]:
        """Per seed, the K of which an answer or, for the first seed, the latents of a question are missing."""
        found = {}
        for seed in self.settings.seeds:
            keys = {k: [(bench.name, sample.id, "own", k, seed) for sample in batch] for k in self.budgets.own}
            missing = [k for k in self.budgets.own if any(key not in self.store.done for key in keys[k])]
            exchanged = self.budgets.exchanged
            if exchanged is not None and exchanged not in missing and seed == self.settings.seeds[0]:
                answered = [key[1] for key in keys[exchanged] if self.store.done[key] is None]
                if not all(self.latents.has(bench.name, question) for question in answered):
                    missing.append(exchanged)
            found[seed] = missing
        return found

    def _keep_latents(
        self, bench: _Bench, asked: Sequence[Asked], plans: Sequence[int], replies: Sequence[Sequence[Reply]]
    ) -> None:
        """The latents of the batch, on the disk before its answers are."""
        exchanged = self.budgets.exchanged
        if exchanged is None or exchanged not in plans:
            return
        found = {}
        for item, reply in zip(asked, replies[list(plans).index(exchanged)], strict=True):
            if reply.error is None and not self.latents.has(bench.name, item.sample.id):
                if reply.latents is None:
                    raise ValueError(f"a reply with {exchanged} latents came without them")
                found[item.sample.id] = reply.latents
        self.latents.add(bench.name, found)

    # ------------------------------------------------------------------ phase 2

    def _exchanged(self, meter: Meter, latents: int) -> None:
        share = [(bench, batch) for bench, batch in self._share() if self._exchanged_missing(bench, batch, latents)]
        for bench in self.benches:
            if any(other is bench for other, _ in share):
                self._prepare(bench)
        for bench, batch, asked in self._loaded(share):
            asked = [self._with_own_error(bench, item, latents) for item in asked]
            for seed, missing in self._exchanged_missing(bench, batch, latents).items():
                # All conditions from one reading of the prompts; where nobody can exchange, "other" is only recorded.
                alone = [] if bench.donors else [condition for condition in missing if condition == "other"]
                for conditions in (part for part in ([c for c in missing if c not in alone], alone) if part):
                    items = [_alone(item) for item in asked] if conditions is alone else asked
                    plans = [Plan(latents, self._given(bench, condition, items)) for condition in conditions]
                    replies = self.asker.ask(bench.name, items, plans, seed)
                    names = [(condition, latents) for condition in conditions]
                    self._append(bench, items, names, replies, seed, meter)

    def _exchanged_missing(self, bench: _Bench, batch: Sequence[Sample], latents: int) -> dict[int, list[Condition]]:
        found: dict[int, list[Condition]] = {}
        for seed in self.settings.seeds:
            missing = [
                condition
                for condition in bench.exchanged
                if any((bench.name, sample.id, condition, latents, seed) not in self.store.done for sample in batch)
            ]
            if missing:
                found[seed] = missing
        return found

    def _prepare(self, bench: _Bench) -> None:
        """Mean and donors, from every question whose own latents are there."""
        known = [sample for sample in bench.questions.samples if self.latents.has(bench.name, sample.id)]
        if known:
            names = [sample.id for sample in known]
            bench.mean = mean_latents(self.latents.get(bench.name, question) for question in names)
            bench.donors = donors(known, self.settings.exchange_seed, self._pictures(bench))

    def _pictures(self, bench: _Bench) -> dict[str, list[str]]:
        """Hashes of the pictures of every question, as phase 1 of all processes recorded them."""
        rows = (row for file in self.store.directory.glob("predictions*.jsonl") for row in read_predictions(file))
        return {row.question: row.pictures for row in rows if row.bench == bench.name and row.condition == "own"}

    def _with_own_error(self, bench: _Bench, item: Asked, latents: int) -> Asked:
        """A question that could not be asked with its own latents is not asked with others either."""
        if item.error is None and not self.latents.has(bench.name, item.sample.id):
            error = self.store.done.get((bench.name, item.sample.id, "own", latents, self.settings.seeds[0]))
            return Asked(item.sample, [], error or "the question's own latents are missing")
        return item

    def _given(self, bench: _Bench, condition: Condition, asked: Sequence[Asked]) -> list[Tensor]:
        """(K, D) for every question of a batch; empty for those that are not asked because of an error."""
        nothing = Tensor()
        if condition == "mean":
            return [nothing if bench.mean is None else bench.mean] * len(asked)

        def given(question: str) -> Tensor:
            if condition == "other":
                return self.latents.get(bench.name, bench.donors[question])
            return matched_noise(self.latents.get(bench.name, question), self.settings.exchange_seed, question)

        return [nothing if item.error else given(item.sample.id) for item in asked]

    # ------------------------------------------------------------------ both

    def _append(
        self,
        bench: _Bench,
        asked: Sequence[Asked],
        conditions: Sequence[tuple[Condition, int]],
        replies: Sequence[Sequence[Reply]],
        seed: int,
        meter: Meter,
    ) -> None:
        policy = benchmark_of(bench.name).policy_or(self.settings.policy)
        found: list[Prediction] = [
            prediction(bench.name, item, condition, latents, seed, reply, policy)
            for (condition, latents), row in zip(conditions, replies, strict=True)
            for item, reply in zip(asked, row, strict=True)
        ]
        new = [item for item in found if item.key not in self.store.done]
        self.store.append(new)
        meter.add(new)
