"""Fixed spans and spans in earlier turns: the rows of training hold what inference feeds, column by column, and the
step equals stock forwards of single examples.

The inference side is the two-turn protocol of counterfactual pairs with the first span kept, recorded at the decoder's
door.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import reference
from pair import Pair, gradients, relative
from pair_cases import world_pairs
from realvr.backbone import Backbone, Prompt
from realvr.backbone.samples import conversation
from realvr.data.sample import Box, Message, Sample
from realvr.data.wording import asked, formatted, readout_text, response_text, spelled_out, spelled_reply
from realvr.diagnostics import pairs as view_pairs
from realvr.diagnostics.measuring.asking import ask_pairs
from realvr.evaluation.model_responder import ModelResponder
from realvr.evaluation.responder import Plan, Reply, Request
from realvr.latent.sampling import Sampling
from realvr.training.examples import Encoder
from realvr.training.method import Step
from realvr.training.methods.lvr_sft import LvrSft, LvrSftConfig
from realvr.training.sft_batch import SftBatch, SftExample, pack_rows
from realvr.training.targets import EvidenceConfig

LATENTS = 3
TOLERANCE = 1e-10
KEPT: dict[str, Any] = {"span": "fixed", "without_boxes": "whole-image", "earlier_spans": True}
CELLS = [(0.0, 0.0, 0.2, 0.2), (0.6, 0.1, 0.7, 0.2), (0.4, 0.8, 0.5, 0.9)]


@pytest.fixture(autouse=True)
def _wide_softmax() -> Iterator[None]:
    with reference.wide_softmax():
        yield


@pytest.fixture(scope="module")
def pair_of_views() -> view_pairs.Pair:
    return world_pairs(1)[0]


@pytest.fixture(params=[False, True], ids=["letter", "words"])
def backbone(exact: Pair, request: pytest.FixtureRequest) -> Iterator[Backbone]:
    ours = exact.ours
    before = ours.latents, ours.spell_out
    ours.latents, ours.spell_out = LATENTS, request.param
    yield ours
    ours.latents, ours.spell_out = before


def sequel(pair: view_pairs.Pair, **changes: Any) -> Sample:
    """Both views in one conversation, as the split ``sequels`` writes it."""
    first, second = pair.views
    turns = [
        Message("user", asked(first.question, first.choices), (0,)),
        Message("assistant", formatted(first.answer)),
        Message("user", second.question, (1,)),
    ]
    row = replace(
        second,
        images=[*first.images, *second.images],
        turns=turns,
        boxes=[Box(1, cell) for cell in CELLS[:2]],
        earlier_boxes=[[Box(0, cell) for cell in CELLS]],
    )
    return replace(row, **changes)


# ---------------------------------------------------------------------- what inference feeds


class Learned(ModelResponder):
    """The model, as if it had learned the first reply: real latents, and the words that training shows."""

    def reply(self, requests: Sequence[Request], plans: Sequence[Plan]) -> list[list[Reply]]:
        found = super().reply(requests, plans)
        for request, reply in zip(requests, found[0], strict=True):
            text, _ = readout_text(request.sample.answer, request.sample.choices, self.backbone.spell_out)
            reply.ids, reply.text = self.backbone.prompts.encode_text(text)[0], text
        return found


def second_turn(backbone: Backbone, pair: view_pairs.Pair) -> list[tuple[Tensor, Tensor]]:
    """Inputs (T, D) and positions (3, T) of every pass over the second turn, up to the first word of its reply."""
    seen: list[tuple[Tensor, Tensor]] = []

    def record(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        positions = kwargs["position_ids"]
        flat = positions[:, 0] if positions.ndim == 3 else positions[:1].expand(3, -1)
        seen.append((kwargs["inputs_embeds"][0].detach(), flat))

    responder = Learned(backbone, Sampling(temperature=0.0, max_new=1))
    hook = backbone.decoder.register_forward_pre_hook(record, with_kwargs=True)
    try:
        ask_pairs(responder, [pair], [("two_turn", "keep")], LATENTS)
    finally:
        hook.remove()
    passes = LATENTS + 2  # the prompt, <|lvr_start|>, and a pass for each latent
    later = [place for place, (embeds, _) in enumerate(seen) if len(embeds) > 8][1]
    return seen[later : later + passes]


def inputs(backbone: Backbone, batch: SftBatch) -> tuple[Tensor, Tensor]:
    """Inputs (T, D) and positions (3, T) of the only row of a training step."""
    seen: list[tuple[Tensor, Tensor]] = []

    def record(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        positions = kwargs["position_ids"]
        seen.append(
            (kwargs["inputs_embeds"][0], positions[:, 0] if positions.ndim == 3 else positions[:1].expand(3, -1))
        )

    hook = backbone.decoder.register_forward_pre_hook(record, with_kwargs=True)
    try:
        with torch.no_grad():
            step(backbone)(batch.to(backbone.device))
    finally:
        hook.remove()
    return seen[0]


def step(backbone: Backbone) -> Step:
    return Step(LvrSft(backbone, LvrSftConfig(gradient_checkpointing=False)))


def encode(backbone: Backbone, sample: Sample, **options: Any) -> SftExample:
    respond = spelled_out if backbone.spell_out else response_text
    example = Encoder(backbone, 4096, respond=respond, evidence=EvidenceConfig(**options)).sequence(sample)
    assert example is not None
    return example


def test_rows_hold_what_a_kept_span_feeds_at_inference(backbone: Backbone, pair_of_views: view_pairs.Pair) -> None:
    fed = second_turn(backbone, pair_of_views)
    example = encode(backbone, sequel(pair_of_views), **KEPT)
    embeds, positions = inputs(backbone, pack_rows(backbone, [[example]]))
    stop = example.prompt_length + LATENTS + 2  # up to and with <|lvr_end|>
    asked_embeds, asked_positions = torch.cat([e for e, _ in fed]), torch.cat([p for _, p in fed], dim=1)
    assert torch.equal(positions[:, :stop], asked_positions)
    slot = example.prompt.ids[:stop] == backbone.markers.slot
    assert slot.sum() == 2 * LATENTS and int(slot.nonzero()[0]) < example.prompt_length
    assert torch.equal(embeds[:stop][~slot], asked_embeds[~slot]), "the same words and pictures in the same columns"
    assert not torch.equal(embeds[:stop][slot], asked_embeds[slot]), "targets there, latents here"


def test_a_single_question_too(backbone: Backbone, pair_of_views: view_pairs.Pair) -> None:
    """K, and every column of the span, with boxes and without."""
    question = pair_of_views.original
    for boxes in ([], [Box(0, CELLS[0])], [Box(0, cell) for cell in CELLS]):
        example = encode(backbone, replace(question, boxes=boxes), span="fixed", without_boxes="whole-image")
        images = [backbone.processor(image.open()) for image in question.images]
        prompt = backbone.prompt(conversation(question, images))
        markers = backbone.markers
        span = [markers.start, *[markers.slot] * LATENTS, markers.end]
        assert example.prompt.ids[: example.prompt_length].tolist() == prompt.ids.tolist()
        assert example.prompt.ids[example.prompt_length :][: len(span)].tolist() == span
        assert len(example.targets) == LATENTS


def test_without_earlier_spans_the_earlier_turn_is_text(backbone: Backbone, pair_of_views: view_pairs.Pair) -> None:
    example = encode(backbone, sequel(pair_of_views), span="fixed")
    slots = (example.prompt.ids == backbone.markers.slot).nonzero()[:, 0]
    assert len(slots) == LATENTS and int(slots[0]) == example.prompt_length + 1 and example.earlier == 0


def test_an_earlier_letter_is_spelled_out() -> None:
    question = asked("Which one (A) or (B)?", ["a red cup", "blue"])
    assert spelled_reply(question, "<answer>B</answer>") == "blue\n<answer>B</answer>"
    assert spelled_reply(question, "<answer>A</answer>") == "a red cup\n<answer>A</answer>"
    for other in ("<answer>C</answer>", "It is <answer>B</answer>", "blue", "<answer>blue</answer>"):
        assert spelled_reply(question, other) == other
    assert spelled_reply("What color?", "<answer>B</answer>") == "<answer>B</answer>"


# ---------------------------------------------------------------------- the step against stock


def slot_inputs(example: SftExample, visual: Tensor) -> Tensor:
    """Targets (slots, D) by a loop."""
    rows = []
    for target in example.targets.tolist():
        if target < len(visual):
            rows.append(visual[target])
        else:
            members = [visual[token] for token in example.pools[target - len(visual)].tolist()]
            rows.append(sum(members) / len(members))
    return torch.stack(rows).detach()


def stock_losses(pair: Pair, example: SftExample, shift: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Sum of cross-entropies over the last reply, and the reconstruction loss over all spans, by loops."""
    sequence = pair.begin([Prompt(example.prompt.ids, example.prompt.images)])
    targets = slot_inputs(example, sequence.embeds[sequence.image])
    slots = (example.prompt.ids == pair.ours.markers.slot).nonzero()[:, 0].tolist()
    embeds = sequence.embeds.clone()
    for column, target in zip(slots, targets, strict=True):
        embeds[0, column] = target
    sequence = replace(sequence, embeds=embeds)
    at = None if shift is None else reference.positions(pair.stock, sequence) + shift.to(embeds.device)
    hidden = reference.hidden(pair.stock, sequence, at)[0]
    ce = hidden.sum() * 0
    for column in range(example.prompt_length, len(example)):
        if column not in slots:
            ce = ce - torch.log_softmax(pair.stock.lm_head(hidden[column - 1]), -1)[example.prompt.ids[column]]
    errors = [(hidden[column - 1] - target).square().mean() for column, target in zip(slots, targets, strict=True)]
    return ce, sum(errors) / len(errors)


