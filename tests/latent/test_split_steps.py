"""Latent steps with gradient that attend to the prompt as it lies: the numbers of the plain ones, in float64, and what
autograd keeps of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import op_tape
import reference
from helpers import ask
from live_memory import LiveMemory
from pair import gradients, relative
from realvr.backbone import Backbone, split_attention
from realvr.backbone.attention import Pass
from realvr.latent import extend, prefill, splice
from realvr.latent.recorded_span import RecordedSpan
from realvr.latent.recurrence import regenerate
from realvr.latent.state import State
from span_cases import batch_of, exact_backbone, noise, recorder, value

CLOSE = 1e-10
FAMILIES = ("qwen2.5-vl", "qwen3-vl", "internvl3", "gemma3")
MEMORY = ("cached", "checkpointed-prefill", "checkpointed")
Loaded = Callable[[str], Backbone]


@pytest.fixture(autouse=True)
def _wide_softmax() -> Iterator[None]:
    with reference.wide_softmax():
        yield


@pytest.fixture
def load(build_tiny: Callable[[str], Path], tmp_path: Path) -> Loaded:
    """A backbone of a family, for one test alone."""
    return lambda family: exact_backbone(build_tiny(family), tmp_path / family)


@pytest.fixture
def joins(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Columns of new queries of every pass of a layer that joined keys and values."""
    found, remember = [], Pass.remember

    def seen(self: Pass, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if self.past:
            found.append(key.shape[2])
        return remember(self, layer, key, value)

    monkeypatch.setattr(Pass, "remember", seen)
    return found


def same(backbone: Backbone, latents: int, recorded: RecordedSpan | None, joins: list[int], **options: Any) -> None:
    """The scalar of `value` and its gradients, with split steps and with plain ones."""
    for first in (0, 12):
        batch = batch_of(backbone, first)
        plain = value(backbone, batch, latents, None, **options)
        right = gradients(backbone.model, plain)
        joins.clear()
        ours = value(backbone, batch, latents, recorded, split=True, **options)
        assert set(joins) <= {4}  # the answer's, behind the span
        assert float((ours - plain).detach().abs() / plain.detach().abs()) <= CLOSE
        assert relative(gradients(backbone.model, ours), right) <= CLOSE
        assert set(joins) <= {4}  # nor when layers are recomputed


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_numbers_of_plain_steps(load: Loaded, family: str, memory: str, joins: list[int]) -> None:
    """Padded rows, one latent and four, the answer behind them included; Gemma's windows hide a part of the prompt."""
    backbone = load(family)
    for latents in (1, 4):
        same(backbone, latents, None, joins, memory=memory)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_numbers_of_recorded_steps(load: Loaded, family: str, whole: bool, joins: list[int]) -> None:
    """Recorded with one batch and repeated with others, whose padding is elsewhere; split and plain side by side."""
    backbone = load(family)
    recorded = recorder(backbone)
    same(backbone, 3, recorded, joins, whole=whole)
    assert recorded.counts == {"recorded": 1, "replayed": 2}
    texts = ("Why is it so?", "Where is the circle now?")
    prompts = [backbone.prompt(ask(i, text=text)) for i, text in enumerate(texts)]
    for order in (1, -1):
        batch = backbone.batch(prompts[::order])
        right = gradients(backbone.model, value(backbone, batch, 3, None, whole=whole))
        found = gradients(backbone.model, value(backbone, batch, 3, recorded, split=True, whole=whole))
        assert relative(found, right) <= CLOSE
    assert recorded.counts["recorded"] <= 2 and recorded.counts["replayed"] == 4
    value(backbone, batch_of(backbone), 3, recorded, whole=whole)
    assert {each.split for each in recorded._recordings.values()} == {True, False}


@pytest.mark.parametrize("family", ["qwen2.5-vl", "gemma3"])
def test_a_frozen_model_whose_trunk_alone_has_a_gradient(load: Loaded, family: str) -> None:
    """As where only what is in front of the decoder is trained: of all keys and values, or of the values of every
    second layer."""
    backbone = load(family)
    backbone.model.requires_grad_(False)
    prompt, _ = prefill(backbone, batch_of(backbone))
    for some in (False, True):
        found = []
        for recorded in (None, recorder(backbone)):
            kv = [[(k.detach().clone(), v.detach().clone()) for k, v in pieces] for pieces in prompt.kv]
            leaves = [
                x.requires_grad_()
                for layer, ((k, v),) in enumerate(kv)
                for x in ((v,) * (layer % 2) if some else (k, v))
            ]
            state = replace(prompt, kv=[tuple(pieces) for pieces in kv])
            _, z_BKD = regenerate(backbone, state, 3, recorded=recorded, split=recorded is not None, whole=False)
            found.append(torch.autograd.grad((z_BKD * noise(*z_BKD.shape)).sum(), leaves))
        right, mine = ({str(place): grad for place, grad in enumerate(grads)} for grads in found)
        assert relative(mine, right) <= CLOSE


def test_layers_whose_later_steps_see_their_window_join(load: Loaded) -> None:
    """A window as long as the span: the first steps of a layer see all columns and are split, the last ones are not.
    The gradients of both are added up."""
    backbone = load("gemma3")
    batch = batch_of(backbone)
    columns = -(-batch.ids_BT.shape[1] // 16) * 16
    window = columns + 1
    backbone.text_config.sliding_window = window
    for layer in backbone.decoder.layers:
        if layer.self_attn.sliding_window is not None:
            layer.self_attn.sliding_window = window
    recorded, latents = recorder(backbone), window - 2
    right = gradients(backbone.model, value(backbone, batch, latents, None, whole=False))
    found = gradients(backbone.model, value(backbone, batch, latents, recorded, split=True, whole=False))
    (each,) = recorded._recordings.values()
    both = [x is not None and y is not None for x, y in zip(each.grads_out[1::2], each.queries, strict=False)]
    assert any(both) and not all(both)
    assert relative(found, right) <= CLOSE


def test_a_trunk_in_pieces(load: Loaded, joins: list[int]) -> None:
    """A second span behind the first, with and without a recording."""
    backbone, found = load("qwen2.5-vl"), []
    batch = backbone.batch([backbone.prompt(ask(0))])
    for split, recorded in ((False, None), (True, None), (True, recorder(backbone))):
        prompt, _ = prefill(backbone, batch)
        state, _ = splice(backbone, prompt, noise(1, 2, backbone.width, seed=5))
        joins.clear()
        after, z_BKD = regenerate(backbone, state, 3, split=split, recorded=recorded)
        assert bool(joins) != split
        assert after.length == state.length + 5 == sum(piece[0].shape[2] for piece in after.kv[0])
        found.append((z_BKD, gradients(backbone.model, (z_BKD * noise(*z_BKD.shape)).sum())))
    for z_BKD, grads in found[1:]:
        assert float((z_BKD - found[0][0]).detach().abs().max()) <= CLOSE
        assert relative(grads, found[0][1]) <= CLOSE


def test_padding_between_real_columns_is_joined(load: Loaded, joins: list[int]) -> None:
    """As after replies of unequal length: the columns that a step sees are then no single run."""
    backbone = load("qwen2.5-vl")
    prompt, _ = prefill(backbone, batch_of(backbone))
    ids, real = torch.full((2, 3), 7), torch.tensor([[True, True, True], [True, False, False]])
    state, _ = extend(backbone, prompt, ids, real_BS=real)
    assert prompt.trunk(5) is not None and state.trunk(5) is None
    joins.clear()
    recorded = recorder(backbone)
    found = [regenerate(backbone, state, 3, split=split)[1] for split in (False, True)]
    assert joins and torch.equal(*found)
    z_BKD = regenerate(backbone, state, 3, split=True, recorded=recorded)[1]
    assert float((z_BKD - found[0]).detach().abs().max()) <= CLOSE
    assert not next(iter(recorded._recordings.values())).split


def test_without_a_graph_nothing_changes(load: Loaded, joins: list[int]) -> None:
    backbone = load("qwen2.5-vl")
    with torch.no_grad():
        prompt, _ = prefill(backbone, batch_of(backbone))
        joins.clear()
        after, _ = regenerate(backbone, prompt, 2, split=True)
    assert joins and all(len(pieces) == 1 for pieces in after.kv)


# ---------------------------------------------------------------------- what is kept


def trunk_bytes(state: State) -> int:
    return sum(x.numel() * x.element_size() for pieces in state.kv for pair in pieces for x in pair)


def kept(backbone: Backbone, prompt: State, latents: int, **options: Any) -> tuple[int, int]:
    """Bytes alive after K latent steps beside the prompt, and those of storages that autograd has saved and that hold
    at least as much as a layer's keys of the prompt."""
    large = min(pieces[0][0].untyped_storage().nbytes() for pieces in prompt.kv)
    weights = {p.untyped_storage().data_ptr() for p in backbone.model.parameters()}
    storages: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.nbytes() >= large and storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
        return x

    with LiveMemory(backbone.model) as memory, torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        found = regenerate(backbone, prompt, latents, **options)
        alive = memory.now
    del found
    return alive, sum(storages.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_no_step_keeps_a_copy_of_the_prompt(load: Loaded, family: str) -> None:
    backbone, latents = load(family), 6
    prompt, _ = prefill(backbone, batch_of(backbone))
    trunk = trunk_bytes(prompt)
    (plain, copies), (alive, saved) = (kept(backbone, prompt, latents, split=split) for split in (False, True))
    assert copies > latents * trunk
    # Those of the prompt itself, which may be views of wider tensors that the layers made.
    mine = {x.untyped_storage().data_ptr(): x.untyped_storage() for parts in prompt.kv for pair in parts for x in pair}
    assert saved <= sum(storage.nbytes() for storage in mine.values())
    assert plain - alive > latents * trunk


def test_a_recording_keeps_the_trunk_once(load: Loaded) -> None:
    """In its static tensors; beside them are the keys and values of the span, as `recording_bytes` counts them."""
    backbone = load("qwen2.5-vl")
    recorded = RecordedSpan(backbone, columns=16, record=op_tape.record)
    value(backbone, batch_of(backbone), 3, recorded, split=True)
    (each,) = recorded._recordings.values()
    shared = {x.untyped_storage().data_ptr() for x in each.kv}
    own: dict[int, int] = {}
    trunks = 0

    def pack(x: Tensor) -> Tensor:
        nonlocal trunks
        if x.ndim == 4 and x.shape[1] == each.kv[0].shape[1]:  # keys and values
            if x.shape[2] >= each.kv[0].shape[2]:
                trunks += x.untyped_storage().data_ptr() not in shared
            else:
                own[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        after = each._span()
    del after
    assert trunks == 0 and each.bytes.static == sum(x.numel() * x.element_size() for x in each.kv)
    assert each.bytes.working < 2 * each.bytes.static + sum(own.values())
    plain = recorder(backbone)
    value(backbone, batch_of(backbone), 3, plain)
    assert recorded.held_bytes < plain.held_bytes / 1.5  # gradients of parameters are most of what is left
    (other,) = plain._recordings.values()
    assert each.bytes.working < other.bytes.working / 3


def test_a_copy_is_seen(load: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison of bytes notices steps that save a trunk of their own."""
    backbone, latents = load("qwen2.5-vl"), 6
    prompt, _ = prefill(backbone, batch_of(backbone))
    apply = split_attention._SplitAttention.apply
    monkeypatch.setattr(
        split_attention._SplitAttention,
        "apply",
        lambda query, key, value, *rest: apply(query, key.clone(), value.clone(), *rest),
    )
    assert kept(backbone, prompt, latents, split=True)[1] > latents * trunk_bytes(prompt)
