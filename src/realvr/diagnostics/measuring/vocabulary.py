"""Latents under the LM head; `realvr.diagnostics.vocabulary` says what is asked and why."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from realvr.backbone.backbone import Backbone
from realvr.backbone.samples import answer_tokens, pad_answers
from realvr.data.sample import Sample
from realvr.diagnostics.measuring.reading import Reading
from realvr.diagnostics.model import Model
from realvr.diagnostics.numbers import hashed, short
from realvr.latent.span import extend, log_softmax_rows
from realvr.maths.evidence import unit


class Vocabulary:
    """The head's rows: what they are called, which are special, and which the latents are compared with."""

    def __init__(self, backbone: Backbone) -> None:
        self.backbone = backbone

    @cached_property
    def special(self) -> Tensor:
        """Ids that are no text: control tokens, the latent markers, and rows beyond the tokenizer."""
        tokenizer, rows = self.backbone.tokenizer, self.backbone.model.lm_head.out_features
        ids = {int(one) for one in tokenizer.all_special_ids if one is not None}
        ids |= {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        ids |= set(self.backbone.forbidden_ids().tolist())
        return torch.tensor(sorted(one for one in ids if one < rows), device=self.backbone.device)

    @property
    def end(self) -> int | None:
        """The row of ``<|lvr_end|>``; None where the checkpoint has none and the row that was added is untrained."""
        return None if self.backbone.markers_added else self.backbone.markers.end

    @cached_property
    def opening(self) -> int | None:
        """The token ``<``, with which the marker begins where a tokenizer spells it; None where it has no such
        token."""
        ids = self.backbone.prompts.encode_text("<")[0]
        return ids[0] if len(ids) == 1 else None

    @cached_property
    def _words(self) -> np.ndarray[Any, Any]:
        rows = np.arange(self.backbone.model.lm_head.out_features)
        return np.setdiff1d(rows, self.special.cpu().numpy())

    def drawn(self, count: int, seed: int, name: str) -> Tensor:
        """Rows of text tokens, by the seed and the sample's id alone."""
        rng = np.random.default_rng([seed, hashed(name)])
        return torch.from_numpy(rng.choice(self._words, count)).to(self.backbone.device)

    def text(self, token: int) -> str:
        """What a row stands for; one beyond the tokenizer is named by its number."""
        if token >= len(self.backbone.tokenizer):
            return f"[row {token}]"
        return str(self.backbone.tokenizer.decode([token], skip_special_tokens=False))

    def top(self, hidden_ND: Tensor, masked: bool) -> tuple[list[int], list[float]]:
        """The most probable row of each vector, and its probability. The logits of a chunk are gone with it."""
        forbidden = self.special if masked else None
        chunk = max(64, 2**24 // self.backbone.model.lm_head.out_features)
        found = [log_softmax_rows(self.backbone, rows, forbidden=forbidden).max(-1) for rows in hidden_ND.split(chunk)]
        if not found:
            return [], []
        best = torch.cat([one.values for one in found]).exp()
        return torch.cat([one.indices for one in found]).tolist(), best.double().tolist()

    def cosine(self, z_KD: Tensor, rows_M: Tensor) -> Tensor:
        """(K, M): cosines of latents to rows of the unembedding."""
        head = self.backbone.model.lm_head.weight
        rows_MD = head[rows_M.to(head.device)].to(z_KD.device)
        return unit(z_KD.float()) @ unit(rows_MD.float()).T


@torch.no_grad()
def vocabulary_records(
    model: Model, reading: Reading, words: Vocabulary, rows: int, seed: int
) -> Iterator[tuple[Sample, dict[str, Any]]]:
    """What the record of each sample that was read has."""
    if not reading.samples:
        return
    answers = _answers(model.backbone, reading, words)
    for (sample, z_KD), answer in zip(reading.spans(), answers, strict=True):
        raw, masked = words.top(z_KD, False), words.top(z_KD, True)
        own_K = words.cosine(z_KD, torch.tensor(masked[0], device=z_KD.device)).diagonal()
        yield (
            sample,
            {
                "latents": model.latents,
                "raw": _named(words, *raw),
                "masked": _named(words, *masked),
                "cosine": {
                    "top": _shorts(own_K),
                    "end": _to(words, z_KD, words.end),
                    "opening": _to(words, z_KD, words.opening),
                    "random": _shorts(words.cosine(z_KD, words.drawn(rows, seed, sample.id)).mean(-1)),
                },
                "end": None if words.end is None else sum(token == words.end for token in raw[0]),
                "answer": answer,
            },
        )


def _named(words: Vocabulary, ids: list[int], probabilities: list[float]) -> list[list[Any]]:
    return [[i, words.text(i), short(p)] for i, p in zip(ids, probabilities, strict=True)]


def _to(words: Vocabulary, z_KD: Tensor, row: int | None) -> list[float] | None:
    return None if row is None else _shorts(words.cosine(z_KD, torch.tensor([row], device=z_KD.device))[:, 0])


def _shorts(values: Tensor) -> list[float]:
    return [short(float(one)) for one in values]


def _answers(backbone: Backbone, reading: Reading, words: Vocabulary) -> list[list[list[Any]]]:
    """Of each sample the tokens of its right answer, teacher-forced behind its own span: [token, predicted token,
    probability of that, whether both are the same, whether it is the answer itself]."""
    assert reading.after is not None
    given = [[answer_tokens(backbone, sample.answer, sample.choices)] for sample in reading.samples]
    ids_BYS, real_BYS, inside_BYS = (x.to(backbone.device) for x in pad_answers(given))
    ids_BS, real_BS, inside_BS = ids_BYS[:, 0], real_BYS[:, 0], inside_BYS[:, 0]
    _, hidden_BSD = extend(backbone, reading.after, ids_BS, real_BS=None if bool(real_BS.all()) else real_BS)
    before_BSD = torch.cat([reading.after.last_BD[:, None], hidden_BSD[:, :-1]], dim=1)
    said, probabilities = words.top(before_BSD[real_BS], False)
    rows = torch.nonzero(real_BS)[:, 0].tolist()
    answers: list[list[list[Any]]] = [[] for _ in reading.samples]
    facts = zip(rows, ids_BS[real_BS].tolist(), inside_BS[real_BS].tolist(), said, probabilities, strict=True)
    for row, token, inside, guess, probability in facts:
        answers[row].append([words.text(token), words.text(guess), short(probability), guess == token, inside])
    return answers
