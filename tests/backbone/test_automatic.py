"""What ``auto`` stands for: a table of places, real tiny models, and flags on a command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from realvr.backbone import Backbone, flash_checks, packed_attention
from realvr.backbone.automatic import TITLES, Where, announcement, is_on, spelled_out
from realvr.errors import UserError
from realvr.training.engine.placing import fill

H200 = Where(cuda=True, flash=True, dense=True, whole=True)
ALL = set(TITLES)
ANY_WIDTH = ("fused_layers", "recorded_span")


def on(where: Where) -> set[str]:
    return {name for name in TITLES if where.takes(name)}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ALL),
        ({"cuda": False}, set()),
        ({"cuda": False, "flash": False, "packs": False}, set()),
        ({"dense": False}, set()),
        ({"whole": False}, {"kernels"}),
        ({"whole": False, "dense": False}, set()),
        ({"whole": False, "bfloat16": False}, set()),
        ({"bfloat16": False}, ALL - {"kernels"}),  # float16
        ({"flash": False, "packs": False, "bfloat16": False}, set(ANY_WIDTH)),  # float32 on a GPU
        ({"flash": False}, {*ANY_WIDTH, "kernels"}),
        ({"packs": False}, ALL - {"variable_length"}),  # images attend both ways
    ],
)
def test_where_fast_paths_are_on_by_themselves(changes: dict[str, bool], expected: set[str]) -> None:
    assert on(replace(H200, **changes)) == expected


@pytest.mark.parametrize("name", TITLES)
def test_what_is_said_wins(name: str) -> None:
    nowhere = Where(cuda=False, flash=False, dense=False, whole=False, packs=False, bfloat16=False)
    for where in (H200, nowhere):
        assert where.settle(name, True) is True and where.settle(name, False) is False
    assert (H200.settle(name, "auto"), nowhere.settle(name, "auto")) == (True, False)
    with pytest.raises(UserError, match=f"{name} is 'fast': it is true, false or auto"):
        H200.settle(name, "fast")  # type: ignore[arg-type]


def test_auto_is_no_bool() -> None:
    assert is_on(True) is True and is_on(False) is False
    with pytest.raises(ValueError, match="not settled"):
        is_on("auto")


def test_on_a_cpu_everything_is_off(backbone: Backbone, family: str) -> None:
    where = Where.of(backbone)
    assert on(where) == set() and not where.cuda
    assert where.dense == (family != "qwen3-vl-moe") and where.whole


def test_a_loaded_model_is_on_its_place(checkpoint: Path) -> None:
    for fused, expected in (("auto", False), (True, True), (False, False)):
        assert Backbone.load(checkpoint, device="cpu", fused_layers=fused).fused_layers is expected
    with pytest.raises(UserError, match="fused_layers is 'yes'"):
        Backbone.load(checkpoint, device="cpu", fused_layers="yes")
    cpu = torch.device("cpu")
    assert not Backbone.load(checkpoint, place=lambda model, weights: fill(model, weights, cpu)).whole


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Where]:
    """Where a model would be whose tensors say that they are on an H200, and that flash attention is there in 16
    bits."""

    def find(backbone: Backbone, dtype: torch.dtype = torch.bfloat16, wrong: str = "", **changes: Any) -> Where:
        facts = {
            "device": torch.device("cuda", 0),
            "devices": [torch.device("cuda", 0)],
            "dtype": dtype,
            "decoder": backbone.decoder,
            "whole": True,
            "two_way_images": backbone.two_way_images,
        }

        def empty(*shape: int, dtype: torch.dtype, device: torch.device) -> Any:
            return SimpleNamespace(shape=shape, dtype=dtype, device=device, is_cuda=device.type == "cuda")

        with monkeypatch.context() as changed:
            changed.setattr(torch, "empty", empty)
            changed.setattr(packed_attention, "_recent", lambda device: True)
            changed.setattr(packed_attention, "_varlen", lambda: (empty, frozenset()))
            for name in ("merges", "packs"):
                changed.setattr(flash_checks, name, lambda query, name=name: name != wrong)
            return Where.of(SimpleNamespace(**facts | changes))  # type: ignore[arg-type]

    return find


def test_a_model_on_a_gpu(backbone: Backbone, family: str, pretended: Callable[..., Where]) -> None:
    moe, two_way = family == "qwen3-vl-moe", family == "gemma3"
    narrow = set() if moe else ALL - {"variable_length"} if two_way else ALL
    in_parts = set() if moe else {"kernels"}
    assert on(pretended(backbone)) == narrow and on(pretended(backbone, torch.float16)) == narrow - {"kernels"}
    assert on(pretended(backbone, torch.float32)) == (set() if moe else set(ANY_WIDTH))
    assert on(pretended(backbone, whole=False)) == in_parts
    assert on(pretended(backbone, devices=[torch.device("cuda", 0), torch.device("cuda", 1)])) == in_parts
    assert on(pretended(backbone, device=torch.device("cpu"))) == set()
    assert on(pretended(backbone, wrong="merges")) == narrow - {"split_attention"}
    assert on(pretended(backbone, wrong="packs")) == narrow - {"variable_length"}


def test_an_amd_gpu_is_none_of_those(
    backbone: Backbone, pretended: Callable[..., Where], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert on(pretended(backbone)) == set()


def test_what_a_run_says() -> None:
    assert announcement(["recorded_span", "fused_layers"]) == "fast paths: fused layers, recorded span"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("--split-attention", "--split-attention True"),
        ("--no-split-attention", "--split_attention False"),
        ("--method.no-recorded-span --x 1", "--method.recorded_span False --x 1"),
        ("--model.fused-layers --x", "--model.fused-layers True --x"),
        ("--model.fused_layers auto", "--model.fused_layers auto"),
        ("--model.fused_layers=false", "--model.fused_layers False"),
        ("--variable-length TRUE --x true", "--variable-length True --x true"),
        ("--recorded-span off --x off", "--recorded-span False --x off"),
        ("--recorded-span On", "--recorded-span True"),
        ("--method.split_attention=no", "--method.split_attention False"),
        ("--fused-layers=YES --x", "--fused-layers True --x"),
        ("--variable-length maybe", "--variable-length maybe"),
        ("--model.tiles True --fast", "--model.tiles True --fast"),
    ],
)
def test_flags_without_a_value(given: str, meant: str) -> None:
    assert spelled_out(given.split()) == meant.split()
    assert spelled_out(spelled_out(given.split())) == meant.split()


def test_flags_before_what_belongs_to_none() -> None:
    assert spelled_out(["--fused-layers", "runs/a"], free=True) == ["--fused-layers", "True", "runs/a"]
    assert spelled_out(["--fused-layers", "auto", "runs/a"], free=True) == ["--fused-layers", "auto", "runs/a"]
    assert spelled_out(["--fused-layers", "off", "runs/a"], free=True) == ["--fused-layers", "False", "runs/a"]
    assert spelled_out(["--fused-layers", "office"], free=True) == ["--fused-layers", "True", "office"]
    assert spelled_out(["runs/a", "--no-fused-layers"], free=True) == ["runs/a", "--fused_layers", "False"]
