"""Evidence in conversations that show their images out of order, twice or not at all.

``Box.image`` counts ``Sample.images``, visual tokens stand as the prompt shows them. Every expectation here comes from
stock transformers, each picture encoded alone, and from index arithmetic on the order in which the turns show them.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from golden_cases import CaseImage, make_image
from helpers import DTYPE, load_stock
from realvr.backbone import Backbone
from realvr.cli import main
from realvr.data import boxes as rule
from realvr.data.reading import Report, read
from realvr.data.sample import Box, ImageRef, Message, Sample
from realvr.errors import UserError
from realvr.latent.prototypes import prototypes
from realvr.training.examples import Encoder
from realvr.training.method import Step
from realvr.training.methods.lvr_sft import LvrSft, LvrSftConfig
from realvr.training.sft_batch import pack_rows
from stock_pictures import corner, picture_tokens

SIZES = ((84, 56), (200, 40), (63, 130))  # three grids; for InternVL one tile, a row of tiles, a column of tiles
FIRST, LAST = (0.001, 0.001, 0.002, 0.002), (0.998, 0.998, 0.999, 0.999)
WHOLE = (0.0, 0.0, 1.0, 1.0)


@dataclass
class Stock:
    """The model under test, and each picture as stock transformers sees it alone."""

    backbone: Backbone
    tokens: list[Tensor]
    grids: list[tuple[int, int]]

    def first_and_last(self, picture: int) -> tuple[int, int]:
        count, grid = len(self.tokens[picture]), self.grids[picture]
        return corner(count, grid, last=False), corner(count, grid, last=True)

    def start(self, shown: Sequence[int], place: int) -> int:
        """Tokens before the picture at ``place`` of the prompt."""
        return sum(len(self.tokens[picture]) for picture in shown[:place])


@pytest.fixture(scope="module")
def seen(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Stock:
    backbone = Backbone.load(saved, dtype=DTYPE, device="cpu")
    model = load_stock(saved).cpu()
    processor = type(backbone.processor.stock).from_pretrained(saved)
    found = [picture_tokens(model, processor, image) for image in images()]
    return Stock(backbone, [tokens for tokens, _ in found], [grid for _, grid in found])


def images() -> list[Any]:
    return [make_image(CaseImage(width, height, number)) for number, (width, height) in enumerate(SIZES)]


def sample(turns: Sequence[Sequence[int]], *boxes: tuple[int, tuple[float, float, float, float]]) -> Sample:
    """A conversation whose user turns show these images."""
    said: list[Message] = []
    for number, shown in enumerate(turns):
        said += [Message("assistant", "I see.")] if number else []
        said.append(Message("user", f"Question {number}?", tuple(shown)))
    refs = [ImageRef.from_image(f"{number}.png", image) for number, image in enumerate(images())]
    name = f"{turns} {boxes}"
    return Sample(name, refs, said, "red", boxes=[Box(image, xyxy) for image, xyxy in boxes])


# Turns, boxes, and (picture, its place in the prompt) of each box in prompt order.
CASES: dict[str, tuple[Any, Any, list[tuple[int, int]]]] = {
    "in order, box in the second": ([[0, 1]], [(1, LAST)], [(1, 1)]),
    "swapped, box in the first": ([[1, 0]], [(0, LAST)], [(0, 1)]),
    "three, rotated, box in each": ([[2, 0, 1]], [(0, LAST), (1, FIRST), (2, LAST)], [(2, 0), (0, 1), (1, 2)]),
    "over two turns": ([[2], [1, 0]], [(0, FIRST), (2, LAST)], [(2, 0), (0, 2)]),
    "shown twice": ([[0, 1], [0, 2]], [(0, LAST)], [(0, 2)]),
    "one left out": ([[2, 1]], [(1, LAST)], [(1, 1)]),
}


def slot_inputs(backbone: Backbone, rows: list[Any]) -> list[Tensor]:
    """What the decoder really reads in the slots of each example."""
    batch = pack_rows(backbone, rows).to(backbone.device)
    read_by: list[Tensor] = []
    hook = backbone.decoder.register_forward_pre_hook(
        lambda _, args, kwargs: read_by.append(kwargs["inputs_embeds"].detach()), with_kwargs=True
    )
    try:
        with torch.no_grad():
            Step(LvrSft(backbone, LvrSftConfig(gradient_checkpointing=False)))(batch)
    finally:
        hook.remove()
    taken = read_by[0][batch.slot_RT].float().cpu()
    return [taken[batch.slot_example_N.cpu() == number] for number in range(batch.examples)]


def cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=-1).min())


@pytest.mark.parametrize("case", CASES)
def test_stage_one_learns_the_tokens_of_the_boxed_picture(seen: Stock, case: str) -> None:
    turns, boxes, placed = CASES[case]
    example = Encoder(seen.backbone, 4096).sequence(sample(turns, *boxes))
    assert example is not None
    shown = list(itertools.chain(*turns))
    corners = {picture: seen.first_and_last(picture)[xyxy == LAST] for picture, xyxy in boxes}
    assert example.targets.tolist() == [seen.start(shown, place) + corners[picture] for picture, place in placed]
    other = Encoder(seen.backbone, 4096).sequence(sample([[1, 2]], (2, FIRST)))
    neighbours, found = slot_inputs(seen.backbone, [[other, example]])
    expected = torch.stack([seen.tokens[picture][corners[picture]] for picture, _ in placed])
    assert cosine(found, expected) > 1 - 1e-5
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert cosine(neighbours, seen.tokens[2][:1]) > 1 - 1e-5, "packing shifts each example by its own tokens"


@pytest.mark.parametrize("case", CASES)
def test_prototypes_are_those_of_the_boxed_picture(seen: Stock, case: str) -> None:
    turns, boxes, placed = CASES[case]
    encoder = Encoder(seen.backbone, 4096)
    samples = [sample([[2, 1]]), sample(turns, *boxes), sample([[1, 0]], (0, WHOLE))]
    prompts = [encoder.prompt(each) for each in samples]
    visual = seen.backbone.encode_images([image for prompt in prompts for image in prompt.images])
    everything, cornered, whole = (found.vector_D for found in prototypes(samples, prompts, visual))
    corners = {picture: seen.first_and_last(picture)[xyxy == LAST] for picture, xyxy in boxes}
    expected = torch.stack([seen.tokens[picture][corners[picture]] for picture, _ in placed]).mean(0)
    assert cosine(cornered, expected) > 1 - 1e-5
    torch.testing.assert_close(cornered, expected, rtol=1e-4, atol=1e-4)
    inside = seen.tokens[0][: seen.first_and_last(0)[1] + 1]
    assert cosine(whole, inside.mean(0)) > 1 - 1e-5, "a box over the whole picture: all of it and nothing else"
    assert cosine(everything, torch.cat([seen.tokens[2], seen.tokens[1]]).mean(0)) > 1 - 1e-5


def test_the_pictures_can_be_told_apart(seen: Stock) -> None:
    """Otherwise the cosines above would show nothing."""
    assert len({len(tokens) for tokens in seen.tokens}) > 1 or seen.backbone.family.name == "gemma3"
    tokens = torch.stack(
        [seen.tokens[picture][place] for picture in range(3) for place in seen.first_and_last(picture)]
    )
    for one, other in itertools.combinations(tokens, 2):
        assert cosine(one, other) < 0.999


# ---------------------------------------------------------------------- files


def write_images(folder: Path) -> list[str]:
    names = [f"{number}.png" for number in range(len(SIZES))]
    for name, image in zip(names, images(), strict=True):
        image.save(folder / name)
    return names


@pytest.mark.parametrize("family", ["qwen2.5-vl", "internvl3"], indirect=True)
def test_an_lvr_row_whose_mark_is_in_the_second_turn(seen: Stock, tmp_path: Path) -> None:
    """Two images and one mark: the mark is the first image, the other follows, and the box stays where it was."""
    row = {
        "id": "r",
        "image": write_images(tmp_path)[:2],
        "bboxes": [list(LAST)],
        "conversations": [
            {"from": "human", "value": "Look closely."},
            {"from": "gpt", "value": "Yes."},
            {"from": "human", "value": "Compare <image> with the other. What is it?"},
            {"from": "gpt", "value": "<answer> red </answer>"},
        ],
    }
    (tmp_path / "rows.json").write_text(json.dumps([row]))
    report = Report()
    (found,) = read(tmp_path / "rows.json", "lvr", report=report)
    assert found.shown == (0, 1) and "image 1" in found.question, "image 1 of the text is the first that is shown"
    assert report.repaired == {"image_count_mismatch": 1}
    example = Encoder(seen.backbone, 4096).sequence(found)
    (read_in_slots,) = slot_inputs(seen.backbone, [[example]])
    assert cosine(read_in_slots, seen.tokens[0][seen.first_and_last(0)[1]][None]) > 1 - 1e-5


def rows(folder: Path, box: int) -> Path:
    """Our own format: a turn that shows the second image, then the first; a box in the image ``box``."""
    names = write_images(folder)
    turns = [{"role": "user", "text": "Which?", "images": [1, 0]}]
    boxed = {"id": "boxed", "images": names, "turns": turns, "question": "Which?", "answer": "red"}
    boxed["boxes"] = [{"image": box, "xyxy": list(LAST)}]
    plain = {"id": "plain", "images": names[:1], "question": "Which?", "answer": "red"}
    (folder / "rows.jsonl").write_text(json.dumps(boxed) + "\n" + json.dumps(plain) + "\n")
    return folder / "rows.jsonl"


def test_a_box_on_an_image_that_no_turn_shows_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = rows(tmp_path, box=2)
    report = Report()
    assert [found.id for found in read(path, report=report)] == ["plain"]
    assert report.dropped == {"box_not_shown": 1}
    assert "row 1: box 1 is on image 2 (2.png), which no turn shows" in report.examples["box_not_shown"]
    main(["data", "check", str(path)])
    assert "box_not_shown" in capsys.readouterr().out
    assert [found.shown for found in read(rows(tmp_path, box=0))] == [(1, 0), (0,)]


@pytest.mark.parametrize("family", ["qwen2.5-vl"], indirect=True)
def test_training_counts_a_box_on_an_image_that_no_turn_shows(seen: Stock) -> None:
    encoder = Encoder(seen.backbone, 4096)
    hidden = sample([[2, 1]], (0, LAST))
    assert encoder.sequence(hidden) is None and encoder.prompt(hidden) is None
    assert encoder.rejected == {"box_not_shown": 2}
    assert "which no turn shows" in encoder.draws.first["box_not_shown"], "the loop prints where a reason was met first"
    with pytest.raises(UserError, match=r"box 1 is on image 0 \(0.png\), which no turn shows"):
        rule.prompt_boxes(hidden)
