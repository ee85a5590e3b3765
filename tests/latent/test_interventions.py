"""Vectors put into a running span: against cache-free stock passes for every family, and where they come from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import reference
from helpers import DEVICE, DTYPE, ask, difference, mixed_prompts, tolerance
from pair import gradients, relative
from realvr.data.sample import Sample
from realvr.errors import UserError
from realvr.evaluation.model_responder import ModelResponder
from realvr.evaluation.responder import Plan, Request
from realvr.imaging.types import Grid
from realvr.latent import cell_box, prefill, region_vector, rollout, score, think, trajectory
from realvr.latent.regions import region_tokens
from realvr.latent.sampling import Sampling

K = 4
CLOSE = tolerance(1e-5)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, DTYPE)


def tokens(rows: int) -> Tensor:
    return torch.randint(5, 200, (rows, 3), generator=torch.Generator().manual_seed(1)).to(DEVICE)


def slow_think(pair: Any, sequence: Any, put: Mapping[int, Tensor]) -> tuple[Any, Tensor]:
    """The definition: every step runs the whole sequence through the stock model; z_t is replaced before it is fed."""
    markers, rows = pair.ours.markers, len(sequence.ids)
    sequence = reference.append(pair.stock, sequence, pair.column(rows, markers.start))
    fed = []
    for step in range(1, K + 1):
        z_BD = reference.hidden(pair.stock, sequence)[:, -1]
        if step in put:
            z_BD = put[step].expand(rows, -1)
        fed.append(z_BD)
        sequence = reference.append(pair.stock, sequence, pair.column(rows, markers.slot), embeds=z_BD[:, None])
    return reference.append(pair.stock, sequence, pair.column(rows, markers.end)), torch.stack(fed, 1)


# ---------------------------------------------------------------------- against the stock model


@torch.no_grad()
def test_a_span_goes_on_from_what_was_put_into_it(pair: Any) -> None:
    """Padded rows of different length; one vector for all rows at step 2, one for each at step 4 (the last)."""
    backbone, prompts = pair.ours, mixed_prompts(pair.ours)
    rows, width = len(prompts), backbone.width
    state, _ = prefill(backbone, backbone.batch(prompts))
    _, free_BKD = think(backbone, state, K)
    for put in ({2: noise(width)}, {1: noise(rows, width)}, {2: noise(width, seed=1), K: noise(rows, width, seed=2)}):
        after, z_BKD = think(backbone, state, K, interventions=put)
        sequence, right_BKD = slow_think(pair, pair.begin(prompts), put)
        assert difference(z_BKD, right_BKD) <= CLOSE
        logp, _, _ = score(backbone, after, tokens(rows)[:, None])
        assert difference(logp[:, 0], reference.answer_logprobs(pair.stock, sequence, tokens(rows))) <= CLOSE
        first = min(put)
        assert torch.equal(z_BKD[:, : first - 1], free_BKD[:, : first - 1]), "what comes before is not touched"
        for step, vector in put.items():
            assert torch.equal(z_BKD[:, step - 1], vector.expand(rows, -1)), "z holds what was fed"
        if first < K:
            assert difference(z_BKD[:, first], free_BKD[:, first]) > 100 * CLOSE, "the recurrence goes on from there"


@torch.no_grad()
def test_a_latent_put_back_changes_nothing(pair: Any) -> None:
    """Bit for bit: the later latents, the state and the scores."""
    backbone, prompts = pair.ours, mixed_prompts(pair.ours)
    state, _ = prefill(backbone, backbone.batch(prompts))
    after, z_BKD = think(backbone, state, K)
    free, _, _ = score(backbone, after, tokens(len(prompts))[:, None])
    for put in (*({step: z_BKD[:, step - 1]} for step in range(1, K + 1)), dict(enumerate(z_BKD.unbind(1), 1))):
        again, same_BKD = think(backbone, state, K, interventions=put)
        logp, _, _ = score(backbone, again, tokens(len(prompts))[:, None])
        assert torch.equal(same_BKD, z_BKD) and torch.equal(again.last_BD, after.last_BD) and torch.equal(logp, free)
        assert again.span == after.span
    moved, _ = think(backbone, state, K, interventions={K: z_BKD[:, 0]})
    assert not torch.equal(moved.last_BD, after.last_BD)


def test_gradients_of_a_span_with_an_intervention(exact: Any) -> None:
    """Through the steps after it and into the vector; those before it still count as inputs of the answer."""
    backbone, prompts = exact.ours, [exact.ours.prompt(ask(0)), exact.ours.prompt(ask(1))]
    vector = noise(backbone.width).double()
    weight = noise(2, K, backbone.width, seed=3).double()
    found = []
    with reference.wide_softmax():
        for ours in (True, False):
            put = vector.clone().requires_grad_(True)
            if ours:
                _, _, z_BKD = trajectory(backbone, backbone.batch(prompts), latents=K, interventions={2: put})
            else:
                _, z_BKD = slow_think(exact, exact.begin(prompts), {2: put})
            scalar = (z_BKD * weight).sum()
            (of_vector,) = torch.autograd.grad(scalar, put, retain_graph=True)
            found.append((of_vector, gradients(backbone.model if ours else exact.stock, scalar)))
    (mine, ours), (right, stock) = found
    assert float((mine - right).norm() / right.norm()) <= 1e-10
    assert relative(ours, stock) <= 1e-10


@torch.no_grad()
def test_group_rollouts_with_interventions_equal_single_ones(pair: Any) -> None:
    backbone, prompts = pair.ours, mixed_prompts(pair.ours)
    put_BD = noise(len(prompts), backbone.width)
    options: dict[str, Any] = {"latents": K, "sampling": Sampling(max_new=6, stop=None)}
    seeds = list(range(5, 5 + len(prompts)))
    together = rollout(backbone, prompts, group=3, seed=seeds, interventions={2: put_BD}, **options)
    free = rollout(backbone, prompts, group=3, seed=seeds, **options)
    for row, prompt in enumerate(prompts):
        alone = rollout(backbone, [prompt], group=3, seed=[seeds[row]], interventions={2: put_BD[row]}, **options)
        assert difference(alone.latents_BKD[0], together.latents_BKD[row]) <= CLOSE
        assert difference(alone.latents_BKD[0, 2:], free.latents_BKD[row, 2:]) > 100 * CLOSE
        if torch.float32 == DTYPE:
            assert [c.ids for c in alone.completions[0]] == [c.ids for c in together.completions[row]]


@torch.no_grad()
def test_the_responder_puts_each_requests_own_vector(pair: Any) -> None:
    """Also where a request before it cannot be asked and leaves the batch."""
    responder = ModelResponder(pair.ours, Sampling(temperature=0.0, max_new=4, stop=None))
    asked = [Request(Sample("x", [], [], ""), turns) for turns in (ask(0), ask(0, text="word " * 9000), ask(1))]
    put_RD = noise(3, pair.ours.width)
    free, moved = responder.reply(asked, [Plan(K), Plan(K, interventions={3: put_RD})])
    assert moved[1].error is not None and moved[0].error is None and moved[2].error is None
    for row in (0, 2):
        alone = responder.reply([asked[row]], [Plan(K, interventions={3: put_RD[row]})])[0][0]
        assert moved[row].latents is not None and alone.latents is not None and free[row].latents is not None
        assert torch.equal(moved[row].latents[2], put_RD[row].float().cpu())
        assert difference(moved[row].latents, alone.latents) <= CLOSE
        assert torch.equal(moved[row].latents[:2], free[row].latents[:2])
    with pytest.raises(ValueError, match="not both"):
        responder.reply(asked[:1], [Plan(K, [noise(K, pair.ours.width)], {3: put_RD[0]})])


def test_steps_that_a_span_does_not_have(pair: Any) -> None:
    prompt = pair.ours.prompt(ask(0))
    with torch.no_grad():
        state, _ = prefill(pair.ours, pair.ours.batch([prompt]))
        for latents, step, words in ((K, K + 1, "K = 4"), (K, 0, "steps 1 to 4"), (0, 1, "no latent span")):
            with pytest.raises(UserError, match=words) as caught:
                think(pair.ours, state, latents, interventions={step: noise(pair.ours.width)})
            assert f"step {step}" in str(caught.value) and "\n" not in str(caught.value)
        with pytest.raises(ValueError, match="step 2"):
            think(pair.ours, state, K, interventions={2: noise(2, pair.ours.width)})


# ---------------------------------------------------------------------- regions

GRIDS = [Grid(6, 6), Grid(3, 29, merge=2), Grid(44, 25, merge=2), Grid(4, 4, 2, 3, thumbnail=True, merge=2)]


def place(grid: Grid, row: int, column: int) -> int:
    """Number of the token at a row and column of the picture: tiles one after the other, each row by row."""
    (tile_row, y), (tile_column, x) = divmod(row, grid.rows), divmod(column, grid.cols)
    return ((tile_row * grid.tile_cols + tile_column) * grid.rows + y) * grid.cols + x


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_a_cell_is_one_visual_token(grid: Grid) -> None:
    features = torch.arange(grid.tokens, dtype=torch.float32)[:, None].expand(-1, 2)
    rows, columns = grid.rows * grid.tile_rows, grid.cols * grid.tile_cols
    for row in range(rows):
        for column in range(columns):
            box = cell_box(grid, row, column)
            assert np.allclose(box, [column / columns, row / rows, (column + 1) / columns, (row + 1) / rows], atol=1e-6)
            assert region_tokens(grid, box).tolist() == [place(grid, row, column)]
            assert region_vector(features, grid, box).tolist() == [place(grid, row, column)] * 2
    for row, column in ((-1, 0), (rows, 0), (0, -1), (0, columns)):
        with pytest.raises(UserError, match=f"row {row + 1}, column {column + 1} lies outside .* {rows} x {columns}"):
            cell_box(grid, row, column)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_region_is_the_mean_of_its_tokens(dtype: torch.dtype) -> None:
    grid = Grid(4, 4, 2, 3, thumbnail=True, merge=2)
    features = torch.randn(grid.tokens, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    # Columns 3 to 6 of 12 and rows 2 to 4 of 8: across the border of two tiles.
    found = region_vector(features, grid, (3.1 / 12, 2.2 / 8, 6.9 / 12, 4.9 / 8))
    covered = [features[place(grid, row, column)] for row in (2, 3, 4) for column in (3, 4, 5, 6)]
    assert found.dtype == dtype
    assert difference(found, sum(x.double() for x in covered) / 12) <= (1e-2 if dtype == torch.bfloat16 else 1e-6)
    for box in ((1.2, 0.1, 1.4, 0.2), (0.2, 0.2, 0.2, 0.6), (-0.3, 0.0, -0.1, 1.0)):
        with pytest.raises(UserError, match="covers nothing of the picture"):
            region_vector(features, grid, box)
    with pytest.raises(ValueError, match="the grid has"):
        region_vector(features[:-1], grid, (0, 0, 1, 1))
