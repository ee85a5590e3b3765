"""Mistakes that others made must show: each changes the result by over a hundred times what the other tests allow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import reference
from helpers import DEVICE, DTYPE, ask, difference, tolerance
from realvr.backbone import Prompt, Turn
from realvr.latent import State, decoder_pass, extend, prefill, splice, think

K = 4
CLOSE = tolerance(1e-5)
DETECTED = 100 * CLOSE

pytestmark = pytest.mark.skipif(
    DTYPE not in (torch.float32, torch.float64), reason="half precision is no ruler for small mistakes"
)


@pytest.fixture(autouse=True)
def _no_graph() -> Iterator[None]:
    with torch.no_grad():
        yield


def question(pair: Any, number: int = 1) -> Prompt:
    """Picture 1 is higher than wide in every family with variable grids."""
    return pair.ours.prompt(ask(number))


def tokens(*shape: int) -> Tensor:
    return torch.randint(5, 200, shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)


def read(pair: Any, prompt: Prompt, **changes: Any) -> tuple[State, Tensor]:
    """The prompt, with some argument of the pass changed: state and hidden states."""
    backbone = pair.ours
    batch = backbone.batch([prompt])
    visual = backbone.encode_images(batch.images)
    options = {"positions": batch.positions, "image_BT": batch.image_BT, "deepstack": visual.deepstack, **changes}
    positions = options.pop("positions")
    return decoder_pass(backbone, None, backbone.embed_batch(batch, visual), positions, **options)


def right(pair: Any, prompt: Prompt) -> tuple[State, Tensor, Tensor]:
    """State, hidden states and latents, shown to be the reference's."""
    state, hidden = read(pair, prompt)
    _, z_BKD = think(pair.ours, state, K)
    sequence = pair.begin([prompt])
    assert difference(hidden, reference.hidden(pair.stock, sequence)) <= CLOSE
    assert difference(z_BKD, pair.think(sequence, K)[1]) <= CLOSE
    return state, hidden, z_BKD


@pytest.mark.parametrize("part", [0.25, 0.5, 0.9])
def test_shifted_positions(pair: Any, part: float) -> None:
    prompt = question(pair)
    _, hidden, z_BKD = right(pair, prompt)
    positions = pair.ours.batch([prompt]).positions.clone()
    first = int(part * len(prompt))
    positions[..., first:] += 1
    state, wrong = read(pair, prompt, positions=positions)
    assert difference(wrong[:, :first], hidden[:, :first]) <= CLOSE or pair.ours.two_way_images
    assert difference(wrong[:, -1], hidden[:, -1]) > DETECTED
    assert difference(think(pair.ours, state, K)[1], z_BKD) > DETECTED


def test_a_span_one_position_late(pair: Any) -> None:
    state, _, z_BKD = right(pair, question(pair))
    _, wrong = think(pair.ours, replace(state, next_B=state.next_B + 1), K)
    assert difference(wrong, z_BKD) > DETECTED


def test_swapped_rows_and_columns(pair: Any) -> None:
    if not pair.ours.mrope:
        pytest.skip("positions of this family are one-dimensional")
    prompt = question(pair)
    assert prompt.images[0].grid.rows != prompt.images[0].grid.cols
    _, hidden, _ = right(pair, prompt)
    positions = pair.ours.batch([prompt]).positions
    _, wrong = read(pair, prompt, positions=positions[[0, 2, 1]])
    assert difference(wrong[:, -1], hidden[:, -1]) > DETECTED
    _, flat = read(pair, prompt, positions=torch.arange(len(prompt), device=DEVICE)[None])
    assert difference(flat[:, -1], hidden[:, -1]) > DETECTED


def test_another_image(pair: Any) -> None:
    """Pictures 1 and 7 have one size, hence the same ids."""
    prompt, other = question(pair, 1), question(pair, 7)
    assert torch.equal(prompt.ids, other.ids) and prompt.images[0].key != other.images[0].key
    _, _, z_BKD = right(pair, prompt)
    assert difference(right(pair, other)[2], z_BKD) > DETECTED


def test_dropped_image_features(pair: Any) -> None:
    """The prompt with the placeholder's embedding where the visual tokens should be."""
    prompt = question(pair)
    _, hidden, _ = right(pair, prompt)
    backbone = pair.ours
    batch = backbone.batch([prompt])
    blind = backbone.embed(batch.ids_BT.masked_fill(batch.image_BT, 0))
    _, wrong = decoder_pass(backbone, None, blind, batch.positions, image_BT=batch.image_BT)
    assert difference(wrong[:, -1], hidden[:, -1]) > DETECTED
    visual = backbone.encode_images(batch.images)
    if visual.deepstack:
        embeds = backbone.embed_batch(batch, visual)
        _, wrong = decoder_pass(backbone, None, embeds, batch.positions, image_BT=batch.image_BT)
        assert difference(wrong[:, -1], hidden[:, -1]) > DETECTED, "without the deepstack features"
    if backbone.two_way_images:
        _, wrong = read(pair, prompt, image_BT=None)
        assert difference(wrong[:, -1], hidden[:, -1]) > DETECTED, "image tokens that do not attend both ways"


