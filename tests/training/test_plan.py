"""``realvr plan``: what it prints and refuses, and its parts against other sources."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from realvr.backbone.fused_layers import fuse
from realvr.cli import main
from realvr.planning.gpus import known_gpus
from realvr.planning.plan import _model, _shapes, _shapes_of
from realvr.planning.settings import PlanSettings
from realvr.training.adapters import Adapters
from realvr.training.engine.whole import estimate_whole
from realvr.training.estimate import Setup, Workload, decoder_of, estimate, weights_of, with_adapters
from realvr.training.estimate.peak import GIB, SECOND, UNSHARDED, held_bytes
from realvr.training.optimizer import build_optimizer
from realvr.training.packaged import FOLDER
from realvr.training.sections import LoraSettings, OptimSettings
from realvr.zoo.presets import PRESETS, preset_config

BACKBONE = ["--backbone", "InternVL", "--gpus", "8"]  # a prefix; the quickest to build


def asked(capsys: pytest.CaptureFixture[str], *args: str) -> list[dict[str, Any]]:
    assert main(["plan", *args, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(["plan", *args]) == 2
    return capsys.readouterr().err


# ---------------------------------------------------------------------- parts, against real tensors


@pytest.mark.parametrize("rank", [0, 4])
def test_what_is_held_against_real_tensors(fresh: Any, rank: int) -> None:
    """Weights, gradients and states of a model that has made a step."""
    Adapters(fresh, LoraSettings(rank=rank), markers=bool(rank))
    model = fresh.model.to(torch.bfloat16) if not rank else fresh.model
    optimizer = build_optimizer(model, OptimSettings())
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()

    def size(tensors: Any) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    states = [
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    ]
    real = {
        "frozen weights": size(p for p in model.parameters() if not p.requires_grad),
        "trained weights": size(trained),
        "gradients": size(p.grad for p in trained),
        "optimizer": size(value for value in states if value.dim()),
    }
    assert held_bytes(weights_of(model), Setup()) == real == estimate_whole(model, OptimSettings())


def test_adapters_are_those_that_peft_makes(fresh: Any) -> None:
    settings = LoraSettings(rank=4)
    model = fresh.model.to(torch.bfloat16)
    expected = with_adapters(model, 4, settings.targets, markers=True)
    Adapters(fresh, settings, markers=True)
    assert held_bytes(weights_of(fresh.model), Setup()) == held_bytes(expected, Setup())


@pytest.mark.parametrize("world", [2, 3, 8])
def test_shards_against_fully_shard(world: int) -> None:
    """The fullest rank of FSDP2 holds the first chunk of every parameter, experts one below the other; ZeRO-3 cuts the
    flat numbers."""
    layer = nn.Linear(7, 5)
    layer.experts = nn.Parameter(torch.zeros(3, 4, 6))
    module = nn.ModuleDict({"language_model": nn.ModuleDict({"layers": nn.ModuleList([layer])})})
    rows = [p.flatten(0, 1) if p.dim() == 3 else p for p in module.parameters()]
    chunks = sum(torch.chunk(each, world)[0].numel() for each in rows)
    weights = weights_of(module)
    assert held_bytes(weights, Setup("fsdp2", world))["trained weights"] == 4 * chunks
    flat = sum(math.ceil(p.numel() / world) for p in module.parameters())
    assert held_bytes(weights, Setup("zero3", world))["trained weights"] == 4 * flat


def test_a_second_copy_of_gradients_exists(fresh: Any) -> None:
    """In Stage 2 from the second microbatch on, and unsharded under an engine that shards; never in Stage 1."""
    decoder, weights = decoder_of(fresh.model), weights_of(fresh.model, train_decoder=True)
    whole = held_bytes(weights, Setup())["gradients"]

    def copies(stage: Any, world: int = 1, microbatches: int = 1, engine: str = "ddp") -> float:
        work = Workload(stage, tokens=40, visual=16, answer=4, group=2, latents=2, microbatches=microbatches)
        found = estimate(decoder, weights, work, Setup(engine, world))
        parts = next(
            parts for name, parts in found.moments.items() if name in ("prompt, backward", "first layer, backward")
        )
        return (parts["gradients"] + parts.get(SECOND, 0) + parts.get(UNSHARDED, 0)) / whole

    assert copies("rl") < 1.3 < 1.9 < copies("rl", microbatches=2) < 2.3
    assert copies("sft", microbatches=2) < 1.3
    assert copies("rl", 64, engine="zero3") > 1


def test_fsdp2_hands_gradients_on_after_each_pass(capsys: pytest.CaptureFixture[str]) -> None:
    fsdp2, zero3 = (asked(capsys, *BACKBONE, "--gpu", "H100", "--engine", name)[0] for name in ("fsdp2", "zero3"))
    moment = "prompt, backward"
    assert zero3["moments_gib"][moment] > fsdp2["moments_gib"][moment] + 8


@pytest.mark.parametrize("gpus", ["1", "8"])
def test_zero3_holds_its_gradients_at_every_moment(gpus: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Four bytes of each of a rank's share and DeepSpeed's buffer, in a rollout too, where FSDP2 has none; the sums
    that are not cut yet come on top, on one GPU too."""
    asking = ["--backbone", "InternVL", "--gpus", gpus, "--gpu", "H200", "--engine"]
    (found,) = asked(capsys, *asking, "zero3")
    moments, bytes_held = found["moment_parts_gib"], 4 * found["trained_parameters"] / int(gpus) + 2 * 5e8
    for parts in moments.values():
        assert parts["gradients"] * GIB == pytest.approx(bytes_held, rel=1e-6)
    assert moments["prompt, backward"][UNSHARDED] * GIB == pytest.approx(2 * found["trained_parameters"], rel=0.1)
    (other,) = asked(capsys, *asking, "fsdp2")
    assert other["moment_parts_gib"]["rollout"]["gradients"] == 0


