"""Maps as they are kept: levels of 8 bits, and token pairs pooled to bins."""

from __future__ import annotations

import numpy as np
import pytest

from realvr.diagnostics.saliency_maps import MOST_BINS, bins, levels, pooled_pairs, values


def test_levels_keep_the_map_up_to_its_peak() -> None:
    rng = np.random.default_rng(0)
    grids = [rng.random((3, 4)) ** 4 * 0.02, rng.random((2, 5)) * 0.001]
    found = levels([grid.tolist() for grid in grids])
    assert found["peak"] == pytest.approx(max(grid.max() for grid in grids), rel=1e-5)
    for grid, again in zip(grids, values(found), strict=True):
        share = grid / found["peak"]
        assert again.shape == grid.shape and again.max() <= 1
        assert np.abs(np.sqrt(again) - np.sqrt(share)).max() <= 0.5 / 255 + 1e-5
    assert max(one.max() for one in values(found)) == 1, "the largest of an example is 1"
    assert levels([[[0.0, 0.0]]]) == {"peak": 0.0, "levels": [["0000"]]}


def test_bins_cover_all_tokens_and_cross_no_border() -> None:
    groups = ["text"] * 7 + ["image"] * 200 + ["text"] * 90 + ["reply"] + ["latents"] * 8 + ["reply"] * 5
    cut = bins(groups)
    assert [column for start, stop in cut for column in range(start, stop)] == list(range(len(groups)))
    assert all(len(set(groups[start:stop])) == 1 for start, stop in cut)
    for name, most in MOST_BINS.items():
        count = sum(groups[start] == name for start, _ in cut)
        runs = 2 if name in ("text", "reply") else 1
        assert count <= most + runs - 1
    assert [stop - start for start, stop in cut if groups[start] == "latents"] == [1] * 8
    assert bins(["text", "image", "image"]) == [(0, 1), (1, 2), (2, 3)]


def test_pooled_pairs_are_mean_queries_on_sums_of_keys() -> None:
    rng = np.random.default_rng(1)
    matrix = rng.random((6, 6))
    matrix /= matrix.sum(1, keepdims=True)
    cut = [(0, 1), (1, 4), (4, 6)]
    found = np.array(pooled_pairs(matrix, cut))
    for row, (a, b) in enumerate(cut):
        for column, (c, d) in enumerate(cut):
            right = sum(matrix[q, k] for q in range(a, b) for k in range(c, d)) / (b - a)
            assert found[row, column] == pytest.approx(right)
    assert found.sum(1) == pytest.approx(1)
