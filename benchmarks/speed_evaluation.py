"""A whole evaluation, for `speed.py`: how long the model waits for pictures of the size of HR-Bench."""

from __future__ import annotations

import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from realvr.data.sample import ImageRef, Sample
from realvr.evaluation.asking import ImageLoader
from realvr.evaluation.model_responder import ModelResponder
from realvr.evaluation.questions import Questions
from realvr.evaluation.runner import TIMING, EvalSettings, evaluate
from realvr.latent.sampling import Sampling
from realvr.runs.files import read_json
from speed_kit import Bench, peak_gib, reserved_gib, reset_peak, wait
from speed_results import Timing
from speed_sizes import Sizes
from speed_steps import CHOICES, QUESTION, picture

CYCLES = 4
"""The rotations of a question, which share their picture."""
BATCH = 16
DEFINITION = (
    "of the time from the first picture to the last answer (asking_seconds), the part in which the process that drives "
    "the model stood still for a picture that was not ready (waited_seconds): gpu_wait in timing.json of one run, "
    "after a short one"
)


def write_questions(folder: Path, sizes: Sizes) -> Questions:
    """Questions about pictures that are written as JPEG files first."""
    paths = [folder / f"{number}.jpg" for number in range(-(-sizes.questions // CYCLES))]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda each: picture(each[0], *sizes.picture).save(each[1], quality=92), enumerate(paths)))
    samples = []
    for number, path in enumerate(paths):
        for cycle in range(CYCLES):
            asked = Sample.ask(f"{number}-{cycle}", [ImageRef.from_path(path)], QUESTION, "A", choices=CHOICES)
            samples.append(replace(asked, cycle=str(cycle), category="single"))
    return Questions("hrbench-4k", samples[: sizes.questions])


def evaluation(bench: Bench) -> None:
    """The share of an evaluation in which the model waits for pictures; with ``bench.ready`` also a run that has all
    of them ready."""
    backbone, sizes = bench.backbone(), bench.sizes
    if backbone.family.variable_grid:
        backbone.processor._set_budget(None, max(4, sizes.visual))
    greedy = Sampling(0.0, max_new=sizes.answer // 4 or 1, stop=None)
    responder = ModelResponder(backbone, greedy, fast=bench.switched().fast)
    settings = EvalSettings(latents=(sizes.latents,), ablation=False)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        bench.in_time()
        questions = bench.kept(("questions", sizes), partial(write_questions, sizes=sizes))

        def ask(name: str, asked: Questions, loader: ImageLoader | None = None) -> Timing:
            bench.in_time()
            reset_peak(bench.device)
            begun = time.perf_counter()
            evaluate(responder, [asked], folder / name, settings, batch=BATCH, show=False, loader=loader)
            wait(bench.device)
            seconds = time.perf_counter() - begun
            return Timing([seconds], peak_gib(bench.device), reserved_gib=reserved_gib(bench.device))

        warm = ask("warm", replace(questions, samples=questions.samples[:BATCH]))
        timing = replace(ask("files", questions), first_peak_gib=warm.peak_gib)
        bench.keep(f"evaluation, pictures from files [{bench.name}]", timing)
        waiting = read_json(folder / "files" / TIMING)
        visual = backbone.processor(picture(0, *sizes.picture)).tokens
        facts: dict[str, Any] = {"questions": len(questions), "picture": list(sizes.picture), "visual": visual}
        facts |= {"definition": DEFINITION, "asking_seconds": waiting["seconds"], "waited_seconds": waiting["waited"]}
        facts |= {"seconds": timing.seconds, **timing.peaks()}
        bench.results.put("eval_gpu_wait", waiting["gpu_wait"], **facts)
        if bench.ready:
            loader = ImageLoader(responder.prepare, keep=len(questions))
            images = list(dict.fromkeys(image for sample in questions.samples for image in sample.images))
            with ThreadPoolExecutor() as pool:
                made = dict(zip(images, pool.map(loader.make, images), strict=True))
            loader.load(questions.samples, made.__getitem__)
            ready = bench.keep(f"evaluation, pictures ready [{bench.name}]", ask("ready", questions, loader))
            share = {"ready_seconds": ready.seconds, "share_by_difference": 1 - ready.seconds / timing.seconds}
            bench.results.put("eval_gpu_wait", waiting["gpu_wait"], **facts, **share)