def test_autograd_sums_the_passes_of_a_weight_before_its_gradient() -> None:
    """Why that copy exists: ``.grad`` is touched once, after the first pass has gone backward too."""
    layer, events = nn.Linear(3, 3, bias=False), []
    layer.weight.register_post_accumulate_grad_hook(lambda _: events.append("gradient"))
    x = torch.ones(1, 3, requires_grad=True)
    for number in range(3):
        x = layer(x)
        x.register_hook(lambda _, number=number: events.append(f"pass {number}"))
    x.sum().backward()
    assert events == ["pass 2", "pass 1", "pass 0", "gradient"]


# ---------------------------------------------------------------------- the command


def test_numbers_of_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = asked(capsys, *BACKBONE, "--gpu", "A100-8")
    assert found["backbone"] == "InternVL3-8B" and found["gpu"]["name"] == "A100-80GB" and found["fits"]
    assert found["parameters"] == pytest.approx(PRESETS["InternVL3-8B"].parameters, rel=1e-3)
    assert sum(found["parts_gib"].values()) == pytest.approx(found["peak_gib"])
    assert found["room_gib"] == pytest.approx(79.1 * 0.92)
    trained = found["trained_parameters"]
    assert found["parts_gib"]["optimizer"] * GIB == pytest.approx(12 * trained / 8, rel=1e-3)
    assert found["communication_gb"]["gradients (reduce-scatter)"] * 1e9 == pytest.approx(11 * 2 * trained * 7 / 8)
    assert found["seconds"]["communication"] == pytest.approx(
        sum(found["communication_gb"].values()) * 1e9 / known_gpus()["A100-80GB"].link
    )
    (fewest,) = asked(capsys, "--backbone", "InternVL", "--gpus", str(found["smallest_gpus"]), "--gpu", "A100-80")
    assert fewest["fits"]
    (fewer,) = asked(capsys, "--backbone", "InternVL", "--gpus", str(found["smallest_gpus"] - 1), "--gpu", "A100-80")
    assert not fewer["fits"]


H200 = ["--backbone", "Qwen2.5", "--gpus", "1", "--gpu", "H200", "--engine", "ddp", "--batch", "8"]
MEASURED = Path(__file__).parents[2] / "benchmarks" / "results" / "h200-qwen2.5-vl-7b.json"


