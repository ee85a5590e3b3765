"""The numbers of a model that its memory and time follow from: read from the stock model itself, which may be on the
meta device."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from realvr.backbone import fused_norms
from realvr.backbone.fused_layers import is_fused
from realvr.families import Stock

VISION = ("visual", "vision_tower", "multi_modal_projector")
MARKERS = 3
"""Rows of the embedding that LoRA trains in Stage 1."""
ADAPTER_BYTES = 4
"""peft keeps adapters of 16-bit models in 32 bits."""

Part = Literal["vision", "layer", "root"]
"""Where a parameter is: vision tower and merger, a decoder layer, or neither (embedding, head, final norm)."""


@dataclass(frozen=True)
class Weight:
    """Parameters of one size: ``count`` of them."""

    shape: tuple[int, ...]
    part: Part
    trained: bool
    itemsize: int = 2
    count: int = 1
    adapter: bool = False
    """Of LoRA, in a decoder layer."""

    @property
    def numel(self) -> int:
        """Numbers in one of them."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """All of them."""
        return self.numel * self.itemsize * self.count


@dataclass(frozen=True)
class Decoder:
    """Sizes of the decoder, and of the vision tower where they matter."""

    layers: int
    width: int
    ffn: int
    """Of a dense layer, or of one expert."""
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    experts: int = 0
    experts_per_token: int = 0
    head_norms: bool = False
    """Norms of queries and keys (Qwen3, Gemma 3)."""
    norms: int = 2
    """Norms of a layer over the whole width: two, or four (Gemma 3)."""
    wide_norms: bool = False
    """Norms that scale in 32 bits (Gemma 3)."""
    fused_norms: bool = False
    """Norms that keep nothing but their input, in its own type (``backbone.fused_norms``; on a CPU torch takes them
    apart)."""
    window: int = 0
    """Columns that a layer with a sliding window sees."""
    windowed: int = 0
    """Number of those layers."""
    fused_gates: bool = False
    """Dense MLPs that make the output of their gate again (``backbone.gate_memory``)."""
    narrow_adapters: bool = False
    """Adapters that keep the input of a 16-bit layer, and no copy of it in 32 bits (``training.low_rank``)."""
    itemsize: int = 2
    deepstack: int = 0
    vision_width: int = 0
    vision_ffn: int = 0
    vision_parameters: int = 0
    patches_per_token: int = 4

    @property
    def query(self) -> int:
        """Width of all queries."""
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        """Width of all keys, and of all values."""
        return self.kv_heads * self.head_dim


def decoder_of(model: Stock) -> Decoder:
    """The sizes of a stock model."""
    config, text = model.config, model.config.get_text_config()
    layer = model.model.language_model.layers[0]
    names = [name for name, _ in layer.named_parameters()]
    norms = [module for name, module in layer.named_modules() if name.endswith("layernorm")]
    vision = config.vision_config
    windowed = list(getattr(text, "layer_types", None) or ()).count("sliding_attention")
    experts = int(getattr(text, "num_experts", 0) or 0)
    grouped = any(".experts." in name for name in names)
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    vision_ffn = getattr(vision, "intermediate_size", 0)
    return Decoder(
        layers=int(text.num_hidden_layers),
        width=int(text.hidden_size),
        ffn=int(text.moe_intermediate_size if grouped else text.intermediate_size),
        heads=int(text.num_attention_heads),
        kv_heads=int(text.num_key_value_heads),
        head_dim=int(head_dim),
        vocab=int(model.get_output_embeddings().out_features),
        experts=experts if grouped else 0,
        experts_per_token=int(text.num_experts_per_tok) if grouped else 0,
        head_norms=any("q_norm" in name for name in names),
        norms=len(norms),
        wide_norms="Gemma" in type(norms[0]).__name__,
        fused_norms=all(map(fused_norms.is_fused, norms)) and norms[0].weight.device.type != "cpu",
        window=int(getattr(text, "sliding_window", None) or 0) if windowed else 0,
        windowed=windowed,
        fused_gates=is_fused(layer.mlp),
        narrow_adapters=any(getattr(module, "keeps_input", False) for module in layer.modules()),
        itemsize=model.get_input_embeddings().weight.element_size(),
        deepstack=len(getattr(vision, "deepstack_visual_indexes", ()) or ()),
        vision_width=int(vision.hidden_size),
        vision_ffn=int(vision_ffn),
        vision_parameters=sum(p.numel() for name in VISION for p in _parameters(model.model, name)),
        patches_per_token=patches_per_token(config),
    )


def patches_per_token(config: Stock) -> int:
    """Patches of the vision tower behind one visual token."""
    vision = config.vision_config
    if merge := getattr(vision, "spatial_merge_size", None):
        return int(merge) ** 2
    if ratio := getattr(config, "downsample_ratio", None):
        return round(1 / float(ratio) ** 2)
    tokens = getattr(config, "mm_tokens_per_image", None)
    return (int(vision.image_size) // int(vision.patch_size)) ** 2 // int(tokens) if tokens else 1


def _parameters(core: nn.Module, name: str) -> list[nn.Parameter]:
    return list(getattr(core, name).parameters()) if hasattr(core, name) else []


def part_of(name: str) -> Part:
    """Where the parameter of this name is."""
    parts = name.split(".")
    if any(part in VISION for part in parts):
        return "vision"
    return "layer" if "layers" in parts and "language_model" in parts else "root"


def weights_of(module: nn.Module, *, train_decoder: bool = False) -> list[Weight]:
    """All parameters of a module, tied ones once. ``train_decoder``: as full-parameter training of both stages would
    have it, vision frozen; otherwise as ``requires_grad`` says."""
    found: Counter[Weight] = Counter()
    for name, parameter in module.named_parameters():
        part = part_of(name)
        trained = part != "vision" if train_decoder else parameter.requires_grad
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        found[Weight(shape, part, trained, parameter.element_size(), adapter=part == "layer" and ".lora_" in name)] += 1
    return [replace(weight, count=count) for weight, count in found.items()]


def with_adapters(model: Stock, rank: int, targets: Sequence[str], *, markers: bool) -> list[Weight]:
    """The parameters as LoRA would have them: all frozen, adapters beside the named linear layers of the decoder and,
    with ``markers``, rows of the embedding and of a head of its own."""
    frozen = [replace(weight, trained=False) for weight in weights_of(model)]
    added: Counter[Weight] = Counter()
    for name, inner in model.named_modules():
        if isinstance(inner, nn.Linear) and name.endswith(tuple(targets)) and ".language_model." in f".{name}.":
            for shape in ((rank, inner.in_features), (inner.out_features, rank)):
                added[Weight(shape, "layer", True, ADAPTER_BYTES, adapter=True)] += 1
    if markers:
        tables = {
            id(table.weight): table.weight for table in (model.get_input_embeddings(), model.get_output_embeddings())
        }
        for table in tables.values():
            added[Weight((MARKERS, table.shape[1]), "root", True, table.element_size())] += 1
    return [*frozen, *(replace(weight, count=count) for weight, count in added.items())]
