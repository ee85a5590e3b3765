"""``|A dL/dA|`` of an answer: against central differences of single attention entries, and against the whole graph of a
stock model with eager attention."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

import reference
from helpers import DEVICE, ask, difference, tolerance
from realvr.backbone import Backbone, Matrix, Prompt
from realvr.diagnostics.measuring import attributing
from realvr.diagnostics.measuring.attributing import attribute, attribute_whole
from realvr.latent import prefill, think

K = 3
STEP = 1e-4
ANSWERS = [([9, 50, 31, 77], [0, 2]), ([12, 8, 140, 66, 101, 23], [3, 4])]
"""Ids and content. The first answer begins with content: the query that predicts it is in the prompt or the span."""


@dataclass
class Eager:
    """Attention written out, in which every row of the batch can have one entry changed after the softmax."""

    entries: list[tuple[int, int, int, int]] = field(default_factory=list)
    """Layer, head, query, key of each row."""
    step: float = 0.0
    seen: dict[int, Tensor] = field(default_factory=dict)

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        group = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
        scale = options.get("scaling") or query.shape[-1] ** -0.5
        scores = torch.einsum("bhqd,bhkd->bhqk", query, key) * scale
        weights = torch.softmax(scores + attention_mask[..., : key.shape[2]], dim=-1)
        self.seen[module.layer_idx] = weights
        weights = weights.clone()
        for row, (layer, *place) in enumerate(self.entries):
            if layer == module.layer_idx:
                weights[(row, *place)] += self.step
        return torch.einsum("bhqk,bhkd->bqhd", weights, value), weights


@contextmanager
def written_out(stock: Any, eager: Eager) -> Iterator[None]:
    """The stock decoder with this attention, in full precision."""
    AttentionInterface.register("test_eager", eager)
    AttentionMaskInterface.register("test_eager", eager_mask)
    before = stock.config.get_text_config()._attn_implementation
    stock.set_attn_implementation({"text_config": "test_eager"})
    try:
        with reference.wide_softmax():
            yield
    finally:
        stock.set_attn_implementation({"text_config": before})


def prompts_of(backbone: Backbone) -> list[Prompt]:
    """Two prompts of different length and image size; Gemma's are longer than its window (24)."""
    long = "Which of the two shapes is larger, and which one is closer to the left border of the picture?"
    return [backbone.prompt(ask(0, text="What color is it?")), backbone.prompt(ask(1, text=long))]


def read(backbone: Backbone, prompts: list[Prompt], latents: int) -> tuple[Any, Tensor, Tensor]:
    """State after the span, latents, and the last token of each row."""
    with torch.no_grad():
        state, _ = prefill(backbone, backbone.batch(prompts))
        state, z_BKD = think(backbone, state, latents)
    last = [backbone.markers.end if latents else int(prompt.ids[-1]) for prompt in prompts]
    return state, z_BKD, torch.tensor(last, device=DEVICE)


def whole_sequence(pair: Any, prompt: Prompt, z_KD: Tensor, ids: list[int]) -> reference.Sequence:
    """One example for the stock model, up to the last answer token but one."""
    sequence = pair.begin([prompt])
    if len(z_KD):
        sequence = pair.splice(sequence, z_KD[None])
    return reference.append(pair.stock, sequence, torch.tensor([ids[:-1]], device=DEVICE))


def stock_loss(pair: Any, sequence: reference.Sequence, ids: list[int], content: list[int], **options: Any) -> Any:
    """(B,) summed cross-entropy of the content tokens, token by token from the stock logits; and the stock output."""
    output = reference.run(pair.stock, sequence, **options)
    logits = pair.stock.lm_head(output.last_hidden_state)
    before = logits.shape[1] - len(ids)
    losses = [-torch.log_softmax(logits[:, before + place], -1)[:, ids[place]] for place in content]
    return torch.stack(losses).sum(0), output


def repeated(sequence: reference.Sequence, times: int) -> reference.Sequence:
    """One example as a batch of equals."""
    grid = None if sequence.grid_thw is None else sequence.grid_thw.repeat(times, 1)
    columns = {name: getattr(sequence, name).repeat(times, 1) for name in ("ids", "mask", "image")}
    deepstack = tuple(one.repeat(times, 1) for one in sequence.deepstack)
    return replace(sequence, embeds=sequence.embeds.repeat(times, 1, 1), grid_thw=grid, deepstack=deepstack, **columns)


def whole_graph(pair: Any, prompt: Prompt, z_KD: Tensor, ids: list[int], content: list[int]) -> tuple[Tensor, Tensor]:
    """Attention and ``|A dL/dA|`` (L, H, T, T) of one example from one graph over everything; and the loss."""
    loss, output = stock_loss(pair, whole_sequence(pair, prompt, z_KD, ids), ids, content, output_attentions=True)
    gradients = torch.autograd.grad(loss.sum(), output.attentions)
    attention = torch.stack([a[0].detach() for a in output.attentions])
    return attention, (attention * torch.stack([g[0] for g in gradients])).abs()


# ---------------------------------------------------------------------- the definition, entry by entry


