"""The speed benchmark: what it divides by is the baseline it names, both sides compute the same loss, and every name of
docs/speed.md is measured. Times of a tiny model on a CPU mean nothing and are not looked at."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import json
import math
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import naive_stage2 as naive
import speed
import speed_baseline
import speed_growth
import speed_kit
import speed_passes
from realvr.backbone.automatic import Where
from realvr.backbone.backbone import Backbone
from realvr.training import gradients as gradients_module
from speed_kit import Bench, OutOfTime, about, flops, step_bytes, timed
from speed_options import CHOICES, SETTINGS, parse_options
from speed_results import Results, Timing
from speed_sizes import SMALL

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
UNCHANGED = (
    "run _add_policy _add_evidence _completion_loss _replay _credit _regenerate _states_before _readout _ids _pass "
    "_see _positions"
)
DIGEST = "feb2bbdf07e0399c5c4f55f51a0a30acfbe2acd3a71de8d1f0d2494f1028c613"


def bench(tmp_path: Path, dtype: torch.dtype = torch.float64, preset: str = "tiny:qwen2.5-vl") -> Bench:
    results = Results(tmp_path / "speed.json", about(SMALL, preset, CPU, dtype, 1), resume=False)
    return Bench(preset, CPU, dtype, SMALL, 1, time.monotonic() + 600, results)


# ---------------------------------------------------------------------- the baseline


def test_the_schedule_of_the_baseline_is_that_of_the_commit_it_names() -> None:
    """The functions that decide which passes run, as they are written at f48efcc. A change here changes every ratio:
    measure again, or keep a copy of the old file."""
    text = "".join(inspect.getsource(getattr(naive.Naive, name)) for name in UNCHANGED.split())
    assert hashlib.sha256(text.encode()).hexdigest() == DIGEST
    assert naive.Options().credit == "paper"


def at_commit(tmp_path: Path) -> ModuleType:
    shown = subprocess.run(
        ["git", "-C", str(ROOT), "show", "f48efcc:reference/naive_stage2.py"], capture_output=True, text=True
    )
    if shown.returncode:
        pytest.skip("the history of the repository is not here")
    path = tmp_path / "naive_f48efcc.py"
    path.write_text(shown.stdout)
    spec = importlib.util.spec_from_file_location("naive_f48efcc", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["naive_f48efcc"] = module
    spec.loader.exec_module(module)
    return module


def gradients(backbone: Backbone, run: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    found = run()
    grads = {name: p.grad for name, p in backbone.model.named_parameters() if p.grad is not None}
    backbone.model.zero_grad(set_to_none=True)
    return found, grads


def test_baseline_commit_and_package_agree_on_the_same_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss, gradients and number of passes: the reference of today, that of f48efcc, and our schedule."""
    made = bench(tmp_path)
    backbone = made.backbone()
    (batch,) = speed_passes.cut(made, 1, 1)
    given = speed_baseline.examples(backbone, batch, tower=True)
    old = at_commit(tmp_path)
    with speed_baseline.stock(backbone, checkpointed=True):
        today, grads = gradients(backbone, lambda: speed_baseline.reading(backbone).run(given, backward=True))
        monkeypatch.setattr(speed_baseline, "naive", old)
        then, before = gradients(backbone, lambda: speed_baseline.reading(backbone).run(given, backward=True))
    assert torch.equal(today.loss, then.loss) and today.passes == then.passes
    assert grads.keys() == before.keys() and all(torch.equal(grads[name], before[name]) for name in grads)
    sizes = made.sizes
    assert today.passes == sizes.group + sizes.latents + len(given[0].answers)

    from realvr.training.method import Step
    from realvr.training.methods.realvr import ReaLVR, ReaLVRConfig

    def ours() -> torch.Tensor:
        loss, _ = Step(ReaLVR(backbone, ReaLVRConfig(type="realvr", memory="cached")))(batch)
        loss.backward()
        return loss.detach()

    loss, found = gradients(backbone, ours)
    assert float((loss - today.loss).abs()) < 1e-6 * float(today.loss.abs())  # stock eager attention has float32 in it
    assert found.keys() == grads.keys()
    gap = sum(float((found[name] - grads[name]).pow(2).sum()) for name in grads)
    assert math.sqrt(gap) < 1e-5 * math.sqrt(sum(float(g.pow(2).sum()) for g in grads.values()))


