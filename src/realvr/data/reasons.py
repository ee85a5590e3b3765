"""Why a row is dropped or repaired, or a file refused: one named constant each, with the sentence a person reads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from realvr.errors import UserError
from realvr.imaging.files import IMAGE_BROKEN, IMAGE_MISSING, IMAGE_NOT_A_FILE, IMAGE_TOO_LARGE
from realvr.imaging.reference import BASE64_INVALID

# Files
FILE_MISSING = "file_missing"
FILE_EMPTY = "file_empty"
FILE_UNREADABLE = "file_unreadable"
NOT_A_FILE = "not_a_file"
FORMAT_UNKNOWN = "format_unknown"
WRONG_COLUMNS = "wrong_columns"
# Rows
NOT_UTF8 = "not_utf8"
JSON_INVALID = "json_invalid"
ROW_TRUNCATED = "row_truncated"
ROW_MALFORMED = "row_malformed"
ROW_TOO_DEEP = "row_too_deep"
CELL_UNREADABLE = "cell_unreadable"
DUPLICATE_ID = "duplicate_id"
ID_INVALID = "id_invalid"
FIELD_MISSING = "field_missing"
FIELD_TYPE = "field_type"
QUESTION_EMPTY = "question_empty"
ANSWER_EMPTY = "answer_empty"
ANSWER_HIDDEN = "answer_hidden"
ANSWER_NOT_IN_CHOICES = "answer_not_in_choices"
CHOICES_MALFORMED = "choices_malformed"
CHOICES_EQUAL = "choices_equal"
CHOICE_TYPE = "choice_type"
BOXED_UNBALANCED = "boxed_unbalanced"
# Images
IMAGE_LIST_EMPTY = "image_list_empty"
IMAGE_PATH_ESCAPES = "image_path_escapes"
LISTED_PATH_ESCAPES = "listed_path_escapes"
IMAGE_COUNT_MISMATCH = "image_count_mismatch"
# Boxes
BOX_MALFORMED = "box_malformed"
BOX_IN_PIXELS = "box_in_pixels"
BOX_NOT_SHOWN = "box_not_shown"
BOX_DEGENERATE = "box_degenerate"
BOX_OUTSIDE = "box_outside"
BOX_INVERTED = "box_inverted"

FILE_REASONS: dict[str, str] = {
    FILE_MISSING: "no such file or folder",
    FILE_EMPTY: "the file holds no bytes",
    FILE_UNREADABLE: "the file cannot be opened or is not what its name says",
    NOT_A_FILE: "a folder where a file is expected",
    NOT_UTF8: "the file is not UTF-8",
    FORMAT_UNKNOWN: "the layout is none of the supported formats",
    WRONG_COLUMNS: "column names are not those of the format",
}

DROP_REASONS: dict[str, str] = {
    NOT_UTF8: "the row is not UTF-8",
    JSON_INVALID: "the row is not valid JSON",
    ROW_TRUNCATED: "the row ends early",
    ROW_MALFORMED: "the row has too many columns, or is not an object",
    ROW_TOO_DEEP: "lists and objects are nested too deeply",
    CELL_UNREADABLE: "a parquet cell holds a value that cannot be converted",
    DUPLICATE_ID: "an earlier row has the same id",
    ID_INVALID: "the id is empty, or neither text nor a whole number",
    FIELD_MISSING: "a required field is absent",
    FIELD_TYPE: "a field has the wrong type",
    QUESTION_EMPTY: "the question is empty",
    ANSWER_EMPTY: "the answer is empty",
    ANSWER_HIDDEN: "the answer is withheld (test split)",
    ANSWER_NOT_IN_CHOICES: "the answer is none of the options",
    CHOICES_MALFORMED: "options are missing or empty, or their letters are not in order",
    CHOICES_EQUAL: "two options are the same",
    CHOICE_TYPE: "an option is neither text nor a number",
    BOXED_UNBALANCED: "\\boxed{ without its closing brace",
    IMAGE_LIST_EMPTY: "the row names no image",
    IMAGE_PATH_ESCAPES: "the image path leaves the image folder",
    LISTED_PATH_ESCAPES: "a meta file names a data file or an image folder outside its own folder",
    IMAGE_MISSING: "the image file does not exist",
    IMAGE_NOT_A_FILE: "the image path is a folder",
    IMAGE_BROKEN: "the image cannot be decoded",
    IMAGE_TOO_LARGE: "the image exceeds the pixel limit",
    BASE64_INVALID: "the image is not valid base64",
    BOX_MALFORMED: "a box is not four finite numbers, or names an image that is not there",
    BOX_IN_PIXELS: "a box is in pixels where fractions are expected",
    BOX_NOT_SHOWN: "a box is on an image that no turn shows",
    FILE_UNREADABLE: "the rest of the file is damaged",
    FILE_MISSING: "a listed data file does not exist",
}

REPAIR_REASONS: dict[str, str] = {
    BOX_DEGENERATE: "a box has no area inside the image: the row is kept without it",
    BOX_OUTSIDE: "a box reaches outside the image: clipped",
    BOX_INVERTED: "a box has its corners swapped: put in order",
    IMAGE_COUNT_MISMATCH: "the number of <image> marks differs from the number of images",
    DUPLICATE_ID: "an earlier row has the same id: renamed",
}


LISTED_FILE_LOST = (FILE_MISSING, LISTED_PATH_ESCAPES)
"""Reasons that cost all rows of a file that a meta file lists, though each counts as one row."""

WAYS_OUT: dict[str, tuple[str, str, str]] = {
    BOX_IN_PIXELS: ("boxes", "pixels", "if the boxes are in pixels of the image"),
    IMAGE_PATH_ESCAPES: ("images", "/", "if the paths are absolute, or name the folder that holds the images"),
    LISTED_PATH_ESCAPES: ("images", "/", "if you trust the meta file, or name the folder that holds what it lists"),
    IMAGE_MISSING: ("images", "FOLDER", "where image paths are relative to another folder"),
    DUPLICATE_ID: ("duplicates", "rename", "if rows share ids on purpose"),
}
"""The option (of ``realvr data check`` and of a training source), its value, and when it is the remedy."""


def ways_out(found: Iterable[str], prefix: str) -> list[str]:
    """What to set against reasons, such as ``--boxes pixels if the boxes are in pixels``; ``prefix`` opens a flag."""
    known = [WAYS_OUT[reason] for reason in found if reason in WAYS_OUT]
    return list(dict.fromkeys(f"{prefix}{name} {value} {when}" for name, value, when in known))


class BadRow(Exception):
    """A row that cannot become a sample. Never leaves `realvr.data`: the reading policy decides what it means."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class FileError(UserError):
    """A file that cannot be read at all. ``reason`` is one of `FILE_REASONS`."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.reason, str(self))  # as `ImageError`: loader workers raise across processes
