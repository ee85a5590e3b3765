"""Pictures written where a user has said: the format is that of the name. No torch."""

from __future__ import annotations

import io
import os
from pathlib import Path

from PIL import Image

from realvr.errors import UserError
from realvr.runs.files import write_atomically

FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}


def check_place(path: Path, option: str = "") -> None:
    """Refuse a file that cannot be written before anything is read or drawn for it; its folder is made where it is
    missing. ``option`` is what it was given to."""
    named = f"{option} {path}".lstrip()
    if path.is_dir():
        raise UserError(f"{named} is a folder: name a file in it")
    if path.suffix.lower() not in FORMATS:
        known = ", ".join(FORMATS)
        raise UserError(f"{named}: the name of the picture must end in one of {known}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = "a file is where a folder should be" if isinstance(error, FileExistsError) else error.strerror or error
        raise UserError(f"{named}: its folder cannot be made ({why}); choose another place") from None
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"{named}: {path.parent} cannot be written to; choose another place")


def save_picture(path: Path, picture: Image.Image, optimize: bool = False) -> None:
    """The picture in the format of its suffix, whole or not at all."""
    target = io.BytesIO()
    picture.save(target, FORMATS[path.suffix.lower()], quality=92, optimize=optimize)
    write_atomically(path, target.getvalue())
