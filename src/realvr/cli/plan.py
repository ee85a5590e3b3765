"""``realvr plan``: does it fit, and how long is a step?"""

from __future__ import annotations

import json as json_module
from dataclasses import dataclass

from realvr.errors import UserError
from realvr.planning.settings import PlanSettings

RANK = 16


@dataclass(frozen=True)
class PlanCommand(PlanSettings):
    """Options of ``realvr plan``.

    Args:
        json: Print JSON: one object per backbone, in a list.
    """

    json: bool = False


def rewrite(args: list[str]) -> list[str]:
    """``--lora`` without a number is rank 16; rank 0 is an error here, where leaving it out says the same."""
    found: list[str] = []
    for place, arg in enumerate(args):
        found.append(arg)
        following = args[place + 1] if place + 1 < len(args) else ""
        if arg == "--lora" and not following.lstrip("-").isdigit():
            found.append(str(RANK))
        elif arg == "--lora=0" or (arg == "--lora" and following == "0"):
            raise UserError("--lora 0: a rank is at least 1; leave --lora out to train all weights of the decoder")
    return found


def plan(settings: PlanCommand) -> int:
    """Estimate memory, communication and step time of a training before it is started. Nothing is downloaded.

    The step time is a lower bound: nothing waits, and nothing is padded, loaded, logged or saved.

    Examples:
      realvr plan --backbone Qwen2.5 --gpus 8 --gpu A100-80
      realvr plan --backbone Qwen3-VL-8B --gpus 1 --gpu H200 --lora --engine ddp
      realvr plan --backbone Qwen2.5 --gpus 1 --gpu H200 --engine ddp --batch 8 --microbatch 4 --plain
      realvr plan --backbone Qwen3-VL-235B --gpus 1600 --gpu MI250X --engine zero3 --stage sft
      realvr plan --backbone all --gpus 8 --gpu-memory 80 --json
    """
    from realvr.planning import plan as planning  # imports torch, which --help must not wait for
    from realvr.planning.text import details, table

    found = planning.plan(settings)
    if settings.json:
        print(json_module.dumps([one.as_json() for one in found], indent=2))
    elif settings.backbone == "all":
        print(table(found))
    else:
        print(details(found[0]))
    return 0
