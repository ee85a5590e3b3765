"""Everything that the page of cases can be asked for, on a model's tensors; `realvr.diagnostics.cases` says why."""

from __future__ import annotations

import base64
import io
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from realvr.answers import canonical_answer, equal, parser
from realvr.data.boxes import canvas_size, cell_box, prompt_boxes
from realvr.data.sample import Sample
from realvr.diagnostics.measuring.asking import ask_samples
from realvr.diagnostics.measuring.views import Views, read_views
from realvr.diagnostics.model import Model
from realvr.diagnostics.pairs import Asked, benchmark_of
from realvr.errors import UserError
from realvr.evaluation.responder import Reply
from realvr.imaging.types import Grid
from realvr.latent.group_rollout import decode
from realvr.latent.regions import region_vector
from realvr.latent.span import span_tokens, splice, think
from realvr.latent.state import State
from realvr.latent.walk import walk
from realvr.widgets.explorer import Case, Picture, Said, Steered, Swapped, View, Walked
from realvr.world.trails import follow

MOST_PIXELS = 384
"""Longest side of a picture on the page."""
SMALL = 128
"""Pictures up to this side stay as they are; larger ones become JPEG."""
MOST_CELLS = 8
"""Rows and columns of cells that a latent can be put at; a finer grid of visual tokens is pooled."""
MOST_TEXT = 200


@dataclass(frozen=True)
class Answers:
    """Replies to every view of a question: of the model, then of the second model where there is one."""

    replies: list[list[Said]] = field(default_factory=list)
    error: str | None = None

    @property
    def failed(self) -> bool:
        """Whether the model did not answer every view rightly."""
        return self.error is None and any(one["verdict"] != "right" for one in self.replies[0])


