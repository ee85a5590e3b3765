"""The model that a folder of a training run stands for, for whoever names the wrong one of its folders. No torch."""

from __future__ import annotations

from pathlib import Path

FINAL, BEST = "final", "best"
"""Model folders of a run."""
SETTINGS = "settings.yaml"


def hint(folder: str | Path) -> str | None:
    """Why a folder without ``config.json`` that belongs to a run is no model, and what to name; None where it belongs
    to none."""
    path = Path(folder)
    if (path / FINAL / "config.json").is_file():
        return f"{folder} is a run: its model is {path / FINAL}"
    if (path / SETTINGS).is_file():
        return unfinished(path)
    if any(path.glob("rank-*.json")):
        run = path.resolve().parent.parent
        there = (run / FINAL / "config.json").is_file()
        model = f"the run's model is {run / FINAL}" if there else unfinished(run)
        return (
            f"{folder} is a checkpoint of a run, its state and not a model: {model}; "
            "realvr train ... --export writes the model of a checkpoint"
        )
    if not path.exists() and path.name == FINAL and (path.parent / SETTINGS).is_file():
        return unfinished(path.parent)
    if not path.exists() and path.name == BEST and (path.parent / SETTINGS).is_file():
        return f"{path.parent} has no {BEST} model: it is written by checkpoint.keep_best, after a validation"
    return None


def unfinished(run: Path) -> str:
    """What to do about a run whose ``final`` is not there."""
    text = f"{run} has no {FINAL} model yet: the run is not finished; the command that started it goes on with it"
    best = run / BEST
    return f"{text} (its best model so far is {best})" if (best / "config.json").is_file() else text
