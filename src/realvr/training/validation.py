"""Held-out questions while a run trains: what the current model answers, as ``realvr eval`` would ask and read it.

Each validation is an evaluation (`realvr.evaluation.runner`) of the model in memory: greedy answers behind its own
latents, the same questions every time, batches shared by the ranks. It leaves the run as it was: generators, dropout
and gradients. The replies go to ``validation.jsonl``.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from typing_extensions import override

from realvr.backbone.backbone import Backbone
from realvr.backbone.samples import answer_tokens, conversation, pad_answers
from realvr.backbone.types import Prompt
from realvr.errors import UserError
from realvr.evaluation.asking import KEPT_IMAGES, Asked, ImageLoader, prefetch
from realvr.evaluation.effects import EFFECTS
from realvr.evaluation.model_responder import ModelResponder
from realvr.evaluation.processes import Ranks as EvaluationRanks
from realvr.evaluation.questions import Questions
from realvr.evaluation.records import PREDICTIONS, Prediction, read_predictions
from realvr.evaluation.runner import EvalSettings, evaluate
from realvr.latent.fast import FastDecode, fast_decode
from realvr.latent.modes import FastMode
from realvr.latent.sampling import ANSWER_END, Sampling
from realvr.latent.span import prefill, score, span_tokens, think
from realvr.runs.progress import busy
from realvr.training.engine import Engine
from realvr.training.held_out import NAME, held_out_questions
from realvr.training.rewards import load_rewards, rated, true_answer
from realvr.training.settings import StageSettings, TrainSettings
from realvr.training.task import Task

DEFAULT_REWARDS = {"accuracy": 1.0, "format": 1.0}
"""Of a stage without rewards of its own: those that Stage 2 has by default."""
SCRATCH = ".validation"
"""Folder of a run that holds an evaluation while it is going on."""


@runtime_checkable
class HasBackbone(Protocol):
    """A method whose model can be asked."""

    backbone: Backbone


class CurrentModel(ModelResponder):
    """The model of a run, which has the span that it is being taught."""

    def __init__(self, backbone: Backbone, sampling: Sampling, latents: int, fast: FastDecode | None = None) -> None:
        super().__init__(backbone, sampling, name=NAME, fast=fast)
        self._latents = latents

    @property
    @override
    def latents(self) -> int:
        return self._latents


@dataclass(frozen=True)
class _Shares(EvaluationRanks):
    """The ranks of a run, as an evaluation sees them."""

    engine: Engine | None = field(default=None, compare=False)

    def barrier(self) -> None:
        if self.engine is not None:
            self.engine.barrier()


@dataclass(frozen=True)
class Validated:
    """One validation, the same on every rank."""

    metrics: dict[str, float]
    replies: list[dict[str, Any]]
    """One per question, for ``validation.jsonl``."""


class Validation:
    """The held-out questions of one run."""

    def __init__(self, task: Task, settings: TrainSettings, engine: Engine, questions: Questions) -> None:
        if not isinstance(task, HasBackbone):
            raise UserError("validation needs a method with a backbone: remove validation.path")
        self.settings, self.engine, self.questions = settings, engine, questions
        self.backbone = task.backbone
        self.latents = self.backbone.latents if getattr(task, "span", True) else 0
        self.rewards = load_rewards(reward_weights(settings))
        asked = settings.validation
        self.sampling = Sampling(temperature=0.0, max_new=asked.max_new, stop=ANSWER_END)
        self.effects = asked.effects and self.latents > 0
        # Pictures stay ready where those of the training data do.
        pictures = sum(len(sample.images) for sample in questions.samples) if settings.data.keep_encoded else 0
        self.loader = ImageLoader(self.backbone.processor, max(pictures, KEPT_IMAGES))
        self._refuse_missing_tag()
        self._refuse_missing_metric()

    def _refuse_missing_metric(self) -> None:
        """Help and dependence need a span, which the model may turn out not to have."""
        metric = self.settings.checkpoint.keep_best or ""
        if metric.removeprefix(f"{NAME}/") in EFFECTS and not self.effects:
            raise UserError(f"checkpoint.keep_best: {metric} needs latents, and this run trains a model without them")

    def _refuse_missing_tag(self) -> None:
        tag, known = self.settings.validation.by, {name for sample in self.questions.samples for name in sample.tags}
        if tag is not None and tag not in known:
            there = f"they have {', '.join(sorted(known))}" if known else "they have none"
            raise UserError(f"validation.by: no question of {self.questions.path} has the tag '{tag}'; {there}")

    @property
    def identity(self) -> str:
        """Hash of everything that the values depend on beside the model: values of one identity can be compared."""
        weights = {name: weight for name, (_, weight) in self.rewards.items()}
        facts = [self.questions.describe()["sha256"], self.latents, asdict(self.sampling), weights]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]

    def due(self, step: int) -> bool:
        """After which steps: every so many, and the last."""
        return step % self.settings.validation.every == 0 or step == self.settings.optim.steps

    def __call__(self, step: int) -> Validated:
        """Ask the current model. Every rank calls it."""
        begun = time.perf_counter()
        shown = self.engine.main and self.settings.log.console
        with busy(f"step {step}: validating on {len(self.questions)} questions", shown), self._undisturbed():
            predictions, effects = self._evaluated()
            losses = self._losses()
            own = [p for p in predictions if p.condition == "own" and p.latents == self.latents]
            scores = self._scores(own)
        metrics = {"accuracy": _mean([p.correct for p in own])}
        metrics |= self._by_tag(own)
        metrics["readable"] = _mean([p.extracted is not None for p in own])
        metrics["loss"] = math.fsum(losses.values()) / len(losses) if losses else math.nan
        for name, (_, weight) in self.rewards.items():
            metrics[f"reward/{_short(name)}"] = _mean([row[name] for row in scores])
            metrics["reward"] = metrics.get("reward", 0.0) + weight * metrics[f"reward/{_short(name)}"]
        if self.effects:
            metrics |= {name: effect["points"] / 100 for name, effect in effects.items()}
        metrics["errors"] = float(sum(p.error is not None for p in own))
        metrics["seconds"] = time.perf_counter() - begun
        replies = [self._reply(p, row, losses.get(p.question)) for p, row in zip(own, scores, strict=True)]
        return Validated({f"{NAME}/{name}": value for name, value in metrics.items()}, replies)

    def _by_tag(self, own: Sequence[Prediction]) -> dict[str, float]:
        """Accuracy for each value of the tag that is asked for; questions without it have no say."""
        tag = self.settings.validation.by
        values = sorted({p.tags[tag] for p in own if tag in p.tags}) if tag is not None else []
        return {f"accuracy/{tag}={v}": _mean([p.correct for p in own if p.tags.get(str(tag)) == v]) for v in values}

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Without gradients and dropout; generators and modes are put back."""
        modules = list(self.backbone.model.modules())
        modes, generators = [module.training for module in modules], self.engine.rng_state()
        self.backbone.model.eval()
        try:
            with torch.no_grad(), self.engine.full_parameters():
                yield
        finally:
            for module, mode in zip(modules, modes, strict=True):
                module.training = mode
            self.engine.set_rng_state(generators)

    # ------------------------------------------------------------------ asking

    def _shares(self) -> EvaluationRanks:
        """Every rank its share; all of it where the ranks must pass through the model equally often."""
        engine, beside = self.engine, self.engine.local_world
        if engine.lockstep:
            return EvaluationRanks(local_world=beside)
        return _Shares(engine.rank, engine.world, local_world=beside, engine=engine)

    def _fast(self) -> FastDecode | None:
        """As rollouts are decoded, with buffers that go with the validation. In lockstep ranks must not decide for
        themselves whether there is room for them."""
        mode: FastMode = getattr(getattr(self.settings, "method", None), "fast_decode", "off")
        if self.engine.lockstep:
            return None
        return fast_decode(self.backbone, mode, sharded=self.engine.shards, announce=self.engine.main)

    def _evaluated(self) -> tuple[list[Prediction], dict[str, Any]]:
        """Predictions of all questions, and the effects that they amount to."""
        engine, asked = self.engine, self.settings.validation
        folder = self.settings.run.out / (f"{SCRATCH}-{engine.rank}" if engine.lockstep else SCRATCH)
        writes = engine.main or engine.lockstep
        if writes:
            shutil.rmtree(folder, ignore_errors=True)  # of a validation that was killed
        engine.barrier()
        responder = CurrentModel(self.backbone, self.sampling, self.latents, self._fast())
        chosen = EvalSettings(latents=(self.latents,), ablation=self.effects)
        summary = evaluate(
            responder,
            [self.questions],
            folder,
            chosen,
            batch=asked.batch,
            ranks=self._shares(),
            show=False,
            loader=self.loader,
        )
        found = (list(read_predictions(folder / PREDICTIONS)), summary.get("effects", {})) if engine.main else None
        found = engine.gather_objects(found)[0]
        if writes:
            shutil.rmtree(folder, ignore_errors=True)
        assert found is not None
        return found

    def _losses(self) -> dict[str, float]:
        """Next-token loss of the right answer, written as the model was taught, behind its own latents; by question.

        Questions whose images cannot be read, or that leave no room in the context, have none.
        """
        size, samples, shares = self.settings.validation.batch, self.questions.samples, self._shares()
        batches = [samples[place : place + size] for place in range(0, len(samples), size)]
        own: dict[str, float] = {}
        mine = batches[shares.rank :: shares.world]
        with closing(prefetch(mine, self.loader, processes=shares.local_world)) as loaded:
            for asked in loaded:
                own |= self._batch_losses(asked)
        if self.engine.lockstep:
            return own
        return {name: loss for part in self.engine.gather_objects(own) for name, loss in part.items()}

    def _batch_losses(self, asked: Sequence[Asked]) -> dict[str, float]:
        backbone = self.backbone
        room = backbone.context_length - span_tokens(self.latents)
        fitting: list[tuple[str, Prompt, tuple[list[int], list[bool]]]] = []
        for item in asked:
            try:
                answer = answer_tokens(backbone, true_answer(item.sample), item.sample.choices)
                prompt = backbone.prompt(conversation(item.sample, item.images)) if item.error is None else None
            except UserError:  # said where the question is asked
                continue
            if prompt is not None and any(answer[1]) and len(prompt) + len(answer[0]) <= room:
                fitting.append((item.sample.id, prompt, answer))
        if not fitting:
            return {}
        names, prompts, answers = zip(*fitting, strict=True)
        state, _ = prefill(backbone, backbone.batch(prompts))
        after, _ = think(backbone, state, self.latents)
        ids_BYS, real_BYS, _ = (tensor.to(backbone.device) for tensor in pad_answers([[answer] for answer in answers]))
        logp_BYS, _, _ = score(backbone, after, ids_BYS, real_BYS)
        losses_B = -logp_BYS.double().sum((1, 2)) / real_BYS.sum((1, 2))
        return dict(zip(names, losses_B.tolist(), strict=True))

    def _scores(self, own: Sequence[Prediction]) -> list[dict[str, float]]:
        """Every reward of every reply; 0 for a question that could not be asked."""
        samples = {sample.id: sample for sample in self.questions.samples}
        return [
            {
                name: rated(name, reward, p.text, samples[p.question]) if p.error is None else 0.0
                for name, (reward, _) in self.rewards.items()
            }
            for p in own
        ]

    def _reply(self, p: Prediction, scores: dict[str, float], loss: float | None) -> dict[str, Any]:
        return {
            "id": p.question,
            "question": p.question_text,
            "choices": p.choices,
            "answer": p.answer,
            "text": p.text,
            "extracted": p.extracted,
            "correct": p.correct,
            "reward": sum(scores[name] * weight for name, (_, weight) in self.rewards.items()),
            "loss": loss,
            **({"error": p.error} if p.error is not None else {}),
        }


def reward_weights(settings: TrainSettings) -> dict[str, float]:
    """Rewards of the method, or the usual ones where it has none."""
    method = settings.method if isinstance(settings, StageSettings) else None
    return dict(getattr(method, "rewards", None) or DEFAULT_REWARDS)


def _short(name: str) -> str:
    return name.rpartition("/")[2]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def validation_of(task: Task, settings: TrainSettings, engine: Engine) -> Validation | None:
    """The validation that the settings ask for."""
    data = getattr(task, "data", None)
    questions = getattr(data, "held_out", None) or held_out_questions(settings.validation)
    return Validation(task, settings, engine, questions) if questions is not None else None
