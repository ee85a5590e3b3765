"""A second turn, usually with a new image, after a first answer with its own latent span.

Live (prefill, think, decode, then read only the tail of the longer conversation) must equal the longer conversation
encoded at once with the saved latents and reply ids, and both must equal the stock model over the whole sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import reference
from helpers import DEVICE, ask, difference, picture, tolerance
from realvr.backbone import Backbone, Prompt, Turn
from realvr.backbone.prompts import tail
from realvr.errors import UserError
from realvr.latent import GREEDY, State, extend, prefill, score, think
from realvr.latent.group_rollout import decode
from realvr.latent.sampling import Sampling

K = 3
CLOSE = tolerance(1e-5)
SHORT = Sampling(temperature=GREEDY.temperature, max_new=6, stop=None)


@pytest.fixture(autouse=True)
def _no_graph() -> Iterator[None]:
    with torch.no_grad():
        yield


def first_turns() -> list[list[Turn]]:
    return [ask(0), ask(1, text="Which of the two shapes is larger, and which one is closer to the border?")]


def second_turns(images: bool = True) -> list[list[Turn]]:
    """What the user says next; the second conversation shows two further images of other sizes."""
    if not images:
        return [[Turn("user", "Are you sure?")], [Turn("user", "And what is left of it, if there is anything?")]]
    return [ask(4, text="And in this one?"), ask(2, 3, text="Now?")]


def start(
    backbone: Backbone, turns: list[list[Turn]], latents: int
) -> tuple[State, Tensor, list[Prompt], list[list[int]]]:
    """Read, think and reply, in one batch; returns the live state with the replies read, and what it has read."""
    prompts = [backbone.prompt(conversation) for conversation in turns]
    state, _ = prefill(backbone, backbone.batch(prompts))
    state, z_BKD = think(backbone, state, latents)
    replies = [group[0].reply_ids for group in decode(backbone, state, 1, SHORT)]
    replies = [reply[: len(reply) - row] for row, reply in enumerate(replies)]  # unequal lengths
    longest = max(map(len, replies))
    assert min(map(len, replies)) > 0
    ids = torch.zeros(len(replies), longest, dtype=torch.long)
    for row, reply in enumerate(replies):
        ids[row, : len(reply)] = torch.tensor(reply)
    real = torch.arange(longest) < torch.tensor([len(reply) for reply in replies])[:, None]
    state, _ = extend(backbone, state, ids.to(DEVICE), real_BS=None if bool(real.all()) else real.to(DEVICE))
    return state, z_BKD, [_seen(backbone, p, z, r) for p, z, r in zip(prompts, z_BKD, replies, strict=True)], replies


def _seen(backbone: Backbone, prompt: Prompt, z_KD: Tensor, reply: list[int]) -> Prompt:
    """Everything a live state has read, as a prompt."""
    markers = backbone.markers
    span = [markers.start, *[markers.slot] * len(z_KD), markers.end] if len(z_KD) else []
    ids = torch.cat([prompt.ids, torch.tensor([*span, *reply])])
    return Prompt(ids, prompt.images, (*prompt.latents, z_KD) if len(z_KD) else prompt.latents)


def longer(backbone: Backbone, first: list[Turn], z_KD: Tensor, reply: list[int], second: list[Turn]) -> Prompt:
    """The conversation at once, from what was saved."""
    return backbone.prompt([*first, Turn("assistant", latents=z_KD if len(z_KD) else None, ids=reply), *second])


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("images", [True, False], ids=["new images", "text only"])
@pytest.mark.parametrize("latents", [K, 0])
def test_live_equals_at_once(pair: Any, rows: int, images: bool, latents: int) -> None:
    backbone = pair.ours
    firsts, seconds = first_turns()[:rows], second_turns(images)[:rows]
    state, z_BKD, seen, replies = start(backbone, firsts, latents)
    conversations = list(zip(firsts, z_BKD, replies, seconds, strict=True))
    prompts = [longer(backbone, *conversation) for conversation in conversations]
    tails = [
        tail(prompt, part, backbone.image_id, backbone.markers.slot) for prompt, part in zip(prompts, seen, strict=True)
    ]
    for prompt, part, rest in zip(prompts, seen, tails, strict=True):
        assert torch.equal(torch.cat([part.ids, rest.ids]), prompt.ids)
        assert len(rest.images) == len(prompt.images) - len(part.images) and rest.latents == ()
    batch = backbone.batch(tails, start_B=state.next_B)
    assert batch.padded == (rows > 1)
    live, hidden = prefill(backbone, batch, state=state)
    live_after, z_live = think(backbone, live, K)
    live_replies = decode(backbone, live_after, 1, SHORT)
    for row, prompt in enumerate(prompts):
        whole = backbone.batch([prompt])
        once, expected = prefill(backbone, whole)
        size = len(tails[row])
        assert torch.equal(batch.positions[..., row, -size:], whole.positions[..., 0, -size:])
        assert int(live.next_B[row]) == int(once.next_B[0])
        assert difference(hidden[row, -size:], expected[0, -size:]) <= CLOSE
        assert difference(live.last_BD[row], once.last_BD[0]) <= CLOSE
        after, z_once = think(backbone, once, K)
        assert difference(z_live[row], z_once[0]) <= CLOSE
        assert difference(live_after.last_BD[row], after.last_BD[0]) <= CLOSE
        # The stock model over the whole sequence, with the saved latents in their slots.
        sequence = pair.begin([prompt])
        assert torch.equal(whole.positions, reference.positions(pair.stock, sequence))
        assert difference(expected, reference.hidden(pair.stock, sequence)) <= CLOSE
        assert difference(z_once, pair.think(sequence, K)[1]) <= CLOSE
        assert live_replies[row][0].ids == decode(backbone, after, 1, SHORT)[0][0].ids


def test_encoded_at_once_in_a_padded_batch(pair: Any) -> None:
    """Conversations with spans of different lengths side by side: each latent goes to its own slot."""
    backbone = pair.ours
    prompts = []
    for row, (first, second) in enumerate(zip(first_turns(), second_turns(), strict=True)):
        _, z_BKD, _, replies = start(backbone, [first], K + row)
        prompts.append(longer(backbone, first, z_BKD[0], replies[0], second))
    batch = backbone.batch(prompts)
    assert batch.padded
    state, hidden = prefill(backbone, batch)
    _, z_BKD = think(backbone, state, K)
    for row, prompt in enumerate(prompts):
        alone, expected = prefill(backbone, backbone.batch([prompt]))
        assert difference(hidden[row, -len(prompt) :], expected[0]) <= CLOSE
        assert difference(z_BKD[row], think(backbone, alone, K)[1][0]) <= CLOSE


def test_three_turns_with_two_spans(pair: Any) -> None:
    backbone = pair.ours
    first = first_turns()[0]
    state, z_1, seen, replies = start(backbone, [first], K)
    turns = [*first, Turn("assistant", latents=z_1[0], ids=replies[0]), *second_turns()[0]]
    prompt = backbone.prompt(turns)
    rest = tail(prompt, seen[0], backbone.image_id, backbone.markers.slot)
    state, _ = prefill(backbone, backbone.batch([rest], start_B=state.next_B), state=state)
    state, z_2 = think(backbone, state, K + 1)
    reply = decode(backbone, state, 1, SHORT)[0][0].reply_ids
    state, _ = extend(backbone, state, torch.tensor([reply], device=DEVICE))
    turns = [*turns, Turn("assistant", latents=z_2[0], ids=reply), Turn("user", "Why?", [picture(5)])]
    whole = backbone.prompt(turns)
    rest = tail(whole, _seen(backbone, prompt, z_2[0], reply), backbone.image_id, backbone.markers.slot)
    live, _ = prefill(backbone, backbone.batch([rest], start_B=state.next_B), state=state)
    once, hidden = prefill(backbone, backbone.batch([whole]))
    assert difference(live.last_BD, once.last_BD) <= CLOSE
    assert torch.equal(live.next_B, once.next_B)
    assert difference(hidden, reference.hidden(pair.stock, pair.begin([whole]))) <= CLOSE


def test_a_wrong_number_of_latents_is_refused(pair: Any) -> None:
    backbone = pair.ours
    first, second = first_turns()[0], second_turns()[0]
    _, z_BKD, seen, replies = start(backbone, [first], K)
    prompt = longer(backbone, first, z_BKD[0], replies[0], second)
    for wrong in ((), (z_BKD[0, :-1],), (z_BKD[0], z_BKD[0])):
        with pytest.raises(ValueError, match=f"{K} latent slots"):
            backbone.batch([Prompt(prompt.ids, prompt.images, wrong)])
    slot = backbone.markers.slot
    others = Prompt(seen[0].ids, seen[0].images, (z_BKD[0] + 1,))
    with pytest.raises(UserError, match="latents are different"):
        tail(prompt, others, backbone.image_id, slot)
    span = len(backbone.prompt(first)) + 2
    with pytest.raises(UserError, match="inside a latent span"):
        tail(prompt, span, backbone.image_id, slot)
    other = Prompt(seen[0].ids, (backbone.processor(picture(6)),), seen[0].latents)
    with pytest.raises(UserError, match="images are different"):
        tail(prompt, other, backbone.image_id, slot)


def test_padding_between_turns_keeps_the_mask(pair: Any) -> None:
    """A trunk whose padding is not all in front has no split attention: answers are scored as without it. Before the
    reply, all padding is in front."""
    backbone = pair.ours
    state, *_ = start(backbone, first_turns(), K)
    prompt, _ = prefill(backbone, backbone.batch([backbone.prompt(turns) for turns in first_turns()]))
    before, _ = think(backbone, prompt, K)
    assert before.one_trunk and before.columns.real is not None and not state.one_trunk
    ids = torch.randint(5, 200, (2, 3, 4), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    for trunk in (before, state):
        plain, split = (score(backbone, trunk, ids, split=on)[0] for on in (False, True))
        assert torch.equal(plain, split) or (trunk is before and difference(split, plain) <= CLOSE)