def test_times_are_lower_bounds_of_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """Passes of 8 prompts, and their rollout, on the GPU that the rates come from. The rates are older than these
    measurements. Shorter passes wait for the host, and take longer by more."""
    results = json.loads(MEASURED.read_text())
    timings = results["timings"]
    measured: dict[tuple[str, ...], float] = {
        ("8", "cached", "--no-evidence"): _timed(timings, "train part, LVR-RL, 8 prompts, cached, microbatches of 8"),
        ("8", "cached", "--evidence"): _timed(timings, "train part, ReaLVR, 8 prompts, cached, microbatches of 8"),
    }
    for tried in results["train_part_tries"]["inputs"]["tries"]:
        memory, _, share = tried["memory"].partition(" ")
        measured[str(tried["microbatch"]), memory, "--recompute", share or "1"] = tried["seconds"]
    assert len(measured) >= 8
    stock = ("8", "checkpointed-prefill")  # docs/speed.md, "Stage 2 at the 7B shape"
    measured |= {(*stock, "--no-evidence", "--plain"): 3.06, (*stock, "--evidence", "--plain"): 3.97}
    for (size, memory, *flags), seconds in measured.items():
        how = ["--answer-tokens", "64", "--microbatch", size, "--memory", memory, *flags]
        (found,) = asked(capsys, *H200, *how)
        assert 0.7 * seconds < found["seconds"]["passes"] < 1.01 * seconds, how
    alone = [*H200[:-1], "1", "--answer-tokens", "64", "--memory", "cached"]
    row = [*H200[:-2], "--stage", "sft", "--row-tokens", "4000"]
    one = "1 prompts, cached, microbatches of 1"
    shorter = [
        ([*alone, "--no-evidence"], _timed(timings, f"train part, LVR-RL, {one}")),
        (alone, _timed(timings, f"train part, ReaLVR, {one}")),
        (row, _timed(timings, "Stage 1, one row of 4010 tokens")),
        ([*row, "--plain"], 0.77),  # docs/speed.md
    ]
    for how, seconds in shorter:
        (found,) = asked(capsys, *how)
        assert seconds / 1.8 < found["seconds"]["passes"] < seconds, how


def _timed(timings: dict[str, dict[str, float]], name: str) -> float:
    return timings[f"{name} [fast]"]["seconds"]


