"""From predictions to numbers one can defend: headline, interval, ablations, sweep over K, five-task mean.

`summarise` reads predictions of one model; `aggregation` puts summaries of several together. Shares and their
differences are percentages and percentage points; the results are JSON-compatible. No model, no torch.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from realvr.answers import JUDGE, equal
from realvr.evaluation import rules
from realvr.evaluation.benchmark import benchmark_of
from realvr.evaluation.effects import effects
from realvr.evaluation.five_tasks import five_tasks, in_order
from realvr.evaluation.records import Prediction
from realvr.evaluation.rules import Rule
from realvr.evaluation.statistics import Array, Bootstrap, Tally, bootstrap, interval, mcnemar, mean_std

Rows = list[Prediction]
VERSION = 2
ABLATIONS = ("none", "mean", "other", "noise")
"""What stands in for the model's own latents: no span at all (K = 0), their mean over the set, another example's, noise
of the same norms."""


@dataclass
class Bench:
    """Predictions of one benchmark, by (condition, K)."""

    name: str
    cells: dict[tuple[str, int], Rows]

    def __post_init__(self) -> None:
        self.rule: Rule = benchmark_of(self.name).rule
        self.units = rules.units(self.rule, (row for rows in self.cells.values() for row in rows))

    def tallies(self, *cells: Rows) -> tuple[list[Tally], list[int]]:
        """One tally per cell over the same units, and the units' strata. Columns: decoding seeds x the rule's own."""
        counted = [rules.counted(self.rule, rows) for rows in cells]
        names = sorted({self.units[row.question] for rows in counted for row in rows})
        number = {name: index for index, name in enumerate(names)}
        stratum: dict[str, str] = {}
        made = []
        for rows in counted:
            columns = {key: n for n, key in enumerate(sorted({(row.seed, self.rule.column(row)) for row in rows}))}
            tally = Tally(np.zeros((len(names), len(columns))), np.zeros((len(names), len(columns))))
            for row in rows:
                at = number[self.units[row.question]], columns[row.seed, self.rule.column(row)]
                tally.right_UC[at] += row.correct
                tally.asked_UC[at] += 1
                stratum[self.units[row.question]] = self.rule.stratum(row)
            made.append(tally)
        order = {name: index for index, name in enumerate(sorted(set(stratum.values())))}
        return made, [order[stratum[name]] for name in names]

    def score(self, rows: Rows) -> float:
        """The headline, as a percentage."""
        return 100 * self.tallies(rows)[0][0].score()

    def replicates(self, sampling: Bootstrap, *cells: Rows) -> Array:
        """Resampled headlines (cells, resamples); one draw serves all cells."""
        tallies, strata = self.tallies(*cells)
        seed = (sampling.seed, zlib.crc32(self.name.encode()))
        return 100 * bootstrap(tallies, strata, resamples=sampling.resamples, seed=seed)


def summarise(
    predictions: Iterable[Prediction],
    *,
    trained_latents: int | None = None,
    policy: str | None = None,
    resamples: int = 2000,
    seed: int = 0,
    expected: Mapping[str, int] | None = None,
    sets: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Scores of one model, see docs/evaluation.md for the keys.

    ``trained_latents`` is the K of the checkpoint; left out, it is the K of the mean and other conditions, else the
    largest. With ``policy`` every text is read again; without, the readings stored in the predictions count.
    ``expected`` gives the number of questions of a benchmark: fewer are marked incomplete. ``sets`` says why questions
    are not the published set of that name ('' where they are); without it nothing counts as published.
    """
    benches = group(predictions, policy)
    trained = infer_latents(benches) if trained_latents is None else trained_latents
    sampling = Bootstrap(resamples, seed)
    done: dict[str, dict[str, Any]] = {}
    drawn: dict[str, dict[str, Array]] = {}
    for name, bench in benches.items():
        latents = reference_latents(bench, trained)
        if latents is not None:
            done[name], drawn[name] = _bench(bench, latents, sampling, (expected or {}).get(name))
            done[name]["not_published_set"] = (sets or {}).get(name, "no record of the questions (eval.json)")
    summary: dict[str, Any] = {
        "version": VERSION,
        "trained_latents": trained,
        "resamples": resamples,
        "seed": seed,
        "benches": done,
        "without_own_latents": sorted(set(benches) - set(done)),
        "not_begun": sorted(set(expected or {}) - set(benches)),
    }
    means = _means(done, drawn, trained)
    if "own" in means:
        five = five_tasks(means["own"]["tasks"]) is not None
        summary["five_task_mean" if five else "task_mean"] = means
        summary["effects"] = effects(means)
    if sweep := _sweep_table(done, trained):
        summary["sweep"] = sweep
    return summary


def group(predictions: Iterable[Prediction], policy: str | None = None) -> dict[str, Bench]:
    """Benchmarks by name, the five first. A key that occurs twice counts once."""
    cells: dict[str, dict[tuple[str, int], Rows]] = defaultdict(lambda: defaultdict(list))
    seen = set()
    for row in predictions:
        if row.key in seen:
            continue
        seen.add(row.key)
        cells[row.bench][row.condition, row.latents].append(reread(row, policy) if policy else row)
    return {name: Bench(name, dict(cells[name])) for name in in_order(cells)}


