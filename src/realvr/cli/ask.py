"""``realvr ask``: one question, through the same path that training and evaluation use."""

from __future__ import annotations

import json as json_module
import os
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from realvr.answers import JUDGE, PARSERS, equal
from realvr.errors import UserError
from realvr.runs.progress import busy

if TYPE_CHECKING:
    from realvr.backbone.backbone import Backbone
    from realvr.latent.sampling import Sampling

INSTRUCTION = "Put the final answer inside <answer> and </answer>."


def ask(
    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")],
    what: Annotated[
        tyro.conf.Positional[tuple[str, ...]],
        tyro.conf.arg(metavar="IMAGE… QUESTION", help_behavior_hint="(required)"),
    ],
    latents: int | None = None,
    instruction: str = INSTRUCTION,
    max_new: int = 192,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    min_tokens: int | None = None,
    max_tokens: int | None = None,
    device: str | None = None,
    dtype: str | None = None,
    json: bool = False,
    expected: str | None = None,
) -> int:
    """Ask a model a question about one or more images and print its answer.

    The model reasons in K latent slots before it writes. The last argument is the question, those before it are image
    files; no image at all is allowed.

    Examples:
      realvr ask runs/tiny photo.png "What colour is the circle?"
      realvr ask runs/tiny before.png after.png "What changed?" --latents 0
      realvr ask Qwen/Qwen2.5-VL-7B-Instruct photo.jpg "How many birds?" --json

    Args:
        model: Directory of a checkpoint, a hub id, or mini or mini-base (packaged).
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
        json: Print one JSON object: answer, text, latents, latent_norms, finish_reason, seconds, and more.
        expected: The right answer. Also print whether the model's equals it, as an evaluation would decide.
    """
    if not what:
        raise UserError('no question: realvr ask MODEL IMAGE… "QUESTION"')
    if latents is not None and latents < 0:
        raise UserError(f"--latents is {latents}: the number of latent slots cannot be negative")
    *paths, question = what
    if not question.strip():
        raise UserError('the question is empty: realvr ask MODEL IMAGE… "QUESTION"')
    if os.path.isfile(question):
        raise UserError(f'{question} is a file, and no question follows it: realvr ask MODEL IMAGE… "QUESTION"')
    from realvr.imaging.processing import open_image

    images = [open_image(path) for path in paths]  # before the model is read: a wrong path should not cost minutes
    from realvr.backbone.backbone import Backbone
    from realvr.latent.sampling import Sampling
    from realvr.runs.quiet import quiet_transformers

    quiet_transformers()
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k, max_new=max_new)
    with busy(f"reading {model}"):
        backbone = Backbone.load(model, device=device, dtype=dtype, min_tokens=min_tokens, max_tokens=max_tokens)
    count = backbone.latents if latents is None else latents
    text = f"{question}\n{instruction}" if instruction else question
    result = answer(backbone, images, text, count, sampling, seed)
    if backbone.markers_added and count:
        print(
            f"realvr: note: {model} was not trained with latent slots, so its markers are untrained; "
            "train Stage 1 first, or ask with --latents 0",
            file=sys.stderr,
        )
    elif count not in (0, backbone.latents):
        print(
            f"realvr: note: {model} was trained with K = {backbone.latents}; K = {count} was chosen explicitly",
            file=sys.stderr,
        )
    if expected is not None:
        result |= {"expected": expected, "correct": bool(equal(result["answer"], expected)), "judge": JUDGE}
    print(json_module.dumps(result, ensure_ascii=False) if json else result["answer"])
    if expected is not None and not json:
        print(f"{'equals' if result['correct'] else 'does not equal'} the expected answer, {expected}")
    return 0


def answer(
    backbone: Backbone, images: list[Any], text: str, latents: int, sampling: Sampling, seed: int = 0
) -> dict[str, Any]:
    """Answer one question; what ``realvr ask --json`` prints."""
    from realvr.backbone.types import Turn
    from realvr.latent.group_rollout import rollout

    begun = time.perf_counter()
    prompt = backbone.prompt([Turn("user", text, images=list(images))])
    result = rollout(backbone, [prompt], sampling=sampling, latents=latents, seed=seed)
    completion = result.completions[0][0]
    return {
        "answer": PARSERS["ask"].read(completion.text, ()),
        "parser": str(PARSERS["ask"]),
        "text": completion.text,
        "latents": latents,
        "latent_norms": [round(norm, 6) for norm in result.latents_BKD[0].float().norm(dim=-1).tolist()],
        "finish_reason": completion.finish,
        "seconds": round(time.perf_counter() - begun, 4),
        "family": backbone.family.name,
        "prompt_tokens": len(prompt),
        "visual_tokens": [image.tokens for image in prompt.images],
        "new_tokens": len(completion.ids),
    }
