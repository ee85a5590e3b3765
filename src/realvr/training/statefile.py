"""Nested state as a pair of files: a JSON tree and the tensors in it as safetensors. No pickle.

Every writer here leaves its file on the disk, not in a buffer: a checkpoint is renamed into place only after that.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from realvr.runs.files import Json, naming, sync

_TENSOR, _TUPLE, _PAIRS = "__tensor__", "__tuple__", "__pairs__"


def write_state(stem: Path, value: object) -> None:
    """Write ``stem.json`` and ``stem.safetensors``. ``value`` may hold dicts, lists, tuples, tensors, numbers, strings,
    booleans and None; anything else raises TypeError."""
    tensors: dict[str, Tensor] = {}
    tree = _encode(value, tensors)
    write_tensors(stem.with_name(stem.name + ".safetensors"), tensors)
    write_text(stem.with_name(stem.name + ".json"), json.dumps(tree, ensure_ascii=True))


def read_state(stem: Path) -> Json:
    """What ``write_state`` wrote, tensors on the CPU."""
    tensors = read_tensors(stem.with_name(stem.name + ".safetensors"))
    return _decode(json.loads(stem.with_name(stem.name + ".json").read_text(encoding="utf-8")), tensors)


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """A safetensors file, synced to disk. A full disk raises OSError."""
    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:  # this is how safetensors reports what the operating system said
        raise OSError(f"{path.name} cannot be written: {error}") from error
    sync(path)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, on the CPU. A damaged file raises ValueError."""
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path.name}: {error}") from error


def write_text(path: Path, text: str) -> None:
    """A text file, synced to disk."""
    with naming(path), path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _encode(value: object, tensors: dict[str, Tensor]) -> object:
    if isinstance(value, Tensor):
        name = f"t{len(tensors)}"
        tensors[name] = value.clone() if value._is_view() else value
        return {_TENSOR: name}
    if isinstance(value, tuple):
        return {_TUPLE: [_encode(item, tensors) for item in value]}
    if isinstance(value, list):
        return [_encode(item, tensors) for item in value]
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith("__") for key in value):
            return {key: _encode(item, tensors) for key, item in value.items()}
        return {_PAIRS: [[_encode(key, tensors), _encode(item, tensors)] for key, item in value.items()]}
    if isinstance(value, np.generic):
        return _encode(value.item(), tensors)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a state may hold JSON values and tensors, not {type(value).__name__}")


def _decode(value: object, tensors: dict[str, Tensor]) -> object:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        return tensors[value[_TENSOR]]
    if _TUPLE in value:
        return tuple(_decode(item, tensors) for item in value[_TUPLE])
    if _PAIRS in value:
        return {_decode(key, tensors): _decode(item, tensors) for key, item in value[_PAIRS]}
    return {key: _decode(item, tensors) for key, item in value.items()}


def generator_state() -> dict[str, Any]:
    """State of every random generator of this process: Python, numpy, torch on CPU and GPUs."""
    numpy_state: Any = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (numpy_state[0], torch.from_numpy(numpy_state[1].astype(np.int64)), *numpy_state[2:]),
        "torch": torch.get_rng_state(),
        "cuda": list(torch.cuda.get_rng_state_all()) if torch.cuda.is_available() else [],
    }


def set_generator_state(state: dict[str, Any]) -> None:
    """Put the generators back; GPU states only where there are as many GPUs."""
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
