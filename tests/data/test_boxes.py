"""Boxes to visual tokens: the written rule, its properties, and real photographs."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from realvr.data import boxes as rule
from realvr.data.overlay import draw
from realvr.data.sample import Box
from realvr.imaging.types import Grid

GRIDS = [
    Grid(4, 6, merge=2),
    Grid(1, 1, merge=2),
    Grid(17, 23, merge=2),
    Grid(16, 16, merge=4),
    Grid(16, 16, 2, 3, thumbnail=True, merge=2),
    Grid(2, 3, 3, 1, thumbnail=True, merge=2),
    Grid(16, 16, merge=2),
]
grids = st.sampled_from(GRIDS)
coordinate = st.floats(-0.5, 1.5, allow_nan=False) | st.sampled_from([0.0, 0.25, 0.5, 1.0])
boxes = st.tuples(coordinate, coordinate, coordinate, coordinate)
quick = settings(max_examples=200, deadline=None)


def oracle(box: tuple[float, float, float, float], grid: Grid) -> set[int]:
    """The rule as it is written down, one token at a time, tiles numbered by hand."""
    x0, y0, x1, y1 = (min(1.0, max(0.0, v)) for v in box)
    m, h, w = grid.merge, grid.rows * grid.tile_rows * grid.merge, grid.cols * grid.tile_cols * grid.merge

    def span(low: float, high: float, n: int) -> range:
        first = min(max(math.floor(low * n), 0), n - 1)
        last = min(max(math.ceil(high * n), 0), n)
        return range(first // m, (last + m - 1) // m)

    tokens = set()
    for row in span(y0, y1, h):
        for col in span(x0, x1, w):
            tile = (row // grid.rows) * grid.tile_cols + col // grid.cols
            tokens.add(tile * grid.rows * grid.cols + (row % grid.rows) * grid.cols + col % grid.cols)
    return tokens


@quick
@given(grid=grids, box=boxes)
def test_mask_is_the_written_rule(grid: Grid, box: tuple[float, float, float, float]) -> None:
    clipped = rule.clip_box(box)
    mask = rule.token_mask([box], grid)
    assert mask.shape == (grid.tokens,) and mask.dtype == np.float32
    if clipped is None:
        assert not mask.any()
        return
    assert set(np.flatnonzero(mask)) == oracle(clipped, grid)
    assert mask.any(), "a box of positive clipped area has at least one token"
    assert set(np.unique(mask)) <= {0.0, 1.0}


@quick
@given(grid=grids, box=boxes, low=st.floats(0, 0.3), high=st.floats(0, 0.3))
def test_masks_are_monotone_in_the_box(grid: Grid, box: tuple, low: float, high: float) -> None:
    clipped = rule.clip_box(box)
    if clipped is None:
        return
    larger = (clipped[0] - low, clipped[1] - high, clipped[2] + high, clipped[3] + low)
    for fractional, slack in ((False, 0.0), (True, 1e-6)):
        inner, outer = (rule.token_mask([b], grid, fractional) for b in (clipped, larger))
        assert (outer >= inner - slack).all()


@quick
@given(grid=grids, several=st.lists(boxes, max_size=4))
def test_coverage(grid: Grid, several: list) -> None:
    binary, share = (rule.token_mask(several, grid, fractional) for fractional in (False, True))
    assert ((share > 0) == (binary > 0)).all(), "the same tokens, weighted"
    assert (share >= 0).all() and (share <= 1).all()
    shown = grid.tokens - grid.rows * grid.cols * grid.thumbnail
    assert not binary[shown:].any(), "the thumbnail is no evidence"
    parts = [rule.token_mask([box], grid) for box in several]
    assert (binary == np.maximum.reduce([*parts, np.zeros_like(binary)])).all(), "several boxes: union"
    order = rule.target_tokens(several, grid)
    assert (np.diff(order) > 0).all() and set(order) == set(np.flatnonzero(binary)), "row-major, each once"


def test_coverage_is_the_exact_area_of_the_union() -> None:
    grid = Grid(2, 2, merge=2)
    share = rule.token_mask([(0.0, 0.0, 0.75, 0.25), (0.25, 0.0, 0.75, 0.25), (0.5, 0.5, 1.0, 1.0)], grid, True)
    assert share.tolist() == [0.5, 0.25, 0.0, 1.0]
    fine = np.zeros((400, 400))
    several = [(0.1, 0.2, 0.6, 0.45), (0.3, 0.05, 0.9, 0.35)]
    for x0, y0, x1, y1 in several:
        fine[round(y0 * 400) : round(y1 * 400), round(x0 * 400) : round(x1 * 400)] = 1
    expected = fine.reshape(4, 100, 5, 80).mean(axis=(1, 3)).reshape(-1)
    assert np.allclose(rule.token_mask(several, Grid(4, 5, merge=2), True), expected, atol=1e-6)


def test_known_cases() -> None:
    grid = Grid(2, 3, merge=2)  # 4 x 6 patches
    assert rule.target_tokens([(0.0, 0.0, 0.01, 0.01)], grid).tolist() == [0]
    assert rule.target_tokens([(0.99, 0.99, 1.0, 1.0)], grid).tolist() == [5]
    assert rule.target_tokens([(1.0, 0.5, 0.0, 0.0)], grid).tolist() == [0, 1, 2], "inverted corners are swapped"
    assert rule.target_tokens([(0.3, 0.1, 0.7, 0.9)], grid).tolist() == [0, 1, 2, 3, 4, 5]
    assert rule.target_tokens([(0.34, 0.1, 0.66, 0.4)], grid).tolist() == [1]
    tiled = Grid(2, 2, 1, 2, thumbnail=True, merge=2)
    assert rule.target_tokens([(0.3, 0.0, 0.7, 0.4)], tiled).tolist() == [1, 4], "one column of each tile"
    tiny = math.nextafter(0.5, 1.0)
    for fractional in (False, True):
        assert (rule.token_mask([(0.5, 0.5, tiny, tiny)], Grid(3, 3, merge=2), fractional) > 0).sum() == 1


def test_no_evidence_means_the_whole_image() -> None:
    pair = [Grid(2, 2), Grid(2, 2, 1, 2, thumbnail=True)]
    assert [mask.sum() for mask in rule.evidence_masks([], pair)] == [4, 12]
    assert [mask.sum() for mask in rule.evidence_masks([Box(0, (2.0, 0.0, 3.0, 1.0))], pair)] == [4, 12]
    assert [mask.sum() for mask in rule.evidence_masks([Box(1, (0.0, 0.0, 0.1, 0.1))], pair)] == [0, 1]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_token_areas_tile_the_image(grid: Grid) -> None:
    areas = rule.token_boxes(grid)
    assert areas.shape == (grid.tokens, 4)
    shown = grid.tokens - grid.rows * grid.cols * grid.thumbnail
    assert math.isclose(((areas[:, 2] - areas[:, 0]) * (areas[:, 3] - areas[:, 1]))[:shown].sum(), 1.0)
    for index in range(shown):
        x0, y0, x1, y1 = areas[index]
        middle = ((x0 * 2 + x1) / 3, (y0 * 2 + y1) / 3, (x0 + x1 * 2) / 3, (y0 + y1 * 2) / 3)
        assert rule.target_tokens([middle], grid).tolist() == [index], "a box inside a token's area is that token"


@pytest.mark.parametrize("family", ["qwen2.5-vl", "qwen3-vl", "internvl3", "gemma3"])
def test_real_photographs(family: str, shared: Path) -> None:
    """Every annotated cell of the BCCD photographs: the tokens contain the box and reach no further than one token."""
    seen = 0
    for file in sorted((shared / "data/bccd/annotations").glob("*.xml"))[:25]:
        tree = ElementTree.parse(file)
        image = Image.open(shared / "data/bccd/images" / f"{file.stem}.jpg")
        width, height = image.size
        grid = rule.preview_grid(family, image.size)
        areas = rule.token_boxes(grid)
        cells = []
        for found in tree.iter("bndbox"):
            x0, y0, x1, y1 = (float(found.findtext(k) or 0) for k in ("xmin", "ymin", "xmax", "ymax"))
            box = rule.clip_box((x0 / width, y0 / height, x1 / width, y1 / height))
            assert box is not None
            covered = areas[rule.target_tokens([box], grid)]
            hull = (covered[:, 0].min(), covered[:, 1].min(), covered[:, 2].max(), covered[:, 3].max())
            step = (areas[0, 2] - areas[0, 0], areas[0, 3] - areas[0, 1])
            for axis in (0, 1):
                assert hull[axis] <= box[axis] + 1e-9 and hull[axis + 2] >= box[axis + 2] - 1e-9
                assert box[axis] - hull[axis] <= step[axis] and hull[axis + 2] - box[axis + 2] <= step[axis]
            cells.append(box)
            seen += 1
        if file.stem.endswith("00000"):
            picture = draw(image, cells, grid)
            assert picture.size == image.size and np.asarray(picture).std() > 0
    assert seen > 100