@pytest.mark.parametrize("name", ["rl_step_seconds", "lora_step_seconds"])
def test_whole_steps_that_were_measured(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Peak memory is known to 8 %; rollout and whole time are lower bounds."""
    entry = json.loads(MEASURED.read_text())[name]
    inputs = entry["inputs"]
    how = ["--answer-tokens", str(inputs["answer"]), "--microbatch", str(inputs["microbatch"])]
    how += ["--memory", inputs["memory"], *(["--lora", str(inputs["rank"])] if inputs["rank"] else [])]
    (found,) = asked(capsys, *H200, *how)
    assert found["peak_gib"] == pytest.approx(max(inputs["peak_gib"], inputs["first_peak_gib"]), rel=0.08)
    assert 0.5 * inputs["parts"]["rollout"] < found["seconds"]["rollout"] < inputs["parts"]["rollout"]
    assert sum(found["seconds"].values()) < entry["value"]


@pytest.mark.parametrize("name", ["Qwen2.5-VL-7B", "Qwen3-VL-30B-A3B", "InternVL3-8B", "Gemma-3-12B"])
def test_fast_plans_the_layers_that_a_run_fuses(name: str) -> None:
    from transformers import AutoModelForImageTextToText

    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(preset_config(name), dtype=torch.bfloat16)
    fuse(model)
    for fused, right in ((True, decoder_of(model)), (False, decoder_of(_model(name)))):
        assert _shapes(name, 0, False, fused, True)[0] == right


def test_adapters_keep_copies_where_an_engine_gathers_them(capsys: pytest.CaptureFixture[str]) -> None:
    """Under ZeRO-3, whose hooks surround them, and nowhere else."""
    for engine, rank, narrow in (("ddp", 16, True), ("fsdp2", 16, True), ("zero3", 16, False), ("ddp", 0, False)):
        settings = PlanSettings(backbone="Qwen2.5-VL-7B", gpus=8, engine=engine, lora=rank)
        assert _shapes_of(settings, "Qwen2.5-VL-7B", known_gpus()["H200"])[0].narrow_adapters is narrow
    sizes = {}
    for engine in ("fsdp2", "zero3"):
        (found,) = asked(
            capsys, *BACKBONE, "--gpu", "H200", "--gpus", "8", "--lora", "--engine", engine, "--memory", "cached"
        )
        sizes[engine] = found["parts_gib"]["activations"]
    assert sizes["zero3"] > 1.2 * sizes["fsdp2"]


def test_fast_paths_are_planned_where_a_run_has_them(capsys: pytest.CaptureFixture[str]) -> None:
    (plain,), (fast,) = (asked(capsys, *H200, *flags) for flags in (["--plain"], []))
    assert "recorded span" not in plain["parts_gib"] and fast["parts_gib"]["recorded span"] > 0.2
    assert plain["fast_paths"] == [] and not plain["workload"]["split"] and fast["workload"]["split"]
    assert fast["fast_paths"] == ["fused_layers", "split_attention", "recorded_span"]
    assert plain["seconds"]["passes"] > 1.1 * fast["seconds"]["passes"]
    sharded, mixture, amd, again, text, first = (
        asked(capsys, *H200, *changed)[0]
        for changed in (
            ["--engine", "fsdp2"],
            ["--backbone", "Qwen3-VL-30B"],
            ["--gpu", "MI250X"],
            ["--memory", "checkpointed"],
            ["--no-evidence"],
            ["--stage", "sft"],
        )
    )
    for found in (sharded, mixture, amd):
        assert found["fast_paths"] == [] and not found["workload"]["split"] and not found["workload"]["recorded"]
    assert again["fast_paths"] == text["fast_paths"] == ["fused_layers", "split_attention"]
    assert first["fast_paths"] == ["fused_layers"] and not first["workload"]["recorded"]
    shown = []
    for flags in ([], ["--plain"]):
        main(["plan", *H200, *flags])
        shown.append("fast paths: fused layers, split attention, recorded span\n" in capsys.readouterr().out)
    assert shown == [True, False]


def test_a_recorded_span_that_does_not_fit_may_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    asking = ["--backbone", "Qwen2.5", "--gpus", "1", "--engine", "ddp", "--lora", "--microbatch", "1"]
    (fast,), (plain,) = (asked(capsys, *asking, "--gpu", "H200", *flags) for flags in ([], ["--plain"]))
    assert plain["peak_gib"] < fast["peak_gib"]
    between = (plain["peak_gib"] + fast["peak_gib"]) / 2 / 0.92
    (found,) = asked(capsys, *asking, "--gpu-memory", f"{between:.3f}")
    assert not found["fits"] and "--plain" in found["would_fit"]


def test_a_share_of_the_layers_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    """Between the two memory modes in memory and time; it is for Stage 2, and only where something is recomputed."""
    sizes = ["--answer-tokens", "64", "--microbatch", "4"]
    found = [
        asked(capsys, *H200, *sizes, *how)[0]
        for how in ([], ["--recompute", "0.5"], ["--recompute", "0.01"], ["--memory", "cached"])
    ]
    peaks, times = [each["peak_gib"] for each in found], [each["seconds"]["passes"] for each in found]
    assert peaks == sorted(peaks) and times == sorted(times, reverse=True)
    assert len(set(peaks)) == 4
    assert "--recompute 1" in found[1]["would_fit"]
    for share in ("0", "1.5", "-1"):
        assert "share of the layers" in refused(capsys, *H200, "--recompute", share)
    for other in (["--memory", "cached"], ["--stage", "sft"]):
        assert "--recompute is for Stage 2" in refused(capsys, *H200, "--recompute", "0.5", *other)


def test_what_does_not_fit_says_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = asked(capsys, *BACKBONE, "--gpu-memory", "80", "--engine", "ddp")
    assert not found["fits"] and found["seconds"] is None and found["smallest_gpus"] is None
    assert {"--engine fsdp2", "--engine zero3", "--lora 16"} == set(found["would_fit"])
    for flags in found["would_fit"]:  # and they do
        (other,) = asked(
            capsys, *BACKBONE, "--gpu-memory", "80", *(["--engine", "ddp"] if "lora" in flags else []), *flags.split()
        )
        assert other["fits"]
    assert main(["plan", *BACKBONE, "--gpu-memory", "80", "--engine", "ddp"]) == 0
    text = capsys.readouterr().out
    assert "it does NOT fit; no number of these GPUs does; what would: --engine fsdp2, or" in text


def test_static_buffers_are_counted_where_rollouts_have_them(capsys: pytest.CaptureFixture[str]) -> None:
    """``fast_decode: auto`` on a GPU: not with sharded engines, whose hooks cannot be recorded, nor in Stage 1."""
    short = [*BACKBONE, "--gpu-memory", "800", "--visual-tokens", "250", "--text-tokens", "4", "--latents", "2"]
    short += ["--answer-tokens", "60", "--group", "3"]
    columns = 512 + 3 * 64  # 250 + 4 + 4 of the prompt and the span, 60 of an answer
    text = preset_config("InternVL3-8B").text_config
    column = 2 * text.num_hidden_layers * text.num_key_value_heads * text.hidden_size // text.num_attention_heads * 2
    for engine, stage, expected in (("ddp", "rl", columns), ("fsdp2", "rl", 0), ("zero3", "rl", 0), ("ddp", "sft", 0)):
        (found,) = asked(capsys, *short, "--engine", engine, "--stage", stage)
        assert found["parts_gib"].get("static buffers", 0) * GIB == pytest.approx(expected * column)


def test_keys_and_values_and_every_moment_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """Also where the fullest moment is another one; two copies while the last tokens are decoded."""
    asking = [*BACKBONE, "--gpu", "H100", "--engine", "zero3"]
    (found,) = asked(capsys, *asking)
    assert found["moment"] != "rollout" and found["moments_gib"].keys() == found["moment_parts_gib"].keys()
    for name, parts in found["moment_parts_gib"].items():
        assert sum(parts.values()) == pytest.approx(found["moments_gib"][name])
    text = preset_config("InternVL3-8B").text_config
    column = 2 * text.num_hidden_layers * text.num_key_value_heads * text.hidden_size // text.num_attention_heads * 2
    size = 2 * (13 * 256 + 150 + 8 + 2 + 8 * 192) * column
    assert found["keys_and_values_gib"] * GIB == pytest.approx(size)
    assert main(["plan", *asking]) == 0
    printed = capsys.readouterr().out
    assert re.search(rf"^  keys and values, at most +{size / GIB:.2f} GiB$", printed, re.MULTILINE)
    assert "a step: at least about " in printed
    (first,) = asked(capsys, *asking, "--stage", "sft")
    assert first["keys_and_values_gib"] is None


def test_help_says_what_a_step_time_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    text = capsys.readouterr().out
    assert "The step time is a lower bound" in " ".join(text.split()) and "`" not in text


def test_memory_alone_is_counted_like_that_of_a_named_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """In GiB, and the text says so: torch reports 79.1 GiB for an H100 of 80 GB."""
    (named,) = asked(capsys, *BACKBONE, "--gpu", "H100")
    (alone,) = asked(capsys, *BACKBONE, "--gpu-memory", "79.1")
    assert alone["room_gib"] == named["room_gib"] == pytest.approx(79.1 * 0.92)
    assert main(["plan", *BACKBONE, "--gpu-memory", "79.1"]) == 0
    text = capsys.readouterr().out
    assert "x GPU of 79.1 GiB\n" in text and "GiB (79.1 GiB less 8% reserve)" in text


def test_lora_without_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = asked(capsys, *BACKBONE, "--gpu", "H100", "--lora", "--stage", "sft")
    assert found["lora"] == 16 and found["trained_parameters"] < found["parameters"] / 100
    assert "LoRA rank 4" in (main(["plan", *BACKBONE, "--gpu", "H100", "--lora", "4"]), capsys.readouterr().out)[1]


@pytest.mark.slow
def test_all_six_and_the_paper(capsys: pytest.CaptureFixture[str]) -> None:
    found = asked(
        capsys, "--backbone", "all", "--gpus", "512", "--gpu", "MI250X", "--engine", "zero3", "--stage", "sft"
    )
    assert [one["backbone"] for one in found] == list(PRESETS) and all(one["fits"] for one in found[:3])
    main(["plan", "--backbone", "all", "--gpus", "8", "--gpu-memory", "80"])
    assert len(capsys.readouterr().out.splitlines()) == 9
    paper = ["--backbone", "Qwen3-VL-235B", "--gpus", "1600", "--gpu", "MI250X", "--engine", "zero3"]
    (first,) = asked(capsys, *paper, "--stage", "sft")
    assert first["fits"] and first["parts_gib"]["optimizer"] == pytest.approx(235.1e9 * 12 / 1600 / GIB, rel=0.01)
    (second,) = asked(capsys, *paper)
    assert not second["fits"] and second["parts_gib"][UNSHARDED] > 400


@pytest.mark.parametrize(
    ("args", "engines"),
    [
        (["--gpus", "1", "--gpu", "H200", "--lora", "16"], ("fsdp2", "ddp")),
        (["--gpus", "1", "--gpu", "H200", "--engine", "ddp", "--memory", "checkpointed"], ("ddp",)),
        (["--gpus", "2", "--gpu", "H100", "--stage", "sft", "--lora", "16"], ("fsdp2", "ddp")),
    ],
)
def test_faster_settings_are_the_fastest_that_fit(
    capsys: pytest.CaptureFixture[str], args: list[str], engines: tuple[str, ...]
) -> None:
    """Every other way asked for by its flags: none that fits is faster, and what was named is what these flags give."""
    asking = ["--backbone", "Qwen2.5", "--batch", "4", *args]
    (found,) = asked(capsys, *asking)
    better, fitting = found["faster"], []
    ways = [
        ["--memory", "cached"],
        *(["--memory", "checkpointed-prefill", "--recompute", r] for r in ("1", "0.5", "0.25")),
    ]
    for engine in engines:
        for microbatch in {str(size) for size in (1, 2, 4) if 4 // int(found["gpus"]) % size == 0}:
            for way in ways[:2] if "sft" in args else ways:
                how = [*asking, "--engine", engine, "--microbatch", microbatch, *way]
                (other,) = asked(capsys, *how)
                if other["fits"]:
                    fitting.append((sum(other["seconds"].values()), other["peak_gib"]))
    assert better["seconds"] == pytest.approx(min(fitting)[0], rel=1e-3)
    (again,) = asked(capsys, *asking, *better["flags"].split())
    assert again["fits"] and again["faster"] is None
    assert (sum(again["seconds"].values()), again["peak_gib"]) == pytest.approx((better["seconds"], better["peak_gib"]))
    assert better["seconds"] < 0.9 * sum(found["seconds"].values())


def test_faster_settings_take_the_same_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    """Where no batch is named, its default follows the microbatch: another one then comes with the batch."""
    asking = ["--backbone", "Qwen2.5", "--gpus", "1", "--gpu", "H200", "--engine", "ddp", "--lora", "16"]
    asking += ["--microbatch", "8", "--memory", "checkpointed"]
    (found,) = asked(capsys, *asking)
    flags = found["faster"]["flags"].split()
    (other,) = asked(capsys, *asking, *flags)
    prompts = [each["workload"]["rows"] * each["workload"]["microbatches"] for each in (found, other)]
    assert "--microbatch" in flags and prompts == [8, 8]
    assert sum(other["seconds"].values()) == pytest.approx(found["faster"]["seconds"])


def test_nothing_faster_is_named_where_nothing_fits_or_no_time_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    for how in (["--gpu-memory", "141"], ["--gpu", "A100-40GB"]):
        (found,) = asked(capsys, "--backbone", "Qwen2.5", "--gpus", "1", "--engine", "ddp", "--batch", "4", *how)
        assert found["faster"] is None and (found["seconds"] is None or not found["fits"])


@pytest.mark.slow
def test_the_numbers_of_the_docs(capsys: pytest.CaptureFixture[str]) -> None:
    """The table of all six backbones, and the example, line by line."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "engines.md").read_text()
    paper = ["--backbone", "all", "--gpus", "512", "--gpu", "MI250X-GCD", "--engine", "zero3"]
    plans = [asked(capsys, *paper, "--stage", "sft"), asked(capsys, *paper)]
    plans.append(asked(capsys, "--backbone", "all", "--gpus", "8", "--gpu", "A100-80GB"))
    for first, second, third in zip(*plans, strict=True):
        row = [f"{first['peak_gib']:.1f}, {first['smallest_gpus']}", f"{second['peak_gib']:.1f}, "]
        row[1] += "yes" if second["fits"] else "**no**"
        row.append(f"{third['peak_gib']:.1f}, {'yes' if third['fits'] else 'no'}, {third['smallest_gpus']}")
        assert f"| {first['backbone']} | {' | '.join(row)} |\n" in page
    _, command, *shown = page[page.index("```text\n$ realvr plan") :].split("\n```")[0].splitlines()
    assert main(command.split()[2:]) == 0
    printed = capsys.readouterr().out
    assert all(line.removesuffix("…") in printed for line in shown) and len(shown) > 12


@pytest.mark.slow
def test_every_paper_config_fits_by_its_own_line(capsys: pytest.CaptureFixture[str]) -> None:
    """The command that its header names, on the paper's GPUs."""
    files = sorted((FOLDER / "paper").glob("*.yaml"))
    lines = [line.split()[3:] for file in files for line in file.read_text().splitlines() if "realvr plan --" in line]
    assert len(lines) == len(files) == 12
    for line in lines:
        (found,) = asked(capsys, *line)
        assert found["fits"], line


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--backbone", "Qwen3-VL", "--gpu", "H100"], "which of Qwen3-VL-8B, Qwen3-VL-30B-A3B, Qwen3-VL-235B-A22B?"),
        (["--backbone", "Gema-3", "--gpu", "H100"], "did you mean Gemma-3-12B?"),
        (["--backbone", "Gemma", "--gpu", "H300"], "did you mean H200?"),
        (["--backbone", "Gemma", "--gpu", "A100"], "which of A100-80GB, A100-40GB?"),
        (["--backbone", "Gemma"], "give either --gpu NAME or --gpu-memory GIB"),
        (["--backbone", "Gemma", "--gpu", "H100", "--gpu-memory", "80"], "give either"),
        (["--backbone", "Gemma", "--gpu-memory", "0"], "--gpu-memory is 0"),
        (["--backbone", "Gemma", "--gpu", "H100", "--gpus", "0"], "--gpus is 0: it is at least 1"),
        (["--backbone", "Gemma", "--gpu", "H100", "--lora", "0"], "a rank is at least 1"),
        (["--backbone", "Gemma", "--gpu", "H100", "--lora=0"], "a rank is at least 1"),
        (["--backbone", "Gemma", "--gpu", "H100", "--engine", "fsdp"], "neither a file nor the name of an engine"),
        (["--backbone", "Gemma", "--gpu", "H100", "--gpus", "8", "--batch", "12"], "take 8 or 16"),
        (["--backbone", "Gemma", "--gpu", "H100", "--reserve", "1"], "--reserve is 1"),
    ],
)
def test_bad_input(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    error = refused(capsys, *args)
    assert message in error and error.count("\n") == 1


def test_an_engine_file_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("distributed_type: FSDP\n")
    assert "this is a configuration of accelerate" in refused(capsys, *BACKBONE, "--gpu", "H100", "--engine", str(file))
    file.write_text("type: fsdp2\nreshard_after_forward: false\n")
    (kept,) = asked(capsys, *BACKBONE, "--gpu", "H100", "--engine", str(file))
    (freed,) = asked(capsys, *BACKBONE, "--gpu", "H100")
    assert kept["moments_gib"]["prompt, backward"] > freed["moments_gib"]["prompt, backward"] + 5


def test_every_gpu_names_its_source() -> None:
    assert list(known_gpus()) == ["H200", "H100", "A100-80GB", "A100-40GB", "MI250X-GCD", "B200"]
    for gpu in known_gpus().values():
        assert len(gpu.source) > 40 and gpu.memory > 30 and gpu.flops > 1e14 > gpu.bandwidth > gpu.link >= gpu.network
