"""What the speed benchmark does not measure twice: GPU time is short."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import speed_baseline
import speed_kit
import speed_passes
import speed_sections
import speed_steps
from speed_kit import Bench, about
from speed_results import Results, Timing
from speed_sizes import SMALL

CPU = torch.device("cpu")
PRESET = "tiny:qwen2.5-vl"


@pytest.fixture
def made(tmp_path: Path) -> Bench:
    head = {**about(SMALL, PRESET, CPU, torch.float32, 1), "commit": None}
    results = Results(tmp_path / "speed.json", head, resume=False)
    results.put("matmul_tflops", 1.0)
    return Bench(PRESET, CPU, torch.float32, SMALL, 1, time.monotonic() + 600, results)


@pytest.mark.parametrize(("seconds", "warm"), [(0.2, 1), (3.0, 0)])
def test_the_second_way_of_a_long_stock_call_has_no_warm_run(
    made: Bench, monkeypatch: pytest.MonkeyPatch, seconds: float, warm: int
) -> None:
    """A short one keeps it, as what is new to it would decide which way is taken."""
    asked: dict[str, dict[str, Any]] = {}

    def clock(label: str, run: object, **how: Any) -> Timing:
        asked[label] = how
        return Timing([seconds + 0.1 * ("without" not in label)], None)

    monkeypatch.setattr(made, "device", SimpleNamespace(type="cuda"))
    monkeypatch.setattr(made, "time", clock)
    speed_baseline.time_stock(made, "call", lambda: None, repeats=7)
    assert [how["warm"] for how in asked.values()] == [1, warm, 0]
    assert list(asked) == ["call, with cuDNN", "call, without cuDNN", "call"] and asked["call"]["repeats"] == 7
    assert made.cudnn == {"call": False}
    speed_baseline.time_stock(made, "smaller", lambda: None, like="call", warm=0, repeats=1)
    assert list(asked)[3:] == ["smaller"] and (asked["smaller"]["warm"], asked["smaller"]["repeats"]) == (0, 1)


def test_passes_of_the_baseline_are_counted_warmed_up_and_compared_in_one(
    made: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One pass counts operations and warms up, one is timed, and its loss is that which ours is held against."""
    passes: list[int] = []
    naive_pass = speed_baseline.naive_pass

    def counted(*given: Any) -> Any:
        passes.append(1)
        return naive_pass(*given)

    for module in (speed_baseline, speed_passes):
        monkeypatch.setattr(module, "naive_pass", counted)
    for _ in range(2):  # the second section that needs it
        _, facts = speed_baseline.naive_seconds(made, "paper")
        assert len(passes) == 2 and facts["baseline_matmul_fraction"] > 0
    speed_passes.loss_gap(made)
    reused = made.results.inputs("loss_gap")["baseline"]
    assert len(passes) == 2 and made.results.value("loss_gap") < 1e-4  # type: ignore[operator]
    made.losses.clear()
    speed_passes.loss_gap(made)
    assert len(passes) == 3 and made.results.inputs("loss_gap")["baseline"] == pytest.approx(reused, rel=1e-6)


def test_stock_generate_of_all_prompts_runs_once_and_says_so(made: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    generate = speed_sections.generate

    def watched(backbone: Any, prompts: list[Any], *sizes: int) -> Any:
        run = generate(backbone, prompts, *sizes)
        return lambda: (calls.append(len(prompts)), run())

    monkeypatch.setattr(speed_sections, "generate", watched)
    made.repeats = 5
    speed_sections.against_generate(made)
    assert calls.count(1) == 6 and calls.count(2) == 1
    inputs = made.results.inputs("decode_vs_generate_2")
    assert inputs["one_call_repeats"] == 1 and "measured once, without a warm run" in inputs["note"]
    assert "note" not in made.results.inputs("decode_vs_generate")


def test_pictures_are_written_once(made: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Path] = []
    write = speed_steps.write_samples

    def watched(folder: Path, *given: Any) -> Path:
        written.append(folder)
        return write(folder, *given)

    monkeypatch.setattr(speed_steps, "write_samples", watched)
    for rank, answer in ((0, SMALL.answer), (SMALL.rank, SMALL.answer), (0, SMALL.long_answer)):
        speed_steps.rl_step(made, rank, answer)
    (folder,) = written
    assert len(list((folder / "images").iterdir())) == 2 * SMALL.prompts


def test_same_mode_ratios_stand_beside_the_best_one(made: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A baseline of 6 s a prompt; all prompts take ours 2 s in the best mode, and twice and three times that in those
    that recompute. What the search for the best mode has measured is not measured again."""
    seconds = {"cached": 2.0, "checkpointed-prefill 0.25": 3.0, "checkpointed-prefill": 4.0, "checkpointed": 6.0}
    tried: list[str] = []
    full: set[str] = set()

    def run(bench: Bench, memory: str, size: int) -> dict[str, Any]:
        tried.append(memory)
        return {"error": "does not fit"} if memory in full else {"seconds": seconds[memory]}

    def overhead(bench: Bench, name: str, prompts: int, memory: str, size: int, rank: int = 0) -> Timing:
        bench.results.put(name, 0.1, span_counts=None)
        return Timing([seconds[memory]], None)

    monkeypatch.setattr(speed_passes, "_run", run)
    monkeypatch.setattr(speed_passes, "evidence_overhead", overhead)
    monkeypatch.setattr(speed_passes, "loss_gap", lambda bench: None)
    monkeypatch.setattr(speed_passes, "naive_seconds", lambda bench, kind: (6.0, {}))
    speed_passes.train_part(made)
    inputs = made.results.inputs("train_part_ratio_release")
    assert made.results.value("train_part_ratio_release") == 6.0 and inputs["memory"] == "cached"
    assert inputs["same_mode_ratios"] == {"checkpointed-prefill": 3.0, "checkpointed": 2.0}
    assert inputs["same_mode_ratio"] == 2.0 and tried == ["cached", "checkpointed-prefill", "checkpointed"]
    tried.clear()
    full |= {"cached", "checkpointed-prefill 0.25"}
    speed_passes.train_part(made)
    assert made.results.inputs("train_part_ratio_paper")["memory"] == "checkpointed-prefill"
    assert tried.count("checkpointed-prefill") == tried.count("checkpointed") == 1
    assert made.results.value("train_part_ratio_paper") == 3.0
    assert speed_kit.QUICK <= 1
