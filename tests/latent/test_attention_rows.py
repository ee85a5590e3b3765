"""Attention rows and matrices without ``output_attentions``, against stock eager attention over the whole sequence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import reference
from helpers import DEVICE, DTYPE, ask, difference, tolerance
from realvr.backbone import Backbone, Matrix, Probe
from realvr.latent import decoder_pass, extend, prefill, score, splice, think

K = 4
ROWS = tolerance(1e-6)  # attention weights
HIDDEN = tolerance(1e-5)


@pytest.fixture(autouse=True)
def _no_graph(request: pytest.FixtureRequest) -> Iterator[None]:
    with torch.set_grad_enabled("gradient" in request.function.__name__):
        yield


def prompts_of(pair: Any) -> list[Any]:
    """Two prompts of different length and image size; Gemma's are longer than its window (24)."""
    long = "Which of the two shapes is larger, and which one is closer to the left border of the picture?"
    return [pair.ours.prompt(ask(0, text="What color is it?")), pair.ours.prompt(ask(1, text=long))]


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(5, 200, shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, DTYPE)


def thought(pair: Any) -> tuple[Any, Any, Any, Tensor, Any]:
    """Batch, prompt state, state after the span, latents, and the reference's sequence with the same latents."""
    prompts = prompts_of(pair)
    batch = pair.ours.batch(prompts)
    prompt, _ = prefill(pair.ours, batch)
    after, z_BKD = think(pair.ours, prompt, K)
    return batch, prompt, after, z_BKD, pair.splice(pair.begin(prompts), z_BKD)


# ---------------------------------------------------------------------- rows


def test_answer_tokens_to_latent_slots(pair: Any) -> None:
    _, _, after, _, sequence = thought(pair)
    ids = tokens(2, 6)
    per_layer, per_head = Probe(columns=after.slots), Probe(columns=after.slots, heads=True)
    subset = Probe(rows=torch.tensor([[1, 4], [0, 5]]), columns=after.slots)
    score(pair.ours, after, ids[:, None], probes=[per_layer, per_head, subset])
    eager = reference.attentions(pair.stock, reference.append(pair.stock, sequence, ids))
    assert after.length == sequence.ids.shape[1]
    right = eager[:, :, :, -6:, after.slots]
    assert right.shape[-1] == K and float(right.max()) > 1e-3
    assert bool((sequence.ids[:, after.slots] == pair.ours.markers.slot).all())
    assert difference(per_head.stack(), right) <= ROWS
    assert difference(per_layer.stack(), right.mean(2)) <= ROWS
    assert difference(per_layer.mean(), right.mean((0, 2))) <= ROWS
    assert difference(per_head.mean(), right.mean((0, 2))) <= ROWS
    picked = torch.stack([right.mean(2)[:, 0, [1, 4]], right.mean(2)[:, 1, [0, 5]]], 1)
    assert difference(subset.stack(), picked) <= ROWS
    assert sorted(per_layer.layers) == list(range(pair.ours.layers))


def image_columns(image_BT: Tensor, count: int) -> Tensor:
    """The first ``count`` columns of each row that hold visual tokens, (B, count)."""
    return torch.stack([row.nonzero()[:count, 0] for row in image_BT])


def test_latent_slots_to_image_tokens(pair: Any) -> None:
    batch, prompt, _, z_BKD, sequence = thought(pair)
    count = int(batch.image_BT.sum(-1).min())
    columns = image_columns(prompt.image_BT, count)
    assert bool((columns[0] != columns[1]).any()), "rows with different columns"
    slots = torch.arange(1, K + 1, device=DEVICE).expand(2, -1)
    probe = Probe(rows=slots, columns=columns)
    heads = Probe(rows=slots, columns=columns, heads=True)
    everything = Probe()
    splice(pair.ours, prompt, z_BKD, probes=[probe, heads, everything])
    eager = reference.attentions(pair.stock, sequence)
    rows = eager[:, :, :, -K - 1 : -1]
    right = torch.stack([rows[:, b][..., columns[b]] for b in range(2)], 1)
    assert float(right.max()) > 1e-3
    assert difference(heads.stack(), right) <= ROWS
    assert difference(probe.stack(), right.mean(2)) <= ROWS
    assert difference(everything.stack(), eager[:, :, :, -K - 2 :].mean(2)) <= ROWS


def test_prompt_rows_under_padding(pair: Any) -> None:
    """Every real query of a padded prefill, all columns; nothing on padding, and every row sums to one."""
    prompts = prompts_of(pair)
    batch = pair.ours.batch(prompts)
    assert batch.padded
    probe = Probe(heads=True)
    prefill(pair.ours, batch, probes=[probe])
    eager = reference.attentions(pair.stock, pair.begin(prompts))
    ours, real = probe.stack(), batch.real_BT
    assert difference(ours.sum(-1), torch.ones_like(ours.sum(-1))) <= tolerance(1e-5)
    for row in range(2):
        assert difference(ours[:, row][:, :, real[row]], eager[:, row][:, :, real[row]]) <= ROWS
        on_padding = ours[:, row][:, :, real[row]][..., ~real[row]]
        assert float(on_padding.abs().sum()) == 0


