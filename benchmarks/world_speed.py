"""How fast the world is made: drawing scenes, and whole samples (scene, question, drawing, PNG).

    PYTHONPATH=src python benchmarks/world_speed.py --scenes 10000 --workers 2

Goal: 10,000 scenes of 128 x 128 sampled and drawn in under a minute on two cores.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor

import numpy as np
from rich.console import Console
from rich.table import Table

from realvr.world.draw import render
from realvr.world.items import View
from realvr.world.sampling import full, huge, sample_scene
from realvr.world.splits import Recipe, items, samples


def _draw(span: range) -> int:
    """Sample and draw the scenes of a span; the sum keeps the work from being optimised away."""
    style = full(128)
    return sum(int(render(sample_scene(np.random.default_rng([0, k]), style))[0, 0, 0]) for k in span)


def drawing(count: int, workers: int) -> float:
    """Seconds to sample and draw ``count`` scenes, processes already running."""
    spans = [range(k, min(k + 250, count)) for k in range(0, count, 250)]
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_draw, [range(1)] * workers))
        start = time.perf_counter()
        list(pool.map(_draw, spans))
        return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenes", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    table = Table("what", "number", "seconds", "per second")

    def row(what: str, count: int, seconds: float) -> None:
        table.add_row(what, f"{count:,}", f"{seconds:.1f}", f"{count / seconds:,.1f}")

    row(
        f"scenes of 128x128 drawn, {options.workers} processes",
        options.scenes,
        drawing(options.scenes, options.workers),
    )
    counts = {"curriculum": 2000, "train-boxes": 1000, "counterfactual": 50, "hrbench-4k": 8, "trails": 1000}
    for split, count in counts.items():
        recipe = Recipe(split, count=count)
        start = time.perf_counter()
        made = sum(1 for _ in items(recipe))
        row(f"{split}: scene and question, 1 process", made, time.perf_counter() - start)
    recipe = Recipe("train-boxes", count=2000)
    start = time.perf_counter()
    made = sum(1 for _ in samples(recipe, options.workers))
    row(f"train-boxes: whole samples with PNG, {options.workers} processes", made, time.perf_counter() - start)
    for name, style in (("4K", huge(3840, 2160)), ("8K", huge(7680, 4320))):
        scene = sample_scene(np.random.default_rng(0), style)
        start = time.perf_counter()
        View(scene, "a.jpg").encode()
        row(f"{name} picture drawn and saved as JPEG", 1, time.perf_counter() - start)
    Console().print(table)


if __name__ == "__main__":
    main()
