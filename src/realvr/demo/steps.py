"""The work of each step of the demo, through the functions behind the verbs, in the folder of the demo.

A step may be begun again at any time: training continues from its checkpoints, evaluations from their records, and what
has no record is made anew. Everything runs on the CPU with one thread, so that the numbers depend neither on the number
of processes nor on interruptions.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from realvr.demo import plan
from realvr.demo.plan import Arm, DemoSettings, Step
from realvr.runs.files import write_json
from realvr.world.making import Format

DONE = Path("done")


class Interrupted(Exception):
    """The step was asked to stop, and what it did is saved."""


def mark(step: Step) -> Path:
    """The file that says that a step is complete."""
    return DONE / f"{step.name}.json"


def perform(step: Step, settings: DemoSettings) -> None:
    """Do one step; the caller marks it as done."""
    WORK[step.kind](step, settings)


# ---------------------------------------------------------------------- pictures and questions


def make_train(step: Step, settings: DemoSettings) -> None:
    """Training questions with evidence boxes, in our own format: they keep their options."""
    _draw("train-boxes", settings, settings.train_questions, format="jsonl", size=plan.SIDE, kinds=plan.KINDS)


def make_benchmarks(step: Step, settings: DemoSettings) -> None:
    """Five mini-benchmarks in the layouts of the real ones, counterfactual pairs, held-out questions with boxes."""
    _draw("mmvp", settings, settings.mmvp_pairs, size=plan.SIDE)
    _draw("blink", settings, settings.blink_questions, size=plan.SIDE)
    for split in ("hrbench-4k", "hrbench-8k"):
        # What the model makes of a picture: 48 x 48 pixels in visual tokens of 8 x 8.
        _draw(split, settings, settings.hrbench_questions, size=4 * plan.SIDE, resize_pixels=plan.SIDE**2, patch=8)
    _draw("mme-realworld", settings, settings.mme_questions, size=128)
    _draw("counterfactual", settings, settings.pairs_per_edit, size=plan.SIDE)
    _draw("validation", settings, settings.held_out, size=plan.SIDE, kinds=plan.KINDS)


def _draw(split: str, settings: DemoSettings, count: int, size: int, format: Format = "real", **options: Any) -> None:
    from realvr.world.making import MakeSettings, make

    folder = plan.WORLD / split
    if (folder / "recipe.json").is_file():  # begun and not finished
        shutil.rmtree(folder)
    make(MakeSettings(plan.WORLD, (split,), str(size), settings.seed, count, format, workers=1, **options))


def benches() -> list[str]:
    """``NAME=PATH`` of the five."""
    from realvr.world.making import layout_path

    names = ("mmvp", "blink", "hrbench-4k", "hrbench-8k", "mme-realworld")
    return [f"mini-{name}={layout_path(name, plan.WORLD / name)}" for name in names]


# ---------------------------------------------------------------------- training


def train_stage1(step: Step, settings: DemoSettings) -> None:
    """A few steps of Stage 1 from the base, to be watched; `mini` is what a full one leads to."""
    _train("sft", stage1_settings(settings))


def train_stage2(step: Step, settings: DemoSettings) -> None:
    """Stage 2 from `mini`: both methods see the same prompts in the same order, with the same seed."""
    _train("rl", stage2_settings(settings, _arm(step)))


def stage1_settings(settings: DemoSettings) -> dict[str, Any]:
    """As a settings file would say it."""
    rows = settings.stage1_rows
    common = _common(settings, "mini-base", plan.SHORT_STAGE1, settings.stage1_steps)
    return common | {
        "model": common["model"] | {"latents": plan.LATENTS},
        "optim": _optim(settings.stage1_lr, settings.stage1_steps, rows, rows),
        "reconstruction_weight": 1.0,
        "pack_tokens": 256,
        "position_jitter": 16,
        "hide_image_ratio": 0.5,
        "spell_out": True,
        "gradient_checkpointing": False,
    }


def stage2_settings(settings: DemoSettings, arm: Arm) -> dict[str, Any]:
    """As a settings file would say it."""
    prompts = settings.rl_prompts
    return _common(settings, "mini", f"{arm.folder}/train", settings.rl_steps) | {
        "method": arm.method,
        "optim": _optim(settings.rl_lr, settings.rl_steps, prompts, prompts),
        "group": settings.group,
        "temperature": 1.0,
        "max_new": plan.MAX_NEW,
        "memory": "cached",
    }


def _common(settings: DemoSettings, model: str, out: str, steps: int) -> dict[str, Any]:
    return {
        "model": {"path": model, "dtype": "float32"},
        "data": {"sources": [{"path": str(plan.TRAIN_DATA)}], "seed": settings.seed, "keep_encoded": True},
        "checkpoint": {"every": max(1, steps // 8), "keep": 1},
        "log": {"console": False, "tensorboard": False, "table_every": 20, "parts_every": 0},
        "run": {"out": out, "seed": settings.seed},
    }


def _optim(lr: float, steps: int, batch: int, microbatch: int) -> dict[str, Any]:
    return {
        "lr": lr,
        "steps": steps,
        "batch": batch,
        "microbatch": microbatch,
        "warmup": min(5, max(steps - 1, 0)),
        "weight_decay": 0.05,
    }


def _train(kind: str, fields: dict[str, Any]) -> None:
    import importlib

    from realvr.training import loop
    from realvr.training.configuration import KINDS
    from realvr.training.engine import start_engine

    settings = KINDS[kind].model_validate(fields)
    engine = start_engine(cpu=True)
    engine.seed(settings.run.seed)
    task = importlib.import_module(f"realvr.training.{kind}").build_task(settings, engine)
    if loop.train(task, settings, engine):
        raise Interrupted


# ---------------------------------------------------------------------- measurements


def evaluate(step: Step, settings: DemoSettings) -> None:
    """Five mini-benchmarks, with own latents and with what may stand in for them."""
    arm = _arm(step)
    _evaluate(arm, f"{arm.folder}/eval", latents=None if arm.latents else "0")


def sweep(step: Step, settings: DemoSettings) -> None:
    """A part of each benchmark under several numbers of latents."""
    arm = _arm(step)
    budgets = ",".join(map(str, settings.sweep))
    _evaluate(arm, f"{arm.folder}/sweep", latents=budgets, limit=settings.sweep_questions, ablation=False)


def _evaluate(arm: Arm, out: str, **options: Any) -> None:
    from realvr.evaluation.checkpoints import evaluate as evaluate_checkpoints
    from realvr.evaluation.settings import EvaluateSettings

    common: dict[str, Any] = {"max_new": plan.MAX_NEW, "batch": plan.EVAL_BATCH, "device": "cpu"}
    evaluate_checkpoints(EvaluateSettings([arm.model], out, benches(), **common, **options))


def counterfactual(step: Step, settings: DemoSettings) -> None:
    """Do answers follow an edit of the picture? Two turns, with and without the first span, and separately."""
    from realvr.cli import pairs as pairs_command

    arm = _arm(step)
    pairs_command.counterfactual(
        arm.model,
        plan.PAIRS_DATA,
        Path(arm.folder) / "counterfactual",
        batch=plan.EVAL_BATCH,
        max_new=plan.MAX_NEW,
        device="cpu",
    )


def exchange(step: Step, settings: DemoSettings) -> None:
    """Do answers follow latents that are swapped between the two pictures of a pair?"""
    from realvr.cli import pairs as pairs_command

    arm = _arm(step)
    pairs_command.exchange(
        arm.model,
        plan.PAIRS_DATA,
        Path(arm.folder) / "exchange",
        seeds=1,
        limit=settings.exchange_per_edit,
        max_new=plan.MAX_NEW,
        device="cpu",
    )


def grounding(step: Step, settings: DemoSettings) -> None:
    """Free-running latents against the evidence of held-out questions."""
    from realvr.diagnostics.grounding import measure

    arm = _arm(step)
    found = measure(arm.model, plan.HELD_OUT, plan.LATENTS, seed=settings.seed)
    write_json(Path(arm.folder) / "grounding" / "grounding.json", found)


def _arm(step: Step) -> Arm:
    if step.arm is None:
        raise ValueError(f"{step.name} belongs to no arm")
    return step.arm


WORK: dict[str, Callable[[Step, DemoSettings], None]] = {
    "make_train": make_train,
    "make_benchmarks": make_benchmarks,
    "train_stage1": train_stage1,
    "train_stage2": train_stage2,
    "eval": evaluate,
    "counterfactual": counterfactual,
    "exchange": exchange,
    "grounding": grounding,
    "sweep": sweep,
}
