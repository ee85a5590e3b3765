"""``realvr demo``: a small random model of each family answers one question through the real path."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

QUESTION = "What colour is the circle, and is it left or right of the square?"


def demo(out: Path = Path("runs/demo"), latents: int = 4, max_new: int = 24) -> int:
    """Build a small random model of each of the five families and let each answer one question about a picture.

    The weights are random, so the replies are noise: what this shows is that the same code path (image and chat
    template, vision tower, prefill, latent span, decoding) runs on every stock class on this machine.

    Examples:
      realvr demo
      realvr demo --out runs/demo --latents 8

    Args:
        out: Where the models, the picture and the results go; what an earlier demo wrote there is replaced.
        latents: Number of latent slots K.
        max_new: At most this many new tokens.
    """
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    from realvr.backbone.families import FAMILIES
    from realvr.commands.quiet import quiet_transformers

    quiet_transformers(always=True)
    console = Console()
    out.mkdir(parents=True, exist_ok=True)
    picture = out / "picture.png"
    draw(picture)
    results = [
        _one(family, out / family, picture, latents, max_new)
        for family in track(FAMILIES, description="five families", console=console)
    ]
    (out / "results.json").write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n")
    table = Table(title=f"{QUESTION}\nThe weights are random, so the replies are noise.", title_justify="left")
    for name in ("family", "visual tokens", "latents", "seconds", "reply"):
        table.add_column(name, no_wrap=name == "family")
    for row in results:
        visual = " + ".join(map(str, row["visual_tokens"]))
        reply = repr(row["text"][:40])
        table.add_row(row["family"], visual, str(row["latents"]), f"{row['seconds']:.2f}", reply)
    console.print(table)
    console.print(f"models, picture and results are in {out}", highlight=False)
    return 0


def _one(family: str, directory: Path, picture: Path, latents: int, max_new: int) -> dict[str, Any]:
    from realvr.backbone.backbone import Backbone
    from realvr.backbone.tiny import build
    from realvr.commands.ask import answer
    from realvr.latent.sampling import Sampling

    if (directory / "config.json").is_file():
        shutil.rmtree(directory)
    build(family, "tiny", directory)
    backbone = Backbone.load(directory)
    return answer(backbone, [picture], QUESTION, latents, Sampling(temperature=0.0, max_new=max_new))


def draw(path: Path) -> None:
    """The picture of the demo: a red circle left of a blue square."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (168, 112), (236, 233, 226))
    pen = ImageDraw.Draw(image)
    pen.ellipse((18, 28, 74, 84), fill=(200, 40, 40))
    pen.rectangle((100, 32, 150, 82), fill=(40, 70, 180))
    image.save(path)
