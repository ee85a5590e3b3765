"""Time and peak memory of the latent engine at real size, with random weights of a paper backbone's shape.

    python benchmarks/foundation.py --preset Qwen2.5-VL-7B --device cuda

One prompt with one image of 2,560 visual tokens: vision encode, prefill, 8 latents, a rollout of 8 x 32 tokens, and
one backward through the recurrence in each memory mode. Ratios within one run can be compared; absolute times belong
to the machine.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from realvr.backbone.backbone import Backbone
from realvr.backbone.loading import add_markers
from realvr.backbone.types import Prompt, Turn
from realvr.families import FAMILIES, Family
from realvr.imaging.processing import ImageProcessor, _fixed_grid
from realvr.latent.group_rollout import decode, rollout
from realvr.latent.recurrence import trajectory
from realvr.latent.sampling import Sampling
from realvr.latent.span import prefill, think
from realvr.zoo.presets import PRESETS, preset_config
from realvr.zoo.tiny import _token_ids
from realvr.zoo.tiny_tokenizer import build_tokenizer


def random_backbone(
    preset: str, device: torch.device, dtype: torch.dtype, layers: int | None, sizes: Mapping[str, Any] | None = None
) -> Backbone:
    """A backbone of the preset's shape with random weights, and the small tokenizer of its family. ``sizes`` changes
    fields of ``text_config`` and ``vision_config``."""
    config = preset_config(preset)
    for part, fields in (sizes or {}).items():
        for name, value in fields.items():
            setattr(getattr(config, part), name, value)
    family = FAMILIES[PRESETS[preset].family]
    tokenizer = build_tokenizer(family.name)
    for name, token in _token_ids(family.name, tokenizer).items():
        setattr(config, name, token)
    if layers is not None:
        config.text_config.num_hidden_layers = layers
        if getattr(config.text_config, "layer_types", None):
            config.text_config.layer_types = config.text_config.layer_types[:layers]
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = AutoModelForImageTextToText.from_config(config, dtype=dtype).eval()
    finally:
        torch.set_default_dtype(before)
    markers, _ = add_markers(model, tokenizer)
    backbone = Backbone(model, tokenizer, family, _processor(family, config), markers, 8)
    backbone.freeze_vision()
    return backbone


def _processor(family: Family, config: Any) -> ImageProcessor:
    """The family's own, with pictures of any size, or of the size that the vision tower takes."""
    module, name = family.image_processor.split(":")
    stock_class = getattr(importlib.import_module(module), name)
    if family.variable_grid:
        stock = stock_class(patch_size=config.vision_config.patch_size, merge_size=2)
        stock.size = {"shortest_edge": 56 * 56, "longest_edge": 10_000 * 1024}
        return ImageProcessor(family, stock, None)
    side = config.vision_config.image_size
    side = side if isinstance(side, int) else side[0]
    stock = stock_class(size={"height": side, "width": side})
    tokens, merge = _fixed_grid(config, stock)
    return ImageProcessor(family, stock, tokens, merge=merge)


def measure(name: str, run: Callable[[], object], device: torch.device, repeats: int) -> tuple[str, float, float]:
    """(name, best seconds of ``repeats`` + 1 runs, peak GiB)."""
    cuda = device.type == "cuda"
    best = float("inf")
    for _ in range(repeats + 1):
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        begun = time.perf_counter()
        run()
        if cuda:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begun)
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else float("nan")
    print(f"  {name:<44} {best:8.3f} s {peak:8.1f} GiB", flush=True)
    return name, best, peak


