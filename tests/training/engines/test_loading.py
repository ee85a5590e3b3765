"""Peak memory of a rank that loads a checkpoint of many files: it never holds the whole model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

import load_memory
from optional import need_package
from realvr.zoo.tiny import build

WIDTH, LAYERS = 1024, 9
MB = 2**20


def wide(directory: Path) -> int:
    """A checkpoint of about 600 MB in float32, nearly all of it in the decoder; returns the bytes of its weights."""
    build("qwen2.5-vl", "tiny", directory)
    file = directory / "config.json"
    fields = json.loads(file.read_text())
    fields["text_config"] |= {
        "hidden_size": WIDTH,
        "intermediate_size": 4 * WIDTH,
        "num_attention_heads": WIDTH // 16,
        "num_key_value_heads": WIDTH // 16,
        "num_hidden_layers": LAYERS,
        "layer_types": ["full_attention"] * LAYERS,
    }
    fields["vision_config"]["out_hidden_size"] = WIDTH
    file.write_text(json.dumps(fields))
    (directory / "model.safetensors").unlink()
    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(directory), dtype=torch.float32)
    model.save_pretrained(directory, max_shard_size="50MB")
    return sum(parameter.numel() * 4 for parameter in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "layers"), [("fsdp2", 1), ("zero3", 3)])
def test_no_rank_ever_holds_the_whole_model(
    engine: str, layers: int, tmp_path: Path, build_tiny: Callable[[str], Path]
) -> None:
    """Two ranks: beside what a rank keeps (half of the layers, the rest whole), at most so many layers. DeepSpeed cuts
    whole layers, and copies them while it does."""
    if engine == "zero3":
        need_package("deepspeed")
    whole = wide(tmp_path / "wide")
    files = len(list((tmp_path / "wide").glob("*.safetensors")))
    assert whole > 550 * MB and files >= 12
    arguments = [engine, str(build_tiny("qwen2.5-vl")), str(tmp_path / "wide"), str(tmp_path)]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launch, load_memory.__file__, *arguments], capture_output=True, text=True, timeout=600, env=variables
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = [json.loads(file.read_text()) for file in tmp_path.glob("rank-*.json")]
    assert sorted(rank["rank"] for rank in ranks) == [0, 1]
    for rank in ranks:
        sizes = [round(size / MB) for size in (rank["peak"], rank["held"], whole)]
        print(f"{engine}, rank {rank['rank']}: at most {sizes[0]} MB, keeps {sizes[1]} of {sizes[2]}")
        assert rank["held"] < 0.65 * whole
        assert rank["peak"] < rank["held"] + layers * whole / LAYERS
        assert rank["peak"] < 0.85 * whole
