"""What a benchmark is: facts, reader, prompt, extraction policy, scoring rule, published numbers, the world's stand-in.

One file of `realvr.evaluation.tasks` holds one benchmark, or several that share their files' layout. Command line,
tables, report, demo and documentation take their lists from `BENCHMARKS`; a file of the user joins with ``--plugin``.
Nothing here imports torch, and nothing is downloaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import override

from realvr.answers import POLICIES, Parser, parser
from realvr.data.readers.base import Format, ReadOptions
from realvr.data.sample import LETTERS, Message, Sample
from realvr.data.wording import asked_turns
from realvr.errors import UserError
from realvr.evaluation.rules import PLAIN, Rule
from realvr.registry import Registry

Policy = Callable[[str, Sequence[str]], str | None]
"""(text, options) -> the letter of an option, or the answer itself where there are no options; None: unreadable."""
Value = tuple[float, float | None]
"""A published mean and its standard deviation, where there is one."""
MINI = "mini-"
"""Before the name of a benchmark: its stand-in, drawn by the embedded world."""
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")


@dataclass(frozen=True)
class Facts:
    """What a user should know before a number means something."""

    layout: tuple[str, ...]
    """Files as they are published, for a person to compare with."""
    rows: int
    """Questions in the whole set that is evaluated by default."""
    where: str
    """Where the files come from (hub id, …)."""
    licence: str
    scored_by: str
    """How it is scored, in a sentence."""
    citation: str
    """BibTeX."""
    files: tuple[str, ...] = ()
    """Patterns, without case, of the data file inside a folder; empty where the folder itself is the input."""
    without: str = ""
    """Pattern of files that belong to a sister benchmark."""
    task_rows: Mapping[str, int] | None = None
    """Questions of every subtask of the files, where the published number is over some of them."""
    tasks: tuple[str, ...] = ()
    """Subtasks evaluated by default; empty means all there are."""
    caveats: tuple[str, ...] = ()


class Benchmark:
    """Base class of all benchmarks. A subclass is never made an object of: everything is a fact of the class.

    ``name`` (small letters, digits, '.', '_' and '-'), ``title``, ``facts``, ``reader`` and ``rule`` are required.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    facts: ClassVar[Facts]
    reader: ClassVar[Format]
    """How its files become samples: one of `realvr.data.readers`, or one of its own."""
    rule: ClassVar[Rule]
    order: ClassVar[int] = 1000
    """Place in lists and tables: smaller numbers first, then by name."""
    policy: ClassVar[str] = "strict"
    """Extraction policy unless ``--policy`` names another."""
    official_policy: ClassVar[str] = ""
    """The policy of the benchmark's own harness, where there is one."""
    policies: ClassVar[Mapping[str, Policy]] = {}
    """Extraction policies of its own, by name, beside those of `realvr.answers`."""
    slot: ClassVar[str] = ""
    """The column of the paper's five-task mean that this set can fill; of several sets the first in order counts."""
    column: ClassVar[str] = ""
    """The column of the paper's result tables that was measured on exactly this set."""
    published: ClassVar[Mapping[str, Value]] = {}
    """Further published numbers on this set, by ``METHOD@BACKBONE``."""
    stand_in: ClassVar[str] = ""
    """The split of the embedded world that stands in for it, in its layout."""
    variants: ClassVar[Mapping[str, str]] = {}
    """Other ways to read the same files (``--variant NAME=VARIANT``, `ReadOptions.variant`), with what they do."""
    flags: ClassVar[Mapping[str, str]] = {}
    """Short flags of ``realvr eval``: flag -> what it stands for, with {} for its value ('' drops it)."""

    @classmethod
    def prompt(cls, sample: Sample) -> Sequence[Message]:
        """The conversation as a model reads it; by default in the words of training (`realvr.data.wording`)."""
        return asked_turns(sample)

    @classmethod
    def parser(cls, policy: str) -> Parser:
        """What reads replies under ``policy``: a parser of `realvr.answers`, or one of the benchmark's own."""
        if policy not in cls.policies:
            return parser(policy, "evaluation")
        own = cls.policies[policy]

        def read(text: str, choices: Sequence[str]) -> str | None:
            answer = own(text, choices)
            return answer if not choices or answer in tuple(LETTERS[: len(choices)]) else None

        return Parser(f"{cls.name}:{policy}", "evaluation", 1, (own.__doc__ or "").partition("\n")[0], read)

    @classmethod
    def policy_or(cls, asked: str | None) -> str:
        """The policy in force: the one asked for, which this benchmark must know, or its own."""
        if asked is None:
            return cls.policy
        if asked not in POLICIES and asked not in cls.policies:
            there = ", ".join((*POLICIES, *cls.policies))
            raise UserError(f"'{asked}' is not an extraction policy{_of(cls)}; there are {there}")
        return asked

    @classmethod
    def subtasks(cls, text: str) -> tuple[str, ...]:
        """Subtasks from ``paper`` (those evaluated by default), ``all``, or names with commas between them."""
        known = cls.facts.task_rows
        if text == "paper" and cls.facts.tasks:
            return cls.facts.tasks
        if text == "all" and known is not None:
            return tuple(known)
        if text in ("paper", "all") and known is None:
            raise UserError(f"--tasks {cls.name}={text}: {cls.name} is evaluated whole; leave --tasks {cls.name} out")
        wanted = [part.strip() for part in text.split(",") if part.strip()]
        if known is None and wanted:
            return tuple(dict.fromkeys(wanted))
        folded = {name.lower(): name for name in known or ()}
        unknown = [part for part in wanted if part.lower().replace(" ", "_") not in folded]
        if unknown or not wanted:
            raise UserError(
                f"--tasks {cls.name}: no subtask {unknown[0] if unknown else text!r}; write paper, all, or names out "
                f"of {', '.join(folded.values())}"
            )
        return tuple(dict.fromkeys(folded[part.lower().replace(" ", "_")] for part in wanted))

    @classmethod
    def read_options(cls, options: ReadOptions, variant: str | None) -> ReadOptions:
        """``options`` for a variant of this benchmark."""
        if variant is None:
            return options
        if variant not in cls.variants:
            there = ", ".join(cls.variants) or "none"
            raise UserError(f"--variant: there is no variant '{variant}'{_of(cls)}; there are {there}")
        return replace(options, variant=variant)

    @classmethod
    def stratum(cls, sample: Sample) -> tuple[Hashable, ...]:
        """Questions of one kind: ``--limit`` takes some of every stratum."""
        return (sample.task, sample.category, sample.tags.get("subtask", ""))

    @classmethod
    def stand_in_path(cls, folder: str | Path) -> Path:
        """Where ``realvr world make`` puts the stand-in inside the folder of its split."""
        from realvr.world.making import layout_path

        return layout_path(cls.stand_in, Path(folder))

    @classmethod
    def expectation(cls) -> str:
        """What should be at the path, in words."""
        return f"{cls.title} is expected as {' or '.join(cls.facts.layout)} ({cls.facts.where})"

    @classmethod
    def describe(cls) -> dict[str, Any]:
        """Everything there is to know, JSON-compatible."""
        facts = cls.facts
        return {
            "name": cls.name,
            "title": cls.title,
            "format": cls.reader.name,
            "layout": list(facts.layout),
            "rows": facts.rows,
            "where": facts.where,
            "licence": facts.licence,
            "rule": facts.scored_by,
            "metric": cls.rule.metric,
            "policy": cls.policy,
            "official_policy": cls.official_policy,
            "in_the_mean": bool(cls.slot),
            "stand_in": MINI + cls.stand_in if cls.stand_in else "",
            "citation": facts.citation,
            "files": list(facts.files),
            "without": facts.without,
            "tasks": list(facts.tasks),
            "variants": dict(cls.variants),
            "caveats": list(facts.caveats),
            "example": eval_command([cls.name], f"runs/{cls.name}"),
        }


