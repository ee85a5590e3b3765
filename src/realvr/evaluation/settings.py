"""What ``realvr eval`` is asked to do: models, benchmarks, decoding. No torch."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from realvr.backbone.automatic import Switch, spelled_out
from realvr.errors import UserError
from realvr.latent.modes import FastMode
from realvr.runs.launching import check_sharded

if TYPE_CHECKING:
    from realvr.latent.sampling import Sampling


@dataclass(frozen=True)
class EvaluateSettings:
    """Checkpoints, benchmarks, and how questions are asked.

    Args:
        models: Directories of checkpoints, hub ids, or packaged models: mini, mini-base, mini-direct, mini-short.
        out: Folder for predictions.jsonl, eval.json, latents and summary.json, .md, .csv.
        bench: A benchmark of realvr benchmarks, or a name of your own, and where its files are. Files that realvr world
            make wrote are called mini-NAME. May be repeated.
        latents: Number of latent slots K, or several with commas; by default the K the checkpoint was trained with.
        ablation: Also K = 0, mean latents, latents of another question, and noise.
        limit: At most this many questions of each benchmark: whole pairs and cycles, spread evenly, always the same.
        policy: How the answer is read (docs/evaluation.md); by default as each benchmark says, which is strict.
        temperature: 0 is greedy.
        top_p: Sample from the smallest set of tokens with this probability mass.
        top_k: Sample from the k likeliest tokens; 0 switches it off.
        seeds: Sample with this many seeds (0, 1, …); needs a temperature.
        max_new: At most this many new tokens per answer.
        stop_at_answer: End a reply once it has written </answer>; off, it goes on to the end token or the limit.
        batch: Questions asked at a time; by default 32 on a GPU, 16 on the CPU.
        processes: Processes that share the questions; process r uses GPU r.
        tasks: Subtasks of a benchmark: paper (those of the paper), all, or names with commas. May be repeated.
        variant: Another way to read the files of a benchmark; realvr benchmarks NAME lists them. May be repeated.
        images: Folder that the image paths of a benchmark are relative to. May be repeated.
        strict_data: Refuse a benchmark with a row that cannot be asked.
        min_tokens: Fewest visual tokens per image (families with variable grids); by default those of its training.
        max_tokens: Most visual tokens per image (families with variable grids); by default those of its training.
        device: cpu, cuda, cuda:1, …; by default the GPU where there is one.
        sharded: Spread the model over all GPUs of this machine, in one process: for models that no GPU holds.
        dtype: float32, bfloat16, float16; by default the checkpoint's own.
        fast_decode: How replies are decoded: off; static, in fixed shapes; graph, as CUDA graphs; auto, graph on a GPU,
            where that is possible, otherwise off.
        fast_vision: Run the vision tower in fewer kernels and over padded weights, on a GPU in 16 bits; the same up to
            rounding.
        fused_layers: Run norms, rotary embeddings and MLP gates in fewer kernels; the same numbers up to rounding.
            auto: on an NVIDIA GPU that holds the whole model, unless it is a mixture of experts.
        exchange_seed: Fixes whose latents each question gets from another one, and the noise.
        take_over: Take OUT from a run on another machine that is gone for certain.
    """

    models: Sequence[str]
    out: str | Path
    bench: Sequence[str] = ()
    latents: str | None = None
    ablation: bool = True
    limit: int | None = None
    policy: str | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seeds: int | None = None
    max_new: int = 192
    stop_at_answer: bool = True
    batch: int | None = None
    processes: int = 1
    tasks: Sequence[str] = ()
    variant: Sequence[str] = ()
    images: Sequence[str] = ()
    strict_data: bool = False
    min_tokens: int | None = None
    max_tokens: int | None = None
    device: str | None = None
    sharded: bool = False
    dtype: str | None = None
    fast_decode: FastMode = "auto"
    fast_vision: bool = True
    fused_layers: Switch = "auto"
    exchange_seed: int = 0
    take_over: bool = False

    def check(self) -> None:
        """Refuse what can be seen to be wrong without reading data or weights."""
        from realvr.evaluation.benchmark import benchmark_of
        from realvr.evaluation.questions import locate

        if not self.models:
            raise UserError("no model named: realvr eval MODEL --bench NAME=PATH --out DIR")
        if not self.bench:
            raise UserError("no benchmark named: --bench NAME=PATH (realvr benchmarks lists them)")
        benches = self.benches()
        for name in benches:
            benchmark_of(name).policy_or(self.policy)
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
        if self.fused_layers not in (True, False, "auto"):
            raise UserError(f"fused_layers is {self.fused_layers!r}: write True, False or 'auto'")
        check_sharded(self.sharded, self.processes, self.device)
        self.budgets()
        self.subtasks()
        self.variants()
        model_names(self.models)
        for name, path in benches.items():
            locate(name, path)
        if unknown := [name for name in self.folders() if name not in benches]:
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
        folders = self._by_bench("--images", self.images, "DIR")
        for name, path in folders.items():
            if not Path(path).is_dir():
                raise UserError(f"--images '{name}={path}': {path} is not a folder")
        return folders

    def subtasks(self) -> dict[str, tuple[str, ...]]:
        """Subtasks by name of the benchmark."""
        from realvr.evaluation.benchmark import benchmark_of

        asked = self._by_bench("--tasks", self.tasks, "SUBTASKS")
        return {name: benchmark_of(name).subtasks(text) for name, text in asked.items()}

    def variants(self) -> dict[str, str]:
        """Variants of the files by name of the benchmark."""
        from realvr.data.readers.base import ReadOptions
        from realvr.evaluation.benchmark import benchmark_of

        asked = self._by_bench("--variant", self.variant, "VARIANT")
        for name, variant in asked.items():
            benchmark_of(name).read_options(ReadOptions(), variant)
        return asked

    def _by_bench(self, flag: str, texts: Sequence[str], what: str) -> dict[str, str]:
        """``NAME=VALUE`` by name: that of a --bench, or of a benchmark, whose values hold for its stand-in too."""
        from realvr.evaluation.benchmark import BENCHMARKS, base_name
        from realvr.evaluation.questions import bench_name

        asked, benches = {}, self.benches()
        for text in texts:
            name, equals, value = text.partition("=")
            if not equals or not value:
                raise UserError(f"{flag} {text!r}: write NAME={what}, NAME being that of a --bench")
            asked[bench_name(name)] = value
        if unknown := [name for name in asked if name not in benches and name not in BENCHMARKS]:
            raise UserError(f"{flag} names {unknown[0]}, which is no --bench")
        return {name: asked[key] for name in benches for key in (base_name(name), name) if key in asked} | asked

    def budgets(self) -> tuple[int, ...] | None:
        """K from "8" or "0,2,4"."""
        if self.latents is None:
            return None
        parts = [part for part in re.split(r"[,\s]+", self.latents.strip()) if part]
        if not parts or not all(re.fullmatch(r"\d{1,4}", part) for part in parts):
            raise UserError(f"--latents {self.latents!r}: write a number of latent slots, or several: 0,2,4,8")
        return tuple(dict.fromkeys(int(part) for part in parts))

    def to_json(self) -> str:
        """For the processes that share the questions."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> EvaluateSettings:
        """What `to_json` wrote."""
        return cls(**json.loads(text))


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


def written_out(args: Sequence[str]) -> list[str]:
    """Arguments of ``realvr eval`` with the short flags of benchmarks (`Benchmark.flags`), and flags without their
    value, written out."""
    from realvr.evaluation.benchmark import BENCHMARKS

    flags = {flag: long for bench in BENCHMARKS for flag, long in bench.flags.items()}
    made, rest = [], iter(args)
    for arg in rest:
        name, equals, value = arg.partition("=")
        long = flags.get(name.replace("_", "-"))
        if long is None:
            made.append(arg)
        elif "{}" not in long:
            made += [long] if long else []
        else:
            made.append(long.format(value if equals else next(rest, "")))
    return spelled_out(made, free=True)
