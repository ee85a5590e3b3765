"""States of every sample for probes and clustering; `realvr.diagnostics.task_structure` says what is asked and why."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from realvr.diagnostics.measuring.attending import Generated, answer
from realvr.diagnostics.measuring.reading import Reading
from realvr.diagnostics.model import Model
from realvr.diagnostics.states import Rows
from realvr.latent.span import extend


@torch.no_grad()
def states_of(model: Model, reading: Reading) -> tuple[dict[str, Rows], list[bool]]:
    """Rows (n, D) of each representation, a row for each sample that was read, and which of them have an answer.

    ``final`` of a sample without an answer is zero, and does not count.
    """
    if reading.prompt is None or reading.after is None or reading.latents_RKD is None:
        return {}, []
    answers = answer(model.backbone, reading, model.sampling, model.latents)
    found = {"prompt": reading.prompt.last_BD, "final": _predicting(model, reading, answers)}
    if model.latents:
        found |= {"mean": reading.latents_RKD.float().mean(1), "last": reading.latents_RKD[:, -1]}
    return {name: rows.float().cpu().numpy().astype(np.float32) for name, rows in found.items()}, [
        bool(one.content) for one in answers
    ]


def _predicting(model: Model, reading: Reading, answers: Sequence[Generated]) -> Tensor:
    """(n, D): the hidden state that predicts the first content token of each generated answer."""
    assert reading.after is not None
    before = [one.ids[: one.content[0]] if one.content else [] for one in answers]
    size = max(map(len, before))
    after_BD = reading.after.last_BD
    if size:
        device = model.backbone.device
        ids_BS = torch.tensor([ids + [0] * (size - len(ids)) for ids in before], device=device)
        real_BS = torch.tensor([[True] * len(ids) + [False] * (size - len(ids)) for ids in before], device=device)
        state, _ = extend(model.backbone, reading.after, ids_BS, real_BS=None if bool(real_BS.all()) else real_BS)
        after_BD = state.last_BD  # a row without a token keeps the state that it had
    has_B1 = torch.tensor([bool(one.content) for one in answers], device=after_BD.device)[:, None]
    return torch.where(has_B1, after_BD, torch.zeros_like(after_BD))
