"""Questions with one provably right answer, their options and the objects that support the answer."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from realvr.errors import UserError
from realvr.world.phrasing import phrase
from realvr.world.proposals import PROPOSERS, values
from realvr.world.queries import SAME, SIDES, Query, evaluate
from realvr.world.sampling import ANY_BUCKET, Style, pick, sample_scene
from realvr.world.scene import PixelBox, Scene
from realvr.world.words import REGIONS, plural

LETTERS = "ABCDEFGH"
EASY_KINDS: tuple[str, ...] = ("color", "shape", "at_color", "at_shape", "position")
"""The five templates of the curriculum."""
EASY_EXTRA_KINDS: tuple[str, ...] = (
    "exist",
    "count",
    "relation_x",
    "relation_y",
    "holds",
    "extreme_color",
    "extreme_shape",
)
"""Further kinds that easy scenes can answer, for who wants them in the mixture."""
FULL_KINDS: tuple[str, ...] = (
    "color",
    "shape",
    "texture",
    "size",
    "direction",
    "count",
    "exist",
    "position",
    "at_color",
    "at_shape",
    "relation_x",
    "relation_y",
    "holds",
    "front",
    "bigger",
    "more",
    "extreme_color",
    "extreme_shape",
)
CLUTTER_KINDS: tuple[str, ...] = (
    "color",
    "shape",
    "texture",
    "direction",
    "count",
    "exist",
    "relation_x",
    "relation_y",
)
"""Kinds that still have a clear answer among dozens of objects."""

Withheld = Literal["any", "exclude", "only"]
"""Which questions a split may hold, by whether they refer to something by a withheld word."""

MAX_TRIES = 5000


@dataclass(frozen=True)
class Question:
    """``answer`` is in words; ``choices`` is empty for a short free answer."""

    query: Query
    text: str
    answer: str
    evidence: tuple[int, ...]
    """Indices of the supporting objects of the scene."""
    choices: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """Name of its kind."""
        return self.query.kind

    @property
    def letter(self) -> str:
        """Letter of the right option, or '' for a free answer."""
        return LETTERS[self.choices.index(self.answer)] if self.choices else ""

    def boxes(self, scene: Scene) -> list[PixelBox]:
        """Evidence boxes in pixels, one a supporting object."""
        return [scene.objects[k].box for k in self.evidence]

    def asked_of(self, scene: Scene) -> Question | None:
        """The same words and options put to another scene; None where that is not well posed there."""
        outcome = evaluate(self.query, scene)
        if outcome is None or (self.choices and outcome.answer not in self.choices):
            return None
        return replace(self, answer=outcome.answer, evidence=outcome.evidence)


def _mixed(every: tuple[str, ...], answer: str, there: list[str], scene: Scene, rng: np.random.Generator) -> list[str]:
    """Wrong values in random order, behind what tempts because the picture shows it.

    That is everything shown where all values are equally common (easy scenes), else one of them: wanted answers are
    uniform, so a rare value that is hardly ever offered but as the answer would be a safe guess.
    """
    wrong = [every[k] for k in rng.permutation(len(every)) if every[k] != answer]
    tempting = [value for value in wrong if value in there][: None if scene.vocabulary == "easy" else 1]
    return tempting + [value for value in wrong if value not in tempting]


def _pool(query: Query, answer: str, scene: Scene, rng: np.random.Generator, count: int) -> list[str]:
    """Wrong answers, the most tempting first."""
    attribute = query.kind.removeprefix("at_").removeprefix("extreme_")
    if attribute in ("color", "shape", "direction", "texture", "size"):
        return _mixed(
            values(attribute, scene), answer, [getattr(item, attribute) for item in scene.objects], scene, rng
        )
    if query.kind == "count":
        # Counts of 1 to 4 (3 to 5 on a small grid) are equally likely: the same options for all of them tell nothing.
        low = 2 if scene.grid == (3, 3) else 1
        low = low if low <= int(answer) < low + count else max(0, int(answer) - count + 1)
        return [str(n) for n in range(low, low + count) if str(n) != answer]
    if query.kind == "position":
        return _mixed(REGIONS, answer, [scene.region(item) for item in scene.objects], scene, rng)
    whole = {
        "exist": ("yes", "no"),
        "holds": ("yes", "no"),
        "relation_x": SIDES[:2],
        "relation_y": SIDES[2:],
        "front": (f"the {query.a}", f"the {query.b}"),
        "bigger": (f"the {query.a}", f"the {query.b}"),
        "more": (plural(str(query.a)), plural(str(query.b)), SAME),
    }[query.kind]
    return [value for value in whole if value != answer]


def options(query: Query, answer: str, scene: Scene, rng: np.random.Generator, count: int = 4) -> tuple[str, ...]:
    """The right answer among up to ``count - 1`` wrong ones, in random order."""
    shown = [answer, *_pool(query, answer, scene, rng, count)[: count - 1]]
    return tuple(shown[k] for k in rng.permutation(len(shown)))


def compose(query: Query, scene: Scene, rng: np.random.Generator, count: int = 4) -> Question | None:
    """Wording, answer and ``count`` options (0: a free answer) for a query."""
    outcome = evaluate(query, scene)
    if outcome is None:
        return None
    text = phrase(query, int(rng.integers(12)))
    choices = options(query, outcome.answer, scene, rng, count) if count else ()
    return Question(query, text, outcome.answer, outcome.evidence, choices)


def ask(
    scene: Scene,
    kind: str,
    rng: np.random.Generator,
    u: float | None = None,
    *,
    count: int = 4,
    withheld: Withheld = "any",
) -> Question | None:
    """A question of one kind about this scene, aimed at the answer ``u`` stands for; None where it offers none."""
    query = PROPOSERS[kind](scene, rng, rng.random() if u is None else u)
    if query is None or (withheld != "any" and query.withheld() != (withheld == "only")):
        return None
    return compose(query, scene, rng, count)


def sample_question(
    rng: np.random.Generator,
    style: Style,
    kinds: tuple[str, ...],
    *,
    buckets: Container[int] = ANY_BUCKET,
    count: int = 4,
    withheld: Withheld = "any",
) -> tuple[Scene, Question]:
    """A scene and a question about it: kind and wanted answer are fixed first, then scenes tried until one serves."""
    kind, u = pick(rng, kinds), rng.random()
    for _ in range(MAX_TRIES):
        scene = sample_scene(rng, style, buckets)
        question = ask(scene, kind, rng, u, count=count, withheld=withheld)
        if question is not None:
            return scene, question
    raise UserError(f"{style.name} scenes answer no question of kind {kind!r} (withheld words: {withheld})")
