"""Whole steps of `train rl` and whole evaluations, for `speed.py`: the package's own loop on data written first."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from PIL import Image
from speed_baseline import naive_seconds
from speed_kit import Bench, OutOfTime, Timing, peak_gib, wait
from speed_options import thick_adapters
from speed_sections import generate_seconds

from realvr.data.sample import ImageRef, Sample
from realvr.errors import UserError
from realvr.evaluation.asking import ImageLoader
from realvr.evaluation.model_responder import ModelResponder
from realvr.evaluation.questions import Questions
from realvr.evaluation.runner import EvalSettings, evaluate
from realvr.latent.sampling import Sampling
from realvr.training import loop
from realvr.training.checkpoints import Progress
from realvr.training.engine import start_engine
from realvr.training.method import Run
from realvr.training.methods.realvr import ReaLVR
from realvr.training.settings import RlSettings
from realvr.training.sources import training_data
from realvr.training.tracking import Tracker

QUESTION = "What color is the object in the marked part of the picture, and where is it with respect to the others? "
CHOICES = ["red", "green", "blue", "yellow"]
PARTS = ("encode", "rollout", "passes", "optimizer")


def picture(number: int, width: int, height: int) -> Image.Image:
    """Blocks of colour under some noise: it compresses about as a photograph does."""
    rng = np.random.default_rng(number)
    small = rng.integers(0, 255, (max(1, height // 56), max(1, width // 56), 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BILINEAR)


def write_samples(folder: Path, count: int, pictures: int, width: int, height: int) -> Path:
    """Questions with as many pictures each, and evidence boxes, as JSON lines."""
    (folder / "images").mkdir(parents=True)
    rows = []
    for number in range(count):
        names = [f"images/{number}-{index}.png" for index in range(pictures)]
        for index, name in enumerate(names):
            picture(number * pictures + index, width, height).save(folder / name)
        x, y = np.random.default_rng(number).uniform(0.05, 0.6, 2).tolist()
        boxes = [{"image": 0, "xyxy": [x, y, x + 0.25, y + 0.2]}]
        asked = {"question": QUESTION * 4, "choices": CHOICES, "answer": "ABCD"[number % 4]}
        rows.append({"id": f"speed-{number}", "images": names, **asked, "boxes": boxes})
    path = folder / "samples.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


# ---------------------------------------------------------------------- Stage 2


@dataclass
class Parts:
    """Seconds of the parts of each step, the device waited for at every boundary."""

    device: torch.device
    each: dict[str, list[float]] = field(default_factory=dict)

    def clocked(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, its time added to part ``name`` of the step."""

        def run(*args: Any, **options: Any) -> Any:
            wait(self.device)
            begun = time.perf_counter()
            found = function(*args, **options)
            wait(self.device)
            self.each.setdefault(name, []).append(time.perf_counter() - begun)
            return found

        return run

    def medians(self, seconds: float) -> dict[str, float]:
        """Medians over the steps that counted; ``passes`` is what is left."""
        found = {name: median(values[1:] or values) for name, values in self.each.items()}
        found["rollout"] = found.pop("collect") - found.get("encode", 0.0)
        found["passes"] = seconds - sum(found.values())
        return {name: round(found[name], 5) for name in PARTS}


def rl_settings(bench: Bench, data: Path, out: Path, rank: int, microbatch: int, answer: int) -> RlSettings:
    """As a settings file would have it."""
    sizes = bench.sizes
    method: dict[str, Any] = {"type": "realvr", "group": sizes.group, "max_new": answer, "stop_at_answer": False}
    method |= bench.options.method(microbatch)
    return RlSettings.model_validate(
        {
            "model": {"path": bench.preset, "dtype": str(bench.dtype).removeprefix("torch."), "latents": sizes.latents},
            "data": {"sources": [{"path": str(data)}]},
            "optim": {"lr": 1e-7, "batch": sizes.prompts, "microbatch": microbatch, "steps": 1000}
            | {"gradients": bench.options.gradients},
            "lora": {"rank": rank, "alpha": 2 * max(1, rank)},
            "method": method,
            "log": {"to": [], "console": False, "table_every": 0, "parts_every": 0},
            "run": {"out": str(out)},
        }
    )


