"""What a training run leaves for readers, as one typed record: ``method.json``, ``metrics.jsonl``, ``settings.yaml``.

``method.json`` names the stage, the method and the titles of the metrics that the method reports, so that curves of a
method from outside the package are shown like those of the package's own. Runs of earlier versions have no such file;
their stage is known by the names of their metrics. No torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired

import yaml
from typing_extensions import TypedDict

from realvr.errors import UserError
from realvr.runs.journal import whole_lines
from realvr.runs.records import ResultFile, Text
from realvr.runs.run_models import BEST as BEST
from realvr.runs.run_models import FINAL as FINAL
from realvr.runs.run_models import SETTINGS as SETTINGS

METHOD, METRICS, ENGINE = "method.json", "metrics.jsonl", "engine.json"
AGAIN = "train the model again"
BASELINE = "lvr-rl"
"""The method that the report compares the others with, unless it is told otherwise."""


CHECKPOINT = re.compile(r"step-(\d+)")
"""Name of a whole checkpoint."""


def checkpoints(out: Path) -> list[Path]:
    """Whole checkpoints of a run, oldest first."""
    folder = out / "checkpoints"
    found = [path for path in (folder.iterdir() if folder.is_dir() else ()) if CHECKPOINT.fullmatch(path.name)]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step after which a checkpoint was written."""
    return int(checkpoint.name.split("-")[1])


class Metric(TypedDict):
    """How a metric of ``metrics.jsonl`` is shown."""

    name: Text
    title: Text
    description: NotRequired[Text]
    first: NotRequired[bool]
    """Its curve is shown at once, not behind a fold."""
    last: NotRequired[bool]
    """Its end stands in the closing table."""


class About(TypedDict):
    """The content of ``method.json``."""

    version: int
    stage: Text
    """Name of the command: base, sft, rl."""
    title: Text
    """Heading; runs of one heading are drawn over each other, because their losses can be compared."""
    method: Text
    metrics: list[Metric]
    """In the order in which they are shown."""
    summary: NotRequired[Text]
    """What the method does, in a sentence."""
    file: NotRequired[Text]
    """Python file of the method, and its hash."""
    sha256: NotRequired[Text]


class DataUse(TypedDict):
    """The content of ``data.json``: what a run read, and which rows it could not use."""

    max_dropped: float
    sources: list[dict[Text, Any]]
    """Rows, usable ones and dropped ones of each source."""
    encoding: dict[Text, Any]
    """Rows drawn up to a step, and those that could not be encoded."""
    images: int
    files: dict[Text, dict[Text, Any]]
    """Hashes, with the time at which they were taken."""


class EngineUse(TypedDict):
    """The content of ``engine.json``: the engine of a run's newest start, and what each rank says of itself."""

    engine: Text
    settings: dict[Text, Any]
    ranks: list[dict[Text, Any]]
    """By rank: world, device, distributed type, type of the wrapped module, and its parameters by type."""


ENGINE_FILE = ResultFile(EngineUse, "realvr train", "remove it, the next start writes it again")
DATA_FILE = ResultFile(DataUse, "realvr train", "remove it, the next start writes it again")
METHOD_FILE = ResultFile(About, "realvr train", "remove it, the curves are then shown without their titles", 1)
Step = dict[str, float | None]
"""One line of ``metrics.jsonl``: ``step`` counts from 1; what was not finite is None."""


@dataclass(frozen=True)
class TrainingRun:
    """A training run, as its folder tells it."""

    folder: Path
    steps: list[Step]
    settings: dict[str, Any]
    """settings.yaml; empty where there is none."""
    about: About

    @property
    def planned(self) -> int | None:
        """Number of steps it was to make."""
        optim = self.settings.get("optim")
        found = optim.get("steps") if isinstance(optim, dict) else None
        return found if type(found) is int else None

    @property
    def done(self) -> int:
        """Number of the last step."""
        return number_of(self.steps[-1])


def load_run(folder: Path) -> TrainingRun:
    """The run in a folder with ``metrics.jsonl``; without a whole step it has no ``steps``."""
    steps, settings = read_steps(folder / METRICS), _settings(folder / SETTINGS)
    path = folder / METHOD
    about = METHOD_FILE.load(path) if path.is_file() else _earlier(steps, settings)
    return TrainingRun(folder, steps, settings, _with_validation(about))


def _with_validation(about: About) -> About:
    """Every method may be validated: these metrics are the same for all and stand first."""
    own = {metric["name"] for metric in about["metrics"]}
    more = [metric for metric in VALIDATION if metric["name"] not in own]
    return {**about, "metrics": [*more, *about["metrics"]]}


def number_of(step: Step) -> int:
    """The step of a line of ``metrics.jsonl``; 0 before the first."""
    return int(step["step"] or 0)


def read_steps(path: Path) -> list[Step]:
    """Lines of ``metrics.jsonl``, in order. A last line that a kill cut short is left out."""
    return [_step(line, path, number) for number, line in enumerate(whole_lines(path), 1)]


def _step(line: bytes, path: Path, number: int) -> Step:
    try:
        step = json.loads(line)
        if type(step["step"]) is not int:
            raise ValueError(f"step is {step['step']!r}")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UserError(f"{path}, line {number}: not the metrics of a step ({error}); delete the line") from None
    odd = [name for name, value in step.items() if value is not None and type(value) not in (int, float)]
    if odd:
        raise UserError(
            f"{path}: not what realvr writes (line {number}: {odd[0]} is {str(step[odd[0]])[:60]!r}); {AGAIN}"
        )
    return step  # type: ignore[no-any-return]


def _settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{path}: damaged ({' '.join(str(error).split())})") from None
    return content if isinstance(content, dict) else {}


