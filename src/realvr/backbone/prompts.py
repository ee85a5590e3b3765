"""From a conversation to token ids.

For ordinary text the ids are those of the stock ``AutoProcessor.apply_chat_template(tokenize=True)``. Departure, on
purpose: the stock path renders the template to one string and looks for special tokens in all of it, so a question that
contains ``<|im_end|>`` or ``<|image_pad|>`` forges a turn or an image. Here the template sees a sentinel in place of
each text, so that we know for every character who wrote it; special tokens are recognised only where the template (or
we) wrote them. Everything between two recognised special tokens is one run, as in stock, so BPE merges across
the border of template and text are the same. A template that looks *into* a text sees the sentinel instead and leaves
the text whole.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from realvr.backbone.rendering import TemplateError, render
from realvr.backbone.types import Prompt, Turn
from realvr.errors import UserError
from realvr.families import LVR_END, LVR_SLOT, LVR_START, MARKERS, Stock
from realvr.imaging.types import ImageInput

if TYPE_CHECKING:
    from realvr.families import Family
    from realvr.imaging.processing import ImageProcessor
    from realvr.imaging.types import ImageInput

# What an added token with lstrip or rstrip swallows: the Unicode White_Space property. Python's str.strip() also takes
# U+001C..U+001F, which the Rust tokenizers do not.
_WHITESPACE = "\t\n\v\f\r \x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000"
_PRIVATE_USE = (*range(0xE000, 0xF900), *range(0xF0000, 0xFFFFE), *range(0x100000, 0x10FFFE))


@dataclass(frozen=True)
class _Text:
    """Characters and their author: ``trusted`` ones come from the template or from us."""

    text: str
    trusted: bool


@dataclass(frozen=True)
class _Ids:
    """Ids that no text stands for. ``reply`` marks the saved ids of an assistant turn."""

    ids: list[int]
    reply: bool = False


@dataclass(frozen=True)
class _Image:
    """The place of the next image."""


_Item = _Text | _Ids | _Image


class PlainText:
    """Encodes text in which no special or control token exists.

    Works on a private copy of the fast tokenizer, in which every control token counts as special and special tokens are
    split: the caller's tokenizer keeps its settings, and a vision token that was added as an ordinary token (which
    ``split_special_tokens`` alone would still match) is covered too. Other ordinary added tokens (``<think>``) match as
    they do in the stock tokenizer.
    """

    def __init__(self, tokenizer: Stock, control: Sequence[str]) -> None:
        from tokenizers import AddedToken

        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise UserError(f"{type(tokenizer).__name__} is not a fast tokenizer: a tokenizer.json is needed")
        added = tokenizer.added_tokens_decoder
        names = {token.content for token in added.values() if token.special} | set(tokenizer.all_special_tokens)
        names |= {name for name in control if tokenizer.backend_tokenizer.token_to_id(name) is not None}
        self._backend = copy.deepcopy(tokenizer.backend_tokenizer)
        self.special: dict[str, tuple[int, Any]] = {}
        by_content = {token.content: token for token in added.values()}
        for name in sorted(names - {""}):
            token = by_content.get(name) or AddedToken(name, special=True, normalized=False)
            self.special[name] = (self._backend.token_to_id(name), token)
        self._backend.add_special_tokens(
            [AddedToken(name, lstrip=t.lstrip, rstrip=t.rstrip, normalized=t.normalized, special=True)
             for name, (_, t) in self.special.items()]
        )  # fmt: skip
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = True
        # The unknown token stands for a character outside the vocabulary, as in the stock tokenizer.
        self._ids = {token_id for name, (token_id, _) in self.special.items() if name != tokenizer.unk_token}
        longest_first = sorted(self.special, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def __call__(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """``(ids, offsets)``: per token its half-open range of characters of ``text``."""
        encoding = self._backend.encode(text, add_special_tokens=False)
        if not self._ids.isdisjoint(encoding.ids):
            # Only a vocabulary whose own model (not its added tokens) produces a control token gets here.
            found = next(name for name, (i, _) in self.special.items() if i in encoding.ids)
            raise UserError(f"the tokenizer cannot write {found!r} as ordinary text; remove it from the text")
        return list(encoding.ids), list(encoding.offsets)


class _Writer:
    """Collects ids; text is held back until a special token ends its run."""

    def __init__(self, plain: PlainText) -> None:
        self.ids: list[int] = []
        self._plain = plain
        self._run = ""
        self._strip_left = False
        self._reply_end: int | None = None

    def text(self, item: _Text) -> None:
        if not item.trusted:
            self._run += item.text
            return
        position = 0
        for match in self._plain.pattern.finditer(item.text):
            self._run += item.text[position : match.start()]
            self._special(match.group())
            position = match.end()
        self._run += item.text[position:]

    def splice(self, ids: Sequence[int], reply: bool = False) -> None:
        self.flush()
        self.ids.extend(ids)
        self._reply_end = ids[-1] if reply and ids else None

    def _special(self, name: str) -> None:
        token_id, token = self._plain.special[name]
        self.flush(strip_right=token.lstrip)
        # A reply saved with its end-of-turn token, which the template writes as well: keep one.
        if token_id != self._reply_end:
            self.ids.append(token_id)
        self._reply_end = None
        self._strip_left = token.rstrip

    def flush(self, strip_right: bool = False) -> None:
        run = self._run.lstrip(_WHITESPACE) if self._strip_left else self._run
        run = run.rstrip(_WHITESPACE) if strip_right else run
        if run:
            self.ids.extend(self._plain(run)[0])
            self._reply_end = None
        self._run, self._strip_left = "", False


class PromptEncoder:
    """Conversations to ``Prompt``, for one tokenizer and one image processor."""

    def __init__(self, tokenizer: Stock, family: Family, processor: ImageProcessor, context_length: int) -> None:
        self.tokenizer = tokenizer
        self.family = family
        self.processor = processor
        self.context_length = context_length
        self._plain = PlainText(tokenizer, (*MARKERS, *family.never_sampled, family.placeholder, family.image_token))
        self.image_token_id: int = self._required(family.image_token, f"is not a {family.name} tokenizer")

    def encode(
        self,
        turns: Sequence[Turn],
        *,
        generation_prompt: bool = True,
        continue_from: Prompt | int | None = None,
    ) -> Prompt:
        """Encode a conversation.

        ``generation_prompt`` opens an assistant turn at the end. With ``continue_from`` (what has been processed
        already, or its length) only the new part is returned, see ``tail``.
        """
        self._check(turns)
        items = self._expand(self._render(turns, generation_prompt), turns)
        sources = [source for turn in turns for source in turn.images]
        images = tuple(source if isinstance(source, ImageInput) else self.processor(source) for source in sources)
        ids = self._write(items, images)
        visual = sum(image.tokens for image in images)
        if len(ids) > self.context_length:
            raise UserError(
                f"prompt has {len(ids)} tokens ({visual} of them visual), the model's context is "
                f"{self.context_length}: shorten the text, or use a smaller visual-token budget or fewer images"
            )
        latents = tuple(turn.latents for turn in turns if turn.latents is not None and len(turn.latents))
        prompt = Prompt(torch.tensor(ids, dtype=torch.long), images, latents)
        if continue_from is None:
            return prompt
        slot_id = self._plain.special.get(LVR_SLOT, (-1, None))[0]
        return tail(prompt, continue_from, self.image_token_id, slot_id)

    def encode_text(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Plain assistant text: ``(ids, offsets)``, offsets being half-open character ranges that leave no visible
        character out. Control strings in it are ordinary text."""
        _check_unicode(text, "text")
        ids, offsets = self._plain(text)
        return ids, _without_gaps(text, offsets)

    def _required(self, name: str, otherwise: str) -> int:
        if name not in self._plain.special:
            raise UserError(f"the tokenizer has no {name} token: it {otherwise}")
        return self._plain.special[name][0]

    def _check(self, turns: Sequence[Turn]) -> None:
        if not turns:
            raise UserError("the conversation is empty: give at least one turn")
        for number, turn in enumerate(turns, 1):
            where = f"turn {number} ({turn.role})"
            if turn.role not in ("system", "user", "assistant"):
                raise UserError(f"{where}: the role is not one of system, user, assistant")
            _check_unicode(turn.text, where)
            if turn.role != "assistant" and (turn.latents is not None or turn.ids is not None):
                raise UserError(f"{where}: only an assistant turn can carry latents or saved ids")
            if turn.latents is not None and turn.latents.ndim != 2:
                raise UserError(f"{where}: latents have shape {tuple(turn.latents.shape)}, expected (K, D)")
            reserved = {self.image_token_id, self._plain.special.get(LVR_SLOT, (None, None))[0]}
            if turn.ids is not None and not reserved.isdisjoint(turn.ids):
                raise UserError(f"{where}: saved ids contain a visual or latent token")

    def _render(self, turns: Sequence[Turn], generation_prompt: bool) -> list[_Item]:
        """The template's text with the turns' bodies in place of their sentinels."""
        template = self.tokenizer.chat_template
        if not template:
            raise UserError("the tokenizer has no chat template: use an instruction-tuned checkpoint")
        taken = {char for turn in turns for char in turn.text} | set(str(template))
        mark = next(chr(code) for code in _PRIVATE_USE if chr(code) not in taken)
        bodies: dict[int, list[_Item]] = {}
        messages = []
        for index, turn in enumerate(turns):
            shown, bodies[index] = self._body(turn, f"{mark}{index}{mark}")
            parts = [{"type": "image"} for _ in turn.images] + [{"type": "text", "text": shown}]
            messages.append({"role": turn.role, "content": parts})
        try:
            text = render(self.tokenizer, messages, generation_prompt)
        except TemplateError as error:
            roles = ", ".join(f"{turn.role} with {len(turn.images)} image(s)" for turn in turns)
            raise UserError(f"the chat template refuses this conversation ({roles}): {error}") from error
        pieces = re.split(f"{mark}(\\d+){mark}", text)
        for index, turn in enumerate(turns):
            count = pieces[1::2].count(str(index))
            if bodies[index] and count != 1:
                raise UserError(f"the chat template writes the text of turn {index + 1} ({turn.role}) {count} times")
        items: list[_Item] = []
        for position, piece in enumerate(pieces):
            items += bodies[int(piece)] if position % 2 else [_Text(piece, True)]
        return items

    def _body(self, turn: Turn, sentinel: str) -> tuple[str, list[_Item]]:
        """``(what the template sees, what the sentinel in it stands for)``.

        The text's own outer whitespace stays visible, so that a template that trims does what it does on the text. A
        latent span comes before the text, so that leading whitespace is no longer outer there.
        """
        items: list[_Item] = []
        if turn.latents is not None and len(turn.latents):
            for name in MARKERS:
                self._required(name, "was not prepared for latent spans")
            slots = [self._plain.special[LVR_SLOT][0]] * len(turn.latents)
            items = [_Text(LVR_START, True), _Ids(slots), _Text(LVR_END, True)]
        if turn.ids is not None:
            return sentinel, [*items, _Ids(list(turn.ids), reply=True)]
        left = turn.text.lstrip()
        lead, core = turn.text[: len(turn.text) - len(left)], left.rstrip()
        trail = left[len(core) :]
        if items:
            return sentinel + trail, [*items, _Text(lead + core, False)]
        if not core:
            return turn.text, []
        return lead + sentinel + trail, [_Text(core, False)]

    def _expand(self, items: list[_Item], turns: Sequence[Turn]) -> list[_Item]:
        """Replace the placeholders that the template wrote by what the family's processor writes for an image."""
        expanded: list[_Item] = []
        for item in items:
            if not isinstance(item, _Text) or not item.trusted:
                expanded.append(item)
                continue
            first, *rest = item.text.split(self.family.placeholder)
            expanded.append(_Text(first, True))
            for piece in rest:
                expanded += [_Text(self.family.before, True), _Image(), _Text(self.family.after + piece, True)]
        found = sum(isinstance(item, _Image) for item in expanded)
        wanted = sum(len(turn.images) for turn in turns)
        if found != wanted:
            roles = ", ".join(f"{len(t.images)} in turn {n} ({t.role})" for n, t in enumerate(turns, 1) if t.images)
            raise UserError(
                f"the chat template wrote {found} image placeholders for {wanted} images ({roles or 'none given'}): "
                "it does not support images there"
            )
        return expanded

    def _write(self, items: list[_Item], images: Sequence[ImageInput]) -> list[int]:
        writer = _Writer(self._plain)
        remaining = iter(images)
        for item in items:
            if isinstance(item, _Text):
                writer.text(item)
            elif isinstance(item, _Image):
                writer.splice([self.image_token_id] * next(remaining).tokens)
            else:
                writer.splice(item.ids, item.reply)
        writer.flush()
        return writer.ids


