"""Named splits, the layouts they own, and recipes: everything that decides the bytes of one."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import dataclass, field

from realvr.errors import UserError
from realvr.world import benchmarks
from realvr.world.edits import CHANGED_SHARE, PAIRS_PER_EDIT
from realvr.world.questions import FULL_KINDS, Withheld
from realvr.world.sampling import Style, clutter, huge, style_for
from realvr.world.trails import pairs
from realvr.world.trails import splits as trails
from realvr.world.trails.plan import Plan

Unit = tuple[str, int]
"""A part of a split (a BLINK subtask, an edit; mostly '') and a number within it."""


@dataclass(frozen=True)
class Split:
    """``layout`` is the real file format it is written in; ``count`` the usual number of units; ``size`` of the canvas.

    A unit is a question, a pair (MMVP; counterfactual: a pair of each edit) or a question in four cycles (HR-Bench).
    """

    number: int
    buckets: Collection[int]
    layout: str
    count: int
    size: tuple[int, int]
    about: str


SPLITS: dict[str, Split] = {
    "curriculum": Split(0, range(6), "jsonl", 20_000, (48, 48), "easy scenes, no withheld words in questions"),
    "curriculum-test": Split(1, range(6, 8), "jsonl", 2_000, (48, 48), "easy scenes, any words (tag `withheld`)"),
    "dialogues": Split(2, range(8, 10), "lvr", 5_000, (48, 48), "two-turn conversations about one picture"),
    "train-boxes": Split(3, range(10, 14), "visual-cot", 10_000, (128, 128), "training questions with evidence boxes"),
    "train-plain": Split(4, range(14, 15), "virl39k", 10_000, (128, 128), "training questions without boxes"),
    "validation": Split(5, range(18, 20), "jsonl", 1_000, (128, 128), "held-out questions with boxes"),
    "mmvp": Split(6, range(20, 23), "mmvp", 150, (128, 128), "pairs that differ in one subtle detail"),
    "blink": Split(7, range(23, 25), "blink", 697, (128, 128), "five BLINK subtasks"),
    "hrbench-4k": Split(8, range(25, 26), "hr-bench", 200, (3840, 2160), "tiny objects in 4K, four option cycles"),
    "hrbench-8k": Split(9, range(26, 27), "hr-bench", 200, (7680, 4320), "tiny objects in 8K, four option cycles"),
    "mme-realworld": Split(10, range(27, 28), "mme-realworld", 500, (640, 480), "clutter, five options, E: not there"),
    "counterfactual": Split(11, range(28, 32), "jsonl", PAIRS_PER_EDIT, (128, 128), "four edits, question fixed"),
    "sequels": Split(12, range(17, 18), "jsonl", 5_000, (48, 48), "two turns, the second about another picture"),
    "practice": Split(13, range(16, 17), "jsonl", 8_000, (48, 48), "training questions in the five benchmarks' manner"),
    "vstar": Split(14, range(15, 16), "vstar", 191, (2240, 1584), "small objects in a large picture, two categories"),
    # Boards have buckets of their own (`realvr.world.trails.board.BUCKETS`): they are no scenes of the splits above.
    "trails-train": Split(15, (*range(16), *range(32, 48)), "jsonl", 20_000, (48, 48), "follow the arrows: training"),
    "trails-lessons": Split(16, (*range(16, 24), *range(48, 56)), "jsonl", 20_000, (48, 48), "single looks at boards"),
    "trails": Split(17, (*range(24, 28), *range(56, 60)), "jsonl", 2_000, (48, 48), "follow the arrows: held out"),
    "trails-pairs": Split(18, (28, 29, 60, 61), "jsonl", pairs.PAIRS_PER_EDIT, (48, 48), "four edits of boards"),
    "trails-sequels": Split(19, (31, 63), "jsonl", 5_000, (48, 48), "two turns, the second about another board"),
}


ANY_KIND = ("curriculum", "curriculum-test", "dialogues", "sequels", "train-boxes", "train-plain", "validation")
"""Splits whose kinds of question, and rule for withheld words, can be chosen."""


TRAILS_WITHIN = {"train-boxes": (30,), "train-plain": (62,)}
"""Splits of scenes that hold trails too where kind ``trails`` is asked for, and the buckets of boards they own."""


PRACTICE_SIDE = 499
"""Longest side of practice: its HR-Bench pictures must stay below 2,000 pixels to be of the small kind."""


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a split's bytes."""

    split: str
    seed: int = 0
    count: int | None = None
    size: tuple[int, int] | None = None
    kinds: tuple[str, ...] = ()
    """Kinds of question, where a split lets one choose; empty: the usual ones."""
    withheld: Withheld | None = None
    """None: excluded from the curriculum, dialogues, sequels and practice, allowed elsewhere."""
    resize: benchmarks.Resize = field(default_factory=benchmarks.Resize)
    trail: Plan = field(default_factory=Plan)
    """Boards of the splits of trails."""

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise UserError(f"no split {self.split!r}; there are {', '.join(SPLITS)}")
        if self.count is not None and self.count < 1:
            raise UserError(f"count is {self.count}; at least 1 is needed")
        if self.seed < 0:
            raise UserError(f"seed is {self.seed}; it must not be negative")
        self._check_kinds()
        self._check_trail()
        if self.withheld and self.split not in (*ANY_KIND, "practice", *trails.KINDS):
            raise UserError(
                f"split {self.split} uses any words; withheld can be chosen for {', '.join((*ANY_KIND, 'practice'))}"
            )
        if self.withheld == "only" and self.split == "practice":
            raise UserError("split practice has puzzles, which refer to nothing by a word: withheld is any or exclude")
        style_for(*self.canvas)
        if self.split == "practice" and max(self.canvas) > PRACTICE_SIDE:
            raise UserError(
                f"split practice, canvas {self.canvas[0]}x{self.canvas[1]}: sides up to {PRACTICE_SIDE} pixels, since "
                "its HR-Bench pictures have sides four times as long"
            )
        if self.split == "practice" and self.resize != benchmarks.Resize():
            raise UserError("split practice knows what a model sees from its size; resize is for hrbench only")

    def _check_kinds(self) -> None:
        mixed = ("trails",) if self.split in TRAILS_WITHIN else ()
        known = trails.KINDS.get(self.split, FULL_KINDS + mixed)
        unknown = [kind for kind in self.kinds if kind not in known]
        if unknown:
            of = f" in split {self.split}" if self.of_trails else ""
            raise UserError(f"no kind of question {unknown[0]!r}{of}; there are {', '.join(known)}")
        if self.kinds and self.split not in (*ANY_KIND, "counterfactual") and not self.of_trails:
            raise UserError(
                f"split {self.split} has questions of its own; kinds can be chosen for {', '.join(ANY_KIND)}"
            )

    def _check_trail(self) -> None:
        if self.of_trails or "trails" in self.kinds:
            self.trail.fit(self.canvas)
            if self.withheld == "only":
                raise UserError("no question about a trail refers to something by a withheld word: withheld is any")
        elif self.trail != Plan():
            raise UserError(
                f"split {self.split} has no trails; choose one of {', '.join(trails.KINDS)}, or kind trails of "
                f"{' and '.join(TRAILS_WITHIN)}"
            )

    @property
    def of_trails(self) -> bool:
        """Whether the split holds boards of arrows instead of scenes."""
        return self.split in trails.KINDS

    @property
    def info(self) -> Split:
        """The split that is drawn."""
        return SPLITS[self.split]

    @property
    def canvas(self) -> tuple[int, int]:
        """Width and height of the pictures."""
        return self.size or self.info.size

    @property
    def words(self) -> Withheld:
        """The rule for withheld words in force."""
        return self.withheld or (
            "exclude" if self.split in ("curriculum", "dialogues", "sequels", "practice") else "any"
        )

    def style(self) -> Style:
        """Look of the scenes."""
        if self.split.startswith("hrbench") or self.split == "vstar":
            return huge(*self.canvas)
        if self.split == "mme-realworld":
            return clutter(*self.canvas)
        return benchmarks.world_style(*self.canvas)

    def units(self) -> list[Unit]:
        """What the split is made of, in order."""
        count = self.count or self.info.count
        if self.split == "counterfactual":
            return [(edit, k) for edit in CHANGED_SHARE for k in range(count)]
        if self.split == "trails-pairs":
            return [(edit, k) for edit in pairs.EDITS for k in range(count)]
        if self.split == "blink":
            rows = benchmarks.BLINK_TASKS
            total = sum(rows.values())
            ends = [round(count * end / total) for end in itertools.accumulate(rows.values())]
            sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
            return [(task, k) for task, size in zip(rows, sizes, strict=True) for k in range(size)]
        return [("", k) for k in range(count)]
