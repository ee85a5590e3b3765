"""HR-Bench 4K and 8K: small things in very large pictures, every question in four rotations of its options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from realvr.data.readers import hr_bench
from realvr.evaluation.benchmark import Benchmark, Facts
from realvr.evaluation.records import Prediction
from realvr.evaluation.rules import Rule, cycle_of, mean, percent, split


def _details(rows: Sequence[Prediction]) -> dict[str, Any]:
    cycles = {
        cycle: {"all": percent(part)}
        | {name: percent(some) for name, some in split(part, lambda r: r.category).items()}
        for cycle, part in split(rows, cycle_of).items()
    }
    names = ["all", *sorted({name for cycle in cycles.values() for name in cycle} - {"all"})]
    means = {name: mean([cycle[name] for cycle in cycles.values() if name in cycle]) for name in names}
    return {**means, "cycles": cycles}


def _facts(size: str) -> Facts:
    return Facts(
        layout=(f"hr_bench_{size}.tsv", f"hr_bench_{size}.parquet"),
        rows=800,
        where="the dataset DreamMr/HR-Bench on the Hugging Face hub",
        licence="see the card of the dataset",
        scored_by="accuracy per option cycle for all, single and cross, then the mean over the four cycles; there is "
        "no all-four rule",
        files=(f"*hr*bench*{size}*.tsv", f"*hr*bench*{size}*.parquet"),
        caveats=(
            "The TSV is streamed and its images stay in the file until they are asked about; of a parquet file, the "
            "encoded images are held in memory.",
            "The four cycles of a question share their image and are asked one after the other.",
        ),
        citation="""\
@inproceedings{wang2025divide,
  title = {Divide, Conquer and Combine: A Training-Free Framework for High-Resolution Image Perception in Multimodal
           Large Language Models},
  author = {Wang, Wenbin and Ding, Liang and Zeng, Minyan and Zhou, Xiabin and Shen, Li and Luo, Yong and Tao, Dacheng},
  booktitle = {AAAI},
  year = {2025}
}""",
    )


class HrBench4K(Benchmark):
    """Mean over the option cycles."""

    name = "hrbench-4k"
    title = "HR-Bench 4K"
    order = 30
    reader = hr_bench.FORMAT
    slot = column = "hrbench-4k"
    stand_in = "hrbench-4k"
    rule = Rule(
        "mean over option cycles",
        _details,
        column=cycle_of,
        cycles=True,
        headline="accuracy per option cycle, then the mean over the cycles",
        beside="the same for `single` and `cross`; `cycles`",
        draws="questions with their four cycles",
    )
    facts = _facts("4k")


class HrBench8K(HrBench4K):
    """The same questions about larger pictures."""

    name = "hrbench-8k"
    title = "HR-Bench 8K"
    order = 40
    slot = column = "hrbench-8k"
    stand_in = "hrbench-8k"
    facts = _facts("8k")
