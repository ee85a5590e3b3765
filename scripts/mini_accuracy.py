"""Accuracy of a mini model on fresh questions of the embedded world, by kind and by withheld words.

    python scripts/mini_accuracy.py runs/mini/internvl3/base/final --latents 0 --count 1000

Questions are drawn in memory from splits the model was not trained on. Prints a table; ``--json FILE`` writes it too.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from realvr.backbone import Backbone
from realvr.backbone.samples import conversation
from realvr.data.sample import Sample
from realvr.evaluation.model_responder import ModelResponder
from realvr.evaluation.responder import Plan, Request
from realvr.latent.sampling import Sampling
from realvr.runs.quiet import quiet_transformers
from realvr.training import rewards
from realvr.world.benchmarks import Resize
from realvr.world.questions import EASY_EXTRA_KINDS, EASY_KINDS
from realvr.world.splits import Recipe, samples

KINDS = (*EASY_KINDS, *EASY_EXTRA_KINDS)


def questions(count: int, seed: int) -> dict[str, list[Sample]]:
    """Fresh questions: single ones with any words, a second picture after a first exchange, trails, mini-benchmarks."""
    single = samples(Recipe("curriculum-test", seed=seed, count=count, kinds=KINDS))
    sequels = samples(Recipe("sequels", seed=seed + 1000, count=count // 4, kinds=KINDS))
    small, seen = count // 4, Resize(48 * 48, 8)
    benches = (
        Recipe("mmvp", seed=seed, count=small // 2, size=(48, 48)),
        Recipe("blink", seed=seed, count=small, size=(48, 48)),
        Recipe("hrbench-4k", seed=seed, count=small // 4, size=(192, 192), resize=seen),
        Recipe("mme-realworld", seed=seed, count=small, size=(128, 128)),
    )
    trails = samples(Recipe("trails", seed=seed, count=count))
    asked = {"single": list(single), "second turn": list(sequels), "trails": list(trails)}
    return asked | {f"mini-{recipe.split}": list(samples(recipe)) for recipe in benches}


def rows(responder: ModelResponder, asked: Iterable[Sample], latents: int, batch: int) -> list[tuple[Sample, bool]]:
    """Each sample with whether it was answered rightly."""
    found, todo = [], list(asked)
    for start in range(0, len(todo), batch):
        part = todo[start : start + batch]
        requests = [Request(sample, conversation(sample, [image.open() for image in sample.images])) for sample in part]
        (replies,) = responder.reply(requests, [Plan(latents)])
        for sample, reply in zip(part, replies, strict=True):
            found.append((sample, rewards.accuracy(reply.text, sample) == 1))
    return found


def measure(path: str, latents: int, count: int, seed: int, batch: int, device: str | None) -> dict[str, Any]:
    """Percent right, by group."""
    backbone = Backbone.load(path, device=device, dtype="float32")
    responder = ModelResponder(backbone, Sampling(temperature=0.0, max_new=24), path=path)
    groups: dict[str, list[bool]] = defaultdict(list)
    for name, asked in questions(count, seed).items():
        for sample, right in rows(responder, asked, latents, batch):
            if name.startswith("mini-"):
                groups[name if "blink" not in name else f"{name} {sample.task}"].append(right)
                continue
            if name == "trails":
                for part in ("all", sample.tags["arrows"]):
                    groups[f"trails: {part}"].append(right)
                continue
            withheld = "withheld words" if sample.tags.get("withheld") == "yes" else "seen words"
            groups[f"{name}: {withheld}"].append(right)
            if name == "single" and withheld == "seen words":
                groups[f"kind {sample.tags['kind']}"].append(right)
    return {name: {"accuracy": round(100 * sum(g) / len(g), 1), "n": len(g)} for name, g in sorted(groups.items())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="+")
    parser.add_argument("--latents", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--device")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    quiet_transformers(always=True)
    found = {}
    for path in options.model:
        found[path] = measure(path, options.latents, options.count, options.seed, options.batch, options.device)
        print(path, f"K={options.latents}")
        for name, row in found[path].items():
            print(f"  {name:32s} {row['accuracy']:6.1f}  n={row['n']}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
