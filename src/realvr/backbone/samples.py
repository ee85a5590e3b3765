"""Samples as conversations and answers as tokens: what training, evaluation and diagnostics show a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from realvr.backbone.backbone import Backbone
from realvr.backbone.types import Turn
from realvr.data.sample import Message, Sample
from realvr.data.wording import asked_turns, readout_text


def conversation(sample: Sample, images: Sequence[Any], messages: Sequence[Message] | None = None) -> list[Turn]:
    """The sample's turns with its images; the last user turn carries options and instruction. ``messages`` words it
    otherwise."""
    asked = asked_turns(sample) if messages is None else messages
    return [Turn(turn.role, turn.text, [images[k] for k in turn.images]) for turn in asked]


def answer_tokens(backbone: Backbone, answer: str, choices: Sequence[str] = ()) -> tuple[list[int], list[bool]]:
    """Ids of ``Fmt(y)`` and which of them are ``J(y)``: those whose characters overlap the answer itself."""
    text, spans = readout_text(answer, choices, backbone.spell_out)
    ids, offsets = backbone.prompts.encode_text(text)
    return ids, [any(start < stop and end > first for first, stop in spans) for start, end in offsets]


def pad_answers(groups: Sequence[Sequence[tuple[list[int], list[bool]]]]) -> tuple[Tensor, Tensor, Tensor]:
    """(B, Y, S) ids, which are real, which are content. A prompt with fewer answers has rows without a real token."""
    most = max(len(group) for group in groups)
    size = max(len(ids) for group in groups for ids, _ in group)
    ids_BYS = torch.zeros(len(groups), most, size, dtype=torch.long)
    real, content = torch.zeros_like(ids_BYS, dtype=torch.bool), torch.zeros_like(ids_BYS, dtype=torch.bool)
    for b, group in enumerate(groups):
        for y, (ids, inside) in enumerate(group):
            ids_BYS[b, y, : len(ids)] = torch.tensor(ids)
            real[b, y, : len(ids)] = True
            content[b, y, : len(ids)] = torch.tensor(inside)
    return ids_BYS, real, content
