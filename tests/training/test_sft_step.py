"""The Stage-1 step against stock forwards of single examples, in float64: packing, slots, labels, jitter, hiding.

Measured on the CPU: losses and gradients of packed, padded and separate rows agree with each other and with stock to
1e-14 relative in every family, once the MoE router's float32 softmax is widened on both sides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import reference
from helpers import DEVICE, ask
from host_syncs import HostSyncs
from pair import Pair, gradients, relative
from realvr.backbone import Backbone, Probe, Prompt
from realvr.backbone.attention import Columns
from realvr.training import loop
from realvr.training.base_rows import BaseBatch
from realvr.training.method import Step
from realvr.training.methods import lvr_sft
from realvr.training.methods.lvr_sft import LvrSft, LvrSftConfig
from realvr.training.sft_batch import SftBatch, SftExample, pack_rows

TOLERANCE = 1e-10
WEIGHT = 0.1
TARGETS = ((0, 1, 3), (), (2,), (0, 2))  # the second example has no region of interest
RESPONSES = (4, 3, 2, 5)
ROWS: dict[str, tuple[tuple[int, ...], ...]] = {
    "one row": ((0, 1, 2, 3),),
    "two rows": ((0, 1, 2), (3,)),
    "another order": ((3, 2), (1, 0)),
    "separate rows": ((0,), (1,), (2,), (3,)),
}
ONE_FAMILY = pytest.mark.parametrize("family", ["gemma3"], indirect=True)


@pytest.fixture(autouse=True)
def _wide_softmax() -> Iterator[None]:
    with reference.wide_softmax():
        yield


# ---------------------------------------------------------------------- the data


def example(pair: Pair, number: int, targets: tuple[int, ...], response: int) -> SftExample:
    """Prompt, span and response. The last example has two images."""
    backbone, markers = pair.ours, pair.ours.markers
    numbers = (number, number + 1) if number == 3 else (number,)
    prompt = backbone.prompt(ask(*numbers, text="Which of the shapes is larger, and what is its color?"[: 20 + number]))
    text = torch.randint(5, 200, (response,), generator=torch.Generator().manual_seed(number))
    span = [markers.start, *[markers.slot] * len(targets), markers.end] if targets else []
    ids = torch.cat([prompt.ids, torch.tensor(span, dtype=torch.long), text])
    return SftExample(Prompt(ids, prompt.images), len(prompt), torch.tensor(targets, dtype=torch.long), f"row {number}")


@pytest.fixture(scope="module")
def examples(exact: Pair) -> list[SftExample]:
    return [example(exact, i, t, r) for i, (t, r) in enumerate(zip(TARGETS, RESPONSES, strict=True))]


def sft_step(backbone: Backbone, weight: float = 0.1, reduction: Any = "mean", checkpointed: bool = False) -> Step:
    """The step of Stage 1 with these settings."""
    config = LvrSftConfig(
        reconstruction_weight=weight, reconstruction_reduction=reduction, gradient_checkpointing=checkpointed
    )
    return Step(LvrSft(backbone, config))


def packed(pair: Pair, examples: list[SftExample], rows: tuple[tuple[int, ...], ...], **options: Any) -> SftBatch:
    """A batch with the denominators of a step that consists of all of ``examples``."""
    micro = pack_rows(pair.ours, [[examples[i] for i in row] for row in rows], **options).to(torch.device(DEVICE))
    micro.tokens_total = float(sum(len(labelled(e)) for e in examples))
    micro.targets_total = float(max(sum(len(e.targets) > 0 for e in examples), 1))
    return micro


def labelled(example: SftExample) -> list[int]:
    """Columns of an example whose token is learned: markers and response, neither slots nor prompt."""
    first, targets = example.prompt_length, len(example.targets)
    slots = range(first + 1, first + 1 + targets) if targets else range(0)
    return [column for column in range(first, len(example)) if column not in slots]


# ---------------------------------------------------------------------- stock, example by example


def stock_hidden(pair: Pair, example: SftExample, shift: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Hidden states (T, D) of one example alone, and its targets (T_v, D): inputs put together by hand."""
    sequence = pair.begin([Prompt(example.prompt.ids, example.prompt.images)])
    visual = sequence.embeds[sequence.image]
    targets = visual[example.targets.to(DEVICE)].detach()
    first = example.prompt_length + 1
    embeds = torch.cat(
        [sequence.embeds[0, :first], targets, sequence.embeds[0, first + len(targets) :]]
        if len(targets)
        else [sequence.embeds[0]]
    )[None]
    sequence = replace(sequence, embeds=embeds)
    at = None if shift is None else reference.positions(pair.stock, sequence) + shift.to(DEVICE)
    return reference.hidden(pair.stock, sequence, at)[0], targets


