"""The exported model of a run with adapters is what peft itself merges, bit by bit, and the trained model stays."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from realvr.backbone import Backbone
from realvr.training import loop
from stage_runs import configure, make


@pytest.mark.parametrize("family", ["qwen2.5-vl", "gemma3", "qwen3-vl-moe"])
def test_the_export_is_what_peft_merges(
    family: str, build_tiny: Callable[[str], Path], data: Path, tmp_path: Path
) -> None:
    lora = {"rank": 4, "targets": ["q_proj", "v_proj", "down_proj"]}
    changes = {"lora": lora, "pack_tokens": 256, "optim": {"steps": 2, "lr": 1e-2}}
    task, settings, engine = make("sft", configure("sft", build_tiny(family), data, tmp_path / "run", **changes))
    assert loop.train(task, settings, engine) == 0
    model = task.backbone.model
    tables = (model.get_input_embeddings(), model.get_output_embeddings())
    rows = [getattr(table, "marker_rows", None) for table in tables]
    rows = [rows[0] if each is None else each for each in rows]  # a tied head has those of the embedding
    merged = copy.deepcopy(task.adapters.peft).merge_and_unload().state_dict()
    exported = Backbone.load(tmp_path / "run" / "final", dtype="float32").model
    markers = task.backbone.markers
    ids = [markers.start, markers.slot, markers.end]
    for name, tensor in exported.state_dict().items():
        expected = merged[name].clone()
        for table, own in zip((exported.get_input_embeddings(), exported.get_output_embeddings()), rows, strict=True):
            if tensor.data_ptr() == table.weight.data_ptr():
                expected[ids] = own.detach()
        assert torch.equal(tensor, expected), name
    assert any("lora_A" in name for name, _ in model.named_parameters())
