"""Speed and memory at real size: our schedule beside a plain reading of the paper, same inputs, same process.

    python benchmarks/speed.py                              one GPU, the 7B shape: 18 minutes or more
    python benchmarks/speed.py --minutes 9 --resume         what the file lacks, as far as nine minutes go
    python benchmarks/speed.py --only "whole step,vision"   these sections again, the rest of the file stays
    python benchmarks/speed.py --only lora_peak_gib --lora-microbatch 2 --memory checkpointed
    python benchmarks/speed.py --options fast plain         fast paths on and off, side by side
    python benchmarks/speed.py --growth --resume            against visual tokens, K, G and prompts
    python benchmarks/speed.py --device cpu --preset narrow --growth    the same, counted without a GPU
    python benchmarks/speed.py --device cpu --preset tiny   tries the script out, in seconds

Builds a paper backbone with random weights, measures this machine's ceilings (bfloat16 product, copy), then section by
section: the names of docs/speed.md as ``{name: {"value": …, "inputs": {…}}}``, written after every measurement. Medians
of at least five warm runs, each waited for; no profiler; values measured only once say so. `speed_baseline.py` says
what the baseline is.

Which are measured: all sections; with --resume those of which the file lacks a name; with --only exactly those that are
named, whether the file has them or not. A file that is there is kept and added to. It must be of the same machine,
preset and workload (visual and text tokens, G, K, answer, prompts, ...), otherwise give another --out. Microbatch,
memory mode, questions, options and commit stand in the entries, so that those of several runs can be told apart; a
ratio of two runs has a note.

What fits: whole steps begin with microbatches of 4, with LoRA of all prompts, and go down where memory runs out
(--microbatch 8 begins with 8; --lora-microbatch does the same for LoRA). The train part tries `cached` with all prompts
first, or with --microbatch at most so many, and nothing slower once that fits. What `realvr plan` estimates at over 1.1
times the memory of the GPU is not tried. A section with nothing left to try is skipped with one line, and its names get
that reason as their value. A section that fails is recorded under ``failures``, the others still run, and the exit code
is 1. Nothing new is begun after --minutes: no section, model, try, warm-up or repeat.
"""

from __future__ import annotations

import argparse
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import speed_evaluation
import speed_growth
import speed_passes
import speed_sections
import speed_steps
from realvr.families import FAMILIES
from realvr.zoo.presets import PRESETS
from speed_fit import room_gib
from speed_kit import Bench, CannotFit, OutOfTime, about, ceilings, quiet
from speed_options import parse_options
from speed_results import ROOT, Results, put_lora_vs_full
from speed_sizes import FULL, MODES, SMALL, Sizes, memory_mode

TARGETS = {
    "decode_bandwidth_fraction": (">=", 0.60),
    "latent_bandwidth_fraction": (">=", 0.60),
    "decode_vs_generate": (">=", 3.0),
    "decode_vs_generate_8": (">=", 6.0),
    "train_part_ratio_paper": (">=", 20.0),
    "train_part_ratio_release": (">=", 80.0),
    "step_ratio_paper": (">=", 6.0),
    "step_ratio_release": (">=", 20.0),
    "evidence_overhead_1_full": ("<=", 0.8),
    "evidence_overhead_1_lora": ("<=", 0.35),
    "evidence_overhead_8": ("<=", 0.15),
    "lora_vs_full": ("<=", 0.8),
    "lora_peak_gib": ("<=", 40.0),
    "rl_step_seconds": ("<=", 8.0),
    "vision_ratio": (">=", 4.0),
    "stage1_matmul_fraction": (">=", 0.40),
    "eval_gpu_wait": ("<=", 0.10),
}
"""What we aim at on one H200 with the 7B shape."""

Section = tuple[Callable[[Bench], None], tuple[str, ...]]
SECTIONS: dict[str, Section] = {
    "short passes": (speed_sections.short_passes, ("decode_bandwidth_fraction", "latent_bandwidth_fraction")),
    "whole step": (speed_steps.whole_step, ("rl_step_seconds", "lora_vs_full")),
    "step ratios": (speed_steps.step_ratios, ("step_ratio_paper", "step_ratio_release")),
    "LoRA step": (speed_steps.lora_step, ("lora_peak_gib", "lora_step_seconds_cached", "lora_vs_full")),
    "LoRA": (speed_passes.lora_evidence, ("evidence_overhead_1_lora",)),
    "train part": (
        speed_passes.train_part,
        ("train_part_ratio_paper", "train_part_ratio_release", "evidence_overhead_1_full", "evidence_overhead_8"),
    ),
    "vision": (speed_sections.vision, ("vision_ratio",)),
    "stage 1": (speed_sections.stage1, ("stage1_matmul_fraction",)),
    "evaluation": (speed_evaluation.evaluation, ("eval_gpu_wait",)),
    "long step": (speed_steps.long_step, ("rl_step_seconds_192",)),
    "generate": (speed_sections.against_generate, ("decode_vs_generate", "decode_vs_generate_8")),
}
"""In order of value: a run that is cut off has the first ones."""
DERIVED = ("lora_step_seconds_cached", "lora_vs_full")
"""Made of what two sections measure, whichever comes last; or measured where it fits."""


