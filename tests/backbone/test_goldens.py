"""Our prompts against what the stock processors made of the same conversations where torchvision is installed.

The files come from ``scripts/make_processor_goldens.py``. One that is missing fails: nothing else here compares Qwen
and InternVL with their real processors.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from realvr.backbone.prompts import PromptEncoder
from realvr.backbone.types import Turn
from realvr.families import FAMILIES
from realvr.imaging.processing import ImageProcessor
from realvr.zoo.tiny import build

TESTS = Path(__file__).parents[1]


@cache
def golden_cases() -> ModuleType:
    """``tests/golden_cases.py``: tests is no package, and importlib mode leaves ``sys.path`` alone."""
    spec = importlib.util.spec_from_file_location("golden_cases", TESTS / "golden_cases.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["golden_cases"] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


def read_golden(name: str) -> dict[str, Any]:
    path = TESTS / "golden" / f"processor_{name}.json"
    assert path.is_file(), f"{path} is missing: run scripts/make_processor_goldens.py where torchvision is installed"
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    return {name: build(name, "tiny", root / name) for name in FAMILIES}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_golden_file_is_of_this_tokenizer_and_of_these_cases(checkpoints: dict[str, Path], name: str) -> None:
    golden, cases = read_golden(name), golden_cases()
    digest = hashlib.sha256((checkpoints[name] / "tokenizer.json").read_bytes()).hexdigest()
    assert golden["tokenizer_sha256"] == digest, "the tiny tokenizer has changed: make the golden files anew"
    recorded = {case: entry["conversation"] for case, entry in golden["cases"].items()}
    assert recorded == {case: json.loads(json.dumps(cases.as_json(turns))) for case, turns in cases.CASES.items()}


@pytest.mark.parametrize("name", FAMILIES)
def test_ids_and_grids_equal_the_stock_processor(checkpoints: dict[str, Path], name: str) -> None:
    from transformers import AutoConfig, AutoTokenizer

    golden, cases, path = read_golden(name), golden_cases(), checkpoints[name]
    processor = ImageProcessor.load(path, FAMILIES[name], AutoConfig.from_pretrained(path))
    encoder = PromptEncoder(AutoTokenizer.from_pretrained(path), FAMILIES[name], processor, 4096)
    for case, conversation in cases.CASES.items():
        entry = golden["cases"][case]
        turns = [
            Turn(turn.role, turn.text, [cases.make_image(image) for image in turn.images]) for turn in conversation
        ]
        prompt = encoder.encode(turns)
        assert prompt.ids.tolist() == entry["input_ids"], case
        assert [image.tokens for image in prompt.images] == entry["visual_tokens"], case
        grids = [image.grid for image in prompt.images]
        if "image_grid_thw" in entry:
            assert [[1, g.rows * g.merge, g.cols * g.merge] for g in grids] == entry["image_grid_thw"], case
        if "tiles" in entry:
            assert [g.tile_rows * g.tile_cols + g.thumbnail for g in grids] == entry["tiles"], case
