"""``realvr data import``: boxes of labelling tools, with questions, as our JSON lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.markup import escape

from realvr.data.export import write
from realvr.data.labelled import Losses, Picture, opened, read_annotations
from realvr.data.sample import Sample
from realvr.data.template_questions import TEMPLATES, JoinedQuestions, Template, TemplateQuestions
from realvr.errors import UserError
from realvr.runs.progress import Bar

WRITTEN, NOTHING_WRITTEN = 0, 1


def import_boxes(
    layout: Annotated[tyro.conf.Positional[Literal["coco", "voc"]], tyro.conf.arg(help_behavior_hint="(required)")],
    files: Annotated[tyro.conf.Positional[list[Path]], tyro.conf.arg(metavar="FILE", help_behavior_hint="(required)")],
    out: Path,
    questions: Path | None = None,
    templates: tuple[Template, ...] | None = None,
    images: Path | None = None,
    per_image: int = 1,
    seed: int = 0,
    link: bool = False,
) -> int:
    """Make training data from boxes that a labelling tool has written.

    Without --questions every picture gets questions from templates, whose answers follow from its boxes: whether it
    shows any object of a category (as often no as yes), how many there are, and in which quarter of it a single one is.
    Such rows are tagged "question": "template". With --questions FILE the rows of that file are joined to the pictures;
    their evidence is every box of the category they name.

    Exit code: 0 written, 1 nothing to write, 2 bad input.

    Examples:
      realvr data import coco instances_val2017.json --images val2017/ --out coco/val.jsonl --link
      realvr data import voc Annotations/ --images JPEGImages/ --out mine/train.jsonl
      realvr data import voc Annotations/ --questions questions.csv --out mine/train.jsonl

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
    if per_image < 1:
        raise UserError(f"--per-image {per_image}: at least 1 is expected")
    if not files:
        raise UserError("no file named; name the annotation files")
    if any(
        out.exists() and path.exists() and out.samefile(path) for path in (*files, *([questions] if questions else []))
    ):
        raise UserError(f"{out}: would overwrite an input; choose another file")
    chosen = templates if templates is not None else () if questions else TEMPLATES
    losses = Losses()
    pictures, categories = read_annotations(layout, list(files), images, losses)
    joined = JoinedQuestions(questions, pictures, categories, losses) if questions else None
    asked = TemplateQuestions(categories, chosen, seed, per_image)
    counts: Counter[str] = Counter()
    with Bar("data import", len(pictures)) as bar:
        found = opened(pictures, losses, bar.advance)
        rows = _unique(_questions(found, asked, joined, counts))
        done = f"no row to write: {out} is left as it is" if out.exists() else "no row to write"
        first = next(rows, None)
        if first is not None:
            try:
                written = write(chain([first], rows), "jsonl", out, link=link)
            except OSError as error:
                raise UserError(f"{out}: cannot be written ({error.strerror or error})") from None
            done = f"wrote {written.rows:,} rows to {out}"
    _print(counts, categories, losses, done)
    return WRITTEN if first is not None else NOTHING_WRITTEN


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


def _print(counts: Counter[str], categories: Sequence[str], losses: Losses, done: str) -> None:
    console = Console(highlight=False, soft_wrap=True)
    made = ", ".join(f"{count:,} {name}" for name, count in counts.items() if name.startswith("of "))
    console.print(f"{counts['pictures']:,} pictures with {counts['boxes']:,} boxes of {len(categories):,} categories")
    console.print(escape(done + (f" ({made})" if made else "")))
    for reason, count in losses.counts.most_common():
        console.print(f"left out {count:,} [bold]{reason}[/]: first: {escape(losses.first[reason])}")
