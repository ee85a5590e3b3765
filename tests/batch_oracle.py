"""What must enter a Stage-2 batch, written from the paper on stock parts: Pillow, transformers, math-verify, numpy.

Rewards, advantages, wrong answers, ``Fmt(y)`` and ``J(y)``, prototypes and negatives of one optimizer step, from the
rows of the data file and the texts that the policy sampled. Equation names are those of the paper; what it leaves open
follows the method page (docs/training.md). Loops and fractions instead of masks and tensors.

Nothing here imports ``realvr``: a mistake there cannot hide here. ``tests/training/test_batch_oracle.py`` checks that.
"""

from __future__ import annotations

import hashlib
import importlib
import re
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from math_verify import parse as read_mathematics
from math_verify import verify as equal_mathematics
from numpy.typing import NDArray
from PIL import Image, ImageOps
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

Vector = NDArray[np.float64]
Json = dict[str, Any]
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
EPSILON = 1e-6
"""Of Pool (sec:method_evidence_target)."""

_MATCHED = {"mass_matched": True}
METHODS: dict[str, Json] = {
    "realvr": {},
    "lvr-rl": {"lambda_ev": 0.0},  # eq:lvr_s2 alone
    "direct": {"lambda_ev": 0.0, "latents": 0},  # no span
    "uniform": {"routing": "uniform", "eta": 1.0},  # w_t = 1 / K
    "selective": {"eta": 0.0},  # w_t = gamma_t
    "raw-attention": {"routing": "raw"},  # gamma_t = r_t^+
    "no-negatives": {"objective": "hinge-positive"},  # g_t = cos(z_t, p^+)
    "undetached": {"detach": False},  # w_t without sg
    "off-policy": {"on_policy": False},  # states of one pass over the saved latents
    "mass-matched-u+": {**_MATCHED, "routing": "uniform", "objective": "hinge-positive"},  # eq:mass-matched-routing
    "mass-matched-u±": {**_MATCHED, "routing": "uniform"},
    "mass-matched-c+": {**_MATCHED, "objective": "hinge-positive"},
    "mass-matched-c±": _MATCHED,
}
"""Stage-2 methods and ablations (tab:mablation, app:mass-matched-factorial): what each changes in ReaLVR's loss."""


# ---------------------------------------------------------------------- rewards (sec:prelim_vanilla_objective)


def blocks(text: str) -> list[str]:
    """Contents of the answer blocks of a reply."""
    return re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)


def plain(answer: str) -> str:
    """Without surrounding and repeated white space and a final period."""
    return " ".join(answer.split()).removesuffix(".").rstrip()


def canonical(text: str, row: Json) -> str | None:
    """``y_i``: the answer of a reply in canonical form, None for the parse failure. Multiple choice: its letter."""
    found = blocks(text)
    if len(found) != 1 or text.count("<answer>") != 1 or text.count("</answer>") != 1:
        return None
    answer, choices = plain(found[0]), row.get("choices") or []
    if not choices:
        return answer or None
    for letter, choice in zip(LETTERS, choices, strict=False):
        if answer.strip("()").upper() == letter or answer.casefold() == choice.casefold():
            return letter
    return None


def correct(answer: str, row: Json) -> bool:
    """``Correct(y, y*)``: the judge of the accuracy reward. Options by letter; others as mathematics, then as text."""
    truth = canonical(f"<answer>{row['answer']}</answer>", row)
    assert truth is not None
    if answer.casefold() == truth.casefold():
        return True
    if row.get("choices"):
        return False
    gold, given = read_mathematics(f"${truth}$"), read_mathematics(f"${answer}$")
    return bool(gold and given and equal_mathematics(gold, given))


def accuracy(text: str, row: Json) -> float:
    """1 for exactly one answer block with a correct answer."""
    answer = canonical(text, row)
    return 1.0 if answer is not None and correct(answer, row) else 0.0


def form(text: str) -> float:
    """1 where the reply is free text that ends in its only answer block, which is not empty."""
    ends = re.fullmatch(r"[\s\S]*<answer>[^<]+</answer>\s*", text) is not None
    return 1.0 if ends and text.count("<answer>") == text.count("</answer>") == 1 else 0.0


def rewards(texts: list[str], row: Json, weights: tuple[float, float] = (1.0, 1.0)) -> list[float]:
    """``R_i``: accuracy plus format, each with its weight."""
    return [weights[0] * accuracy(text, row) + weights[1] * form(text) for text in texts]


