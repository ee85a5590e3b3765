"""Where released files and the model in memory differ: tied output layers, the orientation of experts, unstated fields.

transformers decides from ``config.json`` whether the output layer is the embedding table. Released configurations do
not always say so (InternVL's has no ``tie_word_embeddings``, the class default is true); a resize then ties, and the
stored output layer is gone. Here the stored weights decide, and what they say is kept in the configuration.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from realvr.families import Stock
from realvr.runs.files import write_json
from realvr.runs.quiet import quiet_deepspeed

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from realvr.families import Family

HEAD = "lm_head.weight"
_KEY = "tie_word_embeddings"


def settle_output_layer(source: str, model: Stock, missing: Collection[str]) -> set[str]:
    """Tie the output layer to the embedding table where the stored weights do, and only there.

    Stored and different from the table: a matrix of its own. Not stored: the table. ``missing`` are the tensors of the
    model that the files lack; returned are those that are still needed. Where ``config.json`` states the opposite, a
    notice is printed.
    """
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    absent = HEAD in missing
    if absent:
        head.weight = table.weight
    tied = head.weight is table.weight
    stated = _stated(source)
    if stated is not None and stated != tied:
        found = (
            "the weights hold no output layer: the input embeddings are used"
            if absent
            else "the stored output layer differs from the input embeddings: it is kept"
        )
        warnings.warn(f"{source}: config.json says {_KEY} is {str(stated).lower()}, but {found}", stacklevel=3)
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = tied
    return set(missing) - {HEAD}


def _stated(source: str) -> bool | None:
    """What the file itself says; older files say it inside ``text_config``."""
    from transformers import PreTrainedConfig

    fields, _ = PreTrainedConfig.get_config_dict(source)
    for part in (fields, fields.get("text_config") or {}):
        if isinstance(part.get(_KEY), bool):
            return part[_KEY]
    return None


def save_weights(
    model: PreTrainedModel, directory: Path, transposed: tuple[str, ...], state: dict[str, Tensor] | None = None
) -> None:
    """``save_pretrained`` of the model's weights, or of those in ``state``, with the tensors whose names end in
    ``transposed`` in the orientation of released files.

    transformers turns them over when it loads them and leaves them so when it saves. It tells the orientation by the
    shape, so a square matrix is never turned over and is written as it is.
    """
    quiet_deepspeed()
    if not transposed:
        model.save_pretrained(directory, state_dict=state)
        return
    turned = {
        name: tensor.transpose(1, 2) if name.endswith(transposed) and tensor.shape[1] != tensor.shape[2] else tensor
        for name, tensor in (model.state_dict() if state is None else state).items()
    }
    # Released names are the module names here. The conversion of the original format would turn the tensors back.
    model.save_pretrained(directory, state_dict=turned, save_original_format=False)


def as_released(directory: Path, family: Family) -> None:
    """Remove from ``config.json`` what released files of the family do not state, for small checkpoints in their place.
    No released file states inside ``text_config`` whether the output layer is tied."""
    file = directory / "config.json"
    fields = json.loads(file.read_text())
    for name in family.unstated:
        fields.pop(name, None)
    fields["text_config"].pop(_KEY, None)
    write_json(file, fields)
