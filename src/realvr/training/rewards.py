"""Rewards of Stage 2: accuracy, format, and functions of the user's own.

Accuracy: exactly one answer block (the parser ``reward``), equal to the sample's answer by the one judge
(`realvr.answers.equal`). Format: the text is free text followed by exactly one answer block.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from realvr.answers import canonical_answer, equal, parser
from realvr.data.sample import Sample
from realvr.errors import UserError

Reward = Callable[[str, Sample], float]
PARSER = parser("reward")
_FORMAT = re.compile(r"[\s\S]*<answer>[^<]+</answer>\s*")


def accuracy(text: str, sample: Sample) -> float:
    """1 if the completion's answer is the sample's, else 0."""
    given = PARSER.read(text, sample.choices)
    return float(given is not None and correct(given, sample))


def correct(given: str, sample: Sample) -> bool:
    """Whether a parsed answer is the sample's."""
    return bool(equal(given, true_answer(sample), sample.choices))


def true_answer(sample: Sample) -> str:
    """``y*`` in canonical form."""
    truth = canonical_answer(sample.answer, sample.choices)
    if truth is None:
        raise UserError(f"{sample.source or sample.id}: the answer '{sample.answer}' names none of its options")
    return truth


def format(text: str, sample: Sample) -> float:
    """1 if the completion is well formed: anything, then exactly one non-empty answer block."""
    blocks = text.count("<answer>") == 1 and text.count("</answer>") == 1
    return float(blocks and _FORMAT.fullmatch(text) is not None)


BUILT_IN: dict[str, Reward] = {"accuracy": accuracy, "format": format}


def load_rewards(weights: Mapping[str, float]) -> dict[str, tuple[Reward, float]]:
    """Rewards by name with their weights; a name that is not built in is ``path.py:function``."""
    return {name: (BUILT_IN.get(name) or _user_reward(name), float(weight)) for name, weight in weights.items()}


def rated(name: str, reward: Reward, text: str, sample: Sample) -> float:
    """A reward of one completion. NaN and infinity pass: the loop skips their step and names it."""
    try:
        value = reward(text, sample)
        if isinstance(value, str | bytes) or value is None:
            raise TypeError(f"it returned {value!r}")
        return float(value)
    except (Exception, SystemExit) as error:  # whatever the user's function does
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        what = " ".join(what.split())
        where = f" ({sample.source})" if sample.source else ""
        raise UserError(
            f"reward '{name}' gave no number for sample '{sample.id}'{where}: {what[:300]}; the completion was "
            f"{text[:80]!r}"
        ) from error


def _user_reward(name: str) -> Reward:
    path, _, function = name.rpartition(":")
    if not path:
        raise UserError(f"reward '{name}' is neither {' nor '.join(BUILT_IN)} nor path.py:function")
    if not Path(path).is_file():
        raise UserError(f"reward '{name}': {path} does not exist")
    spec = importlib.util.spec_from_file_location(f"realvr_reward_{Path(path).stem}", path)
    if spec is None or spec.loader is None:
        raise UserError(f"reward '{name}': {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever the user's file raises
        raise UserError(f"reward '{name}': {path} cannot be imported ({type(error).__name__}: {error})") from error
    found = getattr(module, function, None)
    if not callable(found):
        raise UserError(f"reward '{name}': {path} has no function '{function}'")
    return found