def stock_losses(
    pair: Pair, example: SftExample, shift: Tensor | None = None, offset: int = 0, reduction: str = "mean"
) -> tuple[Tensor, Tensor]:
    """Sum of the cross-entropies and the reconstruction loss of one example, by loops. ``offset`` is a mistake."""
    hidden, targets = stock_hidden(pair, example, shift)
    ce = hidden.sum() * 0
    for column in labelled(example):
        logp = torch.log_softmax(pair.stock.lm_head(hidden[column - 1]), -1)
        ce = ce - logp[example.prompt.ids[column]]
    rec = hidden.sum() * 0
    for t, target in enumerate(targets):
        slot = example.prompt_length + 1 + t
        for d in range(len(target)):
            rec = rec + (hidden[slot - 1 + offset, d] - target[d]) ** 2
    if len(targets):
        rec = rec / len(targets) / (targets.shape[1] if reduction == "mean" else 1)
    return ce, rec


def stock_loss(pair: Pair, examples: list[SftExample], **options: Any) -> Tensor:
    """Stage-1 loss of the examples together."""
    parts = [stock_losses(pair, e, **options) for e in examples]
    tokens, with_targets = sum(len(labelled(e)) for e in examples), sum(len(e.targets) > 0 for e in examples)
    return sum(ce for ce, _ in parts) / tokens + WEIGHT * sum(rec for _, rec in parts) / with_targets


@pytest.fixture(scope="module")
def right(exact: Pair, examples: list[SftExample]) -> tuple[float, dict[str, Tensor], list[tuple[float, float]]]:
    """Loss, gradients and per-example losses of the reference."""
    with reference.wide_softmax():
        loss = stock_loss(exact, examples)
        with torch.no_grad():
            each = [tuple(float(x) for x in stock_losses(exact, e)) for e in examples]
        return float(loss.detach()), gradients(exact.stock, loss), each


