"""How time and memory grow, for `speed.py --growth`: rollout and train part against visual tokens, K, G and prompts.

Each series changes one size and leaves the others. The exponent is the slope of a least-squares line through the
logarithms, with the root mean square of what it leaves; ``last`` is the slope between the two largest sizes, where
fixed costs matter least. ``above_gib`` is the peak without what was held before the pass, which is the weights.
Attention's own term is quadratic in the visual tokens; nothing should grow faster.

On a CPU there is no allocator to ask. Instead one more run of each point counts the bytes of live tensors, operations
other than views, and floating-point operations. These show how the code grows on any device. ``--preset narrow`` is
made for that: a narrow model with prompts of real length.

The point that all series share is measured once, and every point is written as soon as it is known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from live_memory import LiveMemory
from pictures import counted as counted_tokens
from pictures import pictures
from realvr.backbone.backbone import Backbone
from realvr.errors import out_of_memory
from realvr.latent.group_rollout import rollout
from realvr.runs.files import read_json
from speed_kit import GIB, Bench, OutOfTime, flops, held_gib
from speed_passes import TrainPass, cut
from speed_sections import sampling
from speed_sizes import Sizes

GRIDS = ((8, 16), (16, 16), (16, 32), (32, 40), (40, 64), (64, 80))
SERIES: dict[str, tuple[int, ...]] = {
    "visual": tuple(rows * cols for rows, cols in GRIDS),  # 128 … 5,120
    "latents": (0, 4, 8, 12, 16, 20),
    "group": (1, 2, 4, 8, 16),
    "prompts": (1, 2, 4, 8),
}
SMALL_SERIES: dict[str, tuple[int, ...]] = {"visual": (4, 12), "latents": (0, 1, 2), "group": (1, 2), "prompts": (1, 2)}
SMALL_GRIDS = ((2, 2), (3, 4))
WORK = ("rollout", "LVR-RL", "ReaLVR")


def fit(sizes: Sequence[float], values: Sequence[float]) -> dict[str, float] | None:
    """Exponent of a power law through points with positive sizes; None with fewer than two."""
    points = [(math.log(x), math.log(y)) for x, y in zip(sizes, values, strict=True) if x > 0 and y > 0]
    if len(points) < 2:
        return None
    middle = [sum(axis) / len(points) for axis in zip(*points, strict=True)]
    spread = sum((x - middle[0]) ** 2 for x, _ in points)
    slope = sum((x - middle[0]) * (y - middle[1]) for x, y in points) / spread
    off = [y - middle[1] - slope * (x - middle[0]) for x, y in points]
    (x0, y0), (x1, y1) = points[-2:]
    residual = math.sqrt(sum(error * error for error in off) / len(off))
    found = {"exponent": slope, "residual": residual, "last": (y1 - y0) / (x1 - x0)}
    return {name: round(value, 4) for name, value in found.items()}


def resized(sizes: Sizes, series: str, value: int, grids: Sequence[tuple[int, int]]) -> Sizes:
    """The workload with one size changed."""
    if series == "visual":
        return replace(sizes, grid=next(grid for grid in grids if grid[0] * grid[1] == value))
    return replace(sizes, **{series: value})


Key = tuple[int, int, int, int]
"""Visual tokens, latents, completions and prompts of a point."""
Workloads = Mapping[int, tuple[Sizes, int]]
"""Sizes and prompts of each point of a series."""


def point(bench: Bench, sizes: Sizes, prompts: int, memory: str) -> dict[str, Any]:
    """Rollout and train part of one size."""
    whole, bench.sizes = bench.sizes, sizes
    try:
        found: dict[str, Any] = {"visual_tokens": bench.counts["visual_tokens"]}
        for name in WORK:
            if name == "ReaLVR" and not sizes.latents:
                continue  # nothing to hold the evidence against
            found[name] = _work(bench, name, prompts, memory)
            if "error" in found[name]:
                bench.drop()  # with the gradients that the pass has left
            bench.clear()
        return {**found, "commit": bench.results.commit}
    finally:
        bench.sizes = whole


def _work(bench: Bench, name: str, prompts: int, memory: str) -> dict[str, Any]:
    """One kind of work on one size; after a return nothing of it is held any more."""
    sizes, device = bench.sizes, bench.device
    try:
        backbone, fast = bench.backbone(), bench.switched().fast
        backbone.latents = sizes.latents  # whichever point the model was built for
        run: Callable[[], object]
        if name == "rollout":
            options = {"group": sizes.group, "sampling": sampling(bench), "latents": sizes.latents, "fast": fast}
            run = partial(rollout, backbone, bench.prompts(prompts), **options)
        else:
            run = TrainPass(bench, cut(bench, prompts, prompts), memory, name == "ReaLVR")
        held = held_gib(device)
        timing = bench.time("", run, keep=False)
    except Exception as error:
        if not out_of_memory(error):
            raise
        return {"seconds": None, "peak_gib": None, "error": "does not fit"}
    if device.type == "cpu":
        return {"seconds": round(timing.seconds, 5), **counted(run, backbone)}
    peak = timing.most_gib
    above = None if peak is None or held is None else round(peak - held, 3)
    facts = {"seconds": round(timing.seconds, 5), "peak_gib": peak, "held_gib": held, "above_gib": above}
    return facts | {"reserved_gib": timing.reserved_gib}


def counted(run: Callable[[], object], backbone: Backbone) -> dict[str, float]:
    """What a run does, whatever it runs on."""
    with LiveMemory(backbone.model) as live:
        run()
    return {"above_gib": live.peak / GIB, "operations": live.operations, "flops": flops(run)}


def key_of(sizes: Sizes, prompts: int) -> Key:
    return sizes.visual, sizes.latents, sizes.group, prompts


def measure(bench: Bench, memory: str = "checkpointed-prefill") -> bool:
    """All series, into the file of results; whether they are complete."""
    small = bench.sizes.visual < GRIDS[0][0] * GRIDS[0][1]
    grids, all_series = (SMALL_GRIDS, SMALL_SERIES) if small else (GRIDS, SERIES)
    plan: dict[str, Workloads] = {
        series: {
            value: (resized(bench.sizes, series, value, grids), value if series == "prompts" else 1) for value in values
        }
        for series, values in all_series.items()
    }
    plan["visual"], note = followed(bench, plan["visual"])
    before = _before(bench, plan)
    known = dict(before) if bench.results.resume else {}
    complete = False
    try:
        for series, sizes_of in plan.items():
            for value, (sizes, prompts) in sizes_of.items():
                key = key_of(sizes, prompts)
                if key not in known:
                    bench.in_time()
                    known[key] = point(bench, sizes, prompts, memory)
                print(f"{series} {value}: {_said(known[key])}", flush=True)
                _put(bench, series, sizes_of, {**before, **known}, memory, note if series == "visual" else None)
        complete = True
    except OutOfTime:
        print("cut off; --resume goes on", flush=True)
    for series in (name for name in bench.results.names() if name in all_series):
        for name, fitted in bench.results.content[series]["value"].items():
            print(f"{series:<10} {name:<24} {fitted}", flush=True)
    return complete


def followed(bench: Bench, sizes_of: Workloads) -> tuple[Workloads, str | None]:
    """The points of which prompts have as many visual tokens as asked for, and what is said of the others. No series
    where whole tiles leave fewer than two."""
    if bench.family.variable_grid:
        return sizes_of, None
    processor = bench.backbone().processor
    real = {value: counted_tokens(processor, pictures(processor, sizes.grid)) for value, (sizes, _) in sizes_of.items()}
    other = ", ".join(f"{value} (would be {count})" for value, count in real.items() if value != count)
    kept = {value: given for value, given in sizes_of.items() if real[value] == value}
    note = f"not measured, as {bench.family.name} has whole tiles: {other}" if other else None
    if note:
        print(f"visual: {note}", flush=True)
    return kept if len(kept) > 1 else {}, note


def _said(found: Mapping[str, Any]) -> str:
    units = {"seconds": ".4g} s", "above_gib": ".4g} GiB", "operations": ",} operations"}
    parts = []
    for name in (name for name in WORK if name in found):
        given = ((key, unit) for key, unit in units.items() if found[name].get(key) is not None)
        known = [f"{{:{unit}".format(found[name][key]) for key, unit in given]
        parts.append(f"{name} {', '.join(known) or found[name]['error']}")
    return "; ".join(parts)


def _before(bench: Bench, plan: Mapping[str, Workloads]) -> dict[Key, dict[str, Any]]:
    """Points that the file has for the same options; of a CPU, those that were counted."""
    found: dict[Key, dict[str, Any]] = {}
    for series, sizes_of in plan.items():
        inputs = bench.results.inputs(series)
        for each in inputs.get("points", []) if inputs.get("options") == bench.results.options else []:
            counted = bench.device.type != "cpu" or all("operations" in each[name] for name in WORK if name in each)
            if (value := each.get(series)) in sizes_of and counted:
                found[key_of(*sizes_of[value])] = {name: part for name, part in each.items() if name != series}
    return found


def _put(
    bench: Bench, series: str, sizes_of: Workloads, known: Mapping[Key, dict[str, Any]], memory: str, note: str | None
) -> None:
    """The series as far as it is known, older points included; each has its commit."""
    points = [{series: v, **known[key]} for v, given in sizes_of.items() if (key := key_of(*given)) in known]
    facts: dict[str, Any] = {"memory": memory, "prompts": 1 if series != "prompts" else None}
    notes = [note] if note else []
    if len(commits := {each.get("commit") for each in points}) > 1:
        notes.append(f"points of several commits: {', '.join(sorted(map(str, commits)))}")
    if notes:
        facts["note"] = "; ".join(notes)
    complete = len(points) == len(sizes_of)
    bench.results.put(series, exponents(series, points), points=points, complete=complete, **facts)


def exponents(series: str, points: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Fits of all that was measured for each kind of work: time, memory as a whole and above what was held before; of
    a CPU, what was counted."""
    found: dict[str, Any] = {}
    for name in WORK:
        for quantity in ("seconds", "peak_gib", "above_gib", "operations", "flops"):
            known = [(p[series], p[name][quantity]) for p in points if name in p and p[name].get(quantity)]
            if known and (fitted := fit(*zip(*known, strict=True))) is not None:
                found[f"{name}, {quantity}"] = fitted
    return found