def examine(model: Model, items: Sequence[Asked], policy: str, rows: int) -> dict[str, Answers]:
    """Every view of every question, each in a conversation of its own, put to both models."""
    found: dict[str, Answers] = {}
    size = max(1, rows // 2)
    models = [model, *([model.second] if model.second is not None else [])]
    for start in range(0, len(items), size):
        part = items[start : start + size]
        asked = [_ask_views(one, part) for one in models]
        for place, item in enumerate(part):
            texts = [replies[place] for replies in asked]
            errors = [reply.error for replies in texts for reply in replies if reply.error is not None]
            judged = [[said(item, view, reply.text, policy) for view, reply in enumerate(replies)] for replies in texts]
            found[item.id] = Answers(error=errors[0]) if errors else Answers(judged)
    return found


def _ask_views(model: Model, items: Sequence[Asked]) -> list[list[Reply]]:
    """Replies of one model to each item's views: the original ones together, then the edited ones."""
    found: list[list[Reply]] = [[] for _ in items]
    for view in range(max(len(item.views) for item in items)):
        places = [place for place, item in enumerate(items) if len(item.views) > view]
        replies = ask_samples(model.responder, [items[place].views[view] for place in places], model.latents)
        for place, reply in zip(places, replies, strict=True):
            found[place].append(reply)
    return found


def said(item: Asked, view: int, text: str, policy: str) -> Said:
    """A reply to one view of a question, judged."""
    choices = item.original.choices
    answer = parser(policy, "evaluation").read(text, choices)
    truths = {"right": item.truths[view]} | ({"other": item.truths[1 - view]} if len(item.truths) > 1 else {})
    verdicts = [name for name, truth in truths.items() if equal(answer, truth, choices)]
    verdict = "unread" if answer is None else [*verdicts, "wrong"][0]
    return {"text": text[:MOST_TEXT], "answer": answer, "verdict": verdict}


@torch.no_grad()
def build_cases(
    model: Model, asked: Sequence[tuple[Asked, Answers, str, Sequence[int]]], policy: str, rows: int
) -> list[Case]:
    """A case for each question: (pair or single, its answers, what it is about, steps at which it can be steered)."""
    if not asked:
        return []
    pairs = [pair for pair, *_ in asked]
    views = read_views(model.backbone, pairs, [None] * len(pairs), model.latents)
    if views.errors:
        pair, error = views.errors[0]
        raise UserError(f"{pair.id}: {error}")
    bench = Bench(model, views, policy, rows)
    return [bench.case(number, *one) for number, one in enumerate(asked)]


class Bench:
    """Questions that have been read, ready to be asked with other latents."""

    def __init__(self, model: Model, views: Views, policy: str, rows: int) -> None:
        self.model, self.views, self.policy, self.rows = model, views, policy, rows
        images = [image for prompt in views.prompts for image in prompt.images]
        every = iter(model.backbone.encode_images(images).per_image())
        self.grids = [[image.grid for image in prompt.images] for prompt in views.prompts]
        self.features = [torch.cat([next(every) for _ in prompt.images]) for prompt in views.prompts]
        assert views.latents_RKD is not None
        self.latents_RKD: Tensor = views.latents_RKD

    def case(self, number: int, item: Asked, answers: Answers, about: str, steps: Sequence[int]) -> Case:
        """Everything that the explorer shows of one question."""
        own = self.views.rows[number]
        pictures = [[view.images[index].open() for index in view.shown] for view in item.views]
        changed: list[int] = []
        if len(own) > 1:
            changed = changed_cells(pictures[0][0], pictures[1][0], canvas_size(self.grids[own[0]][0]))
        said_of = [[one[view] for one in answers.replies] for view in range(len(own))]
        return {
            "id": item.id,
            "ids": [view.id for view in item.views],
            "task": benchmark_of(item),
            "edit": item.edit,
            "about": about,
            "question": item.original.question,
            "choices": list(item.original.choices),
            "failed": answers.failed,
            "views": [
                self._view(item, view, own, pictures[view], changed, said_of[view], steps) for view in range(len(own))
            ],
        }

    def _view(
        self,
        item: Asked,
        view: int,
        rows: Sequence[int],
        pictures: Sequence[Image.Image],
        changed: list[int],
        replies: list[Said],
        steps: Sequence[int],
    ) -> View:
        row = rows[view]
        first, *more = self._pictures(item.views[view], row, pictures)
        found: View = {
            **first,
            "truth": item.truths[view],
            "changed": changed,
            "replies": replies,
            "walk": self._walk(row, self.latents_RKD[row]),
            "swaps": self._swaps(item, view, row, rows[1 - view]) if len(rows) > 1 else [],
            "steered": [self._steered(item, view, row, step) for step in steps] if not more else [],
        }
        return {**found, "more": more} if more else found

    def _pictures(self, sample: Sample, row: int, pictures: Sequence[Image.Image]) -> list[Picture]:
        boxes = prompt_boxes(sample)
        return [
            {
                "picture": data_address(picture),
                "size": list(picture.size),
                "grid": list(canvas_size(grid)),
                "evidence": [[round(value, 4) for value in box.xyxy] for box in boxes if box.image == place],
            }
            for place, (picture, grid) in enumerate(zip(pictures, self.grids[row], strict=True))
        ]

    def _walk(self, row: int, latents_KD: Tensor) -> Walked:
        grids = self.grids[row]
        found = walk(latents_KD, self.features[row], grids)
        starts = [0, *itertools.accumulate(math.prod(canvas_size(grid)) for grid in grids)]
        cells = [
            starts[place.image] + place.row * canvas_size(grids[place.image])[1] + place.col for place in found.places()
        ]
        return {"cells": cells, "cosine": [round(float(value), 3) for value in found.cosine]}

    # ------------------------------------------------------------------ latents of the other picture

    def _swaps(self, item: Asked, view: int, row: int, donor: int) -> list[Swapped]:
        """From every step on: own latents before it, the other picture's from it on. Nothing is regenerated."""
        own_KD, other_KD = self.latents_RKD[row], self.latents_RKD[donor]
        spans = [torch.cat([own_KD[:start], other_KD[start:]]) for start in range(len(own_KD))]
        texts: list[str] = []
        for begin in range(0, len(spans), self.rows):
            part = torch.stack(spans[begin : begin + self.rows])
            after, _ = splice(self.model.backbone, self._state(row, len(part)), part)
            texts += self._decode(after, row)
        return [
            {"reply": said(item, view, text, self.policy), "walk": self._walk(row, span[start:])}
            for start, (text, span) in enumerate(zip(texts, spans, strict=True))
        ]

    def _state(self, row: int, count: int) -> State:
        assert self.views.prompt is not None
        index = torch.full((count,), row, dtype=torch.long, device=self.model.backbone.device)
        return self.views.prompt.select(index)

    def _decode(self, after: State, row: int) -> list[str]:
        room = self.model.backbone.context_length - span_tokens(self.model.latents) - len(self.views.prompts[row])
        limits = [min(self.model.sampling.max_new, room)] * after.rows
        return [one.text for (one,) in decode(self.model.backbone, after, 1, self.model.sampling, 0, limits)]

    # ------------------------------------------------------------------ a latent put elsewhere

    def _steered(self, item: Asked, view: int, row: int, step: int) -> Steered:
        """z_step replaced by the visual tokens of each cell in turn, from where the recurrence goes on."""
        (grid,), backbone = self.grids[row], self.model.backbone
        cells = coarse(canvas_size(grid))
        boxes = [cell_box(Grid(*cells), y, x) for y in range(cells[0]) for x in range(cells[1])]
        vectors = [region_vector(self.features[row], grid, box) for box in boxes]
        answers: list[str | None] = []
        walks: list[Walked] = []
        for begin in range(0, len(vectors), self.rows):
            part = torch.stack(vectors[begin : begin + self.rows])
            after, latents = think(
                backbone, self._state(row, len(part)), self.model.latents, interventions={step: part}
            )
            answers += [said(item, view, text, self.policy)["answer"] for text in self._decode(after, row)]
            walks += [self._walk(row, span[step - 1 :]) for span in latents]
        expected = trail_answers(item, view, cells, self.model.latents - step + 1)
        return {"step": step, "grid": list(cells), "answers": answers, "expected": expected, "walks": walks}


def coarse(canvas: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of the cells that a latent can be put at: the visual tokens, or at most 8 x 8 regions."""
    return min(canvas[0], MOST_CELLS), min(canvas[1], MOST_CELLS)


def trail_answers(item: Asked, view: int, cells: tuple[int, int], left: int) -> list[str | None]:
    """Where the data is a trail: the answer at its end from each cell, if ``left`` latents suffice to get there."""
    sample = item.views[view]
    trail = sample.meta.get("trail")
    if not isinstance(trail, dict) or trail.get("grid") != list(cells) or sample.tags.get("kind") != "end":
        return [None] * (cells[0] * cells[1])
    board, found = trail["board"], list[str | None]()
    for row in range(cells[0]):
        for column in range(cells[1]):
            way = follow(board, (row, column))
            reached = way is not None and len(way) <= left
            end = board[way[-1][0]][way[-1][1]].removeprefix("circle ") if way is not None and reached else ""
            found.append(canonical_answer(end, sample.choices) if end else None)
    return found


# ---------------------------------------------------------------------- pictures


def data_address(picture: Image.Image) -> str:
    """The picture as a ``data:`` address, at most `MOST_PIXELS` wide and high."""
    image, buffer = picture.convert("RGB"), io.BytesIO()
    small = max(image.size) <= SMALL
    image.thumbnail((MOST_PIXELS, MOST_PIXELS))
    if small:
        image.save(buffer, "PNG", optimize=True)
    else:
        image.save(buffer, "JPEG", quality=82)
    return f"data:image/{'png' if small else 'jpeg'};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def changed_cells(first: Image.Image, second: Image.Image, grid: tuple[int, int]) -> list[int]:
    """Cells in which two pictures differ; none where they differ in size, or in most cells."""
    if first.size != second.size:
        return []
    one, other = (np.asarray(picture.convert("RGB"), dtype=np.int16) for picture in (first, second))
    differs = np.abs(one - other).max(-1) > 0
    rows = np.arange(differs.shape[0]) * grid[0] // differs.shape[0]
    columns = np.arange(differs.shape[1]) * grid[1] // differs.shape[1]
    cells = np.zeros(grid, dtype=bool)
    np.logical_or.at(cells, (rows[:, None], columns[None, :]), differs)
    found = np.flatnonzero(cells).tolist()
    return found if len(found) <= cells.size // 2 else []