@pytest.fixture
def examples(exact: Pair, pair_of_views: view_pairs.Pair) -> Iterator[list[SftExample]]:
    """A conversation with two spans, one with means, a question about the whole image, a trail in given order."""
    before, exact.ours.latents = exact.ours.latents, LATENTS
    question = pair_of_views.edited
    whole = Box(0, (0.0, 0.0, 1.0, 1.0))
    yield [
        encode(exact.ours, sequel(pair_of_views), **KEPT),
        encode(exact.ours, sequel(pair_of_views, boxes=[], earlier_boxes=[]), **KEPT),
        encode(exact.ours, replace(question, boxes=[Box(0, CELLS[2]), whole]), span="fixed", target="mean"),
        encode(exact.ours, replace(question, boxes=[Box(0, c) for c in CELLS[::-1]]), evidence_order="given"),
    ]
    exact.ours.latents = before


@pytest.mark.parametrize("rows", [((0, 1, 2, 3),), ((3, 0), (2, 1)), ((0,), (1,), (2,), (3,))])
def test_packed_rows_equal_stock(exact: Pair, examples: list[SftExample], rows: Any) -> None:
    """Loss and every gradient, with means, repeated targets and earlier spans among them."""
    batch = pack_rows(exact.ours, [[examples[i] for i in row] for row in rows]).to(exact.ours.device)
    batch.tokens_total, batch.targets_total = float(len(batch.labels_M)), float(len(examples))
    loss, _ = step(exact.ours)(batch)
    parts = [stock_losses(exact, example) for example in examples]
    expected = sum(ce for ce, _ in parts) / batch.tokens_total + 0.1 * sum(rec for _, rec in parts) / len(parts)
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=TOLERANCE)
    assert relative(gradients(exact.ours.model, loss), gradients(exact.stock, expected)) <= TOLERANCE


