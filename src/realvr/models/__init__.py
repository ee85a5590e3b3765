"""The checkpoints that come with the package, by name. No torch here.

``mini-base`` is a small base without a latent span, ``mini`` the same after Stage 1, ``mini-direct`` its control with
the same rows and steps without a span, ``mini-short`` a Stage 1 that saw short trails only, for Stage 2. A name
stands for the packaged checkpoint wherever a MODEL is asked for, whatever lies in the working directory; ``./mini`` is
a directory there. Their weights are stored in 16 bits to stay small and are loaded as float32 unless another type is
asked for.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from pathlib import Path

from realvr.errors import UserError

NAMES = ("mini", "mini-base", "mini-direct", "mini-short")
DTYPE = "float32"
"""The dtype of a packaged model, unless one is given."""
_HOME = Path(__file__).parent


def is_named(model: str | Path) -> bool:
    """Whether this is the name of a packaged checkpoint. A `Path` never is: it means a directory."""
    return isinstance(model, str) and model in NAMES


def locate(model: str | Path) -> str:
    """Where a MODEL is: the packaged directory of a name, anything else unchanged (a directory or a hub id)."""
    if not is_named(model):
        # `Path("./mini")` forgets its dot; the result must not turn into the name when it is looked up again.
        return os.path.join(".", str(model)) if str(model) in NAMES else str(model)
    found = _HOME / str(model)
    if not (found / "config.json").is_file() or not any(found.glob("*.safetensors")):
        raise UserError(
            f"'{model}' names the checkpoint that comes with realvr, and this installation lacks it (no {found}): "
            f"install realvr again, or write ./{model} for a directory of your own"
        )
    if Path(str(model)).is_dir():
        warnings.warn(
            f"'{model}' is the checkpoint that comes with realvr; the directory here is ./{model}", stacklevel=3
        )
    return str(found)


def fingerprint(name: str) -> str:
    """SHA-256 of the weights of a packaged checkpoint."""
    digest = hashlib.sha256()
    for file in sorted(Path(locate(name)).glob("*.safetensors")):
        digest.update(file.read_bytes())
    return digest.hexdigest()
