"""Prompts of the speed benchmark have as many visual tokens as whole tiles allow, and entries say how many."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import speed_baseline
import speed_growth
import speed_passes
import speed_steps
from foundation import _processor
from pictures import counted, noise, pictures
from realvr.families import FAMILIES
from realvr.imaging.processing import ImageProcessor
from realvr.zoo.presets import PRESETS, preset_config
from speed_kit import Bench, about, text_tokens
from speed_results import Results
from speed_sizes import FULL, SMALL, Sizes

CPU = torch.device("cpu")


def processor(preset: str) -> ImageProcessor:
    return _processor(FAMILIES[PRESETS[preset].family], preset_config(preset))


def made(tmp_path: Path, family: str, sizes: Sizes = SMALL) -> Bench:
    preset = f"tiny:{family}"
    results = Results(tmp_path / "speed.json", about(sizes, preset, CPU, torch.float32, 1), resume=False)
    results.put("matmul_tflops", 1.0)
    return Bench(preset, CPU, torch.float32, sizes, 1, time.monotonic() + 600, results)


@pytest.mark.parametrize(
    ("preset", "way"),
    [
        ("Qwen2.5-VL-7B", (1, 64 * 28, 40 * 28)),
        ("Qwen3-VL-8B", (1, 64 * 32, 40 * 32)),
        ("InternVL3-8B", (1, 3 * 448, 3 * 448)),  # nine tiles and the thumbnail
        ("Gemma-3-12B", (10, 896, 896)),
    ],
)
def test_a_prompt_of_every_backbone_has_2560_visual_tokens(preset: str, way: tuple[int, int, int]) -> None:
    found = processor(preset)
    assert pictures(found, FULL.grid) == way
    count, width, height = way
    assert sum(found(noise(seed, width, height)).tokens for seed in range(count)) == 2560


def test_pictures_come_as_near_as_whole_tiles_do() -> None:
    internvl, gemma = processor("InternVL3-8B"), processor("Gemma-3-12B")
    for grid in speed_growth.GRIDS[1:]:
        for found in (internvl, gemma):
            assert counted(found, pictures(found, grid)) == grid[0] * grid[1]
    for wanted, real in ((1, 256), (300, 256), (700, 768), (2600, 2560)):
        for found in (internvl, gemma):
            assert counted(found, pictures(found, (1, wanted))) == real
    assert internvl.max_tiles == 12 and pictures(internvl, (1, 13 * 256))[0] == 1
    internvl.tiles = False
    assert pictures(internvl, FULL.grid) == (10, 448, 448)


@pytest.mark.parametrize("family", ["gemma3", "internvl3", "qwen2.5-vl"])
def test_steps_and_prompts_have_the_same_visual_tokens_and_say_so(tmp_path: Path, family: str) -> None:
    bench = made(tmp_path, family, replace(SMALL, grid=(6, 8)))
    prompts = bench.prompts(2)
    assert len({image.key for prompt in prompts for image in prompt.images}) == 2 * len(prompts[0].images)
    for prompt in prompts:
        assert len(prompt) - text_tokens(prompt) == bench.counts["visual_tokens"] == 48
        assert len(prompt.images) == bench.counts["pictures"] == (3 if family == "gemma3" else 1)
    _, facts = speed_steps.rl_step(bench, 0, SMALL.answer)
    assert (facts["visual_tokens"], facts["pictures"]) == (48, bench.counts["pictures"])
    (batch,) = speed_passes.cut(bench, 1, 1)
    assert len(batch.visual.features_ND) == 48


@pytest.mark.parametrize("family", ["gemma3", "internvl3"])
def test_the_baseline_sees_all_pictures_of_a_prompt(tmp_path: Path, family: str) -> None:
    bench = made(tmp_path, family, replace(SMALL, grid=(6, 8)))
    speed_passes.loss_gap(bench)
    assert bench.results.value("loss_gap") < 1e-5  # type: ignore[operator]
    (batch,) = speed_passes.cut(bench, 2, 2)
    given = speed_baseline.examples(bench.backbone(), batch, tower=True)
    assert [len(each.pixels) for each in given] == [sum(len(i.pixels) for i in batch.batch.images) // 2] * 2


def test_the_same_prompts_are_made_again(tmp_path: Path) -> None:
    first, again = (made(tmp_path / name, "qwen2.5-vl").rl_batch(1) for name in "ab")
    assert torch.equal(first.visual.features_ND, again.visual.features_ND) and torch.equal(first.ids_BGS, again.ids_BGS)


# ---------------------------------------------------------------------- growth


def grown(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Bench, list[int]]:
    asked: list[int] = []

    def point(bench: Bench, sizes: Sizes, prompts: int, memory: str) -> dict[str, Any]:
        asked.append(sizes.visual)
        return {"rollout": {"seconds": 2.0}, "commit": None}

    monkeypatch.setattr(speed_growth, "point", point)
    bench = made(tmp_path, family)
    assert speed_growth.measure(bench)
    return bench, asked


def test_growth_with_visual_tokens_is_left_out_where_their_number_does_not_follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench, asked = grown(tmp_path, "gemma3", monkeypatch)  # 16 tokens a picture: neither 4 nor 12
    assert "visual" not in bench.results and set(asked) == {SMALL.visual} and "latents" in bench.results
    assert "gemma3 has whole tiles: 4 (would be 16), 12 (would be 16)" in capsys.readouterr().out


def test_growth_with_visual_tokens_leaves_single_points_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(speed_growth.SMALL_SERIES, "visual", (4, 12, 16, 6))
    monkeypatch.setattr(speed_growth, "SMALL_GRIDS", ((2, 2), (3, 4), (4, 4), (2, 3)))
    bench, _ = grown(tmp_path, "internvl3", monkeypatch)  # 4 tokens a tile
    inputs = bench.results.inputs("visual")
    assert [each["visual"] for each in inputs["points"]] == [4, 12, 16] and inputs["complete"]
    assert "6 (would be " in inputs["note"] and "note" not in bench.results.inputs("latents")


def test_points_of_growth_say_what_their_prompts_had(tmp_path: Path) -> None:
    bench = made(tmp_path, "gemma3")
    for grid, real in (((3, 4), 16), ((6, 8), 48), ((3, 4), 16)):
        assert speed_growth.point(bench, replace(SMALL, grid=grid), 1, "cached")["visual_tokens"] == real
