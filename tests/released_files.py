"""Files in the style of released checkpoints: their configurations, weight names and layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

RELEASED = Path(__file__).resolve().parents[1].parent / "shared" / "data" / "released"
FILES = {
    "qwen2.5-vl": "Qwen2.5-VL-7B-Instruct/config.json",
    "qwen3-vl": "Qwen3-VL-8B-Instruct/config.json",
    "qwen3-vl-moe": "Qwen3-VL-30B-A3B-Thinking/config.json",
    "internvl3": "InternVL3-2B-hf/config.json",
    "gemma3": "gemma-3-12b-it/config.unsloth-mirror.json",
}
# Beginnings of names in memory and in the released files. InternVL's and Gemma's are those of their 4.5x conversions.
_LLAVA = {
    "model.language_model.": "language_model.model.",
    "lm_head.": "language_model.lm_head.",
    "model.vision_tower.": "vision_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
}
NAMES: dict[str, dict[str, str]] = {
    "qwen2.5-vl": {"model.language_model.": "model.", "model.visual.": "visual."},
    "qwen3-vl": {},
    "qwen3-vl-moe": {},
    "internvl3": _LLAVA,
    "gemma3": _LLAVA,
}


def stored_name(family: str, name: str) -> str:
    for ours, theirs in NAMES[family].items():
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


def shrunk(released: Any, small: dict[str, Any]) -> Any:
    """A released configuration with the sizes and ids of a small one; what only it has, and its form, stay."""
    if not isinstance(released, dict):
        return released
    kept = {"model_type", "architectures", "torch_dtype", "dtype", "rope_theta", "factor", "rope_type", "type"}
    result = {}
    for name, value in released.items():
        inner = small.get(name)
        if isinstance(value, dict):
            rope = small.get("rope_parameters", {})
            result[name] = shrunk(value, inner or rope.get("full_attention", rope))
        else:
            result[name] = value if name in kept or inner is None else inner
    return result


def released_config(family: str, small: dict[str, Any]) -> dict[str, Any]:
    """The released file, shrunk; Qwen2.5's has the fields of the language model at the top."""
    if not (RELEASED / FILES[family]).is_file():
        pytest.skip(f"the released files are not here ({RELEASED})")
    released = json.loads((RELEASED / FILES[family]).read_text())
    fields = shrunk(released, small if "text_config" in released else small["text_config"] | small)
    if family == "gemma3":  # six layers of which the last sees everything are more than the small model has
        fields["text_config"]["sliding_window_pattern"] = 2
    return fields


def write_weights(directory: Path, family: str, model: Any, head: bool, shards: int) -> None:
    """Under the released names, experts as (expert, in, out), in one file or several with an index."""
    state = {}
    for name, tensor in model.state_dict().items():
        if "lm_head" in name and not head:
            continue
        kept = tensor.transpose(1, 2) if ".mlp.experts." in name else tensor
        state[stored_name(family, name)] = kept.contiguous().clone()
    (directory / "model.safetensors").unlink()
    names = sorted(state)
    files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    if shards == 1:
        files = ["model.safetensors"]
    else:
        where = {name: files[i % shards] for i, name in enumerate(names)}
        (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    for number, file in enumerate(files):
        save_file(
            {n: state[n] for i, n in enumerate(names) if i % shards == number}, directory / file, {"format": "pt"}
        )
