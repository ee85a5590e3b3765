"""What fills the span instead of the model's own latents: does the model use them?

``mean`` puts the mean over the benchmark's questions at each of the K positions. ``other`` puts the latents of another
question of the same benchmark, about other pictures and not of the same pair or cycle. ``noise`` puts Gaussian noise
with the norms of the question's own latents. All keep the prompt, K and the decoding; only the contents of the span
differ from ``own``.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from realvr.data.sample import Sample
from realvr.evaluation.questions import units
from realvr.imaging.pictures import picture_keys


def mean_latents(spans: Iterable[Tensor]) -> Tensor:
    """(K, D) float32: the mean per position over the spans (K, D) of questions, added in float64 in the order given.
    One span is held at a time."""
    total: Tensor | None = None
    count = 0
    for latents_KD in spans:
        total = latents_KD.double() if total is None else total + latents_KD.double()
        count += 1
    if total is None:
        raise ValueError("no latents to average")
    return (total / count).float()


def matched_noise(own_KD: Tensor, seed: int, question: str) -> Tensor:
    """(K, D) float32: Gaussian directions, slot t as long as the question's own latent t.

    A function of (seed, question id) and the own latents alone, so that neither batches nor processes nor a resumed
    run change it.
    """
    generator = torch.Generator().manual_seed(int.from_bytes(_rank(seed, f"noise/{question}")[:8], "big") >> 1)
    noise_KD = torch.randn(own_KD.shape, generator=generator, dtype=torch.float64)
    length_K1 = noise_KD.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    return (noise_KD / length_K1 * own_KD.double().norm(dim=-1, keepdim=True)).float()


def donors(
    samples: Sequence[Sample], seed: int = 0, pictures: Mapping[str, Sequence[Hashable]] | None = None
) -> dict[str, str]:
    """For each question id the id of the question whose latents it gets in ``other``.

    ``pictures`` (question id to a key of each picture) saves decoding the images again to tell which are the same.

    Questions that share an image, a pair or an option cycle form a group. The groups are put in an order given by a
    hash of (seed, ids), their members side by side, and everyone gets the latents of the one m places further in the
    circle, m being the size of the largest group: nobody those of the own group, and everyone's latents are used once.
    Where one group holds more than half of the questions that is impossible; each then gets those of the next question
    outside the own group, and some are used more often. A question without another group gets none.
    """
    groups = sorted(_groups(samples, pictures), key=lambda group: _rank(seed, group[0].id))
    circle = [(number, sample.id) for number, group in enumerate(groups) for sample in group]
    step = max((len(group) for group in groups), default=0)
    found: dict[str, str] = {}
    for place, (group, question) in enumerate(circle):
        for ahead in range(step, step + len(circle)):
            other, donor = circle[(place + ahead) % len(circle)]
            if other != group:
                found[question] = donor
                break
    return found


def _rank(seed: int, question: str) -> bytes:
    return hashlib.sha256(f"{seed}/{question}".encode("utf-8", "backslashreplace")).digest()


def _groups(samples: Sequence[Sample], pictures: Mapping[str, Sequence[Hashable]] | None) -> list[list[Sample]]:
    """Questions connected by shared images, pairs or cycles, in the order of their first members."""
    owner = list(range(len(samples)))

    def root(number: int) -> int:
        while owner[number] != number:
            owner[number] = owner[owner[number]]
            number = owner[number]
        return number

    def join(numbers: Iterable[int]) -> None:
        first, *rest = (root(number) for number in numbers)
        for number in rest:
            owner[root(number)] = root(first)

    places = {sample.id: number for number, sample in enumerate(samples)}
    for unit in units(samples):
        join(places[sample.id] for sample in unit)
    shown = [(number, image) for number, sample in enumerate(samples) for image in sample.images]
    by_image: dict[Hashable, list[int]] = defaultdict(list)
    if pictures is not None and all(len(pictures.get(sample.id, ())) == len(sample.images) for sample in samples):
        keys = [key for sample in samples for key in pictures[sample.id]]
    else:
        keys = picture_keys([image for _, image in shown])
    for (number, _), key in zip(shown, keys, strict=True):
        by_image[key].append(number)
    for numbers in by_image.values():
        join(numbers)
    found: dict[int, list[Sample]] = defaultdict(list)
    for number, sample in enumerate(samples):
        found[root(number)].append(sample)
    return list(found.values())
