"""Every fast path against the plain one, for `device_parity.py`.

Each check gives our number on the device, the plain path's in float32 (for texts and adapters: in the same format on
the same device), and the plain path's in the same number format as the yardstick. `device_parity.py` compares the plain
path itself with stock transformers. Kernels are chosen by width: `wide` does the same with the widths of a paper
backbone, few layers and a long prompt.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import parity_adapters
import parity_decode
import parity_span
import torch
from parity_span import MEMORY, TRUNKS, flat, gradients_of, grown, uneven_norms, vectors
from torch import Tensor

from realvr.backbone import Backbone, Probe, Prompt
from realvr.backbone.automatic import Where
from realvr.latent import Sampling, prefill, score, splice, think, trajectory
from realvr.latent.fast import FastDecode
from realvr.latent.group_rollout import Rollout, rollout
from realvr.training import adapter_kernels, gradients
from realvr.training.method import Step
from realvr.training.methods.lvr_sft import LvrSft, LvrSftConfig
from realvr.training.sft_batch import SftExample, pack_rows

Found = dict[str, tuple[Tensor, Tensor, Tensor | None]]
K, GROUP = 8, 4
FEW = 4
"""Latents of gradients: the longer the recurrence of a random model, the more of its bfloat16 gradient is rounding."""
SAMPLING = Sampling(max_new=12)

# name -> (measure, float32 tolerance, bfloat16 floor); a floor of None means float32 only
CHECKS: dict[str, tuple[str, float, float | None]] = {
    **{f"{mode} decode: latents": ("relative", 1e-5, 0.05) for mode in ("static", "graph")},
    **{f"{mode} decode: log-probs": ("absolute", 1e-4, 0.2) for mode in ("static", "graph")},
    **{f"{mode} decode: texts": ("absolute", 0.0, None) for mode in ("static", "graph")},
    **{f"{mode} decode: the same again": ("absolute", 0.0, 0.0) for mode in ("static", "graph")},
    **{f"{mode} decode: after an update": ("relative", 1e-5, 0.05) for mode in ("static", "graph")},
    **parity_decode.CHECKS,
    "rollout together = alone: texts": ("absolute", 0.0, None),
    **{f"deferred gradients, {memory}": ("relative", 1e-4, 0.1) for memory in MEMORY},
    "deferred gradients, in place": ("relative", 1e-4, 0.1),
    **parity_adapters.CHECKS,
    **{f"{rows}: loss": ("relative", 1e-5, 0.02) for rows in ("packed rows", "packed rows, as by default")},
    **{f"{rows}: gradients": ("relative", 1e-4, 0.1) for rows in ("packed rows", "packed rows, as by default")},
    "fast vision: tokens": ("relative", 1e-5, 0.02),
    "fused layers: states": ("relative", 1e-5, 0.05),
    "fused layers: latents, decoded fast": ("relative", 1e-5, 0.05),
    "fused layers: log-probs, decoded fast": ("absolute", 1e-4, 0.2),
    "fused layers: texts, decoded fast": ("absolute", 0.0, None),
    **{f"fused layers: gradients, {memory}": ("relative", 1e-4, 0.1) for memory in MEMORY},
    **{f"split replay of {trunk}: log-probs": ("absolute", 1e-4, 0.2) for trunk in TRUNKS},
    **{f"split replay of {trunk}: readouts": ("relative", 1e-4, 0.05) for trunk in TRUNKS},
    **{f"split replay of {trunk}: gradients, cached": ("relative", 1e-4, 0.1) for trunk in TRUNKS},
    **{f"split replay of {trunk}: gradients, checkpointed": ("relative", 1e-4, 0.1) for trunk in TRUNKS},
    **parity_span.CHECKS,
}
_NOTICE = re.compile(
    "fast decoding|recorded span|split attention|fast vision|fused layers|decoding kernels|adapters of"
)
_STAGE1 = ("loss", "gradients")
Load = Callable[[torch.dtype, str], Backbone]


class Paths:
    """The fast paths of one checkpoint on one device in one number format; what is right is computed on another."""

    def __init__(
        self,
        load: Load,
        dtype: torch.dtype,
        device: str,
        ask: Callable[[Backbone], list[Prompt]],
        right_on: str = "cpu",
        buffers: Mapping[str, int] | None = None,
        group: int = GROUP,
    ) -> None:
        self._load, self.dtype, self.device, self.ask, self.group = load, dtype, device, ask, group
        self.buffers = buffers or {}
        self.ours = self.load(dtype, device)
        self.truth = self.load(torch.float32, right_on)
        self.exact = dtype == torch.float32
        self.notes: list[str] = []
        """What was run in which way; where a fast path did not apply, and why."""
        self.idle: list[str] = []
        """Checks of recorded steps in which something else ran: they compare the plain path with itself."""
        self.dense = Where.of(self.ours).dense
        self._falls_back = self.exact and not self.dense and self.device.startswith("cuda")
        """In float32 torch's products of experts ask the host."""

    def load(self, dtype: torch.dtype, device: str, fast: bool = False) -> Backbone:
        """Without the fast paths of the model itself, or with those that it has by default on a GPU."""
        backbone = self._load(dtype, device)
        backbone.fast_vision, backbone.fused_layers = fast, fast and Where.of(backbone).dense
        return backbone

    def count(self, check: str, counts: Counter[str], recorded: bool) -> None:
        """Notes what ran; ``recorded``: it should have been replayed throughout."""
        said = ", ".join(f"{count} {what}" for what, count in counts.items())
        self.notes.append(f"{check}: {said}")
        if recorded and not self._falls_back and not throughout(counts):
            self.idle.append(f"{check}: {said or 'nothing ran'}")

    @contextmanager
    def adapting(self, check: str, kernels: set[str]) -> Iterator[None]:
        """Notes if these kernels for adapters did not all run, where they should."""
        before = adapter_kernels.launched.copy()
        yield
        missing = kernels - (adapter_kernels.launched - before).keys()
        if missing and not self.exact and self.device.startswith("cuda"):
            self.idle.append(f"{check}: adapters ran without the kernels {', '.join(sorted(missing))}")

    def checks(self) -> Found:
        """Everything that this device can run."""
        found: Found = {}
        with self._noting():
            for mode in ("static", "graph") if self.device.startswith("cuda") else ("static",):
                found |= self.decoding(mode)
                found |= parity_decode.with_adapters(self, mode) | parity_decode.with_adapters(self, mode, default=True)
                found |= parity_decode.moving(self, mode)
                if mode == "graph":
                    found |= parity_decode.after_a_failure(self)
            if self.exact:
                found |= self.together()
            found |= self.deferred()
            found |= parity_adapters.adapters(self)
            found |= self.packed()
            found |= self.vision()
            found |= self.layers()
            found |= self.replay()
            found |= parity_span.spans(self) | parity_span.split_steps(self)
        return found

    @contextmanager
    def _noting(self) -> Iterator[None]:
        with warnings.catch_warnings(record=True) as caught, parity_span.trials(self):
            warnings.simplefilter("always")
            yield
        self.notes += sorted({str(each.message) for each in caught if _NOTICE.match(str(each.message))})

    # ------------------------------------------------------------------ rollouts

    @torch.no_grad()
    def decoding(self, mode: str) -> Found:
        """Latent steps and decoding in static shapes, twice with the same buffers."""
        ours, prompts = self.ours, self.ask(self.ours)
        fast = FastDecode(ours, recorded=mode == "graph", **self.buffers)
        state, _ = prefill(ours, ours.batch(prompts))
        right, _ = prefill(self.truth, self.truth.batch(prompts))
        z_right, z_plain = think(self.truth, right, K)[1], think(ours, state, K)[1]
        latents, logps, scored, plain, texts, others = [], [], [], [], [], []
        for seed in (3, 4):
            made = self._sampled(prompts, seed, fast)
            ids, real, recorded = made.tensors()
            latents.append(made.latents_BKD)
            logps.append(recorded[real])
            scored.append(self._scored(self.truth, right, made)[real])
            plain.append(self._scored(ours, state, made)[real])
            texts.append(ids)
            others.append(self._sampled(prompts, seed, None).tensors()[0] if self.exact else ids)
        yardstick = None if self.exact else (vectors([z_plain] * 2), flat(plain))
        found: Found = {
            f"{mode} decode: latents": (vectors(latents), vectors([z_right] * 2), yardstick and yardstick[0]),
            f"{mode} decode: log-probs": (flat(logps), flat(scored), yardstick and yardstick[1]),
        }
        if self.exact:
            found[f"{mode} decode: texts"] = (*_padded(texts, others), None)
        again, _, logp = self._sampled(prompts, 3, fast).tensors()
        first = self._sampled(prompts, 3, fast).tensors()
        found[f"{mode} decode: the same again"] = (flat([again, logp]), flat([first[0], first[2]]), None)
        found[f"{mode} decode: after an update"] = self._updated(prompts, fast)
        self.count(f"{mode} decode", fast.counts, mode == "graph")
        return found

    def _updated(self, prompts: list[Prompt], fast: FastDecode) -> tuple[Tensor, Tensor, Tensor | None]:
        """Latents after weights have changed in place, as an optimizer does it, with what was recorded before."""
        with grown(self.ours), grown(self.truth):
            latents = [self._sampled(prompts, 3, each).latents_BKD for each in (fast, None)]
            state, _ = prefill(self.truth, self.truth.batch(prompts))
            right = think(self.truth, state, K)[1]
        return vectors([latents[0]]), vectors([right]), None if self.exact else vectors([latents[1]])

    def _sampled(self, prompts: list[Prompt], seed: int, fast: FastDecode | None) -> Rollout:
        return rollout(self.ours, prompts, group=self.group, sampling=SAMPLING, seed=seed, latents=K, fast=fast)

    def _scored(self, backbone: Backbone, state: Any, made: Rollout) -> Tensor:
        """Log-probabilities of what was sampled, behind the latents of the rollout, by the plain path."""
        ids, real, _ = made.tensors(backbone.device)
        after, _ = splice(backbone, state, made.latents_BKD.to(backbone.device, backbone.dtype))
        options = {"temperature": made.temperature, "forbidden": backbone.forbidden_ids()}
        return score(backbone, after, ids, real, **options)[0].cpu()

    def together(self) -> Found:
        """All prompts in one rollout, or each alone with its own seed."""
        prompts = self.ask(self.ours)
        options = {"group": GROUP, "sampling": SAMPLING, "latents": K}
        every = rollout(self.ours, prompts, seed=[7 + i for i in range(len(prompts))], **options)
        alone = [rollout(self.ours, [prompt], seed=[7 + i], **options) for i, prompt in enumerate(prompts)]
        joined = Rollout([each.completions[0] for each in alone], every.latents_BKD, every.temperature)
        return {"rollout together = alone: texts": (*_padded([every.tensors()[0]], [joined.tensors()[0]]), None)}

    # ------------------------------------------------------------------ gradients

    def deferred(self) -> Found:
        """Weight gradients of latent steps multiplied out together; the matrices of tiny models take part too."""
        ours, deferral = self.deferring(self.load(self.dtype, self.device))
        found: Found = {}
        for memory in MEMORY:
            right = self._gradient(self.truth, memory)
            stock = None if self.exact else self._gradient(self.ours, memory)
            found[f"deferred gradients, {memory}"] = (self._gradient(ours, memory), right, stock)
        with deferral.into_grad():
            straight = self._gradient(ours, "cached", in_place=True)
        found["deferred gradients, in place"] = (straight, right, stock)
        return found

    def deferring(self, ours: Backbone) -> tuple[Backbone, gradients.Deferral]:
        before, gradients.LEAST = gradients.LEAST, 0
        try:
            ours.freeze_vision()
            deferral = gradients.defer_gradients(ours.model)
        finally:
            gradients.LEAST = before
        for plain in (self.ours, self.truth):
            plain.freeze_vision()
        assert deferral is not None
        return ours, deferral

    def _gradient(self, backbone: Backbone, memory: Any, in_place: bool = False) -> Tensor:
        """Of a scalar of all latents and of an answer, by all trained parameters."""
        prompts = self.ask(backbone)[:2]
        generator = torch.Generator().manual_seed(6)
        weight = torch.randn(2, FEW, backbone.width, generator=generator).to(backbone.device)
        ids = torch.randint(5, 200, (2, 4), generator=generator).to(backbone.device)
        _, after, z_BKD = trajectory(backbone, backbone.batch(prompts), latents=FEW, memory=memory)
        logp, _, _ = score(backbone, after, ids[:, None], checkpointed=memory == "checkpointed")
        return gradients_of(backbone, (z_BKD.float() * weight).sum() + logp.sum(), in_place)

    def packed(self) -> Found:
        """Stage 1 with attention inside each example of a packed row, against the mask."""
        right = self._stage1(self.truth, False)
        plain = None if self.exact else self._stage1(self.ours, False)
        runs = {"packed rows": self.ours}
        if self.dense:
            runs["packed rows, as by default"] = self.load(self.dtype, self.device, fast=True)
        found: Found = {}
        for name, ours in runs.items():
            ours.freeze_vision()
            mine = self._stage1(ours, True)
            found |= {f"{name}: {part}": (mine[i], right[i], plain and plain[i]) for i, part in enumerate(_STAGE1)}
        return found

    def _stage1(self, backbone: Backbone, variable_length: bool) -> tuple[Tensor, Tensor]:
        markers, generator, rows = backbone.markers, torch.Generator().manual_seed(9), []
        for prompt in self.ask(backbone)[:3]:
            targets = torch.arange(2)
            span = torch.tensor([markers.start, *[markers.slot] * len(targets), markers.end])
            response = torch.randint(5, 200, (5 + len(rows),), generator=generator)
            ids = torch.cat([prompt.ids, span, response])
            rows.append(SftExample(Prompt(ids, prompt.images), len(prompt), targets))
        batch = pack_rows(backbone, [rows[:2], rows[2:]], variable_length=variable_length).to(backbone.device)
        loss, _ = Step(LvrSft(backbone, LvrSftConfig()))(batch)
        return flat([loss]), gradients_of(backbone, loss, in_place=False)

    def replay(self) -> Found:
        """Answers behind a span: attention to the trunk and inside each branch, against the mask. In float32 a GPU has
        no flash attention, and both are the mask."""
        found: Found = {}
        for trunk, count in TRUNKS.items():
            for memory in ("cached", "checkpointed"):
                right = self._replayed(self.truth, count, memory, False)
                plain = None if self.exact else self._replayed(self.ours, count, memory, False)
                mine = self._replayed(self.ours, count, memory, True)
                for i, name in enumerate(("log-probs", "readouts", f"gradients, {memory}")):
                    found[f"split replay of {trunk}: {name}"] = (mine[i], right[i], plain and plain[i])
        return found

    def _replayed(self, backbone: Backbone, count: int, memory: str, split: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities of answers of unequal length, what they read of the latents, and the gradients."""
        generator, size, device = torch.Generator().manual_seed(11), 6, backbone.device
        ids = torch.randint(5, 200, (count, GROUP, size), generator=generator).to(device)
        real = (torch.arange(size) < torch.randint(1, size + 1, (count, GROUP, 1), generator=generator)).to(device)
        z_BKD = torch.randn(count, K, backbone.width, generator=generator).to(device, backbone.dtype)
        weight = torch.randn(count, GROUP, 1, generator=generator).to(device)
        passes: dict[str, Any] = {"checkpointed": memory != "cached"}
        state, _ = prefill(backbone, backbone.batch(self.ask(backbone)[:count]), **passes)
        after, _ = splice(backbone, state, z_BKD, branches=int(split), **passes)
        probe = Probe(columns=after.slots)
        logp, _, _ = score(backbone, after, ids, real, split=split, probes=[probe], **passes)
        rows = probe.mean()[real.flatten(1)]
        return flat([logp[real]]), flat([rows]), gradients_of(backbone, (logp * weight).sum(), in_place=False)

    @torch.no_grad()
    def vision(self) -> Found:
        """The frozen tower over padded copies of its weights."""
        ours, images = self.ours, [image for prompt in self.ask(self.ours) for image in prompt.images]
        plain = ours.encode_images(images)
        if self.device.startswith("cuda"):
            ours.fast_vision = True
            fast = ours.encode_images([ours.staged(image) for image in images])
            ours.fast_vision = False
        else:  # no pinned memory
            unique = list({image.key: image for image in images}.values())
            pixels = torch.cat([image.pixels for image in unique]).to(ours.dtype)
            assert len(unique) == len(images)
            with ours._padded_vision.running(), ours._fused_vision.running():
                features, deepstack = ours._encode(pixels, unique)
            fast = replace(plain, features_ND=features, deepstack=tuple(deepstack))
        right = self.truth.encode_images(images)
        mine, expected, stock = (flat([each.features_ND, *each.deepstack]) for each in (fast, right, plain))
        return {"fast vision: tokens": (mine, expected, None if self.exact else stock)}

    def layers(self) -> Found:
        """In fewer kernels: a prefill, latent steps and decoding (on a GPU as CUDA graphs), and gradients."""
        prompts = self.ask(self.ours)
        with uneven_norms(self.ours), uneven_norms(self.truth):
            right, plain = self._passed(self.truth), self._passed(self.ours)
            other = self._sampled(prompts, 3, None).tensors()[0]
            self.ours.fused_layers = True
            fast = FastDecode(self.ours, recorded=self.device.startswith("cuda"), **self.buffers)
            mine, made = self._passed(self.ours), self._sampled(prompts, 3, fast)
            self.ours.fused_layers = False
            scored = [self._behind(backbone, made) for backbone in (self.truth, self.ours)]
        ids, real, logp = made.tensors()
        mine |= {"latents, decoded fast": vectors([made.latents_BKD]), "log-probs, decoded fast": flat([logp[real]])}
        right["log-probs, decoded fast"], plain["log-probs, decoded fast"] = (flat([each[real]]) for each in scored)
        found: Found = {
            f"fused layers: {name}": (mine[name], right[name], None if self.exact else plain[name]) for name in mine
        }
        if self.exact:
            found["fused layers: texts, decoded fast"] = (*_padded([ids], [other]), None)
        self.count("fused layers, decoded fast", fast.counts, self.device.startswith("cuda"))
        return found

    @torch.no_grad()
    def _behind(self, backbone: Backbone, made: Rollout) -> Tensor:
        state, _ = prefill(backbone, backbone.batch(self.ask(backbone)))
        return self._scored(backbone, state, made)

    def _passed(self, backbone: Backbone) -> dict[str, Tensor]:
        with torch.no_grad():
            state, hidden = prefill(backbone, backbone.batch(self.ask(backbone)))
            latents = think(backbone, state, K)[1]
        gradients = {f"gradients, {memory}": self._gradient(backbone, memory) for memory in MEMORY}
        return {"states": flat([hidden]), "latents, decoded fast": vectors([latents])} | gradients


def throughout(counts: Counter[str]) -> bool:
    """Whether steps were recorded and replayed, and none ran in another way."""
    return min(counts["recorded"], counts["replayed"]) > 0 and not counts["plain"] + counts["eager"]


WIDE_GROUP = 12
"""Branches whose queries of one K/V head are more than a program of the attention kernel takes."""


def wide(preset: str, layers: int, dtype: torch.dtype, device: str) -> Paths:
    """Random weights with the widths of a paper backbone, few layers, and prompts of real length."""
    from foundation import random_backbone
    from memory import _prompt, model

    def fresh(dtype: torch.dtype, device: str) -> Backbone:
        if ":" in preset:  # a tiny model, to try this out
            return model(preset, torch.device(device), dtype)
        return random_backbone(preset, torch.device(device), dtype, layers)

    torch.manual_seed(0)
    base = fresh(torch.float32, device)

    def load(dtype: torch.dtype, device: str) -> Backbone:
        found = fresh(dtype, device)
        found.model.load_state_dict(base.model.state_dict())
        return found

    grids = ((40, 64), (24, 31), (16, 50)) if ":" not in preset else ((4, 6), (3, 5), (2, 4))
    prompts = [_prompt(base, grid) for grid in grids]
    return Paths(load, dtype, device, lambda _: prompts, right_on=device, group=WIDE_GROUP)


def _padded(one: list[Tensor], other: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Ids of both as long as the longer; a text that ended early differs."""
    pairs = []
    for a, b in zip(one, other, strict=True):
        size = max(a.shape[-1], b.shape[-1])
        pairs.append([torch.nn.functional.pad(x, (0, size - x.shape[-1]), value=-1) for x in (a, b)])
    return flat([a for a, _ in pairs]), flat([b for _, b in pairs])
