"""Records of `realvr.diagnostics.saliency` on a model's tensors: where the saliency and the attention of a generated
answer lie, and for some samples the maps themselves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from realvr.backbone.backbone import Backbone
from realvr.backbone.types import Prompt
from realvr.data.boxes import canvas_size, on_canvas, prompt_boxes, token_mask, with_area
from realvr.data.sample import Box, Sample
from realvr.diagnostics.measuring.attending import Generated, answer
from realvr.diagnostics.measuring.attributing import Attributed, Whole, attribute, attribute_whole
from realvr.diagnostics.measuring.cases import data_address
from realvr.diagnostics.measuring.reading import Reading
from realvr.diagnostics.model import Model
from realvr.diagnostics.saliency_maps import GROUPS, KINDS, MOST_SIDE, bins, levels, pooled_pairs
from realvr.errors import UserError
from realvr.imaging.types import Grid
from realvr.runs.journal import Record
from realvr.widgets.browser import pooled, short

MOST_TEXT = 200
"""Characters of a reply that a record keeps."""


@dataclass(frozen=True)
class Layout:
    """What the columns of one row are: 'image', 'text', 'latents', 'reply', or '' for padding, in order."""

    groups: list[str]
    images: list[list[int]]
    """Columns of each picture's visual tokens, in token order."""

    def columns(self, group: str) -> list[int]:
        """The columns of a group."""
        return [column for column, name in enumerate(self.groups) if name == group]


def layout(prompt: Prompt, image_T: Tensor, latents: int, total: int) -> Layout:
    """Columns of a row: left padding, prompt, span, reply. ``image_T`` marks visual tokens before the reply."""
    marked = image_T.tolist()
    span = latents + 2 if latents else 0
    padding = len(marked) - span - len(prompt)
    groups = [""] * padding + ["image" if one else "text" for one in marked[padding : padding + len(prompt)]]
    groups += ["reply", *["latents"] * latents, "reply"] if span else []
    groups += ["reply"] * (total - len(groups))
    visual = iter([column for column, one in enumerate(marked) if one])
    return Layout(groups, [[next(visual) for _ in range(image.tokens)] for image in prompt.images])


def measure_saliency(
    model: Model, samples: Sequence[Sample], first: Set[str], detailed: Set[str], policy: str, pair_tokens: int
) -> Iterator[Record]:
    """Records of one batch. ``first`` holds the ids of its samples that are among the first of the run."""
    reading = model.read(samples)
    yield from ({"id": sample.id, "error": error} for sample, error in reading.errors)
    answers = answer(model.backbone, reading, model.sampling, model.latents, policy)
    rows = [row for row, one in enumerate(answers) if one.content]
    found = _attributed(model, reading, answers, rows) if rows else None
    places = {row: place for place, row in enumerate(rows)}
    for row, (sample, said) in enumerate(zip(reading.samples, answers, strict=True)):
        record = {
            "id": sample.id,
            "latents": model.latents,
            "answer": said.extracted,
            "text": said.text[:MOST_TEXT],
            "correct": said.correct,
            "tokens": len(said.content),
            "error": None,
        }
        if found is not None and row in places:
            case = _Case(model.backbone, sample, reading, row, said, found, places[row])
            record |= case.numbers()
            if sample.id in first | detailed:
                record |= {"first": sample.id in first, "detail": case.detail(pair_tokens)}
        yield record


def _attributed(model: Model, reading: Reading, answers: Sequence[Generated], rows: Sequence[int]) -> Attributed:
    """Scores of the rows that have an answer."""
    assert reading.after is not None
    backbone = model.backbone
    last = [backbone.markers.end if model.latents else int(reading.prompts[row].ids[-1]) for row in rows]
    return attribute(
        backbone,
        reading.after.select(torch.tensor(rows, device=backbone.device)),
        torch.tensor(last, device=backbone.device),
        [(answers[row].ids, answers[row].content) for row in rows],
    )


