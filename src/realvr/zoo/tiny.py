"""Small random checkpoints of the five stock classes, complete on disk, for dry runs and tests.

They are real Hugging Face directories: whatever loads a released backbone loads these, offline. Weights and
configuration are stored as in the released files. Their shapes keep what tends to break: grouped-query attention, mRoPE
sections, windows that do not divide the image, deepstack layers, routed experts that are not square, tiles with a
thumbnail, sliding windows shorter than a prompt, and (InternVL) a tokenizer with one entry more than the embedding has
rows. The latent markers are not in them, as they are not in the released checkpoints: loading adds them.

Weights depart from the stock initialisation where that would make a random model degenerate: the range is 0.1, so that
attention is not uniform, and what transformers leaves at zero (Gemma's image projection, InternVL's position table) is
drawn at random, so that different images and places give different visual tokens.
"""

from __future__ import annotations

import json
import tempfile
from copy import deepcopy
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from realvr.backbone.released import as_released, save_weights
from realvr.errors import UserError, explained
from realvr.families import FAMILIES, Family
from realvr.runs.files import publish
from realvr.zoo import mini
from realvr.zoo.tiny_tokenizer import SPECIALS, build_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

INITIALIZER_RANGE = 0.1


@dataclass(frozen=True)
class Shape:
    """One size of one family: everything of the checkpoint that does not follow from the tokenizer."""

    text: dict[str, Any]
    vision: dict[str, Any]
    pixels: dict[str, Any]
    """Settings of the image processor."""
    processor: str
    """Stock processor class, named in ``processor_config.json``."""
    top: dict[str, Any] = field(default_factory=dict)
    """Fields of the outer configuration."""
    seq_length: int | None = None
    """Visual tokens per tile where the family fixes them."""
    spare_rows: bool = True
    """Whether the embedding has rows beyond the tokenizer, as in the released Qwen and Gemma checkpoints; otherwise it
    lacks one for the tokenizer's last entry, as in the released InternVL ones."""


_HALF = [0.5, 0.5, 0.5]
_CLIP_MEAN, _CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
_IMAGENET_MEAN, _IMAGENET_STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
_DECODER: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": INITIALIZER_RANGE,
}
_QWEN_VISION: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
    "initializer_range": INITIALIZER_RANGE,
}


def _qwen_pixels(patch: int, mean: list[float], std: list[float]) -> dict[str, Any]:
    """4 to 64 visual tokens per image, each ``2 * patch`` pixels wide."""
    area = (2 * patch) ** 2
    return {
        "patch_size": patch,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 4 * area, "longest_edge": 64 * area},
        "image_mean": mean,
        "image_std": std,
    }


def _qwen2_5() -> Shape:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    return Shape(
        text={**_DECODER, "num_hidden_layers": 2, "rope_parameters": rope},
        # A window covers 2 x 2 visual tokens, so an image of 2 x 3 has two, one of them cut; block 1 sees it whole.
        vision={**_QWEN_VISION, "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]},
        pixels=_qwen_pixels(14, _CLIP_MEAN, _CLIP_STD),
        processor="Qwen2_5_VLProcessor",
        top={"tie_word_embeddings": False},
    )


def _qwen3(**moe: Any) -> Shape:
    # Interleaved sections: the first must be the longest, or the last frequencies of the others fall off the end.
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    vision = {"patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    return Shape(
        text={**_DECODER, "num_hidden_layers": 3, "head_dim": 16, "rope_parameters": rope, **moe},
        vision={**_QWEN_VISION, **vision},
        pixels=_qwen_pixels(16, _HALF, _HALF),
        processor="Qwen3VLProcessor",
        top={"tie_word_embeddings": False},
    )


def _internvl() -> Shape:
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "attention_bias": True,
        "image_size": [56, 56],
        "patch_size": [14, 14],
        "layer_scale_init_value": 1.0,
        "initializer_range": INITIALIZER_RANGE,
    }
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    return Shape(
        text={**_DECODER, "model_type": "qwen2", "num_hidden_layers": 2, "rope_parameters": rope},
        vision=vision,
        # ``crop_to_patches`` off as in the released file: it is the stock processor that turns tiling on.
        pixels={
            "size": {"height": 56, "width": 56},
            "crop_to_patches": False,
            "min_patches": 1,
            "max_patches": 12,
            "image_mean": _IMAGENET_MEAN,
            "image_std": _IMAGENET_STD,
        },
        processor="InternVLProcessor",
        top={"downsample_ratio": 0.5, "image_seq_length": 4, "tie_word_embeddings": False},
        seq_length=4,
        spare_rows=False,
    )


def _gemma3() -> Shape:
    text = {
        **_DECODER,
        "num_hidden_layers": 4,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 24,  # longer than an image (16), shorter than a prompt
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 100000.0, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    }
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 56,
        "patch_size": 7,
        "vision_use_head": False,
    }
    return Shape(
        text=text,
        vision=vision,
        pixels={"size": {"height": 56, "width": 56}, "image_mean": _HALF, "image_std": _HALF, "do_convert_rgb": True},
        processor="Gemma3Processor",
        top={"mm_tokens_per_image": 16, "initializer_range": INITIALIZER_RANGE},
        seq_length=16,
    )


_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "decoder_sparse_step": 1,
}

