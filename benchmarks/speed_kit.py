"""What the sections of `speed.py` share: sizes, clocks, the machine's ceilings, and the file of results."""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from memory import QUESTION, Case, _prompt, model, rl_batch
from speed_flops import attention_formulas
from speed_options import Options, Switched
from torch.utils.flop_counter import FlopCounterMode

from realvr.backbone.backbone import Backbone
from realvr.backbone.types import Prompt
from realvr.runs.files import read_json, write_json
from realvr.training.estimate import decoder_of, weights_of
from realvr.training.rl_batch import RlBatch

ROOT = Path(__file__).resolve().parents[1]
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
    microbatch: int | None = None  # the largest one that is tried in a whole step; otherwise all prompts
    row: int = 4000  # tokens of a packed row of Stage 1
    rank: int = 16  # of LoRA
    questions: int = 800  # of an evaluation
    picture: tuple[int, int] = (4032, 3024)  # of HR-Bench
    matrix: int = 8192  # side of the matrices that the ceiling is measured with
    copied: int = 2**32  # bytes that are copied for it

    @property
    def visual(self) -> int:
        return self.grid[0] * self.grid[1]

    def case(self, **changes: Any) -> Case:
        """The workload as `memory.py` calls it."""
        named = {"grid": self.grid, "group": self.group, "answer": self.answer, "latents": self.latents}
        return Case("speed", "", **{**named, **changes})


