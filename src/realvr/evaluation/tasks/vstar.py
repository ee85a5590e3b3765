"""V*: attributes and relations of small things in large pictures. Not one of the five tasks of the paper's mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from realvr.data.readers import vstar
from realvr.evaluation.benchmark import Benchmark, Facts
from realvr.evaluation.records import Prediction
from realvr.evaluation.rules import Rule, percent, shares, split


def _details(rows: Sequence[Prediction]) -> dict[str, Any]:
    return {"accuracy": percent(rows), "categories": shares(split(rows, lambda row: row.category))}


class VStar(Benchmark):
    """Accuracy over all questions, and per category."""

    name = "vstar"
    title = "V*"
    order = 70
    reader = vstar.FORMAT
    stand_in = "vstar"
    rule = Rule("accuracy", _details, beside="`categories`: `direct_attributes`, `relative_position`")
    facts = Facts(
        layout=("test_questions.jsonl beside its images", "a .parquet with images inside"),
        rows=191,
        where="the dataset craigwu/vstar_bench on the Hugging Face hub",
        licence="see the card of the dataset",
        scored_by="accuracy over all questions; also per category: direct_attributes (115) and relative_position (76)",
        files=("*test_questions*.jsonl", "*vstar*.jsonl", "*vstar*.json", "*vstar*.parquet", "test-*.parquet"),
        caveats=(
            "Not one of the five tasks of the paper's mean.",
            "The text of a question ends in its options and an instruction; both are taken off and asked in the words "
            "of all benchmarks. The published text stays in the sample's meta['prompt'].",
            "Image paths in the JSON lines are relative to their folder, or to --images NAME=DIR.",
        ),
        citation="""\
@inproceedings{wu2024vstar,
  title = {V*: Guided Visual Search as a Core Mechanism in Multimodal LLMs},
  author = {Wu, Penghao and Xie, Saining},
  booktitle = {CVPR},
  year = {2024}
}""",
    )
