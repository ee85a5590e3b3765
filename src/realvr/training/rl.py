"""Stage 2 as a task for the loop: rollouts, rewards, wrong answers, prototypes and negatives of one optimizer step.

Everything here runs without gradient. The order of the prompts, the random numbers of each rollout and the negatives of
each prompt depend on (seed, step, place in the global batch, sample), never on the rank: any split of the same global
batch over ranks and microbatches is the same step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from realvr import answers
from realvr.backbone.backbone import Backbone, VisualTokens
from realvr.backbone.loading import trained_latents
from realvr.backbone.samples import answer_tokens, pad_answers
from realvr.backbone.types import Prompt
from realvr.data.mixture import Mixture
from realvr.data.sample import Sample
from realvr.errors import UserError
from realvr.latent import prototypes as evidence
from realvr.latent.group_rollout import Completion, Rollout, rollout
from realvr.latent.prototypes import NegativeBank, Prototype
from realvr.latent.sampling import ANSWER_END, Sampling
from realvr.latent.span import prefill, score, splice
from realvr.maths import grpo
from realvr.training.adapters import Adapters
from realvr.training.dropping import EMPTY_ANSWER, ENOUGH, of_all_ranks, over, too_many
from realvr.training.examples import Encoder, all_of, share_of_batch
from realvr.training.rewards import PARSER, load_rewards, rated, true_answer
from realvr.training.rl_step import RlBatch, RlOptions, RlStep, options_from
from realvr.training.sft import load_backbone
from realvr.training.sources import TrainingData, training_data
from realvr.training.task import Collected, Metrics, Ranks


@dataclass
class RolloutBatch:
    """One microbatch after its rollout."""

    samples: list[Sample]
    prompts: list[Prompt]
    visual: VisualTokens
    rollout: Rollout
    rewards_BG: Tensor
    parts: dict[str, Tensor]  # each reward alone, (B, G)
    prototypes: list[Prototype]


class RlTask:
    """One optimizer step is ``optim.batch`` prompts over all ranks; each is rolled out ``group`` times."""

    def __init__(
        self,
        backbone: Backbone,
        settings: Any,
        ranks: Ranks,
        data: TrainingData,
        reference: Backbone | None = None,
    ) -> None:
        self.backbone, self.settings, self.ranks, self.data = backbone, settings, ranks, data
        self.share = share_of_batch(settings, ranks)
        self.adapters = Adapters(backbone, settings.lora)
        self.reference = reference
        self.options: RlOptions = options_from(settings)
        self.term_names: tuple[str, ...] = ("policy", "evidence") if self.uses_evidence else ("policy",)
        self.module = RlStep(backbone, self.options)
        self.rewards = load_rewards(settings.rewards)
        self.encoder = Encoder(backbone, settings.max_prompt, settings.data.keep_encoded)
        self.draws = self.encoder.draws
        self.samples: Mixture[Sample] = data.mixture(settings)  # the global order, on every rank
        self.bank = NegativeBank(settings.bank)
        self._kept: list[RlBatch] = []
        self._rolls: list[Rollout] | None = None
        self._before: dict[str, Any] = {}
        self._state: dict[str, Any] = {}

    @property
    def uses_evidence(self) -> bool:
        return self.options.lambda_ev != 0 and self.backbone.latents > 0

    def collect(self, step: int) -> Collected:
        with self.adapters.still():
            return self._collect_or_reuse(step)

    def _collect_or_reuse(self, step: int) -> Collected:
        if step % self.settings.updates_per_rollout == 0:
            if self._rolls is not None and not self._kept:  # resumed after the last update on the saved rollouts
                self._restore(self._state["after"])
            self._rolls = None
            return self._collect(step)
        if not self._kept:  # resumed between two updates on the same rollouts: they were saved, the rest is rebuilt
            self._collect(step - step % self.settings.updates_per_rollout)
        return Collected(self._kept)

    def _collect(self, step: int) -> Collected:
        """Take the next prompts, roll them out (unless that was done before a kill), and build the microbatches."""
        self._before = self._position()
        mine = self._take()
        size = self.settings.optim.microbatch
        first = self.ranks.rank * len(mine)
        saved: Sequence[Rollout | None] = self._rolls or [None] * (len(mine) // size)
        starts = range(0, len(mine), size)
        with self.ranks.full_parameters():
            rolled = [
                self._roll(mine[i : i + size], step, first + i, done) for i, done in zip(starts, saved, strict=True)
            ]
        everyone = [p for part in self.ranks.gather_objects([p for r in rolled for p in r.prototypes]) for p in part]
        micro, place = [], first
        for part in rolled:
            micro.append(self._batch(part, everyone, place, step))
            place += len(part.samples)
        sizes = [grpo.normalizer(m.real_BGS, self.options.reduction, self.options.max_new) for m in micro]
        total = sum(self.ranks.gather_objects(sum(float(size) for size in sizes)))
        for batch in micro:
            batch.policy_denominator = torch.tensor(max(total, 1e-12), device=self.backbone.device)
        self.bank.add(everyone)
        self._kept, self._rolls = micro, [part.rollout for part in rolled]
        return Collected(micro, self._metrics(rolled), self._table(rolled))

    # ------------------------------------------------------------------ data

    def _take(self) -> list[tuple[Sample, Prompt]]:
        """This rank's share of the next global batch.

        Every rank walks the same order, encodes a part of it and hears from the others which samples cannot be used, so
        that the global batch is the same whatever the number of ranks.
        """
        if self.settings.data.workers and not self.encoder.kept:
            self.encoder.encode_all(all_of(self.samples), self.settings.data.workers, sequences=False)
        wanted, rank, world = self.settings.optim.batch, self.ranks.rank, self.ranks.world
        share = self.share
        accepted: list[tuple[Sample, Prompt | None]] = []
        fruitless = 0
        stream = iter(self.samples)
        while len(accepted) < wanted:
            block = [next(stream) for _ in range(wanted - len(accepted))]
            size = -(-len(block) // world)
            self.draws.drawn += max(0, min((rank + 1) * size, len(block)) - rank * size)
            mine = {i: self._encode(block[i]) for i in range(rank * size, min((rank + 1) * size, len(block)))}
            usable = {i for part in self.ranks.gather_objects([i for i in mine if mine[i] is not None]) for i in part}
            accepted += [(sample, mine.get(i)) for i, sample in enumerate(block) if i in usable]
            fruitless = 0 if usable else fruitless + len(block)
            if fruitless >= min(ENOUGH, self.samples.epoch_size + 1):
                draws = of_all_ranks(self.ranks, self.draws)
                if fruitless > self.samples.epoch_size or over(draws, self.settings.data.max_dropped):
                    raise too_many(draws, self.settings, f"after {fruitless:,} rows without a usable one")
        own = accepted[rank * share : (rank + 1) * share]
        # After a rejection a share may hold samples that another rank has encoded.
        pairs = [(sample, prompt or self._encode(sample)) for sample, prompt in own]
        return [(sample, prompt) for sample, prompt in pairs if prompt is not None]

    def _encode(self, sample: Sample) -> Prompt | None:
        truth = answers.canonical_answer(sample.answer, sample.choices)
        if truth is None or not any(answer_tokens(self.backbone, truth, sample.choices)[1]):
            detail = f"{sample.source or sample.id}: answer {sample.answer!r:.60}"
            self.draws.reject(EMPTY_ANSWER, detail)
            return None
        return self.encoder.prompt(sample)

    # ------------------------------------------------------------------ rollout

    @torch.no_grad()
    def _roll(
        self, pairs: list[tuple[Sample, Prompt]], step: int, place: int, done: Rollout | None = None
    ) -> RolloutBatch:
        settings = self.settings
        samples, prompts = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        visual = self.backbone.encode_images([image for prompt in prompts for image in prompt.images])
        stop = ANSWER_END if settings.stop_at_answer else None
        sampling = Sampling(settings.temperature, settings.top_p, settings.top_k, settings.max_new, stop)
        seeds = [_seed(settings.run.seed, step, place + i) for i in range(len(pairs))]
        result = done or rollout(
            self.backbone,
            prompts,
            group=settings.group,
            sampling=sampling,
            seed=seeds,
            latents=self.backbone.latents,
            visual=visual,
            go_on=self.ranks.any if self.ranks.lockstep else None,
        )
        parts = {
            name: torch.tensor(
                [
                    [rated(name, reward, completion.text, sample) for completion in group]
                    for sample, group in zip(samples, result.completions, strict=True)
                ]
            )
            for name, (reward, _) in self.rewards.items()
        }
        total = torch.stack([parts[name] * weight for name, (_, weight) in self.rewards.items()]).sum(0)
        found = evidence.prototypes(samples, prompts, visual)
        return RolloutBatch(samples, prompts, visual, result, total, parts, found)

    @torch.no_grad()
    def _batch(self, part: RolloutBatch, everyone: list[Prototype], place: int, step: int) -> RlBatch:
        settings, device = self.settings, self.backbone.device
        ids, real, logp = part.rollout.tensors(device)
        chosen = [
            evidence.sample_negatives(
                place + i, everyone, list(self.bank.items), settings.negatives, settings.run.seed, step, sample.id
            )
            for i, sample in enumerate(part.samples)
        ]
        negatives, valid = evidence.pad(chosen, settings.negatives, self.backbone.width)
        groups = [self._answers(*pair) for pair in zip(part.samples, part.rollout.completions, strict=True)]
        answers_BYS, answers_real, content = pad_answers(groups)
        most = answers_BYS.shape[1]
        wrong = torch.tensor([[y < len(group) for y in range(1, most)] for group in groups], dtype=torch.bool)
        micro = RlBatch(
            batch=self.backbone.batch(part.prompts),
            visual=part.visual,
            latents_BKD=part.rollout.latents_BKD.to(device),
            ids_BGS=ids,
            real_BGS=real,
            old_logp_BGS=logp,
            advantages_BG=grpo.advantages(part.rewards_BG).to(device),
            policy_denominator=torch.ones((), device=device),
            positive_BD=torch.stack([p.vector_D for p in part.prototypes]).to(device),
            negatives_BMD=negatives.to(device),
            valid_BM=valid.to(device),
            answers_BYS=answers_BYS.to(device),
            answers_real_BYS=answers_real.to(device),
            content_BYS=content.to(device),
            wrong_BY=wrong.view(len(groups), most - 1).to(device),
            prompts_total=float(settings.optim.batch),
            names=[sample.id for sample in part.samples],
        )
        if self.options.beta:
            micro.ref_logp_BGS = self._reference(micro)
        return micro

    def _answers(self, sample: Sample, group: list[Completion]) -> list[tuple[list[int], list[bool]]]:
        """``Fmt(y*)`` and each distinct wrong answer of the group, as tokens with their content."""
        truth = true_answer(sample)
        wrong = answers.wrong(
            (PARSER.read(completion.text, sample.choices) for completion in group),
            truth,
            sample.choices,
            has_content=lambda answer: any(answer_tokens(self.backbone, answer, sample.choices)[1]),
        )
        return [answer_tokens(self.backbone, answer, sample.choices) for answer in (truth, *wrong)]

    def _reference(self, micro: RlBatch) -> Tensor:
        """Log-probabilities under the starting policy, at the same temperature, behind the same saved latents."""
        if self.reference is not None:
            return self._logp(self.reference, micro)
        with self.ranks.full_parameters(), self.adapters.reference():
            return self._logp(self.backbone, micro)

    def _logp(self, policy: Backbone, micro: RlBatch) -> Tensor:
        state, _ = prefill(policy, micro.batch, micro.visual)
        state, _ = splice(policy, state, micro.latents_BKD)
        forbidden, temperature = self.module.forbidden, self.options.temperature
        return score(policy, state, micro.ids_BGS, micro.real_BGS, temperature=temperature, forbidden=forbidden)[0]

    # ------------------------------------------------------------------ records

    def _metrics(self, rolled: list[RolloutBatch]) -> Metrics:
        device = self.backbone.device

        def pair(total: Any, count: float) -> tuple[Tensor, Tensor]:
            return torch.tensor(float(total), device=device), torch.tensor(float(count), device=device)

        flat = [completion for part in rolled for group in part.rollout.completions for completion in group]
        rewards = torch.cat([part.rewards_BG for part in rolled])
        metrics: Metrics = {"reward": pair(rewards.sum(), rewards.numel())}
        for name in self.rewards:
            values = torch.cat([part.parts[name] for part in rolled])
            metrics[f"reward/{Path(name).name}"] = pair(values.sum(), values.numel())
        metrics["groups/without_variance"] = pair((~grpo.varied(rewards)).sum(), len(rewards))
        lengths = [len(completion.ids) for completion in flat]
        metrics["completions/tokens"] = pair(sum(lengths), len(lengths))
        reasons = Counter(completion.finish for completion in flat)
        for reason in ("eos", "stop", "length"):
            metrics[f"completions/ended_by_{reason}"] = pair(reasons[reason], len(flat))
        prompt_tokens = sum(len(prompt) for part in rolled for prompt in part.prompts)
        metrics["prompts/tokens"] = pair(prompt_tokens, len(rewards))
        metrics["tokens"] = pair(sum(lengths) + prompt_tokens, 1 / self.ranks.world)
        return metrics | self.draws.metrics(device, self.ranks.world)

    def _table(self, rolled: list[RolloutBatch]) -> list[dict[str, Any]]:
        rows = []
        for part in rolled[:2]:
            for sample, group, rewards in zip(part.samples, part.rollout.completions, part.rewards_BG, strict=True):
                best = int(rewards.argmax())
                rows.append(
                    {
                        "sample": sample.id,
                        "question": sample.question,
                        "options": list(sample.choices),
                        "answer": sample.answer,
                        "completion": group[best].text,
                        "reward": float(rewards[best]),
                        "group_mean": float(rewards.mean()),
                        "parser": str(PARSER),
                        "judge": answers.JUDGE,
                    }
                )
        return rows[:4]

    # ------------------------------------------------------------------ life of the run

    def _position(self) -> dict[str, Any]:
        bank = self.bank.state_dict()
        return {"samples": self.samples.state_dict(), "bank": bank, **self.draws.state_dict()}

    def after_update(self) -> None:
        """Nothing moves with the parameters."""

    def state_dict(self) -> dict[str, Any]:
        """Where the data stands. Between two updates on the same rollouts: where it stood before them, and the
        rollouts, which a policy that has moved on could not repeat."""
        if self.settings.updates_per_rollout == 1 or self._rolls is None:
            return {**self._position(), "rollouts": []}
        return {**self._before, "rollouts": [_pack(each) for each in self._rolls], "after": self._position()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._kept = []
        self._rolls = [_unpack(each) for each in state["rollouts"]] or None
        if state["samples"]["sizes"] != self.samples.state_dict()["sizes"]:
            self._rolls = None  # other data: these rollouts answer other prompts
        self._state = state
        self._restore(state)

    def _restore(self, position: dict[str, Any]) -> None:
        self.samples.load_state_dict(position["samples"])
        self.bank.load_state_dict(position["bank"])
        self.draws.load_state_dict(position)

    def export(self, directory: Path) -> None:
        self.adapters.export(self.backbone, directory)

    def close(self) -> None:
        """Nothing goes on behind this task's back."""


