"""Held-out accuracy on trails against training steps and training FLOPs, for several trainings.

    python scripts/trails_curves.py docs/results/trails-curves.json \
        LVR-SFT=runs/mini/mini-s1,runs/mini/mini-s2 Direct=runs/mini/direct-s1 "Direct ×3=runs/mini/direct-longer-s1"

Each folder is a run of ``realvr train`` with ``validation:`` on trails; with ``validation.by: arrows`` there are curves
by number of arrows too. Runs of one name are seeds. Writes a JSON file and, beside it, a figure (.png; needs
matplotlib).

FLOPs are an estimate: 6 N per token (2 N forward, 4 N backward), and 6 · layers · attention width · length for
attention to half of the example. N counts the parameters outside the vision tower and its projector, which are frozen
and whose output is the same for all; an input embedding beside a head of its own is a look-up and left out. The head of
direct-aux, one product per example, is left out too.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open

from realvr.runs.files import write_atomically
from realvr.training.records import TrainingRun, load_run, number_of

ACCURACY = "validation/accuracy"
ARROWS = f"{ACCURACY}/arrows="
VISION = ("vision_tower", "multi_modal_projector", "visual.")


def model_size(folder: Path) -> dict[str, int]:
    """N, layers and attention width of a checkpoint."""
    shapes: dict[str, list[int]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            shapes |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    text = {name: math.prod(shape) for name, shape in shapes.items() if not any(part in name for part in VISION)}
    own_head = any("lm_head" in name for name in text)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = config.get("text_config", config)
    heads = config["num_attention_heads"]
    return {
        "parameters": sum(n for name, n in text.items() if not (own_head and "embed_tokens" in name)),
        "layers": config["num_hidden_layers"],
        "attention_width": heads * (config.get("head_dim") or config["hidden_size"] // heads),
    }


def flops(tokens: float, examples: float, size: Mapping[str, int]) -> float:
    """Estimate for one step, forward and backward."""
    length = tokens / max(examples, 1)
    attention = 6 * size["layers"] * size["attention_width"] * length
    return tokens * (6 * size["parameters"] + attention)


def curve(run: TrainingRun, size: Mapping[str, int]) -> dict[str, Any]:
    """Values after every validation, with what was spent up to there. Examples are those of one process."""
    spent = {"tokens": 0.0, "examples": 0.0, "flops": 0.0}
    found: dict[str, list[float]] = defaultdict(list)
    arrows: dict[str, list[float]] = defaultdict(list)
    for step in run.steps:
        tokens, examples = step.get("tokens") or 0.0, step.get("data/examples_per_rank") or 0.0
        for name, value in (("tokens", tokens), ("examples", examples), ("flops", flops(tokens, examples, size))):
            spent[name] += value
        if (accuracy := step.get(ACCURACY)) is None:
            continue
        found["step"].append(number_of(step))
        found["accuracy"].append(100 * accuracy)
        for name, value in spent.items():
            found[name].append(value)
        for name in step:
            if name.startswith(ARROWS) and (value_of := step[name]) is not None:
                arrows[name.removeprefix(ARROWS)].append(100 * value_of)
    by_number = {number: arrows[number] for number in sorted(arrows, key=int)}
    seed = run.settings.get("run", {}).get("seed")
    asked = run.settings.get("validation", {}).get("n")
    about = {"folder": run.folder.name, "method": run.about["method"], "seed": seed, "questions": asked}
    return {**about, **found, "arrows": by_number}


def parse(text: str) -> tuple[str, list[Path]]:
    """``NAME=FOLDER,FOLDER`` as name and folders."""
    name, equals, folders = text.partition("=")
    if not equals or not folders:
        sys.exit(f"{text!r}: write NAME=FOLDER, or NAME=FOLDER,FOLDER for several seeds")
    return name, [Path(folder) for folder in folders.split(",")]


def draw(curves: Mapping[str, Sequence[Mapping[str, Any]]], path: Path, long: int) -> None:
    """Accuracy against steps and FLOPs, over all trails and, where it is known, over those from ``long`` arrows on."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    def values(one: Mapping[str, Any], row: int) -> list[float]:
        parts = [part for number, part in one["arrows"].items() if int(number) >= long]
        return one["accuracy"] if row == 0 else [sum(each) / len(each) for each in zip(*parts, strict=True)]

    known = all(one["arrows"] for runs in curves.values() for one in runs)
    rows = 2 if known else 1
    figure, axes = pyplot.subplots(rows, 2, figsize=(9, 3.4 * rows), squeeze=False, sharey=True)
    for row in range(rows):
        for place, (column, label) in enumerate((("step", "training steps"), ("flops", "training FLOPs (estimate)"))):
            axis = axes[row][place]
            for number, (name, runs) in enumerate(curves.items()):
                for seed, one in enumerate(runs):
                    shown = name if seed == 0 else None
                    axis.plot(one[column], values(one, row), color=f"C{number}", marker=".", lw=1.2, label=shown)
            axis.axhline(25, color="gray", lw=0.8, ls=":")  # a guess among four options
            axis.set(xlabel=label, ylabel="% right" + (f", {long} arrows or more" if row else ", all trails"))
            axis.grid(alpha=0.3)
    axes[0][0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="JSON file; the figure gets the same name with .png")
    parser.add_argument("runs", nargs="+", type=parse, metavar="NAME=FOLDER[,FOLDER]")
    parser.add_argument(
        "--model", type=Path, help="checkpoint that N is counted of; by default final/ of the first run"
    )
    parser.add_argument("--long", type=int, default=4, help="fewest arrows of the lower row of the figure")
    parser.add_argument("--figure", type=Path, help="another place for the figure")
    options = parser.parse_args()
    size = model_size(options.model or options.runs[0][1][0] / "final")
    curves = {name: [curve(load_run(folder), size) for folder in folders] for name, folders in options.runs}
    for name, runs in curves.items():
        for one in runs:
            if "accuracy" not in one:
                sys.exit(f"{name}: {one['folder']} has no validation: train it with validation.path")
            print(f"{name}, seed {one['seed']}: {one['accuracy'][-1]:.1f} % after {one['step'][-1]:,} steps, "
                  f"{one['tokens'][-1]:.3g} tokens, {one['flops'][-1]:.3g} FLOPs")  # fmt: skip
    estimate = "6 N tokens + 6 layers attention_width length tokens; forward and backward, vision tower left out"
    options.out.parent.mkdir(parents=True, exist_ok=True)
    result = {"estimate": estimate, "size": size, "curves": curves}
    write_atomically(options.out, json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    try:
        draw(curves, options.figure or options.out.with_suffix(".png"), options.long)
    except ImportError:
        print("no figure: pip install matplotlib", file=sys.stderr)


if __name__ == "__main__":
    main()
