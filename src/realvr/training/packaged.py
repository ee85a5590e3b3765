"""The settings files that come with the package, by name: ``own/rl`` is ``configs/own/rl.yaml`` of this package.

A name works in any folder, also where realvr was installed from a wheel. A file of the reader's own comes first.
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from realvr.errors import UserError

FOLDER = Path(__file__).parents[1] / "configs"


def names(kind: str = "") -> list[str]:
    """Names of the packaged settings, or only of those for ``realvr train KIND``. Engine files are none."""
    found = (path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.glob("*/*.yaml"))
    found = (name for name in found if not name.startswith("engines/"))
    return sorted(name for name in found if kind in name.rpartition("/")[2].split("-") or not kind)


def locate(config: str | Path, kind: str = "rl") -> Path:
    """The file that CONFIG of ``realvr train KIND`` means: an existing file, else the packaged one of this name.

    ``configs/own/rl.yaml``, where the file lay in a checkout of earlier versions, is a longer spelling of ``own/rl``.
    """
    path = Path(config)
    if path.is_file():
        return path
    name = path.as_posix().removeprefix("configs/").removesuffix(".yaml")
    known = names()
    if name in known:
        return FOLDER / f"{name}.yaml"
    if path.exists():
        return path  # a folder: whoever reads it says so
    close = get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"`realvr train {kind} --help` lists those that come with realvr"
    raise UserError(f"{config}: the settings cannot be read (No such file or directory); {hint}")
