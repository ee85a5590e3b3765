"""The numbers of a demo, collected from the files that its steps wrote: ``summary.json``, ``demo.json`` and a table.

Pure functions of these files; no model, no torch, no clock.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from realvr.demo import plan
from realvr.demo.plan import ARMS, Arm, DemoSettings, Step
from realvr.evaluation.comparison import compare
from realvr.evaluation.effects import EFFECTS, beyond_noise
from realvr.evaluation.records import PREDICTIONS, read_predictions
from realvr.runs.files import read_json

Json = dict[str, Any]
VERSION = 2
_ENDS = 5  # steps averaged at the beginning and at the end of a training


def collect(folder: Path, settings: DemoSettings) -> Json:
    """The content of ``summary.json``: ``arms`` (name -> metrics), ``differences``, ``short_stage1``, ``settings`` and
    ``notes``. Every number that was measured on a sample has its 95 % interval beside it."""
    arms = {arm.name: _arm(folder, arm) for arm in ARMS}
    differences = _differences(folder)
    return {
        "version": VERSION,
        "settings": asdict(settings),
        "arms": arms,
        "differences": differences,
        "short_stage1": _ends(folder / plan.SHORT_STAGE1, ("loss", "latents/cos_target")),
        "notes": notes(settings, arms, differences),
    }


def index(summary: Json) -> Json:
    """The content of ``demo.json``: where the results of each arm are, for the report."""
    arms = []
    for arm in ARMS:
        entry = {"name": arm.name, "train": f"{arm.folder}/train" if arm.method else None}
        kinds = ["eval", "counterfactual", *(["exchange", "grounding"] if arm.latents else [])]
        kinds += ["sweep"] if arm.method == "realvr" else []
        arms.append(entry | {kind: f"{arm.folder}/{kind}" for kind in kinds})
    short = {"name": "Stage 1, a short one from mini-base", "train": plan.SHORT_STAGE1}
    return {"arms": [*arms, short], "notes": summary["notes"]}


def _arm(folder: Path, arm: Arm) -> Json:
    home = folder / arm.folder
    scores, pairs = (
        read_json(home / "eval" / "summary.json"),
        read_json(home / "counterfactual" / "counterfactual.json"),
    )
    five = scores["five_task_mean"]
    found: Json = {
        "model": arm.model,
        "latents": arm.latents,
        "five_task_mean": {name: five["own"][name] for name in ("mean", "ci", "coverage", "tasks")},
        "benches": {
            name: {"headline": bench["headline"], "ci": bench["ci"], "n": bench["n"], "coverage": bench["coverage"]}
            for name, bench in scores["benches"].items()
        },
    }
    found |= {name: scores["effects"].get(name) for name in EFFECTS}
    for rate in ("strict_correct_flip", "false_flip"):
        found[rate] = {name: _rate(one["macro"][rate]) for name, one in pairs["protocols"].items()}
    found |= _exchange(home) | _grounding(home)
    if arm.method:
        names = ("reward", "reward/accuracy", "evidence/margin", "evidence/cos_positive")
        found["train"] = _ends(home / "train", names)
    return found


def _rate(found: Json) -> Json:
    return {"rate": found["rate"], "ci": [found["low"], found["high"]]}


def _exchange(home: Path) -> Json:
    path = home / "exchange" / "exchange.json"
    if not path.is_file():
        return {"donor_lift": None, "unrelated_lift": None, "margin_shift": None}
    rows = {(row["condition"], row["selector"]): row for row in read_json(path)["rows"] if row["selector"] == "full"}
    swap, unrelated = rows["swap", "full"], rows.get(("unrelated", "full"))
    return {
        "donor_lift": _mean(swap["donor_lift"]),
        "unrelated_lift": _mean(unrelated["donor_lift"]) if unrelated else None,
        "margin_shift": _mean(swap["margin_shift"]),
    }


def _grounding(home: Path) -> Json:
    path = home / "grounding" / "grounding.json"
    if not path.is_file():
        return {"evidence_margin": None, "cos_positive": None, "oracle_margin": None}
    found = read_json(path)
    return {
        "evidence_margin": _mean(found["margin"]),
        "cos_positive": _mean(found["cos_positive"]),
        "oracle_margin": _mean(found["oracle_margin"]),
    }


def _mean(found: Json) -> Json:
    return {"mean": found["mean"], "ci": [found["low"], found["high"]], "n": found["pairs"]}


def _ends(run: Path, names: Sequence[str]) -> Json:
    """Means over the first and the last few steps of a training."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    count = max(1, min(_ENDS, len(rows) // 2))
    found: Json = {"steps": len(rows)}
    for name in names:
        for key, part in (("first", rows[:count]), ("last", rows[-count:])):
            values = [row[name] for row in part if row.get(name) is not None]
            if values:
                found.setdefault(name, {})[key] = sum(values) / len(values)
    return found


