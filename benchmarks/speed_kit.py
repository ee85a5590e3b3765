"""What the sections of `speed.py` share: clocks, the model, and the machine's ceilings."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from memory import QUESTION, SEVEN, _prompt, model, rl_batch
from realvr.backbone.backbone import Backbone
from realvr.backbone.types import Prompt
from realvr.families import FAMILIES, Family
from realvr.training.estimate import decoder_of, weights_of
from realvr.training.rl_batch import RlBatch
from realvr.zoo.presets import PRESETS
from speed_flops import formulas
from speed_options import Options, Switched
from speed_results import Results, Timing, machine
from speed_sizes import Sizes

GIB = 2**30


class OutOfTime(Exception):
    """The minutes are used up."""


class DoesNotFit(Exception):
    """In no way that was tried."""


class CannotFit(DoesNotFit):
    """By the estimate (`speed_fit`): nothing was tried, nothing has failed."""


def wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def peak_gib(device: torch.device) -> float | None:
    return round(torch.cuda.max_memory_allocated() / GIB, 3) if device.type == "cuda" else None


def reserved_gib(device: torch.device) -> float | None:
    return round(torch.cuda.max_memory_reserved() / GIB, 3) if device.type == "cuda" else None


def held_gib(device: torch.device) -> float | None:
    """In use now."""
    return round(torch.cuda.memory_allocated() / GIB, 3) if device.type == "cuda" else None


def reset_peak(device: torch.device) -> None:
    wait(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def in_time(deadline: float) -> None:
    """Nothing new is begun after the deadline."""
    if time.monotonic() > deadline:
        raise OutOfTime


QUICK = 1.0
"""Seconds below which a run is quick: it is noisy, and more of them cost little."""


def timed(
    run: Callable[[], object],
    device: torch.device,
    repeats: int,
    deadline: float,
    warm: int = 1,
    first: Callable[[], object] | None = None,
    quick: int = 0,
) -> Timing:
    """``warm`` runs that do not count, then ``repeats`` that do, each waited for. ``first``: what is run instead of the
    warm ones and does the same. ``quick``: repeats at least, if a run is (`QUICK`)."""
    reset_peak(device)
    for _ in range(warm):
        in_time(deadline)
        (first or run)()
    wait(device)
    first = peak_gib(device) if warm else None
    reset_peak(device)
    each: list[float] = []
    while len(each) < repeats or (len(each) < quick and each[0] < QUICK):
        in_time(deadline)
        begun = time.perf_counter()
        run()
        wait(device)
        each.append(time.perf_counter() - begun)
    return Timing(each, peak_gib(device), first, reserved_gib(device))


def flops(run: Callable[[], object]) -> int:
    """Floating-point operations of the matrix products and attention in ``run``, by their shapes."""
    with FlopCounterMode(display=False, custom_mapping=formulas()) as counter:
        run()
    return int(counter.get_total_flops())


# ---------------------------------------------------------------------- one run


class Asked(NamedTuple):
    """The question of every prompt, and what such a prompt has."""

    question: str
    text: int
    visual: int
    pictures: int


@dataclass
class Bench:
    """One run of the script: what is measured, on what, and what is known so far."""

    preset: str
    device: torch.device
    dtype: torch.dtype
    sizes: Sizes
    repeats: int
    deadline: float
    results: Results
    options: Options = field(default_factory=Options)
    """Fast paths that are switched on."""
    name: str = ""
    """Of the options; part of the labels of what depends on them."""
    ready: bool = False
    """Whether an evaluation is run a second time, with all pictures ready."""
    room: float | None = None
    """GiB of the GPU; None: not known, and everything is tried."""
    cudnn: dict[str, bool] = field(default_factory=dict)
    """Stock calls that are faster with cuDNN's attention, or slower."""
    losses: dict[str, torch.Tensor] = field(default_factory=dict)
    """Of the baseline, by what was run."""
    misfits: dict[Hashable, tuple[int, DoesNotFit]] = field(default_factory=dict)
    """Whole steps that did not fit, with the tokens of their completions."""
    _backbone: Backbone | None = None
    _switched: Switched | None = None
    _rank: int | None = None
    _asked: dict[tuple[int, int], Asked] = field(default_factory=dict)
    _kept: dict[Hashable, Any] = field(default_factory=dict)
    _scratch: tempfile.TemporaryDirectory[str] | None = None
    _timings: dict[str, Timing] = field(default_factory=dict)
    _flops: dict[str, int] = field(default_factory=dict)

    def backbone(self, rank: int = 0) -> Backbone:
        """The model with random weights; with ``rank``, LoRA adapters. One of both is held at a time."""
        from realvr.training.adapters import Adapters
        from realvr.training.sections import LoraSettings

        if self._backbone is None or self._rank != rank:
            self.in_time()
            self.drop()
            torch.manual_seed(0)
            self._backbone, self._rank = model(self.preset, self.device, self.dtype), rank
            self._backbone.eos_ids = ()  # every completion has the same length
            self._backbone.latents, self._backbone.markers_added = self.sizes.latents, False
            Adapters(self._backbone, LoraSettings(**self.options.adapters(rank)))
            self._settle(self._backbone)
        return self._backbone

    def _settle(self, backbone: Backbone) -> None:
        """Options that are ``auto`` become what that means for this model, and entries say it."""
        settled = self.options.settled(backbone)
        if settled != self.options:
            self.options = settled
            self.results.note_options(self.name, settled.facts())
            print(f"  auto, for this model: {', '.join(f'{k}={v}' for k, v in settled.facts().items())}", flush=True)

    @property
    def family(self) -> Family:
        """No model is needed for that."""
        _, _, family = self.preset.partition(":")
        return FAMILIES[family or PRESETS[SEVEN if self.preset == "narrow" else self.preset].family]

    def kept(self, key: Hashable, write: Callable[[Path], Any]) -> Any:
        """What ``write`` makes of a folder of its own: files that are written once in this process."""
        if key not in self._kept:
            self._scratch = self._scratch or tempfile.TemporaryDirectory()
            self._kept[key] = write(Path(tempfile.mkdtemp(dir=self._scratch.name)))
        return self._kept[key]

    def switched(self, rank: int = 0) -> Switched:
        """The same with its fast paths."""
        backbone = self.backbone(rank)
        if self._switched is None or self._switched.backbone is not backbone:
            self._switched = Switched(backbone, self.options)
        return self._switched

    def in_time(self) -> None:
        """Raise `OutOfTime` once the minutes are used up; called before whatever takes long."""
        in_time(self.deadline)

    def drop(self) -> None:
        """Forget the model, and give its memory back."""
        self._backbone = self._switched = None
        self.clear()

    def clear(self) -> None:
        """Give back what is not in use; static buffers too."""
        if self._switched is not None and self._switched.fast is not None:
            self._switched.fast.release()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def time(
        self,
        label: str,
        run: Callable[[], object],
        *,
        repeats: int = 0,
        warm: int = 1,
        first: Callable[[], object] | None = None,
        quick: int = 0,
        keep: bool = True,
        stock: bool = False,
    ) -> Timing:
        """Measured once in this process, however many results need it; what is ``stock`` once for all options. The
        others: see `timed`."""
        label = label if stock or not self.name else f"{label} [{self.name}]"
        if label not in self._timings:
            timing = timed(run, self.device, repeats or self.repeats, self.deadline, warm, first, quick)
            if not keep:
                return timing
            self.keep(label, timing)
        return self._timings[label]

    def flops(self, label: str, run: Callable[[], object]) -> int:
        """Counted once in this process."""
        if label not in self._flops:
            self.in_time()
            self._flops[label] = flops(run)
        return self._flops[label]

    def keep(self, label: str, timing: Timing) -> Timing:
        self._timings[label] = timing
        self.results.put_timing(label, timing)
        peak = f"{timing.most_gib:8.1f} GiB" if timing.most_gib is not None else ""
        least, _, most = timing.spread
        spread = f"({least:.4g} to {most:.4g}, {len(timing.each)} times)"
        print(f"  {label:<64} {timing.seconds:9.4f} s {spread} {peak}", flush=True)
        return timing

    def prompts(self, count: int, rank: int = 0) -> list[Prompt]:
        """Different pictures, one question."""
        backbone = self.backbone(rank)
        asked = self._ask(backbone).question
        return [_prompt(backbone, self.sizes.grid, asked, seed) for seed in range(count)]

    def _ask(self, backbone: Backbone) -> Asked:
        """A question so long that a prompt has about as many tokens of text as the workload says."""
        grid = self.sizes.grid
        if grid not in self._asked:
            short, long = (_prompt(backbone, grid, QUESTION * times) for times in (1, 2))
            more, text = len(long) - len(short), text_tokens(short)
            times = max(1, 1 + round((self.sizes.text - text) / more))
            text += (times - 1) * more
            self._asked[grid] = Asked(QUESTION * times, text, len(short) - text_tokens(short), len(short.images))
        return self._asked[grid]

    @property
    def text_tokens(self) -> int:
        """Of every prompt, those of whole steps too."""
        return self.counts["text_tokens"]

    @property
    def counts(self) -> dict[str, int]:
        """What every prompt really has: visual tokens come in whole tiles in some families."""
        asked = self._asked.get(self.sizes.grid) or self._ask(self.backbone(self._rank or 0))
        return {"text_tokens": asked.text, "visual_tokens": asked.visual, "pictures": asked.pictures}

    def rl_batch(self, rows: int, rank: int = 0, **changes: Any) -> RlBatch:
        """A microbatch of Stage 2 with random completions."""
        torch.manual_seed(1)
        backbone = self.backbone(rank)
        prompt = _prompt(backbone, changes.get("grid", self.sizes.grid), self._ask(backbone).question)
        return rl_batch(backbone, self.sizes.case(rows=rows, **changes), prompt)

    @property
    def tflops(self) -> float:
        return float(self.results.value("matmul_tflops") or 0)

    @property
    def bandwidth(self) -> float:
        """Bytes per second."""
        return float(self.results.value("copy_tb_per_s") or 0) * 1e12


