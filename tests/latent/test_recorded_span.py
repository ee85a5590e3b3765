"""The recorded span with gradient against the plain one, in float64: latents, losses and every gradient.

Both graphs are tried with a stand-in for CUDA graphs (`op_tape`), which repeats operations on the same tensors.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import op_tape
import reference
from helpers import DEVICE, ask
from live_memory import LiveMemory
from pair import gradients, relative
from realvr.backbone import Backbone, Batch, Turn
from realvr.latent import prefill, room, splice, trial
from realvr.latent.recorded_span import RecordedSpan
from realvr.latent.recurrence import regenerate
from realvr.training import gradients as deferring
from realvr.training.adapters import Adapters
from realvr.training.sections import LoraSettings
from span_cases import batch_of, exact_backbone, noise, recorder, value

CLOSE = 1e-10
Loaded = Callable[[str], Backbone]


@pytest.fixture(autouse=True)
def _wide_softmax() -> Iterator[None]:
    with reference.wide_softmax():
        yield


@pytest.fixture
def load(build_tiny: Callable[[str], Path], tmp_path: Path) -> Loaded:
    """A backbone of a family, for one test alone."""
    return lambda family: exact_backbone(build_tiny(family), tmp_path / family)


def check(backbone: Backbone, batch: Batch, latents: int, recorded: RecordedSpan, **options: Any) -> None:
    plain = value(backbone, batch, latents, None, **options)
    right = gradients(backbone.model, plain)
    ours = value(backbone, batch, latents, recorded, **options)
    assert float((ours - plain).detach().abs() / plain.detach().abs()) <= CLOSE
    assert relative(gradients(backbone.model, ours), right) <= CLOSE
    used = [name for name, gradient in right.items() if float(gradient.norm()) > 0]
    assert any("layers.0." in name for name in used)


def defer(backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> deferring.Deferral:
    monkeypatch.setattr(deferring, "LEAST", 0)
    monkeypatch.setattr(deferring, "FEW_ROWS", 8)
    deferral = deferring.defer_gradients(backbone.model)
    assert deferral is not None
    return deferral


def adapt(backbone: Backbone) -> None:
    Adapters(backbone, LoraSettings(rank=4, alpha=8))
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for name, parameter in backbone.model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)


def prepare(backbone: Backbone, trained: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For ``autograd`` there is nothing to do."""
    if trained == "deferred":
        defer(backbone, monkeypatch)
    elif trained == "lora":
        adapt(backbone)


# ---------------------------------------------------------------------- the same numbers


