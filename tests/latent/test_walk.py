"""The walk of latents through a picture: planted latents, against a plain loop over visual tokens."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers import ask
from realvr.backbone import Backbone
from realvr.data.boxes import on_canvas, token_boxes, token_place
from realvr.errors import UserError
from realvr.imaging.types import Grid
from realvr.latent.walk import Walk, token_at, walk

GRIDS = (Grid(3, 4, merge=2), Grid(2, 2, 3, 2, thumbnail=True, merge=2), Grid(2, 3, 1, 4, thumbnail=True), Grid(1, 1))


def _loop(latents_KD: Tensor, features_ND: Tensor, grids: tuple[Grid, ...]) -> list[tuple[int, int, int, int, float]]:
    """(token, image, row, column, cosine) of each latent, one product at a time, image by image, tile by tile."""
    found = []
    for z in latents_KD.double().tolist():
        best = (-1, -1, -1, -1, -math.inf)
        token = 0
        for image, grid in enumerate(grids):
            for tile_row in range(grid.tile_rows):
                for tile_col in range(grid.tile_cols):
                    for row in range(grid.rows):
                        for col in range(grid.cols):
                            v = features_ND[token].double().tolist()
                            dot = sum(a * b for a, b in zip(z, v, strict=True))
                            cosine = dot / math.sqrt(sum(a * a for a in z) * sum(b * b for b in v))
                            if cosine > best[-1]:
                                place = (tile_row * grid.rows + row, tile_col * grid.cols + col)
                                best = (token, image, *place, cosine)
                            token += 1
            token += grid.rows * grid.cols * grid.thumbnail
        found.append(best)
    return found


def _check(found: Walk, latents_KD: Tensor, features_ND: Tensor, grids: tuple[Grid, ...]) -> None:
    expected = _loop(latents_KD, features_ND, grids)
    assert found.nearest.tolist() == [token for token, *_ in expected]
    assert [(place.image, place.row, place.col) for place in found.places()] == [tuple(one[1:4]) for one in expected]
    np.testing.assert_allclose(found.cosine, [one[-1] for one in expected], atol=1e-5)
    assert found.similarity.shape == (len(latents_KD), len(features_ND)) and len(found) == len(latents_KD)
    for t, place in enumerate(found.places()):
        heat = found.heat(place.image)[t]
        assert heat[place.row, place.col] == heat.max() == found.cosine[t]
        rows, cols = heat.shape
        assert place.center == pytest.approx(((place.col + 0.5) / cols, (place.row + 0.5) / rows))


def _tiles(grids: tuple[Grid, ...]) -> list[int]:
    """Tokens that do not belong to a thumbnail."""
    found, start = [], 0
    for grid in grids:
        shown = grid.tokens - grid.rows * grid.cols * grid.thumbnail
        found += range(start, start + shown)
        start += grid.tokens
    return found


@pytest.mark.parametrize("grids", [(grid,) for grid in GRIDS] + [GRIDS], ids=str)
def test_planted_latents_are_found(grids: tuple[Grid, ...]) -> None:
    generator = torch.Generator().manual_seed(len(grids))
    features = torch.randn(sum(grid.tokens for grid in grids), 16, generator=generator)
    where = _tiles(grids)
    planted = [where[i] for i in torch.randint(len(where), (9,), generator=generator).tolist()]
    scale = torch.linspace(0.1, 20, 9)[:, None]  # the norm must not matter
    latents = scale * (features[planted] + 0.05 * torch.randn(9, 16, generator=generator))
    found = walk(latents, features, grids if len(grids) > 1 else grids[0])
    assert found.nearest.tolist() == planted and found.cosine.min() > 0.97 and not found.thumbnail.any()
    _check(found, latents, features, grids)


def test_planted_latents_in_every_family(backbone: Backbone) -> None:
    """Real visual tokens of several pictures, tiled ones among them; noise as large as a tenth of the latent."""
    prompt = backbone.prompt(ask(0, 1, 2, text="What has changed?"))
    visual = backbone.encode_images(prompt.images)
    grids, features = visual.grids, visual.features_ND.detach()
    if backbone.family.name == "internvl3":
        assert any(grid.thumbnail for grid in grids) and len({grid.tile_cols for grid in grids}) > 1
    where = _tiles(grids)
    planted = where[:: max(1, len(where) // 7)]
    noise = torch.randn(len(planted), features.shape[1], generator=torch.Generator().manual_seed(3))
    noise = 0.1 * noise / noise.norm(dim=-1, keepdim=True) * features[planted].float().cpu().norm(dim=-1, keepdim=True)
    latents = features[planted] + noise.to(features)
    found = walk(latents, features, grids)
    _check(found, latents, features, grids)
    assert np.mean(found.nearest == planted) > 0.7  # neighbours in a flat area may be closer than the noise


def test_a_thumbnail_is_never_the_place() -> None:
    """A latent equal to a token of the thumbnail goes to the closest tile token, and the walk tells so."""
    grid = Grid(2, 3, 2, 1, thumbnail=True)
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(grid.tokens, 8, generator=generator)
    last, shown = grid.tokens - 1, grid.tokens - grid.rows * grid.cols
    found = walk(features[[last, 0]], features, grid)
    assert found.thumbnail.tolist() == [True, False]
    assert found.similarity[0, last] == pytest.approx(1.0) and found.cosine[0] < 0.999
    assert found.nearest[0] == found.similarity[0, :shown].argmax() < shown and found.nearest[1] == 0
    with pytest.raises(ValueError, match="thumbnail"):
        token_at(last, [grid])


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_places_agree_with_the_areas_of_tokens(grid: Grid) -> None:
    """`token_place` and `on_canvas` number the cells as `token_boxes` cuts the picture."""
    boxes = token_boxes(grid)
    rows, cols = grid.rows * grid.tile_rows, grid.cols * grid.tile_cols
    numbers = on_canvas(np.arange(grid.tokens), grid)
    assert numbers.shape == (rows, cols)
    for index in range(grid.tokens):
        place = token_place(index, grid)
        if index >= rows * cols:
            assert place is None
            continue
        assert place is not None and numbers[place] == index
        assert boxes[index] == pytest.approx(
            (place[1] / cols, place[0] / rows, (place[1] + 1) / cols, (place[0] + 1) / rows)
        )


def test_a_picture_shown_twice_is_met_where_it_is_first() -> None:
    grid = Grid(2, 2)
    features = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    found = walk(features[[3]], torch.cat([features, features]), [grid, grid])
    assert found.nearest.tolist() == [3] and found.places()[0].image == 0


def test_half_precision_is_compared_in_float32() -> None:
    grid = Grid(4, 4)
    generator = torch.Generator().manual_seed(2)
    base = torch.randn(1, 64, generator=generator)
    features = (base + 0.02 * torch.randn(16, 64, generator=generator)).bfloat16()  # cosines bfloat16 cannot tell apart
    found = walk(features, features, grid)
    assert found.nearest.tolist() == list(range(16))
    assert len(np.unique(found.similarity)) > 100


def test_what_cannot_be_walked() -> None:
    grid = Grid(2, 2)
    features = torch.randn(4, 8)
    with pytest.raises(UserError, match="no picture"):
        walk(torch.randn(2, 8), torch.empty(0, 8), [])
    with pytest.raises(UserError, match="z_2 .* not finite"):
        walk(torch.stack([features[0], features[0] * math.nan]), features, grid)
    with pytest.raises(ValueError, match="do not fit 4 tokens"):
        walk(torch.randn(2, 8), torch.randn(5, 8), grid)
    with pytest.raises(ValueError, match="do not fit"):
        walk(torch.randn(2, 9), features, grid)
    assert len(walk(torch.empty(0, 8), features, grid)) == 0


def test_no_torch_to_read_the_module() -> None:
    code = "import sys, realvr.latent.walk; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
