"""One verdict per model: are its latents grounded, and are they used? No torch.

    grounded and used      the latents hold the evidence, and the answer changes with them
    grounded but unused    they hold the evidence, and the answer does not care
    used but ungrounded    the answer changes with them, but they are not at the evidence
    unused                 neither

Two numbers of two other diagnostics decide it, each against a threshold that was written down before any model was
measured:

* **Used** (`controls`): the share of answers that change when the span is filled with another sample's latents, of the
  questions whose answers can be read both times. Another sample's latents are inputs of the kind that the model knows;
  noise, dummies and removed slots are not, so that a broken reply to them proves nothing. A model that ignores its
  latents has 0, up to rounding. Putting back the own latents (the sham) shows the rounding: in float32 the replies are
  equal, in bfloat16 some change. Where the interval of the sham's own share of changed answers reaches the threshold,
  rounding may be all there is, and nothing is called used. Whether accuracy falls is reported beside it: answers may
  follow the latents and be no better for it.
* **Grounded** (`walk`): the share of latents whose nearest visual token (by cosine) lies in an evidence box, minus the
  share that a random visual token would reach, question by question. Any box counts at any step: order is what `walk`
  asks. Boxes differ in size, so chance does too: the interval is that of the differences.

A threshold decides where the whole 95 % interval is on one side of it. Else, or where a number is missing, the verdict
is "not decided", with the reason; what is known of the two halves is still there.

Limits. Grounded is a statement about places, by the cosine to visual tokens: latents that hold the evidence in another
code count as ungrounded, and so do boxes that miss what the answer needs. Used is a statement about whole spans.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from realvr.diagnostics.controls_summary import condition_of

Label = Literal["unused", "used but ungrounded", "grounded but unused", "grounded and used", "not decided"]

CHANGED = 0.10
"""Used: more than one answer in ten changes. Fewer could not move a benchmark by more than a few points, and near ties
between two options flip with any disturbance."""
ABOVE_CHANCE = 0.10
"""Grounded: ten points more latents in a box than random tokens would have. Pictures have a middle where boxes and
nearest tokens gather without any reasoning; that alone is worth a few points."""
QUESTIONS = 30
"""Fewer questions decide nothing: intervals of so few are not to be trusted."""
READABLE = 0.5
"""Of the answers with own and with another sample's latents, both must be readable this often. Below, the questions
that are left are a selection by the broken format."""

NEEDED = ("controls", "walk")
"""The diagnostics that it is made of."""


@dataclass(frozen=True)
class Half:
    """One of the two questions: the number with its interval against the threshold, or why it is not decided."""

    holds: bool | None
    value: float | None = None
    low: float | None = None
    high: float | None = None
    threshold: float | None = None
    n: int = 0
    reason: str = ""
    """Why it is not decided; empty where it is."""


@dataclass(frozen=True)
class Verdict:
    """The verdict on one model."""

    label: Label
    used: Half
    grounded: Half
    accuracy_drop: dict[str, Any] | None
    """Accuracy with own minus with another sample's latents (fractions), paired; None where it was not measured."""

    def as_json(self) -> dict[str, Any]:
        """For verdict.json, with the thresholds."""
        rule = {"changed": CHANGED, "above_chance": ABOVE_CHANCE, "questions": QUESTIONS, "readable": READABLE}
        return asdict(self) | {"thresholds": rule, "sentence": self.sentence}

    @property
    def sentence(self) -> str:
        """The verdict and its two numbers in one line."""
        used = _told(self.used, "{} of the answers change with another sample's latents")
        grounded = _told(self.grounded, "{} of the latents in an evidence box beyond chance")
        drop = self.accuracy_drop
        fall = ""
        if drop is not None and drop["mean"] is not None and self.used.holds is not None:
            fall = f" (accuracy falls by {100 * drop['mean']:.1f} points {_interval(drop['low'], drop['high'])})"
        return f"{self.label}: {'; '.join(dict.fromkeys([used + fall, grounded]))}"  # one reason may hold for both


