"""Load any supported checkpoint, add the latent markers once, and save a plain HF directory."""

from __future__ import annotations

import socket
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from PIL.Image import Image
from torch import Tensor

from realvr.backbone.automatic import Switch, Where
from realvr.backbone.backbone import Backbone, Markers
from realvr.backbone.checks import (
    check_numbers,
    check_size,
    check_template,
    check_vocabulary,
    first_line,
)
from realvr.backbone.model_files import REMEDY, check_files
from realvr.backbone.released import save_weights, settle_output_layer
from realvr.backbone.sharding import Spread
from realvr.errors import UserError
from realvr.families import FAMILIES, MARKERS, Family, Stock, family_of
from realvr.imaging.processing import ImageProcessor, Limits
from realvr.imaging.types import Grid
from realvr.models import DTYPE as NAMED_DTYPE
from realvr.models import NAMES, is_named, locate
from realvr.runs import run_models
from realvr.runs.files import read_json
from realvr.runs.hashes import changed_weights, record_weights

if TYPE_CHECKING:
    from realvr.backbone.streaming import Weights

DEFAULT_LATENTS = 8
CONFIG_KEY = "realvr"
"""Key in ``config.json`` under which a checkpoint keeps what it was trained with: marker ids, K, the limits on visual
tokens. Stock transformers carries it along unread."""

_SIDE_FILES = ("processor_config.json", "video_preprocessor_config.json", "chat_template.json")
Place = Callable[[Any, "Weights"], None]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def load(
    path: str | Path,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    latents: int | None = None,
    min_tokens: int | None = None,
    max_tokens: int | None = None,
    tiles: bool | None = None,
    max_tiles: int | None = None,
    announce: bool = True,
    place: Place | None = None,
    sharded: bool = False,
    fast_vision: bool = True,
    fused_layers: Switch = False,
) -> Backbone:
    """Load a local directory, hub id or packaged name (`realvr.models`) that ``AutoModelForImageTextToText`` can load.

    ``dtype`` defaults to the checkpoint's own, for a packaged name to float32; ``device`` to the GPU where there is
    one, and a GPU named by number becomes the current one. ``latents`` overrides the checkpoint's K.
    ``min_tokens``/``max_tokens`` bound the visual tokens per image (families with variable grids); ``tiles`` cuts large
    images into at most ``max_tiles`` tiles (InternVL). What is not given is as in the checkpoint's training, or the
    family's own where it was not trained by us. Marker tokens are added when the checkpoint has none.

    ``announce`` hashes the weights and warns where they, K or a limit are not those that the checkpoint was saved with;
    further processes of the same run switch it off.

    With ``place`` the weights are not read here: it gets the model on the meta device and an iterator of its weights,
    and puts them where they belong. At no time are all of them in this process. ``sharded`` does so over all GPUs of
    the machine (see `realvr.backbone.sharding`); ``device`` then has no meaning. ``fast_vision`` and
    ``fused_layers`` are those of `Backbone`; ``auto`` is explained in `realvr.backbone.automatic`.
    """
    if latents is not None and latents < 0:
        raise UserError(f"latents is {latents}: the number of latent slots cannot be negative")
    source = locate(path)
    if dtype is None and is_named(path):
        dtype = NAMED_DTYPE
    config, family = read_config(source)
    check_files(source)
    check_size(source, config)
    if sharded:
        place = Spread.over_all_gpus(str(path))
    device, dtype = _device(device), _dtype(dtype)
    if device.type == "cuda" and device.index is not None and place is None:
        torch.cuda.set_device(device)  # what asks for no device, such as pinned memory, goes there too
    tokenizer = _load_tokenizer(source)
    known = _remembered(config, source)
    stored = _stored_limits(known, source)
    given = Limits(min_tokens, max_tokens, tiles, max_tiles)
    processor = ImageProcessor.load(source, family, config, **vars(stored.then(given)))
    model = _load_model(source, dtype, device) if place is None else _place_model(source, dtype, place, announce)
    markers, added = add_markers(model, tokenizer)
    chosen = latents if latents is not None else _stored_latents(known, source)
    backbone = Backbone(model, tokenizer, family, processor, markers, chosen, markers_added=added)
    backbone.spell_out = bool(known.get("spell_out", False))
    backbone.side_files = _side_files(source)
    backbone.fast_vision = fast_vision
    backbone.whole = place is None
    backbone.fused_layers = Where.of(backbone).settle("fused_layers", fused_layers)
    if backbone.mrope and backbone.windowed:
        raise UserError(f"{source}: sliding-window layers together with multimodal rotary positions are not supported")
    backbone.freeze_vision()
    model.eval()
    if announce:
        _announce(str(path), source, backbone, known, stored)
    return backbone


