"""Record what stock ``AutoProcessor`` makes of a few conversations, for the prompt builder to be held against.

    PYTHONPATH=src python scripts/make_processor_goldens.py [--families qwen3-vl gemma3] [--output tests/golden]

Run it where torchvision is installed: without it transformers cannot build the Qwen and InternVL processors, which is
why this project has a prompt builder of its own, and why its tests need recorded answers. Also prints how far the
torchvision pixels are from those of the Pillow classes that the project uses.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

import torch  # noqa: E402
from transformers import AutoProcessor  # noqa: E402

import golden_cases  # noqa: E402
from realvr.families import FAMILIES, Family  # noqa: E402
from realvr.zoo import tiny  # noqa: E402

# Stock processors hold a video processor too, which a checkpoint without videos does not describe.
VIDEO_PROCESSORS = {
    "qwen2.5-vl": "Qwen2VLVideoProcessor",
    "qwen3-vl": "Qwen3VLVideoProcessor",
    "qwen3-vl-moe": "Qwen3VLVideoProcessor",
    "internvl3": "InternVLVideoProcessor",
}


def load_processor(family: Family, directory: Path) -> Any:
    """The stock processor of a tiny checkpoint."""
    if family.name in VIDEO_PROCESSORS:
        settings = {"video_processor_type": VIDEO_PROCESSORS[family.name]}
        (directory / "video_preprocessor_config.json").write_text(json.dumps(settings))
    return AutoProcessor.from_pretrained(directory)


def pillow_pixels(family: Family, directory: Path, case: golden_cases.Case) -> torch.Tensor:
    """The pixels of the project's own backend, with the settings the stock processor applies by default."""
    module, _, name = family.image_processor.partition(":")
    image_processor = getattr(import_module(module), name).from_pretrained(directory)
    tiling = {"crop_to_patches": True} if family.name == "internvl3" else {}
    return image_processor(images=golden_cases.images(case), return_tensors="pt", **tiling)["pixel_values"]


def image_runs(ids: list[int], image_id: int) -> list[int]:
    """Lengths of the runs of ``image_id``: the visual tokens of each image."""
    runs: list[int] = []
    previous = -1
    for token in ids:
        if token == image_id:
            if previous == image_id:
                runs[-1] += 1
            else:
                runs.append(1)
        previous = token
    return runs


def record(family: Family, processor: Any, directory: Path, case: golden_cases.Case) -> tuple[dict[str, Any], float]:
    """One golden entry, and the largest pixel difference between the two backends."""
    conversation = golden_cases.messages(case, with_images=True)
    options = {"add_generation_prompt": True}
    out = processor.apply_chat_template(conversation, tokenize=True, return_dict=True, return_tensors="pt", **options)
    ids = out["input_ids"][0].tolist()
    image_id = processor.tokenizer.convert_tokens_to_ids(family.image_token)
    runs = image_runs(ids, image_id)
    entry: dict[str, Any] = {
        "conversation": golden_cases.as_json(case),
        "text": processor.apply_chat_template(golden_cases.messages(case), tokenize=False, **options),
        "input_ids": ids,
        "visual_tokens": runs,
    }
    if "image_grid_thw" in out:
        entry["image_grid_thw"] = out["image_grid_thw"].tolist()
    elif hasattr(processor, "image_seq_length"):
        entry["tiles"] = [run // processor.image_seq_length for run in runs]
    if not runs:
        return entry, 0.0
    ours = pillow_pixels(family, directory, case)
    theirs = out["pixel_values"]
    if ours.shape != theirs.shape:
        raise SystemExit(f"{family.name}: pixels {tuple(theirs.shape)}, but Pillow gives {tuple(ours.shape)}")
    if "tiles" in entry and sum(entry["tiles"]) != theirs.shape[0]:
        raise SystemExit(f"{family.name}: {theirs.shape[0]} tiles, but the ids hold {entry['tiles']}")
    return entry, float((ours - theirs.cpu().float()).abs().max())


def make(family: Family, output: Path) -> None:
    """Write the golden file of one family."""
    with tempfile.TemporaryDirectory() as scratch:
        directory = tiny.build(family.name, "tiny", Path(scratch) / "model")
        processor = load_processor(family, directory)
        cases, difference = {}, 0.0
        for name, case in golden_cases.CASES.items():
            cases[name], case_difference = record(family, processor, directory, case)
            difference = max(difference, case_difference)
        golden = {
            "family": family.name,
            "processor": type(processor).__name__,
            "image_processor": type(processor.image_processor).__name__,
            "tokenizer_sha256": hashlib.sha256((directory / "tokenizer.json").read_bytes()).hexdigest(),
            "versions": {name: installed(name) for name in ("transformers", "tokenizers", "torch", "torchvision")},
            "max_pixel_difference": difference,
            "cases": cases,
        }
    path = output / f"processor_{family.name}.json"
    path.write_text(json.dumps(golden, indent=1, ensure_ascii=True) + "\n")
    print(f"{path}: {len(cases)} cases, {golden['image_processor']} - Pillow: max |difference| {difference:.3g}")


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--output", type=Path, default=ROOT / "tests" / "golden")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name in arguments.families:
        make(FAMILIES[name], arguments.output)


if __name__ == "__main__":
    main()
