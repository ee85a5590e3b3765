"""The headline comparison, and the same for arms outside it."""

from __future__ import annotations

from collections.abc import Sequence

from realvr.diagnostics.base import DIAGNOSTICS
from realvr.diagnostics.parts import Highlight
from realvr.evaluation.benchmark import eval_command, known_policies
from realvr.evaluation.comparison import compare
from realvr.evaluation.effects import TITLES, effects
from realvr.evaluation.finished import predictions_of
from realvr.evaluation.results import is_spread
from realvr.evaluation.summary_files import other_policies, summary_path
from realvr.report.find import not_loaded
from realvr.report.results import Arm, Evaluation, Results
from realvr.report.scores import (
    bench_names,
    difference_cell,
    effect_cell,
    evaluated,
    last_tenth,
    mean_title,
    means,
    rule_missing,
    score_cell,
    title,
)
from realvr.widgets import (
    DASH,
    FEW_PAIRS,
    FEW_QUESTIONS,
    Cell,
    Figures,
    Section,
    Table,
    Text,
    interval,
    minus,
    missing,
    number,
)
from realvr.widgets.charts import Bar, forest


def overview(results: Results, baseline: Arm | None) -> Section:
    """The headline comparison."""
    section = Section("overview", "Overview")
    section.widgets += [Text(text) for text in (*map(minus, results.leading), *_what_this_is(results))]
    section.widgets += [Text(minus(note), "warning") for note in results.notes]
    under = (f" under {results.policy}", f" --policy {results.policy}") if results.policy else ("", "")
    for folder in results.unfinished:
        section.widgets.append(
            Text(f"{folder} has predictions but no summary{under[0]} and is left out; realvr score{under[1]} writes it")
        )
    section.widgets += [Text(text) for text in (*_not_loaded(results), *_other_policies(results))]
    main = [arm for arm in results.arms if arm.main]
    scored = [arm for arm in main if arm.eval]
    if scored:
        section.widgets += [headline_table(scored, "Benchmark scores, %"), *_headline_figure(scored)]
    else:
        section.widgets += missing("Scores of benchmarks", eval_command())
    if effects := _effects(main, "What the latents do"):
        section.widgets.append(effects)
    if baseline is not None and (table := _against(scored, baseline)):
        section.widgets.append(table)
    return section


def _not_loaded(results: Results) -> list[str]:
    """Results that need code from outside the package, which nobody named."""
    said = [f"{not_loaded(*one)}." for one in results.foreign]
    for arm in results.arms:
        if arm.eval is not None and (names := rule_missing(arm.eval)):
            said.append(
                f"{arm.eval.folder}: the scoring rule of {', '.join(sorted(names))} is not loaded. The scores stand as "
                "they were written; differences between arms need realvr report --plugin FILE.py."
            )
    return said


def _other_policies(results: Results) -> list[str]:
    """Where the same answers have also been scored under another policy."""
    found: dict[str, list[str]] = {}
    for arm in results.arms:
        for policy in other_policies(arm.eval.folder) if arm.eval is not None else ():
            if arm.eval is not None and summary_path(arm.eval.folder, policy) != arm.eval.file:
                found.setdefault(policy, []).append(arm.name)
    return [
        f"Also scored under {policy}: {', '.join(arms)}. realvr report --policy {policy} shows those scores."
        for policy, arms in found.items()
    ]


def _what_this_is(results: Results) -> list[str]:
    said = [
        "Everything here is computed from saved results; no model was run for this page. Square brackets are 95 % "
        "intervals. They tell how much a number would vary with other questions of the same kind, not how much it "
        "would vary with another training seed. Where an interval of a difference includes zero, these results do not "
        f"show a difference. † marks numbers over fewer than {FEW_QUESTIONS} questions or {FEW_PAIRS} pairs."
    ]
    if results.demo:
        said.insert(
            0,
            "This is a demonstration: a very small model, a short training and few questions about drawn pictures. It "
            "shows how the methods and measurements work. It neither confirms nor refutes what the paper reports about "
            "large models on photographs.",
        )
    return said


def headline_table(arms: Sequence[Arm], caption: str) -> Table:
    """Arms by benchmarks, and their mean: of the five where all were run, else of whatever tasks there are."""
    names = bench_names(arms)
    heading = _mean_heading(arms)
    rows: list[list[Cell | str]] = []
    for arm, summary in evaluated(arms):
        cells = [score_cell(summary["benches"].get(name)) for name in names]
        rows.append([arm.name, *cells, *([score_cell(means(summary).get("own"))] if heading else [])])
    note = "Mean: unweighted over the tasks that were run with the checkpoint's own number of latents."
    return Table(caption, ["arm", *map(title, names), *heading], rows, note if heading else "")


def _mean_heading(arms: Sequence[Arm]) -> list[str]:
    """Heading of the column of means; none where every arm has one task."""
    found = []
    for _, summary in evaluated(arms):
        tasks = means(summary).get("own", {}).get("tasks", [])
        if len(tasks) > 1:
            found.append(mean_title(tasks, "five_task_mean" in summary))
    return [found[0] if len(set(found)) == 1 else "mean over tasks"] if found else []