def pictures(bench: Bench) -> tuple[int, int, int]:
    """Pictures of a prompt that have as many visual tokens as the workload says: how many, width, height."""
    processor, sizes = bench.backbone().processor, bench.sizes
    if processor.tokens_per_tile is None:
        side = processor.stock.patch_size * processor.merge
        return 1, sizes.grid[1] * side, sizes.grid[0] * side
    return max(1, sizes.visual // processor.tokens_per_tile), 896, 896


@contextmanager
def stage2(bench: Bench, rank: int, microbatch: int, answer: int) -> Iterator[tuple[loop.Run, Parts]]:
    """A run of Stage 2 between its steps, on a fresh model; the model is dropped afterwards."""
    size = pictures(bench)
    with tempfile.TemporaryDirectory() as scratch:
        data = write_samples(Path(scratch) / "data", 2 * bench.sizes.prompts, *size)
        settings = rl_settings(bench, data, Path(scratch) / "run", rank, microbatch, answer)
        engine = start_engine(cpu=bench.device.type == "cpu")
        engine.seed(0)
        method = ReaLVR(bench.backbone(), settings.method)  # type: ignore[arg-type]
        method.begin(Run(settings, engine, training_data(settings, engine)))
        method.backbone.fast_vision = bench.options.vision == "padded"
        method.backbone.fused_layers = bench.options.layers == "fused"
        if bench.options.lora == "peft":
            thick_adapters(method.backbone)
        engine.prepare(method.module, settings.optim)
        parts = Parts(bench.device)
        method.prompts.take = parts.clocked("encode", method.prompts.take)  # type: ignore[method-assign]
        method.collect = parts.clocked("collect", method.collect)  # type: ignore[method-assign]
        engine.step = parts.clocked("optimizer", engine.step)  # type: ignore[method-assign]
        try:
            with Tracker(settings.run.out, settings.log, settings.optim.steps) as tracker:
                yield loop.Run(method, settings, engine, tracker, Progress()), parts
        finally:
            method.close()
            del method, engine
            bench.drop()


def rl_step(bench: Bench, rank: int, answer: int) -> tuple[Timing, dict[str, Any]]:
    """A whole step of ``train rl`` in the largest microbatches that fit."""
    label = f"train rl step, {bench.sizes.prompts} prompts, {answer} tokens, rank {rank}"
    microbatch = min(bench.sizes.microbatch or bench.sizes.prompts, bench.sizes.prompts)
    while True:
        try:
            with stage2(bench, rank, microbatch, answer) as (run, parts):
                timing = bench.time(label, lambda: loop.train_step(run))
                return timing, {"microbatch": microbatch, "rank": rank, "parts": parts.medians(timing.seconds)}
        except (torch.OutOfMemoryError, UserError) as error:
            if microbatch == 1 or (isinstance(error, UserError) and "memory" not in str(error)):
                raise
            print(f"  {label}: microbatches of {microbatch} do not fit", flush=True)
        microbatch //= 2
        bench.clear()


def whole_step(bench: Bench) -> None:
    """``train rl`` with full parameters, against the baseline that rolls out prompt by prompt with ``generate``."""
    sizes, results = bench.sizes, bench.results
    bench.drop()  # a model without what the baseline leaves on it
    timing, facts = rl_step(bench, 0, sizes.answer)
    facts |= {"prompts": sizes.prompts, "answer": sizes.answer, "peak_gib": timing.peak_gib}
    results.put("rl_step_seconds", timing.seconds, **facts)
    if not bench.backbone().mrope:
        return
    sampled = generate_seconds(bench, bench.prompts(1)).seconds
    same = facts["parts"]["encode"] + facts["parts"]["optimizer"]
    for kind in ("paper", "release"):
        seconds, beside = naive_seconds(bench, kind)
        # Random weights give no wrong answer that could be parsed: in our step there is one readout per prompt.
        spared = beside["readout_seconds"] * (bench.rl_batch(1).answers_BYS.shape[1] - 1)
        baseline = same + sizes.prompts * (sampled + seconds - spared)
        made_of = f"sum of measured parts: {sizes.prompts} x (generate without latents + train part - spare readouts)"
        inputs = {"baseline_seconds": baseline, "made_of": f"{made_of} + our encoding and optimizer"}
        parts = {"generate_seconds": sampled, "train_seconds": seconds - spared, "seconds": timing.seconds}
        results.put(f"step_ratio_{kind}", baseline / timing.seconds, **inputs, **parts, **beside)


def long_step(bench: Bench) -> None:
    """The same with the paper's limit of 192 tokens."""
    timing, facts = rl_step(bench, 0, bench.sizes.long_answer)
    name = f"rl_step_seconds_{bench.sizes.long_answer}"
    bench.results.put(name, timing.seconds, answer=bench.sizes.long_answer, peak_gib=timing.peak_gib, **facts)


def lora_step(bench: Bench) -> None:
    """A whole LoRA step beside a whole step with full parameters."""
    sizes, results = bench.sizes, bench.results
    timing, facts = rl_step(bench, sizes.rank, sizes.answer)
    facts |= {"prompts": sizes.prompts, "answer": sizes.answer, "seconds": timing.seconds}
    results.put("lora_step_seconds", timing.seconds, peak_gib=timing.peak_gib, **facts)
    results.put("lora_peak_gib", timing.peak_gib, **facts)
    if (full := results.value("rl_step_seconds")) is not None:
        results.put("lora_vs_full", timing.seconds / full, full_seconds=full, **facts)


# ---------------------------------------------------------------------- evaluation


def evaluation(bench: Bench) -> None:
    """The share of an evaluation in which the model waits for pictures: against the same with all of them ready."""
    backbone, sizes = bench.backbone(), bench.sizes
    if backbone.family.variable_grid:
        backbone.processor._set_budget(None, max(4, sizes.visual))
    cycles = 4
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        samples = []
        paths = [folder / f"{number}.jpg" for number in range(-(-sizes.questions // cycles))]
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda each: picture(each[0], *sizes.picture).save(each[1], quality=92), enumerate(paths)))
        for number, path in enumerate(paths):
            for cycle in range(cycles):  # the four rotations of a question share their picture
                asked = Sample.ask(f"{number}-{cycle}", [ImageRef.from_path(path)], QUESTION, "A", choices=CHOICES)
                samples.append(replace(asked, cycle=str(cycle), category="single"))
        questions = Questions("hrbench-4k", samples[: sizes.questions])
        greedy = Sampling(0.0, max_new=sizes.answer // 4 or 1, stop=None)
        responder = ModelResponder(backbone, greedy, fast=bench.switched().fast)
        settings = EvalSettings(latents=(sizes.latents,), ablation=False)

        def ask(name: str, loader: ImageLoader | None = None) -> Timing:
            wait(bench.device)
            if time.monotonic() > bench.deadline:
                raise OutOfTime
            begun = time.perf_counter()
            evaluate(responder, [questions], folder / name, settings, batch=16, show=False, loader=loader)
            return bench.keep(
                f"evaluation, {name} [{bench.name}]", Timing([time.perf_counter() - begun], peak_gib(bench.device))
            )

        few = replace(questions, samples=questions.samples[:16])
        evaluate(responder, [few], folder / "warm", settings, batch=16, show=False)
        whole = ask("pictures from files")
        loader = ImageLoader(responder.prepare, keep=len(questions))
        loader.load(questions.samples)
        ready = ask("pictures ready", loader)
    facts = {"questions": len(questions), "picture": list(sizes.picture), "once": "one run each, after a short one"}
    seconds = {"seconds": whole.seconds, "ready_seconds": ready.seconds, "visual": sizes.visual}
    bench.results.put("eval_gpu_wait", max(0.0, 1 - ready.seconds / whole.seconds), **facts, **seconds)
