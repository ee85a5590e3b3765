"""The work of each step of the demo, through the library, in the folder of the demo.

A step may be begun again at any time: training continues from its checkpoints, evaluations from their records, and what
has no record is made again. Everything runs on the CPU with one thread, so the numbers depend neither on the number of
processes nor on interruptions.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from realvr.demo.choice import Arm, choice, filled
from realvr.demo.plan import WORLD, DemoSettings, Step
from realvr.evaluation.benchmark import BENCHMARKS, MINI
from realvr.world.questions import EASY_EXTRA_KINDS, EASY_KINDS

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


def draw(step: Step, settings: DemoSettings) -> None:
    """Splits of the embedded world; one that was begun and not finished is drawn again."""
    from realvr.world.making import MakeSettings, make

    drawing = next(one for one in choice().drawings if one.name == step.what)
    for name, split in drawing.splits.items():
        if (WORLD / name / "recipe.json").is_file():
            shutil.rmtree(WORLD / name)
        make(
            MakeSettings(
                WORLD,
                (name,),
                str(split.size),
                settings.seed,
                settings[split.count],
                split.format,
                kinds=(*EASY_KINDS, *EASY_EXTRA_KINDS) if split.easy else (),
                resize_pixels=split.resize_pixels,
                patch=split.patch,
                workers=1,
            )
        )


def samples_of(split: str) -> Path:
    """Our own format of a split."""
    return WORLD / split / "samples.jsonl"


def benches() -> list[str]:
    """``NAME=PATH`` of the benchmarks that the world stands in for."""
    chosen = [BENCHMARKS.get(name) for name in choice().evaluation.benchmarks]
    return [f"{MINI}{bench.name}={bench.stand_in_path(WORLD / bench.stand_in)}" for bench in chosen]


# ---------------------------------------------------------------------- training


def train(step: Step, settings: DemoSettings) -> None:
    """A training to its end: arms of one recipe see the same prompts in the same order, with the same seed."""
    from realvr.training.configuration import KINDS
    from realvr.training.run import train as train_to_the_end

    assert step.training is not None
    command = choice().recipes[step.training.recipe].command
    chosen = KINDS[command].model_validate(training_settings(step, settings))
    if train_to_the_end(chosen, cpu=True):
        raise Interrupted


def training_settings(step: Step, settings: DemoSettings) -> dict[str, Any]:
    """As a settings file would say it."""
    assert step.training is not None
    recipe = choice().recipes[step.training.recipe]
    steps = settings[recipe.steps]
    common = {
        "model": {"dtype": "float32"},
        "data": {
            "sources": [{"path": str(samples_of(choice().data))}],
            "seed": settings.seed,
            "keep_encoded": True,
        },
        "optim": {"steps": steps, "warmup": min(5, max(steps - 1, 0)), "weight_decay": 0.05},
        "checkpoint": {"every": max(1, steps // 8), "keep": 1},
        "log": {"console": False, "tensorboard": False, "table_every": 20, "parts_every": 0},
        "run": {"out": step.out, "seed": settings.seed},
    }
    own = filled(recipe.settings, settings.numbers)
    return _merged(_merged(common, own), filled(step.training.settings, settings.numbers))


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Both, sections key by key; ``second`` wins."""
    made = dict(first)
    for key, value in second.items():
        both = isinstance(value, Mapping) and isinstance(made.get(key), Mapping)
        made[key] = _merged(made[key], value) if both else value
    return made


# ---------------------------------------------------------------------- measurements


def evaluate(step: Step, settings: DemoSettings) -> None:
    """All benchmarks, with own latents and, where the arm is chosen for it, with what may stand in for them."""
    from realvr.evaluation.checkpoints import evaluate as evaluate_checkpoints
    from realvr.evaluation.settings import EvaluateSettings

    arm = _arm(step)
    evaluate_checkpoints(
        EvaluateSettings(
            [arm.model],
            step.out,
            benches(),
            latents=None if arm.latents else "0",
            ablation=arm.ablation,
            max_new=choice().max_new,
            batch=choice().evaluation.batch,
            device="cpu",
        )
    )


def diagnose(step: Step, settings: DemoSettings) -> None:
    """A diagnostic, and those that are measured with it in the same folder."""
    from realvr.diagnostics import DIAGNOSTICS, DiagnoseSettings
    from realvr.diagnostics import diagnose as measure

    chosen = choice().diagnostics[step.what]
    numbers = settings.numbers | {"seed": settings.seed}
    first = DIAGNOSTICS.get(step.what).configure(filled(chosen.settings, numbers))
    common: dict[str, Any] = {"max_new": choice().max_new, "device": "cpu", **filled(chosen.run, numbers)}
    asked = DiagnoseSettings(_arm(step).model, samples_of(chosen.data), step.out, **common)
    measure([first, *chosen.beside], asked, step.what)


def suite(step: Step, settings: DemoSettings) -> None:
    """Several diagnostics in one folder, with their figures."""
    from realvr.diagnostics import DiagnoseSettings
    from realvr.diagnostics.suite import Suite, run_suite

    chosen, limit = choice().suite, settings[choice().suite.limit]
    common: dict[str, Any] = {"max_new": choice().max_new, "device": "cpu", "limit": limit}
    asked = DiagnoseSettings(_arm(step).model, samples_of(chosen.data), step.out, **common)
    own = {name: filled(values, settings.numbers) for name, values in chosen.settings.items()}
    run_suite(Suite(asked, chosen.tests, (), own))


def _arm(step: Step) -> Arm:
    if step.arm is None:
        raise ValueError(f"{step.name} belongs to no arm")
    return step.arm


WORK: dict[str, Callable[[Step, DemoSettings], None]] = {
    "draw": draw,
    "train": train,
    "eval": evaluate,
    "diagnose": diagnose,
    "suite": suite,
}