def after_splice(pair: Any, state: State, z_BKD: Tensor) -> tuple[Tensor, Tensor]:
    """States before the slots, and the states of an answer after the span."""
    spliced, before_BKD = splice(pair.ours, state, z_BKD)
    return before_BKD, extend(pair.ours, spliced, tokens(1, 5))[1]


@pytest.mark.parametrize("order", [[3, 0, 1, 2], [1, 0, 2, 3], [0, 1, 3, 2], [0, 0, 1, 2]])
def test_latents_in_a_wrong_slot(pair: Any, order: list[int]) -> None:
    state, _, z_BKD = right(pair, question(pair))
    live, _ = think(pair.ours, state, K)
    before, answer = after_splice(pair, state, z_BKD)
    assert difference(before, z_BKD) <= CLOSE
    assert difference(answer, extend(pair.ours, live, tokens(1, 5))[1]) <= CLOSE
    moved = z_BKD[:, order]
    wrong_before, wrong_answer = after_splice(pair, state, moved)
    assert difference(wrong_before, moved) > DETECTED, "replayed latents are not reproduced"
    assert difference(wrong_answer, answer) > DETECTED


def test_replay_off_by_one(pair: Any) -> None:
    """The state before ``<|lvr_start|>`` taken for z_1, every other latent one slot late."""
    state, _, z_BKD = right(pair, question(pair))
    _, answer = after_splice(pair, state, z_BKD)
    late = torch.cat([state.last_BD[:, None], z_BKD[:, :-1]], 1)
    assert difference(state.last_BD, z_BKD[:, 0]) > DETECTED
    wrong_before, wrong_answer = after_splice(pair, state, late)
    assert difference(wrong_before, late) > DETECTED
    assert difference(wrong_answer, answer) > DETECTED


def test_the_markers_own_slot_overwritten(pair: Any) -> None:
    """Latents written from the start marker on: ``<|lvr_start|>`` is lost and the last slot stays empty."""
    backbone = pair.ours
    state, _, z_BKD = right(pair, question(pair))
    _, answer = after_splice(pair, state, z_BKD)
    slot, end = (backbone.embed(pair.column(1, token)) for token in (backbone.markers.slot, backbone.markers.end))
    wrong, _ = extend(backbone, state, embeds_BSD=torch.cat([z_BKD, slot, end], 1))
    assert difference(extend(backbone, wrong, tokens(1, 5))[1], answer) > DETECTED


def test_dropped_padding_mask(pair: Any) -> None:
    backbone = pair.ours
    prompts = [question(pair), backbone.prompt(ask(0, text="Which of the two shapes is larger, and why? " * 2))]
    prompts.sort(key=len)
    batch = backbone.batch(prompts)
    visual = backbone.encode_images(batch.images)
    embeds = backbone.embed_batch(batch, visual)
    options = {"image_BT": batch.image_BT, "deepstack": visual.deepstack}
    alone = right(pair, prompts[0])[1][:, -1]
    _, padded = decoder_pass(backbone, None, embeds, batch.positions, real_BT=batch.real_BT, **options)
    assert difference(padded[0, None, -1], alone) <= CLOSE
    _, wrong = decoder_pass(backbone, None, embeds, batch.positions, **options)
    assert difference(wrong[0, None, -1], alone) > DETECTED


def test_dropped_earlier_latents(pair: Any) -> None:
    """A first turn's span that is forgotten, emptied or filled with another span changes the second turn."""
    backbone = pair.ours
    state, _, z_BKD = right(pair, question(pair))
    reply = tokens(5).tolist()

    def second_turn(z_KD: Tensor | None) -> Tensor:
        turns = [*ask(1), Turn("assistant", latents=z_KD, ids=reply), *ask(0, text="And now?")]
        prompt = backbone.prompt(turns)
        state, hidden = prefill(backbone, backbone.batch([prompt]))
        assert difference(hidden, reference.hidden(pair.stock, pair.begin([prompt]))) <= CLOSE
        return think(backbone, state, K)[1]

    expected = second_turn(z_BKD[0])
    slot = backbone.embed(pair.column(1, backbone.markers.slot, K))[0]
    for wrong in (None, torch.zeros_like(z_BKD[0]), slot, z_BKD[0, :-1], z_BKD[0].flip(0)):
        assert difference(second_turn(wrong), expected) > DETECTED
