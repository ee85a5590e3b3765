"""Everything that the page of cases can be asked for, on a model's tensors; `realvr.diagnostics.cases` says why."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from realvr.answers import canonical_answer, equal, parser
from realvr.data.boxes import canvas_size, cell_box, prompt_boxes
from realvr.diagnostics.measuring.asking import ask_pairs
from realvr.diagnostics.measuring.views import Views, read_views
from realvr.diagnostics.model import Model
from realvr.diagnostics.pairs import Pair
from realvr.errors import UserError
from realvr.imaging.types import Grid
from realvr.latent.group_rollout import decode
from realvr.latent.regions import region_vector
from realvr.latent.span import span_tokens, splice, think
from realvr.latent.state import State
from realvr.latent.walk import walk
from realvr.widgets.explorer import Case, Said, Steered, Swapped, View, Walked
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
    """Replies to both pictures of a pair: of the model, then of the second model where there is one."""

    replies: list[list[Said]] = field(default_factory=list)
    error: str | None = None

    @property
    def failed(self) -> bool:
        """Whether the model did not answer both pictures rightly."""
        return self.error is None and any(one["verdict"] != "right" for one in self.replies[0])


def examine(model: Model, pairs: Sequence[Pair], policy: str, rows: int) -> dict[str, Answers]:
    """Both pictures of every pair, each in a conversation of its own, put to both models."""
    found: dict[str, Answers] = {}
    size = max(1, rows // 2)
    for start in range(0, len(pairs), size):
        part = pairs[start : start + size]
        models = [model, *([model.second] if model.second is not None else [])]
        asked = [ask_pairs(one.responder, part, [("separate", "none")], one.latents, policy) for one in models]
        for pair, *records in zip(part, *asked, strict=True):
            errors = [error for record in records for error in record["errors"] if error is not None]
            replies = [[said(pair, view, record["texts"][view], policy) for view in (0, 1)] for record in records]
            found[pair.id] = Answers(error=errors[0]) if errors else Answers(replies)
    return found


def said(pair: Pair, view: int, text: str, policy: str) -> Said:
    """A reply to one picture of a pair, judged."""
    choices = pair.original.choices
    answer = parser(policy, "evaluation").read(text, choices)
    truths = pair.truths[view], pair.truths[1 - view]
    verdicts = [name for name, truth in zip(("right", "other"), truths, strict=True) if equal(answer, truth, choices)]
    verdict = "unread" if answer is None else [*verdicts, "wrong"][0]
    return {"text": text[:MOST_TEXT], "answer": answer, "verdict": verdict}


@torch.no_grad()
def build_cases(
    model: Model, asked: Sequence[tuple[Pair, Answers, str, Sequence[int]]], policy: str, rows: int
) -> list[Case]:
    """A case for each pair: (pair, its answers, what it is about, steps at which it can be steered)."""
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
    """Pairs that have been read, ready to be asked with other latents."""

    def __init__(self, model: Model, views: Views, policy: str, rows: int) -> None:
        self.model, self.views, self.policy, self.rows = model, views, policy, rows
        images = [image for prompt in views.prompts for image in prompt.images]
        self.grids = [image.grid for image in images]
        self.features = model.backbone.encode_images(images).per_image()
        assert views.latents_RKD is not None
        self.latents_RKD: Tensor = views.latents_RKD

    def case(self, number: int, pair: Pair, answers: Answers, about: str, steps: Sequence[int]) -> Case:
        """Everything that the explorer shows of one pair."""
        own = self.views.rows[number]
        pictures = [view.images[view.shown[0]].open() for view in pair.views]
        changed = changed_cells(pictures[0], pictures[1], canvas_size(self.grids[own[0]]))
        return {
            "id": pair.id,
            "about": about,
            "question": pair.original.question,
            "choices": list(pair.original.choices),
            "failed": answers.failed,
            "views": [
                self._view(pair, view, own, pictures[view], changed, [one[view] for one in answers.replies], steps)
                for view in (0, 1)
            ],
        }

    def _view(
        self,
        pair: Pair,
        view: int,
        rows: Sequence[int],
        picture: Image.Image,
        changed: list[int],
        replies: list[Said],
        steps: Sequence[int],
    ) -> View:
        row, other = rows[view], rows[1 - view]
        return {
            "picture": data_address(picture),
            "size": list(picture.size),
            "grid": list(canvas_size(self.grids[row])),
            "truth": pair.truths[view],
            "evidence": [[round(value, 4) for value in box.xyxy] for box in prompt_boxes(pair.views[view])],
            "changed": changed,
            "replies": replies,
            "walk": self._walk(row, self.latents_RKD[row]),
            "swaps": self._swaps(pair, view, row, other),
            "steered": [self._steered(pair, view, row, step) for step in steps],
        }

    def _walk(self, row: int, latents_KD: Tensor) -> Walked:
        found = walk(latents_KD, self.features[row], self.grids[row])
        columns = canvas_size(self.grids[row])[1]
        cells = [place.row * columns + place.col for place in found.places()]
        return {"cells": cells, "cosine": [round(float(value), 3) for value in found.cosine]}

    # ------------------------------------------------------------------ latents of the other picture

    def _swaps(self, pair: Pair, view: int, row: int, donor: int) -> list[Swapped]:
        """From every step on: own latents before it, the other picture's from it on. Nothing is regenerated."""
        own_KD, other_KD = self.latents_RKD[row], self.latents_RKD[donor]
        spans = [torch.cat([own_KD[:start], other_KD[start:]]) for start in range(len(own_KD))]
        texts: list[str] = []
        for begin in range(0, len(spans), self.rows):
            part = torch.stack(spans[begin : begin + self.rows])
            after, _ = splice(self.model.backbone, self._state(row, len(part)), part)
            texts += self._decode(after, row)
        return [
            {"reply": said(pair, view, text, self.policy), "walk": self._walk(row, span[start:])}
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

    def _steered(self, pair: Pair, view: int, row: int, step: int) -> Steered:
        """z_step replaced by the visual tokens of each cell in turn, from where the recurrence goes on."""
        grid, backbone = self.grids[row], self.model.backbone
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
            answers += [said(pair, view, text, self.policy)["answer"] for text in self._decode(after, row)]
            walks += [self._walk(row, span[step - 1 :]) for span in latents]
        expected = trail_answers(pair, view, cells, self.model.latents - step + 1)
        return {"step": step, "grid": list(cells), "answers": answers, "expected": expected, "walks": walks}


def coarse(canvas: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of the cells that a latent can be put at: the visual tokens, or at most 8 x 8 regions."""
    return min(canvas[0], MOST_CELLS), min(canvas[1], MOST_CELLS)


def trail_answers(pair: Pair, view: int, cells: tuple[int, int], left: int) -> list[str | None]:
    """Where the data is a trail: the answer at its end from each cell, if ``left`` latents suffice to get there."""
    sample = pair.views[view]
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