def advantages(values: list[float]) -> list[float]:
    """``A_i = (R_i - mean) / (std + 1e-4)`` over the group of one prompt, std with G - 1; zero without variance."""
    count = len(values)
    mean = sum(values) / count
    deviation = (sum((value - mean) ** 2 for value in values) / (count - 1)) ** 0.5
    return [0.0 if deviation == 0 else (value - mean) / (deviation + 1e-4) for value in values]


# ---------------------------------------------------------------------- answers (app:construction-wrong-answers)


@dataclass(frozen=True)
class Answer:
    """A canonical answer as it is teacher-forced: ids of ``Fmt(y)``, and the places in it that are ``J(y)``."""

    text: str
    ids: list[int]
    content: list[int]


def format_answer(answer: str, tokenizer: Any) -> Answer:
    """``Fmt(y)`` and ``J(y)``: the tokens of which a character belongs to the answer, none of the tags."""
    before, after = "<answer>", "</answer>"
    encoded = tokenizer(before + answer + after, add_special_tokens=False, return_offsets_mapping=True)
    inside = set(range(len(before), len(before) + len(answer)))
    content = [j for j, (start, stop) in enumerate(encoded["offset_mapping"]) if inside & set(range(start, stop))]
    return Answer(answer, list(encoded["input_ids"]), content)


def answers(texts: list[str], row: Json, tokenizer: Any) -> list[Answer]:
    """``y*``, then ``Y_x^-``: distinct wrong answers that parse and have content, in the order of the group."""
    truth = canonical(f"<answer>{row['answer']}</answer>", row)
    assert truth is not None
    found = [format_answer(truth, tokenizer)]
    known: set[str] = set()
    for text in texts:
        answer = canonical(text, row)
        if answer is None or correct(answer, row) or answer.casefold() in known:
            continue
        known.add(answer.casefold())
        formatted = format_answer(answer, tokenizer)
        if formatted.content:
            found.append(formatted)
    return found


# ---------------------------------------------------------------------- pictures (sec:method_evidence_target)


def open_picture(path: Path) -> Image.Image:
    """Upright, RGB."""
    with Image.open(path) as image:
        return ImageOps.exif_transpose(image).convert("RGB")


def identity(image: Image.Image) -> str:
    """Equal for equal pictures."""
    return hashlib.sha256(repr(image.size).encode() + np.asarray(image).tobytes()).hexdigest()


def overlap(low: float, high: float, cell: int, cells: int) -> bool:
    """Whether [low, high], as the file writes them, and the cell-th of ``cells`` equal parts of [0, 1] share more than
    a point."""
    start, stop = Fraction(cell, cells), Fraction(cell + 1, cells)
    return min(Fraction(str(high)), stop) > max(Fraction(str(low)), start)


@dataclass(frozen=True)
class Picture:
    """Visual tokens (N, D) of one picture, encoded alone, and the part of the picture that each stands for:
    (row, column) on a canvas of ``rows`` x ``cols``; None for the thumbnail, which shows everything once more."""

    name: str
    tokens: Vector
    cells: list[tuple[int, int] | None]
    rows: int
    cols: int

    def inside(self, box: list[float]) -> list[bool]:
        """``a^+``: the tokens whose part of the picture the box touches."""
        x0, y0, x1, y1 = box
        return [
            cell is not None and overlap(y0, y1, cell[0], self.rows) and overlap(x0, x1, cell[1], self.cols)
            for cell in self.cells
        ]


@dataclass(frozen=True)
class Prototype:
    """``p`` of a row and the pictures it shows."""

    vector: Vector
    pictures: frozenset[str]


