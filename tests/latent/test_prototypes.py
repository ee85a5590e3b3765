"""Prototypes against numpy, and negatives: which are drawn, from where, and always the same ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from realvr.backbone.backbone import VisualTokens
from realvr.backbone.types import Prompt
from realvr.data.sample import Box, ImageRef, Sample
from realvr.errors import UserError
from realvr.imaging.types import Grid, ImageInput
from realvr.latent.prototypes import NegativeBank, Prototype, pad, pictures_of, prototypes, sample_negatives

D = 6


def picture(grid: Grid, key: str) -> ImageInput:
    return ImageInput(torch.zeros(1), grid, f"{key} {grid}", key)


def prompt(*images: ImageInput) -> Prompt:
    return Prompt(torch.zeros(3, dtype=torch.long), images)


def sample(*boxes: tuple[int, tuple[float, float, float, float]]) -> Sample:
    shown = [ImageRef.from_path(f"{i}.png") for i in range(1 + max((image for image, _ in boxes), default=0))]
    return Sample.ask("s", shown, "?", "7", boxes=[Box(image, xyxy) for image, xyxy in boxes])


def seen(*grids: Grid, seed: int = 0, dtype: torch.dtype = torch.float32) -> VisualTokens:
    count = sum(grid.tokens for grid in grids)
    features = torch.randn(count, D, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return VisualTokens(features, (), grids)


# ---------------------------------------------------------------------- prototypes


def test_prototypes_of_a_batch() -> None:
    """One image with a box, none, two images with a box in the second, boxes without area, no region at all."""
    a, b = Grid(2, 3, merge=2), Grid(4, 2, merge=2)
    prompts = [
        prompt(picture(a, "a")),
        prompt(),
        prompt(picture(a, "a"), picture(b, "b")),
        prompt(picture(b, "b")),
        prompt(picture(a, "a"), picture(b, "b")),
    ]
    # In fractions: the right two thirds of a's upper row; b's rows 1 and 2 on the left; nothing; nothing.
    samples = [
        sample((0, (0.4, 0.0, 1.0, 0.4))),
        sample(),
        sample((1, (0.0, 0.3, 0.4, 0.7))),
        sample((0, (0.5, 0.5, 0.5, 0.9))),
        sample(),
    ]
    visual = seen(a, a, b, b, a, b)
    rows = visual.features_ND.numpy().astype(np.float64)
    starts = np.cumsum([0, 6, 6, 8, 8, 6])
    members = [
        [starts[0] + i for i in (1, 2)],
        [],
        [starts[2] + i for i in (2, 4)],
        [starts[3] + i for i in range(8)],
        [starts[4] + i for i in range(14)],
    ]
    found = prototypes(samples, prompts, visual)
    for proto, chosen, one in zip(found, members, prompts, strict=True):
        expected = rows[chosen].sum(0) / (len(chosen) + 1e-6) if chosen else np.zeros(D)
        np.testing.assert_allclose(proto.vector_D.numpy(), expected, rtol=1e-5, atol=1e-6)
        assert proto.vector_D.dtype == torch.float32 and proto.vector_D.device.type == "cpu"
        assert proto.pictures == {image.picture for image in one.images} == pictures_of(one)


def test_which_of_the_ordered_boxes_are_evidence() -> None:
    """A trail of three boxes over two pictures; a fourth without area is none."""
    a, b = Grid(2, 3, merge=2), Grid(4, 2, merge=2)
    trail = sample((1, (0.0, 0.0, 0.5, 0.25)), (0, (0.34, 0.0, 0.6, 0.5)), (1, (0.5, 0.5, 1.0, 1.0)), (0, (1, 0, 1, 1)))
    prompts = [prompt(picture(a, "a"), picture(b, "b")), prompt(picture(a, "a"), picture(b, "b"))]
    nothing = sample((1, (0.3, 0.3, 0.3, 0.3)))
    visual = seen(a, b, a, b)
    rows = visual.features_ND.double().numpy()
    parts = [[6 + 0], [1], [6 + 5, 6 + 7]]  # in the tokens of both pictures

    def mean(chosen: list[int]) -> np.ndarray:
        return rows[chosen].sum(0) / (len(chosen) + 1e-6)

    whole = rows[14:].sum(0) / (14 + 1e-6)
    wanted = {
        "all": mean(sum(parts, [])),
        "last": mean(parts[2]),
        "per-slot": [mean(parts[min(t, 2)]) for t in range(5)],
    }
    for which, expected in wanted.items():
        found, plain = prototypes([trail, nothing], prompts, visual, which, 5)
        np.testing.assert_allclose(found.vector_D.numpy(), expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(
            plain.vector_D.numpy(), [whole] * 5 if which == "per-slot" else whole, rtol=1e-5, atol=1e-6
        )
    with pytest.raises(UserError, match="s: 3 evidence boxes, but K = 2: evidence_boxes per-slot"):
        prototypes([trail], prompts[:1], visual, "per-slot", 2)
    (without,) = prototypes([sample()], [prompt()], visual, "per-slot", 5)
    assert without.vector_D.shape == (5, D) and not without.vector_D.any()


def test_a_thumbnail_counts_only_without_a_region() -> None:
    tiled = Grid(2, 2, tile_rows=1, tile_cols=2, thumbnail=True, merge=2)
    visual = seen(tiled, tiled)
    rows = visual.features_ND.numpy().astype(np.float64)
    boxed, whole = prototypes(
        [sample((0, (0.0, 0.0, 0.2, 0.2))), sample()],
        [prompt(picture(tiled, "t")), prompt(picture(tiled, "t"))],
        visual,
    )
    np.testing.assert_allclose(boxed.vector_D.numpy(), rows[0], rtol=1e-5)
    np.testing.assert_allclose(whole.vector_D.numpy(), rows[12:].mean(0), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_prototypes_are_pooled_in_float32(dtype: torch.dtype) -> None:
    grid = Grid(8, 8)
    visual = seen(grid, dtype=dtype)
    (found,) = prototypes([sample()], [prompt(picture(grid, "a"))], visual)
    expected = visual.features_ND.double().numpy().mean(0)
    np.testing.assert_allclose(found.vector_D.numpy(), expected, rtol=1e-4, atol=1e-6)


# ---------------------------------------------------------------------- negatives


def proto(number: int, *images: str, zero: bool = False) -> Prototype:
    """A prototype that can be told apart by its first entry."""
    vector = torch.zeros(D) if zero else torch.cat([torch.tensor([float(number + 1)]), torch.ones(D - 1)])
    return Prototype(vector, frozenset(images or (f"image {number}",)))


def numbers(drawn: list[Tensor]) -> list[int]:
    return [int(vector[0]) - 1 for vector in drawn]


BATCH = [proto(i) for i in range(10)]
BANK = [proto(i) for i in range(100, 120)]


def test_never_oneself_never_the_same_image_never_zero() -> None:
    batch = [
        proto(0, "a"),
        proto(1, "a"),  # the same image
        proto(2, "a", "b"),  # shares one of two images
        proto(3, "c"),
        proto(4, "d", zero=True),
        Prototype(torch.zeros(D), frozenset()),  # a prompt without an image
        proto(6, "e"),
        proto(7, "e"),  # an image twice: only one of them
    ]
    bank = [proto(8, "a"), proto(9, "c"), proto(10, "f"), proto(11, "d", zero=True), proto(12, "f")]
    firsts = set()
    for step in range(300):
        found = numbers(sample_negatives(0, batch, bank, 16, seed=1, step=step, sample_id="x"))
        assert len(found) == 3
        assert found[:2] in ([3, 6], [3, 7], [6, 3], [7, 3]), "the batch first"
        assert found[2] in (10, 12)
        firsts.add(tuple(found))
    assert len(firsts) == 8, "which of them, and in which order, is drawn"


def test_draws_depend_on_seed_step_and_sample_alone() -> None:
    def drawn(seed: int = 0, step: int = 0, sample_id: str = "a") -> list[int]:
        return numbers(sample_negatives(3, BATCH, BANK, 5, seed, step, sample_id))

    before = torch.random.get_rng_state()
    first = drawn()
    torch.manual_seed(99)
    assert drawn() == first, "no global random state"
    torch.random.set_rng_state(before)
    drawn()
    assert torch.equal(torch.random.get_rng_state(), before)
    assert len(set(first)) == 5 and 3 not in first
    others = [drawn(seed=1), drawn(step=1), drawn(sample_id="b")]
    assert all(other != first for other in others)
    assert drawn(seed=1, step=11) != drawn(seed=11, step=1), "no two (seed, step) run together"


def test_draws_do_not_depend_on_the_split() -> None:
    """Whoever holds the whole batch in its order draws the same, be it one rank or the ranks of any split."""
    together = [numbers(sample_negatives(i, BATCH, BANK, 4, 7, 5, f"id {i}")) for i in range(len(BATCH))]
    for size in (1, 3, 5):
        apart = []
        for start in range(0, len(BATCH), size):
            gathered = [Prototype(p.vector_D.clone(), p.pictures) for p in BATCH]  # what a rank receives
            apart += [
                numbers(sample_negatives(i, gathered, list(BANK), 4, 7, 5, f"id {i}"))
                for i in range(start, min(start + size, len(BATCH)))
            ]
        assert apart == together


def test_every_other_prompt_is_drawn_about_equally_often() -> None:
    counts = np.zeros(10)
    for step in range(600):
        counts[numbers(sample_negatives(0, BATCH, [], 3, 0, step, "a"))] += 1
    assert counts[0] == 0
    assert counts[1:].min() > 150 and counts[1:].max() < 250  # 200 expected


def test_the_bank_tops_up() -> None:
    found = numbers(sample_negatives(0, BATCH[:4], BANK, 16, 0, 0, "a"))
    assert len(found) == 16 and set(found[:3]) == {1, 2, 3} and all(n >= 100 for n in found[3:])
    assert len(numbers(sample_negatives(0, BATCH, BANK, 9, 0, 0, "a"))) == 9
    assert max(numbers(sample_negatives(0, BATCH, BANK, 9, 0, 0, "a"))) < 100, "not while the batch has enough"
    assert len(sample_negatives(0, BATCH[:1], BANK, 16, 0, 0, "a")) == 16, "one prompt alone"
    assert len(sample_negatives(0, BATCH[:1], BANK[:5], 16, 0, 0, "a")) == 5
    assert sample_negatives(0, BATCH[:1], [], 16, 0, 0, "a") == []
    assert sample_negatives(0, BATCH, BANK, 0, 0, 0, "a") == []


# ---------------------------------------------------------------------- the bank


def test_the_bank_forgets_the_oldest() -> None:
    bank = NegativeBank(3)
    bank.add([proto(0), proto(1, zero=True), proto(2)])
    assert [p.pictures for p in bank.items] == [{"image 0"}, {"image 2"}], "zero prototypes are not kept"
    bank.add([proto(3), proto(4)])
    assert numbers([p.vector_D for p in bank.items]) == [2, 3, 4]
    bank.add([proto(i) for i in range(10, 20)])
    assert numbers([p.vector_D for p in bank.items]) == [17, 18, 19]


@pytest.mark.parametrize("size", [0, -1])
def test_a_bank_of_no_size_stays_empty(size: int) -> None:
    bank = NegativeBank(size)
    bank.add([proto(0)])
    assert list(bank.items) == []


@pytest.mark.parametrize("count", [0, 2, 5])
def test_the_bank_survives_a_round_trip(count: int) -> None:
    bank, other = NegativeBank(4), NegativeBank(4)
    bank.add([proto(i, f"a{i}", f"b{i}") for i in range(count)])
    other.add([proto(99)])
    state = bank.state_dict()
    assert state["vectors"].shape[0] == min(count, 4)
    other.load_state_dict(state)
    state["vectors"].zero_()  # what is loaded is its own
    assert [(int(p.vector_D[0]), p.pictures) for p in other.items] == [
        (int(p.vector_D[0]), p.pictures) for p in bank.items
    ]
    for one in (bank, other):
        one.add([proto(50)])
    assert [p.pictures for p in other.items] == [p.pictures for p in bank.items]
    assert numbers(sample_negatives(0, BATCH[:1], list(other.items), 3, 0, 0, "a")) == numbers(
        sample_negatives(0, BATCH[:1], list(bank.items), 3, 0, 0, "a")
    )


def test_padding() -> None:
    vectors, valid = pad([[torch.ones(D), 2 * torch.ones(D)], [], [3 * torch.ones(D)]], 3, D)
    assert vectors.shape == (3, 3, D)
    assert valid.tolist() == [[True, True, False], [False] * 3, [True, False, False]]
    assert vectors[..., 0].tolist() == [[1, 2, 0], [0, 0, 0], [3, 0, 0]]
    vectors, valid = pad([[], []], 0, D)
    assert vectors.shape == (2, 1, D) and not bool(valid.any())
    vectors, valid = pad([[torch.ones(4, D)], []], 2, 4, D)
    assert vectors.shape == (2, 2, 4, D) and valid.tolist() == [[True, False], [False, False]]