def load_processor(path: str | Path, max_tokens: int | None = None) -> ImageProcessor:
    """The image processor of a checkpoint, with the limits it was trained with, without reading its weights."""
    source = locate(path)
    config, family = read_config(source)
    limits = _stored_limits(_remembered(config, source), source).then(Limits(max_tokens=max_tokens))
    return ImageProcessor.load(source, family, config, **vars(limits))


def token_grids(path: str | Path, max_tokens: int | None = None) -> Callable[[Image], Grid]:
    """Image to the grid of its visual tokens, as a checkpoint lays them out; its weights are not read."""
    processor = load_processor(path, max_tokens)
    return lambda image: processor(image).grid


def _stored_limits(known: dict[str, Any], source: str) -> Limits:
    return Limits.from_note(known.get("images", {}), f"{source}: config.json, {CONFIG_KEY}.images")


def _announce(name: str, source: str, backbone: Backbone, known: dict[str, Any], stored: Limits) -> None:
    """Warn where the loaded model is not used as it was saved."""
    if Path(source).is_dir() and (changed := changed_weights(Path(source))):
        warnings.warn(changed, stacklevel=3)
    now = backbone.processor.limits.note()
    before: dict[str, Any] = {key: value for key, value in stored.note().items() if key in now}
    if known.get("latents") and not backbone.markers_added:
        before["K"], now["K"] = known["latents"], backbone.latents
    other = [key for key in before if before[key] != now[key]]
    if other:  # not "was trained with": small random models are saved too, and nobody trained those
        says, used = (", ".join(f"{key} = {values[key]}" for key in other) for values in (before, now))
        warnings.warn(
            f"config.json of {name} says {says}; {used} {'is' if len(other) == 1 else 'are'} used here", stacklevel=3
        )


def save(backbone: Backbone, directory: str | Path, state: dict[str, Tensor] | None = None) -> Path:
    """Write model, tokenizer and image processor as a plain HF directory; marker ids, K, limits on visual tokens and
    ``spell_out`` go into its ``config.json``, SHA-256 hashes of the weights into ``weights.sha256``. ``state`` are the
    weights by name where they are not the model's own."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    markers = backbone.markers
    note: dict[str, Any] = {
        "latents": backbone.latents,
        "markers": {"start": markers.start, "slot": markers.slot, "end": markers.end},
        "images": backbone.processor.limits.note(),
    }
    if backbone.spell_out:
        note["spell_out"] = True
    setattr(backbone.model.config, CONFIG_KEY, note)
    save_weights(backbone.model, directory, backbone.family.transposed, state)
    backbone.tokenizer.save_pretrained(directory)
    backbone.processor.stock.save_pretrained(directory)
    for name, text in backbone.side_files.items():
        (directory / name).write_text(text)
    record_weights(directory)
    return directory


def read_config(source: str) -> tuple[Any, Family]:
    """The checkpoint's config and its family; a clear error where it is missing or not supported."""
    source = locate(source)
    if not Path(source).exists():
        if _looks_local(source):
            raise UserError(run_models.hint(source) or f"{source} does not exist{_meant(source)}")
        _refuse_unreachable(source)
    if Path(source).is_file():
        raise UserError(f"{source} is a file: give the directory of a checkpoint")
    config_file = Path(source) / "config.json"
    if Path(source).is_dir() and not config_file.is_file():
        raise UserError(run_models.hint(source) or f"{source} has no config.json: it is not a checkpoint directory")
    if Path(source).is_dir():
        fields = read_json(config_file, REMEDY)
        _refuse_unsupported(source, fields.get("model_type"))
        check_numbers(config_file, fields)
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(source)
    except Exception as error:  # whatever a damaged file leads to
        raise UserError(f"{source}: the configuration cannot be read ({first_line(error)})") from error
    return config, _refuse_unsupported(source, config.model_type)