@pytest.fixture
def errors(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What the step finds as each example's reconstruction loss."""
    found: list[Tensor] = []
    original = lvr_sft.reconstruction.per_example

    def spy(*args: Any) -> Tensor:
        found.append(original(*args).detach())
        return original(*args)

    monkeypatch.setattr(lvr_sft.reconstruction, "per_example", spy)
    return found


# ---------------------------------------------------------------------- packing


@pytest.mark.parametrize("layout", ROWS)
def test_every_layout_equals_stock(exact: Pair, examples: list[SftExample], right: Any, layout: str) -> None:
    """Packed rows, padded rows, separate rows: the loss and every gradient of single stock forwards."""
    loss, _ = sft_step(exact.ours, WEIGHT)(packed(exact, examples, ROWS[layout]))
    expected_loss, expected, _ = right
    assert float(loss.detach()) == pytest.approx(expected_loss, rel=TOLERANCE)
    assert relative(gradients(exact.ours.model, loss), expected) <= TOLERANCE


@pytest.mark.parametrize("layout", ROWS)
def test_losses_of_each_example(
    exact: Pair, examples: list[SftExample], right: Any, layout: str, errors: list[Tensor]
) -> None:
    rows = ROWS[layout]
    micro = packed(exact, examples, rows)
    order = [number for row in rows for number in row]
    assert micro.names == [f"row {number}" for number in order]
    step = sft_step(exact.ours, WEIGHT)
    start = 0
    with torch.no_grad():
        for place, number in enumerate(order):
            count = len(labelled(examples[number]))
            own = slice(start, start + count)
            only = replace(micro, predict_M2=micro.predict_M2[own], labels_M=micro.labels_M[own], tokens_total=1.0)
            ce, _ = step(only, term="next_token")
            step(only, term="reconstruction")
            expected_ce, expected_rec = right[2][number]
            assert float(ce) == pytest.approx(expected_ce, rel=TOLERANCE)
            assert float(errors[-1][place]) == pytest.approx(expected_rec, rel=TOLERANCE, abs=1e-15)
            start += count
    assert start == len(micro.labels_M)


def test_microbatches_add_up(exact: Pair, examples: list[SftExample], right: Any) -> None:
    """With the denominators of the whole step, whatever the split."""
    step = sft_step(exact.ours, WEIGHT)
    parts = [step(packed(exact, examples, rows)) for rows in (((0, 1),), ((2,), (3,)))]
    total = parts[0][0] + parts[1][0]
    assert float(total.detach()) == pytest.approx(right[0], rel=TOLERANCE)
    assert relative(gradients(exact.ours.model, total), right[1]) <= TOLERANCE
    _, joint = step(packed(exact, examples, ROWS["two rows"]))
    for name, (value, count) in joint.items():
        sums = [sum(float(metrics[name][i]) for _, metrics in parts) for i in (0, 1)]
        assert sums == pytest.approx([float(value), float(count)], rel=1e-5), name


@pytest.mark.parametrize("layout", ["one row", "two rows"])
def test_checkpointing_changes_nothing(exact: Pair, examples: list[SftExample], right: Any, layout: str) -> None:
    loss, _ = sft_step(exact.ours, WEIGHT, checkpointed=True)(packed(exact, examples, ROWS[layout]))
    assert relative(gradients(exact.ours.model, loss), right[1]) <= TOLERANCE


@pytest.mark.parametrize(("layout", "checkpointed"), [("one row", True), ("two rows", False), ("another order", True)])
def test_variable_length_equals_stock(
    exact: Pair,
    examples: list[SftExample],
    right: Any,
    layout: str,
    checkpointed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Attention inside each example: the loss and every gradient of single stock forwards, and no mask, except where
    images attend both ways."""
    masks: list[Any] = []
    visible = Columns.visible
    monkeypatch.setattr(Columns, "visible", lambda *args: masks.append(args) or visible(*args))
    micro = packed(exact, examples, ROWS[layout], variable_length=True)
    loss, _ = sft_step(exact.ours, WEIGHT, checkpointed=checkpointed)(micro)
    assert float(loss.detach()) == pytest.approx(right[0], rel=TOLERANCE)
    assert relative(gradients(exact.ours.model, loss), right[1]) <= TOLERANCE
    assert bool(masks) == exact.ours.two_way_images


def _text(number: int, length: int) -> SftExample:
    ids = torch.randint(5, 200, (length,), generator=torch.Generator().manual_seed(number))
    return SftExample(Prompt(ids, ()), length // 2, torch.empty(0, dtype=torch.long), f"text {number}")


@ONE_FAMILY
def test_variable_length_respects_sliding_windows(exact: Pair, examples: list[SftExample]) -> None:
    """Text alone has no two-way images: layers whose window is shorter than an example keep the mask, others do not."""
    lengths = (60, 12, 30, 20)
    texts = [_text(number, length) for number, length in enumerate(lengths)]
    losses = [
        sft_step(exact.ours, 0.0)(packed(exact, texts, ROWS["two rows"], variable_length=on))[0] for on in (True, False)
    ]
    assert exact.ours.text_config.sliding_window < max(map(len, texts)), "the case has no layer with a short window"
    found, expected = (gradients(exact.ours.model, loss) for loss in losses)
    assert relative(found, expected) <= TOLERANCE


@pytest.mark.parametrize("family", ["qwen2.5-vl"], indirect=True)
def test_variable_length_keeps_what_is_hidden_hidden(exact: Pair, examples: list[SftExample]) -> None:
    losses = [
        sft_step(exact.ours, WEIGHT)(
            packed(exact, examples, ROWS["two rows"], hidden_ratio=hidden, variable_length=on)
        )[0]
        for on, hidden in ((True, 1.0), (False, 1.0), (False, 0.0))
    ]
    assert float(losses[0].detach()) == float(losses[1].detach()) != float(losses[2].detach())


# ---------------------------------------------------------------------- what is learned where


@pytest.mark.parametrize("offset", [-1, 1])
def test_one_position_off_is_another_loss(
    exact: Pair, examples: list[SftExample], right: Any, offset: int, errors: list[Tensor]
) -> None:
    """The state one position before slot t reconstructs target t; neither the one before nor the slot's own."""
    with torch.no_grad():
        sft_step(exact.ours, WEIGHT)(packed(exact, examples, ROWS["separate rows"]))
        for number, example in enumerate(examples):
            if len(example.targets):
                _, wrong = stock_losses(exact, example, offset=offset)
                assert abs(float(wrong) / float(errors[-1][number]) - 1) > 1e-3


def test_labels_are_markers_and_response(exact: Pair, examples: list[SftExample]) -> None:
    markers = exact.ours.markers
    for example in examples:
        micro = pack_rows(exact.ours, [[example]])
        response = example.prompt.ids[example.prompt_length :].tolist()
        expected = [token for token in response if token != markers.slot]
        assert micro.labels_M.tolist() == expected
        assert (expected[0] == markers.start and markers.end in expected) == (len(example.targets) > 0)
        columns = micro.predict_M2[:, 1]
        assert bool((micro.predict_M2[:, 0] == 0).all()) and int(columns[0]) == example.prompt_length - 1
        assert torch.equal(micro.ids_RT[0, columns + 1], micro.labels_M)
        assert not bool(micro.slot_RT[0, columns + 1].any())


def test_prompt_tokens_and_slot_ids_are_not_labels(exact: Pair, examples: list[SftExample]) -> None:
    """The id under a slot is nobody's business: any other gives the same loss."""
    step = sft_step(exact.ours, WEIGHT)
    micro = packed(exact, examples, ROWS["two rows"])
    with torch.no_grad():
        loss, _ = step(micro)
        other, _ = step(replace(micro, ids_RT=micro.ids_RT.masked_fill(micro.slot_RT, 7)))
    assert float(loss) == float(other)


def test_rows_without_targets_have_cross_entropy_only(exact: Pair, examples: list[SftExample]) -> None:
    plain = examples[1]
    micro = packed(exact, [plain], ((0,),))
    loss, metrics = sft_step(exact.ours, WEIGHT)(micro)
    ce, _ = stock_losses(exact, plain)
    ce = ce / len(labelled(plain))
    assert float(loss.detach()) == pytest.approx(float(ce.detach()), rel=TOLERANCE)
    assert relative(gradients(exact.ours.model, loss), gradients(exact.stock, ce)) <= TOLERANCE
    assert float(metrics["loss/reconstruction"][0]) == 0 and float(metrics["loss/reconstruction"][1]) == 0
    assert [float(x) for x in metrics["data/with_targets"]] == [0, 1]


@ONE_FAMILY
def test_text_only_examples(exact: Pair) -> None:
    """A microbatch without a single image."""
    prompt = exact.ours.prompt(ask(text="Count to three: 1, 2, 3."))
    ids = torch.cat([prompt.ids, torch.tensor([9, 8, 7])])
    text = SftExample(Prompt(ids), len(prompt), torch.zeros(0, dtype=torch.long))
    loss, _ = sft_step(exact.ours, WEIGHT)(packed(exact, [text], ((0,),)))
    ce, _ = stock_losses(exact, text)
    assert float(loss.detach()) == pytest.approx(float(ce.detach()) / 3, rel=TOLERANCE)


@ONE_FAMILY
def test_reduction_sum_is_d_times_mean(exact: Pair, examples: list[SftExample]) -> None:
    micro = packed(exact, examples, ROWS["one row"])
    losses = {}
    for reduction in ("mean", "sum"):
        loss, _ = sft_step(exact.ours, WEIGHT, reduction)(micro, term="reconstruction")
        losses[reduction] = (float(loss.detach()), gradients(exact.ours.model, loss))
    width = exact.ours.width
    assert losses["sum"][0] == pytest.approx(width * losses["mean"][0], rel=1e-12)
    assert relative(losses["sum"][1], {name: width * g for name, g in losses["mean"][1].items()}) <= 1e-12
    with torch.no_grad():
        whole, _ = sft_step(exact.ours, WEIGHT, "sum")(micro)
        assert float(whole) == pytest.approx(float(stock_loss(exact, examples, reduction="sum")), rel=TOLERANCE)


@ONE_FAMILY
def test_parts_and_metrics(exact: Pair, examples: list[SftExample], right: Any) -> None:
    step = sft_step(exact.ours, WEIGHT)
    micro = packed(exact, examples, ROWS["two rows"])
    whole, metrics = step(micro)
    parts = [step(micro, term=term)[0] for term in ("next_token", "reconstruction")]
    assert float(sum(parts).detach()) == pytest.approx(float(whole.detach()), rel=1e-12)
    ce = sum(ce for ce, _ in right[2]) / sum(len(labelled(e)) for e in examples)
    rec = sum(rec for _, rec in right[2]) / 3
    found = {name: float(total) / float(count) for name, (total, count) in metrics.items()}
    assert found["loss/next_token"] == pytest.approx(ce, rel=1e-5)
    assert found["loss/reconstruction"] == pytest.approx(rec, rel=1e-5)
    assert found["loss"] == pytest.approx(ce + WEIGHT * rec, rel=1e-5)
    assert found["data/with_targets"] == 0.75
    cosines = []
    for example in examples:
        with torch.no_grad():
            hidden, targets = stock_hidden(exact, example)
        for t, target in enumerate(targets):
            cosines.append(float(torch.cosine_similarity(hidden[example.prompt_length + t], target, dim=0)))
    assert found["latents/cos_target"] == pytest.approx(sum(cosines) / len(cosines), rel=1e-4)


def test_vision_gets_no_gradient(fresh_exact: Pair) -> None:
    backbone = fresh_exact.ours
    vision = [p for module in backbone.vision_modules() for p in module.parameters()]
    for parameter in vision:  # even where someone unfreezes them
        parameter.requires_grad_(True)
    sft_step(backbone, WEIGHT)(packed(fresh_exact, [example(fresh_exact, 0, (0, 1), 3)], ((0,),)))[0].backward()
    assert vision and all(p.grad is None for p in vision)
    assert all(p.grad is not None for p in backbone.decoder.norm.parameters())


# ---------------------------------------------------------------------- jitter


def shifts(plain: SftBatch, moved: SftBatch) -> Tensor:
    """By how much each column's position moved, (R, T); the same on every axis of multimodal positions."""
    shift = moved.positions - plain.positions
    if shift.ndim == 3:
        assert bool((shift == shift[0]).all())
        return shift[0]
    return shift


def test_jitter_moves_positions_after_the_span_markers_only(exact: Pair, examples: list[SftExample]) -> None:
    rows = [[examples[0], examples[1]], [examples[2]]]
    plain = pack_rows(exact.ours, rows)
    seen = set()
    for seed in range(12):
        moved = pack_rows(exact.ours, rows, jitter=3, generator=torch.Generator().manual_seed(seed))
        for name in ("ids_RT", "place_RT", "segment_RT", "real_RT", "predict_M2", "labels_M"):
            assert torch.equal(getattr(plain, name), getattr(moved, name)), name
        shift = shifts(plain, moved)
        for row, number, column in ((0, 0, 0), (0, 1, len(examples[0])), (1, 2, 0)):
            e = examples[number]
            own = shift[row, column : column + len(e)]
            start = e.prompt_length
            end = start + 1 + len(e.targets) if len(e.targets) else start
            assert bool((own[:start] == 0).all())
            for part in (own[start:end], own[end:]):
                assert bool((part == part[:1]).all())
            first, second = (int(own[start]) if end > start else 0), int(own[-1])
            assert 0 <= first <= second <= first + (3 if end > start else 6)
            if number == 0:
                seen.add((first, second - first))
        assert bool((shift[~plain.real_RT] == 0).all())
    assert len(seen) > 4, "both gaps vary"
    assert torch.equal(pack_rows(exact.ours, rows, jitter=0).positions, plain.positions)


@pytest.mark.parametrize("layout", ["one row", "separate rows"])
def test_jitter_equals_stock_with_moved_positions(exact: Pair, examples: list[SftExample], layout: str) -> None:
    """Stock measures a sliding window by columns whatever the positions, and so do we."""
    rows = ROWS[layout]
    plain = packed(exact, examples, rows)
    micro = packed(exact, examples, rows, jitter=40, generator=torch.Generator().manual_seed(4))
    shift = shifts(plain, micro)
    assert int(shift.max()) > 24, "further than the window of the windowed family"
    with torch.no_grad():
        loss, _ = sft_step(exact.ours, WEIGHT)(micro)
        tokens, parts = 0, []
        for place, row in enumerate(rows):
            column = 0
            for number in row:
                own = shift[place, column : column + len(examples[number])]
                parts.append(stock_losses(exact, examples[number], shift=own))
                tokens, column = tokens + len(labelled(examples[number])), column + len(own)
        expected = sum(ce for ce, _ in parts) / tokens + WEIGHT * sum(rec for _, rec in parts) / 3
        assert float(loss) == pytest.approx(float(expected), rel=TOLERANCE)
        assert float(loss) != pytest.approx(float(sft_step(exact.ours, WEIGHT)(plain)[0]), rel=1e-6)


# ---------------------------------------------------------------------- what is drawn


def with_earlier_span(pair: Pair) -> SftExample:
    """An example with a span in an earlier reply: four gaps instead of two."""
    markers, last = pair.ours.markers, example(pair, 0, (0, 1), 3)
    span = torch.tensor([markers.start, markers.slot, markers.end, 7, 8])
    ids = torch.cat([last.prompt.ids[: last.prompt_length], span, last.prompt.ids[last.prompt_length :]])
    targets = torch.tensor([2, *last.targets.tolist()])
    prompt = Prompt(ids, last.prompt.images)
    return SftExample(prompt, last.prompt_length + len(span), targets, "earlier", earlier=1)


def of_examples(micro: SftBatch, plain: SftBatch) -> list[tuple[list[int], list[int]]]:
    """Of each example, how far its columns were moved and which of them are hidden from what."""
    veil, shift = micro.image_visibility_RT, shifts(plain, micro)
    veil = torch.zeros_like(micro.segment_RT) if veil is None else veil
    own = [micro.segment_RT == number for number in range(micro.examples)]
    return [(shift[columns].tolist(), veil[columns].tolist()) for columns in own]


@pytest.mark.parametrize("family", ["qwen2.5-vl"], indirect=True)
@pytest.mark.parametrize("options", [{"jitter": 9, "hidden_ratio": 0.5}, {"jitter": 9}, {"hidden_ratio": 0.5}])
def test_gaps_and_hidden_images_do_not_depend_on_the_microbatch(
    exact: Pair, examples: list[SftExample], options: dict[str, Any]
) -> None:
    """``optim.microbatch`` may change in a run: it changes nothing but rounding."""
    rows = [[examples[0], examples[2]], [examples[3]], [with_earlier_span(exact), examples[1]], [examples[0]]]
    found = []
    for cut in ([rows], [rows[:1], rows[1:]], [[row] for row in rows]):
        generator, each = torch.Generator().manual_seed(3), []
        for part in cut:
            micro = pack_rows(exact.ours, part, generator=generator, **options)
            each += of_examples(micro, pack_rows(exact.ours, part))
        found.append(each)
    assert found[0] == found[1] == found[2]
    assert "jitter" not in options or len({tuple(sorted({*shift})) for shift, _ in found[0]}) > 3
    assert "hidden_ratio" not in options or {2 in veil for _, veil in found[0]} == {False, True}


# ---------------------------------------------------------------------- hiding the image


def attention_of(
    pair: Pair, micro: SftBatch, monkeypatch: pytest.MonkeyPatch
) -> tuple[Tensor, Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """Attention (L, R, H, T, T) inside the step, its loss and its metrics."""
    probe, original = Probe(heads=True), lvr_sft.decoder_pass

    def probed(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs, probes=[probe])

    monkeypatch.setattr(lvr_sft, "decoder_pass", probed)
    with torch.no_grad():
        loss, metrics = sft_step(pair.ours, WEIGHT)(micro)
    monkeypatch.undo()
    return probe.stack(), loss, metrics


def test_hidden_images_get_no_attention_from_text(
    exact: Pair, examples: list[SftExample], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only <|lvr_start|> and the slots see the image: text can read it through the latents alone. An example without a
    span has no such way and keeps its image."""
    rows = ((0, 1), (2, 3))
    micro = packed(exact, examples, rows, hidden_ratio=1.0)
    weights, _, _ = attention_of(exact, micro, monkeypatch)
    open_weights, _, _ = attention_of(exact, packed(exact, examples, rows), monkeypatch)
    for r, row in enumerate(rows):
        column = 0
        for number in row:
            e = examples[number]
            stop, first = column + len(e), column + e.prompt_length
            own = torch.zeros_like(micro.image_RT[r])
            own[column:stop] = True
            image = micro.image_RT[r] & own
            seeing = micro.slot_RT[r] & own
            seeing[first] |= bool(len(e.targets))
            text = own & ~image & ~seeing
            assert bool(image.any())
            assert float(open_weights[:, r][:, :, text][..., image].sum()) > 0
            if len(e.targets):
                assert float(weights[:, r][:, :, text][..., image].abs().sum()) == 0
                assert float(weights[:, r][:, :, seeing][..., image].sum()) > 0
            else:
                assert torch.allclose(weights[:, r][:, :, text], open_weights[:, r][:, :, text], atol=1e-12)
            column = stop
    real = micro.real_RT[None, :, None].expand(weights.shape[:-1])
    assert torch.allclose(weights.sum(-1)[real], torch.ones((), dtype=torch.float64))


@ONE_FAMILY
def test_the_loop_can_name_the_examples_of_a_batch(exact: Pair, examples: list[SftExample]) -> None:
    micro = pack_rows(exact.ours, [examples])
    everything = ["row 0", "row 1", "row 2", "row 3"]
    assert loop.example_names(micro) == everything
    assert loop.example_names(BaseBatch(micro, torch.zeros(0), torch.zeros(0), {})) == everything


@ONE_FAMILY
def test_hiding_is_drawn_per_example(exact: Pair, examples: list[SftExample]) -> None:
    rows = [[examples[0]] * 40]
    assert pack_rows(exact.ours, rows).image_visibility_RT is None
    micro = pack_rows(exact.ours, rows, hidden_ratio=0.5, generator=torch.Generator().manual_seed(0))
    assert micro.image_visibility_RT is not None
    veiled = [bool((micro.image_visibility_RT[micro.segment_RT == number] == 2).any()) for number in range(40)]
    assert 10 < sum(veiled) < 30
    for number, hidden in enumerate(veiled):
        own = micro.segment_RT == number
        assert bool((micro.image_visibility_RT[own & micro.image_RT] == int(hidden)).all())
        text = int((own & ~micro.image_RT & ~micro.slot_RT).sum()) - 1  # all but <|lvr_start|>
        assert int((micro.image_visibility_RT[own] == 2).sum()) == (text if hidden else 0)
        assert not bool(micro.image_visibility_RT[own & micro.slot_RT].any())


def test_hiding_changes_the_loss(exact: Pair, examples: list[SftExample]) -> None:
    with torch.no_grad():
        losses = [
            float(sft_step(exact.ours, WEIGHT)(packed(exact, examples, ROWS["one row"], hidden_ratio=ratio))[0])
            for ratio in (0.0, 1.0)
        ]
    assert losses[0] != pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize("family", ["qwen2.5-vl"], indirect=True)
@pytest.mark.parametrize("variable_length", [False, True])
def test_the_host_does_not_wait_for_the_device(
    exact: Pair, examples: list[SftExample], variable_length: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the images and the end of the backward pass nothing reads a number from the device."""
    method = LvrSft(exact.ours, LvrSftConfig(gradient_checkpointing=False))
    micro = packed(exact, examples, ROWS["two rows"], variable_length=variable_length)
    visual = method.encode_images(micro.images)
    monkeypatch.setattr(method, "encode_images", lambda images: visual)
    with HostSyncs() as syncs:
        loss, _ = Step(method)(micro)
        loss.backward()
    exact.ours.model.zero_grad(set_to_none=True)
    # The one number is the check of the slots, which is left out on a GPU.
    assert dict(syncs.found) == {"_local_scalar_dense": 1} and syncs.operations > 100