def test_a_single_step_without_padding(pair: Any) -> None:
    """One new token, and a probe of an unpadded prompt: the paths on which no mask is built."""
    prompt = prompts_of(pair)[1]
    probe, step = Probe(heads=True), Probe(heads=True)
    state, _ = prefill(pair.ours, pair.ours.batch([prompt]), probes=[probe])
    subset = Probe(rows=torch.tensor([[2, len(prompt) - 1]]), heads=True)
    prefill(pair.ours, pair.ours.batch([prompt]), probes=[subset])
    extend(pair.ours, state, tokens(1, 1), probes=[step])
    sequence = reference.append(pair.stock, pair.begin([prompt]), tokens(1, 1))
    eager = reference.attentions(pair.stock, sequence)
    assert difference(probe.stack(), eager[:, :, :, :-1, :-1]) <= ROWS
    assert difference(subset.stack(), eager[:, :, :, [2, len(prompt) - 1], :-1]) <= ROWS
    assert difference(step.stack(), eager[:, :, :, -1:]) <= ROWS


def test_sliding_window_rows_are_zero_outside_the_window(pair: Any) -> None:
    if not pair.ours.windowed:
        pytest.skip("this family has no sliding window")
    _, _, after, _, sequence = thought(pair)
    window = pair.ours.text_config.sliding_window
    assert after.length > 2 * window
    probe = Probe(heads=True)
    extend(pair.ours, after, tokens(2, 3), probes=[probe])
    eager = reference.attentions(pair.stock, reference.append(pair.stock, sequence, tokens(2, 3)))
    for layer, kind in enumerate(pair.ours.text_config.layer_types):
        ours = probe.layers[layer]
        assert difference(ours, eager[layer, :, :, -3:]) <= ROWS
        early = ours[:, :, -1, : after.length + 3 - window]
        assert (float(early.abs().sum()) == 0) == (kind == "sliding_attention")
        assert float(ours[:, :, -1, after.length + 3 - window].min()) > 0, "the window's first column is inside it"


@pytest.mark.parametrize("window", [5, 9, 24])
def test_windows_shorter_than_an_image(pair: Any, marked: Path, window: int) -> None:
    """In stock Gemma 3 the window also cuts an image's attention to itself."""
    if not pair.ours.windowed:
        pytest.skip("this family has no sliding window")
    ours = Backbone.load(marked, dtype=DTYPE, device=DEVICE)
    stock = reference.load(marked, DTYPE, "eager", DEVICE)
    for model in (ours.model, stock):
        model.config.get_text_config().sliding_window = window
        for layer in model.model.language_model.layers:
            if layer.self_attn.sliding_window is not None:
                layer.self_attn.sliding_window = window
    narrow = type(pair)(ours, stock)
    prompts = prompts_of(narrow)
    batch = ours.batch(prompts)
    probe = Probe(heads=True)
    state, hidden = prefill(ours, batch, probes=[probe])
    sequence = narrow.begin(prompts)
    eager = reference.attentions(stock, sequence)
    assert difference(hidden[batch.real_BT], reference.hidden(stock, sequence)[batch.real_BT]) <= HIDDEN
    for row in range(2):
        real = batch.real_BT[row]
        assert difference(probe.stack()[:, row][:, :, real], eager[:, row][:, :, real]) <= ROWS
    _, z_BKD = think(ours, state, K)
    assert difference(z_BKD, narrow.think(sequence, K)[1]) <= HIDDEN


def test_rows_of_branches_are_those_of_each_branch_alone(pair: Any) -> None:
    _, _, after, _, sequence = thought(pair)
    group, size = 3, 5
    ids = tokens(2, group, size)
    lengths = torch.tensor([[5, 3, 1], [2, 5, 4]], device=DEVICE)
    real = torch.arange(size, device=DEVICE) < lengths[..., None]
    slots, everything = Probe(columns=after.slots, heads=True), Probe(heads=True)
    logp, _, _ = score(pair.ours, after, ids, real, probes=[slots, everything])
    assert difference(everything.stack().sum(-1), torch.ones_like(everything.stack().sum(-1))) <= tolerance(1e-5)
    for branch in range(group):
        full = reference.append(pair.stock, sequence, ids[:, branch])  # causal: right padding changes no real row
        eager = reference.attentions(pair.stock, full)[:, :, :, -size:]
        columns = slice(branch * size, (branch + 1) * size)
        for row in range(2):
            count = int(lengths[row, branch])
            ours = slots.stack()[:, row, :, columns][:, :, :count]
            assert difference(ours, eager[:, row, :, :count, after.slots]) <= ROWS
            whole = everything.stack()[:, row, :, columns][:, :, :count]
            trunk, own = whole[..., : after.length], whole[..., after.length :][..., columns]
            assert difference(torch.cat([trunk, own], -1), eager[:, row, :, :count]) <= ROWS
            assert float(whole.sum() - trunk.sum() - own.sum()) == pytest.approx(0, abs=tolerance(1e-4))
    for branch in range(group):
        alone, _, _ = score(pair.ours, after, ids[:, branch, None], real[:, branch, None])
        assert difference(alone[:, 0], logp[:, branch]) <= HIDDEN


