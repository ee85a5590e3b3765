"""Shapes of ``size="mini"``: the smallest models of each class that learn the embedded world.

48 x 48 pixels become 36 visual tokens. Weights are drawn wider than stock (0.05) and embeddings are not tied where the
class allows it: with the stock 0.02, or tied, training from nothing stayed near guessing.
"""

from __future__ import annotations

from typing import Any

_HALF = [0.5, 0.5, 0.5]
_RANGE = 0.05
_SIDE, _PATCH, _TOKENS = 48, 4, 36
_DECODER: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "initializer_range": _RANGE,
}
_TOWER: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
_QWEN_TOWER: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_heads": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 128,
    "patch_size": _PATCH,
    "initializer_range": _RANGE,
}
_QWEN_PIXELS: dict[str, Any] = {
    "patch_size": _PATCH,
    "merge_size": 2,
    "temporal_patch_size": 2,
    # Every picture becomes about 36 visual tokens, whatever its size.
    "size": {"shortest_edge": _SIDE**2, "longest_edge": _SIDE**2},
    "image_mean": _HALF,
    "image_std": _HALF,
}
_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}


def qwen2_5() -> dict[str, Any]:
    """Fields of a `realvr.zoo.tiny.Shape`."""
    return {
        "text": {**_DECODER, "rope_parameters": {**_ROPE, "mrope_section": [4, 6, 6]}},
        "vision": {**_QWEN_TOWER, "window_size": 24, "fullatt_block_indexes": [0, 2]},
        "pixels": _QWEN_PIXELS,
        "processor": "Qwen2_5_VLProcessor",
        "top": {"tie_word_embeddings": False},
    }


def qwen3(**experts: Any) -> dict[str, Any]:
    """Fields of a `realvr.zoo.tiny.Shape`; with ``experts`` the class with routed experts."""
    rope = {**_ROPE, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    return {
        "text": {**_DECODER, "rope_parameters": rope, **experts},
        "vision": {**_QWEN_TOWER, "num_position_embeddings": (_SIDE // _PATCH) ** 2, "deepstack_visual_indexes": [1]},
        "pixels": _QWEN_PIXELS,
        "processor": "Qwen3VLProcessor",
        "top": {"tie_word_embeddings": False},
    }


def internvl() -> dict[str, Any]:
    """Fields of a `realvr.zoo.tiny.Shape`. One tile per picture."""
    vision = {
        **_TOWER,
        "attention_bias": True,
        "image_size": [_SIDE, _SIDE],
        "patch_size": [_PATCH, _PATCH],
        "layer_scale_init_value": 1.0,
        "initializer_range": _RANGE,
    }
    return {
        "text": {**_DECODER, "model_type": "qwen2", "rope_parameters": _ROPE},
        "vision": vision,
        "pixels": {
            "size": {"height": _SIDE, "width": _SIDE},
            "crop_to_patches": False,
            "min_patches": 1,
            "max_patches": 1,
            "image_mean": _HALF,
            "image_std": _HALF,
        },
        "processor": "InternVLProcessor",
        "top": {"downsample_ratio": 0.5, "image_seq_length": _TOKENS, "tie_word_embeddings": False},
        "seq_length": _TOKENS,
        "spare_rows": False,
    }


def gemma3() -> dict[str, Any]:
    """Fields of a `realvr.zoo.tiny.Shape`. Two layers of four see a window that is shorter than a dialogue."""
    text = {
        **_DECODER,
        "query_pre_attn_scalar": 32,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE},
    }
    return {
        "text": text,
        "vision": {
            **_TOWER,
            "model_type": "siglip_vision_model",
            "image_size": _SIDE,
            "patch_size": _PATCH,
            "vision_use_head": False,
        },
        "pixels": {
            "size": {"height": _SIDE, "width": _SIDE},
            "image_mean": _HALF,
            "image_std": _HALF,
            "do_convert_rgb": True,
        },
        "processor": "Gemma3Processor",
        "top": {"mm_tokens_per_image": _TOKENS, "initializer_range": _RANGE},
        "seq_length": _TOKENS,
    }


EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "decoder_sparse_step": 1,
}


def corpus() -> list[str]:
    """What the tokenizer of a mini model is trained on: the words of the world, as questions, captions and replies."""
    from realvr.data.wording import asked, formatted
    from realvr.world.phrasing import PHRASINGS
    from realvr.world.questions import FULL_KINDS
    from realvr.world.splits import Recipe, items

    made = items(Recipe("train-boxes", seed=0, count=300, kinds=FULL_KINDS))
    texts = [text for item in made for text in (asked(item.text, item.choices), item.meta["caption"], item.answer)]
    practice = items(Recipe("practice", seed=0, count=80))
    texts += [text for item in practice for text in (asked(item.text, item.choices), item.answer)]
    boards = items(Recipe("trails-lessons", seed=0, count=200))
    texts += [text for item in boards for text in (asked(item.text, item.choices), item.meta["caption"], item.answer)]
    wordings = [wording for each in PHRASINGS.values() for wording in each]
    return texts + wordings + [formatted(letter) for letter in "ABCDE"] * 200
