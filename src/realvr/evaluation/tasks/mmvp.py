"""MMVP: pairs of pictures that look alike to CLIP, one question for both."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from realvr.data.readers import mmvp
from realvr.evaluation.benchmark import Benchmark, Facts
from realvr.evaluation.records import Prediction
from realvr.evaluation.rules import Rule, mean, percent
from realvr.evaluation.statistics import Bootstrap, Tally, bootstrap, interval


def pairs(rows: Iterable[Prediction]) -> dict[tuple[str, int], list[Prediction]]:
    """Complete pairs, by (pair, decoding seed)."""
    groups: dict[tuple[str, int], list[Prediction]] = defaultdict(list)
    for row in rows:
        if row.pair is not None:
            groups[row.pair, row.seed].append(row)
    return {key: groups[key] for key in sorted(groups) if len(groups[key]) == 2}


def _details(rows: Sequence[Prediction]) -> dict[str, Any]:
    both = [all(row.correct for row in pair) for pair in pairs(rows).values()]
    return {"single": percent(rows), "pair": 100 * mean(both) if both else None, "pairs": len(both)}


def _pair_interval(rows: Sequence[Prediction], sampling: Bootstrap) -> dict[str, list[float]]:
    """Pairs are drawn, each with all its decoding seeds."""
    complete = pairs(rows)
    if not complete:
        return {}
    names, seeds = sorted({pair for pair, _ in complete}), sorted({seed for _, seed in complete})
    tally = Tally(np.zeros((len(names), len(seeds))), np.zeros((len(names), len(seeds))))
    for (pair, seed), both in complete.items():
        at = names.index(pair), seeds.index(seed)
        tally.right_UC[at] = all(row.correct for row in both)
        tally.asked_UC[at] = 1
    drawn = bootstrap([tally], resamples=sampling.resamples, seed=(sampling.seed, zlib.crc32(b"mmvp pairs")))
    return {"pair_ci": list(interval(100 * drawn[0]))}


class Mmvp(Benchmark):
    """The paper's number is over single questions; the official score over pairs stands beside it."""

    name = "mmvp"
    title = "MMVP"
    order = 10
    reader = mmvp.FORMAT
    slot = column = "mmvp"
    stand_in = "mmvp"
    rule = Rule(
        "single accuracy",
        _details,
        intervals=_pair_interval,
        beside="`pair`: both of a pair right, with its interval; half a pair is left out",
        draws="questions; pairs for `pair`",
    )
    variants = {"corrected": "corrects the answers that the original file swaps at Index 99/100 and 279/280"}
    flags = {"--mmvp-corrected": "--variant=mmvp=corrected", "--no-mmvp-corrected": ""}
    facts = Facts(
        layout=("a folder with Questions.csv and 'MMVP Images/1.jpg' to '300.jpg'",),
        rows=300,
        where="the dataset MMVP/MMVP on the Hugging Face hub",
        licence="MIT",
        scored_by="accuracy over single questions (the paper's number), and over pairs, both right (the official "
        "score)",
        caveats=(
            "The original file has the answers swapped at Index 99/100 and 279/280: --variant mmvp=corrected (or "
            "--mmvp-corrected) corrects them; leave it off for the later upload, which is already right.",
            "Papers quote single accuracy over 300 or pair accuracy over 150: compare like with like.",
        ),
        citation="""\
@inproceedings{tong2024eyes,
  title = {Eyes Wide Shut? Exploring the Visual Shortcomings of Multimodal LLMs},
  author = {Tong, Shengbang and Liu, Zhuang and Zhai, Yuexiang and Ma, Yi and LeCun, Yann and Xie, Saining},
  booktitle = {CVPR},
  year = {2024}
}""",
    )
