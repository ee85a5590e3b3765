"""Stage 2 the naive way: a plain reading of the paper with stock transformers and torch, nothing of ``realvr``.

Every completion, every latent step and every answer re-runs the whole prompt, vision tower included, without a cache.
Loops instead of masks, one formula per line. It exists for two reasons: the tests hold ``realvr``'s schedule against it
(loss and every gradient), and the speed benchmark measures how much the shared prefill saves. It runs on any device and
in any number format.

The order of a sequence is prompt, ``<|lvr_start|>``, z_1 ... z_K, ``<|lvr_end|>``, text. ``z_t`` is the last hidden
state after the final norm at the position before slot t. K = 0 means no span and no markers.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Options:
    """The loss and its ablations, in the paper's symbols."""

    temperature: float = 0.6
    clip: float = 0.2
    clip_high: float | None = None
    reduction: str = "grpo"  # or dr_grpo, bnpo
    max_new: int = 192  # of dr_grpo
    beta: float = 0.0
    lambda_ev: float = 0.2
    eta: float = 0.3
    margin: float = 0.5
    routing: str = "selective"  # or raw, uniform
    credit: str = "paper"  # or normalised, which is not in the paper
    objective: str = "contrast"  # or hinge-positive, align
    mass_matched: bool = False
    detach: bool = True
    on_policy: bool = True


@dataclass(frozen=True)
class Markers:
    """Ids of ``<|lvr_start|>``, ``<|lvr|>`` and ``<|lvr_end|>``."""

    start: int
    slot: int
    end: int


@dataclass
class Example:
    """One prompt with its rollouts. Lists run over the G completions, or over the answers."""

    prompt: Tensor  # (T,) ids, one per visual token
    completions: list[Tensor]  # (S_i,) ids
    latents: Tensor  # (K, D), saved at rollout
    advantages: Sequence[float]
    old_logp: list[Tensor]  # (S_i,)
    answers: list[Tensor]  # (M_y,) ids of Fmt(y): the correct one, then each distinct wrong one
    content: list[Tensor]  # (M_y,) bool: J(y)
    positive: Tensor  # (D,); or (K, D), one for each latent, which is not in the paper
    negatives: list[Tensor]  # (D,) each; or (K, D) each
    pixels: Tensor | None = None  # what the stock processor returns
    grid_thw: Tensor | None = None  # Qwen
    ref_logp: list[Tensor] | None = None
    features: tuple[Tensor, tuple[Tensor, ...]] | None = None
    """Visual tokens (N, D) and deepstack features, instead of running the vision tower in every pass."""


@dataclass
class Outcome:
    """The loss, its parts, and what was found on the way (detached, one entry per prompt)."""

    loss: Tensor
    policy: Tensor
    evidence: Tensor
    logp: list[list[Tensor]] = field(default_factory=list)
    latents: list[Tensor] = field(default_factory=list)
    readouts: list[list[Tensor]] = field(default_factory=list)
    credit: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    terms: list[Tensor] = field(default_factory=list)
    passes: int = 0
    """Passes of the decoder over a whole prompt."""


