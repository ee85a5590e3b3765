"""Pictures of walks, pixel by pixel: the path over the right cells, labels, heat maps, odd sizes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from realvr.evaluation.showing import Drawn, save_walks
from realvr.imaging.types import Grid
from realvr.latent.drawing import PATH, PUT, draw_walk, heat_map, numbers
from realvr.latent.walk import Walk

COARSE = Grid(6, 6)
WAY = ((0, 2), (1, 2), (1, 3), (1, 4), (2, 4), (3, 4), (3, 5), (4, 5))


def made(places: list[tuple[int, int, int]], *grids: Grid) -> Walk:
    """A walk over single-tile grids: (image, row, column) of every step."""
    starts = np.cumsum([0, *(grid.tokens for grid in grids)])
    nearest = np.array([starts[image] + row * grids[image].cols + col for image, row, col in places], np.int64)
    similarity = np.random.default_rng(0).uniform(-0.2, 0.5, (len(places), starts[-1])).astype(np.float32)
    similarity[np.arange(len(places)), nearest] = np.linspace(0.8, 0.99, len(places))
    cosine = similarity[np.arange(len(places)), nearest]
    return Walk(nearest, cosine, similarity, grids, np.zeros(len(places), bool))


def at(picture: Image.Image, x: float, y: float) -> tuple[int, ...]:
    return picture.getpixel((int(x), int(y)))  # type: ignore[return-value]


@pytest.mark.parametrize("background", [(255, 255, 255), (0, 0, 0), (236, 0, 140), (128, 128, 128)])
def test_the_path_runs_through_the_cells(background: tuple[int, int, int]) -> None:
    """Its color in the middle of every cell it visits and half way between, a halo around it, and nothing elsewhere."""
    drawn = draw_walk(Image.new("RGB", (48, 48), background), made([(0, *cell) for cell in WAY], COARSE), strip=False)
    assert drawn.size == (576, 576)
    centers = [((col + 0.5) * 96, (row + 0.5) * 96) for row, col in WAY]
    for x, y in centers:
        assert at(drawn, x, y) == PATH
    for (x0, y0), (x1, y1) in zip(centers, centers[1:], strict=False):
        assert at(drawn, (x0 + x1) / 2, (y0 + y1) / 2) == PATH
        across = [at(drawn, (x0 + x1) / 2 + d * (y0 != y1), (y0 + y1) / 2 + d * (x0 != x1)) for d in range(-12, 13)]
        assert (255, 255, 255) in across  # the halo
    for row in range(6):
        for col in range(6):
            if (row, col) not in WAY:
                assert at(drawn, (col + 0.5) * 96, (row + 0.5) * 96) == background
    plain = np.asarray(drawn).reshape(6, 96, 6, 96, 3)[5]  # no step in the last row
    assert (plain == background).all()


def test_a_latent_that_was_put_there_has_its_own_color() -> None:
    drawn = draw_walk(
        Image.new("RGB", (48, 48), (90, 90, 90)), made([(0, 0, 0), (0, 4, 1), (0, 5, 1)], COARSE), put={2}, strip=False
    )
    assert [at(drawn, (col + 0.5) * 96, (row + 0.5) * 96) for row, col in ((0, 0), (4, 1), (5, 1))] == [PATH, PUT, PATH]
    leg = [at(drawn, 48 + 96 * k / 40, 48 + 384 * k / 40) for k in range(3, 38)]
    assert PUT in leg and PATH not in leg  # the model did not take this step


def test_numbers_of_one_cell() -> None:
    assert numbers([3]) == "3" and numbers([3, 4]) == "3,4" and numbers([3, 4, 5, 8]) == "3-5,8"
    assert numbers([7, 1, 2, 3, 9, 10, 11, 12]) == "1-3,7,9-12"


def test_labels_stay_apart_and_inside() -> None:
    """Every label of a walk that crowds into one corner of a fine grid is a separate spot of its color."""
    steps = [(0, 0, 0), (0, 0, 1), (0, 1, 1), (0, 1, 0), (0, 0, 0), (0, 0, 1)]
    drawn = np.asarray(draw_walk(Image.new("RGB", (48, 48)), made(steps, Grid(12, 12)), strip=False)).astype(int)
    near = (np.abs(drawn - PATH).sum(-1) < 30).astype(np.uint8)
    assert near[:, :1].sum() == 0 and near[:1].sum() == 0  # nothing is cut off at the edge
    assert near.sum() > 4 * 15 * 15  # four labels and the path


@pytest.mark.parametrize("size", [(1, 1), (7, 48), (900, 30), (30, 900), (1600, 1200)])
@pytest.mark.parametrize("steps", [1, 40])
def test_any_picture_and_any_number_of_latents(size: tuple[int, int], steps: int) -> None:
    grid = Grid(3, 5) if steps == 1 else Grid(13, 2)
    rng = np.random.default_rng(1)
    places = [(0, int(rng.integers(grid.rows)), int(rng.integers(grid.cols))) for _ in range(steps)]
    drawn = draw_walk(
        Image.new("L", size, 40), made(places, grid), question="Why? " * 600, answer="because " * 200, put={1}
    )
    assert drawn.mode == "RGB" and 420 <= drawn.width <= 1000
    if steps == 1:
        assert drawn.height < 1400


def test_a_walk_over_two_pictures() -> None:
    """Each step is drawn in its own picture, and no line joins the two."""
    blank = Image.new("RGB", (48, 48), (200, 200, 200))
    drawn = np.asarray(
        draw_walk([blank, blank], made([(0, 0, 0), (0, 0, 3), (1, 5, 5)], COARSE, COARSE), strip=False)
    ).astype(int)
    half = drawn.shape[1] // 2
    first, second = ((np.abs(part - PATH).sum(-1) == 0) for part in (drawn[:, :half], drawn[:, half:]))
    assert first[: len(first) // 3].any() and not first[len(first) // 3 :].any()
    assert second[2 * len(second) // 3 :].any() and not second[: 2 * len(second) // 3].any()
    with pytest.raises(ValueError, match="1 pictures for a walk over 2"):
        draw_walk(blank, made([(0, 0, 0)], COARSE, COARSE))


def test_heat_maps_come_with_fine_grids() -> None:
    picture = Image.new("RGB", (200, 100), (90, 90, 90))
    fine, coarse = (draw_walk(picture, made([(0, 1, 2)] * 8, Grid(8, cols))) for cols in (16, 12))
    assert fine.height > coarse.height + 200
    assert draw_walk(picture, made([(0, 1, 2)] * 8, Grid(8, 16)), heat=False).height < fine.height - 200


def test_a_heat_map_is_hottest_at_its_largest_value() -> None:
    """One block a token, ordered by value, and the picture still visible below the cold ones."""
    values = np.linspace(-0.3, 0.9, 20, dtype=np.float32).reshape(4, 5)
    stripes = np.zeros((80, 100, 3), np.uint8)
    stripes[:, ::2] = 255
    drawn = np.asarray(heat_map(Image.fromarray(stripes), values, -0.3, 0.9)).astype(float)
    blocks = drawn.reshape(4, 20, 5, 20, 3).mean((1, 3)).sum(-1).ravel()
    assert (np.diff(blocks) > 0).sum() >= 18 and blocks.argmax() == 19
    assert np.abs(np.diff(drawn[0, :20].sum(-1))).min() > 60


def test_headings_start_where_the_rest_starts(tmp_path: Path) -> None:
    """Two walks side by side: the first ink of each heading is above the first of the question below it."""
    walk = made([(0, *cell) for cell in WAY], COARSE)
    drawn = [Drawn(walk, "B", {}), Drawn(walk, "C", {4: "z_4 at row 5, column 2"})]
    save_walks(tmp_path / "walks.png", [Image.new("RGB", (48, 48))], "How many?", drawn)
    with Image.open(tmp_path / "walks.png") as picture:
        inked = (np.asarray(picture.convert("L")) < 200).reshape(picture.height, 2, -1)
    alone = draw_walk(Image.new("RGB", (48, 48)), walk, question="How many?", answer="B")
    shift = picture.height - alone.height
    assert shift >= 20
    for panel in (0, 1):
        head = inked[: 18 + shift - 2, panel, :].any(0).argmax() - 7 * panel
        below = inked[-18 - 52 :, panel, :].any(0).argmax() - 7 * panel  # two lines: question and answer
        assert head >= 18 and abs(int(head) - int(below)) <= 2


def test_letters_beyond_the_first_font_do_not_stop_it() -> None:
    walk = made([(0, 0, 0)], COARSE)
    assert (
        draw_walk(Image.new("RGB", (48, 48)), walk, question="Größe? 中文 \u200f\U0001f600", answer="été").height > 600
    )


def test_no_torch_is_needed() -> None:
    code = "import sys, realvr.latent.drawing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