def generate_inputs(backbone: Backbone, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """What stock ``generate`` of a Qwen model takes for these prompts, left-padded, pixels on the device."""
    device, batch = backbone.device, backbone.batch(prompts)
    grids = [image.grid for image in batch.images]
    return {
        "input_ids": batch.ids_BT,
        "attention_mask": batch.real_BT.long(),
        "pixel_values": torch.cat([image.pixels for image in batch.images]).to(device),
        "image_grid_thw": torch.tensor([[1, g.rows * g.merge, g.cols * g.merge] for g in grids], device=device),
        "mm_token_type_ids": batch.image_BT.int(),
    }


def generate_options(group: int, answer: int) -> dict[str, Any]:
    """Plain sampling of ``group`` completions of exactly ``answer`` tokens by stock ``generate``."""
    exactly = {"max_new_tokens": answer, "min_new_tokens": answer}
    return {"do_sample": True, "num_return_sequences": group, "top_k": 0, "temperature": 1.0, **exactly}


@torch.no_grad()
def compare_with_generate(backbone: Backbone, prompt: Prompt, args: argparse.Namespace) -> None:
    """The same job (vision, prefill, 8 x 32 sampled tokens, no latents) by stock ``generate`` and by ``rollout``."""
    device = backbone.device
    inputs, options = generate_inputs(backbone, [prompt]), generate_options(8, 32)
    sampling = Sampling(temperature=1.0, max_new=32, stop=None)
    ours = measure(
        "rollout() 1 prompt x 8 x 32, K=0, all in",
        lambda: rollout(backbone, [prompt], group=8, sampling=sampling, latents=0),
        device,
        args.repeats,
    )
    backbone.model.set_attn_implementation("sdpa")
    stock = measure(
        "stock generate(), the same",
        lambda: backbone.model.generate(**inputs, **options),
        device,
        args.repeats,
    )
    backbone.use_realvr_attention()
    print(f"  ratio stock / ours: time {stock[1] / ours[1]:.2f}, peak memory {stock[2] / ours[2]:.2f}", flush=True)


def run(preset: str, device: torch.device, dtype: torch.dtype, args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    backbone = random_backbone(preset, device, dtype, args.layers)
    side = backbone.processor.stock.patch_size * backbone.processor.merge
    image = Image.effect_noise((args.cols * side, args.rows * side), 60).convert("RGB")
    prompt = backbone.prompt([Turn("user", "What is the small sign on the left? " * 8, images=[image])])
    batch = backbone.batch([prompt])
    parameters = sum(p.numel() for p in backbone.model.parameters())
    size = torch.cuda.memory_allocated() / 2**30 if device.type == "cuda" else float("nan")
    print(
        f"{preset}: {parameters / 1e9:.2f} B parameters, {size:.1f} GiB; {len(prompt)} prompt tokens, "
        f"{prompt.images[0].tokens} of them visual; {dtype}, {device}",
        flush=True,
    )
    with torch.no_grad():
        measure("vision encode", lambda: backbone.encode_images(batch.images), device, args.repeats)
        visual = backbone.encode_images(batch.images)
        measure("prefill", lambda: prefill(backbone, batch, visual), device, args.repeats)
        state, _ = prefill(backbone, batch, visual)
        measure("8 latents (and both markers)", lambda: think(backbone, state, 8), device, args.repeats)
        after, _ = think(backbone, state, 8)
        sampling = Sampling(temperature=1.0, max_new=32, stop=None)
        backbone.eos_ids = ()
        measure("rollout 8 x 32 tokens", lambda: decode(backbone, after, 8, sampling), device, args.repeats)
    compare_with_generate(backbone, prompt, args)
    for memory in ("cached", "checkpointed-prefill", "checkpointed"):

        def backward(memory: str = memory) -> None:
            _, _, z = trajectory(backbone, batch, visual, latents=8, memory=memory)  # type: ignore[arg-type]
            z.float().pow(2).mean().backward()
            for parameter in backbone.model.parameters():
                parameter.grad = None

        measure(f"prefill + 8 latents + backward, {memory}", backward, device, args.repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--preset", nargs="+", default=["Qwen2.5-VL-7B", "Qwen3-VL-8B"], choices=list(PRESETS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", type=int, default=40)
    parser.add_argument("--cols", type=int, default=64)
    parser.add_argument("--layers", type=int, default=None, help="fewer decoder layers, to try the script out")
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    for preset in args.preset:
        run(preset, torch.device(args.device), getattr(torch, args.dtype), args)
        if args.device.startswith("cuda"):
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
