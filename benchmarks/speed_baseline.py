"""The other side of the ratios: stock transformers on the same weights and inputs.

``reference/naive_stage2.py`` is the plain reading of the paper, under gradient checkpointing. *paper*: visual tokens
computed once, the prompt again for every completion and every latent step. *release*: the trajectory again for every
completion, and the vision tower in every pass; measured for one completion and multiplied by G, but for the readouts,
which a prompt needs once. What the benchmark runs is the arithmetic and schedule of commit f48efcc: later options of
the file are left at their defaults, which `tests/test_speed.py` holds against that commit.

torch prefers cuDNN's attention in 16 bits; realvr switches it off. Stock calls run in whichever way is faster.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from foundation import generate_inputs, generate_options
from speed_kit import QUICK, Bench
from speed_options import stock_layers
from speed_results import ROOT, Timing

sys.path.append(str(ROOT / "reference"))

import naive_stage2 as naive
from realvr.backbone.backbone import Backbone
from realvr.backbone.types import Prompt
from realvr.imaging.types import ImageInput
from realvr.training.rl_batch import RlBatch

BASELINE = "reference/naive_stage2.py at f48efcc, gradient-checkpointed, stock attention"


@contextmanager
def stock(backbone: Backbone, checkpointed: bool = False) -> Iterator[Any]:
    """The model as transformers has it: stock attention and, on request, its own gradient checkpointing."""
    model, decoder = backbone.model, backbone.decoder
    layers: list[Any] = list(decoder.layers)
    training = [layer.training for layer in layers]
    model.set_attn_implementation("sdpa")
    if checkpointed:
        decoder.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for layer in layers:
            layer.training = True  # transformers checkpoints layers in training only; there is no dropout
    try:
        with stock_layers(backbone):
            yield model
    finally:
        if checkpointed:
            decoder.gradient_checkpointing_disable()
            decoder.disable_input_require_grads()  # a hook that enabling has hung on the embedding
            for layer, mode in zip(layers, training, strict=True):
                layer.training = mode
        backbone.use_realvr_attention()


@contextmanager
def cudnn_attention(on: bool) -> Iterator[None]:
    """torch's attention with cuDNN among its kernels, or without."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(on)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def time_stock(
    bench: Bench,
    label: str,
    run: Callable[[], object],
    like: str | None = None,
    *,
    repeats: int = 0,
    warm: int = 1,
    first: Callable[[], object] | None = None,
) -> Timing:
    """A stock call, within `stock`: tried once with cuDNN's attention and once without, then timed the faster way.
    ``like`` names a call for which that is known, if this one only differs in size. The others: see `speed_kit.timed`.
    """
    if bench.device.type != "cuda":
        return bench.time(label, run, repeats=repeats, warm=warm, first=first, stock=True)
    tried = bench.cudnn.get(like or label)
    if tried is None:
        with cudnn_attention(True):
            with_it = bench.time(f"{label}, with cuDNN", run, repeats=1, warm=warm, first=first, stock=True)
        # What is new to the second way costs milliseconds: nothing beside a long call.
        again = warm if with_it.seconds < QUICK else 0
        with cudnn_attention(False):
            without = bench.time(f"{label}, without cuDNN", run, repeats=1, warm=again, stock=True)
        tried, warm = with_it.seconds < without.seconds, 0
        bench.cudnn[like or label] = tried
    with cudnn_attention(tried):
        return bench.time(label, run, repeats=repeats, warm=warm, first=first, stock=True)


def examples(backbone: Backbone, b: RlBatch, *, tower: bool, completions: int | None = None) -> list[naive.Example]:
    """The microbatch as the reference takes it; ``tower``: pixels instead of visual tokens."""
    found, start, images = [], 0, iter(b.batch.images)
    for row in range(len(b.batch)):
        ids = b.batch.ids_BT[row][b.batch.real_BT[row]]
        own, end = [], start + int(b.batch.image_BT[row].sum())
        part = slice(start, end)
        while start < end:
            own.append(next(images))
            start += own[-1].tokens
        texts = [ids_S[real] for ids_S, real in zip(b.ids_BGS[row], b.real_BGS[row], strict=True)][:completions]
        old = [logp[real] for logp, real in zip(b.old_logp_BGS[row], b.real_BGS[row], strict=True)][:completions]
        there = [True, *b.wrong_BY[row].tolist()]
        answered = [y for y in range(b.answers_BYS.shape[1]) if there[y]]
        real = b.answers_real_BYS[row]
        example = naive.Example(
            prompt=ids,
            completions=texts,
            latents=b.latents_BKD[row],
            advantages=b.advantages_BG[row].tolist()[:completions],
            old_logp=old,
            answers=[b.answers_BYS[row, y][real[y]] for y in answered],
            content=[b.content_BYS[row, y][real[y]] for y in answered],
            positive=b.positive_BD[row],
            negatives=list(b.negatives_BMD[row][b.valid_BM[row]]),
            pixels=pixels_of(own).to(backbone.device, backbone.dtype),
            grid_thw=grid_thw(own) if backbone.mrope else None,
        )
        if not tower:
            deepstack = tuple(layer[part] for layer in b.visual.deepstack)
            example = replace(example, features=(b.visual.features_ND[part], deepstack))
        found.append(example)
    return found


