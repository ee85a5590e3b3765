"""A model that a GPU has no room for is refused before its weights are read, with what would fit. The GPU is pretended:
its memory alone is looked at."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from plain_engine import PlainEngine
from realvr.backbone import Backbone
from realvr.errors import UserError
from realvr.training.configuration import KINDS
from realvr.training.engine.settings import DDPSettings, EngineSettings, FSDP2Settings
from realvr.training.memory import refuse_before_loading
from realvr.training.method import build
from stage_runs import configure

LORA = {"lora": {"rank": 4, "targets": ["q_proj", "down_proj"]}}


class OnGpu(PlainEngine):
    """Ranks with a GPU each."""

    device = torch.device("cuda", 0)

    def __init__(self, settings: EngineSettings, world: int = 1) -> None:
        super().__init__(settings=settings)
        self.world = world


def needed(model: Path, dtype: str, whole: bool = False, copy: bool = False) -> int:
    """Bytes by the loaded model: weights, gradients and two moments, with 32-bit masters for 16-bit weights."""
    backbone = Backbone.load(model, dtype=dtype, device="cpu")
    size = {"float32": 4, "bfloat16": 2}[dtype]
    frozen = sum(p.numel() for module in backbone.vision_modules() for p in module.parameters())
    every = sum(p.numel() for p in backbone.model.parameters())
    trained = every if whole else every - frozen
    states = 12 if size == 2 else 8
    return every * size * (2 if copy else 1) + trained * (size + states)


@pytest.mark.parametrize(
    ("kind", "dtype", "more"),
    [("sft", "float32", {}), ("rl", "bfloat16", {}), ("rl", "bfloat16", {"beta": 0.1}), ("base", "float32", {})],
)
def test_one_byte_too_little(
    kind: str, dtype: str, more: dict[str, Any], untrained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = configure(kind, untrained, Path("data"), Path("run"), model={"dtype": dtype}, **more)
    bytes_ = needed(untrained, dtype, whole=kind == "base", copy="beta" in more)
    for room, fits in ((bytes_, True), (bytes_ - 1, False)):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, r=room: SimpleNamespace(total_memory=r))
        said = refusal(raw, kind, OnGpu(DDPSettings()))
        assert (said is None) == fits, said


def refusal(raw: dict[str, Any], kind: str, engine: OnGpu) -> str | None:
    try:
        refuse_before_loading(engine, KINDS[kind].model_validate(raw))
    except UserError as error:
        return str(error)
    return None


def test_what_would_fit_is_named_and_does(untrained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = configure("rl", untrained, Path("data"), Path("run"))
    small = needed(untrained, "float32") * 3 // 4
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=small))
    said = refusal(raw, "rl", OnGpu(DDPSettings()))
    assert said is not None and said.startswith("this run cannot fit: weights, gradients and optimizer need 0.0 GiB")
    count = int(re.search(r"shard it over at least (\d+) GPUs \(--engine fsdp2", said)[1])  # type: ignore[index]
    assert "set lora.rank 16, or take a smaller model" in said
    assert refusal(raw, "rl", OnGpu(FSDP2Settings(), count)) is None
    assert refusal(raw, "rl", OnGpu(DDPSettings(), count)) is not None  # whole on each
    assert refusal(raw | LORA, "rl", OnGpu(DDPSettings())) is None


def test_nothing_is_read_before(untrained: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are no weights: loading would say so."""
    model = shutil.copytree(untrained, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=2**20))
    settings = KINDS["rl"].model_validate(configure("rl", model, data, tmp_path / "run"))
    with pytest.raises(UserError, match=r"this run cannot fit: .* cuda:0 has 0\.0 GiB; .*or take a smaller model"):
        build(settings, OnGpu(DDPSettings()))