class Oracle:
    """The batch of a checkpoint directory. Rows are objects of a JSON lines file in ``folder``."""

    def __init__(self, checkpoint: Path, folder: Path) -> None:
        self.model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self.processor = AutoImageProcessor.from_pretrained(checkpoint, backend="pil")
        self.folder = folder
        self._pictures: dict[str, Picture] = {}

    @torch.no_grad()
    def picture(self, name: str) -> Picture:
        """The picture of a file of the folder."""
        if name in self._pictures:
            return self._pictures[name]
        image = open_picture(self.folder / name)
        tiled = hasattr(self.processor, "max_patches")  # InternVL
        options = {"crop_to_patches": True} if tiled else {}
        out = self.processor(images=[image], return_tensors="pt", **options)
        grid = {key: out[key] for key in ("image_grid_thw",) if key in out}
        found = self.model.model.get_image_features(pixel_values=out["pixel_values"], return_dict=True, **grid)
        features = found.pooler_output
        parts = [features] if isinstance(features, torch.Tensor) else list(features)
        tokens = torch.cat([part.reshape(-1, part.shape[-1]) for part in parts]).double().numpy()
        cells, rows, cols = self._cells(image, len(tokens), grid)
        self._pictures[name] = Picture(identity(image), tokens, cells, rows, cols)
        return self._pictures[name]

    def _cells(self, image: Image.Image, count: int, grid: Any) -> tuple[list[tuple[int, int] | None], int, int]:
        """Where on the picture each token lies, in the order of the tokens; rows and columns of the whole canvas."""
        if grid:  # Qwen: a grid of patches, merged in squares
            merge = self.processor.merge_size
            rows, cols = (int(patches) // merge for patches in grid["image_grid_thw"][0][1:])
            return [divmod(n, cols) for n in range(count)], rows, cols
        if not hasattr(self.processor, "max_patches"):  # Gemma: one square
            side = round(count**0.5)
            return [divmod(n, side) for n in range(count)], side, side
        canvas = importlib.import_module(type(self.processor).__module__).get_optimal_tiled_canvas
        size = self.processor.size
        bounds = (self.processor.min_patches, self.processor.max_patches)
        across, down = canvas((image.height, image.width), (size["height"], size["width"]), *bounds)
        tiles = across * down
        side = round((count / (tiles + (tiles > 1))) ** 0.5)
        cells: list[tuple[int, int] | None] = [
            (tile // across * side + n // side, tile % across * side + n % side)
            for tile in range(tiles)
            for n in range(side * side)
        ]
        return cells + [None] * (count - len(cells)), down * side, across * side

    def shown(self, row: Json) -> list[int]:
        """Places in ``images`` in the order in which the conversation shows them."""
        if "turns" not in row:
            return list(range(len(row["images"])))
        return [index for turn in row["turns"] for index in turn.get("images", [])]

    def prototype(self, row: Json) -> Prototype:
        """``p^+ = sum_n a_n v_n / (sum_n a_n + eps)``; ``a_n = 1`` for all tokens where there is no box.

        A box names its image by its place in ``images``; an image that is shown twice counts where it is shown last.
        """
        order = self.shown(row)
        last = {index: place for place, index in enumerate(order)}
        vectors: list[Vector] = []
        for place, index in enumerate(order):
            picture = self.picture(row["images"][index])
            taken = [False] * len(picture.tokens)
            for box in row.get("boxes") or []:
                if last[box["image"]] == place:
                    taken = [a or b for a, b in zip(taken, picture.inside(box["xyxy"]), strict=True)]
            vectors += [v for v, a in zip(picture.tokens, taken, strict=True) if a or not row.get("boxes")]
        pooled = np.sum(vectors, axis=0) / (len(vectors) + EPSILON)
        return Prototype(pooled, frozenset(self.picture(name).name for name in (row["images"][i] for i in order)))


def check_negatives(own: int, batch: list[Prototype], bank: list[Prototype], drawn: list[Vector], wanted: int) -> None:
    """``N``: prototypes of mismatched examples (sec:method_evidence_target).

    Each one drawn is the prototype of another prompt of the global batch or, once those are used up, of the bank; none
    shows a picture of this prompt or of an earlier one drawn; none is zero; and as many are drawn as there can be.
    Which of equally good ones is chance, and not checked here.
    """
    assert len(drawn) <= wanted
    taken = set(batch[own].pictures)
    candidates = [(p, False) for i, p in enumerate(batch) if i != own] + [(p, True) for p in bank]
    from_bank = False
    for vector in drawn:
        assert np.any(vector != 0), "a zero prototype"
        same = [(p, late) for p, late in candidates if np.allclose(p.vector, vector, rtol=1e-4, atol=1e-5)]
        assert same, "the prototype of no other prompt"
        free = [(p, late) for p, late in same if not p.pictures & taken]
        assert free, "a picture of its own, or one twice"
        prototype, late = min(free, key=lambda one: one[1])
        if late and not from_bank:
            assert not [p for p, late in candidates if not late and not p.pictures & taken], "the batch comes first"
        assert late or not from_bank, "the batch comes first"
        from_bank = late
        taken |= prototype.pictures
    if len(drawn) < wanted:
        assert not [p for p, _ in candidates if not p.pictures & taken and np.any(p.vector != 0)], "too few"
