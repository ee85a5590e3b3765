"""Training data from boxes that a labelling tool has written (``realvr data import``). No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Literal

from realvr.data.export import write
from realvr.data.labelled import Losses, Picture, opened, read_annotations
from realvr.data.sample import Sample
from realvr.data.template_questions import TEMPLATES, JoinedQuestions, Template, TemplateQuestions
from realvr.errors import UserError
from realvr.runs.progress import Bar


@dataclass(frozen=True)
class ImportSettings:
    """Annotation files, and where their questions come from.

    Args:
        layout: coco (an instances JSON file) or voc (XML files, or folders of them).
        files: Annotation files.
        out: JSON lines to write; images go into images/ beside it.
        questions: Questions as .jsonl, .json or .csv with image, question and answer; category (whose boxes are the
            evidence) and choices may be there. In a .csv several values have | between them.
        templates: Which templates to use; by default all without --questions and none with it.
        images: Folder that holds the images; by default that of the annotations or, for VOC, JPEGImages or images
            beside it.
        per_image: Most questions of each template for a picture.
        seed: Seed of the draws.
        link: Link image files instead of copying them.
    """

    layout: Literal["coco", "voc"]
    files: Sequence[Path]
    out: Path
    questions: Path | None = None
    templates: tuple[Template, ...] | None = None
    images: Path | None = None
    per_image: int = 1
    seed: int = 0
    link: bool = False

    def check(self) -> None:
        """Refuse what can be seen to be wrong without reading a file."""
        if self.per_image < 1:
            raise UserError(f"--per-image {self.per_image}: at least 1 is expected")
        if not self.files:
            raise UserError("no file named; name the annotation files")
        inputs = (*self.files, *([self.questions] if self.questions else []))
        if any(self.out.exists() and path.exists() and self.out.samefile(path) for path in inputs):
            raise UserError(f"{self.out}: would overwrite an input; choose another file")


@dataclass(frozen=True)
class Imported:
    """What was found and written."""

    rows: int
    """Rows written; with 0 a file that was there is left as it is."""
    counts: Counter[str]
    """Pictures, boxes, and questions of each source."""
    categories: Sequence[str]
    losses: Losses


def import_boxes(settings: ImportSettings) -> Imported:
    """Read annotations, ask questions about them, and write our JSON lines."""
    settings.check()
    losses, counts = Losses(), Counter[str]()
    pictures, categories = read_annotations(settings.layout, list(settings.files), settings.images, losses)
    joined = JoinedQuestions(settings.questions, pictures, categories, losses) if settings.questions else None
    usual = () if settings.questions else TEMPLATES
    templates = usual if settings.templates is None else settings.templates
    asked = TemplateQuestions(categories, templates, settings.seed, settings.per_image)
    with Bar("data import", len(pictures)) as bar:
        samples = _unique(_questions(opened(pictures, losses, bar.advance), asked, joined, counts))
        first, rows = next(samples, None), 0
        if first is not None:
            try:
                rows = write(chain([first], samples), "jsonl", settings.out, link=settings.link).rows
            except OSError as error:
                raise UserError(f"{settings.out}: cannot be written ({error.strerror or error})") from None
    return Imported(rows, counts, categories, losses)


def _questions(
    pictures: Iterator[Picture], asked: TemplateQuestions, joined: JoinedQuestions | None, counts: Counter[str]
) -> Iterator[Sample]:
    for picture in pictures:
        counts["pictures"] += 1
        counts["boxes"] += sum(map(len, picture.boxes.values()))
        for sample in (*(joined.about(picture) if joined else ()), *asked.about(picture)):
            counts[f"of {sample.tags.get('template', 'the questions file')}"] += 1
            yield sample
    if joined is not None:
        joined.finish()


def _unique(samples: Iterator[Sample]) -> Iterator[Sample]:
    """Under ids of their own: two folders may hold pictures of one name."""
    seen: Counter[str] = Counter()
    for sample in samples:
        seen[sample.id] += 1
        yield replace(sample, id=f"{sample.id}#{seen[sample.id]}") if seen[sample.id] > 1 else sample