def ceilings(bench: Bench) -> None:
    """What this machine reaches in a large product and in a copy, in this call."""
    side, device = bench.sizes.matrix, bench.device
    pair = [torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2)]
    product = bench.time("matrix product", lambda: pair[0] @ pair[1], warm=3)
    bench.results.put("matmul_tflops", 2 * side**3 / product.seconds / 1e12, side=side, dtype="bfloat16")
    pair.clear()
    pair += [torch.zeros(bench.sizes.copied, dtype=torch.uint8, device=device) for _ in range(2)]
    copied = bench.time("copy", lambda: pair[0].copy_(pair[1]), warm=3)
    rate = 2 * bench.sizes.copied / copied.seconds / 1e12
    bench.results.put("copy_tb_per_s", rate, bytes=bench.sizes.copied, counted="reads and writes")
    pair.clear()
    bench.clear()


def step_bytes(backbone: Backbone, rows: int, columns: int, head: bool) -> int:
    """Bytes that one short pass must read: the weights of the layers (of a mixture of experts those that so many rows
    are expected to hit), the head, and the keys and values of ``columns`` columns."""
    decoder, weights = decoder_of(backbone.model), weights_of(backbone.model)
    share = 1 - (1 - decoder.experts_per_token / decoder.experts) ** rows if decoder.experts else 1.0
    inside = [weight for weight in weights if weight.part == "layer"]
    read = sum(weight.bytes * (share if len(weight.shape) == 3 else 1.0) for weight in inside)
    cache = columns * 2 * decoder.key * decoder.itemsize * decoder.layers
    return int(read + cache + (decoder.vocab * decoder.width * decoder.itemsize if head else 0))


def text_tokens(prompt: Prompt) -> int:
    """Tokens of a prompt beside its pictures."""
    return len(prompt) - sum(image.tokens for image in prompt.images)


def about(bench_sizes: Sizes, preset: str, device: torch.device, dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    """The head of a file of results."""
    name = str(dtype).removeprefix("torch.")
    facts = {"preset": preset, "dtype": name, "weights": "random", "repeats": repeats, "statistic": "median"}
    return {**machine(device), **facts, "sizes": bench_sizes.workload()}


def quiet() -> None:
    """Without the notices of transformers that come with every call."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