def test_the_stock_model_is_left_as_it_was(tmp_path: Path) -> None:
    made = bench(tmp_path)
    backbone = made.backbone()
    before = backbone.model.config.text_config._attn_implementation
    with speed_baseline.stock(backbone, checkpointed=True) as model:
        assert model.config.text_config._attn_implementation == "sdpa"
        assert all(layer.training and layer.gradient_checkpointing for layer in backbone.decoder.layers)
    assert backbone.model.config.text_config._attn_implementation == before
    assert not any(layer.training or layer.gradient_checkpointing for layer in backbone.decoder.layers)


def test_the_baseline_runs_through_stock_layers_whatever_is_switched_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradients_module, "LEAST", 0)
    made = bench(tmp_path)
    made.options = parse_options("fast", CPU)
    backbone = made.switched().backbone
    ours = [module for module in backbone.model.modules() if isinstance(module, gradients_module.DeferredLinear)]
    assert len(ours) > 10 and backbone.fused_layers
    with speed_baseline.stock(backbone):
        assert {type(module) for module in ours} == {torch.nn.Linear} and not backbone.fused_layers
    assert backbone.fused_layers
    assert {type(module) for module in ours} == {gradients_module.DeferredLinear}


# ---------------------------------------------------------------------- options


def test_sets_of_options_and_their_changes() -> None:
    plain, fast = parse_options("plain", CPU), parse_options("fast", CPU)
    assert all(plain.facts()[name] == values[0] for name, values in CHOICES.items())
    assert fast.decode == "static" and parse_options("fast", torch.device("cuda")).decode == "graph"
    assert all(fast.facts()[name] == values[-1] for name, values in CHOICES.items() if name != "decode")
    changed = parse_options("fast:decode=off,packed=mask", CPU)
    assert (changed.decode, changed.packed, changed.gradients) == ("off", "mask", fast.gradients)
    for name in ("split_attention", "recorded_span"):
        assert [each.method(1)[name] for each in (plain, fast)] == [False, True]
    with pytest.raises(SystemExit, match="a set is one of plain, default, fast"):
        parse_options("quick", CPU)
    with pytest.raises(SystemExit, match="no such change as decode=warp; there are decode=off|static"):
        parse_options("fast:decode=warp", CPU)


@pytest.mark.parametrize(
    ("family", "on"),
    [
        ("qwen2.5-vl", {"packed", "layers", "replay", "span"}),
        ("gemma3", {"layers", "replay", "span"}),  # its images are seen both ways: packed rows keep their mask
        ("qwen3-vl-moe", set()),
    ],
)
def test_the_default_set_is_what_the_package_switches_on_for_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, on: set[str]
) -> None:
    of = Where.of

    def on_a_gpu(found: Backbone) -> Where:
        return replace(of(found), cuda=True, flash=True, merges=True, packs=not found.two_way_images)

    monkeypatch.setattr(Where, "of", on_a_gpu)
    made = bench(tmp_path, preset=f"tiny:{family}")
    made.name, made.options = "default", parse_options("default:lora=peft", CPU)
    assert [made.options.facts()[name] for name in sorted(SETTINGS)] == ["auto"] * 4
    made.backbone()
    facts = made.options.facts()
    assert {name for name in SETTINGS if facts[name] == CHOICES[name][-1]} == on
    assert {name for name in SETTINGS if facts[name] == CHOICES[name][0]} == SETTINGS.keys() - on
    made.results.put("vision_ratio", 1.0)
    for name in SETTINGS:
        assert f"{name}={facts[name]}" in made.results.inputs("vision_ratio")["switches"]


@pytest.mark.parametrize(("family", "way"), [("qwen3-vl", "kernels"), ("qwen3-vl-moe", "thin")])
def test_the_default_set_has_the_adapters_of_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, way: str
) -> None:
    of = Where.of
    monkeypatch.setattr(Where, "of", lambda found: replace(of(found), cuda=True, bfloat16=True))
    made = bench(tmp_path, preset=f"tiny:{family}")
    made.options = parse_options("default", CPU)
    assert made.options.adapters(4)["kernels"] == made.options.facts()["lora"] == "auto"
    made.backbone(2)
    assert made.options.facts()["lora"] == way and made.options.adapters(4)["kernels"] is (way == "kernels")


def test_readouts_of_a_release_count_once() -> None:
    """One completion measured: a replay of 1 s, eight latent steps of 2 s, four readouts of 3 s."""
    assert speed_baseline.repeated(1 + 8 * 2 + 4 * 3, 4 * 3, 8) == 8 * (1 + 8 * 2) + 4 * 3


def test_cudnn_attention_comes_back_as_it_was() -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    with speed_baseline.cudnn_attention(not before):
        assert torch.backends.cuda.cudnn_sdp_enabled() is not before
    assert torch.backends.cuda.cudnn_sdp_enabled() is before