def trained_latents(source: str) -> int | None:
    """K of a checkpoint, without reading its weights; None where its tokenizer lacks the latent markers."""
    source = locate(source)
    config, _ = read_config(source)
    vocabulary = _load_tokenizer(source).get_vocab()
    if any(token not in vocabulary for token in MARKERS):
        return None
    return _stored_latents(_remembered(config, source), source)


def _remembered(config: object, source: str) -> dict[str, Any]:
    """What ``save`` has noted in a configuration; nothing for a checkpoint of others."""
    note = getattr(config, CONFIG_KEY, None) or {}
    if not isinstance(note, dict):
        raise UserError(
            f"{source}: config.json, {CONFIG_KEY} is {note!r}: an object is expected; copy it from the original"
        )
    return note


def _stored_latents(note: dict[str, Any], source: str) -> int:
    latents = note.get("latents", DEFAULT_LATENTS)
    if type(latents) is not int or latents < 0:
        raise UserError(f"{source}: config.json, {CONFIG_KEY}.latents is {latents!r}: write the K of its training")
    return latents


def _refuse_unsupported(source: str, model_type: str | None) -> Family:
    family = family_of(model_type or "")
    if family is None:
        known = ", ".join(f"{f.name} ({f.model_type})" for f in FAMILIES.values())
        raise UserError(f"{source}: model type '{model_type}' is not supported; supported are {known}")
    return family


def _side_files(source: str) -> dict[str, str]:
    """Small files that ``AutoProcessor`` reads and we only hand on, so that a saved checkpoint has them too."""
    from transformers.utils import cached_file

    found = {}
    for name in _SIDE_FILES:
        file = cached_file(
            source, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
        )
        if file is not None:
            found[name] = Path(file).read_text()
    return found


def _load_tokenizer(source: str) -> Stock:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except BaseException as error:  # whatever a damaged file leads to; a panic in Rust is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
            raise
        check_vocabulary(source)
        raise UserError(f"{source}: the tokenizer cannot be loaded ({first_line(error)})") from error
    if not tokenizer.is_fast:
        raise UserError(f"{source}: a fast tokenizer (tokenizer.json) is needed")
    check_template(source, tokenizer)
    return tokenizer


def _load_model(source: str, dtype: torch.dtype | str, device: torch.device) -> Stock:
    from transformers import AutoModelForImageTextToText

    with _refusals(source):
        loaded: Any = AutoModelForImageTextToText.from_pretrained(
            source, dtype=dtype, use_safetensors=True, output_loading_info=True, ignore_mismatched_sizes=True
        )
    model, found = loaded
    _check_found(source, model, found)
    return model.to(device)


def _place_model(source: str, dtype: torch.dtype | str, place: Place, progress: bool) -> Stock:
    from realvr.backbone.streaming import Stored

    with _refusals(source):
        stored = Stored(source, dtype, progress)
    _check_found(source, stored.model, stored.found)
    place(stored.model, stored.weights())
    return stored.model


