"""Who looks where while a model answers: the answer it generates, then one teacher-forced pass over it with probes.

The columns of a row, in order: the prompt (left-padded to T), ``<|lvr_start|>``, z_1 … z_K, ``<|lvr_end|>``, the
generated tokens. The pass feeds everything behind the prompt once more, on the keys and values of the prompt, so a
probe sees the queries of markers, latents and answer, and the keys of all columns. Its queries are numbered from
``<|lvr_start|>`` (without a span: from the first generated token); its keys by absolute column.

Two queries belong to a token, and they are not the same. Its *own position* is where the token is fed; that query has
read it. The position before it is the query that *predicts* it, and has not. `Attending.content` gives own positions,
as the readout r_t(y) of training takes them, and `Attending.predicting` the query before the first content token.

Content positions are what `realvr.data.wording.readout_text` marks in an answer of training, found in generated text:
the tokens that overlap what stands inside the first ``<answer>`` block, without white space around it; of a model that
was taught to spell options out, also the line before the block, if it is the text of an option. A reply without a
whole block counts with all its tokens (`Generated.block` is False, and it is never a right answer unless the parser
reads it otherwise). The end-of-sequence token and an empty reply have no content: `Generated.content` is then empty.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from realvr.answers import parser
from realvr.answers.judge import equal
from realvr.backbone.attention import Matrix, Probe
from realvr.backbone.backbone import Backbone
from realvr.data.sample import Sample
from realvr.diagnostics.measuring.reading import Reading
from realvr.latent.group_rollout import Completion, decode
from realvr.latent.sampling import Sampling
from realvr.latent.span import extend, prefill, span_tokens
from realvr.latent.state import State

_BLOCK = re.compile(r"<answer>\s*(.*?)\s*</answer>", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True)
class Generated:
    """A generated answer. ``content`` numbers those of its ids that are the answer itself."""

    ids: list[int]
    """Without the end-of-sequence token."""
    text: str
    content: list[int]
    block: bool
    """Whether the reply has an ``<answer>`` block with something in it."""
    extracted: str | None
    correct: bool


def content_spans(text: str, choices: Sequence[str], spell_out: bool) -> list[tuple[int, int]]:
    """Characters of a reply that are the answer itself; empty without an ``<answer>`` block that holds something."""
    found = _BLOCK.search(text)
    if found is None or not found[1]:
        return []
    spans = [found.span(1)]
    before = text[: found.start()].rstrip()
    start = before.rfind("\n") + 1
    start += len(before[start:]) - len(before[start:].lstrip())
    if spell_out and before[start:] in choices:
        spans.insert(0, (start, len(before)))
    return spans


def token_offsets(backbone: Backbone, ids: Sequence[int]) -> list[tuple[int, int]]:
    """Characters of each generated token in the decoded text. Re-encoding the text need not give the same tokens."""
    decode_ids = backbone.tokenizer.decode
    ends = [len(decode_ids(list(ids[:count]), skip_special_tokens=False)) for count in range(len(ids) + 1)]
    return list(zip(ends[:-1], ends[1:], strict=True))


def generated(backbone: Backbone, sample: Sample, completion: Completion, policy: str = "strict") -> Generated:
    """A completion with its content positions and verdict."""
    ids = [int(token) for token in completion.reply_ids]
    spans = content_spans(completion.text, sample.choices, backbone.spell_out)
    if spans:
        offsets = token_offsets(backbone, ids)
        content = [i for i, (a, b) in enumerate(offsets) if any(a < stop and b > first for first, stop in spans)]
    else:
        content = list(range(len(ids)))
    read = parser(policy, "evaluation").read(completion.text, sample.choices)
    return Generated(ids, completion.text, content, bool(spans), read, bool(equal(read, sample.answer, sample.choices)))


def answer(
    backbone: Backbone, reading: Reading, sampling: Sampling, latents: int, policy: str = "strict"
) -> list[Generated]:
    """The greedy answer to every sample that was read, whatever the temperature of ``sampling``."""
    if reading.after is None:
        return []
    room = backbone.context_length - span_tokens(latents)
    limits = [min(sampling.max_new, room - len(prompt)) for prompt in reading.prompts]
    groups = decode(backbone, reading.after, 1, replace(sampling, temperature=0.0), 0, limits)
    rows = zip(reading.samples, groups, strict=True)
    return [generated(backbone, sample, group[0], policy) for sample, group in rows]


class Attending:
    """A batch that was read and answered. `look` runs the pass; the other methods give rows and columns for probes."""

    def __init__(
        self, backbone: Backbone, reading: Reading, answers: Sequence[Generated], latents: int | None = None
    ) -> None:
        if reading.prompt is None or reading.latents_RKD is None:
            raise ValueError("nothing could be read: there is no row to look at")
        self.backbone, self.reading, self.answers = backbone, reading, list(answers)
        self.latents = int(reading.latents_RKD.shape[1]) if latents is None else latents
        self.before = span_tokens(self.latents)
        """Queries of the pass before the first generated token."""
        self.first = reading.prompt.length
        """Column of the first query of the pass."""

    @property
    def slots(self) -> slice:
        """Columns of z_1 … z_K."""
        return slice(self.first + 1, self.first + 1 + self.latents) if self.latents else slice(self.first, self.first)

    @property
    def queries(self) -> int:
        """Queries of the pass, padding included."""
        return self.before + max((len(one.ids) for one in self.answers), default=0)

    def look(self, probes: Sequence[Probe] = (), matrix: Matrix | None = None) -> State:
        """The pass, once, with these probes. Nothing is done where there is no query: no span and empty replies."""
        prompt, backbone = self.reading.prompt, self.backbone
        assert prompt is not None and self.reading.latents_RKD is not None
        if not self.queries:
            return prompt
        ids_BS, real_BS = _padded([one.ids for one in self.answers], backbone.device)
        embeds = [backbone.embed(ids_BS)]
        if self.latents:
            markers = torch.tensor([[backbone.markers.start, backbone.markers.end]], device=backbone.device)
            start, end = backbone.embed(markers.expand(len(self.answers), -1)).split(1, dim=1)
            embeds = [start, self.reading.latents_RKD.to(start), end, *embeds]
        real = torch.nn.functional.pad(real_BS, (self.before, 0), value=True)
        full = None if bool(real.all()) else real
        state, _ = extend(
            backbone, prompt, embeds_BSD=torch.cat(embeds, dim=1), real_BS=full, probes=probes, matrix=matrix
        )
        return state

    # ------------------------------------------------------------------ queries: rows of the pass

    def latent_rows(self) -> Tensor:
        """(B, K): where z_1 … z_K are fed."""
        return torch.arange(1, 1 + self.latents, device=self.backbone.device).expand(len(self.answers), -1)

    def content(self) -> tuple[Tensor, Tensor]:
        """(B, R) own positions of the content tokens, and which of them are real."""
        return _padded([[self.before + place for place in one.content] for one in self.answers], self.backbone.device)

    def predicting(self) -> tuple[Tensor, Tensor]:
        """(B, 1) the query that predicts the first content token, and whether there is one in this pass: not where an
        answer has no content, nor where the first token is content and there is no span. `predicting_in_prompt` then
        is the last token of the prompt."""
        places = [self.before + one.content[0] - 1 if one.content else -1 for one in self.answers]
        rows = torch.tensor(places, device=self.backbone.device)[:, None]
        return rows.clamp(min=0), rows >= 0

    def predicting_in_prompt(self) -> Tensor:
        """(B,) whether the last token of the prompt predicts the first content token."""
        ahead = [bool(one.content) and self.before + one.content[0] == 0 for one in self.answers]
        return torch.tensor(ahead, device=self.backbone.device)

    def look_from_prompt(self, probes: Sequence[Probe]) -> None:
        """The prompts once more, with probes on their own queries (rows count the columns of the prompt)."""
        prefill(self.backbone, self.backbone.batch(self.reading.prompts), self.reading.visual, probes=probes)

    # ------------------------------------------------------------------ keys: absolute columns

    def image_columns(self) -> tuple[Tensor, Tensor]:
        """(B, N) columns of the visual tokens, in the order of the pictures' tokens, and which are real."""
        assert self.reading.prompt is not None
        found = [row.nonzero()[:, 0].tolist() for row in self.reading.prompt.image_BT]
        return _padded(found, self.backbone.device)


def _padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Numbers side by side, right-padded with 0, and which are real."""
    size = max((len(row) for row in rows), default=0)
    values = torch.zeros(len(rows), size, dtype=torch.long)
    real = torch.zeros(len(rows), size, dtype=torch.bool)
    for place, row in enumerate(rows):
        values[place, : len(row)] = torch.tensor(list(row), dtype=torch.long)
        real[place, : len(row)] = True
    return values.to(device), real.to(device)
