"""The decoding state: forks, repetition, selection, unequal lengths and packing give what separate prompts give."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import reference
from helpers import DEVICE, ask, difference, tolerance
from realvr.backbone import Prompt
from realvr.errors import UserError
from realvr.latent import State, decoder_pass, extend, prefill, score, splice, think

K = 3
CLOSE = tolerance(1e-5)


@pytest.fixture(autouse=True)
def _no_graph(request: pytest.FixtureRequest) -> Iterator[None]:
    with torch.set_grad_enabled("graph" in request.function.__name__):
        yield


def prompts_of(pair: Any) -> list[Prompt]:
    return [pair.ours.prompt(ask(0)), pair.ours.prompt(ask(1, text="Which of the two shapes is larger, and why?"))]


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(5, 200, shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def read(pair: Any, prompts: list[Prompt]) -> State:
    """Prompts and one latent span each."""
    return think(pair.ours, prefill(pair.ours, pair.ours.batch(prompts))[0], K)[0]


def tensors(state: State) -> list[Tensor]:
    facts = [fact for fact in state.columns.facts() if fact is not None]
    kept = [tensor for layer in state.kv for piece in layer for tensor in piece]
    return [*kept, *facts, state.next_B, state.last_BD, state.image_BT]


def same(a: State, b: State) -> bool:
    return a.span == b.span and all(torch.equal(x, y) for x, y in zip(tensors(a), tensors(b), strict=True))


def test_a_fork_does_not_disturb_its_trunk(pair: Any) -> None:
    trunk = read(pair, prompts_of(pair))
    before = [tensor.clone() for tensor in tensors(trunk)]
    alone = extend(pair.ours, trunk, tokens(2, 3))[1]
    fork = trunk.fork()
    fork, _ = extend(pair.ours, fork, tokens(2, 5, seed=2))
    fork, _ = think(pair.ours, fork, K)
    score(pair.ours, fork, tokens(2, 3, 2))
    assert all(torch.equal(a, b) for a, b in zip(before, tensors(trunk), strict=True))
    assert torch.equal(extend(pair.ours, trunk, tokens(2, 3))[1], alone)
    assert fork.length == trunk.length + 5 + K + 2


def test_repeat_equals_separate_prompts(pair: Any) -> None:
    group = 3
    state = read(pair, prompts_of(pair)).repeat(group)
    assert state.rows == 2 * group
    ids = tokens(2 * group, 4)
    longer, hidden = extend(pair.ours, state, ids)
    longer, z_BKD = think(pair.ours, longer, K)
    for row in range(2 * group):
        prompt = prompts_of(pair)[row // group]
        alone = read(pair, [prompt])
        assert difference(state.last_BD[row], alone.last_BD[0]) <= CLOSE
        alone, expected = extend(pair.ours, alone, ids[row, None])
        assert difference(hidden[row], expected[0]) <= CLOSE
        alone, z_1KD = think(pair.ours, alone, K)
        assert difference(z_BKD[row], z_1KD[0]) <= CLOSE
        assert int(longer.next_B[row]) == int(alone.next_B[0])
        # and the stock model, which reads everything at once
        sequence, _ = pair.think(pair.begin([prompt]), K)
        sequence, z_stock = pair.think(reference.append(pair.stock, sequence, ids[row, None]), K)
        assert difference(z_BKD[row], z_stock[0]) <= CLOSE


def test_select(pair: Any) -> None:
    state = read(pair, prompts_of(pair))
    index = torch.tensor([1, 0, 1], device=DEVICE)
    ids = tokens(3, 4)
    chosen = state.select(index)
    assert torch.equal(chosen.last_BD, state.last_BD[index]) and torch.equal(chosen.image_BT, state.image_BT[index])
    _, hidden = extend(pair.ours, chosen, ids)
    for row, source in enumerate(index.tolist()):
        _, expected = extend(pair.ours, read(pair, [prompts_of(pair)[source]]), ids[row, None])
        assert difference(hidden[row], expected[0]) <= CLOSE


def test_detach_leaves_the_graph(pair: Any) -> None:
    state = read(pair, prompts_of(pair))
    assert state.last_BD.requires_grad and state.kv[0][0][0].requires_grad
    outside = state.detach()
    assert same(state, outside)
    assert not any(tensor.requires_grad for tensor in tensors(outside))
    _, hidden = extend(pair.ours, outside, tokens(2, 2))
    assert hidden.requires_grad, "the pass itself still has a graph"


def test_tokens_equal_their_embeddings(pair: Any) -> None:
    state = read(pair, prompts_of(pair))
    ids = tokens(2, 4)
    by_ids, hidden = extend(pair.ours, state, ids)
    by_embeds, expected = extend(pair.ours, state, embeds_BSD=pair.ours.embed(ids))
    assert torch.equal(hidden, expected) and same(by_ids, by_embeds)
    with pytest.raises(ValueError, match="either"):
        extend(pair.ours, state)
    with pytest.raises(ValueError, match="either"):
        extend(pair.ours, state, ids, embeds_BSD=pair.ours.embed(ids))


def _step_by_step(pair: Any) -> None:
    state = read(pair, prompts_of(pair))
    ids = tokens(2, 30)  # with the span, longer than Gemma's window
    at_once, hidden = extend(pair.ours, state, ids)
    steps = []
    for column in range(ids.shape[1]):
        state, one = extend(pair.ours, state, ids[:, column, None])
        steps.append(one)
    assert difference(torch.cat(steps, 1).detach(), hidden.detach()) <= CLOSE
    assert torch.equal(state.next_B, at_once.next_B) and state.length == at_once.length
    sequence, _ = pair.think(pair.begin(prompts_of(pair)), K)
    stock = reference.hidden(pair.stock, reference.append(pair.stock, sequence, ids))[:, -ids.shape[1] :]
    assert difference(hidden.detach(), stock.detach()) <= CLOSE


def test_one_pass_equals_token_by_token(pair: Any) -> None:
    _step_by_step(pair)


def test_one_pass_equals_token_by_token_in_the_graph(pair: Any) -> None:
    """With gradients the keys and values stay in pieces; without, they are joined."""
    _step_by_step(pair)


def test_right_padded_rows_equal_each_alone(pair: Any) -> None:
    """Also what comes after the padding: more tokens, then a span; one row gets nothing at all."""
    prompts = [*prompts_of(pair), pair.ours.prompt(ask(2))]
    state = read(pair, prompts)
    lengths = [28, 3, 0]
    ids = tokens(3, 28)
    real = torch.arange(28, device=DEVICE) < torch.tensor(lengths, device=DEVICE)[:, None]
    longer, hidden = extend(pair.ours, state, ids, real_BS=real)
    assert torch.equal(longer.last_BD[2], state.last_BD[2]) and int(longer.next_B[2]) == int(state.next_B[2])
    further, more = extend(pair.ours, longer, tokens(3, 2, seed=5))
    _, z_BKD = think(pair.ours, further, K)
    for row, (prompt, count) in enumerate(zip(prompts, lengths, strict=True)):
        alone = read(pair, [prompt])
        if count:
            alone, expected = extend(pair.ours, alone, ids[row, None, :count])
            assert difference(hidden[row, :count], expected[0]) <= CLOSE
        assert difference(longer.last_BD[row], alone.last_BD[0]) <= CLOSE
        assert int(longer.next_B[row]) == int(alone.next_B[0])
        alone, expected = extend(pair.ours, alone, tokens(3, 2, seed=5)[row, None])
        assert difference(more[row], expected[0]) <= CLOSE
        assert difference(z_BKD[row], think(pair.ours, alone, K)[1][0]) <= CLOSE


def test_no_latents_leave_the_state_as_it_is(pair: Any) -> None:
    state, _ = prefill(pair.ours, pair.ours.batch(prompts_of(pair)))
    after, z_BKD = think(pair.ours, state, 0)
    assert after is state and z_BKD.shape == (2, 0, pair.ours.width)
    after, z_BKD = splice(pair.ours, state, z_BKD)
    assert after is state
    with pytest.raises(ValueError, match="no latent span"):
        _ = state.slots
    with pytest.raises(UserError, match="-2"):
        think(pair.ours, state, -2)


def test_recorded_latents_are_replayed(pair: Any) -> None:
    """splice() of recorded latents: the state before each slot is its latent, and what follows is the live state."""
    prompt, _ = prefill(pair.ours, pair.ours.batch(prompts_of(pair)))
    live, z_BKD = think(pair.ours, prompt, K)
    replayed, before_BKD = splice(pair.ours, prompt, z_BKD)
    assert difference(before_BKD, z_BKD) <= CLOSE
    assert difference(replayed.last_BD, live.last_BD) <= CLOSE
    assert replayed.span == live.span and torch.equal(replayed.next_B, live.next_B)
    assert difference(extend(pair.ours, replayed, tokens(2, 4))[1], extend(pair.ours, live, tokens(2, 4))[1]) <= CLOSE
    assert difference(z_BKD, pair.think(pair.begin(prompts_of(pair)), K)[1]) <= CLOSE


def test_packed_examples_equal_separate_rows(pair: Any) -> None:
    """Three conversations with images in one row: positions restart, attention and windows stay inside each."""
    backbone = pair.ours
    prompts = [*prompts_of(pair), backbone.prompt(ask(2, 3, text="What has changed?"))]
    batches = [backbone.batch([prompt]) for prompt in prompts]
    visual = backbone.encode_images([image for prompt in prompts for image in prompt.images])
    parts = [backbone.embed_batch(batch, backbone.encode_images(batch.images)) for batch in batches]
    segment = torch.cat([torch.full((1, len(p)), i, device=DEVICE) for i, p in enumerate(prompts)], 1)
    state, hidden = decoder_pass(
        backbone,
        None,
        torch.cat(parts, 1),
        torch.cat([batch.positions for batch in batches], -1),
        segment_BT=segment,
        image_BT=torch.cat([batch.image_BT for batch in batches], 1),
        deepstack=visual.deepstack,
    )
    assert state.length == sum(map(len, prompts))
    for prompt, packed in zip(prompts, hidden.split([len(p) for p in prompts], 1), strict=True):
        assert difference(packed, prefill(backbone, backbone.batch([prompt]))[1]) <= CLOSE
        assert difference(packed, reference.hidden(pair.stock, pair.begin([prompt]))) <= CLOSE


def test_a_state_with_branches_is_not_continued_by_mistake(pair: Any) -> None:
    """New columns would neither see the branches nor stand where they think they stand."""
    trunk = read(pair, prompts_of(pair))
    _, _, branched = score(pair.ours, trunk, tokens(2, 3, 2))
    for go_on in (
        lambda: extend(pair.ours, branched, tokens(2, 3)),
        lambda: think(pair.ours, branched, K),
        lambda: score(pair.ours, branched, tokens(2, 1, 2)),
        lambda: score(pair.ours, branched, tokens(2, 3, 2)),
    ):
        with pytest.raises(ValueError, match="branches"):
            go_on()
    _, _, single = score(pair.ours, trunk, tokens(2, 1, 4))
    _, at_once = extend(pair.ours, trunk, torch.cat([tokens(2, 4), tokens(2, 3)], dim=1))
    assert difference(extend(pair.ours, single, tokens(2, 3))[1], at_once[:, 4:]) <= CLOSE


def test_a_later_turn_must_start_where_the_state_ends(pair: Any) -> None:
    prompts = prompts_of(pair)
    state = read(pair, prompts)
    with pytest.raises(ValueError, match="start_B=state.next_B"):
        prefill(pair.ours, pair.ours.batch(prompts), state=state)
    with pytest.raises(ValueError, match="none was given"):
        prefill(pair.ours, pair.ours.batch(prompts, start_B=state.next_B))
