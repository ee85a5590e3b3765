"""The shapes of ``summary.json`` and ``eval.json``: what scoring writes, and what tables, report and demo read.

A summary is about one model (`Summary`) or about several checkpoints of one recipe (`Spread`, told apart by its
``checkpoints``). Shares are percentages, differences percentage points. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NotRequired

from typing_extensions import TypedDict, TypeIs

from realvr.runs.files import read_json
from realvr.runs.records import ResultFile, Text

VERSION = 2
Ends = list[float | None]
"""Low and high end of a 95 % interval."""


class Effect(TypedDict):
    """Help or dependence: own latents minus what stands in for them."""

    points: float
    ci: NotRequired[Ends]
    std: NotRequired[float | None]
    """Instead of ``ci`` over several checkpoints."""
    read: float | None
    """Readable replies under the condition, %."""
    n: NotRequired[int]
    p: NotRequired[float | None]
    readable: NotRequired[ReadableEffect]


class ReadableEffect(TypedDict):
    """The same difference over the questions answered readably under both conditions."""

    points: float | None
    ci: Ends | None
    n: NotRequired[int]


class Difference(TypedDict):
    """A condition minus the model's own latents, over the same questions; empty where no question is common."""

    common: NotRequired[int]
    difference: NotRequired[float]
    difference_ci: NotRequired[Ends]
    only_first: NotRequired[int]
    only_second: NotRequired[int]
    p: NotRequired[float | None]


class Counts(TypedDict):
    """What is there, what failed."""

    n: int
    replies: int
    policy: Text
    parser: NotRequired[Text]
    """The policy with its version."""
    judge: NotRequired[Text]
    """What decided whether answers are right, with its version."""
    coverage: float
    parse_failures: int
    errors: int
    first_error: Text | None
    mean_new_tokens: float
    expected: int | None
    complete: bool | None
    status: Text


class ConditionScore(Counts, Difference):
    """One benchmark under one condition or one K."""

    headline: float
    ci: Ends
    readable: NotRequired[Difference]


class BenchScore(Counts):
    """One benchmark with the model's own latents, and what it is compared with."""

    headline: float
    metric: Text
    ci: Ends
    latents: int
    std: float | None
    seeds: dict[Text, float]
    metrics: dict[Text, Any]
    """What the benchmark's own rule prints beside the headline."""
    ablation: dict[Text, ConditionScore]
    effects: NotRequired[dict[Text, Effect]]
    sweep: NotRequired[dict[Text, ConditionScore]]
    not_published_set: NotRequired[Text]
    """Why the questions are not the published set of this name; empty where they are."""


class MeanScore(Difference):
    """Mean over tasks under one condition."""

    mean: float
    ci: Ends
    coverage: NotRequired[float]
    tasks: NotRequired[list[Text]]
    complete: NotRequired[bool]
    std: NotRequired[float | None]
    readable: NotRequired[Difference]


class Sweep(TypedDict):
    """Differences from the trained K."""

    reference: int
    latents: list[int]
    rows: dict[Text, dict[Text, float]]
    mean: dict[Text, float]
    best: dict[Text, int]
    oracle: float


class Summary(TypedDict):
    """``summary.json`` of one model."""

    benches: dict[Text, BenchScore]
    version: NotRequired[int]
    trained_latents: int
    resamples: int
    seed: int
    without_own_latents: list[Text]
    not_begun: NotRequired[list[Text]]
    five_task_mean: NotRequired[dict[Text, MeanScore]]
    task_mean: NotRequired[dict[Text, MeanScore]]
    effects: NotRequired[dict[Text, Effect]]
    sweep: NotRequired[Sweep]


class Deviation(TypedDict):
    """Mean and standard deviation (ddof = 1) over checkpoints."""

    mean: float
    std: float | None
    n: int
    values: dict[Text, float]


class ConditionSpread(Deviation):
    """One condition over several checkpoints."""

    coverage: NotRequired[float]
    difference: NotRequired[Deviation]
    tasks: NotRequired[list[Text]]