class AnyFile(Benchmark):
    """A question file that is no registered benchmark, under a name of the user's."""

    name = ""
    rule = PLAIN

    @classmethod
    @override
    def subtasks(cls, text: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def _of(bench: type[Benchmark]) -> str:
    return f" of {bench.name}" if bench.name else ""


def _complaint(bench: type[Benchmark]) -> str:
    """What is wrong with a benchmark, or ''."""
    kinds = {"title": str, "facts": Facts, "reader": Format, "rule": Rule}
    for name, kind in kinds.items():
        if not isinstance(getattr(bench, name), kind):
            return f"{name} is a {type(getattr(bench, name)).__name__}, {kind.__name__} is expected"
    if not _NAME.fullmatch(bench.name) or bench.name.startswith(MINI):
        return f"its name {bench.name!r} must be of small letters, digits, '.', '_' and '-', and not begin with {MINI}"
    if bench.policy not in POLICIES and bench.policy not in bench.policies:
        return f"its policy '{bench.policy}' is none of {', '.join((*POLICIES, *bench.policies))}"
    if taken := [name for name in bench.policies if name in POLICIES]:
        return f"its policy '{taken[0]}' has the name of one of realvr's"
    return ""


BENCHMARKS: Registry[Benchmark] = Registry(
    "benchmark",
    Benchmark,
    "realvr.evaluation.tasks",
    required=("title", "facts", "reader", "rule"),
    check=_complaint,
)
"""All benchmarks: those of this package and those of ``--plugin`` files."""


def base_name(name: str) -> str:
    """The benchmark whose files and scoring rule a name has: NAME for NAME and mini-NAME. Other names stay."""
    base = name.removeprefix(MINI)
    return base if base in BENCHMARKS else name


def benchmark_of(name: str) -> type[Benchmark]:
    """The benchmark of a name or of its stand-in; `AnyFile` for any other name."""
    base = base_name(name)
    return BENCHMARKS.get(base) if base in BENCHMARKS else AnyFile


def title(name: str) -> str:
    """What a benchmark is called in tables."""
    return BENCHMARKS.get(name).title if name in BENCHMARKS else name


def known_policies() -> tuple[str, ...]:
    """Names of all extraction policies: those of realvr, then those that benchmarks bring."""
    own = [name for bench in BENCHMARKS for name in bench.policies]
    return (*POLICIES, *dict.fromkeys(own))


def eval_command(names: Sequence[str] | None = None, out: str = "DIR") -> str:
    """A command line that evaluates these benchmarks, by default the first two."""
    chosen = BENCHMARKS.names()[:2] if names is None else names
    return f"realvr eval MODEL {' '.join(f'--bench {name}=PATH' for name in chosen)} --out {out}"


def variant_notes(chosen: Mapping[str, str]) -> dict[str, bool]:
    """What the record of a run says about variants; those of outside benchmarks only where they were chosen."""
    return {
        f"{bench.name}_{variant}".replace("-", "_"): chosen.get(bench.name) == variant
        for bench in BENCHMARKS
        for variant in bench.variants
        if chosen.get(bench.name) == variant or bench.__module__.startswith(BENCHMARKS.package)
    }


def data_path(bench: type[Benchmark], path: Path) -> Path:
    """The data file of a benchmark, given itself or by its folder; a `UserError` says what is expected where."""
    facts = bench.facts
    if not path.exists():
        raise UserError(f"{bench.name}: {path} does not exist; {bench.expectation()}")
    if not path.is_dir() or not facts.files:
        return path
    matching = [
        file
        for file in sorted(path.iterdir())
        if any(fnmatch(file.name.lower(), pattern) for pattern in facts.files)
        and not (facts.without and fnmatch(file.name.lower(), facts.without))
    ]
    if not matching:
        raise UserError(f"{bench.name}: {path} holds no such file; {bench.expectation()}")
    if len(matching) > 1:
        names = ", ".join(file.name for file in matching)
        raise UserError(f"{bench.name}: {path} holds several files that may be meant ({names}); name one of them")
    return matching[0]