def test_rows_of_a_half_precision_model_are_not_rounded(marked: Path) -> None:
    """Weights rounded to bfloat16 no longer sum to one, and their small differences are noise."""
    backbone = Backbone.load(marked, dtype=torch.bfloat16, device=DEVICE)
    state, _ = prefill(backbone, backbone.batch([backbone.prompt(ask(0))]))
    probe = Probe()
    extend(backbone, state, tokens(1, 4), probes=[probe])
    assert probe.mean().dtype == torch.float32
    assert float((probe.stack().sum(-1) - 1).abs().max()) <= 1e-5


def test_probing_changes_nothing(pair: Any) -> None:
    _, _, after, _, _ = thought(pair)
    ids = tokens(2, 6)
    _, plain = extend(pair.ours, after, ids)
    _, probed = extend(pair.ours, after, ids, probes=[Probe(), Probe(columns=after.slots, heads=True)])
    assert torch.equal(plain, probed)


# ---------------------------------------------------------------------- gradients of rows


def test_gradient_of_rows_reaches_the_latents(pair: Any) -> None:
    """The undetached variant differentiates through the readout; by default rows carry no gradient."""
    with torch.no_grad():
        _, prompt, _, z_BKD, _ = thought(pair)
        sequence = pair.begin(prompts_of(pair))
    ids = tokens(2, 6)
    weight = noise(pair.ours.layers, 2, 6, K)
    mine, theirs = (z_BKD.detach().clone().requires_grad_() for _ in range(2))
    state, _ = splice(pair.ours, prompt, mine)
    attached, detached = Probe(columns=state.slots, gradient=True), Probe(columns=state.slots)
    score(pair.ours, state, ids[:, None], probes=[attached, detached])
    assert not detached.stack().requires_grad
    assert difference(detached.stack(), attached.stack().detach()) == 0
    (found,) = torch.autograd.grad((attached.stack() * weight).sum(), mine)
    full = reference.append(pair.stock, pair.splice(sequence, theirs), ids)
    rows = reference.attentions(pair.stock, full)[:, :, :, -6:, state.slots].mean(2)
    (right,) = torch.autograd.grad((rows * weight).sum(), theirs)
    assert float(right.abs().max()) > 1e-4
    assert difference(found, right) <= tolerance(1e-5) * max(1.0, float(right.abs().max()))


# ---------------------------------------------------------------------- the eager mode


def test_matrix_equals_eager_and_its_output_the_fast_path(pair: Any) -> None:
    batch, prompt, after, z_BKD, sequence = thought(pair)
    whole, span, branch = Matrix(), Matrix(), Matrix()
    _, fast = prefill(pair.ours, batch)
    _, slow = prefill(pair.ours, batch, matrix=whole)
    assert difference(slow[batch.real_BT], fast[batch.real_BT]) <= HIDDEN
    state, hidden = splice(pair.ours, prompt, z_BKD, matrix=span)
    assert difference(hidden, z_BKD) <= HIDDEN, "the state before each slot is its latent"
    assert difference(state.last_BD, after.last_BD) <= HIDDEN
    eager = reference.attentions(pair.stock, sequence)
    length = prompt.length
    for layer in range(pair.ours.layers):
        for row in range(2):
            real = batch.real_BT[row]
            prompt_rows = eager[layer, row, :, :length, :length][:, real]
            assert difference(whole.layers[layer][row][:, real], prompt_rows) <= ROWS
        assert difference(span.layers[layer], eager[layer, :, :, length:]) <= ROWS
    logp, _, _ = score(pair.ours, after, tokens(2, 3, 4))
    eagerly, _, _ = score(pair.ours, after, tokens(2, 3, 4), matrix=branch)
    assert difference(logp, eagerly) <= HIDDEN


