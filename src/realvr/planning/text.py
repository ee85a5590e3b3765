"""A plan in words and columns."""

from __future__ import annotations

from collections.abc import Sequence

from realvr.backbone.automatic import announcement
from realvr.planning.plan import Plan
from realvr.training.estimate.peak import GIB, SECOND, UNSHARDED


def details(plan: Plan) -> str:
    """One backbone: every number."""
    s, work = plan.settings, plan.work
    what = f"LoRA rank {s.lora}" if s.lora else "all weights of the decoder"
    lines = [
        f"{plan.backbone}, {'Stage 2' if s.stage == 'rl' else 'Stage 1'}, {what}, engine {plan.setup.engine}, "
        f"{plan.setup.world:,} x {plan.gpu.name}",
        f"{plan.parameters / 1e9:.2f} B parameters, {plan.trained / 1e9:.2f} B trained; {_work(plan)}",
        *([announcement(plan.fast)] if plan.fast else []),
        "",
        f"memory of one GPU at its fullest moment ({plan.found.moment}), estimate:",
        *_rows(plan.found.parts),
        f"  {'sum':<36} {plan.found.peak / GIB:9.2f} GiB",
        f"  {'room':<36} {plan.room / GIB:9.2f} GiB ({plan.gpu.memory:g} GiB less {s.reserve:.0%} reserve)",
        _verdict(plan),
        "",
        "other moments: "
        + ", ".join(f"{name} {sum(parts.values()) / GIB:.1f}" for name, parts in plan.found.moments.items())
        + " GiB",
    ]
    if work.stage == "rl":
        how = "all weights gathered once" if plan.found.gathers else "lockstep, layer by layer"
        together = f"rollout: {work.together} of {work.prompts} prompts together"
        lines.append(together + (f"; {how}" if plan.setup.sharded else ""))
        lines.append(f"  {'keys and values, at most':<36} {plan.found.cache / GIB:9.2f} GiB")
    if plan.communication:
        lines += ["", "sent by one GPU per step:"]
        lines += [f"  {name:<36} {size / 1e9:9.2f} GB" for name, size in plan.communication.items()]
    lines.append("")
    if plan.seconds:
        total = sum(plan.seconds.values())
        parts = ", ".join(f"{name} {value:.2f}" for name, value in plan.seconds.items())
        lines.append(f"a step: at least about {total:.1f} s ({parts}; nothing overlapped)")
        if (better := plan.faster) is not None:
            size = f"{better.peak / GIB:.1f} GiB"
            lines.append(f"faster, and it fits too: {better.flags} (at least about {better.seconds:.1f} s, {size})")
    else:
        lines.append("a step: name the GPU (--gpu) to get its time")
    return "\n".join(lines)


def _work(plan: Plan) -> str:
    w = plan.work
    rows = f"{w.microbatches} x {w.rows} per GPU and step"
    if w.stage == "sft":
        return f"packed rows of {w.tokens:,} tokens, {rows}"
    return (
        f"prompts of {w.visual:,} visual + {w.tokens - w.visual:,} text tokens, {rows}, G = {w.group}, "
        f"K = {w.latents}, {w.answer} answer tokens, {w.memory}"
        + (f" of {w.recompute:.0%} of the layers" if 0 < w.recomputed < 1 else "")
    )


def _rows(parts: dict[str, int]) -> list[str]:
    return [f"  {name:<36} {size / GIB:9.2f} GiB" for name, size in parts.items() if size]


def _verdict(plan: Plan) -> str:
    few = f"the fewest GPUs that do: {plan.smallest:,}" if plan.smallest else "no number of these GPUs does"
    if plan.fits:
        return f"it fits; {few}"
    return f"it does NOT fit; {few}" + (f"; what would: {', or '.join(plan.would)}" if plan.would else "")


def table(plans: Sequence[Plan]) -> str:
    """All backbones, one line each."""
    first = plans[0]
    what = f"LoRA rank {first.settings.lora}" if first.settings.lora else "all weights of the decoder"
    what += ", without fast paths" * first.settings.plain
    stage = "Stage 2" if first.settings.stage == "rl" else "Stage 1"
    head = (
        f"{stage}, {what}, engine {first.setup.engine}, {first.setup.world:,} x {first.gpu.name}, room "
        f"{first.room / GIB:.1f} GiB each; GiB of one GPU, estimates"
    )
    memory = ("weights", "gradients", "optimizer", "gathered", "activations")
    names = ("backbone", *memory, "peak", "fits", "fewest", "s, least")
    rows = [names, *(_line(plan) for plan in plans)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(names))]
    lines = [[cell.rjust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    lines = [[row[0].ljust(widths[0]), *cells[1:]] for row, cells in zip(rows, lines, strict=True)]
    return "\n".join([head, "", *("  ".join(cells) for cells in lines)])


def _line(plan: Plan) -> tuple[str, ...]:
    parts = plan.found.parts

    def size(*names: str) -> str:
        return f"{sum(parts.get(name, 0) for name in names) / GIB:.1f}"

    used = ("frozen weights", "trained weights"), ("gradients", SECOND, UNSHARDED), ("optimizer",)
    rest = plan.found.peak - sum(parts.get(n, 0) for group in used for n in group) - parts.get("gathered weights", 0)
    return (
        plan.backbone,
        *(size(*group) for group in used),
        size("gathered weights"),
        f"{rest / GIB:.1f}",
        f"{plan.found.peak / GIB:.1f}",
        "yes" if plan.fits else "no",
        f"{plan.smallest:,}" if plan.smallest else "none",
        f"{sum(plan.seconds.values()):.0f}" if plan.seconds else "-",
    )
