"""Training a base model from nothing: all parameters, vision included.

Not in the paper, which has pretrained backbones: the embedded world needs a model that can see. A small model does not
learn to see from answer letters alone, so three signals are combined: the answer in words and as a letter, a caption,
and a dense auxiliary loss that reads colour and shape of the object under every visual token from that token alone (two
linear heads that are dropped at export).
"""

from __future__ import annotations

import zlib
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from realvr.backbone.backbone import Backbone, VisualTokens
from realvr.backbone.types import Prompt, Turn
from realvr.data.boxes import token_boxes
from realvr.data.mixture import Mixture
from realvr.data.sample import Sample
from realvr.data.wording import spelled_out
from realvr.errors import UserError
from realvr.imaging.types import Grid
from realvr.latent.span import decoder_pass, token_logprobs
from realvr.maths import objective, reconstruction
from realvr.training.dropping import Draws
from realvr.training.examples import Encoder, share_of_batch
from realvr.training.prefetch import parallel_map, prefetch
from realvr.training.sft import load_backbone
from realvr.training.sft_step import SftBatch, SftExample, pack_rows
from realvr.training.sources import TrainingData, training_data
from realvr.training.task import Collected, Metrics, Ranks

CAPTION_REQUEST = "Describe the image."
ATTRIBUTES = ("color", "shape")
NOTHING = ""


@dataclass
class BaseBatch:
    """Rows of examples (questions or captions), and dense labels of every visual token."""

    rows: SftBatch
    caption_M: Tensor  # bool: the labelled token belongs to a caption
    dense_NA: Tensor  # class of each visual token per attribute; -1 where unknown
    totals: dict[str, float]

    @property
    def names(self) -> list[str]:
        return self.rows.names

    def to(self, device: torch.device) -> BaseBatch:
        self.rows.to(device)
        self.caption_M, self.dense_NA = self.caption_M.to(device), self.dense_NA.to(device)
        return self


class BaseStep(nn.Module):
    """``forward(microbatch, term=None) -> (loss, metrics)``; see the contract in ``task.py``."""

    def __init__(self, backbone: Backbone, settings: Any, classes: Sequence[int]) -> None:
        super().__init__()
        self.model = backbone.model
        self.backbone = backbone
        self.weights = {
            "next_token": settings.next_token_weight,
            "caption": settings.caption_weight,
            "dense": settings.dense_weight,
            "feature_norm": settings.feature_norm_weight,
        }
        self.heads = nn.ModuleList(
            nn.Linear(backbone.width, count, device=backbone.device, dtype=backbone.dtype) for count in classes
        )

    def forward(self, micro: BaseBatch, term: str | None = None) -> tuple[Tensor, Metrics]:
        rows = micro.rows
        visual = self.backbone.encode_images(rows.images, train=True)
        hidden = self._read(rows, visual)
        predicting = hidden[rows.predict_M2[:, 0], rows.predict_M2[:, 1]]
        logp, _ = token_logprobs(self.backbone, predicting, rows.labels_M)
        losses = {
            "next_token": reconstruction.next_token(logp, ~micro.caption_M, micro.totals["next_token"]),
            "caption": reconstruction.next_token(logp, micro.caption_M, micro.totals["caption"]),
            "dense": self._dense(visual.features_ND, micro),
            "feature_norm": _norm_error(visual.features_ND) / micro.totals["visual"],
        }
        terms = {name: (self.weights[name], value) for name, value in losses.items() if term in (None, name)}
        loss = objective.total(terms) + hidden.sum() * 0.0 + visual.features_ND.sum() * 0.0
        share = torch.tensor(len(rows.names) / micro.totals["examples"], device=loss.device)
        metrics: Metrics = {f"loss/{name}": (value.detach().float(), share) for name, value in losses.items()}
        metrics["loss"] = (loss.detach().float(), share)
        return loss, metrics

    def _read(self, rows: SftBatch, visual: VisualTokens) -> Tensor:
        embeds = self.backbone.embed(rows.ids_RT.masked_fill(rows.image_RT, 0))
        embeds = embeds.masked_scatter(rows.image_RT[..., None], visual.features_ND.to(embeds.dtype))
        return decoder_pass(
            self.backbone,
            None,
            embeds,
            rows.positions,
            real_BT=rows.real_RT,
            segment_BT=rows.segment_RT,
            window_position_BT=rows.place_RT if self.backbone.windowed else None,
            image_BT=rows.image_RT,
            deepstack=visual.deepstack,
        )[1]

    def _dense(self, features_ND: Tensor, micro: BaseBatch) -> Tensor:
        total = features_ND.sum() * 0.0
        for number, head in enumerate(self.heads):
            labels = micro.dense_NA[:, number]
            total = total + nn.functional.cross_entropy(
                head(features_ND).float(), labels, ignore_index=-1, reduction="sum"
            )
        return total / micro.totals["dense"]