class _Case:
    """One answered sample, with the scores of all its columns."""

    def __init__(
        self,
        backbone: Backbone,
        sample: Sample,
        reading: Reading,
        row: int,
        said: Generated,
        found: Attributed,
        place: int,
    ) -> None:
        assert reading.after is not None and reading.latents_RKD is not None
        self.backbone, self.sample, self.said, self.found, self.place = backbone, sample, said, found, place
        self.prompt, self.latents_KD = reading.prompts[row], reading.latents_RKD[row]
        self.scores = {kind: found.mean(kind)[place].double().cpu() for kind in KINDS}
        total = len(self.scores["saliency"])
        self.layout = layout(self.prompt, reading.after.image_BT[row], len(self.latents_KD), total)
        self.grids = [image.grid for image in self.prompt.images]
        self.boxes = _boxes(sample)

    # ------------------------------------------------------------------ numbers

    def numbers(self) -> dict[str, Any]:
        """Shares of all groups of columns, of the evidence boxes within the pictures, and of every latent."""
        masks = [
            token_mask([box.xyxy for box in self.boxes if box.image == image], grid).astype(bool)
            for image, grid in enumerate(self.grids)
        ]
        places = [_canvas_tokens(grid) for grid in self.grids]
        area = sum(int(mask.sum()) for mask in masks) / max(1, sum(places))
        return {
            "loss": short(float(self.found.loss_B[self.place])),
            "area": short(area) if area else None,
            **{kind: self._kind(self.scores[kind], masks, places) for kind in KINDS},
        }

    def _kind(self, score_T: Tensor, masks: Sequence[np.ndarray], places: Sequence[int]) -> dict[str, Any]:
        total = float(score_T.sum())
        shares = {
            group: short(float(score_T[self.layout.columns(group)].sum()) / total) if total else None
            for group in GROUPS
        }
        slots = score_T[self.layout.columns("latents")]
        found: dict[str, Any] = {
            "total": short(total),
            **shares,
            "each": [short(float(one) / total) for one in slots] if total else [],
            "inside": None,
            "hit": None,
        }
        # The thumbnail of a tiled picture shows everything once more: it is neither inside a box nor outside.
        shown = [
            (score_T[columns[:count]].numpy(), mask[:count])
            for columns, mask, count in zip(self.layout.images, masks, places, strict=True)
        ]
        values, inside = (np.concatenate(parts) for parts in zip(*shown, strict=True)) if shown else (np.zeros(0),) * 2
        if inside.any() and values.sum() > 0:
            found["inside"] = short(float(values[inside].sum() / values.sum()))
            found["hit"] = bool(inside[int(values.argmax())])
        return found

    # ------------------------------------------------------------------ maps

    def detail(self, pair_tokens: int) -> dict[str, Any]:
        """The picture, the maps of the answer and of each latent over it, and the map of token pairs."""
        length = len(self.prompt) + (len(self.latents_KD) + 2 if len(self.latents_KD) else 0) + max(self.said.content)
        whole = None
        if length <= pair_tokens:
            whole = attribute_whole(self.backbone, self.prompt, self.latents_KD, self.said.ids, self.said.content)
        maps = {kind: self._maps(kind, whole) for kind in KINDS} if self.grids else {}
        chosen = self.boxes[0].image if self.boxes else 0
        return {
            "question": self.sample.question,
            "choices": list(self.sample.choices),
            "truth": self.sample.answer,
            "pictures": [data_address(self.sample.images[index].open()) for index in self.sample.shown],
            "shown": chosen,
            "boxes": [{"image": box.image, "xyxy": [short(value) for value in box.xyxy]} for box in self.boxes],
            "maps": maps,
            "pairs": None if whole is None else self._pairs(whole),
            "no_pairs": None if whole is not None else f"{length} tokens, more than {pair_tokens}",
        }

    def _maps(self, kind: str, whole: Whole | None) -> list[dict[str, Any]]:
        """Levels over every picture: of the answer in each layer (from 1) and their mean, of each latent the mean."""
        layers: dict[int, Tensor] = getattr(self.found, kind)
        rows: list[tuple[int | str, int | str, Tensor]] = [("answer", "mean", self.scores[kind])]
        rows += [("answer", layer + 1, layers[layer][self.place].cpu()) for layer in sorted(layers)]
        if whole is not None:
            padding = self.layout.groups.count("")
            matrix = getattr(whole, kind).cpu()
            for number, column in enumerate(self.layout.columns("latents"), 1):
                row = torch.nn.functional.pad(matrix[column - padding], (padding, 0))
                rows.append((number, "mean", row))
        return [
            {"query": query, "layer": layer, **levels([self._grid(row, image) for image in range(len(self.grids))])}
            for query, layer, row in rows
        ]

    def _grid(self, score_T: Tensor, image: int) -> list[list[float]]:
        values = on_canvas(score_T[self.layout.images[image]].double().numpy(), self.grids[image])
        return [[float(value or 0) for value in row] for row in pooled(values.tolist(), MOST_SIDE)]

    def _pairs(self, whole: Whole) -> dict[str, Any]:
        """The whole matrices, pooled to bins that are read in a figure."""
        groups = [name for name in self.layout.groups if name][: len(whole.saliency)]
        cut = bins(groups)
        ids = [*self.prompt.ids.tolist(), *self._behind()]
        return {
            "groups": [groups[start] for start, _ in cut],
            "labels": [_label(self.backbone, groups[start], ids[start:stop]) for start, stop in cut],
            "sizes": [stop - start for start, stop in cut],
            **{kind: levels([pooled_pairs(getattr(whole, kind).double().cpu().numpy(), cut)]) for kind in KINDS},
        }

    def _behind(self) -> list[int]:
        markers = self.backbone.markers
        span = [markers.start, *[markers.slot] * len(self.latents_KD), markers.end] if len(self.latents_KD) else []
        return [*span, *self.said.ids]


def _boxes(sample: Sample) -> list[Box]:
    """Evidence boxes that cover anything; none where a box is on a picture that is not shown."""
    try:
        return with_area(prompt_boxes(sample))
    except UserError:
        return []


def _canvas_tokens(grid: Grid) -> int:
    rows, columns = canvas_size(grid)
    return rows * columns


def _label(backbone: Backbone, group: str, ids: Sequence[int]) -> str:
    if group in ("image", "latents"):
        return "" if group == "image" else "z"
    text = backbone.tokenizer.decode(list(ids), skip_special_tokens=False)
    return " ".join(text.split())[:24]