def _headline_figure(arms: Sequence[Arm]) -> list[Figures]:
    bars, spoken = [], []
    for arm, summary in evaluated(arms):
        found = means(summary).get("own")
        if found:
            low, high = found.get("ci") or (None, None)
            bars.append(Bar(arm.name, found["mean"], low, high, arm.number))
            spoken.append(f"{arm.name} {number(found['mean'])} {interval(found.get('ci'))}".strip())
    if not bars:
        return []
    name = next(iter(_mean_heading(arms)), "score")
    alt = f"{name.capitalize()} in percent with 95 % intervals: {'; '.join(spoken)}."
    return [Figures(name.capitalize(), [(f"{name.capitalize()}, %", forest(bars, alt, "%", zero=False))])]


def _effects(arms: Sequence[Arm], caption: str) -> Table | None:
    """What the span does, in one line per arm."""
    every = [(kind.name, one) for kind in DIAGNOSTICS for one in kind.highlights if one.overview]
    shown = [(name, one) for name, one in every if any(_highlight_cell(arm, name, one).text != DASH for arm in arms)]
    rows: list[list[Cell | str]] = []
    for arm in arms:
        cells = [*_effect_cells(arm.eval), *(_highlight_cell(arm, name, one) for name, one in shown)]
        if any(cell.text != DASH for cell in cells):
            rows.append([arm.name, *cells])
    header = ["arm", *(f"{name} (points)" for name in TITLES.values()), *(one.heading for _, one in shown)]
    of = "of the mean over the tasks, " if _mean_heading(arms) else ""
    notes = [
        f"Help and dependence: {of}with the share of readable replies under the condition; a reply that cannot be read "
        "counts as wrong and is no evidence of use.",
        *(one.note for _, one in shown if one.note),
    ]
    return Table(caption, header, rows, " ".join(notes)) if rows else None


def _highlight_cell(arm: Arm, name: str, highlight: Highlight) -> Cell:
    """A diagnostic's number, or the metric of training that stands in for it."""
    measured = arm.diagnostics.get(name)
    if measured is not None:
        return highlight.cell(measured.summary)
    return last_tenth(arm.train, highlight.metric) if highlight.metric else Cell(DASH)


def _effect_cells(result: Evaluation | None) -> list[Cell]:
    found = effects(means(result.summary)) if result is not None else {}
    return [effect_cell(found.get(name), read=True) for name in TITLES]


def _against(arms: Sequence[Arm], baseline: Arm) -> Table | None:
    """Paired differences from the baseline, from the predictions."""
    first = _with_predictions(baseline)
    if first is None:
        return None
    names, answers = bench_names(arms), list(predictions_of(first.folder))
    rows: list[list[Cell | str]] = []
    for arm in arms:
        second = _with_predictions(arm)
        if arm is baseline or second is None:
            continue
        skipped = rule_missing(first) | rule_missing(second)
        if not (set(first.summary["benches"]) & set(second.summary["benches"])) - skipped:
            continue
        found = compare(
            (row for row in answers if row.bench not in skipped),
            (row for row in predictions_of(second.folder) if row.bench not in skipped),
            first_latents=_trained(first),
            second_latents=_trained(second),
            policy=_policy(first, second),
        )
        cells = [difference_cell(found["benches"].get(name), p=True) for name in names]
        five = found.get("five_task_mean")
        rows.append([arm.name, *cells, *([difference_cell(five)] if _five(arms) else [])])
    note = (
        f"Each arm minus {baseline.name}, over the questions that both answered: differences of the displayed "
        "one-decimal scores, as the paper quotes gains; intervals and p are of the unrounded paired difference. p: "
        "McNemar's exact test, not corrected for the number of comparisons."
    )
    caption = f"Difference from {baseline.name}, percentage points"
    heading = _mean_heading(arms) if _five(arms) else []
    return Table(caption, ["arm", *map(title, names), *heading], rows, note) if rows else None


def _five(arms: Sequence[Arm]) -> bool:
    return any("five_task_mean" in summary for _, summary in evaluated(arms))


def _trained(result: Evaluation) -> int | None:
    return None if is_spread(result.summary) else result.summary["trained_latents"]


def _policy(*results: Evaluation) -> str | None:
    """The policy behind both summaries: they may have been scored again under another one than the predictions."""
    named = {entry["policy"] for result in results for entry in result.summary["benches"].values()}
    return named.pop() if len(named) == 1 and named <= set(known_policies()) else None


def _with_predictions(arm: Arm) -> Evaluation | None:
    return arm.eval if arm.eval is not None and any(arm.eval.folder.glob("predictions*.jsonl")) else None


def further(results: Results) -> Section:
    """Arms outside the headline comparison."""
    section = Section("further", "Ablations and further arms")
    arms = [arm for arm in results.arms if not arm.main]
    scored = [arm for arm in arms if arm.eval]
    if scored:
        section.widgets.append(headline_table(scored, "Benchmark scores of further arms, %"))
    if effects := _effects(arms, "Further arms: what the latents do"):
        section.widgets.append(effects)
    others = [arm for arm in arms if not arm.eval]
    if others:
        names = ", ".join(arm.name for arm in others)
        section.widgets.append(Text(f"Found without an evaluation: {names}. See the training curves."))
    if not arms:
        section.command = "realvr train rl CONFIG --method METHOD; realvr eval RUN/final … --out DIR"
    return section