def _norm_error(features_ND: Tensor) -> Tensor:
    """Sum over visual tokens of the squared distance of their root mean square from 1.

    Later stages have a latent reconstruct them, and a latent comes out of a norm layer: features that have grown large
    cannot be matched, and the reconstruction error is then about length only.
    """
    rms_N = features_ND.float().pow(2).mean(-1).add(1e-6).sqrt()
    return (rms_N - 1).pow(2).sum()


_Rows = tuple[list[SftExample], list[bool], list[Tensor]]
"""Rows of a sample, whether each is a caption, and the dense labels of each row's visual tokens."""


class BaseTask:
    """One optimizer step is ``optim.batch`` samples over all ranks; each gives a question row and, where it has one, a
    caption row."""

    term_names = ("next_token", "caption", "dense", "feature_norm")

    def __init__(self, backbone: Backbone, settings: Any, ranks: Ranks, data: TrainingData) -> None:
        self.backbone, self.settings, self.ranks, self.data = backbone, settings, ranks, data
        self.share = share_of_batch(settings, ranks)
        backbone.model.requires_grad_(True)
        backbone.spell_out = True
        self.samples: Mixture[Sample] = data.mixture(settings, ranks.rank, ranks.world)
        self.classes = [_classes(self.samples.sources, attribute) for attribute in ATTRIBUTES]
        self.module = BaseStep(backbone, settings, [len(names) for names in self.classes])
        self.encoder = Encoder(backbone, backbone.context_length)
        self.kept: dict[tuple[str, int], _Rows] = {}
        self.draws = Draws()
        self._position: dict[str, Any] | None = None
        self._prefetched: Generator[Any] | None = None

    def collect(self, step: int) -> Collected:
        micro, drawn = next(self._steps(step))
        self.draws.add(drawn)
        for batch in micro:
            batch.rows.unstack_images()
        own = {
            "next_token": sum(int((~m.caption_M).sum()) for m in micro),
            "caption": sum(int(m.caption_M.sum()) for m in micro),
            "dense": sum(int((m.dense_NA >= 0).sum()) for m in micro),
            "examples": sum(len(m.rows.names) for m in micro),
            "visual": sum(len(m.dense_NA) for m in micro),
        }
        everyone = self.ranks.gather_objects(own)
        totals = {name: float(max(sum(each[name] for each in everyone), 1)) for name in own}
        tokens = torch.tensor(float(sum(int(m.rows.real_RT.sum()) for m in micro)), device=self.backbone.device)
        for batch in micro:
            batch.totals = totals
            batch.to(self.backbone.device)
        world = torch.tensor(1 / self.ranks.world, device=self.backbone.device)
        return Collected(
            micro, {"tokens": (tokens, world), **self.draws.metrics(self.backbone.device, self.ranks.world)}
        )

    def _steps(self, step: int) -> Iterator[tuple[list[BaseBatch], Draws]]:
        """Microbatches of ``step`` and the following ones; worker processes make them ahead of time."""
        if self._prefetched is None:
            workers = self.settings.data.workers
            if workers and self.settings.data.keep_encoded and not self.kept:
                self._encode_all(workers)
            self._prefetched = prefetch(self._make, self._orders(step), workers)
        for (position, _), made in self._prefetched:
            self._position = position
            yield made

    def _encode_all(self, workers: int) -> None:
        """Fill the memory before the workers of the loop are forked, so that they share it."""
        samples = self.samples
        places = [
            (name, i) for name, source in zip(samples.names, samples.sources, strict=True) for i in range(len(source))
        ]
        for place, rows in zip(places, parallel_map(self._laid_out, places, workers), strict=True):
            if rows is not None:
                self.kept[place] = rows

    def _laid_out(self, place: tuple[str, int]) -> _Rows | None:
        found = self._encode_anew(self.samples.at(place))  # in a worker, which need not keep it
        for example in found[0] if found else ():
            example.layout(self.backbone)
        return found

    def _orders(self, step: int) -> Iterator[tuple[dict[str, Any], tuple[int, list[tuple[str, int]]]]]:
        """Per step: where the data stands after it, and what it is made of."""
        places = self.samples.places()
        while True:
            drawn = [next(places) for _ in range(self.share)]
            yield self.samples.state_dict(), (step, drawn)
            step += 1

    def _make(self, order: tuple[int, list[tuple[str, int]]]) -> tuple[list[BaseBatch], Draws]:
        """Encode and lay out one step; and which of its rows cannot be used. May run in another process."""
        step, drawn = order
        size, rank = self.settings.optim.microbatch, self.ranks.rank
        generator = torch.Generator().manual_seed((self.settings.run.seed * 1_000_003 + step) * 4099 + rank)
        self.encoder.draws = Draws(len(drawn))  # of this step alone: another process may make the next
        found = [rows for rows in (self._encode(place) for place in drawn) if rows is not None]
        if len(found) <= len(drawn) - size:  # a microbatch would be empty
            draws = self.encoder.draws
            first = next(iter(draws.first.values()))
            raise UserError(f"step {step + 1}: too few rows for its microbatches: {draws.line()} (first: {first})")
        made = [self._batch(found[i : i + size], generator) for i in range(0, len(found), size)]
        if self.settings.data.workers:
            for batch in made:
                batch.rows.stack_images()
        return made, self.encoder.draws

    def _encode(self, place: tuple[str, int]) -> _Rows | None:
        """Rows of a sample, or None (counted) where it cannot be used; from memory with ``data.keep_encoded``."""
        found = self.kept.get(place)
        if found is None:
            found = self._encode_anew(self.samples.at(place))
            if found is not None and self.settings.data.keep_encoded:
                self.kept[place] = found
        return found

    def _encode_anew(self, sample: Sample) -> _Rows | None:
        prompt = self.encoder.prompt(sample)
        if prompt is None:
            return None
        rows, captions = [self._row(prompt, spelled_out(sample), sample.id)], [False]
        labels = [_dense_labels(sample, [image.grid for image in prompt.images], self.classes)]
        caption = sample.meta.get("caption") if self._captioned(sample) else None
        if isinstance(caption, str) and caption and len(prompt.images) == 1:
            request = self.backbone.prompt([Turn("user", CAPTION_REQUEST, list(prompt.images))])
            rows.append(self._row(request, caption, f"{sample.id}/caption"))
            captions.append(True)
            labels.append(labels[0])
        return rows, captions, labels

    def _captioned(self, sample: Sample) -> bool:
        """Whether the caption of this sample is used: a fixed share of the samples, by name."""
        return zlib.crc32(sample.id.encode()) % 10_000 < self.settings.caption_ratio * 10_000

    def _row(self, prompt: Prompt, text: str, name: str) -> SftExample:
        ids = [*self.backbone.prompts.encode_text(text)[0], self.backbone.end_of_turn_id]
        whole = Prompt(torch.cat([prompt.ids, torch.tensor(ids)]), prompt.images)
        return SftExample(whole, len(prompt), torch.empty(0, dtype=torch.long), name)

    def _batch(self, pairs: Sequence[Any], generator: torch.Generator) -> BaseBatch:
        examples = [example for rows, _, _ in pairs for example in rows]
        captions = [flag for _, flags, _ in pairs for flag in flags]
        packed = pack_rows(
            self.backbone,
            _side_by_side(examples),
            jitter=self.settings.position_jitter,
            generator=generator,
        )
        counts = torch.tensor([len(example) - example.prompt_length for example in examples])
        caption_M = torch.tensor(captions).repeat_interleave(counts)
        dense = torch.cat([each for _, _, labels in pairs for each in labels])
        return BaseBatch(packed, caption_M, dense, {})

    def after_update(self) -> None:
        """Nothing moves with the parameters."""

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self._position or self.samples.state_dict(), "draws": self.draws.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.close()
        self.samples.load_state_dict(state["samples"])
        self.draws.load_state_dict(state.get("draws", {"rejected": {}}))
        self._position = None

    def close(self) -> None:
        """End the worker processes."""
        if self._prefetched is not None:
            self._prefetched.close()
            self._prefetched = None

    def export(self, directory: Path) -> None:
        self.backbone.save(directory)


