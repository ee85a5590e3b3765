"""Inputs and references shared by the tests of the adapter and of the latent engine.

References come from stock transformers only: inputs are put together here from ids and pixels, positions and masks are
left to the stock code. Device and number format follow REALVR_TEST_DEVICE and REALVR_TEST_DTYPE, so that the same tests
run on a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import AutoModelForImageTextToText

from golden_cases import CaseImage, make_image
from realvr.backbone import Backbone, Prompt, Turn

DEVICE = os.environ.get("REALVR_TEST_DEVICE", "cpu")
DTYPE: torch.dtype = getattr(torch, os.environ.get("REALVR_TEST_DTYPE", "float32"))

# Width and height in pixels. Qwen: grids that its windows do not divide; InternVL: one tile, wide, tall and square.
SIZES = ((84, 56), (63, 130), (200, 40), (57, 60), (120, 120), (100, 70))


def tolerance(base: float) -> float:
    """Largest absolute difference allowed: ``base`` in float32 on the CPU, wider for coarser arithmetic."""
    if DTYPE in (torch.bfloat16, torch.float16):
        return max(1e-1, base)
    return base if DEVICE == "cpu" else 10 * base


def picture(number: int) -> Image.Image:
    """Deterministic image ``number``: sizes repeat, contents never do."""
    width, height = SIZES[number % len(SIZES)]
    return make_image(CaseImage(width, height, number))


def ask(*numbers: int, text: str = "What color is the small circle?") -> list[Turn]:
    """One question about the pictures ``numbers``."""
    return [Turn("user", text, [picture(number) for number in numbers])]


def conversations() -> dict[str, list[Turn]]:
    """One image, several of different sizes, none, two turns with an image each."""
    return {
        "one image": ask(0),
        "three images": ask(1, 2, 3, text="What has changed between them?"),
        "no image": ask(text="Count to three: 1, 2, 3."),
        "two turns": [*ask(4), Turn("assistant", "It is red."), *ask(5, text="And in this one?")],
    }


def mixed_prompts(backbone: Backbone) -> list[Prompt]:
    """The four conversations, which differ in length and in image sizes."""
    return [backbone.prompt(turns) for turns in conversations().values()]


def load_stock(path: str | Path, attention: str = "eager", **options: Any) -> Any:
    """A plain transformers model, without anything of ours."""
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=DTYPE, attn_implementation=attention, **options)
    return model.to(DEVICE).eval()


def stock_inputs(backbone: Backbone, prompts: Sequence[Prompt]) -> dict[str, Tensor]:
    """Arguments of stock ``forward`` and ``generate`` for left-padded ``prompts``, from their ids and pixels alone."""
    pad = backbone.tokenizer.pad_token_id
    width = max(len(prompt.ids) for prompt in prompts)
    ids = torch.full((len(prompts), width), pad)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt.ids) :] = prompt.ids
        mask[row, width - len(prompt.ids) :] = 1
    config = backbone.model.config
    is_image = ((ids == config.image_token_id) & (mask == 1)).long()
    inputs = {"input_ids": ids, "attention_mask": mask}
    images = [image for prompt in prompts for image in prompt.images]
    if images:
        inputs["pixel_values"] = torch.cat([image.pixels for image in images]).to(DTYPE)
    if backbone.family.name.startswith("qwen"):
        inputs["mm_token_type_ids"] = is_image
        if images:
            inputs["image_grid_thw"] = patch_grids(backbone, images)
    if backbone.family.name == "gemma3":
        inputs["token_type_ids"] = is_image
    return {name: value.to(DEVICE) for name, value in inputs.items()}


def patch_grids(backbone: Backbone, images: Sequence[Any]) -> Tensor:
    """(time, rows, columns) of each image in patches, as the stock Qwen processor gives it."""
    merge = backbone.model.config.vision_config.spatial_merge_size
    return torch.tensor([[1, image.grid.rows * merge, image.grid.cols * merge] for image in images])


def difference(a: Tensor, b: Tensor) -> float:
    """Largest absolute difference, in float64."""
    assert a.shape == b.shape, f"{tuple(a.shape)} is not {tuple(b.shape)}"
    return float((a.detach().double().cpu() - b.detach().double().cpu()).abs().max()) if a.numel() else 0.0
