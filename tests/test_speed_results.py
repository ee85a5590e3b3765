"""The file of the speed benchmark: runs add to it and say what they measured with, and a failure costs one section."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import speed
import speed_baseline
import speed_growth
from realvr.errors import UserError
from speed_kit import Bench, OutOfTime, about, step_bytes
from speed_options import parse_options
from speed_results import Results, Timing, put_lora_vs_full
from speed_sizes import FULL, SMALL, Sizes

CPU = torch.device("cpu")
PRESET = "tiny:qwen2.5-vl"


def head(commit: str = "aaaaaaaaaaaa", sizes: Sizes = SMALL) -> dict[str, Any]:
    return {**about(sizes, PRESET, CPU, torch.float32, 5), "commit": commit}


def made_bench(path: Path, commit: str = "aaaaaaaaaaaa", resume: bool = False, preset: str = PRESET) -> Bench:
    results = Results(path, head(commit), resume)
    results.note_options("fast", parse_options("fast", CPU).facts())
    return Bench(preset, CPU, torch.float32, SMALL, 1, time.monotonic() + 600, results)


# ---------------------------------------------------------------------- what is kept, what is measured


def test_results_are_there_after_every_measurement_and_say_what_they_were_measured_with(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "r.json"
    results = made_bench(path).results
    results.put("vision_ratio", 2.0, seconds=1.0)
    entry = json.loads(path.read_text())["vision_ratio"]
    assert entry["value"] == 2.0 and entry["inputs"]["seconds"] == 1.0
    assert (entry["inputs"]["commit"], entry["inputs"]["options"]) == ("aaaaaaaaaaaa", "fast")
    assert "decode=static" in entry["inputs"]["switches"] and entry["inputs"]["torch"]
    row = next(line for line in speed.table(results).splitlines() if line.startswith("vision_ratio"))
    assert "aaaaaaa " in row and " fast " in row


def test_a_file_is_added_to_by_a_run_of_the_same_workload(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    made_bench(path).results.put("vision_ratio", 2.0)
    other = replace(SMALL, microbatch=1, lora_microbatch=1, questions=2, memory="cached")
    again = Results(path, head("bbbbbbbbbbbb", other), resume=False)
    again.put("eval_gpu_wait", 0.1, questions=2)
    found = json.loads(path.read_text())
    assert (found["vision_ratio"]["inputs"]["commit"], found["eval_gpu_wait"]["inputs"]["commit"]) == (
        "aaaaaaaaaaaa",
        "bbbbbbbbbbbb",
    )
    assert "fast" in found["about"]["options"] and "microbatch" not in found["about"]["sizes"]


def test_another_workload_is_refused_with_its_difference(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    made_bench(path).results.put("vision_ratio", 2.0)
    with pytest.raises(SystemExit, match="prompts is 2 there, 4 here.*--out"):
        Results(path, head(sizes=replace(SMALL, prompts=4)), resume=False)
    with pytest.raises(SystemExit, match="visual is 12 there, 16 here"):
        Results(path, head(sizes=replace(SMALL, grid=(4, 4))), resume=True)
    with pytest.raises(SystemExit, match="preset is tiny:qwen2.5-vl there, mini:qwen2.5-vl here"):
        Results(path, {**head(), "preset": "mini:qwen2.5-vl"}, resume=True)


def test_the_committed_results_can_be_added_to() -> None:
    path = Path(__file__).parents[1] / "benchmarks" / "results" / "h200-qwen2.5-vl-7b.json"
    before = json.loads(path.read_text(encoding="utf-8"))
    run = {**about(FULL, "Qwen2.5-VL-7B", CPU, torch.bfloat16, 5), "gpu": before["about"]["gpu"]}
    results = Results(path, run, resume=True)  # nothing is written
    assert set(before) <= set(results.content)
    assert "commit" in speed.table(results).splitlines()[0]


def test_what_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    first = made_bench(path).results
    first.put("vision_ratio", 2.0)
    for name in ("decode_vs_generate", "decode_vs_generate_2", "lora_peak_gib", "rl_step_seconds_4"):
        first.put(name, 2.0)
    resumed = Results(path, head(), resume=True)
    lacking = speed.chosen([], resumed, SMALL)
    assert not {"vision", "generate", "LoRA step", "long step"} & set(lacking) and "stage 1" in lacking
    assert speed.chosen([], first, SMALL) == list(speed.SECTIONS)
    for results in (first, resumed):
        assert speed.chosen(["vision_ratio", "stage 1"], results, SMALL) == ["vision", "stage 1"]
        assert speed.chosen(["lora_vs_full"], results, SMALL) == ["whole step", "LoRA step"]  # both sides of the ratio
    with pytest.raises(SystemExit, match="--only frobnicate: there is no such name"):
        speed.chosen(["frobnicate"], first, SMALL)


def test_sections_come_in_order_of_value() -> None:
    order = "short passes, whole step, step ratios, LoRA step, LoRA, train part, vision, stage 1, evaluation, "
    order += "long step, generate"
    assert ", ".join(speed.SECTIONS) == order


# ---------------------------------------------------------------------- ratios


@pytest.mark.parametrize("order", [("lora_step_seconds", "rl_step_seconds"), ("rl_step_seconds", "lora_step_seconds")])
def test_lora_vs_full_whichever_came_last_and_a_note_where_commits_differ(
    tmp_path: Path, order: tuple[str, str]
) -> None:
    path, seconds = tmp_path / "r.json", {"lora_step_seconds": 3.0, "rl_step_seconds": 4.0}
    results = made_bench(path).results
    for name in order:
        results.put(name, seconds[name], microbatch=4)
        put_lora_vs_full(results)
    assert results.value("lora_vs_full") == 0.75 and "note" not in results.inputs("lora_vs_full")
    later = made_bench(path, "bbbbbbbbbbbb").results
    later.put(order[1], 6.0, microbatch=2)
    put_lora_vs_full(later)
    assert later.value("lora_vs_full") == (0.5 if order[1] == "rl_step_seconds" else 1.5)
    note = later.inputs("lora_vs_full")["note"]
    assert "aaaaaaaaaaaa" in note and "bbbbbbbbbbbb" in note and "note not of one run" in speed.table(later)


def test_lora_vs_full_takes_the_faster_memory_mode_of_one_run(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    results = made_bench(path).results
    results.put("rl_step_seconds", 4.0, memory="checkpointed-prefill")
    results.put("lora_step_seconds_cached", 1.0, memory="cached")  # alone it says nothing of the package's mode
    put_lora_vs_full(results)
    assert results.value("lora_vs_full") is None
    results.put("lora_step_seconds", 3.0, memory="checkpointed-prefill")
    put_lora_vs_full(results)
    facts = results.inputs("lora_vs_full")
    assert results.value("lora_vs_full") == 0.25 and facts["lora_memory"] == "cached"
    assert facts["ratios"] == {"checkpointed-prefill": 0.75, "cached": 0.25}
    later = made_bench(path, "bbbbbbbbbbbb").results
    later.put("lora_step_seconds", 2.0, memory="checkpointed-prefill")  # with other code
    put_lora_vs_full(later)
    facts = later.inputs("lora_vs_full")
    assert later.value("lora_vs_full") == 0.5 and facts["lora_memory"] == "checkpointed-prefill"
    assert "ratios" not in facts and "not of one run" in facts["note"]


def test_the_baseline_says_its_own_share_of_the_ceiling_by_the_same_timing(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    name = "naive_paper_matmul_fraction"
    made = made_bench(path, "bbbbbbbbbbbb")
    made.results.put("matmul_tflops", 1.0)
    made.results.put(name, 0.9, flops=123, text_tokens=made.text_tokens, commit="aaaaaaaaaaaa")  # of another commit
    _, facts = speed_baseline.naive_seconds(made, "paper")
    counted = made.results.inputs(name)["flops"]
    assert counted > 1000 and made.results.inputs(name)["commit"] == "bbbbbbbbbbbb"
    expected = counted / facts["seconds_measured"] / 1e12
    assert facts["baseline_matmul_fraction"] == pytest.approx(expected, rel=0.1, abs=1e-6)
    assert speed_baseline._counted(made, name) == counted
    made.results.content[name]["inputs"]["text_tokens"] += 1
    assert speed_baseline._counted(made, name) is None
    dirty = made_bench(path, "bbbbbbbbbbbb-dirty")
    assert speed_baseline._counted(dirty, name) is None


def test_experts_are_read_as_often_as_rows_are_expected_to_hit_them(tmp_path: Path) -> None:
    backbone = made_bench(tmp_path / "r.json", preset="tiny:qwen3-vl-moe").backbone()
    layers = backbone.decoder.layers
    experts = sum(p.numel() * 4 for p in layers.parameters() if p.dim() == 3)
    others = sum(p.numel() * 4 for p in layers.parameters()) - experts
    assert experts > 0
    for rows, share in ((1, 0.5), (2, 0.75), (3, 0.875)):  # two of four experts a row
        assert step_bytes(backbone, rows, 0, head=False) == pytest.approx(others + share * experts, abs=4)


# ---------------------------------------------------------------------- failures


def test_a_section_that_fails_is_recorded_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(bench: Bench) -> None:
        raise UserError("step 1 ran out of GPU memory: lower optim.microbatch")

    made = made_bench(tmp_path / "r.json")
    sections: dict[str, Any] = {"whole step": (fails, ("a",)), "vision": (lambda b: b.results.put("b", 1), ("b",))}
    monkeypatch.setattr(speed, "SECTIONS", sections)
    monkeypatch.setattr(speed, "ceilings", lambda bench: None)
    (left,) = speed.measure(made, list(sections))
    assert left.startswith("whole step (UserError: step 1 ran out of GPU memory")
    assert made.results.failed and made.results.value("b") == 1
    found = json.loads(made.results.path.read_text())
    assert "ran out" in found["failures"]["whole step [fast]"]["error"] and "failures" not in made.results.names()
    sections["whole step"] = (lambda b: None, ("a",))
    assert speed.measure(made, list(sections)) == []
    assert json.loads(made.results.path.read_text())["failures"] == {}

    def interrupted(bench: Bench) -> None:
        raise KeyboardInterrupt

    sections["whole step"] = (interrupted, ("a",))
    with pytest.raises(KeyboardInterrupt):
        speed.measure(made, list(sections))


def test_the_script_ends_with_its_table_and_a_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(bench: Bench) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")

    path = tmp_path / "r.json"
    monkeypatch.setattr(speed, "quiet", lambda: None)  # of the whole process
    monkeypatch.setitem(speed.SECTIONS, "vision", (fails, ("vision_ratio",)))
    arguments = ["speed.py", "--device", "cpu", "--preset", "tiny", "--repeats", "1", "--out", str(path)]
    monkeypatch.setattr(sys, "argv", [*arguments, "--only", "vision, stage 1"])
    assert speed.main() == 1
    printed = capsys.readouterr().out
    assert "failed: vision [default]: OutOfMemoryError: CUDA out of memory" in printed
    assert "stage1_matmul_fraction" in printed
    monkeypatch.setattr(sys, "argv", [*arguments, "--only", "stage 1"])
    assert speed.main() == 0


@pytest.mark.parametrize("more", [("--options", "fast", "plain"), ("--only", "vision")])
def test_growth_refuses_what_it_would_not_measure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], more: tuple[str, ...]
) -> None:
    monkeypatch.setattr(sys, "argv", ["speed.py", "--device", "cpu", "--preset", "tiny", "--growth", *more])
    with pytest.raises(SystemExit) as stopped:
        speed.main()
    assert stopped.value.code == 2 and "one set of options" in capsys.readouterr().err


def test_time_is_looked_at_before_models_and_warm_runs(tmp_path: Path) -> None:
    made = made_bench(tmp_path / "r.json")
    made.deadline = time.monotonic() - 1
    calls: list[int] = []
    for late in (made.backbone, lambda: made.time("late", lambda: calls.append(1))):
        with pytest.raises(OutOfTime):
            late()
    assert not calls


def test_the_larger_of_both_peaks() -> None:
    assert Timing([1.0], 5.0, 9.0, 12.0).most_gib == 9.0 and Timing([1.0], 5.0).most_gib == 5.0
    assert Timing([1.0], None).most_gib is None
    assert Timing([1.0], 5.0, 9.0, 12.0).facts()["reserved_gib"] == 12.0


# ---------------------------------------------------------------------- growth


def test_growth_goes_on_where_it_was_cut_and_measures_the_shared_point_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, asked = tmp_path / "g.json", []

    def point(bench: Bench, sizes: Sizes, prompts: int, memory: str) -> dict[str, Any]:
        if len(asked) == 3:
            raise OutOfTime
        asked.append(speed_growth.key_of(sizes, prompts))
        peak = 10 + 0.1 * sizes.visual * sizes.group
        work = {"seconds": 2.0, "peak_gib": peak, "held_gib": 10.0, "above_gib": peak - 10, "operations": 7}
        return {"rollout": work, "commit": bench.results.commit}

    monkeypatch.setattr(speed_growth, "point", point)
    assert not speed_growth.measure(made_bench(path))
    kept = json.loads(path.read_text())
    assert len(kept["visual"]["inputs"]["points"]) == 2 and not kept["latents"]["inputs"]["complete"]
    before, asked[:] = list(asked), []
    assert speed_growth.measure(made_bench(path, "bbbbbbbbbbbb", resume=True))
    every = before + asked
    assert len(every) == len(set(every)) == 2 + 3 + 2 + 2 - 3  # the base is in all four
    found = json.loads(path.read_text())
    fits = found["visual"]["value"]
    assert fits["rollout, above_gib"]["exponent"] == 1.0 and fits["rollout, peak_gib"]["exponent"] < 0.5
    assert "several commits" in found["latents"]["inputs"]["note"]
    asked[:] = []
    assert not speed_growth.measure(made_bench(path, "cccccccccccc"))  # all again, and cut off: the others stay
    found = json.loads(path.read_text())
    assert len(asked) == 3 and all(found[series]["inputs"]["complete"] for series in speed_growth.SMALL_SERIES)
    assert [each["commit"][0] for each in found["latents"]["inputs"]["points"]] == ["c", "b", "c"]


def test_points_that_were_not_counted_are_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a CPU from before operations were counted; nothing is drawn where nothing fitted."""
    path, asked, work = tmp_path / "g.json", [], {"seconds": 2.0}

    def point(bench: Bench, sizes: Sizes, prompts: int, memory: str) -> dict[str, Any]:
        asked.append(speed_growth.key_of(sizes, prompts))
        return {"rollout": dict(work), "commit": bench.results.commit}

    monkeypatch.setattr(speed_growth, "point", point)
    assert speed_growth.measure(made_bench(path))
    once = list(asked)
    work["operations"] = 7
    assert speed_growth.measure(made_bench(path, resume=True)) and asked == 2 * once
    assert speed_growth.measure(made_bench(path, resume=True)) and asked == 2 * once
    content = json.loads(path.read_text())
    for points in (content[series]["inputs"]["points"] for series in speed_growth.SMALL_SERIES):
        for each in points:
            each["rollout"] = {"seconds": None, "error": "does not fit"}
    path.write_text(json.dumps(content))
    speed_growth.draw(path, tmp_path / "g.svg")
    assert not (tmp_path / "g.svg").exists()


def test_growth_may_begin_without_latents(tmp_path: Path) -> None:
    made = made_bench(tmp_path / "g.json")
    assert "ReaLVR" not in speed_growth.point(made, replace(SMALL, latents=0), 1, "cached")
    assert speed_growth.point(made, SMALL, 1, "cached")["ReaLVR"]["seconds"] > 0


def test_growth_goes_on_where_inputs_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(*given: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(speed_growth, "cut", cut)
    made = made_bench(tmp_path / "g.json")
    found = speed_growth.point(made, made.sizes, 1, "cached")
    assert found["ReaLVR"]["error"] == "does not fit" and found["rollout"]["seconds"] > 0


def test_help_tells_what_is_kept_and_tried() -> None:
    script = Path(__file__).parents[1] / "benchmarks" / "speed.py"
    environment = {"PYTHONPATH": str(script.parents[1] / "src"), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, str(script), "--help"], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    for said in ("18 minutes or more", "--lora-microbatch", "--memory", "--ready", "kept and added to", "failures"):
        assert said in done.stdout