def named(name: str, sizes: Sizes) -> str:
    """A name of the sections as it is in the file: with the numbers of this workload."""
    if name.endswith("_192"):
        return name.replace("_192", f"_{sizes.long_answer}")
    return name.replace("_8", f"_{sizes.prompts}") if name.endswith("_8") else name


def table(results: Results) -> str:
    """Everything measured, with targets where there are any."""
    rows = [f"{'name':<30} {'value':>10} {'target':>9}   {'commit':<8} {'options':<8}   inputs"]
    for name in results.names():
        entry = results.content[name]
        sign, target = TARGETS.get(name, ("", None))
        value, inputs = entry["value"], entry["inputs"]
        shown = f"{value:10.4g}" if isinstance(value, (int, float)) else f"{value!s:>10}"
        aim = f"{sign} {target:g}" if target is not None else ""
        rows.append(f"{name:<30} {shown} {aim:>9}   {_origin(inputs)}   {_brief(inputs)}")
    return "\n".join([*rows, *_side_by_side(results)])


def _origin(inputs: Mapping[str, Any]) -> str:
    """Commit and options that an entry was measured with; a commit with a mark has changes that are not in it."""
    commit = inputs.get("commit") or "-"
    short = commit[:7] + ("+" if commit.endswith("-dirty") else "")
    return f"{short:<8} {inputs.get('options') or '-':<8}"


def _brief(inputs: Mapping[str, Any]) -> str:
    """Inputs that are numbers or say something; the baseline's share of the ceiling first."""
    first = ("baseline_matmul_fraction", "memory", "note")
    told = [f"{key} {inputs[key]:.4g}" for key in first[:1] if inputs.get(key) is not None]
    told += [f"{key} {inputs[key]}" for key in first[1:] if inputs.get(key) is not None]
    numbers = {k: v for k, v in inputs.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}
    return ", ".join([*told, *(f"{key} {number:.4g}" for key, number in numbers.items() if key not in first)])


def _side_by_side(results: Results) -> list[str]:
    """Values of the names of the table under each set of options, where there were several."""
    sets: dict[str, Any] = results.content.get("beside", {})
    if not sets:
        return []
    names = [name for name in results.names() if name in TARGETS and any(name in part for part in sets.values())]
    rows = ["", f"{'options':<30} " + " ".join(f"{name:>24}" for name in ["the first", *sets])]
    for name in names:
        values = [part.get(name, {}).get("value") for part in [results.content, *sets.values()]]
        shown = (f"{value:>24.4g}" if isinstance(value, (int, float)) else f"{'-':>24}" for value in values)
        rows.append(f"{name:<30} " + " ".join(shown))
    return rows


def chosen(only: list[str], results: Results, sizes: Sizes) -> list[str]:
    """Sections to run, by their own names or by the names they measure; what is named is measured in any case."""
    known = list(dict.fromkeys([*SECTIONS, *(name for _, names in SECTIONS.values() for name in names)]))
    for name in only:
        if name not in known:
            raise SystemExit(f"--only {name}: there is no such name; choose from: {', '.join(known)}")
    if only:
        return [section for section, (_, names) in SECTIONS.items() if {section, *names} & set(only)]
    measured = {s: [named(name, sizes) for name in names if name not in DERIVED] for s, (_, names) in SECTIONS.items()}
    return [section for section, names in measured.items() if results.lacks(names)]


def measure(bench: Bench, sections: list[str]) -> list[str]:
    """Run the sections; returns those that were not finished in time, or failed. Failures are in the file, too."""
    left: list[str] = []
    if not sections:
        return left
    if attempt(bench, "ceilings", ceilings) is not None:
        return sections
    for section in sections:
        begun = time.monotonic()
        if begun > bench.deadline:
            left.append(section)
            continue
        print(f"{section}:", flush=True)
        if (said := attempt(bench, section, SECTIONS[section][0])) is not None:
            left.append(f"{section} ({said})")
        print(f"  {time.monotonic() - begun:.1f} s in all", flush=True)
    return left


def attempt(bench: Bench, section: str, run: Callable[[Bench], object]) -> str | None:
    """Run one section and give its memory back; returns why it was not finished, None where it was."""
    said = None
    try:
        run(bench)
        bench.results.passed(section)
    except OutOfTime:
        said = "cut off"
    except CannotFit as error:  # which was known before anything was tried
        said = f"skipped: {error}"
        print(f"  {said}", flush=True)
        _note_skipped(bench, section, said)
    except Exception as error:  # another section may do better
        traceback.print_exc()
        said = f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
        bench.results.fail(section, said)
    try:  # outside: the traceback would keep what the section held
        if said is not None:
            bench.drop()
        bench.clear()
    except RuntimeError as error:  # the device itself has failed: what follows will, too
        print(f"  after {section}: {error}", flush=True)
    return said


