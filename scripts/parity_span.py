"""Spans with gradient against the plain one, for `device_parity.py`: steps of ReaLVR with a recorded span, and latent
steps that attend to the prompt as it lies.

Recorded on a GPU as CUDA graphs; elsewhere with the stand-in of the tests, which repeats recorded operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

import op_tape
from realvr.backbone import Backbone, Prompt, flash_checks
from realvr.backbone.noise import Noise
from realvr.latent import score, trajectory, trial
from realvr.latent.modes import COLUMNS
from realvr.latent.recorded_span import RecordedSpan
from realvr.training.adapters import Adapters
from realvr.training.method import Step
from realvr.training.methods.realvr import ReaLVR, ReaLVRConfig
from realvr.training.rl_batch import RlBatch
from realvr.training.sections import LoraSettings

if TYPE_CHECKING:
    from parity_paths import Found, Paths

LoadFast = Callable[[torch.dtype, str, bool], Backbone]

K, GROUP, SIZE, ANSWERS, NEGATIVES = 4, 2, 5, 3, 1

MEMORY = ("cached", "checkpointed-prefill", "checkpointed")
TRUNKS = {"one prompt": 1, "padded prompts": 3}


class How(NamedTuple):
    name: str
    split: bool = False
    """Latent steps and replay attend to the prompt as it lies."""
    fast: bool = False
    """With fast vision, fused layers, and kernels for adapters."""
    kernels: tuple[str, ...] = ()
    """Those for adapters that must have run."""


RECORDED = (
    How("recorded span"),
    How("recorded span, split", split=True),
    How("recorded span, as by default", split=True, fast=True),
)
ADAPTED = (
    How("recorded span with adapters", split=True),
    How("recorded span with adapters, as by default", True, True, kernels=("narrow", "widen", "summed")),
)
MEASURED: dict[str, tuple[str, float, float | None]] = {
    "losses": ("relative", 1e-5, 0.05),
    "gradients": ("relative", 1e-4, 0.1),
    "gradients, undetached": ("relative", 1e-4, 0.1),
    "gradients after an update": ("relative", 1e-4, 0.1),
}
# name -> (measure, float32 tolerance, bfloat16 floor)
CHECKS: dict[str, tuple[str, float, float | None]] = {
    **{f"{how.name}: {part}": limits for how in (*RECORDED, *ADAPTED) for part, limits in MEASURED.items()},
    **{f"split steps of {trunk}: latents": ("relative", 1e-5, 0.05) for trunk in TRUNKS},
    **{
        f"split steps of {trunk}: gradients, {memory}": ("relative", 1e-4, 0.1) for trunk in TRUNKS for memory in MEMORY
    },
}


def flat(parts: list[Tensor]) -> Tensor:
    return torch.cat([part.detach().float().cpu().flatten() for part in parts])


def vectors(parts: list[Tensor]) -> Tensor:
    """(N, D): of each its own distance counts."""
    return torch.cat([part.detach().float().cpu().flatten(0, -2) for part in parts])


def gradients_of(backbone: Backbone, scalar: Tensor, in_place: bool) -> Tensor:
    parameters = [p for _, p in sorted(backbone.model.named_parameters()) if p.requires_grad]
    if in_place:
        scalar.backward()
        grads = [p.grad for p in parameters]
        backbone.model.zero_grad(set_to_none=True)
    else:
        grads = list(torch.autograd.grad(scalar, parameters, allow_unused=True))
    return flat([torch.zeros_like(p) if g is None else g for p, g in zip(parameters, grads, strict=True)])


@contextmanager
def grown(backbone: Backbone) -> Iterator[None]:
    """With larger matrices in the decoder: by so much that latents of the old ones are further off than bfloat16
    rounds."""
    trained = [p.data for p in backbone.decoder.parameters() if p.dim() == 2]
    before = [p.clone() for p in trained]
    for parameter in trained:
        parameter.mul_(1.2)
    try:
        yield
    finally:
        for parameter, old in zip(trained, before, strict=True):
            parameter.copy_(old)


@contextmanager
def uneven_norms(backbone: Backbone) -> Iterator[None]:
    """Random models have norms with equal weights, which would hide what is done with them."""
    generator = torch.Generator().manual_seed(10)
    weights = [p.data for name, p in sorted(backbone.decoder.named_parameters()) if "norm" in name]
    before = [weight.clone() for weight in weights]
    for weight in weights:
        weight.add_(0.5 * torch.rand(weight.shape, generator=generator).bfloat16().to(weight))
    try:
        yield
    finally:
        for weight, old in zip(weights, before, strict=True):
            weight.copy_(old)


def recorder(backbone: Backbone, columns: int) -> RecordedSpan:
    return RecordedSpan(backbone, columns=columns, record=None if backbone.device.type == "cuda" else op_tape.record)


def stepped(backbone: Backbone, prompts: list[Prompt], memory: Any, split: bool) -> tuple[Tensor, Tensor]:
    """All latents, and the gradient of a scalar of them and of an answer by all trained parameters."""
    generator, rows = torch.Generator().manual_seed(6), len(prompts)
    weight = torch.randn(rows, K, backbone.width, generator=generator).to(backbone.device)
    ids = torch.randint(5, 200, (rows, 4), generator=generator).to(backbone.device)
    _, after, z_BKD = trajectory(backbone, backbone.batch(prompts), latents=K, memory=memory, split=split)
    logp, _, _ = score(backbone, after, ids[:, None], checkpointed=memory == "checkpointed")
    return vectors([z_BKD]), gradients_of(backbone, (z_BKD.float() * weight).sum() + logp.sum(), in_place=False)


def split_steps(paths: Paths) -> Found:
    """Attention to the prompt as it lies, against joined keys and values. In float32 a GPU has no flash attention, and
    they are joined too."""
    found: Found = {}
    for trunk, count in TRUNKS.items():
        for memory in MEMORY:
            right, plain, mine = (
                stepped(each, paths.ask(each)[:count], memory, split)
                for each, split in ((paths.truth, False), (paths.ours, False), (paths.ours, True))
            )
            for i, name in enumerate(("latents", f"gradients, {memory}")):
                found[f"split steps of {trunk}: {name}"] = (mine[i], right[i], None if paths.exact else plain[i])
    return found


def spans(paths: Paths) -> Found:
    """Latent steps with gradient, recorded forward and backward, by themselves and with all that is on by default:
    with all weights trained, and with adapters."""
    found = _spans(paths, RECORDED, partial(_trained, paths), lambda *place: paths.deferring(paths.load(*place))[0])
    adapted = partial(with_adapters, paths)
    return found | _spans(paths, ADAPTED, adapted, adapted)


def _spans(paths: Paths, ways: Sequence[How], plain: LoadFast, recorded: LoadFast) -> Found:
    truth, stock = plain(torch.float32, str(paths.truth.device), False), plain(paths.dtype, paths.device, False)
    ours = {fast: recorded(paths.dtype, paths.device, fast) for fast in (False, True)}
    found: Found = {}
    with ExitStack() as stack:
        for backbone in (truth, stock, *ours.values()):
            stack.enter_context(uneven_norms(backbone))
        right, yardstick = _stepped(paths, truth), None if paths.exact else _stepped(paths, stock)
        for how in ways:
            if how.fast and not paths.dense:  # experts have no recorded span by default
                continue
            with paths.adapting(how.name, set(how.kernels)):
                mine = _recorded(paths, how, ours[how.fast])
            found |= {f"{how.name}: {part}": (mine[part], right[part], yardstick and yardstick[part]) for part in mine}
    return found


def with_adapters(paths: Paths, dtype: torch.dtype, device: str, fast: bool = False, kernels: bool = False) -> Backbone:
    backbone = paths.load(dtype, device, fast)
    Adapters(backbone, LoraSettings(rank=4, alpha=8, kernels=fast or kernels))
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for name, parameter in sorted(backbone.model.named_parameters()):
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return backbone


def _trained(paths: Paths, dtype: torch.dtype, device: str, fast: bool) -> Backbone:
    backbone = paths.load(dtype, device, fast)
    backbone.freeze_vision()
    return backbone


def _recorded(paths: Paths, how: How, ours: Backbone) -> dict[str, Tensor]:
    recorded = recorder(ours, paths.buffers.get("columns", COLUMNS))
    found = _stepped(paths, ours, recorded, how.split)
    paths.count(how.name, recorded.counts, True)
    recorded.release()
    return found


def _stepped(
    paths: Paths, backbone: Backbone, recorded: RecordedSpan | None = None, split: bool = False
) -> dict[str, Tensor]:
    return measured(backbone, paths.ask(backbone)[:2], recorded, split)


def measured(
    backbone: Backbone, prompts: list[Prompt], recorded: RecordedSpan | None, split: bool = False
) -> dict[str, Tensor]:
    """Losses and gradients of two steps of one shape, of one whose credit has a gradient, and of one after the weights
    have changed in place."""

    def step(detach: bool, order: int) -> tuple[Tensor, Tensor]:
        # No ratio is clipped, every hinge is active, and no negative is harder than another: nothing depends on which
        # side of an edge rounding falls.
        config = ReaLVRConfig(type="realvr", detach=detach, margin=2, clip=0.99, clip_high=1e6, lambda_ev=1)
        method = ReaLVR(backbone, config.model_copy(update={"split_attention": split}))
        method.recorded = recorded
        loss, _ = Step(method)(_batch(backbone, prompts[::order]))
        return loss.detach()[None], gradients_of(backbone, loss, in_place=False)

    first, second = step(True, 1), step(True, -1)
    whole = step(False, 1)
    with grown(backbone):
        after = step(True, 1)
    losses = [loss for loss, _ in (first, second, whole, after)]
    found = (flat(losses), flat([first[1], second[1]]), whole[1], after[1])
    return dict(zip(MEASURED, found, strict=True))


def _batch(backbone: Backbone, prompts: list[Prompt]) -> RlBatch:
    generator, device, rows, width = torch.Generator().manual_seed(12), backbone.device, len(prompts), backbone.width

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    def ids(*shape: int) -> Tensor:
        return torch.randint(40, 200, shape, generator=generator).to(device)

    def ones(*shape: int) -> Tensor:
        return torch.ones(shape, dtype=torch.bool, device=device)

    batch = backbone.batch(prompts)
    return RlBatch(
        batch=batch,
        visual=backbone.encode_images(batch.images),
        latents_BKD=normal(rows, K, width).to(backbone.dtype),
        ids_BGS=ids(rows, GROUP, SIZE),
        real_BGS=ones(rows, GROUP, SIZE),
        old_logp_BGS=torch.full((rows, GROUP, SIZE), -6.0, device=device),
        advantages_BG=normal(rows, GROUP) * 0.1,
        policy_denominator=torch.tensor(float(rows * GROUP), device=device),
        positive_BD=normal(rows, width),
        negatives_BMD=normal(rows, NEGATIVES, width),
        valid_BM=ones(rows, NEGATIVES),
        answers_BYS=ids(rows, ANSWERS, SIZE),
        answers_real_BYS=ones(rows, ANSWERS, SIZE),
        content_BYS=ones(rows, ANSWERS, SIZE),
        wrong_BY=ones(rows, ANSWERS - 1),
        prompts_total=float(rows),
    )


@contextmanager
def trials(paths: Paths) -> Iterator[None]:
    """Notes how far replays were from the steps they repeat, and flash attention from its definition."""
    gaps, gap = [], trial.gap

    def seen(*made: trial.Made) -> float:
        gaps.append(gap(*made))
        return gaps[-1]

    trial.gap = seen
    try:
        yield
    finally:
        trial.gap = gap
    if gaps:
        paths.notes.append(f"{len(gaps)} recordings on trial: at most {max(gaps):.1e} from their steps")
    if not (paths.exact and paths.device.startswith("cuda")):
        width = paths.ours.decoder.layers[0].self_attn.head_dim
        far = flash_checks._merged_gap(Noise(torch.device(paths.device)), paths.dtype, width)
        paths.notes.append(f"flash attention in parts: {far:.1e} from its definition, {width} wide")
