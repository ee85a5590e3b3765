"""What is looked at in a checkpoint before its weights are read: its files may be damaged, or written to do harm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from realvr.backbone.model_files import REMEDY
from realvr.backbone.rendering import TemplateError, render
from realvr.errors import UserError
from realvr.families import Stock
from realvr.runs.files import read_json

MOST_LAYERS = 10_000
_LAYERS = ("num_hidden_layers", "depth")
_WIDTHS = ("hidden_size", "intermediate_size", "vocab_size", "num_attention_heads", "num_heads")


def check_vocabulary(source: str) -> None:
    """Name the file where a tokenizer that cannot be loaded is no JSON object."""
    for name in ("tokenizer.json", "vocab.json"):
        if (Path(source) / name).is_file():
            read_json(Path(source) / name, REMEDY)


def check_numbers(file: Path, fields: dict[str, Any]) -> None:
    """Refuse sizes that no model has, before lists of that length are made."""
    parts = (fields, fields.get("text_config"), fields.get("vision_config"))
    for part in (part for part in parts if isinstance(part, dict)):
        for name in (*_LAYERS, *_WIDTHS):
            value = part.get(name)
            if not isinstance(value, int):
                continue  # absent, or refused with its type by transformers
            if value < 1 or (name in _LAYERS and value > MOST_LAYERS):
                raise UserError(f"{file}: {name} is {value}, which no model has; {REMEDY}")


def check_size(source: str, config: object) -> None:
    """Refuse a configuration whose model is far larger than the weights there are: transformers would fill the rest of
    it with random numbers, however much memory that takes, before it compares shapes."""
    try:
        stored = sum(_elements(Path(source))) if Path(source).is_dir() else 0
    except (SafetensorError, OSError):
        return  # damaged weights are reported when they are read
    if not stored:
        return
    from transformers import AutoModelForImageTextToText

    try:
        with torch.device("meta"):
            model = AutoModelForImageTextToText.from_config(config)
    except Exception as error:  # whatever a configuration that fits no model leads to
        raise UserError(f"{source}: the configuration describes no model ({first_line(error)})") from error
    wanted = sum(parameter.numel() for parameter in model.parameters())
    if wanted > 2 * stored:
        raise UserError(
            f"{source}: config.json describes a model of {wanted:,} parameters, the weights hold {stored:,}; copy both "
            "from the same model"
        )


def _elements(directory: Path) -> Iterator[int]:
    for file in directory.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  it is no dictionary
                yield torch.Size(tensors.get_slice(name).get_shape()).numel()


def check_template(source: str, tokenizer: Stock) -> None:
    """Refuse a chat template that cannot be rendered, or whose replies open with a think block."""
    if not tokenizer.chat_template:
        return  # reported when a prompt is built
    question = {"role": "user", "content": [{"type": "text", "text": "?"}]}
    try:
        text = render(tokenizer, [question], generation_prompt=True)
    except TemplateError as error:
        raise UserError(f"{source}: the chat template cannot be used ({error})") from error
    if text.rfind("<think>") > text.rfind("</think>"):
        name = Path(source).name
        other = name.replace("Thinking", "Instruct") if "Thinking" in name else "the Instruct variant of this model"
        raise UserError(
            f"{source}: the chat template opens every reply with <think> (a Thinking variant): a latent span would "
            f"stand inside the think block, and the template drops that block from earlier turns; use {other}"
        )


def first_line(error: BaseException) -> str:
    """What an error of a library says, in one line."""
    first, *rest = (str(error).strip() or type(error).__name__).splitlines()
    return f"{first} {rest[0].strip()}" if rest and first.endswith(":") else first
