"""MME-RealWorld and its Lite set: crowded pictures, five options, the last of which says that it is not there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from realvr.data.readers import mme_realworld
from realvr.evaluation.benchmark import Benchmark, Facts
from realvr.evaluation.records import Prediction
from realvr.evaluation.rules import Rule, mean, percent, shares, split


def _subtask(row: Prediction) -> str:
    return f"{row.task}/{row.tags.get('subtask') or row.category}"


def _over_subtasks(rows: Sequence[Prediction]) -> float:
    return mean([percent(part) for part in split(rows, _subtask).values()])


def _details(rows: Sequence[Prediction]) -> dict[str, Any]:
    return {
        "micro": percent(rows),
        "avg_c": _over_subtasks(rows),
        "tasks": {
            task: {"accuracy": percent(part), "avg_c": _over_subtasks(part), "n": len(part)}
            for task, part in split(rows, lambda row: row.task).items()
        },
        "subtasks": shares(split(rows, _subtask)),
    }


_CAVEATS = (
    "Redistribution is forbidden: fetch it yourself, and do not publish its images.",
    "Five options; E says that the feature does not exist.",
    "Image paths in the JSON are relative to its folder, or to --images NAME=DIR.",
)
_FACTS: dict[str, Any] = {
    "licence": "academic research only; redistribution is forbidden",
    "scored_by": "micro accuracy over all questions; also per task, per subtask, and Avg-C, the plain mean over "
    "subtasks",
    "citation": """\
@inproceedings{zhang2025mmerealworld,
  title = {MME-RealWorld: Could Your Multimodal LLM Challenge High-Resolution Real-World Scenarios that are Difficult
           for Humans?},
  author = {Zhang, Yi-Fan and Zhang, Huanyu and Tian, Haochen and Fu, Chaoyou and Zhang, Shuangqing and others},
  booktitle = {ICLR},
  year = {2025}
}""",
}


class MmeRealWorldLite(Benchmark):
    """The set behind the paper's MME-RealWorld number."""

    name = "mme-realworld-lite"
    title = "MME-RealWorld-Lite"
    order = 50
    reader = mme_realworld.FORMAT
    slot = column = "mme-realworld"
    official_policy = "mme-official"
    rule = Rule(
        "accuracy",
        _details,
        beside="`tasks`, `subtasks` (Task/Subtask), `avg_c`: unweighted mean over the subtasks",
    )
    facts = Facts(
        layout=("MME-RealWorld-Lite.json beside its images", "a .tsv or .parquet with images inside"),
        rows=1_919,
        where="the dataset yifanzhang114/MME-RealWorld-Lite on the Hugging Face hub",
        files=("*mme*realworld*lite*.json", "*mme*realworld*lite*.tsv", "*mme*realworld*lite*.parquet"),
        caveats=("The set behind the paper's MME-RealWorld number.", *_CAVEATS),
        **_FACTS,
    )


class MmeRealWorld(MmeRealWorldLite):
    """The whole set; it fills the fifth task of the mean where the Lite set is not there."""

    name = "mme-realworld"
    title = "MME-RealWorld"
    order = 60
    column = ""
    stand_in = "mme-realworld"
    facts = Facts(
        layout=("MME_RealWorld.json beside its images", "a .tsv or .parquet with images inside"),
        rows=23_609,
        where="the dataset yifanzhang114/MME-RealWorld on the Hugging Face hub",
        files=("*mme*realworld*.json", "*mme*realworld*.tsv", "*mme*realworld*.parquet"),
        without="*lite*",
        caveats=_CAVEATS,
        **_FACTS,
    )
