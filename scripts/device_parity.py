"""Does the adapter compute on this device what stock transformers computes on the CPU in float32?

For each family a tiny random checkpoint is built. The reference is a stock model with eager attention on the CPU in
float32, without a cache (`tests/reference.py`). The adapter runs on the device in float32 and in bfloat16. For bfloat16
the table also gives the distance of the *stock* bfloat16 model on the same device from the reference. Only luck gets
closer than that, so it is the yardstick.

    python scripts/device_parity.py                 # the GPU where there is one
    python scripts/device_parity.py --device cpu --families gemma3

Prints one table last; exits with 1 if anything is out of tolerance.

Tolerances. The measure is ||a - b|| / ||b|| over all compared numbers; for attention rows and log-probabilities it is
the largest absolute difference. For latents in bfloat16 it is the median over latents: the recurrence of a random model
may blow up the rounding of one prompt, stock's as well as ours. float32: 1e-5 for states, 1e-4 for gradients and
log-probabilities, 1e-6 for attention rows. bfloat16: three times the yardstick, or the floor in ``CHECKS`` where the
yardstick is smaller.

Fast paths (`parity_paths.py`) are compared with the plain path, gradients included: decoding in static shapes and as
CUDA graphs, rollouts of several prompts, deferred weight gradients, adapters, attention inside packed examples, the
padded vision tower, fused layers, split attention of replays and latent steps, recorded spans; and all of them
together, as they are on by default. Texts must be the same in float32. Notices say where a path does not apply. It is
also an error if steps that should have been recorded were not, or, on a GPU, if one of our own kernels was never
launched or was left out.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), *(str(ROOT / name) for name in ("tests", "scripts", "benchmarks"))]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import parity_paths  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from parity_span import vectors  # noqa: E402
from torch import Tensor  # noqa: E402

import reference  # noqa: E402
from golden_cases import CaseImage, make_image  # noqa: E402
from realvr.backbone import FAMILIES, Backbone, Probe, Prompt, Turn, decode_kernels  # noqa: E402
from realvr.backbone.prompts import tail  # noqa: E402
from realvr.latent import Sampling, extend, prefill, score, splice, think, trajectory  # noqa: E402
from realvr.latent.group_rollout import rollout  # noqa: E402
from realvr.training import adapter_kernels  # noqa: E402
from realvr.zoo.tiny import build  # noqa: E402

K = 8
GROUP = 4
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16

# name -> (measure, float32 tolerance, bfloat16 floor); a floor of None means float32 only
CHECKS: dict[str, tuple[str, float, float | None]] = {
    "prefill logits": ("relative", 1e-5, 0.02),
    "latents": ("relative", 1e-5, 0.05),
    "teacher-forced log-probs": ("absolute", 1e-4, 0.2),
    "rollout = teacher-forced": ("absolute", 1e-4, 0.2),
    "attention rows to slots": ("absolute", 1e-6, 0.01),
    "attention rows to image": ("absolute", 1e-6, 0.01),
    "padded batch = alone": ("relative", 1e-5, 0.02),
    "two turns live = at once": ("relative", 1e-5, 0.02),
    "gradients, cached": ("relative", 1e-4, None),
    "gradients, checkpointed-prefill": ("relative", 1e-4, None),
    "gradients, checkpointed": ("relative", 1e-4, None),
    **parity_paths.CHECKS,
}


@dataclass
class Line:
    family: str
    dtype: str
    check: str
    absolute: float
    relative: float
    yardstick: float | None
    tolerance: float
    ok: bool


def distance(a: Tensor, b: Tensor, exact: bool) -> tuple[float, float]:
    """Largest absolute difference, and the norm of the difference relative to that of ``b``; of several vectors, unless
    ``exact``, the median of theirs. NaN counts as infinite."""
    a, b = a.detach().double().cpu(), b.detach().double().cpu()
    assert a.shape == b.shape, f"{tuple(a.shape)} is not {tuple(b.shape)}"
    gap = (a - b).nan_to_num(nan=float("inf"))
    if b.dim() == 1 or exact:
        return float(gap.abs().max()), float(gap.norm() / b.norm().clamp(min=1e-30))
    return float(gap.abs().max()), float((gap.norm(dim=1) / b.norm(dim=1).clamp(min=1e-30)).median())


def image(number: int) -> Any:
    width, height = ((84, 56), (63, 130), (200, 40), (57, 60))[number % 4]
    return make_image(CaseImage(width, height, number))


def questions(backbone: Backbone) -> list[Prompt]:
    """Different lengths and image sizes, one without an image."""
    return [
        backbone.prompt([Turn("user", "What color is the small circle?", [image(0)])]),
        backbone.prompt([Turn("user", "Which of the two is larger, and which is closer to the border?", [image(1)])]),
        backbone.prompt([Turn("user", "What has changed between them?", [image(2), image(3)])]),
        backbone.prompt([Turn("user", "Count to three.")]),
    ]


class Stock:
    """A stock model over single prompts: what every number is compared with."""

    def __init__(self, backbone: Backbone, path: Path, dtype: torch.dtype, device: str) -> None:
        self.ours, self.device, self.dtype = backbone, device, dtype
        self.model = reference.load(path, dtype, "eager", device)

    def begin(self, prompt: Prompt) -> reference.Sequence:
        ids = prompt.ids[None].to(self.device)
        pixels = grids = None
        if prompt.images:
            pixels = torch.cat([i.pixels for i in prompt.images]).to(self.device)
            if self.ours.mrope:
                merge = self.ours.model.config.vision_config.spatial_merge_size
                rows = [[1, i.grid.rows * merge, i.grid.cols * merge] for i in prompt.images]
                grids = torch.tensor(rows, device=self.device)
        sequence = reference.begin(self.model, ids, None, pixels, grids)
        if prompt.latents:
            where = sequence.ids == self.ours.markers.slot
            sequence = reference.with_embeds(sequence, where, torch.cat(prompt.latents))
        return sequence

    def column(self, token: int, count: int = 1) -> Tensor:
        return torch.full((1, count), token, device=self.device)

    def splice(self, sequence: reference.Sequence, z_KD: Tensor) -> reference.Sequence:
        markers, z_KD = self.ours.markers, z_KD.to(self.device, self.dtype)
        sequence = reference.append(self.model, sequence, self.column(markers.start))
        sequence = reference.append(self.model, sequence, self.column(markers.slot, len(z_KD)), embeds=z_KD[None])
        return reference.append(self.model, sequence, self.column(markers.end))

    def think(self, sequence: reference.Sequence) -> tuple[reference.Sequence, Tensor]:
        markers = self.ours.markers
        return reference.think(self.model, sequence, K, markers.start, markers.slot, markers.end)

    def hidden(self, prompt: Prompt) -> Tensor:
        return reference.hidden(self.model, self.begin(prompt))

    def answers(self, prompt: Prompt, z_KD: Tensor, ids: list[int], temperature: float) -> Tensor:
        """Teacher-forced log-probabilities with forbidden ids at -inf, after the given span."""
        sequence = self.splice(self.begin(prompt), z_KD)
        tokens = torch.tensor([ids], device=self.device)
        states = reference.hidden(self.model, reference.append(self.model, sequence, tokens))[:, -len(ids) - 1 : -1]
        logits = self.model.lm_head(states).float() / temperature
        logits[..., self.ours.forbidden_ids().to(self.device)] = float("-inf")
        return logits.log_softmax(-1).gather(-1, tokens[..., None])[0, :, 0]

    def rows(self, prompt: Prompt, z_KD: Tensor, ids: Tensor) -> Tensor:
        """Attention (L, H, T, T) of prompt, span and answer."""
        sequence = self.splice(self.begin(prompt), z_KD)
        sequence = reference.append(self.model, sequence, ids[None].to(self.device))
        return reference.attentions(self.model, sequence)[:, 0]


@torch.no_grad()
def forward_checks(ours: Backbone, truth: Stock, yard: Stock | None) -> dict[str, tuple[Tensor, Tensor, Tensor | None]]:
    """Per check: our number, what it should be, and the stock model of the same number format (the yardstick)."""
    prompts = questions(ours)
    batch = ours.batch(prompts)
    state, hidden = prefill(ours, batch)
    after, z_BKD = think(ours, state, K)
    found: dict[str, tuple[Tensor, Tensor, Tensor | None]] = {}

    def both(make: Any, joined: Any = _flat) -> tuple[Tensor, Tensor | None]:
        return joined(make(truth)), None if yard is None else joined(make(yard))

    def logits(stock: Stock) -> list[Tensor]:
        return [stock.model.lm_head(stock.hidden(prompt))[0] for prompt in prompts]

    mine = [ours.logits(hidden[row, -len(prompt) :]) for row, prompt in enumerate(prompts)]
    found["prefill logits"] = (_flat(mine), *both(logits))
    found["latents"] = (vectors([z_BKD]), *both(lambda s: [s.think(s.begin(p))[1] for p in prompts], vectors))

    sampled = rollout(ours, prompts, group=GROUP, sampling=Sampling(max_new=12), seed=3, latents=K)
    ids, real, recorded = sampled.tensors(ours.device)
    replay, _ = splice(ours, state, sampled.latents_BKD)
    options = {"temperature": sampled.temperature, "forbidden": ours.forbidden_ids()}
    scored, _, _ = score(ours, replay, ids, real, **options)
    groups = [
        (p, z, c.ids) for p, z, g in zip(prompts, sampled.latents_BKD, sampled.completions, strict=True) for c in g
    ]
    right = both(lambda s: [s.answers(p, z, answer, sampled.temperature) for p, z, answer in groups])
    found["teacher-forced log-probs"] = (scored[real], *right)
    drift = None if yard is None else recorded[real].cpu() + (right[1] - right[0]).cpu()
    found["rollout = teacher-forced"] = (scored[real], recorded[real], drift)
    found |= _row_checks(ours, prompts, state, both)

    alone = [prefill(ours, ours.batch([prompt]))[1][0] for prompt in prompts]
    together = [hidden[row, -len(prompt) :] for row, prompt in enumerate(prompts)]
    single = both(lambda s: [s.hidden(prompt)[0] for prompt in prompts])
    drift = None if yard is None else _flat(alone) + (single[1] - single[0])
    found["padded batch = alone"] = (_flat(together), _flat(alone), drift)
    live, once, whole = _two_turns(ours)
    single = both(lambda s: [s.hidden(whole)[0, -live.shape[0] :]])
    drift = None if yard is None else _flat([once]) + (single[1] - single[0])
    found["two turns live = at once"] = (_flat([live]), _flat([once]), drift)
    return found


def _flat(parts: list[Tensor]) -> Tensor:
    return torch.cat([part.float().cpu().flatten() for part in parts])


def _row_checks(ours: Backbone, prompts: list[Prompt], state: Any, both: Any) -> dict[str, Any]:
    """Answer tokens to slots and slots to image tokens, over the two prompts with one image each."""
    state = state.select(torch.arange(2, device=ours.device))
    generator = torch.Generator().manual_seed(2)
    z_BKD = think(ours, state, K)[1]
    ids = torch.randint(5, 200, (2, 6), generator=generator)
    count = min(image.tokens for prompt in prompts[:2] for image in prompt.images)
    columns = torch.stack([row.nonzero()[:count, 0] for row in state.image_BT])
    slots = torch.arange(1, K + 1, device=ours.device).expand(2, -1)
    to_image = Probe(rows=slots, columns=columns, heads=True)
    after, _ = splice(ours, state, z_BKD, probes=[to_image])
    to_slots = Probe(columns=after.slots, heads=True)
    score(ours, after, ids[:, None].to(ours.device), probes=[to_slots])
    size = ids.shape[1]

    def answer_rows(stock: Stock) -> list[Tensor]:
        rows = [stock.rows(p, z, i) for p, z, i in zip(prompts[:2], z_BKD, ids, strict=True)]
        return [torch.stack([r[:, :, -size:, -size - 1 - K : -size - 1] for r in rows], 1)]

    def image_rows(stock: Stock) -> list[Tensor]:
        parts = []
        for prompt, z, i in zip(prompts[:2], z_BKD, ids, strict=True):
            where = (prompt.ids == ours.image_id).nonzero()[:count, 0].to(stock.device)
            parts.append(stock.rows(prompt, z, i)[:, :, -size - 1 - K : -size - 1][..., where])
        return [torch.stack(parts, 1)]

    return {
        "attention rows to slots": (_flat([to_slots.stack()]), *both(answer_rows)),
        "attention rows to image": (_flat([to_image.stack()]), *both(image_rows)),
    }


def _two_turns(ours: Backbone) -> tuple[Tensor, Tensor, Prompt]:
    """Hidden states of a second turn with a new image: live, and encoded at once; and the whole conversation."""
    first = [Turn("user", "What color is the small circle?", [image(0)])]
    prompt = ours.prompt(first)
    state, _ = prefill(ours, ours.batch([prompt]))
    state, z_BKD = think(ours, state, K)
    reply = torch.randint(5, 200, (5,), generator=torch.Generator().manual_seed(4))
    state, _ = extend(ours, state, reply[None].to(ours.device))
    second = [Turn("assistant", latents=z_BKD[0], ids=reply.tolist()), Turn("user", "And in this one?", [image(2)])]
    whole = ours.prompt([*first, *second])
    rest = tail(whole, len(prompt) + K + 2 + len(reply), ours.image_id, ours.markers.slot)
    _, live = prefill(ours, ours.batch([rest], start_B=state.next_B), state=state)
    _, once = prefill(ours, ours.batch([whole]))
    return live[0], once[0, -len(rest) :], whole


def gradient_checks(ours: Backbone, truth: Stock) -> dict[str, tuple[Tensor, Tensor, None]]:
    """Gradient of a scalar of all latents and of an answer, by all decoder parameters, in the three memory modes."""
    prompts = questions(ours)[:2]
    generator = torch.Generator().manual_seed(6)
    weight = torch.randn(2, K, ours.width, generator=generator)
    ids = torch.randint(5, 200, (2, 4), generator=generator)

    def gradient(model: Any, scalar: Tensor) -> Tensor:
        parameters = [p for p in model.parameters() if p.requires_grad]
        grads = torch.autograd.grad(scalar, parameters, allow_unused=True)
        return _flat([torch.zeros_like(p) if g is None else g for p, g in zip(parameters, grads, strict=True)])

    scalar = torch.zeros(())
    for row, prompt in enumerate(prompts):
        sequence, z_1KD = truth.think(truth.begin(prompt))
        answers = reference.answer_logprobs(truth.model, sequence, ids[row, None])
        scalar = scalar + (z_1KD[0] * weight[row]).sum() + answers.sum()
    right = gradient(truth.model, scalar)
    found: dict[str, tuple[Tensor, Tensor, None]] = {}
    for memory in ("cached", "checkpointed-prefill", "checkpointed"):
        _, after, z_BKD = trajectory(ours, ours.batch(prompts), latents=K, memory=memory)
        logp, _, _ = score(ours, after, ids[:, None].to(ours.device), checkpointed=memory == "checkpointed")
        scalar = (z_BKD * weight.to(ours.device)).sum() + logp.sum()
        found[f"gradients, {memory}"] = (gradient(ours.model, scalar), right, None)
    return found


def prepare(family: str, root: Path) -> Path:
    """A tiny checkpoint whose markers have different embeddings: new ones all start at the mean, hiding a mix-up."""
    backbone = Backbone.load(build(family, "tiny", root / family), dtype=FLOAT32, device="cpu")
    markers = backbone.markers
    generator = torch.Generator().manual_seed(5)
    tables = (backbone.core.get_input_embeddings().weight, backbone.model.lm_head.weight)
    with torch.no_grad():
        for table in {id(t): t for t in tables}.values():
            for token in (markers.start, markers.slot, markers.end):
                table[token] = torch.randn(table.shape[1], generator=generator) * table.std()
    return backbone.save(root / f"{family}-marked")


def check_family(
    family: str, root: Path, device: str, dtypes: list[torch.dtype], paths: str, idle: list[str]
) -> list[Line]:
    path = prepare(family, root)
    lines = []
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")
        if paths != "plain":

            def load(dtype: torch.dtype, device: str) -> Backbone:
                return Backbone.load(path, dtype=dtype, device=device)

            buffers = {"columns": 64, "tokens": 8}  # narrow, so that prompts and completions cross their sizes
            fast = parity_paths.Paths(load, dtype, device, questions, buffers=buffers)
            lines += fast_lines(family, name, fast, idle)
        if paths == "fast":
            continue
        ours = Backbone.load(path, dtype=dtype, device=device, fast_vision=False)
        truth = Stock(ours, path, FLOAT32, "cpu")
        yard = Stock(ours, path, dtype, device) if dtype != FLOAT32 else None
        found = dict(forward_checks(ours, truth, yard))
        if dtype == FLOAT32:
            found |= gradient_checks(ours, truth)
        lines += [judged(family, name, check, *three) for check, three in found.items()]
    return lines


def fast_lines(family: str, dtype: str, paths: parity_paths.Paths, idle: list[str]) -> list[Line]:
    """And, in ``idle``, what was not run as it should be."""
    lines = [judged(family, dtype, check, *three) for check, three in paths.checks().items()]
    for note in paths.notes:
        print(f"{family}, {dtype}: {note}", flush=True)
    idle += [f"{family}, {dtype}: {each}" for each in paths.idle]
    return lines


def judged(family: str, dtype: str, check: str, mine: Tensor, right: Tensor, stock: Tensor | None) -> Line:
    """One line: the distance from what is right, and whether it is allowed."""
    measure, tolerance, floor = CHECKS[check]
    exact = dtype == "float32"
    gaps = distance(mine, right, exact)
    yardstick = None
    if not exact:
        yardstick = None if stock is None else distance(stock, right, exact)[measure == "relative"]
        tolerance = max(3 * (yardstick or 0.0), floor or 0.0)
    value = gaps[measure == "relative"]
    return Line(family, dtype, check, *gaps, yardstick, tolerance, value <= tolerance)


def table(lines: list[Line]) -> str:
    width = max(len(line.check) for line in lines) + 1
    head = f"{'family':16} {'dtype':9} {'check':{width}} {'max abs':>9} {'relative':>9} {'stock':>9} {'allowed':>9}"
    rows = [head, "-" * (len(head) + 6)]
    for line in lines:
        measure = CHECKS[line.check][0]
        marks = ("*", " ") if measure == "absolute" else (" ", "*")
        stock = "" if line.yardstick is None else f"{line.yardstick:.1e}"
        rows.append(
            f"{line.family:16} {line.dtype:9} {line.check:{width}}"
            f" {line.absolute:8.1e}{marks[0]} {line.relative:8.1e}{marks[1]} {stock:>8}"
            f" {line.tolerance:9.1e}  {'PASS' if line.ok else 'FAIL'}"
        )
    return "\n".join([*rows, "* is what is compared with 'allowed'"])


def told(name: str, lines: list[Line], began: float) -> None:
    """What is out of tolerance so far is known even if the run is cut off."""
    mine = [line for line in lines if line.family == name]
    failed = [f"{line.dtype} {line.check}" for line in mine if not line.ok]
    print(
        f"{name}: {len(mine) - len(failed)} of {len(mine)} within tolerance, {time.perf_counter() - began:.1f} s",
        *failed,
        sep="\n  ",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--paths", default="all", choices=["all", "plain", "fast"], help="fast paths, plain ones, both")
    parser.add_argument("--wide", nargs="+", default=[], help="presets whose widths the fast paths are tried with too")
    parser.add_argument("--layers", type=int, default=2, help="of these")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the models are tiny: threads only get into each other's way
    torch.set_float32_matmul_precision("highest")  # no TF32
    torch.backends.cudnn.allow_tf32 = False
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    lines: list[Line] = []
    idle: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        for family in options.families:
            began = time.perf_counter()
            dtypes = [getattr(torch, name) for name in options.dtypes]
            lines += check_family(family, Path(scratch), options.device, dtypes, options.paths, idle)
            told(family, lines, began)
        torch.set_num_threads(min(8, os.cpu_count() or 1))
        for preset in options.wide:
            began = time.perf_counter()
            for name in options.dtypes:
                paths = parity_paths.wide(preset, options.layers, getattr(torch, name), options.device)
                lines += fast_lines(preset, name, paths, idle)
            told(preset, lines, began)
    where = torch.cuda.get_device_name() if options.device.startswith("cuda") else options.device
    print(f"\ntorch {torch.__version__}, transformers {transformers.__version__}, on {where}")
    launched = ", ".join(f"{count} x {name}" for name, count in decode_kernels.launched.items())
    why = decode_kernels.why_not()
    print(f"kernels of our own, run or recorded: {launched or 'none'}; {why or 'none was left out'}")
    print(f"those of adapters: {', '.join(f'{n} x {name}' for name, n in adapter_kernels.launched.items()) or 'none'}")
    print(table(lines))
    failed = [line for line in lines if not line.ok]
    print(f"{len(lines) - len(failed)} of {len(lines)} within tolerance")
    missing = (
        options.device.startswith("cuda") and options.paths != "plain" and (why or not _every_kernel(options.families))
    )
    if idle:
        print("not run as they should be, so that the plain path was compared with itself:", *idle, sep="\n  ")
    if missing:
        print("not every kernel of our own was used: the fast paths were not compared as they run elsewhere")
    return 1 if failed or missing or idle else 0


def _every_kernel(families: list[str]) -> bool:
    norms = {"norm with offset" if family == "gemma3" else "norm" for family in families}
    return {"attention", "rotary embedding", *norms} <= decode_kernels.launched.keys()


if __name__ == "__main__":
    sys.exit(main())
