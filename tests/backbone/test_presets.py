"""The paper's backbones must instantiate from our configurations with the published number of parameters."""

from __future__ import annotations

import subprocess
import sys

import pytest

from realvr.backbone.families import FAMILIES
from realvr.backbone.presets import PRESETS, preset_config
from realvr.errors import UserError

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
        "import sys, realvr.backbone.presets, realvr.backbone.tiny;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'tokenizers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}).returncode == 0
