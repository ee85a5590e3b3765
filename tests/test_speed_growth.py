"""Growth, counted on a CPU with a narrow model. The number of operations does not depend on lengths. Floating-point
operations grow as the equations of a decoder say: quadratic in the prompt by attention's own two products, no more.
Memory is linear. All of it is exact: differences between equally spaced sizes."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import speed_growth
import speed_kit
from memory import NARROW
from speed_kit import Bench, about
from speed_options import parse_options
from speed_results import Results, Timing
from speed_sizes import Sizes

CPU = torch.device("cpu")
GRIDS = {"plain": ((8, 8), (8, 16), (8, 24), (16, 16)), "fast": ((16, 48), (32, 32), (32, 40), (32, 48))}
"""Static shapes are rounded up to 256 columns: steps of that length leave the same number free."""
SLACK = {"plain": 0.0, "fast": 0.05}
"""Of the number of operations: fast paths choose by sizes how something is computed."""
SIZES = Sizes(grid=(8, 8), group=2, latents=2, text=40, answer=3, prompts=1)
LAYERS, WIDTH = 4, NARROW["text_config"]["hidden_size"]
FORWARD, BACKWARD = 2 * 2, 5 * 2
"""Operations for each pair of positions and each number of a head: a product takes two, and there are two of them,
backward five with the scores computed again."""
TOWER = FORWARD * 4**2 * NARROW["vision_config"]["hidden_size"]
"""The one layer of the vision tower that sees the whole picture, four patches for each visual token."""
PREFILL = LAYERS * FORWARD * WIDTH
TRAINED = ((LAYERS - 1) * (2 * FORWARD + BACKWARD) + 2 * FORWARD) * WIDTH
"""Forward, again for the backward pass, and that; nothing depends on what the last layer makes of a prompt, so that
attention there has no backward pass."""
SQUARES = {"rollout": PREFILL + TOWER, "LVR-RL": TRAINED, "ReaLVR": TRAINED}


@pytest.fixture(scope="module", params=["plain", pytest.param("fast", marks=pytest.mark.slow)])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    path = Path(tmp_path_factory.mktemp("growth")) / "growth.json"
    results = Results(path, about(SIZES, "narrow", CPU, torch.float32, 1), resume=False)
    options = parse_options(request.param, CPU)
    return Bench("narrow", CPU, torch.float32, SIZES, 1, time.monotonic() + 600, results, options, request.param)


def points(bench: Bench, name: str, values: Sequence[Any]) -> dict[tuple[str, str], list[int]]:
    """Of each kind of work, what was counted at each size."""
    found: dict[tuple[str, str], list[int]] = {}
    for value in values:
        prompts = value if name == "prompts" else 1
        with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
            warnings.simplefilter("ignore")  # a recorded span needs a GPU
            patch.setattr(speed_kit, "timed", lambda run, *given: (run(), Timing([1.0], None))[1])
            point = speed_growth.point(bench, replace(SIZES, **{name: value}), prompts, "checkpointed-prefill")
        for work in speed_growth.WORK:
            counts = point[work] | {"bytes": round(point[work]["above_gib"] * 2**30)}
            for what in ("operations", "flops", "bytes"):
                found.setdefault((work, what), []).append(counts[what])
    return found


def differences(values: Sequence[int], times: int = 1) -> list[int]:
    for _ in range(times):
        values = [after - before for before, after in zip(values, values[1:], strict=False)]
    return list(values)


def test_visual_tokens(bench: Bench) -> None:
    grids = GRIDS[bench.name]
    found, step = points(bench, "grid", grids), grids[1][0] * grids[1][1] - grids[0][0] * grids[0][1]
    for work, square in SQUARES.items():
        operations = found[work, "operations"]
        assert max(operations) - min(operations) <= SLACK[bench.name] * min(operations)
        assert differences(found[work, "flops"], 2) == [2 * step**2 * square] * 2
        assert differences(found[work, "bytes"], 2)[-1] == 0 < differences(found[work, "bytes"])[-1]


def test_latents(bench: Bench) -> None:
    """Linear, and LVR-RL, which does not go back through them, has as many operations for any number."""
    found = points(bench, "latents", (4, 6, 8, 10))
    assert len(set(found["LVR-RL", "operations"])) == 1
    for work in ("rollout", "ReaLVR"):
        operations = found[work, "operations"]
        assert max(map(abs, differences(operations, 2))) <= SLACK[bench.name] * operations[0]
        assert differences(operations)[0] > 0


def test_completions_and_prompts(bench: Bench) -> None:
    """Layers are passed once for all of them: one more is a few operations more, such as drawing a random number."""
    for name, most in (("group", 1), ("prompts", 20)):
        found = points(bench, name, (2, 3, 4))
        for work in speed_growth.WORK:
            assert max(map(abs, differences(found[work, "operations"]))) <= most, (name, work)
            assert max(map(abs, differences(found[work, "flops"], 2))) <= 0.01 * found[work, "flops"][0]
