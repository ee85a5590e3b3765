"""Two small models made on purpose: one answers from its latent span alone, one from its picture alone.

The exchange must tell them apart, and counterfactual pairs must not: both answer every picture correctly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import ImageOps

from pair_cases import world_pairs
from pair_reference import question
from realvr.backbone import Backbone
from realvr.data.sample import ImageRef
from realvr.diagnostics.counterfactual import CounterfactualSettings
from realvr.diagnostics.counterfactual_summary import summarise_pairs
from realvr.diagnostics.exchange_summary import summarise_exchange
from realvr.diagnostics.measuring.asking import ask_pairs
from realvr.diagnostics.measuring.exchange import ExchangeOptions, exchange_pairs
from realvr.diagnostics.pairs import Pair, unrelated
from realvr.evaluation.model_responder import ModelResponder
from realvr.latent import prefill, score, splice, think
from realvr.latent.sampling import Sampling

K = 2
SHORT = Sampling(temperature=0.0, max_new=12)


def inverted_pairs(count: int) -> list[Pair]:
    """Pairs whose edit is hard to miss: all colors inverted."""
    found = []
    for one in [one for one in world_pairs(2) if one.changed][:count]:
        picture = ImageOps.invert(one.original.images[0].open())
        edited = replace(one.edited, images=[ImageRef.from_image(f"{one.id}-inverted", picture)])
        found.append(Pair(one.edit, one.original, edited))
    return found


def teach(backbone: Backbone, pairs: list[Pair], from_span: bool) -> None:
    """Until the answer after any mix of picture and span is that of the span (or that of the picture)."""
    views = [view for one in pairs for view in one.views]
    batch = backbone.batch([backbone.prompt([question(view)]) for view in views])
    texts = [f"<answer>{view.answer}</answer>" for view in views]
    ids = torch.tensor([[*backbone.prompts.encode_text(text)[0], backbone.end_of_turn_id] for text in texts])
    own = list(range(len(views)))
    other = [row ^ 1 for row in own]
    weights = [weight for weight in backbone.model.parameters() if weight.requires_grad]
    optimizer = torch.optim.Adam(weights, lr=2e-3)
    for _ in range(200):
        state, _ = prefill(backbone, batch)
        _, z_BKD = think(backbone, state, K)
        loss = torch.zeros(())
        for rows in (own, other):
            after, _ = splice(backbone, state, z_BKD[rows])
            logp, _, _ = score(backbone, after, ids[rows if from_span else own][:, None])
            loss = loss - logp.sum() / len(views)
        if loss.item() < 0.1:
            return
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
    raise AssertionError(f"the model did not learn: loss {loss.item():.2f}")


@pytest.mark.parametrize("from_span", [True, False], ids=["span", "picture"])
def test_exchange_tells_where_the_answer_comes_from(build_tiny: Callable[[str], Path], from_span: bool) -> None:
    backbone = Backbone.load(build_tiny("qwen2.5-vl"), dtype=torch.float32, device="cpu")
    pairs = inverted_pairs(3)
    teach(backbone, pairs, from_span)
    variants = CounterfactualSettings(protocol=("separate",)).variants(K)
    records = ask_pairs(ModelResponder(backbone, SHORT), pairs, variants, K)
    answers: Any = summarise_pairs(records)["protocols"]["separate"]["all"]
    assert answers["strict_correct_flip"]["count"] == answers["changed"] == 3
    found = summarise_exchange(
        exchange_pairs(backbone, pairs, unrelated(pairs), ExchangeOptions(latents=K, sampling=SHORT))
    )
    rows = {(row["condition"], row["selector"], row["k"]): row for row in found["rows"]}
    sham, full = rows["sham", "full", K], rows["swap", "full", K]
    assert sham["recipient_frequency"]["rate"] == 1.0 and sham["donor_frequency"]["rate"] == 0.0
    assert full["parse_coverage"]["rate"] == 1.0
    if from_span:
        assert full["donor_lift"]["mean"] == 100.0 and full["donor_frequency"]["rate"] == 1.0
        assert full["margin_shift"]["low"] > 3
        assert rows["unrelated", "full", K]["donor_lift"]["mean"] < 100.0
    else:
        assert full["donor_lift"]["mean"] == 0.0 and full["recipient_frequency"]["rate"] == 1.0
        assert abs(full["margin_shift"]["mean"]) < 1
