"""The speed benchmark leaves out what clearly does not fit, and says so: an H200 is pretended, nothing is run."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import speed
import speed_fit
import speed_passes
import speed_steps
from realvr.training.estimate import Workload
from speed_kit import Bench, CannotFit, DoesNotFit, about
from speed_options import parse_options
from speed_results import Results, Timing
from speed_sizes import FULL

CPU = torch.device("cpu")
H200 = 139.8
SEVEN, TWELVE, THIRTY = "Qwen2.5-VL-7B", "Gemma-3-12B", "Qwen3-VL-30B-A3B"
MEASURED = json.loads((Path(speed.__file__).parent / "results" / "h200-qwen2.5-vl-7b.json").read_text(encoding="utf-8"))


def made(tmp_path: Path, preset: str, **changes: Any) -> Bench:
    sizes = replace(FULL, **changes)
    results = Results(tmp_path / f"{preset}.json", about(sizes, preset, CPU, torch.bfloat16, 5), resume=False)
    fast = parse_options("default" if preset == THIRTY else "fast", torch.device("cuda"))
    return Bench(preset, CPU, torch.bfloat16, sizes, 5, time.monotonic() + 600, results, fast, "fast", room=H200)


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Rank, microbatch and answer of steps that would run; none of them fits."""
    found: list[tuple[int, int, int]] = []
    monkeypatch.setattr(speed_steps, "_steps", lambda bench, *given: found.append(given))
    return found


# ---------------------------------------------------------------------- the estimate


@pytest.mark.parametrize("name", ["rl_step_seconds", "lora_step_seconds", "lora_step_seconds_cached"])
def test_the_estimate_of_a_step_is_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    inputs = MEASURED[name]["inputs"]
    needed: list[float] = []
    estimate = speed_fit.needed_gib
    monkeypatch.setattr(speed_fit, "needed_gib", lambda *given: needed.append(estimate(*given)) or needed[-1])
    bench = made(tmp_path, SEVEN, memory=inputs["memory"])
    assert speed_fit.step_too_large(bench, inputs["rank"], inputs["microbatch"], inputs["answer"]) is None
    assert needed == [pytest.approx(max(inputs["peak_gib"], inputs["first_peak_gib"]), rel=0.08)]


def test_the_estimate_of_passes_is_what_was_measured(tmp_path: Path) -> None:
    bench = made(tmp_path, SEVEN)
    for each in MEASURED["train_part_tries"]["inputs"]["tries"]:
        work = Workload("rl", answer=64, **speed_fit._passes(bench, 8, each["microbatch"], each["memory"]))
        assert speed_fit.needed_gib(bench, 0, work, True) == pytest.approx(each["peak_gib"], rel=0.08), each


def test_the_estimate_of_a_row_of_stage_1_is_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed: list[float] = []
    estimate = speed_fit.needed_gib
    monkeypatch.setattr(speed_fit, "needed_gib", lambda *given: needed.append(estimate(*given)) or needed[-1])
    assert speed_fit.row_too_large(made(tmp_path, SEVEN)) is None
    assert needed == [pytest.approx(MEASURED["stage1_matmul_fraction"]["inputs"]["peak_gib"], rel=0.15)]


def test_nothing_is_left_out_on_a_cpu_and_of_small_models(tmp_path: Path) -> None:
    bench = made(tmp_path, TWELVE)
    assert "needs" in (speed_fit.step_too_large(bench, 0, 1, 64) or "")
    assert speed_fit.room_gib(CPU) is None
    bench.room = None
    assert speed_fit.step_too_large(bench, 0, 1, 64) is None
    bench.room, bench.preset = H200, "tiny:gemma3"
    assert speed_fit.step_too_large(bench, 0, 1, 64) is None and speed_fit.row_too_large(bench) is None


# ---------------------------------------------------------------------- what is tried


