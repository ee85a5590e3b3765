"""Walks of a model on several questions as one picture, such as the first of the README.

    realvr world make runs/world --split trails --count 200
    python scripts/walk_sheet.py mini runs/world/trails/samples.jsonl docs/figures/walk.png

Which questions: the first of each value of the tag ``--by`` (arrows), by value, spread evenly over the values where
there are more than ``--count``. Right or wrong makes no difference, and a wrong answer is marked.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from realvr.answers import canonical_answer, equal, extract_answer
from realvr.backbone import Backbone
from realvr.backbone.samples import conversation
from realvr.data.reading import read
from realvr.data.sample import Sample, option
from realvr.imaging.drawing import beside, column
from realvr.imaging.saving import check_place, save_picture
from realvr.latent.drawing import draw_walk
from realvr.latent.group_rollout import rollout
from realvr.latent.sampling import GREEDY
from realvr.latent.walk import walk
from realvr.runs.quiet import quiet_transformers


def chosen(samples: Iterable[Sample], by: str, count: int) -> list[Sample]:
    """The first sample of each value of a tag, at most ``count`` of them; the first samples where none has the tag."""
    first: dict[str, Sample] = {}
    every = list(samples)
    for sample in every:
        if by in sample.tags:
            first.setdefault(sample.tags[by], sample)
    if not first:
        return every[:count]
    values = sorted(first, key=lambda text: (float(text) if text.replace(".", "", 1).isdigit() else np.inf, text))
    places = np.linspace(0, len(values) - 1, min(count, len(values))).round().astype(int)
    return [first[values[place]] for place in places]


@torch.no_grad()
def panel(backbone: Backbone, sample: Sample, side: int, strip: bool) -> Image.Image:
    """One question: its pictures with the walk, the question and the model's answer."""
    pictures = [image.open() for image in sample.images]
    prompt = backbone.prompt(conversation(sample, pictures))
    visual = backbone.encode_images(prompt.images)
    done = rollout(backbone, [prompt], sampling=GREEDY, visual=visual)
    said = extract_answer(done.completions[0][0].text, sample.choices)
    right = bool(equal(said, sample.answer, sample.choices))
    answer = option(canonical_answer(said or "", sample.choices), sample.choices) or said or "cannot be read"
    return draw_walk(
        [pictures[index] for index in sample.shown],
        walk(done.latents_BKD[0], visual.features_ND, visual.grids),
        question=sample.question,
        answer=answer if right else f"{answer} (wrong: it is {sample.answer_text})",
        strip=strip,
        side=side,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=6)
    parser.add_argument("--columns", type=int, default=3)
    parser.add_argument("--by", default="arrows", help="tag of which every value gets a panel")
    parser.add_argument("--side", type=int, default=384, help="longest side of a picture, in pixels")
    parser.add_argument("--cosines", action="store_true", help="also list the cosines under every picture")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    check_place(args.out, "OUT")
    quiet_transformers()
    backbone = Backbone.load(args.model, device=args.device)
    panels = [
        panel(backbone, sample, args.side, args.cosines) for sample in chosen(read(args.data), args.by, args.count)
    ]
    rows = [beside(panels[k : k + args.columns], 0) for k in range(0, len(panels), args.columns)]
    save_picture(args.out, column(rows, 0))


if __name__ == "__main__":
    main()