def test_options_are_in_force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients_module, "LEAST", 0)
    made = bench(tmp_path)
    plain = made.switched()
    assert plain.fast is None and plain.deferral is None and not plain.backbone.fast_vision
    assert not plain.backbone.fused_layers
    made.drop()
    made.options = parse_options("fast", CPU)
    fast = made.switched(rank=2)
    assert fast.fast is not None and fast.backbone.fast_vision and fast.backbone.fused_layers
    adapted = {type(module).__name__ for module in fast.backbone.model.modules() if hasattr(module, "lora_A")}
    made.drop()
    made.options = parse_options("fast:lora=peft", CPU)
    thick = {type(m).__name__ for m in made.switched(rank=2).backbone.model.modules() if hasattr(m, "lora_A")}
    assert (adapted, thick) == ({"ThinLinear"}, {"Linear"})


# ---------------------------------------------------------------------- clocks, floors, fits, files


def test_what_a_step_must_read(tmp_path: Path) -> None:
    backbone = bench(tmp_path).backbone()
    config = backbone.model.config.text_config
    layers = sum(p.numel() for p in backbone.decoder.layers.parameters()) * 8
    head = config.hidden_size // config.num_attention_heads
    columns = 100 * 2 * config.num_key_value_heads * head * config.num_hidden_layers * 8
    assert step_bytes(backbone, 1, 100, head=False) == layers + columns
    assert step_bytes(backbone, 1, 100, head=True) == layers + columns + backbone.model.lm_head.weight.numel() * 8


def test_the_clock_takes_medians_of_warm_runs_and_stops_in_time() -> None:
    calls: list[float] = []
    timing = timed(lambda: calls.append(time.sleep(0.01 if calls else 0.2) or 0.0), CPU, 5, time.monotonic() + 60)
    assert len(calls) == 6 and len(timing.each) == 5 and 0.01 <= timing.seconds < 0.2
    assert Timing([1.0, 9.0, 2.0], None).seconds == 2.0
    with pytest.raises(OutOfTime):
        timed(lambda: None, CPU, 5, time.monotonic() - 1)


def test_quick_runs_are_repeated_more_often_and_their_spread_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"now": 0.0, "step": 0.5}
    monkeypatch.setattr(speed_kit.time, "perf_counter", lambda: clock["now"])

    def run() -> None:
        clock["now"] += clock["step"]

    late = time.monotonic() + 60
    assert len(timed(run, CPU, 5, late, quick=15).each) == 15 and len(timed(run, CPU, 20, late, quick=15).each) == 20
    clock["step"] = 1.5
    assert len(timed(run, CPU, 5, late, quick=15).each) == 5
    assert Timing([3.0, 1.0, 9.0], None).spread == (1.0, 3.0, 9.0)


def test_a_first_run_may_do_something_else_too() -> None:
    calls: list[str] = []
    timed(lambda: calls.append("run"), CPU, 2, time.monotonic() + 60, 1, lambda: calls.append("first"))
    assert calls == ["first", "run", "run"]


def test_fits_find_the_exponent() -> None:
    sizes = (128, 512, 2048, 8192)
    fitted = speed_growth.fit(sizes, [3e-6 * x**1.7 for x in sizes])
    assert fitted == {"exponent": 1.7, "residual": 0.0, "last": 1.7}
    fixed = speed_growth.fit(sizes, [1 + 1e-8 * x**2 for x in sizes])
    assert fixed is not None and fixed["exponent"] < 0.2 and fixed["last"] > fixed["exponent"] and fixed["residual"] > 0
    assert speed_growth.fit((0, 8), (1.0, 2.0)) is None


def test_every_name_of_the_page_has_a_section_and_its_target() -> None:
    text = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| `(\w+)` \|[^|]*\|[^|]*\| ([≥≤] [\d.]+) \|", text, re.MULTILINE))
    signs = {">=": "≥", "<=": "≤"}
    assert {name: f"{signs[sign]} {value:g}" for name, (sign, value) in speed.TARGETS.items()} == {
        name: f"{target[0]} {float(target[2:]):g}" for name, target in listed.items()
    }
    measured = {name for _, names in speed.SECTIONS.values() for name in names}
    assert set(speed.TARGETS) <= measured


def test_what_the_page_says_was_measured_is_in_the_file() -> None:
    """And everything in the file that has a target is on the page, rounded."""
    text = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
    now = dict(re.findall(r"^\| `(\w+)` \|[^|]*\| ([^|]*) \| [≥≤] [\d.]+ \|", text, re.MULTILINE))
    entries = json.loads((ROOT / "benchmarks" / "results" / "h200-qwen2.5-vl-7b.json").read_text(encoding="utf-8"))
    assert set(now) == set(speed.TARGETS)
    for name, said in now.items():
        number = said.replace("*", "").split(" ")[0]
        if name not in entries:
            assert number == "–", name
            continue
        digits = len(number.partition(".")[2])
        assert f"{entries[name]['value']:.{digits}f}" == number, name