def test_scores_are_finite_differences_of_attention_entries(exact: Any) -> None:
    """S(n) of an image token, a latent and a token of the question from losses alone."""
    prompt = prompts_of(exact.ours)[0]
    ids, content = ANSWERS[0]
    state, z_BKD, last = read(exact.ours, [prompt], K)
    found = attribute(exact.ours, state, last, [(ids, content)])
    image = state.image_BT[0].nonzero()[:, 0].tolist()
    columns = [image[len(image) // 2], state.slots.start + 1, image[0] - 1]
    sequence = whole_sequence(exact, prompt, z_BKD[0], ids)
    rows = [sequence.ids.shape[1] - len(ids) + place for place in content]
    eager, expected = Eager(), []
    with written_out(exact.stock, eager), torch.no_grad():
        loss, _ = stock_loss(exact, sequence, ids, content)
        weights = {layer: one.clone() for layer, one in eager.seen.items()}
        heads = range(weights[0].shape[1])
        for column in columns:
            eager.entries = [(layer, head, row, column) for layer in weights for head in heads for row in rows]
            batch, changed = repeated(sequence, len(eager.entries)), []
            for eager.step in (STEP, -STEP):
                changed.append(stock_loss(exact, batch, ids, content)[0])
            slopes = ((changed[0] - changed[1]) / (2 * STEP)).tolist()
            at = [float(weights[layer][0, head, row, column]) for layer, head, row, column in eager.entries]
            expected.append(sum(abs(a * slope) for a, slope in zip(at, slopes, strict=True)) / len(slopes))
    assert min(expected) > 1e-6
    score = found.mean("saliency")[0]
    for column, value in zip(columns, expected, strict=True):
        assert float(score[column]) == pytest.approx(value, rel=1e-4, abs=1e-9)
    assert float(found.loss_B[0]) == pytest.approx(float(loss), rel=1e-7)


# ---------------------------------------------------------------------- the answer's rows alone, and everything


@pytest.mark.parametrize("latents", [K, 0])
def test_rows_of_the_answer_alone_have_the_gradient_of_the_whole_graph(pair: Any, latents: int) -> None:
    prompts = prompts_of(pair.ours)
    state, z_BKD, last = read(pair.ours, prompts, latents)
    found = attribute(pair.ours, state, last, ANSWERS)
    assert sorted(found.saliency) == list(range(pair.ours.layers))
    for row, (ids, content) in enumerate(ANSWERS):
        attention, attributed = whole_graph(pair, prompts[row], z_BKD[row], ids, content)
        length = attention.shape[-1]
        queries = [length - len(ids) + place for place in content]
        start = state.length - len(prompts[row]) - (latents + 2 if latents else 0)  # padding on the left
        for name, right in (("saliency", attributed), ("attention", attention)):
            for layer in range(pair.ours.layers):
                expected = right[layer][:, queries].mean((0, 1))
                mine = getattr(found, name)[layer][row]
                seen = min(len(mine) - start, length)
                assert difference(mine[start : start + seen], expected[:seen]) <= tolerance(1e-6), (name, layer)
                assert float(mine[:start].abs().sum()) == 0 and float(mine[start + length :].abs().sum()) == 0
                assert float(expected[seen:].abs().sum()) == 0
        assert float(attributed[:, :, queries].max()) > 1e-4


def test_token_pairs_are_those_of_the_whole_graph(pair: Any) -> None:
    prompts = prompts_of(pair.ours)
    _, z_BKD, _ = read(pair.ours, prompts, K)
    for row, (ids, content) in enumerate(ANSWERS):
        attention, attributed = whole_graph(pair, prompts[row], z_BKD[row], ids, content)
        found = attribute_whole(pair.ours, prompts[row], z_BKD[row], ids, content)
        used = len(found.saliency)
        assert used == attention.shape[-1] - (len(ids) - 1 - max(content))
        assert difference(found.saliency, attributed.mean((0, 1))[:used, :used]) <= tolerance(1e-6)
        assert difference(found.attention, attention.mean((0, 1))[:used, :used]) <= tolerance(1e-6)
        assert float(attributed[:, :, used:].abs().sum()) == 0, "rows behind the last content token have no part"


def test_an_answer_that_cannot_see_the_picture_has_no_saliency_there(exact: Any) -> None:
    """Values of the picture's columns set to zero: the answer's rows read nothing from them."""
    prompts = prompts_of(exact.ours)[:1]
    state, _, last = read(exact.ours, prompts, K)
    image = state.image_BT[0]
    kv = [tuple((k, v * ~image[None, None, :, None]) for k, v in pieces) for pieces in state.kv]
    found = attribute(exact.ours, replace(state, kv=kv), last, ANSWERS[:1])
    score = found.mean("saliency")[0]
    assert float(score[: state.length][image].abs().max()) == 0 and float(score.sum()) > 0
    assert float(found.mean("attention")[0][: state.length][image].sum()) > 0, "it still attends to them"


def test_one_layer_is_alive_at_a_time(build_tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest tensors of the pass are its attention matrices: no two layers' may be held at once."""
    made: list[weakref.ref[Any]] = []
    alive: list[int] = []
    original = attributing.watching

    def watching(take: Any) -> Matrix:
        def counted(layer: int, weights: Tensor, gradient: Tensor) -> None:
            alive.append(sum(one() is not None for one in made))
            take(layer, weights, gradient)

        inner = original(counted).watch
        assert inner is not None

        def watch(layer: int, weights: Tensor) -> Tensor:
            made.append(weakref.ref(weights.untyped_storage()))
            return inner(layer, weights)

        return Matrix(watch=watch)

    monkeypatch.setattr(attributing, "watching", watching)
    backbone = Backbone.load(build_tiny("gemma3"), device=DEVICE)
    prompts = prompts_of(backbone)
    state, z_BKD, last = read(backbone, prompts, K)
    attribute(backbone, state, last, ANSWERS)
    attribute_whole(backbone, prompts[0], z_BKD[0], *ANSWERS[0])
    assert len(alive) == 2 * backbone.layers and set(alive) == {1}
