"""``realvr ask``: one question, through the same path that training and evaluation use."""

from __future__ import annotations

import json as json_module
from dataclasses import dataclass
from typing import Annotated

import tyro

from realvr.evaluation.ask import AskSettings
from realvr.evaluation.ask import ask as ask_model


@dataclass(frozen=True)
class AskCommand(AskSettings):
    """Options of ``realvr ask``.

    Args:
        json: Print one JSON object: answer, text, latents, latent_norms, finish_reason, seconds, and more.
    """

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    what: Annotated[
        tyro.conf.Positional[tuple[str, ...]],
        tyro.conf.arg(metavar="IMAGE… QUESTION", help_behavior_hint="(required)"),
    ]
    put: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    json: bool = False


def ask(settings: AskCommand) -> int:
    """Ask a model a question about one or more images and print its answer.

    The model reasons in K latent slots before it writes. The last argument is the question, those before it are image
    files; no image at all is allowed.

    Examples:
      realvr ask runs/tiny photo.png "What colour is the circle?"
      realvr ask runs/tiny before.png after.png "What changed?" --latents 0
      realvr ask mini trail.png "Where does the orange arrow lead?" --put 4=2,5
      realvr ask mini trail.png "Where does the orange arrow lead?" --show walk.png
      realvr ask Qwen/Qwen2.5-VL-7B-Instruct photo.jpg "How many birds?" --json
    """
    result = ask_model(settings)
    if settings.json:
        print(json_module.dumps(result, ensure_ascii=False))
        return 0
    replies = {"": result}
    if "put" in result:
        named = ", ".join(place["name"] for place in result["put"]["places"])
        replies = {"without: ": result, f"with {named}: ": result["put"]}
    for name, reply in replies.items():
        print(f"{name}{reply['answer']}")
        if settings.expected is not None:
            verdict = "equals" if reply["correct"] else "does not equal"
            print(f"{verdict} the expected answer, {settings.expected}")
    if settings.show is not None:
        print(f"walk of the latents drawn into {settings.show}")
    return 0
