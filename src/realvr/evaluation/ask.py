"""One question to a model, through the same path that training and evaluation use (``realvr ask``)."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from realvr.answers import JUDGE, PARSERS, equal
from realvr.errors import UserError
from realvr.evaluation.putting import Put, parse_puts
from realvr.evaluation.showing import Drawn, save_walks, walk_rows
from realvr.imaging.saving import check_place
from realvr.latent.steps import check_steps
from realvr.runs.guard import note
from realvr.runs.progress import busy

if TYPE_CHECKING:
    from torch import Tensor

    from realvr.backbone.backbone import Backbone, VisualTokens
    from realvr.backbone.types import Prompt
    from realvr.latent.sampling import Sampling

INSTRUCTION = "Put the final answer inside <answer> and </answer>."


@dataclass(frozen=True)
class AskSettings:
    """Model, images and question, and how the answer is decoded.

    Args:
        model: Directory of a checkpoint, a hub id, or a packaged model: mini, mini-base, mini-direct, mini-short.
        what: Image files, then the question.
        latents: Number of latent slots K; by default the K the checkpoint was trained with. 0 decodes without a span.
        instruction: Text added after the question; give an empty string to ask the bare question.
        max_new: At most this many new tokens.
        temperature: 0 is greedy.
        top_p: Sample from the smallest set of tokens with this probability mass.
        top_k: Sample from the k likeliest tokens; 0 switches it off.
        seed: Seed for sampling.
        min_tokens: Fewest visual tokens per image (families with variable grids); by default those of its training.
        max_tokens: Most visual tokens per image (families with variable grids); by default those of its training.
        device: cpu, cuda, cuda:1, …; by default the GPU where there is one.
        dtype: float32, bfloat16, float16; by default the checkpoint's own.
        put: Also answer with a latent replaced by a place of the picture: STEP=ROW,COL (row and column of the visual
            tokens, counted from 1) or STEP=x0,y0,x1,y1 (a box in fractions); of several pictures, STEP=IMAGE:ROW,COL.
            May be repeated; the recurrence goes on from what was put.
        expected: The right answer. Also print whether the judge of evaluations finds the printed answer equal to it.
        show: Draw the walk of the latents into this picture (.png, .jpg, .webp): the visual token nearest to each. The
            walk with what --put has put stands beside it.
    """

    model: str | Path
    what: Sequence[str]
    latents: int | None = None
    instruction: str = INSTRUCTION
    max_new: int = 192
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    min_tokens: int | None = None
    max_tokens: int | None = None
    device: str | None = None
    dtype: str | None = None
    put: Sequence[str] = ()
    expected: str | None = None
    show: Path | None = None

    @property
    def puts(self) -> list[Put]:
        """What ``put`` names."""
        return parse_puts(self.put, len(self.what) - 1)

    @property
    def question(self) -> str:
        """The last of ``what``."""
        return self.what[-1]

    def check(self) -> None:
        """Refuse what can be seen to be wrong without opening a file."""
        if not self.what:
            raise UserError('no question: realvr ask MODEL IMAGE… "QUESTION"')
        if self.latents is not None and self.latents < 0:
            raise UserError(f"--latents is {self.latents}: the number of latent slots cannot be negative")
        if not self.question.strip():
            raise UserError('the question is empty: realvr ask MODEL IMAGE… "QUESTION"')
        if self.expected is not None and not self.expected.strip():
            raise UserError("--expected is empty: write the right answer, or leave it out")
        if os.path.isfile(self.question):
            raise UserError(
                f'{self.question} is a file, and no question follows it: realvr ask MODEL IMAGE… "QUESTION"'
            )
        if self.puts and self.latents is not None:
            check_steps([put.step for put in self.puts], self.latents, "--put")
        if self.show is not None:
            self._check_show(self.show)

    def _check_show(self, show: Path) -> None:
        if self.latents == 0:
            raise UserError("--show draws latents, and --latents 0 asks for none: leave one of the two out")
        if not self.what[:-1]:
            raise UserError('--show draws on a picture, and none is given: realvr ask MODEL IMAGE… "QUESTION"')
        check_place(show, "--show")


def ask(settings: AskSettings) -> dict[str, Any]:
    """Read a model and answer one question; what ``realvr ask --json`` prints."""
    from realvr.imaging.processing import open_image

    settings.check()
    images = [open_image(path) for path in settings.what[:-1]]  # a wrong path should not cost the reading of a model

    from realvr.backbone.backbone import Backbone
    from realvr.latent.sampling import Sampling
    from realvr.runs.quiet import quiet_transformers

    quiet_transformers()
    sampling = Sampling(settings.temperature, settings.top_p, settings.top_k, settings.max_new)
    limits = {"min_tokens": settings.min_tokens, "max_tokens": settings.max_tokens}
    with busy(f"reading {settings.model}"):
        backbone = Backbone.load(settings.model, device=settings.device, dtype=settings.dtype, **limits)
    latents = backbone.latents if settings.latents is None else settings.latents
    _check_span(settings, backbone, latents)
    text = f"{settings.question}\n{settings.instruction}" if settings.instruction else settings.question
    replies = _replies(backbone, images, text, latents, sampling, settings.seed, settings.puts)
    result = replies.result
    if settings.show is not None:
        _show(settings, settings.show, images, replies)
    if settings.expected is not None:
        for reply in (result, *([result["put"]] if settings.puts else [])):
            reply["correct"] = bool(equal(reply["answer"], settings.expected))
        result |= {"expected": settings.expected, "judge": JUDGE}
    if backbone.markers_added and latents:
        note(
            f"{settings.model} was not trained with latent slots, so its markers are untrained; "
            "train Stage 1 first, or ask with --latents 0"
        )
    elif not backbone.markers_added and latents != backbone.latents:
        note(f"{settings.model} was trained with K = {backbone.latents}; K = {latents} was chosen explicitly")
    return result


def _check_span(settings: AskSettings, backbone: Backbone, latents: int) -> None:
    """Refuse what looks into a span, for a model that has none."""
    if settings.puts and (backbone.markers_added or not latents):
        raise UserError(
            f"--put: {settings.model} has no trained latent span (K = 0) to put anything into: name a model of Stage 1 "
            "or 2, and do not ask for --latents 0"
        )
    check_steps([put.step for put in settings.puts], latents, "--put")
    # Slots that --latents asks for are there to be seen, trained or not.
    if settings.show is not None and (not latents or (backbone.markers_added and settings.latents is None)):
        raise UserError(
            f"--show: {settings.model} was not trained with latent slots, so there is no walk to draw: train Stage 1 "
            "first, or give --latents K to see that of untrained slots"
        )


def _show(settings: AskSettings, path: Path, images: list[Any], replies: _Replies) -> None:
    """Draw the walk behind each reply, and add it to the reply."""
    from realvr.latent.walk import walk

    drawn = []
    for reply, latents_KD in zip((replies.result, replies.result.get("put", {})), replies.latents, strict=False):
        found = walk(latents_KD, replies.visual.features_ND, replies.visual.grids)
        put = {place["step"]: place["name"] for place in reply.get("places", [])}
        drawn.append(Drawn(found, str(reply["answer"]), put))
        reply["walk"] = walk_rows(found)
    save_walks(path, images, settings.question, drawn)
    replies.result["show"] = str(path)


@dataclass(frozen=True)
class _Replies:
    """What ``realvr ask --json`` prints, and what was computed on the way."""

    result: dict[str, Any]
    visual: VisualTokens
    latents: list[Tensor]
    """z (K, D) of the reply, and of that with places put into its span where there is one."""


def answer(
    backbone: Backbone,
    images: list[Any],
    text: str,
    latents: int,
    sampling: Sampling,
    seed: int = 0,
    puts: Sequence[Put] = (),
) -> dict[str, Any]:
    """Answer one question with a model that has been read; with ``puts``, once more with these places in its span."""
    return _replies(backbone, images, text, latents, sampling, seed, puts).result


def _replies(
    backbone: Backbone,
    images: list[Any],
    text: str,
    latents: int,
    sampling: Sampling,
    seed: int,
    puts: Sequence[Put],
) -> _Replies:
    from realvr.backbone.types import Turn
    from realvr.latent.regions import region_vector

    begun = time.perf_counter()
    prompt = backbone.prompt([Turn("user", text, images=list(images))])
    visual = backbone.encode_images(prompt.images)
    areas = [put.area(visual.grids[put.image]) for put in puts]
    options = {"sampling": sampling, "latents": latents, "seed": seed, "visual": visual}
    result, own_KD = _reply(backbone, prompt, options)
    spans = [own_KD]
    if puts:
        features = visual.per_image()
        options["interventions"] = {
            put.step: region_vector(features[put.image], visual.grids[put.image], area)
            for put, area in zip(puts, areas, strict=True)
        }
        steered, put_KD = _reply(backbone, prompt, options)
        spans.append(put_KD)
        result["put"] = steered | {
            "places": [
                {"step": put.step, "image": put.image + 1, "box": list(area), "name": str(put)}
                for put, area in zip(puts, areas, strict=True)
            ]
        }
    result |= {
        "parser": str(PARSERS["ask"]),
        "latents": latents,
        "seconds": round(time.perf_counter() - begun, 4),
        "family": backbone.family.name,
        "prompt_tokens": len(prompt),
        "visual_tokens": [image.tokens for image in prompt.images],
    }
    return _Replies(result, visual, spans)


def _reply(backbone: Backbone, prompt: Prompt, options: dict[str, Any]) -> tuple[dict[str, Any], Tensor]:
    """One rollout of the prompt, as JSON values, and its latents (K, D)."""
    from realvr.latent.group_rollout import rollout

    result = rollout(backbone, [prompt], **options)
    completion = result.completions[0][0]
    return {
        "answer": PARSERS["ask"].read(completion.text, ()),
        "text": completion.text,
        "latent_norms": [round(norm, 6) for norm in result.latents_BKD[0].float().norm(dim=-1).tolist()],
        "finish_reason": completion.finish,
        "new_tokens": len(completion.ids),
    }, result.latents_BKD[0]
