"""``realvr eval``: checkpoints on benchmarks, with the ablations of the span, resumable."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from realvr.errors import UserError
from realvr.runs.lock import hold
from realvr.runs.progress import Bar, busy

if TYPE_CHECKING:
    from realvr.evaluation.processes import Ranks
    from realvr.evaluation.questions import Questions
    from realvr.evaluation.responder import Responder
    from realvr.evaluation.runner import EvalSettings
    from realvr.latent.sampling import Sampling

INTERRUPTED = 130


@dataclass(frozen=True)
class Job:
    """The arguments of ``realvr eval`` as plain values, to be handed to further processes."""

    models: list[str]
    bench: list[str]
    out: str
    latents: str | None = None
    ablation: bool = True
    limit: int | None = None
    policy: str = "strict"
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seeds: int | None = None
    max_new: int = 192
    stop_at_answer: bool = True
    batch: int | None = None
    blink_tasks: str | None = None
    mmvp_corrected: bool = False
    images: list[str] = field(default_factory=list)
    strict_data: bool = False
    min_tokens: int | None = None
    max_tokens: int | None = None
    device: str | None = None
    dtype: str | None = None
    exchange_seed: int = 0
    take_over: bool = False

    def check(self) -> None:
        """Refuse what can be seen to be wrong without reading data or weights."""
        from realvr.answers.extract import POLICIES
        from realvr.evaluation.catalog import blink_tasks
        from realvr.evaluation.questions import locate

        if not self.models:
            raise UserError("no model named: realvr eval MODEL --bench NAME=PATH --out DIR")
        if not self.bench:
            raise UserError("no benchmark named: --bench NAME=PATH (realvr benchmarks lists them)")
        benches = self.benches()
        if self.policy not in POLICIES:
            raise UserError(f"'{self.policy}' is not an extraction policy; there are {', '.join(POLICIES)}")
        if self.limit is not None and self.limit < 1:
            raise UserError(f"--limit is {self.limit}: at least one question must be asked")
        if self.batch is not None and self.batch < 1:
            raise UserError(f"--batch is {self.batch}: at least one question must be asked at a time")
        if self.seeds is not None and self.seeds < 1:
            raise UserError(f"--seeds is {self.seeds}: at least one is needed")
        if self.seeds is not None and self.temperature == 0:
            raise UserError(
                "--seeds needs --temperature: greedy decoding has no seeds. For mean ± std over training seeds, name "
                "the checkpoints of several training runs"
            )
        self.budgets()
        blink_tasks(self.blink_tasks)
        model_names(self.models)
        for name, path in benches.items():
            locate(name, path)
        folders = self.folders()
        if unknown := [name for name in folders if name not in benches]:
            raise UserError(f"--images names {unknown[0]}, which is no --bench")

    def sampling(self) -> Sampling:
        """How answers are decoded."""
        from realvr.latent.sampling import ANSWER_END, Sampling

        stop = ANSWER_END if self.stop_at_answer else None
        return Sampling(self.temperature, self.top_p, self.top_k, self.max_new, stop)

    def benches(self) -> dict[str, Path]:
        """Paths by name."""
        from realvr.evaluation.questions import parse_bench

        found: dict[str, Path] = {}
        for text in self.bench:
            name, path = parse_bench(text)
            if name in found:
                raise UserError(f"--bench: {name} is named twice; names must differ")
            found[name] = path
        return found

    def folders(self) -> dict[str, str]:
        """Image folders by name of the benchmark."""
        from realvr.evaluation.questions import bench_name

        found = {}
        for text in self.images:
            name, equals, path = text.partition("=")
            if not equals or not path:
                raise UserError(f"--images {text!r}: write NAME=DIR, NAME being that of a --bench")
            if not Path(path).is_dir():
                raise UserError(f"--images {text!r}: {path} is not a folder")
            found[bench_name(name)] = path
        return found

    def budgets(self) -> tuple[int, ...] | None:
        """K from "8" or "0,2,4"."""
        if self.latents is None:
            return None
        parts = [part for part in re.split(r"[,\s]+", self.latents.strip()) if part]
        if not parts or not all(re.fullmatch(r"\d{1,4}", part) for part in parts):
            raise UserError(f"--latents {self.latents!r}: write a number of latent slots, or several: 0,2,4,8")
        return tuple(dict.fromkeys(int(part) for part in parts))


def evaluate(
    models: Annotated[
        tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="MODEL…", help_behavior_hint="(required)")
    ],
    out: Path,
    bench: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]],
        tyro.conf.arg(metavar="NAME=PATH", help_behavior_hint="(required; may be repeated)"),
    ] = (),
    latents: str | None = None,
    ablation: bool = True,
    limit: int | None = None,
    policy: str = "strict",
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seeds: int | None = None,
    max_new: int = 192,
    stop_at_answer: bool = True,
    batch: int | None = None,
    processes: int = 1,
    blink_tasks: str | None = None,
    mmvp_corrected: bool = False,
    images: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]],
        tyro.conf.arg(metavar="NAME=DIR", help_behavior_hint="(may be repeated)"),
    ] = (),
    strict_data: bool = False,
    min_tokens: int | None = None,
    max_tokens: int | None = None,
    device: str | None = None,
    dtype: str | None = None,
    exchange_seed: int = 0,
    take_over: bool = False,
) -> int:
    """Evaluate one or more checkpoints on benchmarks.

    Every question is asked with the model's own latents; unless --no-ablation is given also without a span (K = 0),
    with the mean latents of the benchmark, with those of another question, and with noise of the same norms. Answers
    are kept as they come: the same command goes on where a run was stopped. Several checkpoints, for instance of
    several training seeds, are evaluated one after the other, each in a folder of its own under OUT, and summarised as
    mean ± std.

    Examples:
      realvr eval runs/rl/final --bench mmvp=data/MMVP --bench blink=data/BLINK --out runs/eval
      realvr eval runs/rl/final --bench hrbench-4k=hr_bench_4k.tsv --latents 0,2,4,8,12,16,20 --out runs/sweep
      realvr eval runs/seed0/final runs/seed1/final runs/seed2/final --bench mmvp=data/MMVP --out runs/three
      realvr eval Qwen/Qwen2.5-VL-7B-Instruct --latents 0 --bench mine=questions.jsonl --limit 100 --out runs/base

    Args:
        models: Directories of checkpoints, hub ids, or mini or mini-base (packaged).
        out: Folder for predictions.jsonl, eval.json, latents and summary.json, .md, .csv.
        bench: A benchmark of realvr benchmarks, or a name of your own, and where its files are. Files that realvr world
            make wrote are called mini-NAME. May be repeated.
        latents: Number of latent slots K, or several with commas; by default the K the checkpoint was trained with.
        ablation: Also K = 0, mean latents, latents of another question, and noise.
        limit: At most this many questions of each benchmark: whole pairs and cycles, spread evenly, always the same.
        policy: How the answer is read: strict, blink-official, vlmevalkit, mme-official or lvr.
        temperature: 0 is greedy.
        top_p: Sample from the smallest set of tokens with this probability mass.
        top_k: Sample from the k likeliest tokens; 0 switches it off.
        seeds: Sample with this many seeds (0, 1, …); needs a temperature.
        max_new: At most this many new tokens per answer.
        stop_at_answer: End a reply once it has written </answer>; off, it goes on to the end token or the limit.
        batch: Questions asked at a time; by default 32 on a GPU, 16 on the CPU.
        processes: Processes that share the questions; process r uses GPU r.
        blink_tasks: paper (the paper's five subtasks), all, or names with commas.
        mmvp_corrected: Correct the answers that the original MMVP file swaps at Index 99/100 and 279/280.
        images: Folder that the image paths of a benchmark are relative to. May be repeated.
        strict_data: Refuse a benchmark with a row that cannot be asked.
        min_tokens: Fewest visual tokens per image (families with variable grids); by default those of its training.
        max_tokens: Most visual tokens per image (families with variable grids); by default those of its training.
        device: cpu, cuda, cuda:1, …; by default the GPU where there is one.
        dtype: float32, bfloat16, float16; by default the checkpoint's own.
        exchange_seed: Fixes whose latents each question gets from another one, and the noise.
        take_over: Take OUT from a run on another machine that is gone for certain.
    """
    given = dict(locals())
    given |= {"models": list(models), "bench": list(bench), "images": list(images), "out": str(out)}
    del given["processes"]
    job = Job(**given)
    from realvr.evaluation.processes import check_count, launch

    check_count(processes)
    job.check()
    try:
        return run(job) if processes == 1 else launch(asdict(job), processes)
    except KeyboardInterrupt:
        print(
            f"realvr: interrupted; what was answered is kept in {job.out}, and the same command goes on from there",
            file=sys.stderr,
        )
        return INTERRUPTED


def run(job: Job) -> int:
    """Everything one process does."""
    from realvr.evaluation.processes import Ranks
    from realvr.runs.quiet import quiet_transformers

    quiet_transformers()
    job.check()
    job.sampling()
    settings = [
        settings_of(job, model) for model in job.models
    ]  # a wrong model should not cost the reading of gigabytes
    ranks = Ranks.from_environment()
    with hold(job.out, "eval", job.take_over) if ranks.rank == 0 else nullcontext():
        ranks.start()
        questions = read_questions(job, show=ranks.rank == 0)
        summaries = {}
        for model, name, chosen in zip(job.models, model_names(job.models), settings, strict=True):
            folder = Path(job.out) if len(job.models) == 1 else Path(job.out) / name
            summaries[name] = _one(job, model, name, chosen, questions, folder, ranks)
        ranks.stop()
        if ranks.rank == 0:
            report(summaries, Path(job.out))
    return 0


def settings_of(job: Job, model: str) -> EvalSettings:
    """What decides the predictions of a checkpoint; refuses, from its configuration alone, what it cannot be asked.

    A checkpoint that was trained with K = 0 is asked without a span. One without marker tokens has no K: that it is
    to be asked without a span has to be said.
    """
    from realvr.backbone.loading import trained_latents
    from realvr.evaluation.runner import EvalSettings, budgets

    trained, asked = trained_latents(model), job.budgets()
    settings = EvalSettings(
        latents=(0,) if asked is None and trained == 0 else asked,
        ablation=job.ablation,
        seeds=tuple(range(job.seeds or 1)),
        policy=job.policy,
        exchange_seed=job.exchange_seed,
    )
    try:
        budgets(settings, trained or 0)
    except UserError as error:
        raise UserError(f"{model}: {error}") from None
    return settings


def model_names(models: Sequence[str]) -> list[str]:
    """Short names that differ: the last parts of the paths, as many as it takes."""
    if len(set(models)) < len(models):
        raise UserError(f"{max(models, key=models.count)} is named twice; name each checkpoint once")
    parts = [[part for part in Path(model).parts if part not in ("/", "..", ".")] or [model] for model in models]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["-".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{number}-{part[-1]}" for number, part in enumerate(parts)]


def read_questions(job: Job, show: bool = True) -> list[Questions]:
    """The questions of every benchmark of a job; says on standard error what a reader of the numbers must know."""
    from realvr.evaluation import questions
    from realvr.evaluation.catalog import CATALOG, base_name, blink_tasks

    found = []
    for name, path in job.benches().items():
        with Bar(f"reading {name}", 1.0, show, share=True) as bar:
            loaded = questions.load(
                name,
                path,
                tasks=blink_tasks(job.blink_tasks) if base_name(name) == "blink" and job.blink_tasks else None,
                limit=job.limit,
                images=job.folders().get(name),
                mmvp_corrected=job.mmvp_corrected,
                strict=job.strict_data,
                on_progress=bar.set,
            )
        found.append(loaded)
        if not show:
            continue
        for reason, count in loaded.dropped.items():
            _note(f"{name}: {count} rows cannot be asked and are left out ({reason}: {loaded.examples[reason]})")
        if loaded.missing_tasks:
            _note(f"{name}: {loaded.path} has no {', '.join(loaded.missing_tasks)}; the score is not the paper's")
        if base_name(name) not in CATALOG:
            _note(f"{name} is no benchmark of the catalogue (realvr benchmarks): read as {loaded.format}")
        elif loaded.bench != name:
            why = "drawn by the embedded world" if loaded.world else f"read as {loaded.format}"
            _note(f"{name}: {loaded.path} is {why}; it is called {loaded.bench}")
        usual = CATALOG[loaded.bench].rows if loaded.bench in CATALOG and job.blink_tasks is None else None
        if usual is not None and job.limit is None and not loaded.missing_tasks and len(loaded) != usual:
            _note(f"{name}: {len(loaded)} questions; the published set has {usual:,}")
    return found


def _one(
    job: Job,
    model: str,
    name: str,
    settings: EvalSettings,
    questions: Sequence[Questions],
    folder: Path,
    ranks: Ranks,
) -> dict[str, Any]:
    """Evaluate one checkpoint."""
    from realvr.evaluation.run_folder import versions
    from realvr.evaluation.runner import budgets
    from realvr.evaluation.runner import evaluate as ask_everything

    with busy(f"reading {model}", ranks.rank == 0):
        responder = load_responder(job, model, name, ranks)
    chosen = budgets(settings, responder.latents)
    if ranks.rank == 0 and (ignored := responder.describe().get("ignored_generation_defaults")):
        listed = ", ".join(f"{field} = {value}" for field, value in ignored.items())
        _note(f"{model} has generation defaults that are not used here ({listed}); stock generate uses them")
    others = [latents for latents in job.budgets() or () if latents not in (0, responder.latents)]
    if ranks.rank == 0 and others:
        listed = ", ".join(map(str, others))
        _note(f"{model} was trained with K = {responder.latents}; K = {listed} was chosen explicitly")
    if ranks.rank == 0 and job.latents is None and not any(chosen.own):
        _note(f"{model} was trained with K = 0: it answers without a span, and there are no latents to ablate")
    if ranks.rank == 0 and job.ablation and chosen.exchanged is None and any(chosen.own):
        _note(
            "latents are exchanged at the trained K, which is not among --latents: no mean, other and noise conditions"
        )
    return ask_everything(
        responder,
        questions,
        folder,
        settings,
        batch=job.batch or default_batch(responder),
        ranks=ranks,
        notes={"mmvp_corrected": job.mmvp_corrected},
        versions=versions(responder),
    )


def load_responder(job: Job, model: str, name: str, ranks: Ranks) -> Responder:
    """The checkpoint, behind the door of the evaluation."""
    from realvr.backbone.backbone import Backbone
    from realvr.evaluation.model_responder import ModelResponder

    device = ranks.device(job.device)
    backbone = Backbone.load(
        model,
        device=device,
        dtype=job.dtype,
        min_tokens=job.min_tokens,
        max_tokens=job.max_tokens,
        announce=ranks.rank == 0,
    )
    return ModelResponder(backbone, job.sampling(), path=model, name=name)


def default_batch(responder: Responder) -> int:
    """Questions at a time where the user does not say."""
    backbone = getattr(responder, "backbone", None)
    return 32 if backbone is not None and backbone.device.type == "cuda" else 16


def report(summaries: dict[str, dict[str, Any]], out: Path) -> None:
    """Print the tables; for several checkpoints also write mean ± std."""
    from realvr.evaluation import tables
    from realvr.evaluation.aggregation import aggregate
    from realvr.evaluation.summary_files import write_summary

    console = tables.wide_console()
    for name, summary in summaries.items():
        if len(summaries) > 1:
            console.print(name, style="bold", markup=False)
        console.print(tables.console(summary))
    if len(summaries) > 1:
        together = aggregate(summaries)
        write_summary(out, together)
        console.print(tables.console(together))
    print(out / "summary.md")


def _note(text: str) -> None:
    print(f"realvr: note: {text}", file=sys.stderr)