FULL = Sizes()
SMALL = Sizes(
    grid=(3, 4),  # Stage 1 takes eight of them as targets
    group=2,
    latents=2,
    text=40,
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


class OutOfTime(Exception):
    """The minutes are used up."""


@dataclass(frozen=True)
class Timing:
    """Seconds of each repeat, and the most memory in use."""

    each: list[float]
    peak_gib: float | None
    """None off a GPU."""

    @property
    def seconds(self) -> float:
        return statistics.median(self.each)

    def facts(self) -> dict[str, Any]:
        each = [round(value, 6) for value in self.each]
        return {"seconds": round(self.seconds, 6), "each": each, "peak_gib": self.peak_gib}


def wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def peak_gib(device: torch.device) -> float | None:
    return round(torch.cuda.max_memory_allocated() / GIB, 3) if device.type == "cuda" else None


def timed(run: Callable[[], object], device: torch.device, repeats: int, deadline: float, warm: int = 1) -> Timing:
    """``warm`` runs that do not count, then ``repeats`` that do, each waited for."""
    for _ in range(warm):
        run()
    wait(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    each = []
    for _ in range(repeats):
        if time.monotonic() > deadline:
            raise OutOfTime
        begun = time.perf_counter()
        run()
        wait(device)
        each.append(time.perf_counter() - begun)
    return Timing(each, peak_gib(device))


def flops(run: Callable[[], object]) -> int:
    """Floating-point operations of the matrix products and attention in ``run``, by their shapes."""
    with FlopCounterMode(display=False, custom_mapping=attention_formulas()) as counter:
        run()
    return int(counter.get_total_flops())


# ---------------------------------------------------------------------- the file


def machine(device: torch.device) -> dict[str, Any]:
    """Where and with what something was measured."""
    packages = {}
    for name in ("torch", "transformers", "peft", "accelerate"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = None
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else None
    return {"gpu": gpu, "cpu": platform.processor() or platform.machine(), "versions": packages, "commit": commit()}


def commit() -> str | None:
    """The commit of the tree, with a mark where files differ from it; ``REALVR_COMMIT`` where git is not there."""
    if given := os.environ.get("REALVR_COMMIT"):
        return given
    try:
        ask = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        return subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


class Results:
    """``{name: {"value": …, "inputs": {…}}}``, written after every measurement, with ``about`` and ``timings``."""

    def __init__(self, path: Path, about: Mapping[str, Any], resume: bool) -> None:
        self.path = path
        self.content: dict[str, Any] = {"about": dict(about), "timings": {}}
        self.commit = about["commit"]
        self.beside: str | None = None
        """Name of the options that are measured beside the others; None: results go to the top of the file."""
        if resume and path.is_file():
            self.content = read_json(path)
            for name in ("gpu", "preset", "dtype", "sizes"):
                if self.content["about"][name] != self._plain(about)[name]:
                    raise SystemExit(f"{path}: was measured with another {name}; give another --out, or no --resume")

    @staticmethod
    def _plain(content: Mapping[str, Any]) -> dict[str, Any]:
        return json.loads(json.dumps(content))

    @property
    def _place(self) -> dict[str, Any]:
        if self.beside is None:
            return self.content
        return self.content.setdefault("beside", {}).setdefault(self.beside, {})

    def __contains__(self, name: str) -> bool:
        return name in self._place

    def value(self, name: str) -> float | None:
        return self._place[name]["value"] if name in self else None

    def note_options(self, name: str, facts: Mapping[str, str]) -> None:
        """What a set of options switches on."""
        self.content["about"].setdefault("options", {})[name] = dict(facts)

    def put(self, name: str, value: object, **inputs: Any) -> None:
        self._place[name] = {"value": _short(value), "inputs": {**inputs, "commit": self.commit}}
        self.write()

    def put_timing(self, label: str, timing: Timing) -> None:
        self.content["timings"][label] = timing.facts()
        self.write()

    def write(self) -> None:
        write_json(self.path, self.content)

    def names(self) -> list[str]:
        return [name for name in self.content if name not in ("about", "timings", "beside")]


def _short(value: object) -> object:
    return float(f"{value:.6g}") if isinstance(value, float) else value


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
    cudnn: dict[str, bool] = field(default_factory=dict)
    """Stock calls that are faster with cuDNN's attention, or slower."""
    _backbone: Backbone | None = None
    _switched: Switched | None = None
    _rank: int | None = None
    _timings: dict[str, Timing] = field(default_factory=dict)
    _flops: dict[str, int] = field(default_factory=dict)

    def backbone(self, rank: int = 0) -> Backbone:
        """The model with random weights; with ``rank``, LoRA adapters. One of both is held at a time."""
        from realvr.training.adapters import Adapters
        from realvr.training.sections import LoraSettings

        if self._backbone is None or self._rank != rank:
            self.drop()
            torch.manual_seed(0)
            self._backbone, self._rank = model(self.preset, self.device, self.dtype), rank
            self._backbone.eos_ids = ()  # every completion has the same length
            self._backbone.latents, self._backbone.markers_added = self.sizes.latents, False
            Adapters(self._backbone, LoraSettings(rank=rank))
        return self._backbone

    def switched(self, rank: int = 0) -> Switched:
        """The same with its fast paths."""
        backbone = self.backbone(rank)
        if self._switched is None or self._switched.backbone is not backbone:
            self._switched = Switched(backbone, self.options)
        return self._switched

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
            self._flops[label] = flops(run)
        return self._flops[label]

    def keep(self, label: str, timing: Timing) -> Timing:
        self._timings[label] = timing
        self.results.put_timing(label, timing)
        peak = f"{timing.peak_gib:8.1f} GiB" if timing.peak_gib is not None else ""
        print(f"  {label:<64} {timing.seconds:9.4f} s {peak}", flush=True)
        return timing

    def prompts(self, count: int, rank: int = 0) -> list[Prompt]:
        """Different pictures, one question."""
        backbone = self.backbone(rank)
        return [_prompt(backbone, self.sizes.grid, self._question(backbone)) for _ in range(count)]

    def _question(self, backbone: Backbone) -> str:
        """So long that a prompt has about as many tokens of text as the workload says."""
        short, long = (_prompt(backbone, self.sizes.grid, QUESTION * times) for times in (1, 2))
        text = len(short) - sum(image.tokens for image in short.images)
        return QUESTION * max(1, 1 + round((self.sizes.text - text) / (len(long) - len(short))))

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
    """Bytes that one short pass must read: the weights of the layers (of a mixture of experts those that are hit at
    most), the head, and the keys and values of ``columns`` columns."""
    decoder, weights = decoder_of(backbone.model), weights_of(backbone.model)
    share = min(1.0, rows * decoder.experts_per_token / decoder.experts) if decoder.experts else 1.0
    inside = [weight for weight in weights if weight.part == "layer"]
    read = sum(weight.bytes * (share if len(weight.shape) == 3 else 1.0) for weight in inside)
    cache = columns * 2 * decoder.key * decoder.itemsize * decoder.layers
    return int(read + cache + (decoder.vocab * decoder.width * decoder.itemsize if head else 0))


def about(bench_sizes: Sizes, preset: str, device: torch.device, dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    """The head of a file of results."""
    name = str(dtype).removeprefix("torch.")
    facts = {"preset": preset, "dtype": name, "weights": "random", "repeats": repeats, "statistic": "median"}
    return {**machine(device), **facts, "sizes": asdict(bench_sizes)}


def quiet() -> None:
    """Without the notices of transformers that come with every call."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
