"""A checkpoint of a paper backbone's shape with random weights, so that a recipe can be timed at real size.

    python scripts/random_checkpoint.py --preset Qwen2.5-VL-7B --device cuda runs/random-7b

It has the small tokenizer of its family; the embedding keeps all rows of the real one, so that sizes and speed are
those of the real model. Answers are noise.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from foundation import random_backbone


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--preset", default="Qwen2.5-VL-7B")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layers", type=int, help="fewer decoder layers than the preset, for a quick look")
    parser.add_argument("--latents", type=int, help="K, as if Stage 1 had trained it, so that Stage 2 takes it")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    backbone = random_backbone(options.preset, torch.device(options.device), torch.bfloat16, options.layers)
    if options.latents is not None:
        backbone.latents, backbone.markers_added = options.latents, False
    print(backbone.save(options.directory))


if __name__ == "__main__":
    main()