class BenchSpread(Deviation):
    """One benchmark over several checkpoints."""

    coverage: NotRequired[float]
    metric: Text
    policy: Text
    complete: bool
    not_published_set: NotRequired[Text]
    ablation: dict[Text, ConditionSpread]
    effects: NotRequired[dict[Text, Effect]]


class Spread(TypedDict):
    """``summary.json`` of several checkpoints, for instance training seeds."""

    version: NotRequired[int]
    checkpoints: list[Text]
    benches: dict[Text, BenchSpread]
    five_task_mean: NotRequired[dict[Text, ConditionSpread]]
    task_mean: NotRequired[dict[Text, ConditionSpread]]
    effects: NotRequired[dict[Text, Effect]]


AnySummary = Summary | Spread
AnyBench = BenchScore | BenchSpread
AnyCondition = ConditionScore | MeanScore | ConditionSpread | BenchScore | BenchSpread


def is_spread(summary: AnySummary) -> TypeIs[Spread]:
    """Whether a summary is about several checkpoints."""
    return "checkpoints" in summary


def _whole_sweep(summary: Summary) -> None:
    """Rows of the sweep are benchmarks with scores at those K."""
    for name, row in summary["sweep"]["rows"].items() if "sweep" in summary else ():
        bench = summary["benches"].get(name)
        if name not in summary["sweep"]["best"] or bench is None or set(row) - set(bench.get("sweep", {})):
            raise ValueError(f"sweep.rows.{name}: no such scores in benches, or no best K")
    for means in (summary.get("five_task_mean"), summary.get("task_mean")):
        if means is not None and "own" not in means:
            raise ValueError("a mean without that of the model's own latents")


_REMEDY = "compute it again with realvr score"
SUMMARY_FILE = ResultFile(Summary, "realvr score", _REMEDY, VERSION, _whole_sweep)
SPREAD_FILE = ResultFile(Spread, "realvr score", _REMEDY, VERSION)


def load_summary(path: Path) -> AnySummary:
    """A summary file, under whatever policy."""
    content = read_json(path, _REMEDY)
    return SPREAD_FILE.parse(content, path) if "checkpoints" in content else SUMMARY_FILE.parse(content, path)


def checked(summary: Mapping[str, Any]) -> AnySummary:
    """What scoring made, as it is going to be written."""
    content = dict(summary)
    return SPREAD_FILE.validate(content) if "checkpoints" in content else SUMMARY_FILE.validate(content)


class Answering(TypedDict):
    """What answered. Your own responder may record more, or less."""

    name: NotRequired[Text]
    path: NotRequired[Text | None]
    weights: NotRequired[Text | None]
    latents: NotRequired[int | None]
    sampling: NotRequired[dict[Text, Any] | None]


class Asked(TypedDict):
    """One set of questions."""

    path: NotRequired[Text | None]
    format: NotRequired[Text | None]
    rows: NotRequired[int | None]
    dropped: NotRequired[dict[Text, Any] | None]
    questions: NotRequired[int | None]
    tasks: NotRequired[list[Text] | None]
    missing_tasks: NotRequired[list[Text] | None]
    limit: NotRequired[int | None]
    sha256: NotRequired[Text | None]


class EvalRecord(TypedDict):
    """``eval.json``: what the predictions beside it were made with. Records of earlier versions lack sections."""

    responder: NotRequired[Answering]
    benches: NotRequired[dict[Text, Asked]]
    sets: NotRequired[dict[Text, dict[Text, Any]]]
    """Facts about each set: whether the world drew it, and its rows by subtask."""
    expected: NotRequired[dict[Text, int]]
    answers: NotRequired[dict[Text, Text]]
    """Parser and judge, each with its version."""
    settings: NotRequired[dict[Text, Any]]
    versions: NotRequired[dict[Text, Any]]
    run: NotRequired[dict[Text, Any]]


EVAL_FILE = ResultFile(EvalRecord, "realvr eval", "repair it, or name another --out")
