"""What a user may say about a model inside another harness, and how a task's generation settings are read. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from pydantic import TypeAdapter, ValidationError

from realvr.errors import UserError

if TYPE_CHECKING:
    from realvr.latent.sampling import Sampling

SpanCondition = Literal["own", "none", "mean", "other", "noise"]
EXCHANGED = ("mean", "other", "noise")
"""Conditions that need the question's own latents, or those of the whole set, before it can be asked."""
WHOLE_SET = ("mean", "other")
"""Conditions that need the latents of the whole set."""
MAX_NEW = 192
"""New tokens where neither the user nor the task says how many."""
READ = {"max_new_tokens", "do_sample", "temperature", "top_p", "top_k", "until"}
"""Generation settings of a task that are obeyed."""
HARMLESS = {"num_beams": (None, 1), "use_cache": (None, True, False)}
"""Settings, and the values at which they change nothing here."""
EVERYWHERE = "\n\n"
"""lmms-eval adds this stop to every task that names none; a reply with paragraphs would lose its answer."""


class MissingHarness(UserError, ImportError):
    """The harness of an adapter is not installed. The message is one line that says how to install it."""


@dataclass(frozen=True)
class ModelArguments:
    """Arguments of the model, named as the options of ``realvr eval``.

    Args:
        pretrained: Directory of a checkpoint, a hub id, or a packaged model such as mini.
        latents: Number of latent slots K; by default the K the checkpoint was trained with. 0 asks without a span.
        condition: What fills the span: own, none (K = 0), mean, other or noise, as in docs/evaluation.md.
        batch_size: Questions asked at a time; "auto" is 32 on a GPU and 16 on the CPU.
        max_new: At most this many new tokens per reply, whatever the task says.
        stop_at_answer: End a reply once it has written </answer>.
        seed: Seed of sampling, where the task samples.
        exchange_seed: Fixes whose latents each question gets from another one, and the noise.
        min_tokens: Fewest visual tokens per image (families with variable grids); by default those of its training.
        max_tokens: Most visual tokens per image (families with variable grids); by default those of its training.
        device: cpu, cuda, cuda:1, …; by default the GPU where there is one.
        dtype: float32, bfloat16, float16; by default the checkpoint's own.
    """

    pretrained: str
    latents: int | None = None
    condition: SpanCondition = "own"
    batch_size: int | None = None
    max_new: int | None = None
    stop_at_answer: bool = True
    seed: int = 0
    exchange_seed: int = 0
    min_tokens: int | None = None
    max_tokens: int | None = None
    device: str | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        if self.latents is not None and self.latents < 0:
            raise UserError(f"latents={self.latents}: the number of latent slots cannot be negative")
        if self.batch_size is not None and self.batch_size < 1:
            raise UserError(f"batch_size={self.batch_size}: at least one question must be asked at a time")
        if self.max_new is not None and self.max_new < 1:
            raise UserError(f"max_new={self.max_new}: at least one token must be decoded")
        if self.condition == "none" and self.latents:
            raise UserError(f"condition=none asks for no span, and latents={self.latents} for one: leave one out")
        if self.condition in EXCHANGED and self.latents == 0:
            raise UserError(f"condition={self.condition} fills the span, and latents=0 asks for none: leave one out")

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> ModelArguments:
        """From ``name=value`` as a harness hands them over: numbers may be texts, "auto" is a batch size."""
        names = [field.name for field in fields(cls)]
        if unknown := [name for name in values if name not in names]:
            raise UserError(f"there is no model argument {unknown[0]}; there are {', '.join(names)}")
        if not values.get("pretrained"):
            raise UserError("no model named: give pretrained=CHECKPOINT, a directory, a hub id, or mini")
        given = {name: value for name, value in values.items() if value is not None}
        if str(given.get("batch_size")).startswith("auto"):
            del given["batch_size"]
        # Harnesses turn "8" into a number, and a directory called 8 with it.
        texts = {name: str(given[name]) for name in ("pretrained", "condition", "device", "dtype") if name in given}
        try:
            return TypeAdapter(cls).validate_python(given | texts)
        except ValidationError as error:
            wrong = error.errors()[0]
            name = str(wrong["loc"][0])
            raise UserError(f"{name}={given[name]}: {wrong['msg']}") from None

    def slots(self, trained: int | None) -> int:
        """K that questions are asked with; ``trained`` is that of the checkpoint, None where it has no markers."""
        asked = 0 if self.condition == "none" else trained if self.latents is None else self.latents
        if asked is None or (asked and not trained):
            raise UserError(
                f"{self.pretrained} was not trained with latent slots: give latents=0, or train Stage 1 first"
            )
        if self.condition in EXCHANGED and not asked:
            raise UserError(
                f"{self.pretrained} was trained with K = 0: it has no span that condition={self.condition} could fill"
            )
        return asked


@dataclass(frozen=True)
class Decoding:
    """How the replies of a task are decoded and where they are cut."""

    sampling: Sampling
    until: tuple[str, ...] = ()
    """Texts of the task that end a reply; they are cut off."""
    ignored: tuple[str, ...] = ()
    """Settings of the task that are not used, as ``name=value``."""

    def cut(self, text: str) -> str:
        """The text before the first of ``until``."""
        return text[: min((place for stop in self.until if (place := text.find(stop)) >= 0), default=len(text))]


def decoding(arguments: ModelArguments, task: Mapping[str, Any]) -> Decoding:
    """From the generation settings of a task, in the words of ``generate``: greedy unless it asks for sampling."""
    from realvr.latent.sampling import ANSWER_END, Sampling

    sample = task.get("do_sample", bool(task.get("temperature")))
    temperature = task.get("temperature")
    sampling = Sampling(
        temperature=float(1.0 if temperature is None else temperature) if sample else 0.0,
        top_p=float(task.get("top_p") or 1.0) if sample else 1.0,
        top_k=int(task.get("top_k") or 0) if sample else 0,
        max_new=int(arguments.max_new or task.get("max_new_tokens") or MAX_NEW),
        stop=ANSWER_END if arguments.stop_at_answer else None,
    )
    until: str | Sequence[str] = task.get("until") or ()
    stops = (until,) if isinstance(until, str) else tuple(until)
    ignored = tuple(
        f"{name}={value}"
        for name, value in task.items()
        if name not in READ and not (name in HARMLESS and value in HARMLESS[name])
    )
    return Decoding(sampling, tuple(stop for stop in stops if stop and stop != EVERYWHERE), ignored)