class Naive:
    """The loss for a stock model. ``run`` is the only entry."""

    def __init__(self, model: Any, markers: Markers, options: Options, forbidden: Sequence[int] = ()) -> None:
        self.model = model
        self.core = model.model
        self.markers = markers
        self.options = options
        self.forbidden = list(forbidden)
        self.passes = 0

    # ------------------------------------------------------------------ the loss

    def run(self, examples: Sequence[Example], *, backward: bool = False, together: bool = False) -> Outcome:
        """The loss of one optimizer step.

        ``backward`` differentiates every term as soon as it is known, so that only one graph is alive at a time; the
        outcome is then detached. ``together`` runs the G completions of a prompt as the rows of one pass.
        """
        self.passes = 0
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        found = Outcome(zero, zero.clone(), zero.clone())
        for example in examples:
            self._add_policy(example, examples, found, backward, together)
            if self.options.lambda_ev != 0 and len(example.latents) > 0:
                self._add_evidence(example, len(examples), found, backward)
        found.loss = found.policy + self.options.lambda_ev * found.evidence
        found.passes = self.passes
        return found

    def _add_policy(
        self, example: Example, examples: Sequence[Example], found: Outcome, backward: bool, together: bool
    ) -> None:
        found.logp.append([])
        every = list(range(len(example.completions)))
        for group in [every] if together else [[i] for i in every]:
            share = torch.zeros((), dtype=torch.float64, device=self.device)
            for i, logp in zip(group, self._replay(example, group), strict=True):
                share = share + self._completion_loss(example, i, logp, examples)
                found.logp[-1].append(logp.detach())
            if backward and share.requires_grad:
                share.backward()
                share = share.detach()
            found.policy = found.policy + share

    def _add_evidence(self, example: Example, prompts: int, found: Outcome, backward: bool) -> None:
        term, z, readouts, gamma, weights = self._evidence(example)
        share = term / prompts
        if backward and share.requires_grad:
            (self.options.lambda_ev * share).backward()
            share = share.detach()
        found.evidence = found.evidence + share
        found.latents.append(z.detach())
        found.readouts.append([r.detach() for r in readouts])
        found.credit.append(gamma.detach())
        found.weights.append(weights.detach())
        found.terms.append(term.detach())

    # ------------------------------------------------------------------ policy

    def _completion_loss(self, example: Example, i: int, logp: Tensor, examples: Sequence[Example]) -> Tensor:
        """This completion's share of ``-J_clip + beta KL``."""
        options = self.options
        advantage = float(example.advantages[i])
        high = options.clip if options.clip_high is None else options.clip_high
        total = logp.new_zeros(())
        for s in range(len(logp)):
            ratio = torch.exp(logp[s] - example.old_logp[i][s])
            clipped = torch.clamp(ratio, 1 - options.clip, 1 + high)
            total = total - torch.minimum(ratio * advantage, clipped * advantage)
            if options.beta != 0:
                assert example.ref_logp is not None
                d = example.ref_logp[i][s] - logp[s]
                total = total + options.beta * (torch.exp(d) - d - 1)
        sequences = sum(len(other.completions) for other in examples)
        if options.reduction == "grpo":
            return total / len(logp) / sequences
        if options.reduction == "dr_grpo":
            return total / (sequences * options.max_new)
        tokens = sum(len(completion) for other in examples for completion in other.completions)
        return total / tokens

    def _replay(self, example: Example, group: list[int]) -> list[Tensor]:
        """Log-probabilities of completions after the saved latents, the whole prompt again for each of them."""
        head = self._ids(example, len(example.latents))
        longest = max(len(example.completions[i]) for i in group)
        ids = torch.zeros(len(group), len(head) + longest, dtype=torch.long, device=self.device)
        mask = torch.zeros_like(ids)
        for row, i in enumerate(group):
            completion = example.completions[i].to(self.device)
            ids[row, : len(head)] = head
            ids[row, len(head) : len(head) + len(completion)] = completion
            mask[row, : len(head) + len(completion)] = 1
        saved = example.latents.detach().to(self.device)
        hidden = self._pass(example, ids, mask, [saved[t] for t in range(len(saved))])[0]
        found = []
        for row, i in enumerate(group):
            completion = example.completions[i].to(self.device)
            states = hidden[row, len(head) - 1 : len(head) - 1 + len(completion)]
            logits = self.model.lm_head(states)
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / self.options.temperature
            barred = torch.zeros(logits.shape[-1], dtype=torch.bool, device=self.device)
            barred[self.forbidden] = True
            logp = torch.log_softmax(logits.masked_fill(barred, float("-inf")), dim=-1)
            found.append(logp[torch.arange(len(completion)), completion])
        return found

    # ------------------------------------------------------------------ evidence

    def _evidence(self, example: Example) -> tuple[Tensor, Tensor, list[Tensor], Tensor, Tensor]:
        """``sum_t sg(w_t) [m - g_t]+`` of one prompt; latents, readouts, credit and weights beside it."""
        options = self.options
        if options.on_policy:
            z = self._regenerate(example)
            span = z
        else:
            span = list(example.latents.detach().to(self.device))
            z = self._states_before(example, span)
        readouts = []
        for answer, content in zip(example.answers, example.content, strict=True):
            with torch.set_grad_enabled(torch.is_grad_enabled() and not options.detach):
                readouts.append(self._readout(example, span, answer, content))
        gamma = self._credit(readouts)
        weights = self._weights(gamma)
        if options.detach:
            weights = weights.detach()
        positive = self._wide(example.positive)
        negatives = [self._wide(p) for p in example.negatives if bool((p != 0).any())]
        total = self._wide(z[0]).sum() * 0
        undefined = not bool((positive != 0).any()) or (options.objective == "contrast" and not negatives)
        for t in range(0 if undefined else len(z)):
            state = self._wide(z[t])
            score = cosine(state, positive if positive.dim() == 1 else positive[t])
            if options.objective == "contrast":
                others = [p if p.dim() == 1 else p[t] for p in negatives]
                score = score - max((cosine(state, p) for p in others), key=lambda x: float(x.detach()))
            if options.objective == "align":
                loss = 1 - score
            else:
                loss = options.margin - score
                loss = loss if float(loss.detach()) > 0 else loss * 0
            total = total + weights[t] * loss
        return total, torch.stack(z), readouts, gamma, weights

    def _credit(self, readouts: list[Tensor]) -> Tensor:
        """``gamma_t``."""
        correct, wrong = readouts[0], readouts[1:]
        gamma = []
        for t in range(len(correct)):
            if self.options.routing == "raw":
                gamma.append(correct[t])
                continue
            against = sum((r[t] for r in wrong), correct.new_zeros(())) / len(wrong) if wrong else correct[t]
            difference = correct[t] - against
            gamma.append(difference if float(difference.detach()) > 0 else difference * 0)
        return torch.stack(gamma)

    def _weights(self, gamma: Tensor) -> Tensor:
        """``w_t``, or ``q_t`` of the mass-matched arms."""
        count, eta = len(gamma), self.options.eta
        if self.options.routing == "uniform":
            return torch.full_like(gamma, 1 / count)
        if self.options.credit == "normalised":
            mass = sum(gamma[t] for t in range(count))
            gamma = torch.stack(
                [gamma[t] / mass if float(mass.detach()) > 0 else gamma[t] * 0 + 1 / count for t in range(count)]
            )
        weights = torch.stack([eta / count + (1 - eta) * gamma[t] for t in range(count)])
        return weights / sum(weights) if self.options.mass_matched else weights

    def _regenerate(self, example: Example) -> list[Tensor]:
        """``z_1 ... z_K`` by K passes over the whole prompt, gradients through all of them."""
        z: list[Tensor] = []
        while len(z) < len(example.latents):
            ids = self._ids(example, len(z), closed=False)[None]
            hidden = self._pass(example, ids, torch.ones_like(ids), z)[0]
            z.append(hidden[0, -1])
        return z

    def _states_before(self, example: Example, span: list[Tensor]) -> list[Tensor]:
        """States one position before each slot, by one pass over given latents."""
        ids = self._ids(example, len(span))[None]
        hidden = self._pass(example, ids, torch.ones_like(ids), span)[0]
        first = len(example.prompt)  # the column of <|lvr_start|>
        return [hidden[0, first + t] for t in range(len(span))]

    def _readout(self, example: Example, span: list[Tensor], answer: Tensor, content: Tensor) -> Tensor:
        """``r_t(y)``: attention to each slot, mean over layers, heads and content tokens, not renormalised."""
        head = self._ids(example, len(span))
        ids = torch.cat([head, answer.to(self.device)])[None]
        with eager(self.model):
            attentions = self._pass(example, ids, torch.ones_like(ids), span, output_attentions=True)[1]
        first = len(example.prompt) + 1  # the column of slot 1
        rows = [len(head) + j for j in range(len(answer)) if bool(content[j])]
        found = []
        for t in range(len(span)):
            total = wide(attentions[0].new_zeros(()))
            for layer in attentions:
                for row in rows:
                    total = total + wide(layer[0, :, row, first + t]).mean()
            found.append(total / (len(attentions) * len(rows)))
        return torch.stack(found)

    # ------------------------------------------------------------------ the stock model

    @property
    def device(self) -> torch.device:
        return self.core.get_input_embeddings().weight.device

    def _wide(self, x: Tensor) -> Tensor:
        return wide(x.to(self.device))

    def _ids(self, example: Example, slots: int, closed: bool = True) -> Tensor:
        """The prompt and a span of ``slots`` slots, closed by ``<|lvr_end|>`` or not."""
        prompt = example.prompt.to(self.device)
        if len(example.latents) == 0:
            return prompt
        markers = self.markers
        span = [markers.start] + [markers.slot] * slots + ([markers.end] if closed else [])
        return torch.cat([prompt, torch.tensor(span, device=self.device)])

    def _pass(
        self, example: Example, ids: Tensor, mask: Tensor, latents: Sequence[Tensor], **options: Any
    ) -> tuple[Tensor, Any]:
        """One pass over whole sequences (rows, T) that share the prompt and the latents; hidden states, attentions."""
        rows = len(ids)
        self.passes += rows
        image = torch.zeros_like(ids, dtype=torch.bool)
        image[:, : len(example.prompt)] = ids[:, : len(example.prompt)] == self.model.config.image_token_id
        embeds = self.core.get_input_embeddings()(ids.masked_fill(image, 0))
        features, deepstack = self._see(example, rows, embeds.dtype)
        if features is not None:
            embeds = embeds.masked_scatter(image[..., None], features)
        if latents:
            first = len(example.prompt) + 1
            span = torch.stack(list(latents)).to(embeds.dtype).expand(rows, -1, -1)
            embeds = torch.cat([embeds[:, :first], span, embeds[:, first + len(latents) :]], dim=1)
        arguments: dict[str, Any] = {
            "inputs_embeds": embeds,
            "attention_mask": mask,
            "position_ids": self._positions(example, ids, mask, image),
            "use_cache": False,
            "return_dict": True,
            **options,
        }
        if "token_type_ids" in inspect.signature(self.core.forward).parameters:  # Gemma 3: images attend both ways
            output = self.core(token_type_ids=image.long(), **arguments)
        else:
            if deepstack:
                arguments |= {"visual_pos_masks": image, "deepstack_visual_embeds": list(deepstack)}
            output = self.core.language_model(**arguments)
        return output.last_hidden_state, getattr(output, "attentions", None)

    def _see(self, example: Example, rows: int, dtype: torch.dtype) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        """Frozen visual tokens of ``rows`` copies of the prompt."""
        if example.features is not None:
            features, deepstack = example.features
            features, *rest = (x.to(self.device, dtype).repeat(rows, 1) for x in (features, *deepstack))
            return features, tuple(rest)
        if example.pixels is None:
            return None, ()
        pixels = torch.cat([example.pixels.to(self.device, dtype)] * rows)
        extra = {}
        if example.grid_thw is not None:
            extra["image_grid_thw"] = torch.cat([example.grid_thw.to(self.device)] * rows)
        with torch.no_grad():
            output = self.core.get_image_features(pixels, return_dict=True, **extra)
        width = self.core.get_input_embeddings().weight.shape[-1]
        deepstack = tuple(_flat(x, width).to(dtype) for x in getattr(output, "deepstack_features", None) or ())
        return _flat(output.pooler_output, width).to(dtype), deepstack

    def _positions(self, example: Example, ids: Tensor, mask: Tensor, image: Tensor) -> Tensor:
        if not hasattr(self.core, "get_rope_index"):
            return (mask.cumsum(-1) - 1).clamp(min=0)
        grids = None if example.grid_thw is None else torch.cat([example.grid_thw.to(self.device)] * len(ids))
        return self.core.get_rope_index(ids, image.int(), image_grid_thw=grids, attention_mask=mask)[0]


def cosine(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum() / (torch.sqrt((a * a).sum()) * torch.sqrt((b * b).sum()))


def wide(x: Tensor) -> Tensor:
    """float32, or float64 if it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _flat(features: Any, width: int) -> Tensor:
    """Visual tokens (N, D), whether the model returns them stacked or image by image."""
    return features.reshape(-1, width) if isinstance(features, Tensor) else torch.cat(list(features))


@contextmanager
def eager(model: Any) -> Iterator[None]:
    """Stock eager attention in the decoder: the only stock way to see attention weights."""
    before = model.config.get_text_config()._attn_implementation
    model.set_attn_implementation({"text_config": "eager"})
    try:
        yield
    finally:
        model.set_attn_implementation({"text_config": before})
