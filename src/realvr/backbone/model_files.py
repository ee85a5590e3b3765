"""The files of a model folder: whether they are all there and whole, without reading weights. No torch."""

from __future__ import annotations

import json
from pathlib import Path

from realvr.errors import UserError
from realvr.runs.files import read_json
from realvr.runs.hashes import changed_weights

REMEDY = "copy it from the original model"
_TOKENIZERS = ("tokenizer.json", "vocab.json", "tokenizer.model")
_PROCESSORS = ("preprocessor_config.json", "processor_config.json")
# Without the vocabularies, which are large: they are looked at when the tokenizer cannot be loaded. transformers itself
# passes over a damaged generation_config.json in silence, and with it over end tokens.
_JSON = (
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "video_preprocessor_config.json",
    "model.safetensors.index.json",
    *_PROCESSORS,
)


def check_files(source: str) -> None:
    """For a local directory, name what is missing or damaged before gigabytes are read."""
    directory = Path(source)
    if not directory.is_dir():
        return
    if not any((directory / name).is_file() for name in _TOKENIZERS):
        raise UserError(
            f"{source} has no tokenizer files ({', '.join(_TOKENIZERS)}): copy them from the original model"
        )
    if not any((directory / name).is_file() for name in _PROCESSORS):
        raise UserError(f"{source} has no image processor file ({_PROCESSORS[0]}): {REMEDY}")
    if not any(directory.glob("*.safetensors")):
        raise UserError(f"{source} has no weights (*.safetensors)")
    for name in _JSON:
        if (directory / name).is_file():
            read_json(directory / name, REMEDY)


INDEX = "model.safetensors.index.json"
_HEADER = 8
_LARGEST_HEADER = 100_000_000


def check_complete(folder: Path) -> None:
    """Refuse a model folder that others could not load: a file is missing, cut short, or not the one that was saved."""
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} has no config.json: it is not a model folder")
    read_json(folder / "config.json", REMEDY)
    check_files(str(folder))
    if (folder / INDEX).is_file():
        listed = read_json(folder / INDEX, REMEDY).get("weight_map")
        shards = set(map(str, listed.values())) if isinstance(listed, dict) else set()
        if missing := sorted(name for name in shards if not (folder / name).is_file()):
            raise UserError(f"{folder} is incomplete: {INDEX} lists {missing[0]}, which is not there; save it again")
    for file in sorted(folder.glob("*.safetensors")):
        _refuse_cut_short(file)
    if changed := changed_weights(folder):
        raise UserError(changed)


def _refuse_cut_short(file: Path) -> None:
    """A safetensors file says in its header how long it is."""
    with file.open("rb") as source:
        length = int.from_bytes(source.read(_HEADER), "little")
        try:
            header = json.loads(source.read(length)) if length <= _LARGEST_HEADER else None
        except ValueError:
            header = None
    if not isinstance(header, dict):
        raise UserError(f"{file}: not a safetensors file; save the model again")
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    wanted, size = _HEADER + length + max(ends, default=0), file.stat().st_size
    if size != wanted:
        raise UserError(f"{file} is incomplete: it has {size:,} bytes of {wanted:,}; copy or save it again")