LABELS = {"visual": "visual tokens", "latents": "latents K", "group": "completions G", "prompts": "prompts"}
SHOWN = {
    "seconds": ("seconds", 1.0),
    "above_gib": ("GiB beside the weights", 1.0),
    "operations": ("thousand operations", 1e-3),
    "flops": ("TFLOP", 1e-12),
}
"""What is drawn, with its unit: a row of the figure each, where the file has it."""


def draw(path: Path, out: Path) -> None:
    """The series of a file as one figure; none where nothing fitted."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    content = read_json(path)
    columns = {name: content[name]["inputs"]["points"] for name in SERIES if name in content}
    lines = {
        (quantity, series, name): [(p[series], p[name][quantity]) for p in points if p.get(name, {}).get(quantity)]
        for quantity in SHOWN
        for series, points in columns.items()
        for name in WORK
    }
    rows = [quantity for quantity in SHOWN if any(line for key, line in lines.items() if key[0] == quantity)]
    if not rows:
        return
    size = (2.7 * len(columns), 2.1 * len(rows) + 0.3)
    figure, axes = pyplot.subplots(len(rows), len(columns), figsize=size, squeeze=False)
    for row, quantity in zip(axes, rows, strict=True):
        unit, factor = SHOWN[quantity]
        for axis, series in zip(row, columns, strict=True):
            for name in WORK:
                if line := lines[quantity, series, name]:
                    xs, ys = zip(*line, strict=True)
                    style = "--" if name == "ReaLVR" else "-"  # which often lies on LVR-RL
                    axis.plot(xs, [y * factor for y in ys], style, marker="o", markersize=3, label=name)
            axis.set(ylim=(0, None), xlabel=LABELS[series] if quantity == rows[-1] else "")
            axis.spines[["top", "right"]].set_visible(False)
        row[0].set_ylabel(unit)
    axes[0][0].legend(frameon=False, fontsize="small")
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)
    pyplot.close(figure)


def demo_shares(folder: Path) -> str:
    """Seconds of a step in each Stage-2 run below a folder, and the share of the rollout, from ``metrics.jsonl``."""
    import json

    lines = [f"{'run':<32} {'steps':>6} {'s a step':>9} {'rollout and rewards':>20} {'passes and update':>18}"]
    for path in sorted(folder.rglob("metrics.jsonl")):
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        rows = [row for row in rows if row.get("seconds") and "reward" in row][1:]  # the first step is not warm
        if not rows:
            continue
        seconds = sum(row["seconds"] for row in rows)
        share = sum(row["prepare_s"] for row in rows) / seconds
        name = str(path.parent.relative_to(folder))
        lines.append(f"{name:<32} {len(rows):>6} {seconds / len(rows):>9.3f} {share:>20.1%} {1 - share:>18.1%}")
    return "\n".join(lines)
