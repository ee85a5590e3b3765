"""Whole steps of `train rl`, for `speed.py`: the package's own loop on data written first."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from PIL import Image

from pictures import pictures
from realvr.backbone.backbone import Backbone
from realvr.backbone.samples import conversation
from realvr.data.sample import ImageRef, Sample
from realvr.errors import UserError, out_of_memory
from realvr.training import loop
from realvr.training.checkpoints import Progress
from realvr.training.engine import start_engine
from realvr.training.method import Run
from realvr.training.methods.realvr import ReaLVR
from realvr.training.prompts import PromptBatch
from realvr.training.settings import RlSettings
from realvr.training.sources import training_data
from realvr.training.tracking import Tracker
from speed_baseline import naive_seconds
from speed_fit import step_too_large
from speed_kit import Bench, CannotFit, DoesNotFit, text_tokens, wait
from speed_options import thick_adapters
from speed_passes import kernel_layers, span_counts
from speed_results import Timing, put_lora_vs_full
from speed_sections import QWEN_ONLY, generate_seconds, generates
from speed_sizes import STEP_MICROBATCH, memory_mode

QUESTION = "What color is the object in the marked part of the picture, and where is it with respect to the others? "
CHOICES = ["red", "green", "blue", "yellow"]
PARTS = ("encode", "rollout", "passes", "optimizer")


def picture(number: int, width: int, height: int) -> Image.Image:
    """Blocks of colour that run into one another: a JPEG of it decodes in the time of a photograph, though smaller."""
    rng = np.random.default_rng(number)
    small = rng.integers(0, 255, (max(1, height // 56), max(1, width // 56), 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BILINEAR)


def question(backbone: Backbone, image: Image.Image, pictures: int, wanted: int) -> str:
    """So long that a prompt of a whole step, with its options and instruction, has ``wanted`` tokens of text; as near
    as the tokenizer allows."""
    ready, refs = backbone.processor(image), [ImageRef("")] * pictures

    def off(length: int) -> int:
        asked = Sample.ask("", refs, text[:length], "A", choices=CHOICES)
        return text_tokens(backbone.prompt(conversation(asked, [ready] * pictures))) - wanted

    text = QUESTION * (1 + wanted // 8)
    low, high = 1, len(text)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if off(middle) < 0 else (low, middle)
    return text[: min(range(max(1, low - 8), low + 8), key=lambda length: abs(off(length)))]


def write_samples(folder: Path, count: int, pictures: int, width: int, height: int, asked: str = QUESTION) -> Path:
    """Questions with as many pictures each, and evidence boxes, as JSON lines."""
    (folder / "images").mkdir(parents=True)
    rows = []
    for number in range(count):
        names = [f"images/{number}-{index}.png" for index in range(pictures)]
        for index, name in enumerate(names):
            picture(number * pictures + index, width, height).save(folder / name, compress_level=1)
        x, y = np.random.default_rng(number).uniform(0.05, 0.6, 2).tolist()
        boxes = [{"image": 0, "xyxy": [x, y, x + 0.25, y + 0.2]}]
        row = {"id": f"speed-{number}", "images": names, "question": asked, "choices": CHOICES}
        rows.append({**row, "answer": "ABCD"[number % 4], "boxes": boxes})
    path = folder / "samples.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


# ---------------------------------------------------------------------- Stage 2


@dataclass
class Parts:
    """Seconds of the parts of each step, the device waited for at every boundary."""

    device: torch.device
    each: dict[str, list[float]] = field(default_factory=dict)
    seen: set[tuple[int, int, int]] = field(default_factory=set)
    """Tokens of text, visual tokens and pictures that prompts had."""

    def counted(self, take: Callable[[], list[PromptBatch]]) -> Callable[[], list[PromptBatch]]:
        """The function, what its prompts have noted."""

        def run() -> list[PromptBatch]:
            found = take()
            for prompt in (prompt for batch in found for prompt in batch.prompts):
                text = text_tokens(prompt)
                self.seen.add((text, len(prompt) - text, len(prompt.images)))
            return found

        return run

    @property
    def counts(self) -> dict[str, Any]:
        """What prompts had, as `Bench.counts`: a number, or several where they differ."""
        found = [sorted(set(values)) for values in zip(*self.seen, strict=True)]
        names = ("text_tokens", "visual_tokens", "pictures")
        return {name: each[0] if len(each) == 1 else each for name, each in zip(names, found, strict=True)}

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
    method |= bench.options.method(microbatch) | (memory_mode(sizes.memory) if sizes.memory else {})
    return RlSettings.model_validate(
        {
            "model": {"path": bench.preset, "dtype": str(bench.dtype).removeprefix("torch."), "latents": sizes.latents},
            "data": {"sources": [{"path": str(data)}]},
            "optim": {"lr": 1e-7, "batch": sizes.prompts, "microbatch": microbatch, "steps": 1000}
            | {"gradients": bench.options.gradients},
            "lora": bench.options.adapters(rank),
            "method": method,
            "log": {"to": [], "console": False, "table_every": 0, "parts_every": 0},
            "run": {"out": str(out)},
        }
    )


def samples(bench: Bench) -> Path:
    """Data of whole steps, with as many visual and text tokens as the other prompts; written once."""
    backbone, wanted = bench.backbone(), bench.text_tokens
    count, width, height = pictures(backbone.processor, bench.sizes.grid)
    prompts = 2 * bench.sizes.prompts

    def write(folder: Path) -> Path:
        asked = question(backbone, picture(0, width, height), count, wanted)
        return write_samples(folder / "data", prompts, count, width, height, asked)

    return bench.kept(("samples", prompts, count, width, height, wanted), write)


@contextmanager
def stage2(bench: Bench, rank: int, microbatch: int, answer: int) -> Iterator[tuple[loop.Run, Parts]]:
    """A run of Stage 2 between its steps, on a fresh model; the model is dropped afterwards."""
    bench.drop()
    data = samples(bench)
    with tempfile.TemporaryDirectory() as scratch:
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
        take = parts.clocked("encode", method.prompts.take)
        method.prompts.take = parts.counted(take)  # type: ignore[method-assign]
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
    """A whole step of ``train rl`` in the largest microbatches that fit. What did not fit is not tried again, with no
    longer completions either."""
    sizes = bench.sizes
    key = (bench.name, rank, sizes)
    least, known = bench.misfits.get(key, (answer + 1, DoesNotFit()))
    if answer >= least:
        raise type(known)(*known.args)
    try:
        return _fitting(bench, rank, answer)
    except DoesNotFit as error:
        bench.misfits[key] = answer, type(error)(*error.args)
        raise


def _fitting(bench: Bench, rank: int, answer: int) -> tuple[Timing, dict[str, Any]]:
    sizes = bench.sizes
    what = f"a step of {sizes.prompts} prompts with rank {rank}"
    sizes_asked = sizes.microbatches(sizes.lora_microbatch if rank else sizes.microbatch or STEP_MICROBATCH)
    tried: list[int] = []
    why = None
    for microbatch in sizes_asked:
        if (why := step_too_large(bench, rank, microbatch, answer)) is not None:
            print(f"  {what} in microbatches of {microbatch} is not tried: it {why}", flush=True)
            continue
        bench.in_time()
        tried.append(microbatch)
        found = _steps(bench, rank, microbatch, answer)
        bench.clear()
        if found is not None:
            return found
        print(f"  {what} in microbatches of {microbatch}: does not fit", flush=True)
    if not tried:
        raise CannotFit(f"{what} {why}, in microbatches of {sizes_asked[-1]}")
    raise DoesNotFit(f"{what} fits in no microbatch of {tried}")


def _steps(bench: Bench, rank: int, microbatch: int, answer: int) -> tuple[Timing, dict[str, Any]] | None:
    """Steps in microbatches of one size; None where they do not fit. Model, engine and optimizer are held by this
    frame and those below, so that nothing of them is left after a return: not in a traceback either."""
    sizes = bench.sizes
    try:
        with stage2(bench, rank, microbatch, answer) as (run, parts):
            memory = sizes.memory or run.settings.method.memory
            label = (
                f"train rl step, {sizes.prompts} prompts, {answer} tokens, rank {rank}, microbatches of {microbatch}"
            )
            timing = bench.time(f"{label}, {memory}", lambda: loop.train_step(run))
            method = run.task
            assert isinstance(method, ReaLVR)
            fast = method.rollouts.fast
            counts = {"span_counts": span_counts(method), "decode_counts": None if fast is None else dict(fast.counts)}
            facts = {"prompts": sizes.prompts, "answer": answer, **parts.counts, "microbatch": microbatch}
            facts |= {"rank": rank, "memory": memory, "parts": parts.medians(timing.seconds)}
            if rank:
                facts["kernel_layers"] = kernel_layers(method.backbone)
            return timing, {**facts, **timing.peaks(), **counts}
    except Exception as error:
        short = isinstance(error, UserError) and error.__cause__ is not None and out_of_memory(error.__cause__)
        if not short and not out_of_memory(error):
            raise
        return None


def whole_step(bench: Bench) -> None:
    """``train rl`` with full parameters."""
    timing, facts = rl_step(bench, 0, bench.sizes.answer)
    bench.results.put("rl_step_seconds", timing.seconds, **facts)
    put_lora_vs_full(bench.results)


def step_ratios(bench: Bench) -> None:
    """The same against the baseline that rolls out prompt by prompt with ``generate``; measured in this process."""
    sizes, results = bench.sizes, bench.results
    if not generates(bench):
        for kind in ("paper", "release"):
            results.put(f"step_ratio_{kind}", None, note=QWEN_ONLY)
        return
    if not results.of_this_run("rl_step_seconds") or results.value("rl_step_seconds") is None:
        whole_step(bench)
    seconds, facts = results.value("rl_step_seconds"), results.inputs("rl_step_seconds")
    assert seconds is not None
    sampled = generate_seconds(bench, bench.prompts(1)).seconds
    same = facts["parts"]["encode"] + facts["parts"]["optimizer"]
    for kind in ("paper", "release"):
        passes, beside = naive_seconds(bench, kind)
        # Random weights give no wrong answer that could be parsed: in our step there is one readout per prompt.
        spared = beside["readout_seconds"] * (bench.rl_batch(1).answers_BYS.shape[1] - 1)
        baseline = same + sizes.prompts * (sampled + passes - spared)
        made_of = f"sum of measured parts: {sizes.prompts} x (generate without latents + train part - spare readouts)"
        inputs = {"baseline_seconds": baseline, "made_of": f"{made_of} + our encoding and optimizer"}
        parts = {"generate_seconds": sampled, "train_seconds": passes - spared, "seconds": seconds}
        ours = {name: facts[name] for name in ("microbatch", "memory")}
        differ = [f"{facts[name]} {name}, not {count}" for name, count in bench.counts.items() if facts[name] != count]
        if differ:
            ours["note"] = f"our prompts have {'; '.join(differ)} as the baseline's"
        beside["fraction_of"] = "baseline_matmul_fraction: of its passes with gradient, same timing"
        results.put(f"step_ratio_{kind}", baseline / seconds, **inputs, **parts, **ours, **beside)


def long_step(bench: Bench) -> None:
    """The same with the paper's limit of 192 tokens."""
    timing, facts = rl_step(bench, 0, bench.sizes.long_answer)
    bench.results.put(f"rl_step_seconds_{bench.sizes.long_answer}", timing.seconds, **facts)


def lora_step(bench: Bench) -> None:
    """A whole LoRA step beside a whole step with full parameters: in the memory mode of the package and, unless one was
    named, with nothing recomputed, for which adapters leave room."""
    sizes, results = bench.sizes, bench.results
    timing, facts = rl_step(bench, sizes.rank, sizes.answer)
    results.put("lora_step_seconds", timing.seconds, **facts)
    which = "the larger of peak_gib (later steps) and first_peak_gib (the step that records)"
    results.put("lora_peak_gib", timing.most_gib, seconds=timing.seconds, which=which, **facts)
    put_lora_vs_full(results)
    if sizes.memory is not None:
        return
    bench.sizes = replace(sizes, memory="cached")
    try:
        timing, facts = rl_step(bench, sizes.rank, sizes.answer)
        results.put("lora_step_seconds_cached", timing.seconds, **facts)
    except DoesNotFit as error:
        print(f"  {error}", flush=True)
    finally:
        bench.sizes = sizes
    put_lora_vs_full(results)
