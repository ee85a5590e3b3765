"""How a checkpoint asks to be decoded: the end tokens of its ``generation_config.json``, and what is left out here."""

from __future__ import annotations

from typing import Any

from realvr.errors import UserError
from realvr.families import Stock

# Values at which stock ``generate`` does what greedy decoding does. A field that is absent has this value.
_NEUTRAL: dict[str, Any] = {
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "min_length": 0,
    "min_new_tokens": 0,
    "guidance_scale": 1.0,
    "do_sample": False,
}
_OTHERS = ("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "sequence_bias", "forced_eos_token_id")
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p")


def ignored_defaults(model: object) -> dict[str, Any]:
    """Fields of a checkpoint's generation defaults that stock ``generate`` obeys and decoding here does not."""
    settings = getattr(model, "generation_config", None)
    if settings is None:
        return {}
    names = [*_NEUTRAL, *_OTHERS, *(_SAMPLING if getattr(settings, "do_sample", None) else ())]
    found = {name: getattr(settings, name, None) for name in names}
    return {name: value for name, value in found.items() if value is not None and value != _NEUTRAL.get(name)}


def end_ids(model: Stock, tokenizer: Stock) -> tuple[int, ...]:
    """All ids that end a reply: those of the generation defaults and the tokenizer's own."""
    eos = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = list(eos) if isinstance(eos, list | tuple) else ([eos] if eos is not None else [])
    if not all(isinstance(i, int) for i in ids):
        raise UserError(f"generation_config.json: eos_token_id is {eos!r}, not a list of ids; copy the original's")
    if tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    return tuple(sorted({int(i) for i in ids}))