def _side_by_side(examples: Sequence[SftExample]) -> list[list[SftExample]]:
    """Rows no longer than the longest example, filled in order: a dialogue is twice as long as a question."""
    width, used = max(len(example) for example in examples), 0
    rows: list[list[SftExample]] = []
    for example in examples:
        if not rows or used + len(example) > width:
            rows.append([])
            used = 0
        rows[-1].append(example)
        used += len(example)
    return rows


def _objects(sample: Sample) -> list[dict[str, Any]]:
    found = sample.meta.get("objects", [])
    return [item for item in found if isinstance(item, dict) and "box" in item] if isinstance(found, list) else []


def _classes(sources: Any, attribute: str) -> list[str]:
    """Values of an attribute in the data, after the class for "no object"."""
    values = {str(item.get(attribute, NOTHING)) for samples in sources for s in samples for item in _objects(s)}
    return [NOTHING, *sorted(values - {NOTHING})]


def _area(item: dict[str, Any]) -> float:
    x0, y0, x1, y1 = item["box"]
    return float((x1 - x0) * (y1 - y0))


def _dense_labels(sample: Sample, grids: Sequence[Grid], classes: Sequence[Sequence[str]]) -> Tensor:
    """(N, A) class of the object at the centre of each visual token (the smallest where several are), 0 for none, -1
    where the sample does not describe its objects (or has several images)."""
    count = sum(grid.tokens for grid in grids)
    objects = _objects(sample)
    if len(grids) != 1 or not objects:
        return torch.full((count, len(classes)), -1, dtype=torch.long)
    width, height = sample.images[0].size
    cells = token_boxes(grids[0])
    x, y = (cells[:, 0] + cells[:, 2]) / 2 * width, (cells[:, 1] + cells[:, 3]) / 2 * height
    labels = np.zeros((count, len(classes)), dtype=np.int64)
    for item in sorted(objects, key=_area, reverse=True):
        x0, y0, x1, y1 = item["box"]
        inside = (x >= x0) & (x < x1) & (y >= y0) & (y < y1)
        for number, (attribute, names) in enumerate(zip(ATTRIBUTES, classes, strict=True)):
            labels[inside, number] = names.index(str(item.get(attribute, NOTHING)))
    return torch.from_numpy(labels)


def build_task(settings: Any, ranks: Ranks) -> BaseTask:
    """Load the (random) model that ``settings`` names and make its base-training task."""
    data = training_data(settings, ranks)
    return BaseTask(load_backbone(settings, ranks), settings, ranks, data)
