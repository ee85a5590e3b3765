"""What the demo does: its settings, its arms, and its steps with what each needs. No torch.

Every path is relative to the folder of the demo, which may therefore be moved.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from realvr.world.questions import EASY_EXTRA_KINDS, EASY_KINDS

WORLD = Path("world")
TRAIN_DATA = WORLD / "train-boxes" / "samples.jsonl"
PAIRS_DATA = WORLD / "counterfactual" / "samples.jsonl"
HELD_OUT = WORLD / "validation" / "samples.jsonl"
KINDS = (*EASY_KINDS, *EASY_EXTRA_KINDS)
SIDE = 48
"""Pixels of the pictures, which is what the packaged models see."""
LATENTS = 8
MAX_NEW = 16
"""Answers take 3 to 8 tokens."""
EVAL_BATCH = 32


@dataclass(frozen=True)
class DemoSettings:
    """Everything that decides the numbers; kept in ``demo_settings.json``."""

    quick: bool = False
    seed: int = 0
    train_questions: int = 4000
    stage1_steps: int = 50
    stage1_rows: int = 16
    """Packed rows of 256 tokens per step, with two to three examples each."""
    stage1_lr: float = 1e-3
    rl_steps: int = 100
    rl_lr: float = 2e-4
    rl_prompts: int = 32
    group: int = 8
    mmvp_pairs: int = 96
    blink_questions: int = 200
    hrbench_questions: int = 64
    """Each of 4K and 8K; every question is asked in four option cycles."""
    mme_questions: int = 192
    pairs_per_edit: int = 56
    exchange_per_edit: int = 48
    held_out: int = 256
    """Questions with boxes on which the latents are compared with the evidence."""
    sweep_questions: int = 64
    """Of each benchmark, for the sweep over K."""
    sweep: tuple[int, ...] = (0, 1, 2, 4, 8, 12, 16)


def quick_settings(seed: int = 0) -> DemoSettings:
    """Every step in seconds, for checking an installation; its numbers mean nothing."""
    return DemoSettings(
        quick=True,
        seed=seed,
        train_questions=200,
        stage1_steps=4,
        stage1_rows=4,
        rl_steps=4,
        rl_prompts=8,
        group=4,
        mmvp_pairs=6,
        blink_questions=15,
        hrbench_questions=4,
        mme_questions=10,
        pairs_per_edit=4,
        exchange_per_edit=4,
        held_out=24,
        sweep_questions=8,
        sweep=(0, 4, 8, 12),
    )


@dataclass(frozen=True)
class Arm:
    """One row of the comparison. ``model`` is what is evaluated, ``method`` how the demo trains it, if it does."""

    name: str
    folder: str
    model: str
    latents: int = LATENTS
    method: str | None = None


ARMS: tuple[Arm, ...] = (
    Arm("Direct", "direct", "mini-base", latents=0),
    Arm("Stage 1", "stage-1", "mini"),
    Arm("LVR-RL", "lvr-rl", "lvr-rl/train/final", method="lvr-rl"),
    Arm("ReaLVR", "realvr", "realvr/train/final", method="realvr"),
)
SHORT_STAGE1 = "stage-1-short/train"


@dataclass(frozen=True)
class Step:
    """One piece of work of one process. ``journals`` grow by a line per unit; together they reach ``units``."""

    name: str
    """Also the name of its mark in ``done/``, slashes as dashes."""
    title: str
    kind: str
    """The function of `realvr.demo.steps` that does it."""
    cost: float
    """Seconds on one core, as measured; only ever used to say how long the rest may take."""
    needs: tuple[str, ...] = ()
    arm: Arm | None = None
    journals: tuple[str, ...] = ()
    units: int = 0


def steps_of(settings: DemoSettings) -> list[Step]:
    """All steps, in the order in which they are begun when nothing holds them up."""
    s = settings
    drawn = Step("world-train", "pictures to train on", "make_train", 0.5 + s.train_questions / 800)
    asked = Step("world-benchmarks", "five mini-benchmarks and edited pairs", "make_benchmarks", 0.5 + _asked(s) / 350)
    shown = Step(
        "stage-1-short",
        "Stage 1 from mini-base, a short one",
        "train_stage1",
        4 + 0.044 * s.stage1_steps * s.stage1_rows,
        ("world-train",),
        journals=(f"{SHORT_STAGE1}/metrics.jsonl",),
        units=s.stage1_steps,
    )
    found = [drawn, asked, shown]
    found += [_training(s, arm) for arm in reversed(ARMS) if arm.method]
    for arm in ARMS:
        found += _measurements(s, arm)
    return found


def _training(s: DemoSettings, arm: Arm) -> Step:
    per_prompt = 0.0045 if arm.method == "realvr" else 0.0038  # a prompt with one completion
    return Step(
        f"{arm.folder}-train",
        f"{arm.name} from mini",
        "train_stage2",
        3 + per_prompt * s.rl_steps * s.rl_prompts * s.group,
        ("world-train",),
        arm,
        (f"{arm.folder}/train/metrics.jsonl",),
        s.rl_steps,
    )


def _measurements(s: DemoSettings, arm: Arm) -> list[Step]:
    needs = ("world-benchmarks", *([f"{arm.folder}-train"] if arm.method else []))
    pairs, exchanged = 4 * s.pairs_per_edit, _changed(s)
    questions, spans = questions_of(s), bool(arm.latents)

    def step(kind: str, title: str, cost: float, journals: tuple[str, ...], units: int) -> Step:
        paths = tuple(f"{arm.folder}/{kind}/{name}" for name in journals)
        return Step(f"{arm.folder}-{kind}", f"{arm.name}: {title}", kind, cost, needs, arm, paths, units)

    answers = questions * (5 if spans else 1)  # own latents, no span, mean, another's, noise
    records = pairs * (4 if spans else 3)  # three protocols (two without a span) and the distances
    each = 0.0055 if spans else 0.012  # the base answers in words before the letter
    found = [
        step("eval", "five mini-benchmarks", 0.8 + each * answers, ("predictions.jsonl",), answers),
        step(
            "counterfactual",
            "edited pairs",
            0.8 + 0.021 * records,
            ("counterfactual.jsonl", "distances.jsonl"),
            records,
        ),
    ]
    if spans:
        found += [
            step("exchange", "latents exchanged", 0.8 + 0.06 * exchanged, ("exchange.jsonl",), exchanged * 2 * 10),
            step("grounding", "latents against the evidence", 0.8 + 0.008 * s.held_out, (), 0),
        ]
    if arm.method == "realvr":
        asked = 5 * s.sweep_questions * len(s.sweep)
        found.append(step("sweep", "number of latents K", 0.8 + 0.003 * asked, ("predictions.jsonl",), asked))
    return found


def questions_of(s: DemoSettings) -> int:
    """Questions of the five benchmarks, as they are asked."""
    return 2 * s.mmvp_pairs + s.blink_questions + 8 * s.hrbench_questions + s.mme_questions


def _asked(s: DemoSettings) -> int:
    return questions_of(s) + 8 * s.pairs_per_edit + s.held_out


def _changed(s: DemoSettings) -> int:
    """About how many pairs change their answer."""
    return round(0.845 * 4 * s.exchange_per_edit)