def _without_gaps(text: str, offsets: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """A normaliser that composes (NFC) reports the first character of ``e`` + accent only: give the token both."""
    starts = {start for start, _ in offsets}
    closed = []
    for start, stop in offsets:
        while stop < len(text) and stop > start and stop not in starts and not text[stop].isspace():
            stop += 1
        closed.append((start, stop))
    return closed


def _check_unicode(text: str, where: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: the text holds a lone surrogate at character {error.start}") from error


def tail(prompt: Prompt, seen: Prompt | int, image_token_id: int, slot_id: int) -> Prompt:
    """The part of ``prompt`` after ``seen``, the tokens processed already, with its own images and latents only.

    Given as a ``Prompt``, ``seen`` must be a beginning of ``prompt``: ids, images and latents. A cut through an image
    or a latent span is refused, because its tokens are processed together.
    """
    cut = seen if isinstance(seen, int) else len(seen)
    if not 0 <= cut <= len(prompt):
        raise UserError(f"the conversation has {len(prompt)} tokens, fewer than the {cut} already processed")
    head = prompt.ids[:cut]
    if isinstance(seen, Prompt):
        different = (head != seen.ids).nonzero()
        if len(different):
            at = int(different[0])
            raise UserError(f"the conversation does not continue the one already processed: they differ at token {at}")
    sizes = [image.tokens for image in prompt.images]
    images = _whole(int((head == image_token_id).sum()), sizes, "an image", cut)
    latents = _whole(int((head == slot_id).sum()), [len(z) for z in prompt.latents], "a latent span", cut)
    if isinstance(seen, Prompt):
        _check_same(prompt, seen, images, latents)
    return Prompt(prompt.ids[cut:], prompt.images[images:], prompt.latents[latents:])


def _whole(count: int, sizes: Sequence[int], what: str, cut: int) -> int:
    """How many of the blocks of ``sizes`` tokens the first ``count`` such tokens are exactly."""
    totals = list(itertools.accumulate(sizes, initial=0))
    if count not in totals:
        raise UserError(f"the conversation cannot be continued at token {cut}: this is inside {what}")
    return totals.index(count)


def _check_same(prompt: Prompt, seen: Prompt, images: int, latents: int) -> None:
    """Equal ids do not mean equal inputs: every image of one size has the same ids."""
    if [image.key for image in seen.images] != [image.key for image in prompt.images[:images]]:
        raise UserError("the conversation does not continue the one already processed: its images are different")
    pairs = list(zip(seen.latents, prompt.latents, strict=False))
    same = len(seen.latents) == latents and all(
        a.shape == b.shape and torch.equal(a.detach().float().cpu(), b.detach().float().cpu()) for a, b in pairs
    )
    if not same:
        raise UserError("the conversation does not continue the one already processed: its latents are different")
