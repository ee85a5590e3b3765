"""What the sections of `speed.py` share: sizes, clocks, the model, and the machine's ceilings."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from memory import QUESTION, Case, _prompt, model, rl_batch
from realvr.backbone.backbone import Backbone
from realvr.backbone.types import Prompt
from realvr.training.estimate import decoder_of, weights_of
from realvr.training.rl_batch import RlBatch
from speed_flops import attention_formulas
from speed_options import Options, Switched
from speed_results import Results, Timing, machine

GIB = 2**30


@dataclass(frozen=True)
class Sizes:
    """One workload. The defaults are those of the results in docs/speed.md."""

    grid: tuple[int, int] = (40, 64)  # visual tokens: rows and columns
    group: int = 8
    latents: int = 8
    text: int = 150  # tokens of a prompt beside the picture, about
    answer: int = 64
    long_answer: int = 192  # the paper's limit
    prompts: int = 8
    microbatch: int | None = None  # the largest that is tried; None: `STEP_MICROBATCH` in a whole step, else all
    lora_microbatch: int | None = None  # the same of a whole step with adapters; None: all
    memory: str | None = None  # mode of whole steps, perhaps with a share (`memory_mode`); None: as the package has it
    row: int = 4000  # tokens of a packed row of Stage 1
    rank: int = 16  # of LoRA
    questions: int = 800  # of an evaluation
    picture: tuple[int, int] = (4032, 3024)  # of HR-Bench
    matrix: int = 8192  # side of the matrices that the ceiling is measured with
    copied: int = 2**32  # bytes that are copied for it

    @property
    def visual(self) -> int:
        return self.grid[0] * self.grid[1]

    def microbatches(self, largest: int | None) -> list[int]:
        """Sizes of microbatches to try, the largest first; all prompts fit into a number of them."""
        most = min(largest or self.prompts, self.prompts)
        return [size for size in range(most, 0, -1) if self.prompts % size == 0]

    def workload(self) -> dict[str, Any]:
        """What is the same for all entries of a file; the others say it themselves."""
        return {name: value for name, value in asdict(self).items() if name not in PER_ENTRY}

    def case(self, **changes: Any) -> Case:
        """The workload as `memory.py` calls it."""
        named = {"grid": self.grid, "group": self.group, "answer": self.answer, "latents": self.latents}
        return Case("speed", "", **{**named, **changes})


PER_ENTRY = ("microbatch", "lora_microbatch", "memory", "questions")
STEP_MICROBATCH = 4
"""Of a whole step with full parameters where none is asked for: with 8, one at the 7B shape does not fit in 139 GiB."""
MODES = ("cached", "checkpointed-prefill", "checkpointed")
FULL = Sizes()
SMALL = Sizes(
    grid=(3, 4),  # Stage 1 takes eight of them as targets
    group=2,
    latents=2,
    text=90,  # options and instruction of a whole step take 75
    answer=3,
    long_answer=4,
    prompts=2,
    row=48,
    rank=2,
    questions=4,
    picture=(96, 64),
    matrix=128,
    copied=2**20,
)
"""For a CPU: the whole script in seconds."""


def memory_mode(text: str) -> dict[str, Any]:
    """``MODE``, or ``MODE SHARE`` with the share of the layers that are recomputed, as settings of Stage 2."""
    mode, _, share = text.partition(" ")
    try:
        recompute = float(share or 1)
    except ValueError:
        recompute = 0.0
    if mode not in MODES or not 0 < recompute <= 1 or (share and mode == "cached"):
        also = "'checkpointed-prefill 0.5': a share of the layers, above 0 and at most 1, for all but cached"
        raise ValueError(f"{text!r}: write {', '.join(MODES)}, or {also}")
    return {"memory": mode, "recompute": recompute}


class OutOfTime(Exception):
    """The minutes are used up."""


class DoesNotFit(Exception):
    """In no way that was tried."""


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


def timed(run: Callable[[], object], device: torch.device, repeats: int, deadline: float, warm: int = 1) -> Timing:
    """``warm`` runs that do not count, then ``repeats`` that do, each waited for."""
    reset_peak(device)
    for _ in range(warm):
        in_time(deadline)
        run()
    wait(device)
    first = peak_gib(device) if warm else None
    reset_peak(device)
    each = []
    for _ in range(repeats):
        in_time(deadline)
        begun = time.perf_counter()
        run()
        wait(device)
        each.append(time.perf_counter() - begun)
    return Timing(each, peak_gib(device), first, reserved_gib(device))


def flops(run: Callable[[], object]) -> int:
    """Floating-point operations of the matrix products and attention in ``run``, by their shapes."""
    with FlopCounterMode(display=False, custom_mapping=attention_formulas()) as counter:
        run()
    return int(counter.get_total_flops())


# ---------------------------------------------------------------------- one run


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
    cudnn: dict[str, bool] = field(default_factory=dict)
    """Stock calls that are faster with cuDNN's attention, or slower."""
    _backbone: Backbone | None = None
    _switched: Switched | None = None
    _rank: int | None = None
    _asked: tuple[str, int] | None = None
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
        return self._backbone

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
        keep: bool = True,
        stock: bool = False,
    ) -> Timing:
        """Measured once in this process, however many results need it; what is ``stock`` once for all options."""
        label = label if stock or not self.name else f"{label} [{self.name}]"
        if label not in self._timings:
            timing = timed(run, self.device, repeats or self.repeats, self.deadline, warm)
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
        print(f"  {label:<64} {timing.seconds:9.4f} s {peak}", flush=True)
        return timing

    def prompts(self, count: int, rank: int = 0) -> list[Prompt]:
        """Different pictures, one question."""
        backbone = self.backbone(rank)
        return [_prompt(backbone, self.sizes.grid, self._question(backbone)) for _ in range(count)]

    def _question(self, backbone: Backbone) -> str:
        """So long that a prompt has about as many tokens of text as the workload says."""
        if self._asked is None:
            short, long = (_prompt(backbone, self.sizes.grid, QUESTION * times) for times in (1, 2))
            more, text = len(long) - len(short), text_tokens(short)
            times = max(1, 1 + round((self.sizes.text - text) / more))
            self._asked = QUESTION * times, text + (times - 1) * more
        return self._asked[0]

    @property
    def text_tokens(self) -> int:
        """Of every prompt, those of whole steps too."""
        if self._asked is None:
            self._question(self.backbone(self._rank or 0))
        assert self._asked is not None
        return self._asked[1]

    def rl_batch(self, rows: int, rank: int = 0, **changes: Any) -> RlBatch:
        """A microbatch of Stage 2 with random completions."""
        torch.manual_seed(1)
        backbone = self.backbone(rank)
        prompt = _prompt(backbone, changes.get("grid", self.sizes.grid), self._question(backbone))
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
