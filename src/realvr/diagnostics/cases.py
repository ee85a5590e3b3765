"""Cases to look at: questions with the walk of the latents, both models' answers, and every reply that a reader of the
page can ask for, computed beforehand. The page joins what other diagnostics have measured of the same samples.

The first pairs of every edit are examined, and the first questions of data without pairs: every picture is asked about.
Some of them, chosen by the rule that `choose` is, become cases: the walk over the pictures, for a pair the reply with
the latents of the other picture from step t on, for every t, and for a few of them the reply and the walk when one
latent is put at another cell. `measuring.cases` does it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired

from pydantic import Field, field_validator
from typing_extensions import TypedDict, override

from realvr.diagnostics import results
from realvr.diagnostics.base import Diagnostic
from realvr.diagnostics.counterfactual import AnswerSettings
from realvr.diagnostics.folders import BENCHMARK
from realvr.diagnostics.model import Model
from realvr.diagnostics.numbers import rate
from realvr.diagnostics.pairs import Asked, Single, benchmark_of
from realvr.diagnostics.parts import Highlight, Needs, Samples, Shown
from realvr.errors import UserError
from realvr.latent.steps import parse_steps
from realvr.runs.journal import Record
from realvr.runs.progress import busy
from realvr.runs.records import Text as AnyText
from realvr.widgets import DASH, Cell, Switch, Table, Text, Widget, share
from realvr.widgets.explorer import Case, Explorer, Said

if TYPE_CHECKING:
    from realvr.diagnostics.measuring.cases import Answers

LEAST_FAILURES = 2


class CasesFile(TypedDict):
    """``cases.json``: the cases in the order of the page, and what they were chosen from."""

    rule: AnyText
    """How they were chosen, in words."""
    examined: int
    unread: int
    """Questions whose pictures cannot be read."""
    failures: int
    """Questions that the model, not the second one, did not answer rightly on every picture."""
    shown_failures: int
    """Of these, how many are cases."""
    both_right: list[results.Rate]
    """Share of examined questions with every picture answered rightly: the model, then the second model if there is
    one."""
    cases: list[Case]
    settings: NotRequired[results.Settings]


USUAL_STEPS = "2,4,6"


class CasesSettings(AnswerSettings):
    """How many cases, and what is computed for them."""

    cases: int = Field(default=12, ge=1, description="Cases on the page.")
    examine: int = Field(
        default=24,
        ge=1,
        description="Pairs of each edit (or questions of each task), the first of the data, to choose from.",
    )
    by: str = Field(default="arrows", description="Tag over whose values cases are spread.")
    steered: int = Field(default=3, ge=0, description="How many cases, the first, a reader can steer.")
    at: str = Field(
        default=USUAL_STEPS,
        description="Steps whose latent can be moved, separated by commas; those beyond K are left out. By default "
        "the only one of K = 1.",
    )
    rows: int = Field(
        default=64, ge=1, description="Spans decoded together; each holds a copy of its prompt's keys and values."
    )

    @field_validator("at")
    @classmethod
    def _numbers(cls, value: str) -> str:
        parse_steps(value, "--at")
        return value


@dataclass(frozen=True)
class Candidate:
    """An examined question: its place in the data, what it is, and whether the model failed on it."""

    place: int
    edit: str
    tag: str
    failed: bool
    benchmark: str = ""


def choose(candidates: Sequence[Candidate], count: int) -> list[Candidate]:
    """The rule: at least as many failures as their share of the candidates gives, and at least two where there are as
    many; the others are successes, and come first. Of both, the next is always of the benchmark that was taken least
    often so far, then of the edit taken least often, then of the tag's value taken least often, then of its largest
    value, then the first of the data. Every benchmark has a case, if need be with more cases or other failures."""
    failures = [one for one in candidates if one.failed]
    successes = [one for one in candidates if not one.failed]
    failing, succeeding = ({one.benchmark for one in part} for part in (failures, successes))
    count = min(max(count, len(failing | succeeding)), len(candidates))
    due = max(LEAST_FAILURES, math.ceil(count * len(failures) / max(len(candidates), 1)))
    due = max(min(due, len(failures), count), count - len(successes))
    due = min(max(due, len(failing - succeeding)), count - len(succeeding - failing))
    benchmarks, edits, tags = Counter[str](), Counter[str](), Counter[str]()

    def take(pool: list[Candidate], number: int, elsewhere: set[str]) -> list[Candidate]:
        def key(one: Candidate) -> tuple[Any, ...]:
            seen = benchmarks[one.benchmark]
            # A benchmark that the other pool can serve waits for those that only this one has.
            spread = (seen, seen == 0 and one.benchmark in elsewhere, edits[one.edit], tags[one.tag])
            return (*spread, -_size(one.tag), one.place)

        taken = []
        for _ in range(number):
            best = min(pool, key=key)
            pool.remove(best)
            taken.append(best)
            benchmarks[best.benchmark] += 1
            edits[best.edit] += 1
            tags[best.tag] += 1
        return taken

    return [*take(successes, count - due, failing), *take(failures, due, set())]


def _size(value: str) -> int:
    return int(value) if value.isdecimal() else 0


class Cases(Diagnostic[CasesSettings]):
    """Questions with everything that can be asked of them on a page."""

    name = "cases"
    title = "Cases"
    question = "What do the latents look at, step by step, and does the answer follow them?"
    reading = (
        "Each number on a picture is a latent, on the visual token nearest to it (fainter: a smaller cosine). Look at "
        "the edited picture, swap in its latents from a step on, or move one latent to another cell: answer and walk "
        "are what the model then gives."
    )
    needs = Needs(pairs=True, singles=True, span=True, may_compare=True)
    paper = ""
    Settings = CasesSettings
    shape = CasesFile
    batch = 4
    unit = "pairs or questions"
    examples = (6, 24)  # few on a CPU: the page shows what others have measured of them, and they take few there
    order = 5
    highlights = (
        Highlight(
            "questions of the case browser answered rightly, %",
            lambda summary: share(summary["both_right"][0]) if summary["both_right"] else Cell(DASH),
            "Case browser: examined questions with every picture answered rightly.",
            overview=False,
        ),
    )
    opens = True

    def select(self, items: Sequence[Asked], data: Path) -> list[Asked]:
        """The first of every benchmark and edit; pairs that show one picture each."""
        usable = [one for one in items if isinstance(one, Single) or all(len(view.shown) == 1 for view in one.views)]
        if not usable:
            raise UserError(f"{data}: none of its {len(items)} pairs shows one picture at a time, which cases need")
        seen: Counter[tuple[str, str]] = Counter()
        cycles: dict[str, str | None] = {}
        kept = []
        for one in usable:
            kind = benchmark_of(one), one.edit
            if one.original.cycle != cycles.setdefault(kind[0], one.original.cycle):
                continue  # the same question with its options in another order (HR-Bench)
            seen[kind] += 1
            if seen[kind] <= self.settings.examine:
                kept.append(one)
        return kept

    @override
    def settle(self, model: Model) -> None:
        self._steps = [step for step in parse_steps(self.settings.at, "--at") if step <= model.latents]
        if not self._steps and self.settings.at == USUAL_STEPS:  # K = 1: nobody asked for later ones
            self._steps = [1]
        if self.settings.steered and not self._steps:
            raise UserError(
                f"--at is {self.settings.at}, but the span has K = {model.latents} latents: name smaller steps, "
                "or choose --steered 0"
            )

    def prepare(self, model: Model, samples: Sequence[Asked]) -> None:
        """Ask about all pictures and choose."""
        from realvr.diagnostics.measuring.cases import examine

        with busy(f"asking about {len(samples)} {self.unit}"):
            self._answers: dict[str, Answers] = examine(model, samples, self.settings.policy, self.settings.rows)
        candidates = [
            Candidate(place, pair.edit, self._tag(pair), self._answers[pair.id].failed, benchmark_of(pair))
            for place, pair in enumerate(samples)
            if self._answers[pair.id].error is None
        ]
        chosen = choose(candidates, self.settings.cases)
        self._places = {samples[one.place].id: place for place, one in enumerate(chosen)}

    def _tag(self, pair: Asked) -> str:
        found = pair.original.tags.get(self.settings.by, "")
        return found or (pair.original.category or pair.original.task if isinstance(pair, Single) else "")

    @override
    def measure(self, model: Model, samples: Samples) -> Iterable[Record]:
        from realvr.diagnostics.measuring.cases import build_cases

        chosen = [pair for pair in samples if pair.id in self._places]
        asked = [(pair, self._answers[pair.id], self._about(pair), self._steps_of(pair)) for pair in chosen]
        built = build_cases(model, asked, self.settings.policy, self.settings.rows)
        cases = dict(zip((pair.id for pair in chosen), built, strict=True))
        for pair in samples:
            answers = self._answers[pair.id]
            yield {
                "pair": pair.id,
                "edit": pair.edit,
                "tag": self._tag(pair),
                "failed": answers.failed,
                "replies": [list(one) for one in answers.replies],
                "place": self._places.get(pair.id),
                "case": cases.get(pair.id),
                "error": answers.error,
            }

    def _about(self, pair: Asked) -> str:
        value = self._tag(pair)
        name = self.settings.by if value != "1" or not self.settings.by.endswith("s") else self.settings.by[:-1]
        own = f"{value} {name}" if value.isdecimal() else value
        words = [pair.original.tags.get(BENCHMARK, ""), own, pair.edit.replace("_", " ")]
        return ", ".join(word for word in words if word)

    def _steps_of(self, pair: Asked) -> list[int]:
        return self._steps if self._places[pair.id] < self.settings.steered else []

    # ------------------------------------------------------------------ what is shown

    @override
    def summarise(self, records: Sequence[Record]) -> dict[str, Any]:
        read = [record for record in records if record.get("error") is None]
        shown = sorted((record for record in read if record["case"] is not None), key=lambda one: one["place"])
        failures = sum(record["failed"] for record in read)
        models = max((len(record["replies"]) for record in read), default=1)
        return {
            "rule": self._rule(len(read), failures, shown),
            "examined": len(read),
            "unread": len(records) - len(read),
            "failures": failures,
            "shown_failures": sum(record["failed"] for record in shown),
            "both_right": [
                rate(sum(both_right(record["replies"][number]) for record in read), len(read))
                for number in range(models)
            ],
            "cases": [record["case"] for record in shown],
        }

    def _rule(self, count: int, failures: int, shown: Sequence[Record]) -> str:
        failed = sum(record["failed"] for record in shown)
        tasks = list(dict.fromkeys(record["case"].get("task", "") for record in shown))
        single = [record for record in shown if len(record["case"]["views"]) == 1]
        several = f" of each of the benchmarks {', '.join(tasks)}" if len(tasks) > 1 else ""
        what = "questions" if single and len(single) == len(shown) else "pairs of each edit"
        what = "pairs of each edit and the first questions without a pair" if 0 < len(single) < len(shown) else what
        first = " of the benchmark shown least so far, then" if len(tasks) > 1 else ""
        return (
            f"How these cases were chosen: the first {self.settings.examine} {what}{several} were examined, {count} "
            f"in all; the model answered a picture wrongly in {failures} of them. {len(shown)} are shown, {failed} of "
            "them failures: at least their share of what was examined, and two if there are as many. The next "
            f"case is always{first} of the edit shown least so far, then of the value of '{self.settings.by}' shown "
            "least, the largest first, then the first in the data. Failures stand last."
            + (" Every benchmark has at least one case." if len(tasks) > 1 else "")
        )

    @override
    def draw(self, results: Sequence[Shown]) -> list[Widget]:
        explorers = [self._explorer(result, place) for place, result in enumerate(results)]
        panels: list[Widget] = (
            [
                Switch(
                    "Model",
                    [
                        (f"{self.name}-of-{place}", result.name, [explorer, Text(result.summary["rule"])])
                        for place, (result, explorer) in enumerate(zip(results, explorers, strict=True))
                    ],
                )
            ]
            if len(results) > 1
            else [widget for explorer in explorers for widget in (explorer, Text(results[0].summary["rule"]))]
        )
        rows: list[list[Cell | str]] = []
        for result in results:
            found = result.summary
            for place, (name, right) in enumerate(zip(_names(result), found["both_right"], strict=True)):
                counts = (found["examined"], len(found["cases"]), _failures(found["cases"], place))
                rows.append([name, share(right), *(Cell(str(count), value=count) for count in counts)])
        header = ["model", "every picture right, %", "examined", "cases", "failures among them"]
        return [*panels, Table("What the cases were chosen from", header, rows)]

    def _explorer(self, result: Shown, place: int) -> Explorer:
        cases = result.summary["cases"]
        measured = [] if result.panels is None else result.panels(self.case_ids(result.summary))
        return Explorer(f"{self.name}-{place}", f"{self.title}: {result.name}", _names(result), cases, measured)

    @override
    def case_ids(self, summary: Mapping[str, Any]) -> frozenset[str]:
        return case_ids(summary)


def case_ids(summary: Mapping[str, Any]) -> frozenset[str]:
    """Ids of the samples and pairs behind the cases of ``cases.json``: those for which others record detail."""
    return frozenset(name for case in summary["cases"] for name in (case["id"], *case.get("ids", ())))


def both_right(replies: Sequence[Said]) -> bool:
    """Whether every picture of a question was answered rightly."""
    return all(one["verdict"] == "right" for one in replies)


def _failures(cases: Sequence[Case], place: int) -> int:
    """Cases of which the model at this place among the replies did not answer every picture rightly."""
    return sum(not both_right([view["replies"][place] for view in case["views"]]) for case in cases)


def _names(result: Shown) -> list[str]:
    """What the page calls the models: as the report does, or by what the run recorded of them."""
    settings = result.summary.get("settings") or {}
    first = result.name if result.name != Cases.name else _called(settings.get("model"), result.name)
    second = settings.get("second_model") or {}
    other = result.models.get(str(second.get("weights"))) or _called(second, "second model")
    names = [first, other][: len(result.summary["both_right"])]
    return names if len(set(names)) == len(names) else [first, f"{names[1]} (second)"]


def _called(model: Mapping[str, Any] | None, otherwise: str) -> str:
    """A model by its name, or by the name of its run where it is the ``final`` or ``best`` one there."""
    name, path = str((model or {}).get("name") or otherwise), Path(str((model or {}).get("path") or ""))
    return path.parent.name if name in ("final", "best") and path.parent.name else name