def _pack(result: Rollout) -> dict[str, Any]:
    completions = [[vars(completion) for completion in group] for group in result.completions]
    latents = result.latents_BKD.detach().cpu()
    return {"completions": completions, "latents": latents, "temperature": result.temperature}


def _unpack(state: dict[str, Any]) -> Rollout:
    completions = [[Completion(**completion) for completion in group] for group in state["completions"]]
    return Rollout(completions, state["latents"], float(state["temperature"]))


def _seed(seed: int, step: int, place: int) -> int:
    return (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + place * 0x94D049BB133111EB + 1) % 2**63


def build_task(settings: Any, ranks: Ranks) -> RlTask:
    """Load the model that ``settings`` names (and the frozen starting policy, if the KL needs one); make its task."""
    _check_latents(settings)
    data = training_data(settings, ranks)
    backbone = load_backbone(settings, ranks)
    reference = None
    if settings.beta and not settings.lora.rank:
        reference = load_backbone(settings, ranks, announce=False)
        ranks.freeze(reference.model)
    return RlTask(backbone, settings, ranks, data, reference)


def _check_latents(settings: Any) -> None:
    """Stage 2 goes on with the K of Stage 1; Direct starts from a model that never had a span."""
    path, asked = settings.model.path, settings.model.latents
    trained = trained_latents(path)
    if settings.method == "direct" and trained:
        raise UserError(
            f"model.path: {path} went through Stage 1 (K = {trained}), but method direct starts from the pretrained "
            "backbone or from a Direct-SFT checkpoint: name it with --model.path (to train this one without its span: "
            "--method custom --lambda-ev 0 --model.latents 0)"
        )
    if asked != 0 and not trained:
        raise UserError(
            f"{path} was not trained with latent slots: train Stage 1 first (realvr train sft), or use --method direct"
        )
    if asked is None or asked == (trained or 0) or "model.latents" in settings.origin.flags:
        return
    raise UserError(
        f"{settings.origin.file or 'settings'}: model.latents is {asked}, but {path} was trained with K = {trained}: "
        f"remove model.latents from the file, or give --model.latents {asked} on the command line to change K"
    )
