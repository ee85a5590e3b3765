"""One line of ``predictions.jsonl``: what was asked, what came back, and how it was read.

The file is the product of an evaluation; every score is computed from it again (``realvr score``), without a model.
Nothing here imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_type_hints

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from realvr.runs.journal import Kind, json_line, records_of

PREDICTIONS = "predictions.jsonl"
Condition = Literal["own", "mean", "other", "noise"]
"""What filled the span: the model's own latents (K = 0: no span at all), the mean over the set at each position, the
latents of another example of the set, or noise with the norms of the own latents."""


@dataclass(frozen=True)
class Prediction:
    """One answer to one question. ``key`` says which: a resumed run asks for the keys that are missing."""

    bench: str
    """Name of the benchmark as given on the command line: mmvp, blink, hrbench-4k, …"""
    question: str
    """Id of the sample, unique within the benchmark."""
    condition: Condition
    latents: int
    """K: slots in the span. 0 means no span."""
    seed: int
    answer: str
    """The right answer: a letter where there are choices."""
    question_text: str = ""
    """The question itself, as the data words it; the options are in ``choices``."""
    text: str = ""
    """What the model wrote, whole."""
    extracted: str | None = None
    """The answer read out of ``text``; None is a parse failure."""
    policy: str = "strict"
    parser: str = ""
    """The policy with its version, ``strict/1``; empty in records of earlier versions."""
    judge: str = ""
    """What decided ``correct``, with its version; empty in records of earlier versions."""
    correct: bool = False
    choices: list[str] = field(default_factory=list)
    task: str = ""
    category: str = ""
    pair: str | None = None
    cycle: str | None = None
    tags: dict[str, str] = field(default_factory=dict)
    prompt: str = ""
    """SHA-256 of the encoded prompt: token ids and images."""
    images: list[str] = field(default_factory=list)
    """Ids of the images."""
    pictures: list[str] = field(default_factory=list)
    """SHA-256 of each decoded image: equal for the same picture under two names."""
    finish: str = ""
    """eos, stop, length, or error."""
    new_tokens: int = 0
    seconds: float = 0.0
    """Wall time of the batch divided by the answers in it."""
    error: str | None = None
    """Why there is no answer (an unreadable image, …). Such a question stays in the denominator."""

    @property
    def key(self) -> tuple[str, str, str, int, int]:
        """What it answers; no two predictions of a run have the same key."""
        return (self.bench, self.question, self.condition, self.latents, self.seed)

    def to_json(self) -> str:
        """One line, without the line break."""
        return json_line(asdict(self))


_TYPES = get_type_hints(Prediction)
_ROW = TypeAdapter(TypedDict("_Row", _TYPES, total=False))  # type: ignore[operator]


def _parse(line: bytes) -> Prediction:
    row: dict[str, Any] = json.loads(line)
    known = {name: value for name, value in row.items() if name in _TYPES}
    try:
        _ROW.validate_python(known, strict=True)
    except ValidationError as error:
        odd = str(error.errors(include_url=False, include_input=False)[0]["loc"][0])
        raise ValueError(f"{odd} is {str(known[odd])[:60]!r}") from None
    return Prediction(**known)


KIND: Kind[Prediction] = Kind(
    key=lambda prediction: prediction.key, parse=_parse, line=Prediction.to_json, what="a prediction", again="ask again"
)
"""Predictions as records of a journal."""


def read_predictions(path: str | Path) -> Iterator[Prediction]:
    """Predictions of a file, in order. A last line without a line break, as a kill leaves it, is left out.

    A key that occurs twice counts once: the first line stands.
    """
    return records_of(Path(path), KIND)


def write_predictions(path: str | Path, predictions: Iterable[Prediction]) -> None:
    """A new file with these predictions."""
    with Path(path).open("w", encoding="utf-8") as target:
        target.writelines(prediction.to_json() + "\n" for prediction in predictions)
