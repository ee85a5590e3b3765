"""The paper's backbones must instantiate from our configurations with the published number of parameters."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from realvr.errors import UserError
from realvr.families import FAMILIES
from realvr.zoo.presets import PRESETS, preset_config

PUBLISHED = {  # billions, from the model cards
    "Qwen2.5-VL-7B": 8.29,
    "Qwen3-VL-8B": 8.77,
    "Qwen3-VL-30B-A3B": 31.07,
    "Qwen3-VL-235B-A22B": 235.67,
    "InternVL3-8B": 7.94,
    "Gemma-3-12B": 12.19,
}


def test_all_six_are_there():
    assert list(PRESETS) == list(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_count(name):
    import torch
    from transformers import AutoModelForImageTextToText

    config = preset_config(name)
    assert config.model_type == FAMILIES[PRESETS[name].family].model_type
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    count = sum(parameter.numel() for parameter in model.parameters())  # parameters() yields a tied weight once
    assert count == pytest.approx(PUBLISHED[name] * 1e9, rel=5e-3)
    assert count == pytest.approx(PRESETS[name].parameters, rel=5e-3)


@pytest.mark.parametrize("name", PUBLISHED)
def test_rotary_sections_and_token_ids_fit(name):
    config = preset_config(name)
    text = config.get_text_config()
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    section = text.rope_parameters.get("mrope_section")
    assert section is None or sum(section) == head // 2
    assert config.image_token_id < text.vocab_size


RELEASED = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "released"
FILES = {
    "Qwen2.5-VL-7B-Instruct/config.json": "Qwen2.5-VL-7B",
    "Qwen3-VL-8B-Instruct/config.json": "Qwen3-VL-8B",
    "Qwen3-VL-30B-A3B-Thinking/config.json": "Qwen3-VL-30B-A3B",
    "Qwen3-VL-30B-A3B-Instruct/config.trimmed.json": "Qwen3-VL-30B-A3B",
    "Qwen3-VL-235B-A22B-Instruct/config.trimmed.json": "Qwen3-VL-235B-A22B",
    "InternVL3-8B-hf/config.derived.json": "InternVL3-8B",
    "gemma-3-12b-it/config.unsloth-mirror.json": "Gemma-3-12B",
}
EXPECTED_DIFFERENCES: dict[str, dict[str, tuple[Any, Any]]] = {
    "InternVL3-8B-hf/config.derived.json": {
        "tie_word_embeddings": (True, False),  # not stated, so the class default; the weights hold an output layer
    },
    "gemma-3-12b-it/config.unsloth-mirror.json": {
        "eos_token_id": (106, [1, 106]),  # the mirror dropped <eos>
    },
}
NOT_FACTS = {"architectures", "type", "unsloth_fixed", "cache_implementation", "transformers_version"}
"""Written by a library or a mirror; ``type`` is the old name of ``rope_type``."""


def fields(config: Any, prefix: str = "") -> dict[str, Any]:
    """All fields, flat."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, dict):
            found |= fields(value, f"{prefix}{name}.")
        elif name not in NOT_FACTS:
            found[f"{prefix}{name}"] = value
    return found


@pytest.mark.parametrize("file", FILES)
def test_every_field_is_the_released_one(file):
    from transformers import CONFIG_MAPPING

    if not (RELEASED / file).is_file():
        pytest.skip(f"the released files are not here ({RELEASED})")
    raw = json.loads((RELEASED / file).read_text())
    released = fields(CONFIG_MAPPING[raw["model_type"]].from_dict(raw).to_dict())
    ours = fields(preset_config(FILES[file]).to_dict())
    trimmed = {name for name in ours.keys() - released.keys() if "mrope" in name} if "trimmed" in file else set()
    different = {
        name: (released.get(name), ours.get(name))
        for name in (released.keys() | ours.keys()) - trimmed
        if released.get(name) != ours.get(name)
    }
    assert different == EXPECTED_DIFFERENCES.get(file, {})


def test_fields_that_no_parameter_count_shows():
    """From the released files, as numbers."""
    internvl, gemma = preset_config("InternVL3-8B"), preset_config("Gemma-3-12B")
    assert internvl.text_config.max_window_layers == 70
    assert internvl.vision_config.initializer_range == 1e-10
    assert internvl.text_config.rope_parameters["rope_type"] == "dynamic"
    assert gemma.eos_token_id == [1, 106] and gemma.bos_token_id == 2 and gemma.pad_token_id == 0
    assert gemma.text_config.rope_parameters["full_attention"]["factor"] == 8.0
    for name in ("Qwen2.5-VL-7B", "Qwen3-VL-8B", "Qwen3-VL-30B-A3B", "Qwen3-VL-235B-A22B", "InternVL3-8B"):
        text = preset_config(name).get_text_config()
        assert (text.bos_token_id, text.eos_token_id) == (151643, 151645)


def test_gemma_layer_pattern():
    kinds = preset_config("Gemma-3-12B").get_text_config().layer_types
    assert kinds.count("full_attention") == 8 and kinds[5] == kinds[-1] == "full_attention"


def test_configurations_are_not_shared():
    preset_config("Qwen3-VL-8B").get_text_config().rope_parameters["rope_theta"] = 1.0
    assert preset_config("Qwen3-VL-8B").get_text_config().rope_parameters["rope_theta"] == 5000000.0


def test_unknown_preset():
    with pytest.raises(UserError, match=r"unknown backbone preset 'GPT': choose one of Qwen2.5-VL-7B, .*Gemma-3-12B"):
        preset_config("GPT")


def test_import_is_light():
    code = (
        "import sys, realvr.zoo.presets, realvr.zoo.tiny;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'tokenizers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}).returncode == 0
