"""Mass on a region and its enrichment, against loops over the definition."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from realvr.maths.attention import background, density, enrichment, region_mass, token_attention

SEED = torch.Generator().manual_seed(3)


def region(rows: int, columns: int, *cells: tuple[int, int]) -> Tensor:
    found = torch.zeros(rows, columns, dtype=torch.bool)
    for cell in cells:
        found[cell] = True
    return found


def windows(mask: Tensor) -> list[set[tuple[int, int]]]:
    """All translates of the cells that stay on the grid and share none with them, cell by cell."""
    cells = {(int(y), int(x)) for y, x in mask.nonzero()}
    found = []
    for down, right in itertools.product(range(-mask.shape[0], mask.shape[0]), range(-mask.shape[1], mask.shape[1])):
        moved = {(y + down, x + right) for y, x in cells}
        inside = all(0 <= y < mask.shape[0] and 0 <= x < mask.shape[1] for y, x in moved)
        if inside and not moved & cells:
            found.append(moved)
    return found


SHAPES = [
    region(6, 6, (2, 3)),
    region(4, 5, (0, 0), (0, 1), (1, 0), (1, 1)),
    region(6, 6, (1, 4), (1, 5), (0, 5)),  # no rectangle
    region(5, 7, (0, 0), (2, 3)),  # two boxes
    region(3, 3, (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)),  # no room
    region(2, 2),
]


@pytest.mark.parametrize("mask", SHAPES, ids=range(len(SHAPES)))
def test_mass_and_background_against_loops_over_every_window(mask: Tensor) -> None:
    rows = torch.rand(2, 1, 3, 4, mask.numel(), dtype=torch.float64, generator=SEED)  # layers, batch, heads, queries
    queries = torch.tensor([[True, False, True, True]])
    a_LN = token_attention(rows, queries)[:, 0]
    weights, count = background(mask)
    found = windows(mask)
    assert count == (len(found) if mask.any() else 0)
    for layer in range(2):

        def mass(cells: set[tuple[int, int]], layer: int = layer) -> float:
            total = 0.0
            for query, head, (y, x) in itertools.product((0, 2, 3), range(3), cells):
                total += float(rows[layer, 0, head, query, y * mask.shape[1] + x])
            return total / (3 * 3)

        target = mass({(int(y), int(x)) for y, x in mask.nonzero()})
        assert float(region_mass(a_LN[layer], mask.flatten())) == pytest.approx(target, abs=1e-12)
        around = sum(map(mass, found)) / len(found) if found and count else 0.0
        assert float(region_mass(a_LN[layer], weights.flatten())) == pytest.approx(around, abs=1e-12)
        if count:
            ratio = enrichment(torch.tensor(target), torch.tensor(around), eps=0.25)
            assert float(ratio) == pytest.approx(target / (around + 0.25), rel=1e-6)


@pytest.mark.parametrize("mask", SHAPES[:4], ids=range(4))
def test_uniform_attention_has_no_enrichment(mask: Tensor) -> None:
    uniform = torch.full((mask.numel(),), 1 / 512, dtype=torch.float64)  # a power of two: sums are exact
    weights, _ = background(mask)
    target, around = (region_mass(uniform, one.flatten()) for one in (mask, weights))
    assert float(enrichment(target, around, eps=0)) == pytest.approx(1, abs=1e-15)
    assert float(enrichment(target, around)) == pytest.approx(1, abs=1e-5)


def test_attention_planted_on_the_region_has_its_exact_ratio() -> None:
    mask = region(4, 4, (1, 1), (1, 2))
    a_YX = torch.full((4, 4), 0.02, dtype=torch.float64)
    a_YX[1, 1], a_YX[1, 2] = 0.3, 0.1
    weights, count = background(mask)
    assert count == 9  # three in each of the rows above and below; none in row 1, where all of them touch
    target, around = (region_mass(a_YX.flatten(), one.flatten()) for one in (mask, weights))
    assert float(enrichment(target, around, eps=0)) == pytest.approx(0.4 / 0.04)


def test_a_layer_without_any_attention_has_no_ratio() -> None:
    nothing, some = torch.tensor(0.0), torch.tensor(0.5)
    assert torch.isnan(enrichment(nothing, nothing))
    assert float(enrichment(nothing, some)) == 0
    assert float(enrichment(some, nothing)) == pytest.approx(0.5e8)


def test_density_has_mean_one() -> None:
    values = torch.rand(3, 10, dtype=torch.float64, generator=SEED)
    found = density(values)
    assert torch.allclose(found.mean(-1), torch.ones(3, dtype=torch.float64))
    assert torch.allclose(found / values, (found / values)[:, :1].expand(-1, 10))
    assert torch.isnan(density(torch.zeros(4))).all()


def test_rows_and_queries_must_fit() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        token_attention(torch.zeros(1, 2, 3, 4), torch.ones(2, 4))
    with pytest.raises(ValueError, match="not of shape"):
        token_attention(torch.zeros(2, 3, 4), torch.ones(2, 3))
    assert token_attention(torch.ones(1, 2, 3, 4), torch.zeros(2, 3)).abs().sum() == 0
