"""The five supported model families, as data. No subclass per family: everything else is detected on the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

LVR_START = "<|lvr_start|>"
LVR_SLOT = "<|lvr|>"
LVR_END = "<|lvr_end|>"
MARKERS = (LVR_START, LVR_SLOT, LVR_END)
Stock = Any
"""A model, tokenizer, processor or configuration of ``transformers``: what it has differs by family and version."""


@dataclass(frozen=True)
class Family:
    """What differs between families before the model is reached: image processing and placeholder strings."""

    name: str
    """Name on the command line."""
    model_type: str
    """``model_type`` in ``config.json``."""
    image_processor: str
    """Pillow-only image processor class, as ``module:Class``."""
    placeholder: str
    """What the chat template writes where an image stands."""
    before: str
    """What the processor writes before the visual tokens of an image (the placeholder is replaced)."""
    image_token: str
    """Repeated once per visual token."""
    after: str
    """What the processor writes after the visual tokens."""
    variable_grid: bool
    """Whether the number of visual tokens follows the image size, so that a visual-token budget applies."""
    never_sampled: tuple[str, ...]
    """Vision control tokens that a policy must never emit (present or not in a given tokenizer)."""
    transposed: tuple[str, ...] = ()
    """Endings of the names of tensors that released files hold with their last two axes exchanged."""
    unstated: tuple[str, ...] = ()
    """Fields of the outer configuration that released ``config.json`` files lack."""


_QWEN_PROCESSOR = "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl:Qwen2VLImageProcessorPil"
_QWEN_CONTROL = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")


_EXPERTS = (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")


def _qwen(name: str, model_type: str, transposed: tuple[str, ...] = ()) -> Family:
    image = "<|image_pad|>"
    return Family(name, model_type, _QWEN_PROCESSOR, image, "", image, "", True, _QWEN_CONTROL, transposed)


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        _qwen("qwen2.5-vl", "qwen2_5_vl"),
        _qwen("qwen3-vl", "qwen3_vl"),
        _qwen("qwen3-vl-moe", "qwen3_vl_moe", _EXPERTS),
        Family(
            "internvl3",
            "internvl",
            "transformers.models.got_ocr2.image_processing_pil_got_ocr2:GotOcr2ImageProcessorPil",
            "<IMG_CONTEXT>",
            "<img>",
            "<IMG_CONTEXT>",
            "</img>",
            False,
            ("<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
            unstated=("tie_word_embeddings",),
        ),
        Family(
            "gemma3",
            "gemma3",
            "transformers.models.gemma3.image_processing_pil_gemma3:Gemma3ImageProcessorPil",
            "<start_of_image>",
            "\n\n<start_of_image>",
            "<image_soft_token>",
            "<end_of_image>\n\n",
            False,
            ("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
            unstated=("tie_word_embeddings",),
        ),
    )
}


def family_of(model_type: str) -> Family | None:
    """The family of a ``config.json`` ``model_type``, or None where it is not supported."""
    return next((family for family in FAMILIES.values() if family.model_type == model_type), None)