# ---------------------------------------------------------------------- titles of the package's own metrics


def metrics(titles: dict[str, tuple[str, str]], first: Sequence[str], last: Sequence[str]) -> list[Metric]:
    """Metrics in the order of ``titles``, each with its title and description."""
    return [
        {"name": name, "title": title, "description": text, "first": name in first, "last": name in last}
        for name, (title, text) in titles.items()
    ]


VALIDATION = metrics(
    {
        "validation/accuracy": ("Held-out accuracy", "share of held-out questions answered right"),
        "validation/reward": ("Held-out reward", "mean weighted reward of the replies"),
        "validation/readable": ("Held-out replies that can be read", "share of replies with an answer"),
        "validation/loss": ("Held-out loss of the right answer", "negative log-probability of the right answer"),
        "validation/help": ("Held-out help of the latents", "accuracy with the latents minus accuracy without"),
        "validation/dependence_other": (
            "Held-out dependence: another's latents",
            "accuracy lost with the latents of another question",
        ),
        "validation/dependence_noise": ("Held-out dependence: noise", "accuracy lost with noise as latents"),
    },
    first=("validation/accuracy", "validation/reward"),
    last=(),
)
BASE_METRICS = metrics(
    {
        "loss": ("Loss", "of the whole step, over all microbatches and ranks"),
        "loss/next_token": ("Next-token loss", "cross-entropy per labelled token"),
        "loss/caption": ("Caption loss", "cross-entropy per token of the caption, before its weight"),
        "loss/dense": ("Dense loss", "per labelled visual token and attribute, before its weight"),
        "grad_norm": ("Gradient norm", "of the whole gradient, before clipping"),
    },
    first=("loss",),
    last=("loss", "loss/next_token", "loss/caption", "loss/dense"),
)
STAGE1_METRICS = metrics(
    {
        "loss": ("Loss", "of the whole step, over all microbatches and ranks"),
        "loss/next_token": ("Next-token loss", "cross-entropy per labelled token"),
        "loss/reconstruction": ("Reconstruction loss", "per example with boxes, before its weight"),
        "latents/cos_target": (
            "Cosine of states to their targets",
            "over all slots",
        ),
        "latents/cos_first": (
            "Cosine of the first latent to its target",
            "which no evidence precedes",
        ),
        "grad_norm": ("Gradient norm", "of the whole gradient, before clipping"),
    },
    first=("loss", "loss/next_token", "loss/reconstruction", "latents/cos_target"),
    last=("loss", "loss/next_token", "loss/reconstruction", "latents/cos_target", "latents/cos_first"),
)
STAGE2_METRICS = metrics(
    {
        "reward": ("Reward", "mean weighted reward of a completion"),
        "evidence/margin": ("Evidence margin g", "cosine to p⁺ minus cosine to the hardest negative, where defined"),
        "evidence/cos_positive": ("Cosine to p⁺", "of the regenerated latents"),
        "evidence/cos_hardest_negative": ("Cosine to the hardest negative", "of the regenerated latents"),
        "evidence/active_hinge": ("Slots with an active hinge", "share of latents with an evidence loss above 0"),
        "loss": ("Loss", "of the whole step, over all microbatches and ranks"),
        "reward/accuracy": ("Accuracy reward", "mean over completions, before its weight"),
        "reward/format": ("Format reward", "mean over completions, before its weight"),
        "evidence/credit_mass": ("Credit mass Σγ", "sum of the credit over the latents of a prompt"),
        "evidence/weight_spread": (
            "Spread of the weights",
            "distance of the latents' weights from uniform, 0 to 1 − 1/K",
        ),
        "loss/policy": ("Policy loss", "clipped objective with its KL"),
        "loss/evidence": ("Evidence loss", "before lambda_ev"),
        "groups/without_variance": ("Groups without variance", "share of groups whose rewards are all equal"),
        "policy/entropy": ("Entropy, nats", "of the sampling distribution, per generated token"),
        "policy/kl": ("KL from the starting policy", "k3 estimate, with beta > 0"),
        "completions/tokens": ("Tokens per completion", "mean length"),
        "latents/adjacent_cosine": ("Cosine of adjacent latents", "near 1 means that the latents have collapsed"),
        "grad_norm": ("Gradient norm", "of the whole gradient, before clipping"),
    },
    first=(
        "reward",
        "evidence/margin",
        "evidence/cos_positive",
        "evidence/cos_hardest_negative",
        "evidence/active_hinge",
        "loss",
    ),
    last=("reward", "evidence/margin", "evidence/cos_positive", "evidence/active_hinge", "loss"),
)
STAGES: dict[str, tuple[str, list[Metric]]] = {
    "base": ("Base model", BASE_METRICS),
    "sft": ("Stage 1: reconstruction", STAGE1_METRICS),
    "rl": ("Stage 2: reinforcement learning", STAGE2_METRICS),
}
"""Command -> heading and metrics of its own methods, in the order in which stages are shown."""


def about(stage: str, method: str, shown: Sequence[Metric] | None = None) -> About:
    """``method.json`` of a run; ``shown`` are the method's own metrics, by default those of the stage."""
    title, usual = STAGES[stage]
    return {"version": 1, "stage": stage, "title": title, "method": method, "metrics": list(shown or usual)}


def _earlier(steps: Sequence[Step], settings: dict[str, Any]) -> About:
    """What a run without ``method.json`` was."""
    names = {name for step in steps for name in step}
    stage = "rl" if "reward" in names else "sft" if "loss/reconstruction" in names else "base"
    method = settings.get("method", "")
    return about(stage, str(method.get("type", "") if isinstance(method, dict) else method))