def test_jitter_leaves_gaps_around_every_span(exact: Pair, examples: list[SftExample]) -> None:
    example, markers = examples[0], exact.ours.markers
    plain = pack_rows(exact.ours, [[example]])
    batch = pack_rows(exact.ours, [[example]], jitter=30, generator=torch.Generator().manual_seed(3))
    shift = batch.positions - plain.positions
    shift = shift[0, 0] if shift.ndim == 3 else shift[0]
    jumps = (shift.diff(prepend=shift.new_zeros(1)) != 0).nonzero()[:, 0].tolist()
    ids = example.prompt.ids
    assert jumps == ((ids == markers.start) | (ids == markers.end)).nonzero()[:, 0].tolist() and len(jumps) == 4
    with torch.no_grad():
        batch = batch.to(exact.ours.device)
        batch.tokens_total, batch.targets_total = float(len(batch.labels_M)), 1.0
        loss, _ = step(exact.ours)(batch)
        ce, rec = stock_losses(exact, example, shift)
        assert float(loss) == pytest.approx(float(ce / batch.tokens_total + 0.1 * rec), rel=TOLERANCE)


def test_a_veil_covers_the_earlier_turn_too(exact: Pair, examples: list[SftExample]) -> None:
    example, markers = examples[0], exact.ours.markers
    batch = pack_rows(exact.ours, [[example]], hidden_ratio=1.0)
    assert batch.image_visibility_RT is not None
    ids = example.prompt.ids
    seeing = (ids == markers.start) | (ids == markers.slot)
    image = batch.image_RT[0]
    assert batch.image_visibility_RT[0].tolist() == torch.where(seeing, 0, torch.where(image, 1, 2)).tolist()
    no_last_span = replace(example, targets=example.targets[:LATENTS], earlier=LATENTS, _layout={})
    assert pack_rows(exact.ours, [[no_last_span]], hidden_ratio=1.0).image_visibility_RT is None


def test_metrics_count_the_first_latent_of_every_span(exact: Pair, examples: list[SftExample]) -> None:
    batch = pack_rows(exact.ours, [examples]).to(exact.ours.device)
    with torch.no_grad():
        _, metrics = step(exact.ours)(batch)
    spans = sum(int((example.prompt.ids == exact.ours.markers.start).sum()) for example in examples)
    assert float(metrics["latents/cos_first"][1]) == spans == 6
    assert float(metrics["latents/cos_target"][1]) == sum(len(example.targets) for example in examples)