@contextmanager
def _refusals(source: str) -> Iterator[None]:
    """Errors of transformers in one line, and none of its reports of many lines: `_check_found` prints what matters."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    except (MemoryError, UserError):
        raise
    except Exception as error:  # whatever damaged weights or a configuration that fits no model lead to
        raise UserError(f"{source}: the model cannot be loaded ({first_line(error)})") from error
    finally:
        logging.set_verbosity(verbosity)


def _check_found(source: str, model: Stock, found: dict[str, Any]) -> None:
    """Compare the tensors of the files with those of the model, as transformers' loader has found them."""
    missing = settle_output_layer(source, model, found["missing_keys"])
    if missing:  # transformers would fill them with random numbers and only warn
        names = sorted(missing)
        raise UserError(f"{source}: the weights lack {len(names)} tensors of the model, among them {names[0]}")
    if found["mismatched_keys"]:  # refused here, because transformers' own error names no tensor
        name, stored, wanted = sorted(found["mismatched_keys"])[0]
        raise UserError(
            f"{source}: {len(found['mismatched_keys'])} tensors do not have the shape that config.json asks for, among "
            f"them {name}: {tuple(stored)}, not {tuple(wanted)}"
        )
    if found["unexpected_keys"]:
        names = sorted(found["unexpected_keys"])
        warnings.warn(f"{source}: {len(names)} stored tensors are not used, among them {names[0]}", stacklevel=4)


def add_markers(model: Stock, tokenizer: Stock) -> tuple[Markers, bool]:
    """Make sure the three marker tokens exist; returns their ids and whether they were new.

    The embedding table grows only when the tokenizer has outgrown it (Qwen checkpoints carry spare rows, InternVL's
    tokenizer has an entry without a row). New rows start at the mean embedding, as far from any word as from any other.
    """
    vocabulary = tokenizer.get_vocab()
    missing = [token for token in MARKERS if token not in vocabulary]
    if missing:
        tokenizer.add_tokens(missing, special_tokens=True)
    ids = [int(tokenizer.convert_tokens_to_ids(token)) for token in MARKERS]
    rows = model.get_input_embeddings().weight.shape[0]
    if max(ids) >= rows:
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    added = {int(tokenizer.convert_tokens_to_ids(token)) for token in missing}
    new = sorted(added | set(range(rows, table.shape[0])))
    if new:
        for weight in (table,) if head is table else (table, head):
            _set_to_mean(weight, new, min(rows, len(vocabulary)))
    return Markers(*ids), bool(missing)


@torch.no_grad()
def _set_to_mean(weight: Tensor, new: list[int], known: int) -> None:
    mean = weight[:known].mean(0, dtype=torch.promote_types(weight.dtype, torch.float32))
    weight[new] = mean.to(weight.dtype)


def _device(name: torch.device | str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device '{name}' cannot be used ({first_line(error)})") from error
    return device


def _dtype(name: torch.dtype | str | None) -> torch.dtype | str:
    if name is None or name == "auto":
        return "auto"
    if isinstance(name, torch.dtype):
        return name
    if name not in _DTYPES:
        raise UserError(f"dtype is '{name}': choose one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _looks_local(source: str) -> bool:
    """A hub id is ``owner/name``; anything else, and anything inside a folder that exists here, is meant as a path."""
    return source.startswith((".", "/", "~")) or source.count("/") != 1 or Path(source).parent.is_dir()


def _meant(source: str) -> str:
    """What a single word that is no directory may have been meant as."""
    if "/" in source or source.startswith(("~", ".")):
        return ""
    hint = "".join(f"did you mean {name}? " for name in get_close_matches(source, NAMES, n=1))
    return f"; {hint}MODEL is a directory, a hub id (OWNER/NAME) or a packaged model ({', '.join(NAMES)})"


def _refuse_unreachable(source: str) -> None:
    """Say at once that a hub id cannot be had, instead of after half a minute of retries."""
    from huggingface_hub import constants, try_to_load_from_cache

    if constants.HF_HUB_OFFLINE or getproxies() or isinstance(try_to_load_from_cache(source, "config.json"), str):
        return
    address = urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection((address.hostname or "", address.port or 443), timeout=10).close()
    except OSError as error:
        message = f"{source} is neither a directory here nor in the hub cache, and the hub cannot be reached ({error})"
        raise UserError(message) from error
