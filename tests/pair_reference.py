"""What a pair evaluation must give, slowly: stock models over whole sequences, greedy decoding without a cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import reference
from helpers import DEVICE
from pair import Pair as Models
from realvr.backbone import Prompt, Turn
from realvr.data.sample import Sample


def question(sample: Sample, pictures: Sample | None = None) -> Turn:
    """The user's turn, worded here: question, lettered options, instruction."""
    lines = [sample.question, *(f"({letter}) {text}" for letter, text in zip("ABCDEFGH", sample.choices, strict=False))]
    letters = "Answer with the letter of the option inside <answer> and </answer>."
    lines.append(letters if sample.choices else "Put the final answer inside <answer> and </answer>.")
    return Turn("user", "\n".join(lines), [image.open() for image in (pictures or sample).images])


def greedy(models: Models, sequence: reference.Sequence, count: int) -> list[int]:
    """At most ``count`` ids after the sequence, up to the end-of-sequence token (not included)."""
    forbidden = models.ours.forbidden_ids().to(DEVICE)
    found: list[int] = []
    for _ in range(count):
        logits = models.stock.lm_head(reference.hidden(models.stock, sequence)[:, -1])
        token = int(logits.index_fill(-1, forbidden, float("-inf")).argmax())
        if token in models.ours.eos_ids:
            break
        found.append(token)
        sequence = reference.append(models.stock, sequence, torch.tensor([[token]], device=DEVICE))
    return found


def two_turns(
    models: Models, original: Sample, edited: Sample, latents: int, count: int, keep: bool
) -> tuple[list[int], list[int]]:
    """Reply ids of both turns. The second conversation is put together here, id by id."""
    ours = models.ours
    first = ours.prompt([question(original)])
    sequence, z = models.think(models.begin([first]), latents)
    reply = greedy(models, sequence, count)
    plain = ours.prompt([question(original), Turn("assistant", ids=reply), question(edited)])
    said = [*first.ids.tolist(), *reply]
    assert plain.ids.tolist()[: len(said)] == said
    rest = plain.ids.tolist()[len(said) :]
    markers = ours.markers
    span = [markers.start, *[markers.slot] * latents, markers.end] if keep else []
    ids = torch.tensor([*first.ids.tolist(), *span, *reply, *rest])
    whole = Prompt(ids, plain.images, (z[0],) if keep else ())
    sequence, _ = models.think(models.begin([whole]), latents)
    return reply, greedy(models, sequence, count)


def content(models: Models, answer: str) -> tuple[list[int], list[int]]:
    """Ids of the formatted answer and the places of those that hold a character of the answer, found by decoding."""
    ids = models.ours.tokenizer(f"<answer>{answer}</answer>", add_special_tokens=False)["input_ids"]
    ends = [len(models.ours.tokenizer.decode(ids[: n + 1])) for n in range(len(ids))]
    first, last = len("<answer>"), len("<answer>") + len(answer)
    starts = [0, *ends[:-1]]
    return ids, [n for n in range(len(ids)) if starts[n] < last and ends[n] > first]


def mean_logprob(models: Models, sequence: reference.Sequence, answer: str) -> float:
    """Teacher-forced log-probability of the answer's content tokens after the sequence, mean."""
    ids, places = content(models, answer)
    found = reference.answer_logprobs(models.stock, sequence, torch.tensor([ids], device=DEVICE))
    return float(found[0, places].double().mean())


def readout(models: Models, sequence: reference.Sequence, answer: str, slots: int) -> Tensor:
    """Mean attention (K,) of the content tokens to the last ``slots`` latent slots, over layers, heads and tokens."""
    ids, places = content(models, answer)
    columns = (sequence.ids[0] == models.ours.markers.slot).nonzero()[-slots:, 0]
    longer = reference.append(models.stock, sequence, torch.tensor([ids], device=DEVICE))
    eager: Any = reference.attentions(models.stock, longer)  # (L, 1, H, T, T)
    rows = [sequence.ids.shape[1] + place for place in places]
    return eager[:, 0][:, :, rows][..., columns].double().mean((0, 1, 2))
