"""Models of realvr in lmms-eval: ``lmms-eval --model realvr --model_args pretrained=mini,latents=8 --tasks …``.

lmms-eval finds `RealVR` through the entry point ``lmms_eval.models``. It words the questions and scores the replies;
between the two is `realvr.integrations.harness`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from realvr.backbone.types import Turn
from realvr.errors import UserError
from realvr.evaluation.processes import Ranks
from realvr.evaluation.responder import Reply
from realvr.integrations.arguments import WHOLE_SET, MissingHarness, ModelArguments, decoding
from realvr.integrations.harness import HarnessModel, Question, turn

try:
    from lmms_eval.api.instance import GenerationResult, Instance, TokenCounts
    from lmms_eval.api.model import lmms
except ImportError as error:
    raise MissingHarness(
        f'lmms-eval cannot be imported ({error}): pip install "realvr[lmms-eval]" installs it'
    ) from error


class RealVR(lmms):  # type: ignore[misc]
    """A model of the kind that lmms-eval calls chat: tasks hand over messages.

    Arguments are those of `ModelArguments`, and ``id_column``: the column of a task's data that holds the id of a
    question. Noise and the choice of another question depend on ids; by default they are row numbers.
    """

    is_simple = False

    def __init__(self, id_column: str | None = None, max_batch_size: int | None = None, **arguments: Any) -> None:
        super().__init__()
        ranks = Ranks.from_environment()
        self._rank, self._world_size = ranks.rank, ranks.world
        self.id_column = id_column
        given = ModelArguments.parse(arguments)
        self.model: HarnessModel | None = HarnessModel(given, ranks)
        self.device = self.model.backbone.device

    def generate_until(self, requests: Sequence[Instance]) -> list[GenerationResult]:
        """A reply to every request. Those of one task with one set of generation settings are asked together."""
        groups: dict[tuple[str, str, str], list[int]] = defaultdict(list)
        for number, request in enumerate(requests):
            _, _, settings, _, task, split = request.args
            groups[task, split, json.dumps(settings, sort_keys=True, default=str)].append(number)
        replies: dict[int, Reply] = {}
        for numbers in groups.values():
            members = [requests[number] for number in numbers]
            replies |= dict(zip(numbers, self._replies(members), strict=True))
        return [
            GenerationResult(replies[number].text, TokenCounts(output_tokens=replies[number].new_tokens))
            for number in range(len(requests))
        ]

    def _replies(self, requests: Sequence[Instance]) -> list[Reply]:
        """Those of one task."""
        assert self.model is not None, "the model has been cleaned away"
        _, messages, settings, _, task, _ = requests[0].args
        if self.model.arguments.condition in WHOLE_SET:
            _refuse_part(task, messages, requests, self.model.arguments.condition)
        rows: dict[str, list[int]] = defaultdict(list)
        questions = []
        for request in requests:
            name, row = self._id(request), request.args[3]
            questions.append(Question(name, partial(self._turns, request), repeat=len(rows[name])))
            rows[name].append(row)
            if rows[name][0] != row:
                raise UserError(
                    f"id_column={self.id_column}: rows {rows[name][0]} and {row} of {task} are both {name!r}"
                )
        return self.model.replies(task, questions, decoding(self.model.arguments, settings))

    def _id(self, request: Instance) -> str:
        """What the question is called: its row, or what the column of ids says."""
        _, _, _, row, task, split = request.args
        if self.id_column is None:
            return str(row)
        columns = self.task_dict[task][split].column_names
        if self.id_column not in columns:
            raise UserError(f"id_column={self.id_column}: {task} has no such column; it has {', '.join(columns)}")
        return str(self.task_dict[task][split][self.id_column][row])

    def _turns(self, request: Instance) -> list[Turn]:
        """The conversation of a request."""
        _, messages, _, row, task, split = request.args
        return turns(messages(self.task_dict[task][split][row]))

    def clean(self) -> None:
        """Give the memory back; lmms-eval may load a judge afterwards."""
        self.model = None
        super().clean()

    def loglikelihood(self, requests: Sequence[Instance]) -> list[tuple[float, bool]]:
        """Refused: the latent span ends in a reply, not in a score of given words."""
        raise _unable(requests, "scores given continuations (loglikelihood, multiple_choice)")

    def generate_until_multi_round(self, requests: Sequence[Instance]) -> list[str]:
        """Refused."""
        raise _unable(requests, "asks in several rounds (generate_until_multi_round)")


def turns(messages: Sequence[dict[str, Any]]) -> list[Turn]:
    """Messages of a task as the turns of a conversation."""
    found: list[Turn] = []
    for message in messages:
        content = message["content"]
        pieces = [{"type": "text", "text": content}] if isinstance(content, str) else content
        parts = [
            (str(piece["type"]), piece["text"] if piece["type"] == "text" else piece.get("url")) for piece in pieces
        ]
        found.append(turn(message["role"], parts, sum(len(one.images) for one in found)))
    return found


def _unable(requests: Sequence[Instance], what: str) -> UserError:
    task = requests[0].task_name if requests else "the task"
    return UserError(f"{task} {what}: models of realvr answer tasks of the type generate_until")


def _refuse_part(task: str, messages: Callable[..., Any], requests: Sequence[Instance], condition: str) -> None:
    """Refuse a part of a task, the rest of which a response cache has answered: its mean would be that of the part."""
    every = getattr(getattr(messages, "__self__", None), "instances", None)
    if every is not None and {r.doc_id for r in requests} != {r.doc_id for r in every}:
        raise UserError(
            f"{task}: condition={condition} needs the latents of all {len(every)} questions, and some were answered "
            "from a response cache: give --use_cache another folder, or leave it out"
        )