def verdict(summaries: Mapping[str, Any], skipped: Mapping[str, str] | None = None) -> Verdict:
    """The verdict from the summaries of diagnostics on one model, by their names.

    ``skipped``: why a diagnostic has no summary, by its name.
    """
    missing = {name: (skipped or {}).get(name, f"{name} was not measured") for name in NEEDED}
    controls, walk = summaries.get("controls"), summaries.get("walk")
    used = Half(None, threshold=CHANGED, reason=missing["controls"]) if controls is None else _used(controls)
    grounded = Half(None, threshold=ABOVE_CHANCE, reason=missing["walk"]) if walk is None else _grounded(walk)
    another = None if controls is None else condition_of(controls, "another")
    return Verdict(_label(used.holds, grounded.holds), used, grounded, None if another is None else _drop(another))


def _label(used: bool | None, grounded: bool | None) -> Label:
    if used is None or grounded is None:
        return "not decided"
    if used:
        return "grounded and used" if grounded else "used but ungrounded"
    return "grounded but unused" if grounded else "unused"


def _used(controls: Mapping[str, Any]) -> Half:
    another = condition_of(controls, "another")
    if another is None:
        return Half(None, threshold=CHANGED, reason="controls has no answers with another sample's latents")
    changed = another["changed"]
    if another["questions"] and changed["of"] < READABLE * another["questions"]:
        why = (
            f"only {changed['of']} of {another['questions']} questions have answers that can be read with the own and "
            "with another sample's latents"
        )
        return Half(None, threshold=CHANGED, n=changed["of"], reason=why)
    half = _decide(changed["rate"], changed["low"], changed["high"], CHANGED, changed["of"])
    rounding = _rounding(condition_of(controls, "sham"))
    # Rounding adds changes and hides none: what is below the threshold with it is below without it.
    return half if half.holds is False or not rounding else replace(half, holds=None, reason=rounding)


def _rounding(sham: Mapping[str, Any] | None) -> str:
    """Why changed answers may be rounding; empty where putting back the own latents changes too few, or none."""
    if sham is None or not sham["changed"]["count"] or sham["changed"]["high"] < CHANGED:
        return ""
    changed = sham["changed"]
    share = f"{_percent(changed['rate'])} {_interval(changed['low'], changed['high'])} (n = {changed['of']})"
    return f"but {share} change by rounding when the own latents are put back: measure with --dtype float32"


def _grounded(walk: Mapping[str, Any]) -> Half:
    above = walk.get("evidence_above_chance")
    if above is None:
        why = "walk.json is of an earlier version: run walk again, it keeps its records"
        return Half(None, threshold=ABOVE_CHANCE, reason=why)
    if above["mean"] is None:
        return Half(None, threshold=ABOVE_CHANCE, reason="walk has no question with an evidence box")
    return _decide(above["mean"], above["low"], above["high"], ABOVE_CHANCE, above["pairs"])


def _decide(value: float | None, low: float | None, high: float | None, threshold: float, n: int) -> Half:
    """Whether the interval is above or below the threshold."""
    if value is None or low is None or high is None or n < QUESTIONS:
        reason = f"{n} questions are too few (at least {QUESTIONS})"
        return Half(None, value, low, high, threshold, n, reason)
    if low > threshold:
        return Half(True, value, low, high, threshold, n)
    if high < threshold:
        return Half(False, value, low, high, threshold, n)
    reason = f"the interval {_interval(low, high)} contains the threshold {_percent(threshold)}: take more questions"
    return Half(None, value, low, high, threshold, n, reason)


def _drop(another: Mapping[str, Any]) -> dict[str, Any]:
    difference = another["difference"]
    if difference["mean"] is None:
        return dict(difference)
    return difference | {"mean": -difference["mean"], "low": -difference["high"], "high": -difference["low"]}


def _told(half: Half, words: str) -> str:
    if half.value is None:
        return half.reason
    number = f"{_percent(half.value)} {_interval(half.low, half.high)}"
    told = f"{words.format(number)} (n = {half.n})"
    return f"{told}, {half.reason}" if half.reason else told


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _interval(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f"[{100 * low:.1f}, {100 * high:.1f}]"