def reread(row: Prediction, policy: str) -> Prediction:
    """The prediction with its text read under another policy."""
    parser = benchmark_of(row.bench).parser(policy)
    extracted = None if row.error else parser.read(row.text, row.choices)
    correct = bool(equal(extracted, row.answer, row.choices))
    return replace(row, extracted=extracted, policy=policy, parser=str(parser), judge=JUDGE, correct=correct)


def infer_latents(benches: Mapping[str, Bench]) -> int:
    """K that a run without a record was about: that of the mean and other conditions, else the largest."""
    keys = [key for bench in benches.values() for key in bench.cells]
    replaced = [latents for condition, latents in keys if condition != "own"]
    return max(replaced or [latents for _, latents in keys] or [0])


def reference_latents(bench: Bench, trained: int) -> int | None:
    """The trained K where the model's own latents were run with it, else the largest K that was; None for none."""
    own = [latents for condition, latents in bench.cells if condition == "own"]
    return None if not own else trained if trained in own else max(own)


def counts(rows: Rows, expected: int | None = None) -> dict[str, Any]:
    """What is there, what failed. ``coverage``: percentage of the replies with a readable answer."""
    seeds = rules.split(rows, lambda row: str(row.seed))
    asked = min(len(part) for part in seeds.values())
    answered = [row for row in rows if row.error is None]
    read = sum(row.extracted is not None for row in rows)
    complete = None if expected is None else asked >= expected
    return {
        "n": len({row.question for row in rows}),
        "replies": len(rows),
        "policy": " + ".join(sorted({row.policy for row in rows})),
        "parser": _recorded(row.parser for row in rows),
        "judge": _recorded(row.judge for row in rows),
        "coverage": 100 * read / len(rows),
        "parse_failures": sum(row.extracted is None for row in answered),
        "errors": len(rows) - len(answered),
        "first_error": next((f"{row.question}: {row.error}" for row in rows if row.error is not None), None),
        "mean_new_tokens": sum(row.new_tokens for row in answered) / len(answered) if answered else 0.0,
        "expected": expected,
        "complete": complete,
        "status": "" if complete is None else "complete" if complete else f"incomplete {asked}/{expected}",
    }


def _recorded(values: Iterable[str]) -> str:
    """Parsers or judges of records; those of earlier versions do not name theirs."""
    return " + ".join(sorted({value or "not recorded" for value in values}))


def _bench(
    bench: Bench, latents: int, sampling: Bootstrap, expected: int | None
) -> tuple[dict[str, Any], dict[str, Array]]:
    """Summary of one benchmark, and the resampled headlines and differences that the five-task mean is made of."""
    own = bench.cells["own", latents]
    replicates = {"own": bench.replicates(sampling, own)[0]}
    seeds = rules.split(own, lambda row: str(row.seed))
    by_seed = {int(seed): bench.score(rows) for seed, rows in seeds.items()}
    entry: dict[str, Any] = {
        "headline": bench.score(own),
        "metric": bench.rule.metric,
        "ci": list(interval(replicates["own"])),
        "latents": latents,
        "std": mean_std(list(by_seed.values()))[1],
        "seeds": {str(seed): by_seed[seed] for seed in sorted(by_seed)},
        **counts(own, expected),
        "metrics": bench.rule.details(own),
    }
    entry["metrics"] |= bench.rule.intervals(own, sampling)
    ablation: dict[str, Any] = {}
    for name in ABLATIONS:
        rows = bench.cells.get(("own", 0) if name == "none" else (name, latents))
        if latents and rows:
            ablation[name], differences = _against(bench, own, rows, sampling, expected)
            ablation[name]["readable"], among = paired(bench, *_readable(own, rows), sampling)
            replicates[name] = bench.replicates(sampling, rows)[0]
            replicates |= {f"{name} - own": differences} if differences is not None else {}
            replicates |= {f"{name} - own, readable": among} if among is not None else {}
    entry["ablation"] = ablation
    entry["effects"] = effects(ablation)
    lengths = sorted(k for condition, k in bench.cells if condition == "own")
    if len(lengths) > 1:
        cells = {k: bench.cells["own", k] for k in lengths}
        entry["sweep"] = {str(k): _against(bench, own, cells[k], sampling, expected)[0] for k in lengths}
    return entry, replicates


def _against(
    bench: Bench, own: Rows, rows: Rows, sampling: Bootstrap, expected: int | None
) -> tuple[dict[str, Any], Array | None]:
    """A condition's headline and its difference from the model's own latents at the reference K."""
    entry = {
        "headline": bench.score(rows),
        "ci": list(interval(bench.replicates(sampling, rows)[0])),
        **counts(rows, expected),
    }
    difference, drawn = paired(bench, own, rows, sampling)
    return entry | difference, drawn


