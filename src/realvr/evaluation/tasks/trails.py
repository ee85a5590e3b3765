"""Trails: follow the arrows to a circle. A task of the embedded world, where looking takes several steps."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from typing_extensions import override

from realvr.data.readers import jsonl
from realvr.data.sample import Sample
from realvr.evaluation.benchmark import Benchmark, Facts
from realvr.evaluation.records import Prediction
from realvr.evaluation.rules import Rule, natural, percent, shares, split


def _by_tag(rows: Sequence[Prediction], tag: str) -> dict[str, dict[str, Any]]:
    """Accuracy by the value of a tag, 10 after 9; questions without the tag stand under "not tagged"."""
    found = shares(split(rows, lambda row: row.tags.get(tag, "not tagged")))
    return {name: found[name] for name in sorted(found, key=natural)}


def _details(rows: Sequence[Prediction]) -> dict[str, Any]:
    return {"accuracy": percent(rows), "arrows": _by_tag(rows, "arrows"), "kinds": _by_tag(rows, "kind")}


class Trails(Benchmark):
    """Accuracy over all questions, and by number of arrows."""

    name = "trails"
    title = "Trails"
    order = 80
    reader = jsonl.FORMAT
    stand_in = "trails"
    rule = Rule("accuracy", _details, beside="`arrows`: by number of arrows on the trail; `kinds`: by kind of question")
    facts = Facts(
        layout=("samples.jsonl beside its images",),
        rows=2_000,
        where="drawn by this package: realvr world make OUT --split trails",
        licence="Apache-2.0, as this package",
        scored_by="accuracy over all questions; also by number of arrows on the trail and by kind of question",
        files=("samples.jsonl",),
        caveats=(
            "Not one of the five tasks of the paper's mean, and in no paper: a task of the embedded world.",
            "Every table calls it mini-trails, as all that the embedded world draws.",
            "A guess is right in a quarter of the questions with four options.",
            "--limit takes as many questions of each number of arrows as the set allows.",
        ),
        citation="""\
@software{realvr,
  title = {realvr: training and evaluation of latent visual reasoning on stock transformers},
  year = {2026}
}""",
    )

    @classmethod
    @override
    def stratum(cls, sample: Sample) -> tuple[Hashable, ...]:
        return (*super().stratum(sample), sample.tags.get("kind", ""), sample.tags.get("arrows", ""))
