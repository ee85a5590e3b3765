"""Latent health on a model's tensors; `realvr.diagnostics.health` says what each number is.

One prefill and one free-running span serve everything. The right answer and the wrong ones are branches of one
teacher-forced pass; the restored spans are spliced, one pass for each k.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from realvr.answers import canonical_answer, parse, wrong
from realvr.backbone.attention import Probe
from realvr.backbone.backbone import Backbone
from realvr.backbone.samples import answer_tokens, pad_answers
from realvr.data.sample import LETTERS, Sample
from realvr.diagnostics.measuring.reading import Reading
from realvr.diagnostics.model import Model
from realvr.diagnostics.numbers import short
from realvr.errors import UserError
from realvr.latent.group_rollout import decode
from realvr.latent.sampling import Sampling
from realvr.latent.span import score, span_tokens, splice
from realvr.maths import credit
from realvr.maths.evidence import similarity
from realvr.maths.precision import at_least_float32
from realvr.runs.journal import Record

Tokens = tuple[list[int], list[bool]]


@dataclass(frozen=True)
class HealthOptions:
    """How wrong answers are sampled, and the uniform baseline of the weights."""

    eta: float
    group: int
    temperature: float
    seed: int
    max_new: int


def rounded(values: Tensor | Sequence[float]) -> list[float]:
    """Six significant digits: enough to read, and the journal stays small."""
    items = values.double().tolist() if isinstance(values, Tensor) else values
    return [short(value) for value in items]


def truth_tokens(backbone: Backbone, sample: Sample) -> Tokens:
    """``Fmt(y*)`` and its content."""
    found = answer_tokens(backbone, truth(sample), sample.choices)
    if not any(found[1]):
        raise UserError(f"{sample.source or sample.id}: the answer {sample.answer!r} has no token of its own")
    return found


def truth(sample: Sample) -> str:
    """The right answer in its canonical form."""
    return canonical_answer(sample.answer, sample.choices) or sample.answer


# ---------------------------------------------------------------------- geometry


def geometry(latents_KD: Tensor, features: Sequence[Tensor]) -> dict[str, Any]:
    """Norms of the latents and of the visual tokens, and cosines of neighbouring latents."""
    z_KD = at_least_float32(latents_KD)
    norm_K = z_KD.norm(dim=-1)
    visual = float(at_least_float32(torch.cat(list(features))).norm(dim=-1).mean()) if features else None
    return {
        "norm": rounded(norm_K),
        "visual_norm": None if visual is None else rounded([visual])[0],
        "ratio": rounded(norm_K / visual) if visual else None,
        "adjacent": rounded(torch.cosine_similarity(z_KD[:-1], z_KD[1:], dim=-1)),
    }


def drift(latents_KD: Tensor, other_KD: Tensor) -> dict[str, Any]:
    """Cosine and relative distance of each latent to that of another model, for as many as both have."""
    count = min(len(latents_KD), len(other_KD))
    own_KD, other = at_least_float32(latents_KD[:count]), at_least_float32(other_KD[:count]).to(latents_KD.device)
    length_K = other.norm(dim=-1).clamp_min(torch.finfo(other.dtype).tiny)
    cosine_K = similarity(own_KD[:, None], other)[:, 0]
    return {"cosine": rounded(cosine_K), "relative": rounded((own_KD - other).norm(dim=-1) / length_K)}


def incomparable(model: Model) -> str:
    """Why latents cannot be compared with those of the second model; empty where they can."""
    second = model.second
    if second is None:
        return "no second model was given"
    if not second.latents:
        return f"{second.name} has no latent span"
    if second.backbone.width != model.backbone.width:
        return f"{second.name} has width {second.backbone.width}, {model.name} has {model.backbone.width}"
    return ""


# ---------------------------------------------------------------------- answers


class Answering:
    """One batch that was read: log-probabilities of the right answer, readouts of right and wrong ones."""

    def __init__(self, backbone: Backbone, reading: Reading, options: HealthOptions) -> None:
        assert reading.prompt is not None and reading.after is not None and reading.latents_RKD is not None
        self.backbone, self.reading, self.options = backbone, reading, options
        self.prompt, self.after, self.own_RKD = reading.prompt, reading.after, reading.latents_RKD
        self.right = [truth_tokens(backbone, sample) for sample in reading.samples]

    def restored(self, mean_KD: Tensor) -> Tensor:
        """Log-probability (R, K + 1) of the whole formatted right answer with z_1 … z_k in their slots and the means of
        the positions behind them, k = 0 … K."""
        ids_RYS, real_RYS, _ = (x.to(self.backbone.device) for x in pad_answers([[one] for one in self.right]))
        latents, found = self.own_RKD.shape[1], []
        for k in range(latents + 1):
            mixed_RKD = mean_KD.to(self.own_RKD).expand_as(self.own_RKD).clone()
            mixed_RKD[:, :k] = self.own_RKD[:, :k]
            state, _ = splice(self.backbone, self.prompt, mixed_RKD)
            logp_RYS, _, _ = score(self.backbone, state, ids_RYS, real_RYS)
            found.append(logp_RYS[:, 0].double().sum(-1))
        return torch.stack(found, dim=1)

    def sampled_wrong(self) -> list[list[str]]:
        """``Y_x^-``: distinct wrong answers of ``group`` completions of each question."""
        options, backbone = self.options, self.backbone
        if not options.group:
            return [[] for _ in self.right]
        sampling = Sampling(temperature=options.temperature, max_new=options.max_new)
        room = backbone.context_length - span_tokens(self.own_RKD.shape[1])
        limits = [min(options.max_new, room - len(prompt)) for prompt in self.reading.prompts]
        seeds = [_seed(options.seed, sample.id) for sample in self.reading.samples]
        groups = decode(backbone, self.after, options.group, sampling, seeds, limits)
        return [
            self._wrong(sample, [parse(one.text, sample.choices) for one in group])
            for sample, group in zip(self.reading.samples, groups, strict=True)
        ]

    def other_options(self) -> list[list[str]]:
        """Every wrong option of each question; none where it has no options."""
        return [
            self._wrong(sample, list(LETTERS[: len(sample.choices)])) if sample.choices else []
            for sample in self.reading.samples
        ]

    def _wrong(self, sample: Sample, answers: Sequence[str | None]) -> list[str]:
        return wrong(
            answers,
            truth(sample),
            sample.choices,
            has_content=lambda answer: any(answer_tokens(self.backbone, answer, sample.choices)[1]),
        )

    def readouts(self, wrongs: Sequence[Sequence[str]]) -> tuple[Tensor, Tensor]:
        """``r^+`` (R, K) of the right answer, and the credit ``gamma`` (R, K) over these wrong ones."""
        groups = [
            [right, *(answer_tokens(self.backbone, answer, sample.choices) for answer in answers)]
            for sample, right, answers in zip(self.reading.samples, self.right, wrongs, strict=True)
        ]
        ids_RYS, real_RYS, content_RYS = (x.to(self.backbone.device) for x in pad_answers(groups))
        probe = Probe(columns=self.after.slots)
        score(self.backbone, self.after, ids_RYS, real_RYS, probes=[probe])
        own = torch.eye(ids_RYS.shape[1], dtype=torch.bool, device=content_RYS.device)
        r_RYK = credit.readout(probe.stack(), (content_RYS[:, None] & own[None, :, :, None]).flatten(2))
        valid_RY = real_RYS[:, 1:].any(-1)
        return r_RYK[:, 0], credit.selective(r_RYK[:, 0], credit.mean_wrong(r_RYK[:, 0], r_RYK[:, 1:], valid_RY))


def _seed(seed: int, question: str) -> int:
    digest = hashlib.sha256(f"{seed}/health/{question}".encode("utf-8", "backslashreplace")).digest()
    return int.from_bytes(digest[:8], "big") >> 1


# ---------------------------------------------------------------------- records


@torch.no_grad()
def health_records(model: Model, reading: Reading, mean_KD: Tensor, options: HealthOptions) -> list[Record]:
    """One record for each sample that was read."""
    if not reading.samples:
        return []
    answering = Answering(model.backbone, reading, options)
    curve_RK = answering.restored(mean_KD)
    sampled, others = answering.sampled_wrong(), answering.other_options()
    readout_RK, gamma_RK = answering.readouts(sampled)
    _, gamma_options_RK = answering.readouts(others)
    drifts = _drifts(model, reading)
    records = []
    for row, ((sample, latents_KD), features) in enumerate(zip(reading.spans(), reading.features(), strict=True)):
        records.append(
            {
                "id": sample.id,
                "latents": len(latents_KD),
                **geometry(latents_KD, features),
                "drift": drifts.get(sample.id),
                "logp": rounded(curve_RK[row]),
                "readout": rounded(readout_RK[row]),
                "sampled": _credit(gamma_RK[row], len(sampled[row]), options.eta),
                "options": _credit(gamma_options_RK[row], len(others[row]), options.eta) if sample.choices else None,
                "error": None,
            }
        )
    return records


def _credit(gamma_K: Tensor, answers: int, eta: float) -> dict[str, Any]:
    moved = float(credit.movable(gamma_K[None], eta)[0])
    return {"wrong": answers, "gamma": rounded(gamma_K), "movable": rounded([moved])[0]}


def _drifts(model: Model, reading: Reading) -> dict[str, dict[str, Any]]:
    """By sample; none where the models cannot be compared, or the second cannot read a sample."""
    if incomparable(model):
        return {}
    assert model.second is not None
    others = {sample.id: latents_KD for sample, latents_KD in model.second.read(reading.samples).spans()}
    return {sample.id: drift(own, others[sample.id]) for sample, own in reading.spans() if sample.id in others}