SIZES: dict[str, dict[str, Shape]] = {
    "tiny": {
        "qwen2.5-vl": _qwen2_5(),
        "qwen3-vl": _qwen3(),
        "qwen3-vl-moe": _qwen3(**_EXPERTS),
        "internvl3": _internvl(),
        "gemma3": _gemma3(),
    },
    "mini": {
        "qwen2.5-vl": Shape(**mini.qwen2_5()),
        "qwen3-vl": Shape(**mini.qwen3()),
        "qwen3-vl-moe": Shape(**mini.qwen3(**mini.EXPERTS)),
        "internvl3": Shape(**mini.internvl()),
        "gemma3": Shape(**mini.gemma3()),
    },
}
"""Shapes by size, then by family. ``tiny`` is for dry runs and tests, ``mini`` for training on the embedded world."""


def _vocabulary(shape: Shape, tokenizer: PreTrainedTokenizerFast) -> int:
    """Rows of the embedding: the next multiple of 64 that leaves at least 16 to spare, or one too few."""
    length = len(tokenizer)
    return -(-(length + 16) // 64) * 64 if shape.spare_rows else length - 1


def _token_ids(family: str, tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    """Fields of the outer configuration that hold token ids."""
    if family == "internvl3":
        names = {"image_token_id": "<IMG_CONTEXT>"}
    elif family == "gemma3":
        names = {
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
            "image_token_index": "<image_soft_token>",
        }
    else:
        names = {
            "image_token_id": "<|image_pad|>",
            "video_token_id": "<|video_pad|>",
            "vision_start_token_id": "<|vision_start|>",
            "vision_end_token_id": "<|vision_end|>",
        }
    vocabulary = tokenizer.get_vocab()
    return {name: vocabulary[token] for name, token in names.items()}


def _config(family: Family, shape: Shape, tokenizer: PreTrainedTokenizerFast) -> PreTrainedConfig:
    from transformers import AutoConfig

    text = {
        **deepcopy(shape.text),
        "vocab_size": _vocabulary(shape, tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    ids = _token_ids(family.name, tokenizer)
    return AutoConfig.for_model(
        family.model_type, text_config=text, vision_config=deepcopy(shape.vision), **deepcopy(shape.top), **ids
    )


def _model(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """Random weights from ``seed``, leaving the caller's random state as it was."""
    import torch
    from transformers import AutoModelForImageTextToText

    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)  # not torch.manual_seed, which would reseed the accelerators too
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("mm_input_projection_weight"):  # (vision width, text width)
                    parameter.normal_(0.0, parameter.shape[0] ** -0.5)
                elif name.endswith(("embeddings.position_embeddings", "embeddings.cls_token")):
                    parameter.normal_(0.0, INITIALIZER_RANGE)
    return model


def _save_model(model: PreTrainedModel, family: Family, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    from transformers import GenerationConfig

    vocabulary = tokenizer.get_vocab()
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=[vocabulary[token] for token in SPECIALS[family.name].stop],
        pad_token_id=tokenizer.pad_token_id,
    )
    save_weights(model, directory, family.transposed)
    as_released(directory, family)


def _save_processors(family: Family, shape: Shape, directory: Path) -> None:
    """Image processor by its Pillow class (torchvision may be absent), and the name of the stock processor."""
    module, _, name = family.image_processor.partition(":")
    getattr(import_module(module), name)(**deepcopy(shape.pixels)).save_pretrained(directory)
    processor: dict[str, Any] = {"processor_class": shape.processor}
    if shape.seq_length is not None:
        processor["image_seq_length"] = shape.seq_length
    (directory / "processor_config.json").write_text(json.dumps(processor, indent=2) + "\n")


def build(family: str, size: str, directory: Path, seed: int = 0) -> Path:
    """Write a random checkpoint of ``family`` (a key of ``FAMILIES``) and ``size`` (a key of ``SIZES``).

    The same arguments give the same weights, byte for byte. ``directory`` must be absent or empty; it is filled only
    once everything has been written beside it, so that an interrupted build leaves nothing that looks complete.
    """
    if family not in FAMILIES:
        raise UserError(f"unknown model family {family!r}: choose one of {', '.join(FAMILIES)}")
    if size not in SIZES:
        raise UserError(f"unknown model size {size!r}: choose one of {', '.join(SIZES)}")
    if family not in SIZES[size]:
        raise UserError(f"no {size} model of family {family}: choose one of {', '.join(SIZES[size])}")
    directory = Path(directory)
    if directory.exists() and not directory.is_dir():
        raise UserError(f"{directory} is a file: choose a new or empty directory for the model")
    if directory.is_dir() and any(directory.iterdir()):
        raise UserError(f"{directory} is not empty: choose a new or empty directory for the model")

    shape = SIZES[size][family]
    tokenizer = build_tokenizer(family, mini.corpus() if size == "mini" else None)
    model = _model(_config(FAMILIES[family], shape, tokenizer), seed)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}.") as scratch:
            staging = Path(scratch)
            _save_model(model, FAMILIES[family], tokenizer, staging)
            tokenizer.save_pretrained(staging)
            _save_processors(FAMILIES[family], shape, staging)
            directory.mkdir(exist_ok=True)
            for path in sorted(staging.iterdir(), key=lambda path: path.name == "config.json"):
                publish(path, directory / path.name)
    except Exception as error:  # a parent that is a file, no permission, a full disk: libraries wrap it in their own
        if explained(error) is None and not isinstance(error, OSError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{directory} cannot be written ({reason})") from error
    return directory
