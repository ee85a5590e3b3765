"""Generated answers and the attention of their positions, against stock eager attention over the whole sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import reference
from helpers import ask, difference, tolerance
from realvr.backbone import Probe
from realvr.data.sample import Message, Sample
from realvr.diagnostics.measuring.attending import Attending, Generated, answer, content_spans, generated
from realvr.diagnostics.measuring.reading import Reading
from realvr.latent import prefill, think
from realvr.latent.group_rollout import Completion
from realvr.latent.sampling import Sampling

K = 3
ROWS = tolerance(1e-6)


def sample_of(number: int, choices: tuple[str, ...] = (), truth: str = "A") -> Sample:
    return Sample(f"s{number}", [], [Message("user", "What color is it?")], truth, choices=list(choices))


def reading_of(backbone: Any, latents: int) -> Reading:
    """Two prompts of different length and picture size."""
    long = "Which of the two shapes is larger, and which one is closer to the left border of the picture?"
    prompts = [backbone.prompt(ask(0, text="What color is it?")), backbone.prompt(ask(1, text=long))]
    batch = backbone.batch(prompts)
    visual = backbone.encode_images(batch.images)
    prompt, _ = prefill(backbone, batch, visual)
    after, z_BKD = think(backbone, prompt, latents)
    return Reading([sample_of(0), sample_of(1)], prompts, [], prompt, after, z_BKD, visual)


def said(backbone: Any, *texts: str) -> list[Generated]:
    found = []
    for number, text in enumerate(texts):
        ids = backbone.prompts.encode_text(text)[0]
        found.append(generated(backbone, sample_of(number), Completion(ids=ids, text=text, finish="length")))
    return found


@torch.no_grad()
def test_rows_are_those_of_stock_attention(pair: Any) -> None:
    backbone = pair.ours
    reading = reading_of(backbone, K)
    answers = said(backbone, "<answer>red</answer>", "It is: <answer>dark blue</answer>")
    looking = Attending(backbone, reading, answers)
    content, real = looking.content()
    before, predicts = looking.predicting()
    columns, shown = looking.image_columns()
    whole, latents = Probe(heads=True), Probe(rows=looking.latent_rows(), columns=columns)
    own, first = Probe(rows=content, columns=looking.slots), Probe(rows=before, columns=looking.slots)
    looking.look([whole, latents, own, first])

    sequence = pair.splice(pair.begin(reading.prompts), reading.latents_RKD)
    size = max(len(one.ids) for one in answers)
    ids = torch.tensor([one.ids + [0] * (size - len(one.ids)) for one in answers])
    mask = torch.tensor([[1] * len(one.ids) + [0] * (size - len(one.ids)) for one in answers])
    eager = reference.attentions(pair.stock, reference.append(pair.stock, sequence, ids, mask=mask))
    start = sequence.ids.shape[1]  # first column of the answers
    assert predicts.all() and looking.first + looking.before == start
    for row, one in enumerate(answers):
        last = looking.before + len(one.ids)
        assert difference(whole.stack()[:, row, :, :last], eager[:, row, :, looking.first :][:, :, :last]) <= ROWS
        slots = [looking.first + 1 + t for t in range(K)]
        assert slots == (sequence.ids[row] == backbone.markers.slot).nonzero()[:, 0].tolist()
        text = "".join(backbone.tokenizer.decode([one.ids[i]]) for i in one.content)
        assert ("red", "dark blue")[row] in text and "answer" not in text
        queries = [start + i for i in one.content]
        right = eager[:, row].mean(1)[:, queries][..., slots]
        assert difference(own.stack()[:, row][:, real[row]], right) <= ROWS
        assert difference(first.stack()[:, row, 0], eager[:, row].mean(1)[:, queries[0] - 1][..., slots]) <= ROWS
        image = sequence.image[row].nonzero()[:, 0].tolist()
        assert columns[row][shown[row]].tolist() == image
        right = eager[:, row].mean(1)[:, slots][..., image]
        assert difference(latents.stack()[:, row][..., shown[row]], right) <= ROWS and float(right.max()) > 1e-3
    assert difference(own.stack()[:, 0], first.stack()[:, 0].expand_as(own.stack()[:, 0])) > 1e-6  # not the same query


@torch.no_grad()
def test_without_a_span_the_prompt_predicts_the_first_token(pair: Any) -> None:
    backbone = pair.ours
    reading = reading_of(backbone, 0)
    answers = said(backbone, "red", "<answer>blue</answer>")
    looking = Attending(backbone, reading, answers)
    assert looking.before == 0 and looking.latent_rows().shape == (2, 0)
    assert looking.predicting()[1][:, 0].tolist() == [False, True]
    assert looking.predicting_in_prompt().tolist() == [True, False]
    whole, last = Probe(heads=True), Probe(rows=torch.full((2, 1), looking.first - 1), heads=True)
    looking.look([whole])
    looking.look_from_prompt([last])
    sequence = pair.begin(reading.prompts)
    eager = reference.attentions(pair.stock, reference.append(pair.stock, sequence, torch.tensor([answers[1].ids] * 2)))
    assert difference(whole.stack()[:, 1], eager[:, 1, :, looking.first :]) <= ROWS
    assert difference(last.stack()[:, :, :, 0], eager[:, :, :, looking.first - 1, : looking.first]) <= ROWS


@torch.no_grad()
def test_answers_are_greedy_and_an_empty_reply_has_no_content(pair: Any) -> None:
    backbone = pair.ours
    reading = reading_of(backbone, K)
    hot = answer(backbone, reading, Sampling(temperature=1.5, max_new=6), K)
    assert [one.ids for one in hot] == [one.ids for one in answer(backbone, reading, Sampling(max_new=6), K)]
    sequence = pair.splice(pair.begin(reading.prompts), reading.latents_RKD)
    logits = pair.stock.lm_head(reference.hidden(pair.stock, sequence)[:, -1])
    logits[:, backbone.forbidden_ids()] = -torch.inf
    assert [one.ids[:1] for one in hot] == [[int(i)] if i not in backbone.eos_ids else [] for i in logits.argmax(-1)]
    end = backbone.eos_ids[0]
    empty = generated(backbone, sample_of(0), Completion(ids=[end], text="", finish="eos"))
    assert empty.ids == [] and empty.content == [] and not empty.block and not empty.correct
    nothing = Attending(backbone, reading_of(backbone, 0), [empty, empty])
    assert nothing.queries == 0 and nothing.look([Probe()]) is nothing.reading.prompt
    assert not nothing.predicting()[1].any() and not nothing.predicting_in_prompt().any()


@pytest.mark.parametrize(
    ("text", "choices", "spell_out", "marked"),
    [
        ("<answer>B</answer>", (), False, ["B"]),
        ("So: <answer>\n dark blue </answer>", (), False, ["dark blue"]),
        ("pink\n<answer>A</answer>", ("pink", "red"), True, ["pink", "A"]),
        ("It is\n pink \n<answer>A</answer>", ("pink", "red"), True, ["pink", "A"]),
        ("pink\n<answer>A</answer>", ("pink", "red"), False, ["A"]),
        ("I think so\n<answer>A</answer>", ("pink", "red"), True, ["A"]),
        ("<answer>A</answer> or <answer>B</answer>", (), False, ["A"]),
        ("<answer> </answer>", (), False, []),
        ("<answer>B", (), False, []),
        ("B", (), False, []),
    ],
)
def test_what_of_a_reply_is_the_answer(text: str, choices: tuple[str, ...], spell_out: bool, marked: list[str]) -> None:
    assert [text[a:b] for a, b in content_spans(text, choices, spell_out)] == marked


def test_a_reply_without_a_block_counts_whole_and_is_judged_by_the_parser(backbone: Any) -> None:
    def one(text: str) -> Generated:
        ids = backbone.prompts.encode_text(text)[0]
        return generated(backbone, sample_of(0, ("red", "blue"), "B"), Completion(ids=ids, text=text, finish="length"))

    plain = one("The answer is B.")
    assert not plain.block and plain.content == list(range(len(plain.ids))) and plain.correct
    wrong = one("<answer>A</answer>")
    assert wrong.block and not wrong.correct and 0 < len(wrong.content) < len(wrong.ids)
    unread = one("No idea")
    assert unread.extracted is None and not unread.correct and unread.content
