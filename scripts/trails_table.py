"""Accuracy of several models on trails: by condition of the latents and number of arrows, with intervals.

    realvr world make runs/fresh --split trails --count 700 --seed 31
    realvr eval runs/mini/mini-s1/final --bench trails=runs/fresh/trails --max-new 24 --out runs/trails/mini-s1
    python scripts/trails_table.py docs/results/trails-stage1.json runs/trails/* --about "split trails, seed 31"

Each folder is one evaluation (``realvr eval``) and is called by its last part. Models called NAME-s1, NAME-s2, … are
seeds of one training: their questions are pooled too, and intervals then draw seeds and questions again.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from trails_stage2 import interval

from realvr.evaluation.records import PREDICTIONS, Prediction, read_predictions
from realvr.runs.files import write_atomically

PARTS = {"all": range(1, 100), "1-3": range(1, 4), "4-7": range(4, 8)}


def conditions(folder: Path) -> dict[str, list[Prediction]]:
    """Answers of one evaluation by what filled the span."""
    found: dict[str, list[Prediction]] = defaultdict(list)
    rows = list(read_predictions(folder / PREDICTIONS))
    most = max(row.latents for row in rows)
    for row in rows:
        found["no span" if most and not row.latents else row.condition].append(row)
    return found


def summarise(seeds: list[list[Prediction]]) -> dict[str, Any]:
    """Accuracy in percent with its interval, by part and number of arrows, over one or several seeds."""
    generator = np.random.default_rng(0)
    names = sorted({row.question for row in seeds[0]})
    right_SQ = np.array([[{row.question: row.correct for row in rows}[n] for n in names] for rows in seeds], float)
    arrows_of = {row.question: int(row.tags["arrows"]) for row in seeds[0]}
    arrows_Q = np.array([arrows_of[name] for name in names])
    parts = PARTS | {str(number): (number,) for number in sorted(set(arrows_of.values()))}
    found = {}
    for part, numbers in parts.items():
        values_SQ = 100 * right_SQ[:, np.isin(arrows_Q, list(numbers))]
        if not values_SQ.size:
            continue
        low, high = interval(values_SQ, generator)
        value = float(values_SQ.mean())
        found[part] = {"value": round(value, 1), "ci": [round(low, 1), round(high, 1)], "n": values_SQ.shape[1]}
    read = [row.extracted is not None for rows in seeds for row in rows]
    return {"accuracy": found, "seeds": len(seeds), "readable": round(100 * sum(read) / len(read), 1)}


def markdown(models: Mapping[str, Mapping[str, Any]]) -> str:
    """One line a model and condition."""
    numbers = [*PARTS, *map(str, range(1, 8))]
    lines = ["| % right | latents | readable | " + " | ".join(numbers) + " |", "|---" * (len(numbers) + 3) + "|"]
    for name, by_condition in models.items():
        for condition, cells in by_condition.items():
            all_ = cells["accuracy"]["all"]
            shown = [f"{all_['value']} [{all_['ci'][0]}, {all_['ci'][1]}]"]
            shown += [str(cells["accuracy"].get(part, {}).get("value", "")) for part in numbers[1:]]
            lines.append(f"| {name} | {condition} | {cells['readable']} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("evaluations", nargs="+", type=Path)
    parser.add_argument("--about", default="", help="which questions, which commit")
    options = parser.parse_args()
    every = {folder.name: conditions(folder) for folder in options.evaluations}
    models = {name: {c: summarise([rows]) for c, rows in found.items()} for name, found in every.items()}
    families: dict[str, list[str]] = defaultdict(list)
    for name in every:
        families[re.sub(r"-s\d+$", "", name)].append(name)
    for family, names in families.items():
        if len(names) > 1:
            models[f"{family}, {len(names)} seeds"] = {
                condition: summarise([every[name][condition] for name in names]) for condition in every[names[0]]
            }
    what = f"Percent of fresh trails answered rightly ({options.about}; greedy), by condition and number of arrows."
    write_atomically(options.out, json.dumps({"what": what, "models": models}, indent=1) + "\n")
    print(markdown(models))


if __name__ == "__main__":
    main()
