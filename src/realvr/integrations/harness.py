"""The core of the adapters for other harnesses: conversations in, replies out, through the door of our own evaluation.

What a harness asks passes the same `ModelResponder`, `Plan` and ablation as ``realvr eval``: the same words, pictures,
ids and batches give the same replies. The harness words the questions and scores the replies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from realvr.backbone.backbone import Backbone
from realvr.backbone.loading import trained_latents
from realvr.backbone.types import Turn
from realvr.data.sample import Role, Sample, strip_image_tags
from realvr.errors import UserError
from realvr.evaluation.ablation import donors, matched_noise, mean_latents
from realvr.evaluation.asking import Asker, request_seed
from realvr.evaluation.checkpoints import default_batch
from realvr.evaluation.model_responder import ModelResponder
from realvr.evaluation.processes import Ranks
from realvr.evaluation.responder import Plan, Reply, Request
from realvr.imaging.reference import ImageRef
from realvr.integrations.arguments import EXCHANGED, WHOLE_SET, Decoding, ModelArguments
from realvr.runs.guard import note
from realvr.runs.progress import Bar
from realvr.runs.quiet import quiet_transformers

Part = tuple[str, Any]
"""A piece of a message: its kind (text, image, …), and the text, the path or the Pillow image."""


@dataclass(frozen=True)
class Question:
    """One question of a harness. ``turns`` makes its conversation, pictures included, when it is about to be asked."""

    id: str
    turns: Callable[[], list[Turn]]
    repeat: int = 0
    """How often the same question stood before it: repeats are sampled with other random numbers."""


@dataclass
class _Asked:
    """A question with its pictures ready, or the reason why it cannot be asked."""

    question: Question
    turns: list[Turn]
    pictures: tuple[str, ...] = ()
    error: str | None = None


def turn(role: Role, parts: Sequence[Part], shown: int = 0) -> Turn:
    """One message. Pictures stand before the text; one in the middle of it is called ``image N`` there, as in data.

    ``shown`` is the number of pictures in earlier messages.
    """
    images: list[Any] = []
    text = ""
    for kind, value in parts:
        if kind == "image":
            images.append(value)
            text += "<image>"
        elif kind == "text":
            text += str(value)
        else:
            raise UserError(f"the question holds {kind}: models of realvr read text and images only")
    return Turn(role, strip_image_tags(text, shown + 1)[0], images)


class HarnessModel:
    """A checkpoint as other harnesses ask it."""

    def __init__(self, arguments: ModelArguments, ranks: Ranks | None = None) -> None:
        self.arguments = arguments
        self.ranks = ranks or Ranks()
        quiet_transformers()
        if arguments.condition in WHOLE_SET and self.ranks.world > 1:
            raise UserError(
                f"condition={arguments.condition} needs the latents of all questions, and {self.ranks.world} processes "
                "share them here: start one process, or use `realvr eval --processes`"
            )
        trained = trained_latents(arguments.pretrained)
        self.latents = arguments.slots(trained)  # before the weights are read
        self.backbone = Backbone.load(
            arguments.pretrained,
            device=self.ranks.device(arguments.device),
            dtype=arguments.dtype,
            min_tokens=arguments.min_tokens,
            max_tokens=arguments.max_tokens,
            announce=self.ranks.rank == 0,
        )
        if self.latents not in (0, trained):
            self._note(
                f"{arguments.pretrained} was trained with K = {trained}; K = {self.latents} was chosen explicitly"
            )
        self._noted: set[str] = set()

    def replies(self, name: str, questions: Sequence[Question], how: Decoding) -> list[Reply]:
        """Replies to the questions of one set, in order. ``name`` is that of the set (task, benchmark).

        A question that cannot be asked gets an empty reply with ``error``; a note counts them.
        """
        if how.ignored:
            self._once(f"{name}: these generation settings are not used: {', '.join(how.ignored)}")
        if self.arguments.condition in EXCHANGED:
            found = self._exchanged(name, questions, how)
        else:
            found = [reply for _, reply in self._asked(name, questions, how, None)]
        self._report(name, found, how)
        return [replace(reply, text=how.cut(reply.text)) for reply in found]

    def _exchanged(self, name: str, questions: Sequence[Question], how: Decoding) -> list[Reply]:
        """Own latents first, then every question again with others in their place."""
        # One token: the latents come before it, and the text of this pass is thrown away.
        first = replace(how, sampling=replace(how.sampling, max_new=1))
        own: dict[str, Tensor] = {}
        samples: dict[str, Sample] = {}
        pictures: dict[str, tuple[str, ...]] = {}
        failed: dict[str, str] = {}
        for item, reply in self._asked(name, [one for one in questions if one.repeat == 0], first, None):
            question = item.question.id
            if reply.latents is None:
                failed[question] = str(reply.error)
            else:
                own[question], pictures[question] = reply.latents, item.pictures
                samples[question] = Sample.ask(question, [ImageRef(picture) for picture in item.pictures], "", "")
        given = self._given(name, own, list(samples.values()), pictures)
        rows = [reply for _, reply in self._asked(name, questions, how, given)]
        return [
            replace(reply, error=failed[question.id]) if question.id in failed else reply
            for question, reply in zip(questions, rows, strict=True)
        ]

    def _given(
        self, name: str, own: dict[str, Tensor], samples: list[Sample], pictures: dict[str, tuple[str, ...]]
    ) -> dict[str, Tensor]:
        """(K, D) by question: what its span is filled with, as ``realvr eval`` fills it."""
        seed = self.arguments.exchange_seed
        if not own:
            return {}
        if self.arguments.condition == "noise":
            return {question: matched_noise(latents, seed, question) for question, latents in own.items()}
        if self.arguments.condition == "mean":
            return dict.fromkeys(own, mean_latents(own.values()))
        whose = donors(samples, seed, pictures)
        if not whose:
            raise UserError(
                f"{name}: all questions are about the same picture, so condition=other has no latents to give"
            )
        return {question: own[donor] for question, donor in whose.items()}

    def _asked(
        self, name: str, questions: Sequence[Question], how: Decoding, given: dict[str, Tensor] | None
    ) -> Iterator[tuple[_Asked, Reply]]:
        """Every question with its reply. ``given`` fills the spans; a question that it lacks is not asked."""
        responder = ModelResponder(self.backbone, how.sampling, path=self.arguments.pretrained)
        size = self.arguments.batch_size or default_batch(responder)
        asker = Asker(responder, size)
        with Bar(f"asking {name}", len(questions), self.ranks.rank == 0) as bar:
            for start in range(0, len(questions), size):
                batch = [self._ready(responder, question) for question in questions[start : start + size]]
                ready = [item for item in batch if item.error is None and (given is None or item.question.id in given)]
                spans = None if given is None else [given[item.question.id] for item in ready]
                requests = [self._request(name, item) for item in ready]
                (answered,) = asker.put(name, requests, [Plan(self.latents, spans)])
                found = dict(zip(map(id, ready), answered, strict=True))
                for item in batch:
                    yield item, found.get(id(item)) or Reply("", finish="error", error=item.error or "no latents")
                bar.advance(len(batch))

    def _ready(self, responder: ModelResponder, question: Question) -> _Asked:
        """The question with its pictures processed."""
        try:
            turns = question.turns()
            for one in turns:
                one.images = [responder.prepare(image) for image in one.images]
        except (UserError, OSError) as error:
            return _Asked(question, [], error=str(error) or type(error).__name__)
        return _Asked(question, turns, tuple(image.picture for one in turns for image in one.images))

    def _request(self, name: str, item: _Asked) -> Request:
        question = item.question
        seed = request_seed(self.arguments.seed + question.repeat, name, question.id)
        return Request(Sample.ask(question.id, [], "", ""), item.turns, seed)

    def _report(self, name: str, found: Sequence[Reply], how: Decoding) -> None:
        """What a reader of the score must know."""
        errors = [reply.error for reply in found if reply.error is not None]
        if errors:
            self._note(f"{name}: {len(errors)} of {len(found)} questions could not be asked; the first: {errors[0]}")
        cut = sum(reply.finish == "length" for reply in found)
        if cut:
            self._note(
                f"{name}: {cut} of {len(found)} replies ended at the limit of {how.sampling.max_new} new tokens; "
                "max_new=N gives them more"
            )

    def _once(self, line: str) -> None:
        if line not in self._noted:
            self._noted.add(line)
            self._note(line)

    def _note(self, line: str) -> None:
        if self.ranks.rank == 0:
            note(line)
