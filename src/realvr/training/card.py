"""The card of a trained model: what it was trained from, how to use it, its last metrics, all its settings."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from realvr.models import is_named

TAG = "realvr"
BOOKKEEPING = ("time", "seconds", "prepare_s", "data/drawn")
"""What a line of ``metrics.jsonl`` says about the run and not about the model: the card leaves it out."""


def card(title: str, base: str, folder: str, settings_yaml: str, metrics: dict[str, Any], tags: Iterable[str]) -> str:
    """Markdown with the front matter that model hubs read. ``base`` is what `base_model` returns, ``folder`` where the
    model lies."""
    front = {"library_name": "transformers", "base_model": base, "tags": list(tags)}
    shown = {name: value for name, value in metrics.items() if name not in BOOKKEEPING}
    rows = [f"| {name} | {f'{value:.6g}' if isinstance(value, float) else value} |" for name, value in shown.items()]
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---",
        f"# {title}",
        f"Trained with realvr from `{base}`.",
        usage(folder),
        "\n".join(["## Metrics of the last step", "", "| metric | value |", "|---|---|", *rows]),
        f"## Settings\n\n```yaml\n{settings_yaml.rstrip()}\n```",
    ]
    return "\n\n".join(parts) + "\n"


def usage(folder: str) -> str:
    """How to ask the model, on the command line and from Python."""
    return f"""\
## Use

```
realvr ask {folder} picture.png "What color is the circle?"
```

```python
from PIL import Image

from realvr.backbone import Backbone
from realvr.backbone.types import Turn
from realvr.latent.group_rollout import rollout
from realvr.latent.sampling import GREEDY

backbone = Backbone.load({json.dumps(folder)})
prompt = backbone.prompt([Turn("user", "What color is the circle?", [Image.open("picture.png")])])
print(rollout(backbone, [prompt], sampling=GREEDY).completions[0][0].text)
```

Plain transformers load it too (`AutoModelForImageTextToText`), and then answer without a latent span."""


def base_model(path: str) -> str:
    """What a model trained from ``path`` is based on: a hub id or packaged name as it is; of a folder that realvr
    trained what its card names, so that Stage 2 still names the released model; any other folder by its path."""
    if is_named(path):
        return path
    front = _front(Path(path) / "README.md")
    tags, found = front.get("tags"), front.get("base_model")
    return found if isinstance(tags, list) and TAG in tags and isinstance(found, str) and found else path


def _front(file: Path) -> dict[str, Any]:
    """The YAML at the top of a card; empty where there is none that can be read."""
    try:
        _, front, _ = file.read_text(encoding="utf-8").split("---\n", 2)
        found = yaml.safe_load(front)
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}
