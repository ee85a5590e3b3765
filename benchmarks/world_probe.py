"""Can a small network learn the world? A probe of about two million parameters, trained from nothing.

    PYTHONPATH=src python benchmarks/world_probe.py --device cuda --minutes 3
    PYTHONPATH=src python benchmarks/world_probe.py --quick          # a minute or two on a CPU: does it learn to see?

It answers three questions: the easy curriculum can be learned (seen words), withheld words leave headroom there, and
the full world leaves headroom at the same size and budget. The network sees the picture and the question and scores
the options by their words; cell labels (color and shape of each layout cell) are the dense supervision without which
answer letters alone teach it nothing. Prints a table last.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import re
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from realvr.world.describe import cell_labels
from realvr.world.phrasing import PHRASINGS
from realvr.world.queries import EXTREMES, SAME
from realvr.world.splits import Recipe, build
from realvr.world.words import COLORS, DIRECTIONS, REGIONS, SHAPES, SIZES, TEXTURES, plural

_TEXTS = [wording for wordings in PHRASINGS.values() for wording in wordings]
_NAMES = [*COLORS, *SHAPES, *map(plural, SHAPES), *TEXTURES, *SIZES, *DIRECTIONS, *REGIONS, *EXTREMES, SAME]
_OTHERS = "object objects an of the to yes no 0 1 2 3 4 5 6 7 8"
WORDS = sorted(set(re.findall(r"[a-z0-9]+", " ".join([*_TEXTS, *_NAMES, _OTHERS]).lower())))
IDS = {word: k + 1 for k, word in enumerate(WORDS)}
LONGEST, OPTION = 28, 6


def words_of(text: str) -> list[str]:
    """Words of a text, as the probe reads them."""
    return re.findall(r"[a-z0-9]+", text.lower())


def encode(text: str, length: int) -> list[int]:
    """Word ids, padded with 0."""
    ids = [IDS[word] for word in words_of(text)][:length]
    return ids + [0] * (length - len(ids))


@dataclass
class Data:
    """Tensors of N examples: images (N, 3, H, W) uint8, words (N, T), options (N, 4, O), answers, cell labels."""

    images: Tensor
    words: Tensor
    options: Tensor
    answer: Tensor
    colors: Tensor
    shapes: Tensor
    kinds: list[str]
    withheld: Tensor


def _row(job: tuple[Recipe, int]) -> tuple:  # type: ignore[type-arg]
    recipe, number = job
    (item,) = build(recipe, ("", number))
    scene = item.views[0].scene
    shown = [encode(choice, OPTION) for choice in item.choices] + [[0] * OPTION] * (4 - len(item.choices))
    answer = item.choices.index(item.answer) if item.choices else 0
    labels = cell_labels(scene)
    held = item.tags["withheld"] == "yes"
    picture = item.views[0].pixels().transpose(2, 0, 1)
    return picture, encode(item.text, LONGEST), shown, answer, labels[0].ravel(), labels[1].ravel(), item.kind, held


def load(recipe: Recipe, count: int, workers: int) -> Data:
    """Build ``count`` examples; those with free answers are asked again elsewhere, so they are skipped."""
    jobs = [(recipe, k) for k in range(count)]
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        rows = [row for row in pool.map(_row, jobs, chunksize=64) if any(any(option) for option in row[2])]
    columns = list(zip(*rows, strict=True))
    tensors = [torch.from_numpy(np.asarray(column)) for column in columns[:6]]
    return Data(*tensors, list(columns[6]), torch.tensor(columns[7]))


class Probe(nn.Module):
    """Convolutional patches and question words in one transformer; options are scored by their words."""

    def __init__(self, side: int, cells: int, width: int = 160, depth: int = 5) -> None:
        super().__init__()
        self.cells = cells
        layers: list[nn.Module] = []
        for a, b in ((3, 48), (48, 96), (96, width)):
            layers += [nn.Conv2d(a, b, 3, 2, 1), nn.GroupNorm(8, b), nn.GELU()]
        self.stem = nn.Sequential(*layers)
        self.grid = side // 8
        # Places must weigh as much as looks from the start, or "at the top left" means nothing for thousands of steps.
        self.place = nn.Parameter(torch.randn(self.grid**2, width) * 0.5)
        self.words = nn.Embedding(len(IDS) + 1, width, padding_idx=0)
        self.order = nn.Parameter(torch.randn(LONGEST + 1, width) * 0.1)
        self.read = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, width // 32, width * 4, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.answers = nn.Embedding(len(IDS) + 1, width, padding_idx=0)
        self.color, self.shape = nn.Linear(width, len(COLORS) + 1), nn.Linear(width, len(SHAPES) + 1)

    def meaning(self, texts: Tensor) -> Tensor:
        """Mean embedding of the words of a text, (..., O) to (..., width)."""
        return self.answers(texts).sum(-2) / (texts > 0).sum(-1, keepdim=True).clamp(min=1)

    def forward(self, images: Tensor, words: Tensor, options: Tensor, every: Tensor) -> tuple[Tensor, ...]:
        """Scores of the options (B, 4) and of ``every`` answer (M, O) there is (B, M); logits of the colors and shapes
        of the cells (B, cells^2, colors + 1), (B, cells^2, shapes + 1)."""
        seen = self.stem(images.float() / 127.5 - 1).flatten(2).transpose(1, 2) + self.place
        asked = torch.cat([self.read.expand(len(words), -1, -1), self.words(words)], 1) + self.order
        padding = torch.cat([torch.zeros_like(words[:, :1], dtype=torch.bool), words == 0], 1)
        ignored = torch.cat([padding, torch.zeros(seen.shape[:2], dtype=torch.bool, device=seen.device)], 1)
        out = self.norm(self.body(torch.cat([asked, seen], 1), src_key_padding_mask=ignored))
        meant = self.meaning(options)
        score = (meant @ out[:, 0, :, None]).squeeze(-1).masked_fill((options > 0).sum(2) == 0, -1e4)
        free = out[:, 0] @ self.meaning(every).T
        tokens = out[:, asked.shape[1] :].transpose(1, 2).unflatten(2, (self.grid, self.grid))
        pooled = F.adaptive_avg_pool2d(tokens.float(), self.cells).flatten(2).transpose(1, 2)
        return score.float(), free.float(), self.color(pooled), self.shape(pooled)


def train(data: Data, side: int, cells: int, options: argparse.Namespace) -> tuple[Probe, int]:
    """Train for the given time or steps; the learning rate follows. Returns the network and the number of steps."""
    torch.manual_seed(options.seed)
    device = torch.device(options.device)
    probe = Probe(side, cells, options.width, options.depth).to(device)
    columns = [data.images, data.words, data.options, data.answer, data.colors, data.shapes]
    columns = [column.to(device) for column in columns]
    every, number = torch.unique(data.options[torch.arange(len(data.answer)), data.answer], dim=0, return_inverse=True)
    every, number = every.to(device), number.to(device)
    optimizer = torch.optim.AdamW(probe.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=0.05)
    start, steps = time.perf_counter(), 0
    while True:
        spent = steps / options.steps if options.steps else (time.perf_counter() - start) / (options.minutes * 60)
        if spent >= 1:
            return probe, steps
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (steps + 1) / 200) * 0.5 * (1 + math.cos(math.pi * spent))
        chosen = torch.randint(len(data.kinds), (options.batch,), device=device)
        images, words, shown, answer, colors, shapes = (column[chosen] for column in columns)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            score, free, color, shape = probe(images, words, shown, every)
        dense = F.cross_entropy(color.flatten(0, 1), colors.flatten()) + F.cross_entropy(
            shape.flatten(0, 1), shapes.flatten()
        )
        # The answer in words among all there are says far more than one option of four.
        loss = F.cross_entropy(score, answer) + F.cross_entropy(free, number[chosen]) + 0.5 * dense
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(probe.parameters(), 1.0)
        optimizer.step()
        steps += 1
        if steps % 250 == 0:
            print(f"  step {steps}: loss {loss.item():.3f}, dense {dense.item():.3f}", flush=True)


@torch.no_grad()
def evaluate(probe: Probe, data: Data, device: str) -> tuple[Tensor, float]:
    """Right or wrong for each example, and the share of cells whose color and shape are both right."""
    probe.eval()
    right, cells = [], []
    for k in range(0, len(data.kinds), 256):
        part = slice(k, k + 256)
        columns = (data.images, data.words, data.options)
        images, words, shown = (column[part].to(device) for column in columns)
        score, _, color, shape = probe(images, words, shown, shown[0])
        right.append(score.argmax(1).cpu() == data.answer[part])
        both = (color.argmax(-1).cpu() == data.colors[part]) & (shape.argmax(-1).cpu() == data.shapes[part])
        cells.append(both[data.colors[part] > 0].float())
    probe.train()
    return torch.cat(right), float(torch.cat(cells).mean())


def by_kind(right: Tensor, data: Data) -> str:
    """Accuracy of each kind of question, worst first."""
    groups: dict[str, list[float]] = defaultdict(list)
    for kind, good in zip(data.kinds, right.tolist(), strict=True):
        groups[kind].append(float(good))
    means = sorted((sum(values) / len(values), kind) for kind, values in groups.items())
    return ", ".join(f"{kind} {100 * mean:.0f}" for mean, kind in means)


def chance(data: Data) -> float:
    """Accuracy of guessing among the options shown."""
    return float((1 / (data.options.sum(2) > 0).sum(1)).mean())


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=3.0, help="training time for each of the two worlds")
    parser.add_argument("--steps", type=int, default=0, help="train for so many steps instead")
    parser.add_argument("--easy", type=int, default=64_000, help="curriculum examples")
    parser.add_argument("--full", type=int, default=64_000, help="examples of the full world (half have options)")
    parser.add_argument("--test", type=int, default=2_000)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=160, help="a multiple of 32")
    parser.add_argument("--depth", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0, help="of torch on the CPU; 0 leaves it alone")
    parser.add_argument("--quick", action="store_true", help="900 steps of a smaller network, easy scenes only")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.easy, options.full, options.test, options.batch = 900, 3_000, 0, 500, 64
        options.width, options.depth, options.threads = 64, 2, 1
    return options


def main() -> None:
    options = arguments()
    if options.threads:
        torch.set_num_threads(options.threads)
    table = Table("world", "tested on", "n", "accuracy %", "guessing %", "objects seen %")
    notes = []
    plans = [("easy", "curriculum", "curriculum-test", options.easy, 48, 3)]
    if options.full:
        plans.append(("full", "train-boxes", "validation", options.full, 128, 4))
    for world, train_split, test_split, count, side, cells in plans:
        start = time.perf_counter()
        data = load(Recipe(train_split, options.seed), count, options.workers)
        test = load(Recipe(test_split, options.seed), options.test, options.workers)
        print(f"{world}: {len(data.kinds):,} examples made in {time.perf_counter() - start:.0f} s", flush=True)
        probe, steps = train(data, side, cells, options)
        size = sum(parameter.numel() for parameter in probe.parameters()) / 1e6
        right, seen = evaluate(probe, test, options.device)
        groups = [("seen words", ~test.withheld), ("withheld words", test.withheld)]
        if world == "full":  # its training questions use every word
            groups = [("all words", torch.ones_like(test.withheld))]
        for name, which in groups:
            score, guess = float(right[which].float().mean()), chance(test)
            numbers = [f"{100 * value:.1f}" for value in (score, guess, seen)]
            table.add_row(world, f"{test_split}, {name}", str(int(which.sum())), *numbers)
        notes.append(f"{world}: {size:.2f}M parameters, {steps:,} steps of {options.batch}")
        notes.append(f"  by kind: {by_kind(right, test)}")
    console = Console()
    for note in notes:
        console.print(note)
    console.print(table)


if __name__ == "__main__":
    main()