def pixels_of(images: Sequence[ImageInput]) -> torch.Tensor:
    """Of all pictures of a prompt, as stock models take them."""
    return torch.cat([image.pixels for image in images])


def grid_thw(images: Sequence[ImageInput]) -> torch.Tensor:
    """Frames, rows and columns of their patches: what Qwen models take beside pixels."""
    grids = [image.grid for image in images]
    return torch.tensor([[1, grid.rows * grid.merge, grid.cols * grid.merge] for grid in grids])


def reading(backbone: Backbone) -> naive.Naive:
    """The reference over this model's weights."""
    markers = naive.Markers(backbone.markers.start, backbone.markers.slot, backbone.markers.end)
    return naive.Naive(backbone.model, markers, naive.Options(), backbone.forbidden_ids().tolist())


def naive_pass(backbone: Backbone, given: list[naive.Example]) -> naive.Outcome:
    """Loss and gradients of these prompts by the reference, within `stock`; the gradients are dropped."""
    outcome = reading(backbone).run(given, backward=True)
    for parameter in backbone.model.parameters():
        parameter.grad = None
    return outcome


def naive_readout(backbone: Backbone, example: naive.Example) -> None:
    """One readout of one answer, without gradient, within `stock`."""
    with torch.no_grad():
        reading(backbone)._readout(example, list(example.latents), example.answers[0], example.content[0])


def naive_seconds(bench: Bench, kind: str) -> tuple[float, dict[str, Any]]:
    """Seconds of one prompt in the train part by the baseline *paper* or *release*, and what they are made of."""
    backbone, batch = bench.backbone(), bench.rl_batch(1)
    release = kind == "release"
    given = examples(backbone, batch, tower=release, completions=1 if release else None)
    label = f"naive {kind}, 1 prompt" + (", 1 completion" if release else "")
    name = f"naive_{kind}_matmul_fraction"

    def run() -> None:
        bench.losses[loss_name(bench, kind)] = naive_pass(backbone, given).loss

    done = _counted(bench, name)
    count = None if done else partial(bench.flops, label, run)
    with stock(backbone, checkpointed=True):
        timing = time_stock(bench, label, run, like="naive", first=count)
        readout = partial(naive_readout, backbone, given[0])
        answer = time_stock(bench, f"naive {kind}, 1 readout", readout, like="naive")
        done = done or bench.flops(label, run)
    fraction = round(done / timing.seconds / bench.tflops / 1e12, 6)
    facts = {"flops": done, "counted": "recomputed layers included", **bench.counts}
    bench.results.put(name, fraction, seconds=timing.seconds, **facts)
    times = bench.sizes.group if release else 1
    answers = len(given[0].answers)
    passes = len(given[0].completions) + bench.sizes.latents
    seconds = repeated(timing.seconds, answers * answer.seconds, times)
    return seconds, {
        "baseline": BASELINE,
        "kind": kind,
        "seconds_measured": round(timing.seconds, 5),
        "multiplied_by": times,
        "readout_seconds": round(answer.seconds, 5),
        "readouts": answers,
        "peak_gib": timing.peak_gib,
        "baseline_matmul_fraction": fraction,
        "passes": passes * times + answers,
        **bench.counts,
    }


def loss_name(bench: Bench, kind: str) -> str:
    """Visual tokens come from our side, whose options round in their own ways."""
    return f"naive {kind} [{bench.name}]"


def _counted(bench: Bench, name: str) -> int | None:
    """Operations in the file, where they are those of this commit and these inputs."""
    known, commit = bench.results.inputs(name), bench.results.commit
    if commit is None or commit.endswith("-dirty"):
        return None
    same = known.get("commit") == commit and all(known.get(name) == count for name, count in bench.counts.items())
    return int(known["flops"]) if same else None


def repeated(measured: float, readouts: float, times: int) -> float:
    """Seconds of ``times`` completions when one was measured, ``readouts`` of it for all of them together."""
    return (measured - readouts) * times + readouts


def generate(backbone: Backbone, prompts: list[Prompt], group: int, answer: int) -> Callable[[], object]:
    """Stock ``generate`` of these prompts, tower and all, to be run within `stock`."""
    inputs, options = generate_inputs(backbone, prompts), generate_options(group, answer)

    @torch.no_grad()
    def run() -> object:
        return backbone.model.generate(**inputs, **options)

    return run