@pytest.mark.parametrize(
    ("preset", "rank", "changes", "microbatches"),
    [
        (SEVEN, 0, {}, [4, 2, 1]),
        (SEVEN, 16, {"memory": "cached"}, [8, 4, 2, 1]),
        (SEVEN, 16, {"memory": "cached", "lora_microbatch": 2}, [2, 1]),
        (TWELVE, 16, {}, [8, 4, 2, 1]),
        (TWELVE, 16, {"memory": "cached"}, [2, 1]),
        (THIRTY, 16, {}, [8, 4, 2, 1]),
    ],
)
def test_microbatches_that_may_fit_are_tried_the_largest_first(
    tmp_path: Path,
    tried: list[tuple[int, int, int]],
    preset: str,
    rank: int,
    changes: dict[str, Any],
    microbatches: list[int],
) -> None:
    with pytest.raises(DoesNotFit) as error:
        speed_steps.rl_step(made(tmp_path, preset, **changes), rank, 64)
    assert [microbatch for _, microbatch, _ in tried] == microbatches and error.type is DoesNotFit


def test_what_did_not_fit_is_not_tried_by_later_sections(tmp_path: Path, tried: list[tuple[int, int, int]]) -> None:
    bench = made(tmp_path, SEVEN)
    for section in (speed_steps.whole_step, speed_steps.step_ratios, speed_steps.long_step):
        with pytest.raises(DoesNotFit, match=r"fits in no microbatch of \[4, 2, 1\]"):
            section(bench)
    assert len(tried) == 3
    with pytest.raises(DoesNotFit):  # neither other adapters nor shorter completions are known
        speed_steps.rl_step(bench, 16, 64)
    with pytest.raises(DoesNotFit):
        speed_steps.rl_step(bench, 0, 32)
    assert [answer for *_, answer in tried[3:]] == [64] * 4 + [32] * 3


def test_sections_that_cannot_fit_are_skipped_with_a_reason_and_nothing_has_failed(
    tmp_path: Path,
    tried: list[tuple[int, int, int]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bench = made(tmp_path, THIRTY)
    monkeypatch.setattr(Bench, "backbone", lambda *given: pytest.fail("a model was built"))
    monkeypatch.setattr(speed, "ceilings", lambda bench: None)
    bench.results.put("rl_step_seconds_192", 7.0)
    left = speed.measure(bench, ["whole step", "step ratios", "long step"])
    assert len(left) == 3 and all("skipped: a step of 8 prompts with rank 0 needs" in each for each in left)
    assert not tried and not bench.results.failed and "failures" not in bench.results.content
    assert bench.results.value("rl_step_seconds") is None
    assert "the GPU has 140" in bench.results.inputs("rl_step_seconds")["note"]
    assert bench.results.value("rl_step_seconds_192") == 7.0  # of another time
    assert capsys.readouterr().out.count("skipped: a step") == 3
    resumed = Results(bench.results.path, bench.results.content["about"], resume=True)
    assert "whole step" not in speed.chosen([], resumed, bench.sizes)


def test_a_train_part_of_which_nothing_is_left_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, int]] = []

    def run(bench: Bench, memory: str, size: int) -> dict[str, Any]:
        ran.append((memory, size))
        return {"error": "does not fit"}

    monkeypatch.setattr(speed_passes, "_run", run)
    monkeypatch.setattr(speed_passes, "evidence_overhead", lambda *given: Timing([1.0], None))
    bench = made(tmp_path, TWELVE)
    with pytest.raises(DoesNotFit) as error:
        speed_passes.train_part(bench)
    assert error.type is DoesNotFit and ("cached", 8) not in ran and ("checkpointed-prefill", 8) in ran
    bench.room = 30.0
    ran.clear()
    with pytest.raises(CannotFit):
        speed_passes.train_part(bench)
    assert not ran and bench.results.value("evidence_overhead_1_full") is None
    assert "the GPU has 30" in bench.results.inputs("evidence_overhead_1_full")["note"]


def test_ratios_that_have_no_baseline_cost_no_step(tmp_path: Path, tried: list[tuple[int, int, int]]) -> None:
    bench = made(tmp_path, "InternVL3-8B")
    speed_steps.step_ratios(bench)
    assert not tried and "Qwen models only" in bench.results.inputs("step_ratio_paper")["note"]
