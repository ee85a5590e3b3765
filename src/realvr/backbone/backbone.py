"""One adapter over the unmodified transformers classes of all five families.

Nothing here subclasses or patches a model. What differs between families is detected on the instance: multimodal rotary
positions (``get_rope_index``), image tokens that attend both ways (``token_type_ids`` in the signature of the core),
and visual features added inside the decoder (``deepstack_visual_embeds``).
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor, nn

from realvr.backbone import attention, fused_layers, padded_vision, vision
from realvr.backbone.attention import Pass
from realvr.backbone.batch import Batch, collate
from realvr.backbone.generation import end_ids, ignored_defaults
from realvr.backbone.notices import notice_once
from realvr.backbone.prompts import PromptEncoder
from realvr.backbone.static import StaticPass
from realvr.backbone.types import Prompt, Turn
from realvr.families import Family, Stock
from realvr.imaging.ahead import Ahead, threads_for
from realvr.imaging.processing import ImageProcessor
from realvr.imaging.reference import ImageRef
from realvr.imaging.types import Grid, ImageInput

VISION = ("visual", "vision_tower", "multi_modal_projector")
"""Names of vision towers and what follows them, inside ``model.model``."""


@dataclass(frozen=True)
class Markers:
    """Ids of ``<|lvr_start|>``, ``<|lvr|>`` (a latent slot) and ``<|lvr_end|>``."""

    start: int
    slot: int
    end: int


@dataclass(frozen=True)
class VisualTokens:
    """Visual tokens of several images after the merger, one after the other."""

    features_ND: Tensor
    deepstack: tuple[Tensor, ...]  # Qwen3: (N, D) per deepstack layer
    grids: tuple[Grid, ...]

    def per_image(self) -> tuple[Tensor, ...]:
        """One (n_i, D) per image, raster order over its grid."""
        return self.features_ND.split([grid.tokens for grid in self.grids])

    def split(self, images: Sequence[int]) -> list[VisualTokens]:
        """In parts of so many images each, over the same memory."""
        ends = list(itertools.accumulate(images))
        grids = [self.grids[end - count : end] for end, count in zip(ends, images, strict=True)]
        sizes = [sum(grid.tokens for grid in each) for each in grids]
        pieces = zip(*(x.split(sizes) for x in (self.features_ND, *self.deepstack)), strict=True)
        return [VisualTokens(x[0], tuple(x[1:]), each) for x, each in zip(pieces, grids, strict=True)]

    @classmethod
    def join(cls, parts: Sequence[VisualTokens]) -> VisualTokens:
        """Those of several, one after the other. Parts without an image have no deep features, and need none."""
        full = [part for part in parts if part.grids] or list(parts[:1])
        if len(full) == 1:
            return full[0]
        features, *deepstack = (torch.cat(x) for x in zip(*((p.features_ND, *p.deepstack) for p in full), strict=True))
        return cls(features, tuple(deepstack), tuple(grid for part in full for grid in part.grids))


class Backbone:
    """A stock vision-language model with its tokenizer and image processing, ready for latent reasoning."""

    def __init__(
        self,
        model: Stock,
        tokenizer: Stock,
        family: Family,
        processor: ImageProcessor,
        markers: Markers,
        latents: int,
        markers_added: bool = False,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.family = family
        self.processor = processor
        self.markers = markers
        self.latents = latents
        """K of the checkpoint: the number of latent slots it was trained with."""
        self.markers_added = markers_added
        """True when the checkpoint had no marker tokens, so that their embeddings are untrained."""
        self.spell_out = False
        """Whether it was taught to answer multiple choice in words before the letter; kept in its ``config.json``."""
        self.whole = True
        """Whether all of its weights are in this process, on one device. False where an engine, or several GPUs, hold
        a part each."""
        self.side_files: dict[str, str] = {}
        """Further files of the checkpoint, by name, that are handed on unread when it is saved."""
        self.core = self.model.model
        self.decoder = self.core.language_model
        self.mrope = hasattr(self.core, "get_rope_index")
        self.two_way_images = "token_type_ids" in inspect.signature(self.core.forward).parameters
        self.deepstack = "deepstack_visual_embeds" in inspect.signature(self.decoder.forward).parameters
        self.windowed = "sliding_attention" in (getattr(self.text_config, "layer_types", None) or ())
        self.image_id = int(self.model.config.image_token_id)
        self.eos_ids = end_ids(self.model, tokenizer)
        self.prompts = PromptEncoder(tokenizer, family, processor, self.context_length)
        self.fast_vision = False
        """Whether the frozen tower runs in fewer kernels and over padded copies of its weights, and pixels come from
        pinned memory, on a GPU in 16 bits."""
        self._ahead: Ahead[ImageRef, ImageInput] | None = None
        self._padded_vision = padded_vision.PaddedVision(self.vision_modules())
        self._fused_vision = fused_layers.FusedWhileRunning(self.vision_modules())
        self._tower_inputs = vision.TowerInputs(getattr(self.model.config, "vision_config", None))
        self.use_realvr_attention()

    # ------------------------------------------------------------------ loading and saving (see loading.py)

    @classmethod
    def load(cls, path: str | Path, **options: Any) -> Backbone:
        """Load a local directory or hub id; see :func:`realvr.backbone.loading.load` for the options."""
        from realvr.backbone.loading import load

        return load(path, **options)

    def save(self, directory: str | Path, state: dict[str, Tensor] | None = None) -> Path:
        """Write a plain HF directory that stock transformers loads; see :func:`realvr.backbone.loading.save`."""
        from realvr.backbone.loading import save

        return save(self, directory, state)

    # ------------------------------------------------------------------ facts

    @property
    def device(self) -> torch.device:
        """Where batches have to be: with the embeddings. Decoder layers may be elsewhere."""
        return self.core.get_input_embeddings().weight.device

    @property
    def devices(self) -> list[torch.device]:
        """Every device that holds weights, the one of the batches first."""
        return list(dict.fromkeys([self.device, *(parameter.device for parameter in self.model.parameters())]))

    @property
    def dtype(self) -> torch.dtype:
        """Type of the embeddings, hence of everything that is fed in their place."""
        return self.core.get_input_embeddings().weight.dtype

    @cached_property
    def end_of_turn_id(self) -> int:
        """The id with which the chat template ends a reply, where it is one that stops decoding; else the tokenizer's
        end of sequence. It is what a model is taught to stop with."""
        reply = self.prompts.encode_text("ok")[0]
        ids = self.prompt([Turn("user", "ok?"), Turn("assistant", ids=reply)], generation_prompt=False).ids.tolist()
        starts = [i for i in range(len(ids) - len(reply)) if ids[i : i + len(reply)] == reply]
        after = ids[starts[-1] + len(reply)] if starts else None
        if after in self.eos_ids:
            return int(after)
        return int(self.tokenizer.eos_token_id if self.tokenizer.eos_token_id is not None else self.eos_ids[0])

    @property
    def ignored_defaults(self) -> dict[str, Any]:
        """Generation defaults of the checkpoint (``repetition_penalty``, …) that stock ``generate`` would obey."""
        return ignored_defaults(self.model)

    @property
    def text_config(self) -> Stock:
        """Configuration of the language model, which families nest differently."""
        return self.model.config.get_text_config()

    @property
    def context_length(self) -> int:
        """Most tokens of a sequence, visual tokens and span included."""
        return int(self.text_config.max_position_embeddings)

    @property
    def width(self) -> int:
        """D."""
        return int(self.text_config.hidden_size)

    @property
    def layers(self) -> int:
        """L."""
        return int(self.text_config.num_hidden_layers)

    def forbidden_ids(self) -> Tensor:
        """Ids that no policy may sample: vision and latent control tokens, and rows beyond the tokenizer."""
        find = self.tokenizer.backend_tokenizer.token_to_id  # get_vocab() would copy the whole vocabulary
        ids = {self.image_id, self.markers.start, self.markers.slot, self.markers.end}
        ids |= {i for i in map(find, self.family.never_sampled) if i is not None}
        rows = int(self.model.lm_head.out_features)
        beyond = min(len(self.tokenizer), rows)  # there may be as many as in a whole vocabulary
        return torch.cat([torch.tensor(sorted(i for i in ids if i < beyond)), torch.arange(beyond, rows)])

    def use_realvr_attention(self) -> None:
        """Route decoder (and Qwen vision) attention through the registered functions."""
        attention.register()
        vision.register()
        chosen = {"text_config": attention.TEXT_ATTENTION}
        if self.mrope:
            chosen["vision_config"] = vision.VISION_ATTENTION
        self.model.set_attn_implementation(chosen)

    def vision_modules(self) -> list[nn.Module]:
        """Vision tower and merger/projector."""
        return [getattr(self.core, name) for name in VISION if hasattr(self.core, name)]

    def freeze_vision(self) -> None:
        """Keep vision tower and merger as they are: targets and prototypes are made of their features."""
        for module in self.vision_modules():
            module.requires_grad_(False)

    @property
    def fused_layers(self) -> bool:
        """Whether norms, rotary embeddings and MLP gates of the decoder run in fewer kernels."""
        return any(map(fused_layers.is_fused, self.decoder.modules()))

    @fused_layers.setter
    def fused_layers(self, on: bool) -> None:
        (fused_layers.fuse if on else fused_layers.restore)(self.decoder)

    # ------------------------------------------------------------------ inputs

    def prompt(self, turns: Sequence[Turn], **options: Any) -> Prompt:
        """Encode a conversation; see :meth:`realvr.backbone.prompts.PromptEncoder.encode`."""
        return self.prompts.encode(turns, **options)

    def batch(self, prompts: Sequence[Prompt], start_B: Tensor | None = None) -> Batch:
        """Left-padded batch on this backbone's device."""
        pad = self.tokenizer.pad_token_id
        return collate(
            prompts,
            image_id=self.image_id,
            slot_id=self.markers.slot,
            pad_id=0 if pad is None else pad,
            mrope=self.mrope,
            start_B=None if start_B is None else start_B.cpu(),
        ).to(self.device)

    def image(self, image: ImageRef, open: Callable[[ImageRef], Image] | None = None) -> ImageInput:
        """The picture of a reference, processed; where threads prepare pictures ahead (`prepared_ahead`), by them."""
        return self._prepared(image, open) if self._ahead is None else self._ahead.get(image)

    def _prepared(self, image: ImageRef, open: Callable[[ImageRef], Image] | None = None) -> ImageInput:
        return self.staged(self.processor(image.open() if open is None else open(image)))

    @contextmanager
    def prepared_ahead(
        self, order: Iterable[ImageRef], room: int, processes: int = 1
    ) -> Iterator[Ahead[ImageRef, ImageInput]]:
        """Meanwhile threads prepare the pictures of ``order`` for `image`, at most ``room`` of them at a time; the
        caller discards those that are not needed any more."""
        before = self._ahead
        with Ahead(self._prepared, order, room, threads_for(processes)) as self._ahead:
            try:
                yield self._ahead
            finally:
                self._ahead = before

    def staged(self, image: ImageInput) -> ImageInput:
        """The image as `encode_images` takes it without work or waiting: for a thread that prepares images ahead."""
        if not (self.fast_vision and padded_vision.pays(self.device, self.dtype)):
            return image
        return replace(image, pixels=vision.staged(image.pixels, self.dtype))

    def encode_images(self, images: Sequence[ImageInput], train: bool = False) -> VisualTokens:
        """Visual tokens of ``images``, in order. Equal images are encoded once. Frozen (no graph) unless ``train``."""
        grids = tuple(image.grid for image in images)
        if not images:
            return VisualTokens(torch.empty(0, self.width, dtype=self.dtype, device=self.device), (), ())
        unique = list({image.key: image for image in images}.values())
        fast = self.fast_vision and padded_vision.pays(self.device, self.dtype)
        pixels = vision.upload([image.pixels for image in unique], self.dtype, self.device, pinned=fast)
        with torch.set_grad_enabled(train and torch.is_grad_enabled()):
            if fast and not torch.is_grad_enabled():
                with self._padded_vision.running(), self._fused_vision.running():
                    features, deepstack = self._encode(pixels, unique)
            else:
                if fast:
                    notice_once("fast vision: the vision tower is trained; its stock modules run where it has a graph")
                self._padded_vision.drop()
                features, deepstack = self._encode(pixels, unique)
        if len(unique) < len(images):
            starts = [0, *itertools.accumulate(image.tokens for image in unique)]
            place = {image.key: start for image, start in zip(unique, starts, strict=False)}
            index = torch.cat([torch.arange(image.tokens) + place[image.key] for image in images])
            index = index.to(self.device, non_blocking=True)
            features, *deepstack = (x[index] for x in (features, *deepstack))
        return VisualTokens(features, tuple(deepstack), grids)

    def _encode(self, pixels: Tensor, images: Sequence[ImageInput]) -> tuple[Tensor, list[Tensor]]:
        if not self.mrope:
            output = self.core.get_image_features(pixel_values=pixels, return_dict=True)
            return output.pooler_output.flatten(0, 1), []
        merge = self.model.config.vision_config.spatial_merge_size
        inputs = self._tower_inputs([(x.grid.rows * merge, x.grid.cols * merge) for x in images], self.device)
        output = self.core.get_image_features(pixels, return_dict=True, **inputs)
        # Flat tensors in transformers 5.17, one tensor per image in later releases.
        flat = [x if isinstance(x, Tensor) else torch.cat(x) for x in getattr(output, "deepstack_features", None) or []]
        return torch.cat(output.pooler_output), flat

    def embed(self, ids: Tensor) -> Tensor:
        """Input embeddings (…, D) of text ids."""
        return self.core.get_input_embeddings()(ids)

    def embed_batch(self, batch: Batch, visual: VisualTokens) -> Tensor:
        """Input embeddings (B, T, D): text, visual tokens, and the saved latents of earlier spans.

        Both are checked against the batch first: ``masked_scatter`` takes what it needs from a longer source and says
        nothing.
        """
        if visual.grids != tuple(image.grid for image in batch.images):
            given, own = (sum(x.tokens for x in some) for some in (visual.grids, batch.images))
            raise ValueError(
                f"the visual tokens given ({given}, of {len(visual.grids)} images) are not those of the batch "
                f"({own}, of {len(batch.images)} images)"
            )
        for span in batch.latents:
            if span.shape[-1] != self.width:
                raise ValueError(f"saved latents have width {span.shape[-1]}, the model has {self.width}")
        text = batch.ids_BT.masked_fill(batch.image_BT | batch.slot_BT, 0)  # an image id may lie outside the vocabulary
        embeds = self.embed(text)
        if visual.grids:
            embeds = embeds.masked_scatter(batch.image_BT[..., None], visual.features_ND.to(embeds.dtype))
        if batch.latents:
            spans = torch.cat([span.to(embeds.device, embeds.dtype) for span in batch.latents])
            embeds = embeds.masked_scatter(batch.slot_BT[..., None], spans)
        return embeds

    # ------------------------------------------------------------------ the decoder

    def decode(
        self,
        embeds_BTD: Tensor,
        positions: Tensor,
        carried: Pass | StaticPass,
        image_BT: Tensor | None = None,
        deepstack: Sequence[Tensor] = (),
    ) -> Tensor:
        """Hidden states (B, T, D) after the final norm, the ones the LM head reads."""
        # A four-dimensional mask is passed through untouched by transformers; the attention function uses the Pass's
        # own.
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=embeds_BTD.device)
        if self.mrope and positions.ndim == 2:
            positions = positions.expand(3, -1, -1)
        extra: dict[str, Any] = {}
        if deepstack:
            extra = {"visual_pos_masks": image_BT, "deepstack_visual_embeds": list(deepstack)}
        output = self.decoder(
            inputs_embeds=embeds_BTD,
            attention_mask=mask,
            position_ids=positions,
            use_cache=False,
            realvr=carried,
            **extra,
        )
        return output.last_hidden_state.to(embeds_BTD.device)

    def logits(self, hidden: Tensor) -> Tensor:
        """Vocabulary logits of the given rows only; (…, D) → (…, V)."""
        head = self.model.lm_head
        return head(hidden.to(head.weight.device)).to(hidden.device)
