"""From `EvaluateSettings` to summaries: checkpoints one after the other, in one process or several, resumable."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from realvr.backbone.automatic import announcement
from realvr.errors import UserError
from realvr.evaluation.aggregation import aggregate
from realvr.evaluation.processes import Ranks
from realvr.evaluation.results import load_summary
from realvr.evaluation.settings import EvaluateSettings, model_names
from realvr.evaluation.summary_files import summary_path, write_summary
from realvr.runs.folder import open_run_folder
from realvr.runs.guard import note
from realvr.runs.launching import check_count, launch
from realvr.runs.progress import Bar, busy

if TYPE_CHECKING:
    from realvr.evaluation.questions import Questions
    from realvr.evaluation.responder import Responder
    from realvr.evaluation.runner import Budgets, EvalSettings


@dataclass(frozen=True)
class Evaluated:
    """Summaries by name of the checkpoint, and mean and standard deviation where there are several."""

    summaries: dict[str, dict[str, Any]] = field(default_factory=dict)
    together: dict[str, Any] | None = None


def evaluate(settings: EvaluateSettings) -> Evaluated:
    """Ask what has not been answered in ``settings.out`` yet, score everything, and write the summaries.

    Under torchrun every process but the first gets an empty result.
    """
    check_count(settings.processes)
    settings.check()
    if settings.processes == 1:
        return evaluate_share(settings)
    launch(["-m", "realvr.evaluation.worker", settings.to_json()], settings.processes)
    folders = _folders(settings)
    summaries: dict[str, Any] = {name: load_summary(summary_path(folder)) for name, folder in folders.items()}
    together: Any = load_summary(summary_path(settings.out)) if len(folders) > 1 else None
    return Evaluated(summaries, together)


def evaluate_share(settings: EvaluateSettings) -> Evaluated:
    """Everything one process does; the first also scores."""
    from realvr.runs.quiet import quiet_transformers

    quiet_transformers()
    settings.check()
    settings.sampling()
    # A wrong model should not cost the reading of gigabytes.
    chosen = {model: settings_of(settings, model) for model in settings.models}
    ranks = Ranks.from_environment()
    with open_run_folder(settings.out, "eval", settings.take_over) if ranks.rank == 0 else nullcontext():
        ranks.start()
        questions = read_questions(settings, show=ranks.rank == 0)
        summaries = {}
        for model, (name, folder) in zip(settings.models, _folders(settings).items(), strict=True):
            summaries[name] = _one(settings, model, name, chosen[model], questions, folder, ranks)
        ranks.stop()
        if ranks.rank:
            return Evaluated()
        together = aggregate(summaries) if len(summaries) > 1 else None
        if together is not None:
            write_summary(Path(settings.out), together)
    return Evaluated(summaries, together)


def _folders(settings: EvaluateSettings) -> dict[str, Path]:
    """The folder of each checkpoint by its name."""
    out, names = Path(settings.out), model_names(settings.models)
    return {names[0]: out} if len(names) == 1 else {name: out / name for name in names}


def settings_of(asked: EvaluateSettings, model: str) -> EvalSettings:
    """What decides the predictions of a checkpoint; refuses, from its configuration alone, what it cannot be asked.

    A checkpoint that was trained with K = 0 is asked without a span. One without marker tokens has no K: that it is
    to be asked without a span has to be said.
    """
    from realvr.backbone.loading import trained_latents
    from realvr.evaluation.runner import EvalSettings, budgets

    trained, latents = trained_latents(model), asked.budgets()
    settings = EvalSettings(
        latents=(0,) if latents is None and trained == 0 else latents,
        ablation=asked.ablation,
        seeds=tuple(range(asked.seeds or 1)),
        policy=asked.policy,
        exchange_seed=asked.exchange_seed,
    )
    try:
        budgets(settings, trained or 0)
    except UserError as error:
        raise UserError(f"{model}: {error}") from None
    return settings


def read_questions(settings: EvaluateSettings, show: bool = True) -> list[Questions]:
    """The questions of every benchmark; notes on standard error say what a reader of the numbers must know."""
    from realvr.evaluation import questions

    every = []
    subtasks, variants = settings.subtasks(), settings.variants()
    for name, path in settings.benches().items():
        with Bar(f"reading {name}", 1.0, show, share=True) as bar:
            loaded = questions.load(
                name,
                path,
                tasks=subtasks.get(name),
                limit=settings.limit,
                images=settings.folders().get(name),
                variant=variants.get(name),
                strict=settings.strict_data,
                on_progress=bar.set,
            )
        every.append(loaded)
        if show:
            for line in _about_questions(settings, name, loaded):
                note(line)
    return every


def _about_questions(settings: EvaluateSettings, name: str, loaded: Questions) -> Iterator[str]:
    """What was left out, and what the set is not."""
    from realvr.evaluation.benchmark import BENCHMARKS, base_name

    for reason, count in loaded.dropped.items():
        yield f"{name}: {count} rows cannot be asked and are left out ({reason}: {loaded.examples[reason]})"
    if loaded.missing_tasks:
        yield f"{name}: {loaded.path} has no {', '.join(loaded.missing_tasks)}; the score is not the paper's"
    if base_name(name) not in BENCHMARKS:
        yield f"{name} is no benchmark of the catalogue (realvr benchmarks): read as {loaded.format}"
    elif loaded.bench != name:
        why = "drawn by the embedded world" if loaded.world else f"read as {loaded.format}"
        yield f"{name}: {loaded.path} is {why}; it is called {loaded.bench}"
    whole = loaded.bench in BENCHMARKS and name not in settings.subtasks()
    usual = BENCHMARKS.get(loaded.bench).facts.rows if whole else None
    if usual is not None and settings.limit is None and not loaded.missing_tasks and len(loaded) != usual:
        yield f"{name}: {len(loaded)} questions; the published set has {usual:,}"


def _one(
    settings: EvaluateSettings,
    model: str,
    name: str,
    chosen: EvalSettings,
    questions: Sequence[Questions],
    folder: Path,
    ranks: Ranks,
) -> dict[str, Any]:
    """Evaluate one checkpoint."""
    from realvr.evaluation.benchmark import variant_notes
    from realvr.evaluation.run_folder import versions
    from realvr.evaluation.runner import budgets
    from realvr.evaluation.runner import evaluate as ask_everything

    with busy(f"reading {model}", ranks.rank == 0):
        responder = load_responder(settings, model, name, ranks)
    planned = budgets(chosen, responder.latents)
    if ranks.rank == 0:
        for line in _about_model(settings, model, responder, planned):
            note(line)
    return ask_everything(
        responder,
        questions,
        folder,
        chosen,
        batch=settings.batch or default_batch(responder),
        ranks=ranks,
        notes=variant_notes(settings.variants()),
        versions=versions(responder),
    )


def _about_model(settings: EvaluateSettings, model: str, responder: Responder, planned: Budgets) -> Iterator[str]:
    """What is asked otherwise than the checkpoint suggests, and which fast paths were chosen."""
    backbone = getattr(responder, "backbone", None)
    if settings.fused_layers == "auto" and backbone is not None and backbone.fused_layers:
        yield announcement(["fused_layers"])
    if ignored := responder.describe().get("ignored_generation_defaults"):
        listed = ", ".join(f"{name} = {value}" for name, value in ignored.items())
        yield f"{model} has generation defaults that are not used here ({listed}); stock generate uses them"
    if others := [latents for latents in settings.budgets() or () if latents not in (0, responder.latents)]:
        listed = ", ".join(map(str, others))
        yield f"{model} was trained with K = {responder.latents}; K = {listed} was chosen explicitly"
    if settings.latents is None and not any(planned.own):
        yield f"{model} was trained with K = 0: it answers without a span, and there are no latents to ablate"
    if settings.ablation and planned.exchanged is None and any(planned.own):
        missing = "no mean, other and noise conditions"
        yield f"latents are exchanged at the trained K, which is not among --latents: {missing}"


def load_responder(settings: EvaluateSettings, model: str, name: str, ranks: Ranks) -> Responder:
    """The checkpoint, as evaluations ask it."""
    from realvr.backbone.backbone import Backbone
    from realvr.evaluation.model_responder import ModelResponder
    from realvr.latent.fast import fast_decode

    device = ranks.device(settings.device)
    backbone = Backbone.load(
        model,
        device=device,
        dtype=settings.dtype,
        sharded=settings.sharded,
        min_tokens=settings.min_tokens,
        max_tokens=settings.max_tokens,
        announce=ranks.rank == 0,
        fast_vision=settings.fast_vision,
        fused_layers=settings.fused_layers,
    )
    fast = fast_decode(backbone, settings.fast_decode)
    return ModelResponder(backbone, settings.sampling(), path=model, name=name, fast=fast)


def default_batch(responder: Responder) -> int:
    """Questions at a time where the user does not say."""
    backbone = getattr(responder, "backbone", None)
    return 32 if backbone is not None and backbone.device.type == "cuda" else 16