def test_other_figures_of_the_ratios_are_those_of_the_file() -> None:
    """What the README opens with, and the modes that recompute as the baseline does."""
    entries = json.loads((ROOT / "benchmarks" / "results" / "h200-qwen2.5-vl-7b.json").read_text(encoding="utf-8"))
    paper, release = (entries[f"train_part_ratio_{kind}"] for kind in ("paper", "release"))
    ours, theirs = paper["inputs"]["seconds_per_prompt"], paper["inputs"]["seconds_measured"]
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"take {ours:.2f} s a prompt, a naive implementation of the paper's schedule {theirs:.1f} s" in readme
    tries = {(t["memory"], t["microbatch"]): t for t in entries["train_part_tries"]["inputs"]["tries"]}
    modes = [tries[memory, 8]["seconds"] / 8 for memory in ("checkpointed-prefill", "checkpointed")]
    page = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
    some, most = (paper["value"] * ours / each for each in modes)
    assert f"{some:.1f} and {most:.1f} times as fast as *paper*" in page
    some, most = (release["value"] * ours / each for each in modes)
    assert f"{some:.0f} and {most:.0f} times as fast as *release*" in page
    tower = entries["vision_ratio"]["inputs"]["seconds"]
    assert f"`train_part_ratio_release` would be {release['value'] * ours / (ours + tower):.0f}." in page


# ---------------------------------------------------------------------- the script


