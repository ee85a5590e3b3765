"""The six backbones of the paper as published configurations, so that shapes can be checked without weights.

A preset instantiates on the meta device in seconds: parameter counts, memory plans and sharding can be computed on a
laptop, and a test can tell whether the adapter would meet a module it does not know in the real 235B model.
Nothing here imports torch or transformers until a configuration is asked for.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from realvr.errors import UserError
from realvr.families import FAMILIES

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Preset:
    """One published backbone."""

    name: str
    """Name in the paper."""
    family: str
    """Key of ``FAMILIES``."""
    hub_id: str
    """Repository of the released weights."""
    parameters: int
    """Number of parameters published with the checkpoint (some to four or five digits only), tied weights counted once:
    an independent number to hold the configuration against, not one computed from it."""
    config: dict[str, Any]
    """Keyword arguments of the transformers configuration class: where the model differs from the class defaults, and
    every size spelled out even where it does not."""


_QWEN_IDS = {
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "tie_word_embeddings": False,
}


def _qwen2_5_vl_7b() -> dict[str, Any]:
    text = {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128000,
        "rms_norm_eps": 1e-6,
        "use_sliding_window": False,
        "sliding_window": 32768,
        "max_window_layers": 28,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [16, 24, 24]},
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "dtype": "bfloat16",
    }
    vision = {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "tokens_per_second": 2,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "out_hidden_size": 3584,
        "in_chans": 3,
        "spatial_patch_size": 14,
    }
    top = {"vision_token_id": 151654, "dtype": "bfloat16"}
    return {"text_config": text, "vision_config": vision, **_QWEN_IDS, **top}


def _qwen3_vl(text: dict[str, Any]) -> dict[str, Any]:
    """Qwen3-VL: one vision tower for all sizes; dense and MoE decoders differ by ``text`` alone."""
    shared_text = {
        "vocab_size": 151936,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "dtype": "bfloat16",
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5000000.0,
            "mrope_section": [24, 20, 20],
            "mrope_interleaved": True,
        },
    }
    vision = {
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [8, 16, 24],
        "out_hidden_size": text["hidden_size"],
    }
    return {"text_config": {**shared_text, **text}, "vision_config": vision, **_QWEN_IDS}


def _qwen3_vl_8b() -> dict[str, Any]:
    return _qwen3_vl(
        {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        }
    )


def _qwen3_vl_moe(hidden: int, ffn: int, expert: int, layers: int, heads: int) -> dict[str, Any]:
    return _qwen3_vl(
        {
            "hidden_size": hidden,
            "intermediate_size": ffn,
            "moe_intermediate_size": expert,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
        }
    )


def _internvl3_8b() -> dict[str, Any]:
    text = {
        "model_type": "qwen2",
        "vocab_size": 151674,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "use_sliding_window": False,
        "max_window_layers": 70,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1000000.0, "factor": 2.0},
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "dtype": "bfloat16",
    }
    vision = {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "attention_bias": True,
        "use_qk_norm": False,
        "norm_type": "layer_norm",
        "image_size": [448, 448],
        "patch_size": [14, 14],
        "layer_scale_init_value": 0.1,
        "initializer_range": 1e-10,
        "initializer_factor": 0.1,
        "dropout": 0.0,
        "dtype": "bfloat16",
    }
    return {
        "text_config": text,
        "vision_config": vision,
        "image_token_id": 151667,
        "image_seq_length": 256,
        "downsample_ratio": 0.5,
        # The released file does not state this and the class default is True; the released weights hold an output
        # layer of their own, 545M parameters.
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def _gemma3_12b() -> dict[str, Any]:
    layers = 48
    text = {
        "vocab_size": 262208,
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "max_position_embeddings": 131072,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "dtype": "bfloat16",
        "layer_types": [("sliding_attention", "full_attention")[(i + 1) % 6 == 0] for i in range(layers)],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    }
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "image_size": 896,
        "patch_size": 14,
        "vision_use_head": False,
        "dtype": "bfloat16",
    }
    return {
        "text_config": text,
        "vision_config": vision,
        "mm_tokens_per_image": 256,
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "image_token_index": 262144,
        "bos_token_id": 2,
        "eos_token_id": [1, 106],  # <eos> and <end_of_turn>
        "pad_token_id": 0,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }


PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset("Qwen2.5-VL-7B", "qwen2.5-vl", "Qwen/Qwen2.5-VL-7B-Instruct", 8_292_166_656, _qwen2_5_vl_7b()),
        Preset("Qwen3-VL-8B", "qwen3-vl", "Qwen/Qwen3-VL-8B-Instruct", 8_767_123_696, _qwen3_vl_8b()),
        Preset(
            "Qwen3-VL-30B-A3B",
            "qwen3-vl-moe",
            "Qwen/Qwen3-VL-30B-A3B-Instruct",
            31_070_000_000,
            _qwen3_vl_moe(hidden=2048, ffn=6144, expert=768, layers=48, heads=32),
        ),
        Preset(
            "Qwen3-VL-235B-A22B",
            "qwen3-vl-moe",
            "Qwen/Qwen3-VL-235B-A22B-Instruct",
            235_670_000_000,
            _qwen3_vl_moe(hidden=4096, ffn=12288, expert=1536, layers=94, heads=64),
        ),
        Preset("InternVL3-8B", "internvl3", "OpenGVLab/InternVL3-8B-hf", 7_940_000_000, _internvl3_8b()),
        Preset("Gemma-3-12B", "gemma3", "google/gemma-3-12b-it", 12_190_000_000, _gemma3_12b()),
    )
}


def preset_config(name: str) -> PreTrainedConfig:
    """The transformers configuration of a paper backbone, fresh at every call."""
    if name not in PRESETS:
        raise UserError(f"unknown backbone preset {name!r}: choose one of {', '.join(PRESETS)}")
    from transformers import AutoConfig

    preset = PRESETS[name]
    return AutoConfig.for_model(FAMILIES[preset.family].model_type, **deepcopy(preset.config))
