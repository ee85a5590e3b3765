"""Negatives never come from the picture of the question, in whatever file and at whatever resolution it comes again."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import stage_runs
from golden_cases import CaseImage, make_image
from realvr.backbone import Backbone
from realvr.data.sample import Box, ImageRef, Message, Sample
from realvr.diagnostics.pairs import Pair, unrelated
from realvr.evaluation.ablation import donors
from realvr.latent.prototypes import prototypes, sample_negatives
from realvr.training.examples import Encoder


def as_file(image: Image.Image, format: str = "PNG", **options: Any) -> ImageRef:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return ImageRef.from_bytes(f"{format} {len(buffer.getvalue())}", buffer.getvalue())


def question(name: str, *images: ImageRef, words: str = "What is it?") -> Sample:
    boxes = [Box(0, (0.0, 0.0, 0.5, 0.5))]
    return Sample(name, list(images), [Message("user", words, tuple(range(len(images))))], "red", boxes=boxes)


@pytest.fixture(scope="module")
def backbone(untrained: Path) -> Backbone:
    return Backbone.load(untrained, dtype=torch.float32)


def test_a_picture_at_another_resolution_is_no_negative(backbone: Backbone) -> None:
    """A long question leaves its picture fewer visual tokens: other pixels for the model, the same picture."""
    image, other = make_image(CaseImage(196, 196, 0)), make_image(CaseImage(196, 196, 1))
    long = " ".join(["Look at every corner of it."] * 4)
    samples = [
        question("short", as_file(image)),
        question("long", as_file(image), words=long),
        question("o", as_file(other)),
    ]
    wide = Encoder(backbone, backbone.context_length)
    limit = max(len(wide.prompt(sample)) for sample in samples) - 5
    encoder = Encoder(backbone, limit)
    prompts = [encoder.prompt(sample) for sample in samples]
    grids = [prompt.images[0].grid for prompt in prompts]
    assert grids[0] != grids[1], "the case: one picture, two resolutions"
    visual = backbone.encode_images([image for prompt in prompts for image in prompt.images])
    found = prototypes(samples, prompts, visual)
    for own, expected in ((0, [2]), (1, [2])):
        for step in range(5):
            drawn = sample_negatives(own, found, [], 16, 0, step, samples[own].id)
            assert len(drawn) == len(expected)
            assert all(torch.equal(vector, found[i].vector_D) for vector, i in zip(drawn, expected, strict=True))
    drawn = sample_negatives(2, found, [], 16, 0, 0, "o")
    assert len(drawn) == 1, "one picture gives one negative, at whichever resolution"
    assert len(sample_negatives(0, found[:1], found[1:2], 16, 0, 0, "short")) == 0, (
        "nor does it come back from the bank"
    )


def test_a_picture_in_another_file_is_no_negative(backbone: Backbone) -> None:
    image = make_image(CaseImage(84, 56, 0))
    turned = Image.Exif()
    turned[0x0112] = 6
    lying = image.transpose(Image.Transpose.ROTATE_90)
    files = [as_file(image), as_file(image, "BMP"), as_file(lying, "PNG", exif=turned), as_file(image.convert("RGBA"))]
    samples = [question(f"q{number}", file) for number, file in enumerate(files)]
    encoder = Encoder(backbone, backbone.context_length)
    prompts = [encoder.prompt(sample) for sample in samples]
    found = prototypes(
        samples, prompts, backbone.encode_images([image for prompt in prompts for image in prompt.images])
    )
    assert all(sample_negatives(own, found, found, 16, 0, 0, "q") == [] for own in range(4))


def test_identities_are_computed_once_per_run(
    plain: Path, untrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: Path
) -> None:
    """Several steps over the same four pictures, none of them kept encoded."""
    from realvr.imaging import processing as images
    from realvr.imaging import reference

    counted: list[int] = []
    real = images.picture_hash

    def count(image: Image.Image) -> str:
        counted.append(1)
        return real(image)

    monkeypatch.setattr(images, "picture_hash", count)
    monkeypatch.setattr(reference, "picture_hash", count)
    raw = stage_runs.configure("rl", untrained, data, tmp_path, data={"keep_encoded": False})
    task, _, _ = stage_runs.make("rl", raw)
    for step in range(3):
        task.collect(step)
    assert len(counted) == len({ref.id for sample in task.samples.sources[0] for ref in sample.images}) == 4


# ---------------------------------------------------------------------- controls


def made_pairs(originals: list[ImageRef]) -> list[Pair]:
    """Each edited picture is one of its own."""
    found = []
    for number, original in enumerate(originals):
        edited = as_file(make_image(CaseImage(40, 40, 10 + number)))
        views = [
            Sample(f"{number}{view}", [image], [Message("user", "?", (0,))], answer, pair=str(number))
            for view, image, answer in (("a", original, "yes"), ("b", edited, "no"))
        ]
        found.append(Pair("e", *views))
    return found


def test_a_control_shows_another_picture() -> None:
    """The candidate half way round is the same picture in another file; the next one is not."""
    image, other = make_image(CaseImage(40, 40, 0)), make_image(CaseImage(40, 40, 1))
    pairs = made_pairs([as_file(image), as_file(image, "BMP"), as_file(other)])
    assert [control.id for control in unrelated(pairs)] == ["2", "2", "0"]


def test_donors_show_other_pictures() -> None:
    image, other = make_image(CaseImage(40, 40, 0)), make_image(CaseImage(40, 40, 1))
    files = [as_file(image), as_file(image, "BMP"), as_file(other), as_file(other, "TIFF")]
    samples = [question(f"q{number}", file) for number, file in enumerate(files)]
    for seed in range(8):
        found = donors(samples, seed)
        assert {found["q0"], found["q1"]} <= {"q2", "q3"} and {found["q2"], found["q3"]} <= {"q0", "q1"}
