"""Models of realvr in VLMEvalKit, over the same core as the adapter for lmms-eval.

**Not run inside VLMEvalKit yet.** It is written from VLMEvalKit's documentation of ``generate_inner``; the tests here
check the conversion of messages and the replies without VLMEvalKit. Make an entry in ``vlmeval/config.py``:

    from functools import partial
    from realvr.integrations.vlmevalkit import RealVR

    supported_VLM["realvr-mini"] = partial(RealVR, pretrained="mini")

VLMEvalKit asks one question at a time and scores the replies itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from realvr.backbone.types import Turn
from realvr.errors import UserError
from realvr.integrations.arguments import WHOLE_SET, MissingHarness, ModelArguments, decoding
from realvr.integrations.harness import HarnessModel, Question, turn

Message = Sequence[Mapping[str, Any]]
"""Pieces of a question: ``{"type": "text" or "image", "value": …}``, images as paths."""


class SingleQuestions:
    """What VLMEvalKit needs of a model, without VLMEvalKit: a message in, a text out."""

    def __init__(self, **arguments: Any) -> None:
        given = ModelArguments.parse(arguments)
        if given.condition in WHOLE_SET:
            raise UserError(
                f"condition={given.condition} needs the latents of all questions, and VLMEvalKit asks one at a time: "
                "use own, none or noise here, lmms-eval, or `realvr eval`"
            )
        self.model = HarnessModel(given)
        self.how = decoding(given, {})

    def answer(self, message: Message, dataset: str | None = None) -> str:
        """The reply to one question; one that cannot be asked is an error here, as VLMEvalKit expects."""
        question = Question(_name(message), lambda: [_turn(message)])
        (reply,) = self.model.replies(dataset or "question", [question], self.how)
        if reply.error is not None:
            raise UserError(reply.error)
        return reply.text


def _turn(message: Message) -> Turn:
    return turn("user", [(str(piece["type"]), piece["value"]) for piece in message])


def _name(message: Message) -> str:
    """VLMEvalKit hands over no id: a question is called by what it says and shows."""
    digest = hashlib.sha256()
    for piece in message:
        path = Path(str(piece["value"])) if piece["type"] == "image" else None
        digest.update(path.read_bytes() if path is not None and path.is_file() else str(piece["value"]).encode())
    return digest.hexdigest()


def __getattr__(name: str) -> type:
    """``RealVR``, the class that VLMEvalKit is given. It is made on first use: its base is VLMEvalKit's."""
    if name == "RealVR":
        return _adapter()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _adapter() -> type:
    try:
        from vlmeval.vlm.base import BaseModel
    except ImportError as error:
        raise MissingHarness(
            f"VLMEvalKit cannot be imported ({error}): clone https://github.com/open-compass/VLMEvalKit and run "
            "`pip install -e .` in it"
        ) from error

    class RealVR(BaseModel):  # type: ignore[misc]
        """A model of realvr; the arguments are those of `ModelArguments`."""

        INSTALL_REQ = False
        INTERLEAVE = True

        def __init__(self, **arguments: Any) -> None:
            super().__init__()
            self.questions = SingleQuestions(**arguments)

        def generate_inner(self, message: Message, dataset: str | None = None) -> str:
            """The reply to one question."""
            return self.questions.answer(message, dataset)

    return RealVR