def _readable(first: Rows, second: Rows) -> tuple[Rows, Rows]:
    """Rows of both whose question and seed were answered readably in both."""
    read = [{(row.question, row.seed) for row in rows if row.extracted is not None} for rows in (first, second)]
    both = read[0] & read[1]
    one, two = ([row for row in rows if (row.question, row.seed) in both] for rows in (first, second))
    return one, two


def paired(bench: Bench, first: Rows, second: Rows, sampling: Bootstrap) -> tuple[dict[str, Any], Array | None]:
    """``second - first`` over the questions (and decoding seeds) in both, and its resampled values.

    The interval keeps the rows of a unit together. McNemar's test counts rows as independent, and there is no p where a
    question was decoded more than once.
    """
    by_key = {(row.question, row.seed): row for row in first}
    both = [(by_key[key], row) for row in second if (key := (row.question, row.seed)) in by_key]
    if not both:
        return {"common": 0}, None
    mine, theirs = [a for a, _ in both], [b for _, b in both]
    drawn = bench.replicates(sampling, mine, theirs)
    difference = drawn[1] - drawn[0]
    only_first = sum(a.correct and not b.correct for a, b in both)
    only_second = sum(b.correct and not a.correct for a, b in both)
    once = len({row.question for row in mine}) == len(mine)
    return {
        "common": len(both),
        "difference": bench.score(theirs) - bench.score(mine),
        "difference_ci": list(interval(difference)),
        "only_first": only_first,
        "only_second": only_second,
        "p": mcnemar(only_first, only_second) if once else None,
    }, difference


def _means(done: Mapping[str, dict[str, Any]], drawn: Mapping[str, dict[str, Array]], trained: int) -> dict[str, Any]:
    """Unweighted mean of the headlines per condition, over benchmarks run at the trained K: the five where they are
    all there, else whatever there is. A condition that not all of the five have is left out; of other tasks those
    that have it count."""
    at_k = {name: entry for name, entry in done.items() if entry["latents"] == trained}
    five = five_tasks(at_k)
    result: dict[str, Any] = {}
    for condition in ("own", *ABLATIONS):
        tasks = [name for name in five or at_k if condition == "own" or condition in at_k[name]["ablation"]]
        if tasks and (five is None or tasks == five):
            result[condition] = _mean(condition, tasks, at_k, drawn)
    return result


def _mean(
    condition: str, tasks: list[str], done: Mapping[str, dict[str, Any]], drawn: Mapping[str, dict[str, Array]]
) -> dict[str, Any]:
    """The mean over these tasks under one condition, and its difference from the own latents."""
    cells = [done[name] if condition == "own" else done[name]["ablation"][condition] for name in tasks]
    entry: dict[str, Any] = {
        "mean": float(np.mean([cell["headline"] for cell in cells])),
        "ci": list(interval(np.mean([drawn[name][condition] for name in tasks], axis=0))),
        "coverage": float(np.mean([cell["coverage"] for cell in cells])),
        "tasks": tasks,
        "complete": all(cell["complete"] is not False for cell in cells),
    }
    if condition == "own":
        return entry | {"std": _std_over_seeds(cells)}

    def difference(key: str, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        if not all(key in drawn[name] for name in tasks):
            return {}
        mean = np.mean([drawn[name][key] for name in tasks], axis=0)
        value = float(np.mean([part["difference"] for part in parts]))
        return {"difference": value, "difference_ci": list(interval(mean))}

    entry |= difference(f"{condition} - own", cells)
    return entry | {"readable": difference(f"{condition} - own, readable", [cell["readable"] for cell in cells])}


def _std_over_seeds(cells: Sequence[dict[str, Any]]) -> float | None:
    """Standard deviation of the five-task mean over decoding seeds, where all tasks were run with the same ones."""
    seeds = [tuple(cell["seeds"]) for cell in cells]
    if len(set(seeds)) != 1:
        return None
    return mean_std([float(np.mean([cell["seeds"][seed] for cell in cells])) for seed in seeds[0]])[1]


def _sweep_table(done: Mapping[str, dict[str, Any]], trained: int) -> dict[str, Any]:
    """The paper's tab:latent-length-ablation: differences from the trained K, their unweighted mean, and the oracle
    that picks the best K of each benchmark after the fact."""
    rows = {
        name: {k: cell["difference"] for k, cell in entry["sweep"].items() if "difference" in cell}
        for name, entry in done.items()
        if "sweep" in entry and entry["latents"] == trained
    }
    if not rows:
        return {}
    lengths = sorted({int(k) for row in rows.values() for k in row})
    best = {name: _best_length(row, trained) for name, row in rows.items()}
    return {
        "reference": trained,
        "latents": lengths,
        "rows": rows,
        "mean": {
            str(k): float(np.mean([row[str(k)] for row in rows.values()]))
            for k in lengths
            if all(str(k) in row for row in rows.values())
        },
        "best": {name: int(k) for name, k in best.items()},
        "oracle": float(np.mean([rows[name][k] for name, k in best.items()])),
    }


def _best_length(row: Mapping[str, float], trained: int) -> str:
    """K with the largest difference; of equals the trained one, then the smallest."""
    return max(row, key=lambda k: (row[k], int(k) == trained, -int(k)))