def test_gradient_of_a_loss_by_the_matrix(pair: Any) -> None:
    """Saliency: d loss / d attention of every layer, whole prompt and span, as stock eager attention gives it."""
    with torch.no_grad():
        batch, prompt, _, z_BKD, sequence = thought(pair)
    length = prompt.length
    real = batch.real_BT
    weight = noise(2, K + 2, pair.ours.width)
    # The span's pass on a prompt without a graph, as diagnostics use it.
    span = Matrix()
    state, _ = splice(pair.ours, prompt, z_BKD, matrix=span)
    _check_span_gradient(pair, span, state, sequence, length)
    # The whole prompt.
    whole = Matrix()
    _, hidden = prefill(pair.ours, batch, matrix=whole)
    loss = (hidden[:, -(K + 2) :] * weight).sum()
    found = torch.autograd.grad(loss, [whole.layers[i] for i in range(pair.ours.layers)])
    output = reference.run(pair.stock, pair.begin(prompts_of(pair)), output_attentions=True)
    for attention in output.attentions:
        attention.retain_grad()
    (output.last_hidden_state[:, -(K + 2) :] * weight).sum().backward()
    for gradient, attention in zip(found, output.attentions, strict=True):
        scale = float(attention.grad.abs().max())
        assert scale > 1e-3
        for row in range(2):
            ours = gradient[row][:, real[row]][..., real[row]]
            right = attention.grad[row][:, real[row]][..., real[row]]
            assert difference(ours, right) <= tolerance(1e-5) * max(1.0, scale)
    pair.stock.zero_grad()


def _check_span_gradient(pair: Any, span: Matrix, state: Any, sequence: Any, length: int) -> None:
    weight = noise(2, pair.ours.width, seed=3)
    found = torch.autograd.grad((state.last_BD * weight).sum(), [span.layers[i] for i in range(pair.ours.layers)])
    output = reference.run(pair.stock, sequence, output_attentions=True)
    for attention in output.attentions:
        attention.retain_grad()
    (output.last_hidden_state[:, -1] * weight).sum().backward()
    for gradient, attention in zip(found, output.attentions, strict=True):
        right = attention.grad[:, :, length:]
        scale = float(right.abs().max())
        assert scale > 1e-3
        for row, real in enumerate(sequence.mask.bool()):  # what padding columns hold is nobody's business
            assert difference(gradient[row][..., real], right[row][..., real]) <= tolerance(1e-5) * max(1.0, scale)
    pair.stock.zero_grad()


def test_rows_of_packed_examples_stay_inside(pair: Any) -> None:
    backbone = pair.ours
    ids = tokens(1, 12)
    segment = torch.tensor([[0] * 5 + [1] * 7], device=DEVICE)
    positions = torch.tensor([[*range(5), *range(7)]], device=DEVICE)
    probe = Probe(heads=True)
    decoder_pass(backbone, None, backbone.embed(ids), positions, segment_BT=segment, probes=[probe])
    for part in (slice(0, 5), slice(5, 12)):
        alone = reference.attentions(pair.stock, reference.begin(pair.stock, ids[:, part]))
        assert difference(probe.stack()[..., part, part], alone) <= ROWS
    assert float(probe.stack()[..., 5:, :5].abs().sum()) == 0


# ---------------------------------------------------------------------- pooled rows


def test_pooled_rows_are_sums_over_bins(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """``left @ A @ right`` of every layer, also where the rows are made a few at a time."""
    batch, prompt, _, z_BKD, sequence = thought(pair)
    eager = reference.attentions(pair.stock, sequence).mean(2)
    length = prompt.length
    left, right = noise(2, 3, length, seed=1).float(), noise(2, length, 5, seed=2).float()
    left = left.masked_fill(~batch.real_BT[:, None], 0)
    small = 2 * pair.ours.text_config.num_attention_heads * length * 7  # seven rows at a time
    for limit in (None, small):
        probe, heads = Probe(pool=(left, right)), Probe(pool=(left, right), heads=True)
        with monkeypatch.context() as patched:
            if limit is not None:
                patched.setattr("realvr.backbone.attention_rows._POOLED_WEIGHTS", limit)
            prefill(pair.ours, batch, probes=[probe, heads])
        expected = left.to(eager.dtype) @ eager[..., :length, :length] @ right.to(eager.dtype)
        assert difference(probe.stack(), expected) <= 100 * ROWS and float(expected.abs().max()) > 0.1
        assert difference(heads.stack().mean(2), expected) <= 100 * ROWS
    rows, columns = torch.tensor([[1, 3], [2, 4]]), slice(0, 5)
    probe = Probe(rows=rows, columns=columns, pool=(torch.ones(2, 1, 2), torch.ones(2, 5, 1)))
    splice(pair.ours, prompt, z_BKD, probes=[probe])
    expected = torch.stack([eager[:, b, length + rows[b]][..., :5].sum((1, 2)) for b in range(2)], 1)
    assert difference(probe.stack()[:, :, 0, 0], expected) <= 10 * ROWS
