"""Answers to both views of pairs and the distances between them, from one prefill and one span of each view."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from realvr.answers import JUDGE, parser
from realvr.diagnostics.measuring.views import EDITED, ORIGINAL, Views, measure_distances, read_views
from realvr.diagnostics.model import Model
from realvr.diagnostics.pairs import Pair
from realvr.latent.group_rollout import decode
from realvr.latent.span import span_tokens
from realvr.runs.journal import Record


@torch.no_grad()
def sensitivity_pairs(
    model: Model, pairs: Sequence[Pair], controls: Sequence[Pair | None], policy: str
) -> list[Record]:
    """One record for each pair of a batch; a pair that cannot be read has no answers."""
    views = read_views(model.backbone, pairs, controls, model.latents)
    replies = _replies(model, views)
    rows = {pair.id: own for pair, own in zip(views.pairs, views.rows, strict=True)}
    by_id = {pair.id: pair for pair in pairs}
    reader = parser(policy, "evaluation")
    records = []
    for distances in measure_distances(views):
        pair = by_id[distances["pair"]]
        own = rows.get(pair.id)
        texts = [] if own is None else [replies[own[view]] for view in (ORIGINAL, EDITED)]
        extracted = [reader.read(text, pair.original.choices) for text in texts] or [None, None]
        records.append(
            distances
            | {
                "latents": model.latents,
                "per_slot": None if own is None else _per_slot(views, own[ORIGINAL], own[EDITED]),
                "truths": list(pair.truths),
                "extracted": extracted,
                "texts": texts,
                "choices": list(pair.original.choices),
                "errors": [distances["error"]] * 2,
                "policy": policy,
                "parser": str(reader),
                "judge": JUDGE,
            }
        )
    return records


def _replies(model: Model, views: Views) -> list[str]:
    """Reply to every row; those of unrelated pictures are decoded too where a row is shared, else not."""
    if views.after is None:
        return []
    asked = sorted({rows[view] for rows in views.rows for view in (ORIGINAL, EDITED)})
    room = model.backbone.context_length - span_tokens(model.latents)
    limits = [min(model.sampling.max_new, room - len(views.prompts[row])) for row in asked]
    state = views.after.select(torch.tensor(asked, device=model.backbone.device))
    groups = decode(model.backbone, state, 1, model.sampling, 0, limits)
    texts = dict(zip(asked, (group[0].text for group in groups), strict=True))
    return [texts.get(row, "") for row in range(len(views.prompts))]


def _per_slot(views: Views, first: int, second: int) -> float | None:
    """Mean over the slots of the cosine distance between the latents at the same place; None without a span."""
    assert views.latents_RKD is not None
    if not views.latents_RKD.shape[1]:
        return None
    one, other = views.latents_RKD[[first, second]].double()
    return max(0.0, 1.0 - float(F.cosine_similarity(one, other, dim=-1).mean()))
