"""Read a checkpoint one parameter at a time, for engines that keep only a part of each.

transformers' own loader builds the model: on the meta device ``from_pretrained`` reads names, types and shapes, but no
values, and so handles renamed, converted, tied, missing and left-over tensors. The values follow in the order of the
model, each through the same conversion. Files are mapped into memory, not read: a process holds only the parameter it
has just been given.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file, logging

from realvr.backbone.model_files import REMEDY
from realvr.errors import UserError
from realvr.runs.files import read_json

Weights = Iterator[tuple[str, Tensor]]
"""Names of parameters and buffers, as the model has them (tied ones once), with their values in main memory."""


class Stored:
    """A checkpoint and its model on the meta device."""

    def __init__(self, source: str, dtype: torch.dtype | str, progress: bool = True) -> None:
        self.source, self.progress = source, progress
        loaded: Any = AutoModelForImageTextToText.from_pretrained(
            source,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            device_map={"": "meta"},
        )
        self.model: PreTrainedModel
        self.found: dict[str, Any]
        self.model, self.found = loaded
        if getattr(self.model, "hf_quantizer", None) is not None:
            raise UserError(f"{source}: the weights are quantised; an engine that shards needs the unquantised model")
        self._blank = deepcopy(self.model)
        self._mapping: Any = get_model_conversion_mapping(self._blank)
        self._files = {key: file for file in _files(source) for key in _keys(file)}
        self._sources = sources(self._blank, list(self._files))
        self._settle_tied()
        compute_buffers(self.model)

    def weights(self) -> Weights:
        """Every parameter and persistent buffer of the model, in its order, once."""
        names = {id(tensor): name for name, tensor in reversed(self._tensors().items())}
        aliases = {name: names[id(tensor)] for name, tensor in self._tensors().items()}
        place = {name: i for i, name in enumerate(aliases)}
        left = set(aliases.values())
        order = sorted(self._sources, key=place.__getitem__)
        for first in logging.tqdm(order, desc="Loading weights", disable=not self.progress):
            for name, tensor in self._convert(self._sources[first]).items():
                if aliases[name] in left:
                    left.remove(aliases[name])
                    yield aliases[name], tensor
        if left:
            raise UserError(f"{self.source}: the weights lack {len(left)} tensors, among them {min(left)}; {REMEDY}")

    def _tensors(self) -> dict[str, Tensor]:
        return self.model.state_dict(keep_vars=True)

    def _convert(self, keys: list[str]) -> dict[str, Tensor]:
        """The parameters that are made of the stored tensors ``keys``."""
        model = self._blank
        with ExitStack() as opened, _no_bar():
            files = {file: opened.enter_context(safe_open(file, "pt")) for file in {self._files[key] for key in keys}}
            found, _ = convert_and_load_state_dict_in_model(
                model,
                {key: files[self._files[key]].get_slice(key) for key in keys},
                # Types are those of the model on the meta device.
                LoadStateDictConfig(weight_mapping=self._mapping),
            )
        if found.mismatched_keys or found.unexpected_keys or found.conversion_errors:
            odd = sorted(
                [*(name for name, *_ in found.mismatched_keys), *found.unexpected_keys, *found.conversion_errors]
            )
            raise UserError(f"{self.source}: {keys[0]} cannot be converted to {min(odd)}; {REMEDY}")
        made = {}
        for name, tensor in model.state_dict().items():
            if name not in found.missing_keys:
                made[name] = tensor
                set_tensor(model, name, torch.empty_like(tensor, device="meta"))
        return made

    def _settle_tied(self) -> None:
        """Where two tensors that the configuration ties are both stored, the files decide. transformers compares their
        values, which are not there on the meta device."""
        stored = {name for name in self._tensors() if name in self._sources}
        for target, source in list(self.model.all_tied_weights_keys.items()):
            if not {target, source} <= stored:
                continue
            if self._raw(target).equal(self._raw(source)):
                set_tensor(self.model, target, self.model.get_parameter(source))
            else:
                self.model.all_tied_weights_keys.pop(target)

    def _raw(self, name: str) -> Tensor:
        [key] = self._sources[name]
        with safe_open(self._files[key], "pt") as file:
            return file.get_tensor(key)


def sources(model: PreTrainedModel, keys: list[str]) -> dict[str, list[str]]:
    """Parameters of the model, each with the stored tensors that it is made of, as transformers renames them. Where one
    set of stored tensors makes several parameters, the first of them stands for all. Keys that the model does not have
    are left out."""
    mapping = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    names, prefix = model.state_dict(), model.base_model_prefix
    made: dict[str, list[str]] = defaultdict(list)
    for key in keys:
        name, _ = rename_source_key(key, renamings, converters, prefix, names)
        if name not in names and key in names:  # as transformers does
            name, _ = rename_source_key(key, [], [], prefix, names)
        if name in names:
            made[name].append(key)
    return dict(made)


def set_tensor(model: nn.Module, name: str, value: Tensor) -> None:
    """Replace a parameter or buffer, everywhere where the model uses it. Parameters keep whether they are trained."""
    path, _, own = name.rpartition(".")
    old = getattr(model.get_submodule(path), own)
    if isinstance(old, nn.Parameter) and not isinstance(value, nn.Parameter):
        value = nn.Parameter(value, requires_grad=old.requires_grad)
    for module in model.modules():
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for table in tables:
            table.update({each: value for each, tensor in table.items() if tensor is old})


def compute_buffers(model: PreTrainedModel) -> None:
    """Give the buffers that no checkpoint holds (rotary frequencies, scales) their values, in main memory."""
    for name, buffer in list(model.named_non_persistent_buffers()):
        path, _, own = name.rpartition(".")
        module: Any = model.get_submodule(path)
        setattr(module, own, torch.empty_like(buffer, device="cpu"))
        module._is_hf_initialized = False  # asks for it again, of this module alone
    model.initialize_weights()


@contextmanager
def _no_bar() -> Iterator[None]:
    """Without transformers' own progress bar: one for each parameter."""
    if not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


def _files(source: str) -> list[str]:
    """The weights of a checkpoint: one file, or those that its index lists."""
    quiet = {"_raise_exceptions_for_missing_entries": False}
    single = cached_file(source, SAFE_WEIGHTS_NAME, **quiet)
    if single is not None:
        return [single]
    index = cached_file(source, SAFE_WEIGHTS_INDEX_NAME)
    listed = sorted(set(read_json(Path(str(index)), REMEDY)["weight_map"].values()))
    return [str(cached_file(source, name)) for name in listed]


def _keys(file: str) -> list[str]:
    with safe_open(file, "pt") as tensors:
        return list(tensors.keys())
