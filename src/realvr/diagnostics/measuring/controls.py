"""Controls on a model's tensors; `realvr.diagnostics.controls` says what each of them is.

One prefill and one free-running span serve all conditions of a batch. Every condition runs over all rows of the batch:
where a row has no replacement, its own latents are put back and the condition is left out of its record.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from realvr.answers import JUDGE, parser
from realvr.backbone.backbone import Backbone
from realvr.data.sample import Sample
from realvr.diagnostics.measuring.reading import Reading
from realvr.diagnostics.measuring.replacing import Replacing
from realvr.diagnostics.replacements import Replacement
from realvr.errors import UserError
from realvr.evaluation.model_responder import prompt_hash
from realvr.latent.group_rollout import decode
from realvr.latent.sampling import GREEDY, Sampling
from realvr.latent.span import extend, prefill, span_tokens, splice
from realvr.latent.state import State
from realvr.runs.journal import Record


@dataclass(frozen=True)
class ControlOptions:
    """Which conditions, and how answers are made and read."""

    conditions: tuple[str, ...]
    dummy: str = "."
    policy: Any = "strict"
    sampling: Sampling = GREEDY


def without_images(state: State) -> State:
    """The state with its visual tokens hidden from everything that follows; what has read them keeps what it read."""
    real = state.columns.real
    seen_BT = ~state.image_BT if real is None else real & ~state.image_BT
    return replace(state, columns=replace(state.columns, real=seen_BT))


def dummy_ids(backbone: Backbone, text: str, count: int) -> list[int]:
    """``count`` token ids: those of the text, over and over."""
    ids, _ = backbone.prompts.encode_text(text)
    if not ids:
        raise UserError(f"--dummy {text!r} is no token of this model: give a text such as '.'")
    return [ids[place % len(ids)] for place in range(count)]


class Bench:
    """One batch that was read, and the state behind its span under each condition."""

    def __init__(
        self, backbone: Backbone, reading: Reading, replacing: Replacing | None, options: ControlOptions
    ) -> None:
        assert reading.prompt is not None and reading.after is not None and reading.latents_RKD is not None
        self.backbone, self.reading, self.replacing, self.options = backbone, reading, replacing, options
        self.prompt, self.after, self.own_RKD = reading.prompt, reading.after, reading.latents_RKD
        room = backbone.context_length - span_tokens(self.own_RKD.shape[1])
        self.limits = [min(options.sampling.max_new, room - len(prompt)) for prompt in reading.prompts]
        self.lacking: dict[str, set[int]] = {}
        """Rows that a condition does not apply to."""

    def state(self, condition: str) -> State:
        """Behind the span, or what stands for it."""
        if condition == "free":
            return self.after
        if condition == "no-span":
            return self.prompt
        if condition == "removed":
            markers = self.backbone.markers
            return extend(self.backbone, self.prompt, self._ids([markers.start, markers.end]))[0]
        if condition == "image-hidden":
            return self._hidden(self.prompt)
        if condition == "latents-only":
            return self._hidden(self._blind_prompt())
        return splice(self.backbone, self.prompt, self._given(condition))[0]

    def _given(self, condition: str) -> Tensor:
        """Latents (R, K, D) that fill the span."""
        if condition == "sham":
            return self.own_RKD
        if condition == "repeated":
            return self.own_RKD.mean(1, keepdim=True).expand_as(self.own_RKD)
        if condition == "dummies":
            ids = dummy_ids(self.backbone, self.options.dummy, self.own_RKD.shape[1])
            return self.backbone.embed(self._ids(ids)).to(self.own_RKD.dtype)
        assert self.replacing is not None
        given = self.replacing.given(cast(Replacement, condition), self.reading)
        self.lacking[condition] = {row for row, one in enumerate(given) if one is None}
        return torch.stack([own if one is None else one for own, one in zip(self.own_RKD, given, strict=True)])

    def _hidden(self, prompt: State) -> State:
        """The own latents, then ``<|lvr_end|>`` and an answer that cannot see the visual tokens."""
        self._without_pictures()
        markers = self.backbone.markers
        start_R1D = self.backbone.embed(self._ids([markers.start]))
        span_RSD = torch.cat([start_R1D, self.own_RKD.to(start_R1D.dtype)], dim=1)
        inside, _ = extend(self.backbone, prompt, embeds_BSD=span_RSD)
        return extend(self.backbone, without_images(inside), self._ids([markers.end]))[0]

    def _blind_prompt(self) -> State:
        """The prompt, its text blind to the visual tokens: what it cannot see it cannot pass on."""
        batch = self.backbone.batch(self.reading.prompts)
        visibility_RT = torch.where(batch.image_BT, 1, 2)
        return prefill(self.backbone, batch, self.reading.visual, image_visibility_BT=visibility_RT)[0]

    def _without_pictures(self) -> None:
        rows = {row for row, prompt in enumerate(self.reading.prompts) if not prompt.images}
        self.lacking |= dict.fromkeys(("image-hidden", "latents-only"), rows)

    def _ids(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor([list(ids)] * self.prompt.rows, device=self.backbone.device)

    def replies(self, condition: str) -> list[str | None]:
        """A reply for each row; None where the condition does not apply to it."""
        groups = decode(self.backbone, self.state(condition), 1, self.options.sampling, 0, self.limits)
        without = self.lacking.get(condition, set())
        return [None if row in without else group[0].text for row, group in enumerate(groups)]


@torch.no_grad()
def control_records(
    backbone: Backbone, reading: Reading, replacing: Replacing | None, options: ControlOptions
) -> list[Record]:
    """One record for each sample that was read."""
    if not reading.samples:
        return []
    bench = Bench(backbone, reading, replacing, options)
    replies = {condition: bench.replies(condition) for condition in options.conditions}
    donors = {} if replacing is None else replacing.donors
    return [
        _record(
            sample,
            {name: text for name, texts in replies.items() if (text := texts[row]) is not None},
            {
                "latents": bench.own_RKD.shape[1],
                "donor": donors.get(sample.id),
                "prompt": prompt_hash(reading.prompts[row]),
            },
            options,
        )
        for row, sample in enumerate(reading.samples)
    ]


def _record(sample: Sample, texts: Mapping[str, str], about: Mapping[str, Any], options: ControlOptions) -> Record:
    """One line of controls.jsonl."""
    reader = parser(options.policy, "evaluation")
    return {
        "id": sample.id,
        **about,
        "truth": sample.answer,
        "choices": list(sample.choices),
        "texts": dict(texts),
        "extracted": {name: reader.read(text, sample.choices) for name, text in texts.items()},
        "policy": options.policy,
        "parser": str(reader),
        "judge": JUDGE,
        "error": None,
    }
