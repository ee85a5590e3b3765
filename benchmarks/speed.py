"""Speed and memory at real size: our schedule beside a plain reading of the paper, same inputs, same process.

    python benchmarks/speed.py                                       (one GPU: the 7B shape, about 15 minutes)
    python benchmarks/speed.py --minutes 9 --resume                  (what is still missing in the file)
    python benchmarks/speed.py --device cpu --preset tiny            (tries the script out, in seconds)
    python benchmarks/speed.py --options fast plain                  (fast paths on and off, side by side)
    python benchmarks/speed.py --growth                              (against visual tokens, K, G and prompts)

Builds a paper backbone with random weights, measures this machine's ceilings (bfloat16 product, copy), then section by
section: the names of docs/speed.md as ``{name: {"value": …, "inputs": {…}}}``, written after every measurement. Medians
of at least five warm runs, each waited for; no profiler. `speed_baseline.py` says what the baseline is.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import speed_growth
import speed_sections
import speed_steps
import torch
from speed_kit import FULL, ROOT, SMALL, Bench, OutOfTime, Results, about, ceilings, quiet
from speed_options import parse_options

from realvr.families import FAMILIES
from realvr.zoo.presets import PRESETS

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
    "train part": (
        speed_sections.train_part,
        ("train_part_ratio_paper", "train_part_ratio_release", "evidence_overhead_1_full", "evidence_overhead_8"),
    ),
    "generate": (speed_sections.against_generate, ("decode_vs_generate", "decode_vs_generate_8")),
    "vision": (speed_sections.vision, ("vision_ratio",)),
    "stage 1": (speed_sections.stage1, ("stage1_matmul_fraction",)),
    "whole step": (speed_steps.whole_step, ("rl_step_seconds", "step_ratio_paper", "step_ratio_release")),
    "LoRA": (speed_sections.lora_evidence, ("evidence_overhead_1_lora",)),
    "LoRA step": (speed_steps.lora_step, ("lora_vs_full", "lora_peak_gib")),
    "evaluation": (speed_steps.evaluation, ("eval_gpu_wait",)),
    "long step": (speed_steps.long_step, ("rl_step_seconds_192",)),
}
"""In order of value: a run that is cut off has the first ones."""


def table(results: Results) -> str:
    """Everything measured, with targets where there are any."""
    rows = [f"{'name':<30} {'value':>10} {'target':>9}   inputs"]
    for name in results.names():
        entry = results.content[name]
        sign, target = TARGETS.get(name, ("", None))
        value = entry["value"]
        shown = f"{value:10.4g}" if isinstance(value, (int, float)) else f"{value!s:>10}"
        brief = {k: v for k, v in entry["inputs"].items() if isinstance(v, (int, float)) and not isinstance(v, bool)}
        said = ", ".join(f"{key} {number:.4g}" for key, number in brief.items())
        rows.append(f"{name:<30} {shown} {f'{sign} {target:g}' if target is not None else '':>9}   {said}")
    return "\n".join([*rows, *_side_by_side(results)])


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


def chosen(only: list[str], results: Results, resume: bool) -> list[str]:
    """Sections to run, by their own names or by the names they measure."""
    known = [*SECTIONS, *(name for _, names in SECTIONS.values() for name in names)]
    for name in only:
        if name not in known:
            raise SystemExit(f"--only {name}: there is no such name; choose from: {', '.join(known)}")
    wanted = []
    for section, (_, names) in SECTIONS.items():
        if (only and section not in only and not set(names) & set(only)) or (
            resume and all(name in results for name in names)
        ):
            continue
        wanted.append(section)
    return wanted


def measure(bench: Bench, sections: list[str]) -> list[str]:
    """Run the sections; returns those that were not finished in time, or did not fit."""
    left = []
    try:
        ceilings(bench)
    except OutOfTime:
        return sections
    for section in sections:
        begun = time.monotonic()
        if begun > bench.deadline:
            left.append(section)
            continue
        print(f"{section}:", flush=True)
        try:
            SECTIONS[section][0](bench)
        except OutOfTime:
            left.append(f"{section} (cut off)")
        except torch.OutOfMemoryError as error:
            left.append(f"{section} (does not fit: {str(error).splitlines()[0]})")
            bench.drop()
        print(f"  {time.monotonic() - begun:.1f} s in all", flush=True)
        bench.clear()
    return left


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--preset", default="Qwen2.5-VL-7B", choices=[*PRESETS, "tiny", "mini"])
    parser.add_argument("--family", default="qwen2.5-vl", choices=list(FAMILIES), help="of a tiny or mini model")
    parser.add_argument("--only", default="", help="sections or names, with commas between them")
    parser.add_argument("--minutes", type=float, default=60.0, help="nothing new is begun after that")
    parser.add_argument("--resume", action="store_true", help="leave out what the file has")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--questions", type=int, help="of the evaluation, where 800 take too long")
    parser.add_argument("--prompts", type=int, help="of a step, where 8 do not fit")
    parser.add_argument("--microbatch", type=int, help="of a step, the largest that is tried")
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
    return parser.parse_args()


def place(args: argparse.Namespace, device: torch.device) -> Path:
    """``benchmarks/results/h200-qwen2.5-vl-7b.json``; of a CPU, below ``runs``."""
    if args.out:
        return args.out
    gpu = torch.cuda.get_device_name().lower().removeprefix("nvidia ").split()[0] if device.type == "cuda" else "cpu"
    folder = ROOT / ("benchmarks/results" if device.type == "cuda" else "runs/speed")
    ending = "-growth" if args.growth else ""
    return folder / f"{gpu}-{args.preset.lower()}{ending}.json"


def main() -> None:
    args = parse()
    if args.demo:
        print(speed_growth.demo_shares(args.demo))
        return
    quiet()
    device, small = torch.device(args.device), args.preset in ("tiny", "mini")
    sizes = SMALL if small else FULL
    sizes = replace(sizes, questions=args.questions or sizes.questions, prompts=args.prompts or sizes.prompts)
    sizes = replace(sizes, microbatch=args.microbatch)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    preset = f"{args.preset}:{args.family}" if small else args.preset
    head = about(sizes, preset, device, dtype, args.repeats)
    results = Results(place(args, device), head, args.resume)
    bench = Bench(preset, device, dtype, sizes, args.repeats, time.monotonic() + 60 * args.minutes, results)
    sets = {text: parse_options(text, device) for text in args.options}
    left: list[str] = []
    for text, options in sets.items():
        bench.drop()
        first = text == args.options[0]
        bench.options, bench.name, results.beside = options, text, None if first else text
        results.note_options(text, options.facts())
        print(f"options {text}: {', '.join(f'{key}={value}' for key, value in options.facts().items())}", flush=True)
        if args.growth:
            speed_growth.measure(bench)
            return
        wanted = chosen([name for name in args.only.split(",") if name], results, args.resume)
        left += [f"{section} [{text}]" for section in measure(bench, wanted)]
    print(f"\n{head['gpu'] or head['cpu']}, {preset}, commit {head['commit']}\n{table(results)}\n{results.path}")
    if left:
        print(f"not measured: {'; '.join(left)}")


if __name__ == "__main__":
    main()