def _note_skipped(bench: Bench, section: str, said: str) -> None:
    """Names that the section would have measured have no value but the reason; what is there already stays."""
    names = [name for name in SECTIONS[section][1] if name not in DERIVED] if section in SECTIONS else []
    for name in (named(name, bench.sizes) for name in names):
        if name not in bench.results:
            bench.results.put(name, None, note=said)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--preset", default="Qwen2.5-VL-7B", choices=[*PRESETS, "tiny", "mini", "narrow"])
    parser.add_argument("--family", default="qwen2.5-vl", choices=list(FAMILIES), help="of a tiny or mini model")
    parser.add_argument("--only", default="", help="sections or names, with commas between them: measured again")
    parser.add_argument("--minutes", type=float, default=60.0, help="nothing new is begun after that")
    parser.add_argument("--resume", action="store_true", help="leave out what the file has, but for what --only names")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--questions", type=int, help="of the evaluation, where 800 take too long")
    parser.add_argument("--prompts", type=int, help="of a step, where 8 do not fit")
    parser.add_argument(
        "--microbatch",
        type=int,
        help="the largest that is tried; otherwise 4 in whole steps, all prompts in the train part",
    )
    parser.add_argument("--lora-microbatch", type=int, help="the same for whole steps with LoRA; otherwise all")
    parser.add_argument(
        "--memory",
        help=f"of whole steps: {', '.join(MODES)}, or with the share of the layers that are recomputed, "
        "'checkpointed-prefill 0.5'; otherwise as the package has it",
    )
    parser.add_argument("--ready", action="store_true", help="evaluate once more, with all pictures ready")
    parser.add_argument(
        "--options",
        nargs="+",
        default=["default"],
        help="sets of fast paths: plain, default, fast, or changes of one, fast:decode=static; the first one's "
        "results are the file's, those of the others stand beside them",
    )
    parser.add_argument("--growth", action="store_true", help="time and memory against the sizes, with exponents")
    parser.add_argument("--demo", type=Path, help="print the shares of a step in the runs of a demo, and stop")
    parser.add_argument("--out", type=Path, help="file of results; by default named after machine and preset")
    args = parser.parse_args()
    if args.preset == "narrow" and not args.growth:
        parser.error(
            "--preset narrow is for --growth: its prompts are long and its layers small, other names mean nothing"
        )
    if args.growth and (args.only or len(args.options) > 1):
        parser.error("--growth measures all its series with one set of options: leave out --only and further --options")
    if args.memory:
        try:
            memory_mode(args.memory)
        except ValueError as error:
            parser.error(f"--memory {error}")
    return args


def place(args: argparse.Namespace, device: torch.device) -> Path:
    """``benchmarks/results/h200-qwen2.5-vl-7b.json``; of a CPU, below ``runs``."""
    if args.out:
        return args.out
    gpu = torch.cuda.get_device_name().lower().removeprefix("nvidia ").split()[0] if device.type == "cuda" else "cpu"
    folder = ROOT / ("benchmarks/results" if device.type == "cuda" else "runs/speed")
    ending = "-growth" if args.growth else ""
    return folder / f"{gpu}-{args.preset.lower()}{ending}.json"


def main() -> int:
    args = parse()
    if args.demo:
        print(speed_growth.demo_shares(args.demo))
        return 0
    quiet()
    device, small = torch.device(args.device), args.preset in ("tiny", "mini")
    sizes = SMALL if small else FULL
    sizes = replace(sizes, questions=args.questions or sizes.questions, prompts=args.prompts or sizes.prompts)
    sizes = replace(sizes, microbatch=args.microbatch, lora_microbatch=args.lora_microbatch, memory=args.memory)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    preset = f"{args.preset}:{args.family}" if small else args.preset
    head = about(sizes, preset, device, dtype, args.repeats)
    results = Results(place(args, device), head, args.resume)
    bench = Bench(preset, device, dtype, sizes, args.repeats, time.monotonic() + 60 * args.minutes, results)
    bench.ready, bench.room = args.ready, room_gib(device)
    sets = {text: parse_options(text, device) for text in args.options}
    only = [name.strip() for name in args.only.split(",") if name.strip()]
    left: list[str] = []
    for text, options in sets.items():
        bench.drop()
        first = text == args.options[0]
        bench.options, bench.name, results.beside = options, text, None if first else text
        results.note_options(text, options.facts())
        print(f"options {text}: {', '.join(f'{key}={value}' for key, value in options.facts().items())}", flush=True)
        if args.growth:
            attempt(bench, "growth", speed_growth.measure)
            if any(series in results.names() for series in speed_growth.SERIES):
                speed_growth.draw(results.path, results.path.with_suffix(".svg"))
                print(f"{results.path}, and the figure beside it (.svg)")
            return int(results.failed)
        left += [f"{section} [{text}]" for section in measure(bench, chosen(only, results, sizes))]
        put_lora_vs_full(results)
    print(f"\n{head['gpu'] or head['cpu']}, {preset}, commit {head['commit']}\n{table(results)}\n{results.path}")
    if left:
        print(f"not measured: {'; '.join(left)}")
    for section, failure in results.content.get("failures", {}).items():
        print(f"failed: {section}: {failure['error']} (commit {failure['commit']})")
    return int(results.failed)


if __name__ == "__main__":
    raise SystemExit(main())
