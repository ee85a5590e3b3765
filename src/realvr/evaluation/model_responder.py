"""A backbone as a `Responder`: one prefill per batch of prompts, however many spans follow it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from realvr.backbone.backbone import Backbone
from realvr.backbone.types import Prompt
from realvr.errors import UserError
from realvr.evaluation.responder import Plan, Reply, Request
from realvr.imaging.types import ImageInput
from realvr.latent.fast import FastDecode
from realvr.latent.group_rollout import decode, free_span
from realvr.latent.sampling import GREEDY, Sampling
from realvr.latent.span import prefill, span_tokens, splice
from realvr.latent.state import State
from realvr.models import locate
from realvr.runs.hashes import fingerprint


class ModelResponder:
    """``name`` is what tables call the model, by default the last part of its path. ``fast`` decodes in static shapes
    where that applies."""

    def __init__(
        self,
        backbone: Backbone,
        sampling: Sampling = GREEDY,
        *,
        path: str = "",
        name: str | None = None,
        fast: FastDecode | None = None,
    ) -> None:
        self.backbone = backbone
        self.sampling = sampling
        self.fast = fast
        self.path = path
        self._name = name or Path(path).name or backbone.family.name

    @property
    def name(self) -> str:
        """What tables call the model."""
        return self._name

    @property
    def latents(self) -> int:
        """K of the checkpoint; 0 where its markers were never trained."""
        return 0 if self.backbone.markers_added else self.backbone.latents

    def describe(self) -> dict[str, Any]:
        """What decides its answers, for the records."""
        backbone = self.backbone
        ignored = backbone.ignored_defaults
        return {
            "name": self.name,
            "path": self.path,
            "weights": weights_hash(self.path),
            "family": backbone.family.name,
            "latents": self.latents,
            "dtype": str(backbone.dtype).removeprefix("torch."),
            "images": backbone.processor.describe(),
            "sampling": asdict(self.sampling),
            **({"ignored_generation_defaults": ignored} if ignored else {}),
        }

    def prepare(self, image: str | Path | bytes | Image.Image) -> ImageInput:
        """An image as the turns of a request may carry it, ready for the model: work that a caller may do ahead."""
        return self.backbone.staged(self.backbone.processor(image))

    @torch.no_grad()
    def reply(self, requests: Sequence[Request], plans: Sequence[Plan]) -> list[list[Reply]]:
        """See `Responder.reply`. The requests form one batch: the caller chooses how many there are. Where memory runs
        out beside static buffers, they are dropped and it is tried once more."""
        if self.fast is not None and self.fast.held_bytes:
            try:
                return self._reply(requests, plans)
            except torch.OutOfMemoryError:
                pass  # handled outside: the traceback would keep the tensors of the failed pass alive
            self.fast.release()
            torch.cuda.empty_cache()
        return self._reply(requests, plans)

    def _reply(self, requests: Sequence[Request], plans: Sequence[Plan]) -> list[list[Reply]]:
        begun = time.perf_counter()
        prompts, failed = self._prompts(requests, plans)
        asked = [number for number, prompt in enumerate(prompts) if prompt is not None]
        replies = [[Reply("", finish="error", error=failed.get(r)) for r in range(len(requests))] for _ in plans]
        if asked:
            ready = [prompt for prompt in prompts if prompt is not None]
            state, _ = prefill(self.backbone, self.backbone.batch(ready))
            seeds = [requests[number].seed for number in asked]
            with nullcontext() if self.fast is None else self.fast.settled():
                for plan, row in zip(plans, replies, strict=True):
                    for number, reply in zip(asked, self._answer(state, plan, asked, ready, seeds), strict=True):
                        row[number] = reply
        each = (time.perf_counter() - begun) / max(len(requests) * len(plans), 1)
        for row in replies:
            for reply in row:
                reply.seconds = each
        return replies

    def _prompts(
        self, requests: Sequence[Request], plans: Sequence[Plan]
    ) -> tuple[list[Prompt | None], dict[int, str]]:
        """Encoded prompts, None where a request cannot be asked, and why."""
        prompts: list[Prompt | None] = []
        failed: dict[int, str] = {}
        longest = max((plan.latents for plan in plans), default=0)
        for number, request in enumerate(requests):
            try:
                prompt = self.backbone.prompt(request.turns)
                room = self.backbone.context_length - len(prompt) - span_tokens(longest)
                if room < 1:
                    raise UserError(
                        f"a prompt of {len(prompt)} tokens with {longest} latents leaves no room to answer in a "
                        f"context of {self.backbone.context_length}"
                    )
                prompts.append(prompt)
            except UserError as error:
                prompts.append(None)
                failed[number] = str(error)
        return prompts, failed

    def _answer(
        self, state: State, plan: Plan, asked: Sequence[int], prompts: Sequence[Prompt], seeds: Sequence[int]
    ) -> list[Reply]:
        spans = None
        if plan.given is not None and plan.interventions:
            raise ValueError("a plan has given latents or interventions, not both")
        if plan.latents and plan.given is not None:
            given = torch.stack([plan.given[number] for number in asked]).to(self.backbone.device, self.backbone.dtype)
            if given.shape[1:] != (plan.latents, self.backbone.width):
                raise ValueError(f"given latents are {tuple(given.shape[1:])}, not {plan.latents, self.backbone.width}")
            after, _ = splice(self.backbone, state, given)
            spans = given
        else:
            put = {step: v[list(asked)] if v.ndim == 2 else v for step, v in plan.interventions.items()}
            after, spans = free_span(self.backbone, state, plan.latents, interventions=put, fast=self.fast)
        room = self.backbone.context_length - span_tokens(plan.latents)
        limits = [min(self.sampling.max_new, room - len(prompt)) for prompt in prompts]
        groups = decode(self.backbone, after, 1, self.sampling, seeds, limits, fast=self.fast)
        kept = spans.float().cpu() if plan.latents else [None] * len(asked)
        return [
            Reply(
                text=done.text,
                ids=done.reply_ids,
                finish=done.finish,
                latents=span,
                prompt=prompt_hash(prompt),
                new_tokens=len(done.ids),
            )
            for (done,), span, prompt in zip(groups, kept, prompts, strict=True)
        ]


def prompt_hash(prompt: Prompt) -> str:
    """SHA-256 over token ids, image keys and the latents of earlier spans."""
    digest = hashlib.sha256(prompt.ids.numpy().tobytes())
    for image in prompt.images:
        digest.update(image.key.encode())
    for span in prompt.latents:
        digest.update(span.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()


def weights_hash(path: str) -> str:
    """`realvr.runs.hashes.fingerprint` of a checkpoint; empty for a hub id."""
    return fingerprint(Path(locate(path))) if path else ""
