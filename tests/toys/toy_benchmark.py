"""A benchmark from outside the package, all in this file: facts, reader, prompt, policy, scoring rule, published row.

Its files: ``shades.txt`` beside pictures, a question a line: ``id; picture; question; option/option/…; answer; group``.
Questions of one group count as one, right only where all of them are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from realvr.data.readers.base import Context, Format, ReadOptions, Row, checked_choices, letter_answer
from realvr.data.reasons import BadRow
from realvr.data.sample import LETTERS, Message, Sample
from realvr.evaluation.benchmark import Benchmark, Facts
from realvr.evaluation.records import Prediction
from realvr.evaluation.rules import Rule, percent, shares, split


def rows(path: Path, options: ReadOptions) -> Iterator[Row]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        yield Row(number, line)


def parse(line: str, ctx: Context) -> Sample:
    cells = [cell.strip() for cell in line.split(";")]
    if len(cells) != 6:
        raise BadRow("field_missing", f"{len(cells)} cells, 6 are expected")
    name, picture, question, options, answer, group = cells
    choices = checked_choices(options.split("/"))
    if ctx.options.variant == "turned":
        choices.reverse()
    right = letter_answer(answer, choices)
    return Sample.ask(
        name, [ctx.image(picture)], question, right, choices=choices, category=group, source=ctx.source, pair=group
    )


def by_length(text: str, choices: Sequence[str]) -> str | None:
    """A silly policy that can be checked by hand: the length of the reply picks the option. Blank: unreadable."""
    return LETTERS[len(text) % len(choices)] if text.strip() else None


def details(predictions: Sequence[Prediction]) -> dict[str, Any]:
    return {"single": percent(predictions), "groups": shares(split(predictions, lambda row: row.category))}


class Shades(Benchmark):
    """Dark or light?"""

    name = "toy"
    title = "Toy Shades"
    reader = Format("toy", "Toy Shades text", rows, parse)
    policies = {"toy-length": by_length}
    policy = "toy-length"
    rule = Rule(
        "groups right",
        details,
        group=lambda row: row.category,
        headline="share of groups with every answer right",
        beside="`single`, `groups`",
        draws="groups",
    )
    variants = {"turned": "reads the options in reverse"}
    published = {"Guess@Toy-1B": (25.0, 1.5)}
    facts = Facts(
        layout=("shades.txt beside its pictures",),
        rows=6,
        where="written by tests",
        licence="none",
        scored_by="groups of questions with every answer right",
        citation="@misc{toy, title = {Toy Shades}}",
        files=("shades*.txt",),
    )

    @classmethod
    def prompt(cls, sample: Sample) -> list[Message]:
        return [Message("user", f"{sample.question} Say {' or '.join(sample.choices)}.", (0,))]
