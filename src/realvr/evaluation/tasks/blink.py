"""BLINK: visual perception in fourteen subtasks, of which the paper's number is over five."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from realvr.data.readers import blink
from realvr.evaluation.benchmark import Benchmark, Facts
from realvr.evaluation.records import Prediction
from realvr.evaluation.rules import Rule, mean, percent, shares, split

PAPER = ("Counting", "IQ_Test", "Jigsaw", "Relative_Reflectance", "Spatial_Relation")
"""The five subtasks behind the paper's number (697 questions)."""
ROWS: dict[str, int] = {
    "Art_Style": 117,
    "Counting": 120,
    "Forensic_Detection": 132,
    "Functional_Correspondence": 130,
    "IQ_Test": 150,
    "Jigsaw": 150,
    "Multi-view_Reasoning": 133,
    "Object_Localization": 122,
    "Relative_Depth": 124,
    "Relative_Reflectance": 134,
    "Semantic_Correspondence": 139,
    "Spatial_Relation": 143,
    "Visual_Correspondence": 172,
    "Visual_Similarity": 135,
}
"""Rows of every subtask of the validation split."""


def _subtask(row: Prediction) -> str:
    """The reader puts the subtask into ``task``."""
    return row.task


def _details(rows: Sequence[Prediction]) -> dict[str, Any]:
    subtasks = split(rows, _subtask)
    return {
        "macro": mean([percent(part) for part in subtasks.values()]),
        "micro": percent(rows),
        "subtasks": shares(subtasks),
    }


class Blink(Benchmark):
    """Macro mean over subtasks, as the official score."""

    name = "blink"
    title = "BLINK"
    order = 20
    reader = blink.FORMAT
    slot = column = "blink"
    stand_in = "blink"
    official_policy = "blink-official"
    rule = Rule(
        "mean over subtasks",
        _details,
        column=_subtask,
        stratum=_subtask,
        headline="unweighted mean over the subtasks present",
        beside="`micro`, `subtasks`",
        draws="questions within each subtask",
    )
    flags = {"--blink-tasks": "--tasks=blink={}"}
    facts = Facts(
        layout=("a folder of <SubTask>/val-00000-of-00001.parquet",),
        rows=sum(ROWS[task] for task in PAPER),
        where="the dataset BLINK-Benchmark/BLINK on the Hugging Face hub",
        licence="Apache-2.0",
        scored_by="accuracy per subtask; headline: macro, the plain mean over subtasks",
        task_rows=ROWS,
        tasks=PAPER,
        caveats=(
            f"By default the paper's five subtasks ({', '.join(PAPER)}); --tasks blink=all (or --blink-tasks all) "
            f"takes all fourteen ({sum(ROWS.values()):,} questions), the official set.",
            "The official score is macro; some harnesses print micro. Both are given.",
            "Only the val split has answers.",
            "Labels of Relative_Reflectance were corrected in late 2025, and files do not say which they hold: "
            "eval.json records a hash of every subtask's labels (sets.blink.labels): compare runs where it agrees.",
        ),
        citation="""\
@inproceedings{fu2024blink,
  title = {BLINK: Multimodal Large Language Models Can See but Not Perceive},
  author = {Fu, Xingyu and Hu, Yushi and Li, Bangzheng and Feng, Yu and Wang, Haoyu and Lin, Xudong and Roth, Dan and
            Smith, Noah A. and Ma, Wei-Chiu and Krishna, Ranjay},
  booktitle = {ECCV},
  year = {2024}
}""",
    )