@pytest.mark.parametrize("family", ["qwen2.5-vl", "gemma3", "qwen3-vl-moe"])
@pytest.mark.parametrize("trained", ["autograd", "deferred", "lora"])
def test_latents_losses_and_gradients(load: Loaded, family: str, trained: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded rows; one latent and four; other inputs of the same shape; weights updated in place."""
    backbone = load(family)
    prepare(backbone, trained, monkeypatch)
    recorded = recorder(backbone)
    for latents in (1, 4):
        check(backbone, batch_of(backbone), latents, recorded)
        check(backbone, batch_of(backbone, 12), latents, recorded)
    assert recorded.counts == {"recorded": 2, "replayed": 4}
    with torch.no_grad():
        for parameter in backbone.decoder.parameters():
            if parameter.requires_grad:
                parameter.mul_(1.05)
    check(backbone, batch_of(backbone), 4, recorded)
    check(backbone, batch_of(backbone), 4, recorded, memory="checkpointed-prefill")
    assert recorded.counts == {"recorded": 2, "replayed": 6}
    check(backbone, batch_of(backbone), 4, recorded, whole=False)
    check(backbone, batch_of(backbone, 12), 4, recorded, whole=False)
    assert recorded.counts == {"recorded": 3, "replayed": 8}
    for each in recorded._recordings.values():  # the graphs that were recorded are gone
        assert bool(each.pairs) == (trained == "deferred")
        kept = [*each.values, *(x for pair in each.pairs for x in pair), *filter(torch.is_tensor, each.grads_out)]
        assert not any(x.requires_grad for x in kept)


@pytest.mark.parametrize("straight", [False, True], ids=["returned", "into .grad"])
def test_backward_adds_to_what_is_there(load: Loaded, straight: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two microbatches through ``loss.backward()``."""
    backbone, found = load("qwen2.5-vl"), []
    parameters = [p for p in backbone.model.parameters() if p.requires_grad]
    deferral = None
    for recorded in (None, recorder(backbone)):
        for batch in (batch_of(backbone), batch_of(backbone, 12)):
            with deferral.into_grad() if deferral is not None and straight else nullcontext():
                value(backbone, batch, 3, recorded).backward()
        found.append({str(i): p.grad for i, p in enumerate(parameters) if p.grad is not None})
        backbone.model.zero_grad(set_to_none=True)
        deferral = deferral or defer(backbone, monkeypatch)
    assert relative(found[1], found[0]) <= CLOSE


def test_a_trunk_in_pieces_without_padding(load: Loaded) -> None:
    """A second span behind the first, whose keys and values come in pieces."""
    backbone = load("gemma3")
    recorded, found = recorder(backbone), []
    batch = backbone.batch([backbone.prompt(ask(0))])
    z_BKD = noise(1, 2, backbone.width, seed=5)
    for each in (None, recorded):
        prompt, _ = prefill(backbone, batch)
        state, _ = splice(backbone, prompt, z_BKD)
        assert len(state.kv[0]) == 2
        after, again = regenerate(backbone, state, 3, recorded=each)
        assert after.left_padded == state.left_padded
        found.append((again, gradients(backbone.model, (again * noise(*again.shape)).sum())))
    assert float((found[0][0] - found[1][0]).detach().abs().max()) <= CLOSE
    assert relative(found[1][1], found[0][1]) <= CLOSE
    assert recorded.counts == {"recorded": 1, "replayed": 1}


def test_fused_layers(load: Loaded) -> None:
    backbone = load("qwen2.5-vl")
    backbone.fused_layers = True
    recorded = recorder(backbone)
    check(backbone, batch_of(backbone), 3, recorded)
    assert recorded.counts["replayed"] == 1


# ---------------------------------------------------------------------- one at a time


def test_a_second_span_before_the_backward_pass_goes_the_plain_way(load: Loaded) -> None:
    backbone = load("qwen2.5-vl")
    recorded, right = recorder(backbone), []
    for first in (0, 12):
        right.append(gradients(backbone.model, value(backbone, batch_of(backbone, first), 3, None)))
    one = value(backbone, batch_of(backbone), 3, recorded)
    with pytest.warns(UserWarning, match="another span waits"):
        other = value(backbone, batch_of(backbone, 12), 3, recorded)
    assert recorded.counts == {"recorded": 1, "replayed": 1, "plain": 1}
    assert relative(gradients(backbone.model, other), right[1]) <= CLOSE
    parameters = [p for p in backbone.model.parameters() if p.requires_grad]
    torch.autograd.grad(one, parameters, allow_unused=True, retain_graph=True)
    assert relative(gradients(backbone.model, one), right[0]) <= CLOSE  # again, with nothing in between
    late = value(backbone, batch_of(backbone), 3, recorded)
    torch.autograd.grad(late, parameters, allow_unused=True, retain_graph=True)
    value(backbone, batch_of(backbone), 3, recorded)
    with pytest.raises(RuntimeError, match="followed by another"):
        torch.autograd.grad(late, parameters, allow_unused=True)


def test_a_span_that_is_dropped_makes_room(load: Loaded) -> None:
    """Without a backward pass, and without the help of Python's collector."""
    backbone = load("qwen2.5-vl")
    recorded = recorder(backbone)
    scalar = value(backbone, batch_of(backbone), 2, recorded)
    watched = recorded._owner
    assert watched is not None and watched() is not None
    del scalar
    assert watched() is None
    check(backbone, batch_of(backbone), 2, recorded)
    assert recorded.counts == {"recorded": 1, "replayed": 2}


@pytest.mark.parametrize("trained", ["autograd", "deferred", "lora"])
@pytest.mark.parametrize("split", [False, True])
def test_what_is_released_is_freed(load: Loaded, trained: str, split: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of a recording is left, in a circle through the graph or elsewhere."""
    backbone = load("qwen2.5-vl")
    prepare(backbone, trained, monkeypatch)
    batch = batch_of(backbone)
    visual = backbone.encode_images(batch.images)

    def step(recorded: RecordedSpan | None) -> None:
        prompt, _ = prefill(backbone, batch, visual)
        regenerate(backbone, prompt, 3, memory="cached", recorded=recorded, split=split)[1].sum().backward()
        backbone.model.zero_grad()

    step(None)
    with LiveMemory(backbone.model) as memory:
        recorded = recorder(backbone)
        step(recorded)
        assert recorded.counts["replayed"] == 1
        for each in recorded._recordings.values():  # no queries with the graph of the recording
            assert all(each._later.of(key) is None for key in each.kv)
            kept = [x for queries in each.queries if queries is not None for x in queries.tensors]
            assert bool(kept) == split and not any(x.requires_grad for x in kept)
        del each, kept
        held = memory.now
        gc.disable()  # memory that waits for the collector is not there when it is needed
        try:
            recorded.release()
            left = memory.now
        finally:
            gc.enable()
    assert left < 0.02 * held


@pytest.mark.parametrize("trained", ["autograd", "deferred", "lora"])
@pytest.mark.parametrize("split", [False, True])
def test_nothing_of_a_warm_up_is_left_when_it_is_recorded(
    load: Loaded, trained: str, split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a recording would need its memory twice. Of what is compared, a few numbers wait for the replay."""
    monkeypatch.setattr(trial, "PART", 1)
    backbone = load("qwen2.5-vl")
    prepare(backbone, trained, monkeypatch)
    batch = batch_of(backbone)
    prompt, _ = prefill(backbone, batch)
    regenerate(backbone, prompt, 3, split=split)[1].sum().backward(retain_graph=True)  # whatever is made once
    backbone.model.zero_grad()
    left: list[tuple[int, int]] = []

    def record(step: Any, reset: Any) -> Any:
        before = memory.now
        step()
        made = memory.now - before
        reset()
        left.append((memory.now - before, made))
        tape = op_tape.Tape()
        with tape:
            step()
        return tape.replay

    with LiveMemory(backbone.model) as memory:
        recorded = RecordedSpan(backbone, columns=16, record=record)
        regenerate(backbone, prompt, 3, memory="cached", recorded=recorded, split=split)
    assert len(left) == 2  # forward and backward
    assert all(now < 0.02 * made for now, made in left), left


def test_what_is_behind_a_shorter_prompt_does_not_matter(load: Loaded) -> None:
    """Static keys and values are as long as the longest prompt of their shape."""
    backbone = load("qwen2.5-vl")
    recorded = recorder(backbone)
    batch = batch_of(backbone)
    check(backbone, batch, 2, recorded)
    (each,) = recorded._recordings.values()
    length = batch.ids_BT.shape[1]
    assert length < each.visible_BT.shape[1]
    with torch.no_grad():
        for x in each.kv:
            x[:, :, length:] = float("inf")
    check(backbone, batch, 2, recorded)
    assert recorded.counts == {"recorded": 1, "replayed": 2}


# ---------------------------------------------------------------------- where it does not apply


def test_what_was_recorded_with_other_modules_is_dropped(load: Loaded) -> None:
    backbone = load("qwen2.5-vl")
    recorded = recorder(backbone, shapes=1)
    check(backbone, batch_of(backbone), 2, recorded)
    norm = backbone.decoder.norm
    norm.weight.data = norm.weight.data * 1.5
    check(backbone, batch_of(backbone), 2, recorded)
    norm.weight.requires_grad_(False)
    check(backbone, batch_of(backbone), 2, recorded)
    check(backbone, batch_of(backbone), 1, recorded)
    check(backbone, batch_of(backbone), 2, recorded)
    assert recorded.counts == {"recorded": 5, "replayed": 5, "dropped": 2}


def test_the_plain_way_with_a_notice(load: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = load("qwen2.5-vl")
    batch = batch_of(backbone)
    right = value(backbone, batch, 2, None)

    def plain(recorded: RecordedSpan, match: str, **options: Any) -> None:
        with pytest.warns(UserWarning, match=match):
            found = value(backbone, batch, 2, recorded, **options)
        assert "interventions" in options or float((found - right).detach().abs()) <= 1e-9
        assert recorded.counts == {"plain": 1}
        with warnings.catch_warnings():  # once
            warnings.simplefilter("error")
            value(backbone, batch, 2, recorded, **options)

    if DEVICE == "cpu":
        plain(RecordedSpan(backbone), "need a CUDA device")
    plain(recorder(backbone), "recomputed", memory="checkpointed")
    plain(recorder(backbone), "interventions", interventions={1: noise(backbone.width)})
    for register in ("register_forward_hook", "register_full_backward_hook"):
        handle = getattr(backbone.decoder.layers[0].mlp, register)(lambda *_: None)
        plain(recorder(backbone), "hook")
        handle.remove()

    def broken(step: Any, reset: Any) -> Any:
        raise RuntimeError("no such thing here")

    plain(RecordedSpan(backbone, record=broken), "no such thing here")
    with torch.no_grad():
        prompt, _ = prefill(backbone, backbone.batch([backbone.prompt([Turn("user", "No")])]))
        recorded = recorder(backbone)
        regenerate(backbone, prompt, 2, recorded=recorded)
    assert not recorded.counts


@pytest.mark.parametrize("hidden", [False, True], ids=["as it is", "behind an error of the recording"])
def test_no_memory_is_for_the_moment(load: Loaded, hidden: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory runs out in a recording everything recorded goes, and the next span is tried again. What would not
    fit is not tried at all; other shapes make room for it first."""
    backbone = load("qwen2.5-vl")
    batch, full = batch_of(backbone), False

    def record(step: Any, reset: Any) -> Any:
        if full:
            try:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            finally:
                if hidden:
                    raise RuntimeError("operation failed due to a previous error during capture")
        return op_tape.record(step, reset)

    recorded = RecordedSpan(backbone, columns=16, record=record)
    check(backbone, batch, 2, recorded)
    held = recorded.held_bytes
    full = True
    with pytest.warns(UserWarning, match="previous error" if hidden else "out of memory") as said:
        for _ in range(2):
            check(backbone, batch, 1, recorded)
    full = False
    assert len(said) == 1 and recorded.held_bytes == 0
    assert recorded.counts == {"recorded": 1, "replayed": 1, "plain": 2, "dropped": 1}
    check(backbone, batch, 1, recorded)
    less = recorded.held_bytes
    assert 0 < less < held  # fewer passes keep the keys and values
    monkeypatch.setattr(room, "free_bytes", lambda *_: held - recorded.held_bytes)
    check(backbone, batch, 2, recorded)
    assert recorded.held_bytes == held and recorded.counts["dropped"] == 2
    recorded.release()
    assert recorded.held_bytes == 0
    with pytest.warns(UserWarning, match="GiB are free"):
        check(backbone, batch, 4, recorded)
    assert recorded.counts["plain"] == 3 and recorded.held_bytes == 0


def test_a_shape_that_runs_out_of_memory_is_tried_less_and_less(load: Loaded) -> None:
    """Each try costs time, and everything that was recorded."""
    backbone = load("qwen2.5-vl")
    batch = batch_of(backbone)
    prompt, _ = prefill(backbone, batch)
    tries: list[int] = []

    def record(step: Any, reset: Any) -> Any:
        tries.append(recorded.counts["plain"])  # spans so far
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    recorded = RecordedSpan(backbone, columns=16, record=record)
    with pytest.warns(UserWarning, match="out of memory"):
        for _ in range(20):
            regenerate(backbone, prompt, 1, recorded=recorded)
    assert tries == [0, 2, 5, 10, 19] and recorded.counts["plain"] == 20


@pytest.mark.parametrize("trained", ["autograd", "deferred", "lora"])
@pytest.mark.parametrize("split", [False, True])
def test_the_bytes_of_a_recording(load: Loaded, trained: str, split: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As its tensors are: the trunk once; what the backward graph gives, which are no gradients of the trunk where
    steps join nothing; and in the rest of the pool the keys and values that every pass keeps, and one layer's gradients
    of the trunk."""
    backbone = load("qwen2.5-vl")
    prepare(backbone, trained, monkeypatch)
    recorded = recorder(backbone)
    kept: dict[int, int] = {}

    def see(x: torch.Tensor) -> torch.Tensor:
        keys_or_values = (
            x.ndim == 4 and x.shape[1] == heads and (x.shape[2] < columns if split else x.shape[2] > columns)
        )
        if keys_or_values and x.untyped_storage().data_ptr() not in trunk:
            kept[x.untyped_storage().data_ptr()] = x.numel() * x.element_size()
        return x

    def size(tensors: Any) -> int:
        return sum(x.numel() * x.element_size() for x in tensors if x is not None)

    check(backbone, batch_of(backbone), 3, recorded, split=split)
    (each,) = recorded._recordings.values()
    heads, columns = each.kv[0].shape[1:3]
    trunk = {x.untyped_storage().data_ptr() for x in each.kv}
    assert each.bytes.static == size(each.kv)
    small = size(each.grads_out[:1])  # of the markers
    assert each.bytes.kept == size(each.grads_out) - small
    layers = len(each.kv) // 2
    assert [x is None for x in each.grads_out[1 : 1 + 2 * layers]] == [split] * 2 * layers
    assert [x is None for x in each.queries] == [not split] * layers
    with torch.autograd.graph.saved_tensors_hooks(see, lambda x: x):
        again = each._span()
    assert again and kept
    # Each pass keeps keys and values as it has joined them; the span's own are counted for each as long as at the end.
    most = sum(kept.values()) + each.bytes.static // layers
    assert most <= each.bytes.working <= most + 4 * size(each.values[2:])


def test_a_recording_that_computes_nothing_is_refused(load: Loaded) -> None:
    backbone = load("qwen2.5-vl")

    def nothing(step: Any, reset: Any) -> Any:
        step()
        reset()
        step()
        return lambda: None

    recorded = RecordedSpan(backbone, columns=16, record=nothing)
    with pytest.warns(UserWarning, match="differs from the step by"):
        check(backbone, batch_of(backbone), 1, recorded)
    assert recorded.counts == {"plain": 1}