def _differences(folder: Path) -> Json:
    """ReaLVR against each other arm, and the others against Direct, on the same questions: five-task mean, in points,
    with a paired interval."""
    predictions = {arm.name: list(read_predictions(folder / arm.folder / "eval" / PREDICTIONS)) for arm in ARMS}
    latents = {arm.name: arm.latents for arm in ARMS}
    names = [arm.name for arm in ARMS]
    pairs = [(name, "ReaLVR") for name in names if name != "ReaLVR"]
    pairs += [("Direct", name) for name in names if name not in ("Direct", "ReaLVR")]
    found = {}
    for first, second in pairs:
        both = compare(
            predictions[first],
            predictions[second],
            first_latents=latents[first],
            second_latents=latents[second],
        )["five_task_mean"]
        found[f"{second} - {first}"] = {
            "gain": both["gain"],
            "difference": both["difference"],
            "ci": both["difference_ci"],
        }
    return found


# ---------------------------------------------------------------------- in words


def notes(settings: DemoSettings, arms: Json, differences: Json) -> list[str]:
    """What a reader must know before believing a number."""
    s = settings
    found = []
    if s.quick:
        found.append(
            "--quick: a few steps and a few questions, to see that everything works. The numbers mean nothing."
        )
    found.append(
        "A demonstration: a model of under two million parameters in a world of colored shapes, one seed, "
        f"{s.rl_steps} steps of Stage 2 with {s.rl_prompts} prompts, {plan.questions_of(s)} questions and "
        f"{4 * s.pairs_per_edit} edited pairs. It says nothing about the paper's models."
    )
    found.append("Direct is mini-base as it is, without the training that the other arms had since.")
    inside = [f"{name} {_signed(one)}" for name, one in differences.items() if _spans_zero(one["ci"])]
    outside = [f"{name} {_signed(one)}" for name, one in differences.items() if not _spans_zero(one["ci"])]
    if inside:
        found.append(f"Mini five-task mean, within noise (the 95 % interval holds 0): {'; '.join(inside)}.")
    if outside:
        found.append(f"Mini five-task mean, beyond the noise of these questions: {'; '.join(outside)}.")
    apart = [f"{name} {100 * arm['strict_correct_flip']['separate']['rate']:.1f}" for name, arm in arms.items()]
    found.append(f"Strict flip, both pictures asked in conversations of their own: {', '.join(apart)} %.")
    unused = [name for name, arm in arms.items() if arm["latents"] and not _used(arm)]
    if unused:
        found.append(
            f"{', '.join(unused)}: neither the latents of another question, nor noise, nor the latents of the edited "
            "picture change readable answers beyond chance, so the accuracy is no evidence that latents are read."
        )
    broken = [text for name, arm in arms.items() for text in _broken(name, arm)]
    if broken:
        found.append(f"Replies lose their format: {'; '.join(broken)}. That part of an effect is no evidence of use.")
    found.append(
        "Intervals are over questions or pairs, not over trainings: another seed of training may differ by more."
    )
    return found


def _used(arm: Json) -> bool:
    """Whether foreign latents change what is answered beyond chance, lost formats aside."""
    if any(beyond_noise(arm[name]) for name in EFFECTS if name != "help"):
        return True
    return arm["donor_lift"] is not None and not _spans_zero(arm["donor_lift"]["ci"])


