"""Put a trained mini checkpoint into the package: 16-bit weights, and a card with its recipe and measured accuracy.

    python scripts/mini_package.py runs/mini/sft/final src/realvr/models/mini --latents 8 --about stage-1.md

``--about`` is Markdown with front matter (``base_model``) about data, recipe, seed and commit. Usage, hash and accuracy
are added here; the accuracy is measured on the packaged (rounded) weights with `mini_accuracy`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from pathlib import Path

import torch
from mini_accuracy import measure

from realvr.backbone import Backbone
from realvr.backbone.released import as_released
from realvr.runs.quiet import quiet_transformers
from realvr.training.card import usage


def package(source: Path, target: Path) -> None:
    """Copy a checkpoint with weights in float16: it has more digits than bfloat16, and no weight here needs range."""
    if target.exists():
        shutil.rmtree(target)
    backbone = Backbone.load(source, dtype="float32", device="cpu")
    backbone.model.to(torch.float16)
    backbone.model.config.dtype = torch.float16
    backbone.save(target)
    as_released(target, backbone.family)


def card(target: Path, about: str, latents: int, count: int, seed: int) -> None:
    """README.md: what the model is, its hash, and its accuracy."""
    digest = hashlib.sha256((target / "model.safetensors").read_bytes()).hexdigest()
    accuracy = measure(str(target), latents, count, seed, 128, "cpu")
    rows = "\n".join(f"| {name} | {row['accuracy']} | {row['n']} |" for name, row in accuracy.items())
    text = (
        f"{about.strip()}\n\n{usage(target.name)}\n\n## Weights\n\nfloat16, `model.safetensors` SHA-256 `{digest}`.\n\n"
        f"## Accuracy\n\nPercent of fresh questions of the embedded world answered rightly (greedy, K = {latents}), "
        f"the single ones on layouts no training saw, seed {seed}:\n\n"
        f"| questions | accuracy | n |\n|---|---|---|\n{rows}\n\n"
        f"    python scripts/mini_accuracy.py {target} --latents {latents} --count {count} --seed {seed}\n"
    )
    (target / "README.md").write_text(text)
    (target / "accuracy.json").write_text(json.dumps(accuracy, indent=2) + "\n")
    print(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--latents", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--about", type=Path, required=True)
    options = parser.parse_args()
    quiet_transformers(always=True)
    package(options.source, options.target)
    card(options.target, options.about.read_text(), options.latents, options.count, options.seed)


if __name__ == "__main__":
    main()