def script(*options: str, **variables: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"} | variables
    command = [sys.executable, str(ROOT / "benchmarks" / "speed.py"), *options]
    done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_whole_script_runs_on_a_tiny_model(tmp_path: Path) -> None:
    path = tmp_path / "tiny.json"
    tiny = ("--device", "cpu", "--preset", "tiny", "--repeats", "1", "--out", str(path))
    printed = script(*tiny, "--minutes", "0.0001")
    assert "not measured: short passes" in printed
    printed = script(*tiny, "--resume", "--options", "fast", REALVR_COMMIT="0123456789ab")
    assert "not measured" not in printed
    found = json.loads(path.read_text())
    names = {name.replace("_8", f"_{SMALL.prompts}") if name.endswith("_8") else name for name in speed.TARGETS}
    assert names <= found.keys()
    for name in names - {"lora_peak_gib"}:  # no GPU, no peak
        assert math.isfinite(found[name]["value"]) and found[name]["inputs"], name
    assert found["loss_gap"]["value"] < 1e-4
    for name in ("evidence_overhead_1_lora", "evidence_overhead_1_full"):
        inputs = found[name]["inputs"]
        spread = inputs["realvr_spread"]
        assert inputs["realvr_repeats"] == 15 and spread["min"] <= spread["median"] <= spread["max"]
        assert found[name]["value"] == pytest.approx(spread["median"] / inputs["lvr_rl_spread"]["median"] - 1, rel=1e-3)
    paper, release = (found[f"train_part_ratio_{kind}"]["inputs"] for kind in ("paper", "release"))
    answers = 4
    assert paper["passes"] == SMALL.group + SMALL.latents + answers and paper["multiplied_by"] == 1
    assert release["passes"] == SMALL.group * (1 + SMALL.latents) + answers and release["multiplied_by"] == SMALL.group
    assert found["prefill_matmul_fraction"]["inputs"]["tokens"] == pytest.approx(SMALL.visual + SMALL.text, abs=12)
    assert paper["baseline_matmul_fraction"] > 0 and found["vision_ratio"]["inputs"]["commit"] == "0123456789ab"
    assert set(paper["same_mode_ratios"]) == {"checkpointed-prefill", "checkpointed"} and paper["memory"] == "cached"
    step = found["step_ratio_release"]["inputs"]
    assert step["baseline_matmul_fraction"] == release["baseline_matmul_fraction"] > 0
    assert step["text_tokens"] == found["rl_step_seconds"]["inputs"]["text_tokens"] and "note" not in step
    assert found["decode_bandwidth_fraction"]["inputs"]["counts"]["eager"] > 0
    parts = found["rl_step_seconds"]["inputs"]["parts"]
    assert set(parts) == {"encode", "rollout", "passes", "optimizer"} and all(value > 0 for value in parts.values())
    assert found["about"]["gpu"] is None and torch.__version__.startswith(found["about"]["versions"]["torch"])


@pytest.mark.slow
def test_options_stand_side_by_side(tmp_path: Path) -> None:
    path = tmp_path / "sets.json"
    tiny = ("--device", "cpu", "--preset", "tiny", "--repeats", "1", "--out", str(path))
    printed = script(*tiny, "--only", "short passes", "--options", "fast", "plain", "fast:decode=off")
    assert re.search(r"^decode_bandwidth_fraction +\S+ +\S+ +\S+$", printed, re.MULTILINE)
    found = json.loads(path.read_text())
    assert set(found["beside"]) == {"plain", "fast:decode=off"} and set(found["about"]["options"]) >= {"fast", "plain"}
    assert "counts" in found["decode_bandwidth_fraction"]["inputs"]
    assert "counts" not in found["beside"]["plain"]["decode_bandwidth_fraction"]["inputs"]
    for part in (found, *found["beside"].values()):
        assert part["decode_logp_gap"]["value"] < 1e-4


@pytest.mark.slow
def test_growth_is_fitted_and_drawn(tmp_path: Path) -> None:
    path = tmp_path / "growth.json"
    script("--growth", "--device", "cpu", "--preset", "tiny", "--repeats", "1", "--out", str(path))
    found = json.loads(path.read_text())
    for series, values in speed_growth.SMALL_SERIES.items():
        points = found[series]["inputs"]["points"]
        assert [point[series] for point in points] == list(values)
        assert all("ReaLVR" in point for point in points if point.get("latents") != 0)
        assert "exponent" in found[series]["value"]["rollout, seconds"]
    figure = (tmp_path / "growth.svg").read_text()
    assert "<svg" in figure and all(figure.count(f"<!-- {unit} -->") == 1 for unit, _ in speed_growth.SHOWN.values())


def test_operations_of_attention_are_those_that_torch_counts() -> None:
    """With fewer heads of keys than of queries, which this torch counts itself; packed rows, by hand."""
    from torch.utils import flop_counter

    import speed_flops

    query, key = torch.empty(2, 8, 5, 16), torch.empty(2, 4, 7, 16)
    forward = flop_counter.sdpa_flop_count(query.shape, key.shape, key.shape)
    backward = flop_counter.sdpa_backward_flop_count(query.shape, query.shape, key.shape, key.shape)
    formulas = speed_flops.formulas()
    aten = torch.ops.aten
    assert formulas[aten._scaled_dot_product_flash_attention](query, key, key) == forward
    assert formulas[aten._scaled_dot_product_flash_attention_backward](query, query, key, key) == backward
    assert formulas[aten._scaled_dot_product_flash_attention_for_cpu](query, key, key) == forward
    assert formulas[aten._scaled_dot_product_flash_attention_for_cpu_backward](query, query, key, key) == backward
    packed, ends = torch.empty(9, 8, 16), torch.tensor([0, 4, 9])
    by_hand = 2 * 2 * 8 * (4 * 4 + 5 * 5) * 16
    assert formulas[aten._flash_attention_forward](packed, packed, packed, ends, ends) == by_hand


def test_operations_of_grouped_products() -> None:
    """Three groups of 16 rows, one of them empty: as many operations as one product of all rows, and backward two."""
    rows = torch.randn(16, 32, requires_grad=True)
    weights = torch.randn(3, 32, 24, requires_grad=True)
    ends = torch.tensor([5, 5, 16], dtype=torch.int32)
    assert flops(lambda: torch._grouped_mm(rows, weights, offs=ends)) == 2 * 16 * 32 * 24
    ones = torch.ones(16, 24)
    assert flops(lambda: torch._grouped_mm(rows, weights, offs=ends).backward(ones)) == 3 * 2 * 16 * 32 * 24
    stacked = torch.randn(3, 8, 32)
    assert flops(lambda: torch._grouped_mm(stacked, weights)) == 3 * 2 * 8 * 32 * 24


def test_a_mixture_of_experts_counts_what_its_tokens_pass_through(tmp_path: Path) -> None:
    """Two experts a token, three matrices each: what a dense MLP of that width would count."""
    made = bench(tmp_path, torch.float32, "tiny:qwen3-vl-moe")
    mlp = made.backbone().decoder.layers[0].mlp
    text = made.backbone().model.config.text_config
    states = torch.randn(1, 9, text.hidden_size, dtype=made.dtype)
    expected = 2 * 9 * text.num_experts_per_tok * 3 * text.hidden_size * text.moe_intermediate_size
    router = 2 * 9 * text.hidden_size * text.num_experts
    with torch.no_grad():
        assert flops(lambda: mlp(states)) == expected + router
