"""Data files in another layout (``realvr data export``). No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from realvr.data.checking import Policy, same_file
from realvr.data.export import write
from realvr.data.export_common import Written
from realvr.data.readers.base import BoxUnit, ReadOptions
from realvr.data.readers.jsonl import column_pairs
from realvr.data.reading import Report, read
from realvr.errors import UserError
from realvr.runs.progress import Bar


@dataclass(frozen=True)
class ExportSettings:
    """Which file to convert, and to what.

    Args:
        path: Data file or folder in any supported format, or a dataset of the hub, hf:OWNER/NAME#SPLIT.
        out: File to write, or folder for mmvp and blink.
        to: jsonl, visual-cot, lvr, virl39k, mmvp, blink, hr-bench, mme-realworld or vstar.
        format: Name of the input's format, where it should not be detected.
        policy: skip leaves out bad rows and samples that the layout cannot hold; strict stops at the first.
        images: Folder that image paths are relative to and stay inside; by default that of the data file. / admits
            absolute paths.
        boxes: What the numbers of boxes are; by default the format's own rule (fractions for our JSON lines).
        link: Link image files into the new folder instead of copying them (hard links; symbolic ones on another disk).
        columns: For rows of questions and answers in columns with other names: question=problem answer=solution.
        split: Split to read from a BLINK tree.
        mmvp_corrected: Correct the answers that the original MMVP file swaps at Index 99/100 and 279/280.
    """

    path: Path
    out: Path
    to: str
    format: str | None = None
    policy: Policy = "skip"
    images: Path | None = None
    boxes: BoxUnit | None = None
    link: bool = False
    split: str = "val"
    mmvp_corrected: bool = False
    columns: Sequence[str] = ()


@dataclass(frozen=True)
class Exported:
    """The files of the new layout, and what of the old ones could not be used."""

    written: Written
    report: Report


def export(settings: ExportSettings) -> Exported:
    """Write the samples of a file in another layout."""
    path, out, to, report = settings.path, settings.out, settings.to, Report()
    options = ReadOptions(
        settings.images,
        settings.policy,
        "exists",
        split=settings.split,
        mmvp_corrected=settings.mmvp_corrected,
        boxes=settings.boxes,
        columns=column_pairs(settings.columns),
    )
    try:
        if same_file(out, path):
            raise UserError(f"{out}: the export would overwrite its own input; choose another file")
        if to.lower() in ("mmvp", "blink") and out.is_dir() and any(out.iterdir()):
            raise UserError(f"{out}: the folder is not empty; name a new one, so that no file there is overwritten")
        with Bar(f"{path} as {to}", 1.0, share=True) as bar:
            report.on_progress = bar.set
            samples = read(path, settings.format, options, report)
            written = write(samples, to, out, strict=settings.policy == "strict", link=settings.link)
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror or error})") from None
    return Exported(written, report)
