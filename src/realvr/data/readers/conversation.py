"""LLaVA-style conversations, shared by the LVR and Visual-CoT readers."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from realvr.data import reasons
from realvr.data.readers.base import Context, asked_text, is_blank, require
from realvr.data.reasons import BadRow
from realvr.data.sample import Message, Role, strip_image_tags

_ROLES: dict[str, Role] = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
}
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_LATENT = re.compile(r"<\|?lvr(?:_start|_end)?\|?>")


def turns_of(row: dict[str, Any]) -> list[tuple[Role, str]]:
    """(role, text) of ``conversations``, checked."""
    conversation = require(row, "conversations")
    if not isinstance(conversation, list) or not conversation:
        raise BadRow(reasons.FIELD_TYPE, "'conversations' is not a list of turns")
    turns: list[tuple[Role, str]] = []
    for turn in conversation:
        if not isinstance(turn, dict):
            raise BadRow(reasons.FIELD_TYPE, f"a turn is {type(turn).__name__}, an object is expected")
        role = _ROLES.get(str(turn.get("from", turn.get("role"))))
        text = turn.get("value", turn.get("content"))
        if role is None or not isinstance(text, str):
            raise BadRow(reasons.FIELD_TYPE, f"a turn has no role or no text: {turn!r:.60}")
        turns.append((role, text))
    return turns


def messages_of(turns: list[tuple[Role, str]], images: int, ctx: Context) -> list[Message]:
    """Turns before the reply, each with the images its ``<image>`` marks claim, in the order of the row's list.

    Images without a mark follow the last marked one, in its turn (in the first user turn where there is no mark), so
    that the prompt shows the list in order and "image 2" in the text is the second image.
    """
    messages: list[Message] = []
    used = marks = 0
    for role, text in turns:
        plain, count = strip_image_tags(text, start=marks + 1)
        marks += count
        claimed = tuple(range(used, min(images, used + count))) if role == "user" else ()
        used += len(claimed)
        messages.append(Message(role, plain, claimed))
    if marks and marks != images:
        ctx.note(reasons.IMAGE_COUNT_MISMATCH, f"{marks} <image> marks, {images} images")
    first = next((index for index, message in enumerate(messages) if message.role == "user"), None)
    if first is None:
        raise BadRow(reasons.QUESTION_EMPTY, "no user turn")
    if used < images:
        last = max((index for index, message in enumerate(messages) if message.images), default=first)
        messages[last] = replace(messages[last], images=(*messages[last].images, *range(used, images)))
    asked_text(next(message.text for message in reversed(messages) if message.role == "user"), "the last user turn")
    return messages


def answer_of(reply: str) -> tuple[str, str]:
    """(answer, response) of a reply: the last ``<answer>`` block, and the whole text where that says more."""
    plain = _LATENT.sub("", reply).strip()
    # Blocks lie before the last closing tag; opening tags after it would each be followed to the end of the text.
    before, close, after = plain.rpartition("</answer>")
    blocks = _ANSWER.findall(before + close)
    answer = (blocks[-1] if blocks else plain).strip()
    if is_blank(answer):
        raise BadRow(reasons.ANSWER_EMPTY, "the reply holds no answer")
    more = (_ANSWER.sub("", before + close) + after).strip() if blocks else ""
    return answer, plain if more else ""
