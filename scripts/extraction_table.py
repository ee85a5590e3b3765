"""How the extraction policies read real answers: the table in docs/evaluation.md.

    python scripts/extraction_table.py FOLDER

FOLDER holds one ``.jsonl`` per model with answers to BLINK questions: ``idx``, ``gold``, ``text`` and ``official``, the
letter that BLINK's own extraction gave, "(Z)" where its judge model found none.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from realvr.answers import extract_choice

FOUR_POINTS = ["Point A", "Point B", "Point C", "Point D"]
SECOND_THIRD = ["the second image", "the third image"]
OPTIONS: dict[str, list[str]] = {
    "Art_Style": SECOND_THIRD,
    "Counting": ["?", "?", "?", "?"],  # differ from row to row, and the files do not hold them: letters only
    "Forensic_Detection": ["the first image", "the second image", "the third image", "the fourth image"],
    "Functional_Correspondence": FOUR_POINTS,
    "IQ_Test": ["picture A", "picture B", "picture C", "picture D"],
    "Jigsaw": SECOND_THIRD,
    "Multi-view_Reasoning": ["left", "right"],
    "Object_Localization": ["Box A", "Box B"],
    "Relative_Depth": ["A is closer", "B is closer"],
    "Relative_Reflectance": ["A is darker", "B is darker", "About the same"],
    "Semantic_Correspondence": FOUR_POINTS,
    "Spatial_Relation": ["yes", "no"],
    "Visual_Correspondence": FOUR_POINTS,
    "Visual_Similarity": SECOND_THIRD,
}


def options(idx: str) -> list[str]:
    """Option texts of the question ``val_<SubTask>_<n>``."""
    match = re.fullmatch(r"val_(.+)_\d+", idx)
    if match is None or match[1] not in OPTIONS:
        raise SystemExit(f"{idx}: not a BLINK question")
    return OPTIONS[match[1]]


def measure(file: Path) -> dict[str, int]:
    """Counts for one model's answers."""
    counts = dict.fromkeys(("rows", "decided", "same", "strict", "strict_same", "both", "both_same"), 0)
    for line in file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        official = row["official"].strip()[1:2]
        choices = options(row["idx"])
        rule = extract_choice(row["text"], choices, "blink-official")
        strict = extract_choice(row["text"], choices)
        counts["rows"] += 1
        counts["decided"] += rule is not None
        counts["same"] += rule is not None and rule == official
        counts["strict"] += strict is not None
        counts["strict_same"] += strict is not None and strict == official
        counts["both"] += rule is not None and strict is not None
        counts["both_same"] += rule is not None and rule == strict
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    files = sorted(parser.parse_args().folder.glob("*.jsonl"))
    print(
        "| answers of | rows | blink-official decides | = official letter | strict reads | = official letter |", end=""
    )
    print(" both read | agree |\n|---|---|---|---|---|---|---|---|")
    for file in files:
        c = measure(file)
        print(
            f"| {file.stem} | {c['rows']} | {c['decided']} | {c['same']} | {c['strict']} | {c['strict_same']} "
            f"| {c['both']} | {c['both_same']} |"
        )


if __name__ == "__main__":
    main()