def _broken(name: str, arm: Json) -> list[str]:
    """Conditions under which clearly fewer replies can be read than with own latents."""
    own = arm["five_task_mean"]["coverage"]
    titles = {"help": "without a span", "dependence_other": "with another's latents", "dependence_noise": "with noise"}
    cells = {titles[effect]: arm[effect]["read"] for effect in EFFECTS if arm[effect]}
    return [f"{name} {title} ({read:.0f} % read, {own:.0f} % own)" for title, read in cells.items() if read < own - 5]


def _spans_zero(ci: Sequence[float | None]) -> bool:
    low, high = ci
    return low is None or high is None or low <= 0 <= high


def _signed(one: Json) -> str:
    low, high = one["ci"]
    return f"{one['gain']:+.1f} [{low:+.1f}, {high:+.1f}]"


def headline(folder: Path, step: Step) -> str:
    """What one finished step found, in a few words."""
    if step.kind.startswith("train"):
        name = "loss" if step.kind == "train_stage1" else "reward"
        found = _ends((folder / step.journals[0]).parent, (name,))
        ends = found.get(name)
        return f"{name} {ends['first']:.2f} → {ends['last']:.2f} in {found['steps']} steps" if ends else ""
    if step.kind == "eval" and step.arm is not None:
        five = read_json(folder / step.arm.folder / "eval" / "summary.json")["five_task_mean"]["own"]
        return f"mini five-task mean {five['mean']:.1f} %"
    return ""


def table(summary: Json, width: int = 132) -> Table:
    """The closing table: a row for each arm, or, where the terminal is too narrow for that, a column."""
    quick = summary["settings"]["quick"]
    title = "The demo in numbers, 95 % intervals in brackets" + (" (quick: they mean nothing)" if quick else "")
    rows = [["", *_COLUMNS], *([name, *_cells(arm)] for name, arm in summary["arms"].items())]
    if width < _WIDE:
        rows = [list(row) for row in zip(*rows, strict=True)]
    made = Table(title=title, title_justify="left", caption=_LEGEND, caption_justify="left", box=SIMPLE_HEAD)
    for number, name in enumerate(rows[0]):
        made.add_column(name, justify="right" if number else "left", no_wrap=True)
    for row in rows[1:]:
        made.add_row(*row)
    return made


_WIDE = 128
_COLUMNS = ("score %", "help", "dependence\nanother's", "dependence\nnoise", "strict flip %", "donor lift", "g")
_LEGEND = (
    "score: mean accuracy over the five mini-benchmarks; below its interval, the readable replies. help: points "
    "that own latents bring over no span. dependence: points lost with the latents of another question, and with noise "
    "of the same norms; below, the replies that can still be read (one that cannot counts as wrong). strict flip: both "
    "answers right where an edit changes the answer (two turns, first span kept). donor lift: points by which all "
    "latents of the edited picture bring its answer. g: latents against the evidence of held-out questions."
)


def _cells(arm: Json) -> list[str]:
    flips = arm["strict_correct_flip"]
    flip = flips.get("two-turn/keep") or flips.get("two-turn/none")
    percent = (
        {"mean": 100 * flip["rate"], "ci": [100 * end for end in flip["ci"]]} if flip["rate"] is not None else None
    )
    return [
        _cell(arm["five_task_mean"], "mean", "{:.1f}", arm["five_task_mean"]["coverage"]),
        *(_cell(arm[name], "points", "{:+.1f}", (arm[name] or {}).get("read")) for name in EFFECTS),
        _cell(percent, "mean", "{:.1f}"),
        _cell(arm["donor_lift"], "mean", "{:+.1f}"),
        _cell(arm["evidence_margin"], "mean", "{:+.2f}"),
    ]


def _cell(found: Json | None, key: str, form: str, read: float | None = None) -> str:
    if found is None or found[key] is None:
        return "–"
    low, high = found["ci"]
    below = "" if read is None else f"\n{read:.0f} % read"
    return f"{form.format(found[key])}\n[{form.format(low)}, {form.format(high)}]{below}"
