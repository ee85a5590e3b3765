"""Latent exchange on a model's tensors; `realvr.diagnostics.exchange` says what is asked and why.

Contrast ranks by ``gamma_t = [r_t(y_recipient) - r_t(y_donor)]+`` on the unmodified recipient trajectory, with the
readout of training (mean attention of the content tokens over layers, heads and positions). Positions with equal
contrast, zeros among them, are taken from the first slot on. A random selection is the beginning of one permutation per
(seed, pair, direction), so that, like the ranking, a larger k contains a smaller.

One prefill and one free-running span per view serve all conditions; spans that come out equal (a random choice that
hits the ranked one, a donor that equals the recipient) are decoded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from realvr.answers import JUDGE, parser
from realvr.backbone.attention import Probe
from realvr.backbone.backbone import Backbone
from realvr.backbone.samples import answer_tokens, pad_answers
from realvr.diagnostics.exchange import DIRECTIONS, Condition, Swaps, about_pair
from realvr.diagnostics.measuring.replacing import shuffled
from realvr.diagnostics.measuring.views import EDITED, ORIGINAL, NoControl, Views, read_views
from realvr.diagnostics.pairs import Pair
from realvr.evaluation.model_responder import prompt_hash
from realvr.latent.group_rollout import Completion, decode
from realvr.latent.sampling import GREEDY, Sampling
from realvr.latent.span import score, splice
from realvr.latent.state import State
from realvr.maths import credit
from realvr.maths.dependence import ranked
from realvr.runs.journal import Record

ROLES = dict(zip(DIRECTIONS, ((EDITED, ORIGINAL), (ORIGINAL, EDITED)), strict=True))
"""Donor and recipient view."""


class SpanOptions(Protocol):
    """How mixed spans are answered."""

    @property
    def latents(self) -> int:
        """K."""

    @property
    def sampling(self) -> Sampling:
        """How answers are decoded."""

    @property
    def rows(self) -> int:
        """Spans decoded together."""


@dataclass(frozen=True)
class ExchangeOptions(Swaps):
    """The conditions, and how answers are made and read."""

    policy: Any = "strict"
    sampling: Sampling = GREEDY
    rows: int = 64
    """Spans decoded together."""


@dataclass
class Answered:
    """One decoded span: the reply and the scores (recipient's truth, donor's truth)."""

    completion: Completion
    scores: tuple[float, float]


@dataclass(frozen=True)
class Recipient:
    """One direction of one pair, by rows of the views."""

    number: int
    pair: Pair
    control: Pair | NoControl
    direction: str
    row: int
    donor: int
    unrelated: int | None
    truths: tuple[str, str]
    """Right answers of recipient and donor."""


@torch.no_grad()
def exchange_pairs(
    backbone: Backbone, pairs: Sequence[Pair], controls: Sequence[Pair | None], options: ExchangeOptions
) -> list[Record]:
    """Records of one batch of pairs with different right answers."""
    views = read_views(backbone, pairs, controls, options.latents)
    records = [about_pair(pair, "error", error) for pair, error in views.errors]
    records += [about_pair(pair, "no-control", None, no_control=asdict(why)) for pair, why in views.missing()]
    if not views.pairs:
        return records
    recipients = recipients_of(views)
    answers = Answers(backbone, recipients)
    assert views.after is not None and views.latents_RKD is not None
    free = views.after.select(_index(backbone, [r.row for r in recipients]))
    scores, gamma_BK = answers.readout(free, range(len(recipients)))
    replies = decode(backbone, free, 1, options.sampling, 0, _limits(backbone, views, recipients, options))
    spans = Spans(backbone, views, answers, options)
    chosen: list[tuple[Recipient, Condition, list[int], Any]] = []
    for recipient, gamma in zip(recipients, gamma_BK, strict=True):
        for condition in options.conditions(recipient.unrelated is not None):
            positions = select_positions(condition, gamma, recipient)
            donor = recipient.unrelated if condition.condition == "unrelated" else recipient.donor
            donor = recipient.row if condition.condition == "sham" else donor
            ticket = None if condition.condition == "unmodified" else spans.add(recipient, donor, positions)
            chosen.append((recipient, condition, positions, ticket))
    spans.run()
    for recipient, condition, positions, ticket in chosen:
        number = recipient.number
        own = Answered(replies[number][0], scores[number])
        answered = own if ticket is None else spans.answered[ticket]
        more: dict[str, Any] = {"contrast": gamma_BK[number].tolist()} if ticket is None else {}
        if condition.selector == "from-step" and (parts_at := recipient.pair.parts_at) is not None:
            more = {"parts_at": parts_at}
        prompt = prompt_hash(views.prompts[recipient.row])
        records.append(_record(recipient, condition, positions, answered, options, prompt) | more)
    return records


def recipients_of(views: Views) -> list[Recipient]:
    """Both directions of every pair."""
    found: list[Recipient] = []
    for number, (pair, control) in enumerate(zip(views.pairs, views.controls, strict=True)):
        rows = views.rows[number]
        for direction, (donor, own) in ROLES.items():
            found.append(
                Recipient(
                    number=len(found),
                    pair=pair,
                    control=control,
                    direction=direction,
                    row=rows[own],
                    donor=rows[donor],
                    unrelated=views.unrelated(number),
                    truths=(pair.truths[own], pair.truths[donor]),
                )
            )
    return found


def _index(backbone: Backbone, rows: Sequence[int]) -> Tensor:
    return torch.tensor(list(rows), device=backbone.device)


def _limits(backbone: Backbone, views: Views, recipients: Sequence[Recipient], options: SpanOptions) -> list[int]:
    room = backbone.context_length - options.latents - 2
    return [min(options.sampling.max_new, room - len(views.prompts[r.row])) for r in recipients]


def select_positions(condition: Condition, gamma_K: Tensor, recipient: Recipient) -> list[int]:
    """Slots to replace, from 0, in the order of the ranking or of the permutation."""
    count = len(gamma_K)
    if condition.selector == "none":
        return []
    if condition.selector in ("full", "from-step"):
        return list(range(count - condition.k, count))
    if condition.selector == "contrast":
        order = ranked(gamma_K)
    else:
        order = shuffled(count, condition.seed or 0, f"{recipient.pair.id}\n{recipient.direction}")
    return order[: condition.k]


class Answers:
    """``Fmt(y)`` of the recipients' and the donors' right answers, teacher-forced as two branches."""

    def __init__(self, backbone: Backbone, recipients: Sequence[Recipient]) -> None:
        self.backbone = backbone
        groups = [
            [answer_tokens(backbone, answer, recipient.pair.original.choices) for answer in recipient.truths]
            for recipient in recipients
        ]
        self.ids_BYS, self.real_BYS, self.content_BYS = (x.to(backbone.device) for x in pad_answers(groups))

    def scores(self, state: State, numbers: Sequence[int], **options: Any) -> list[tuple[float, float]]:
        """Mean log-probability over the content tokens of each answer, for recipients ``numbers`` (one per row)."""
        index = _index(self.backbone, numbers)
        logp, _, _ = score(self.backbone, state, self.ids_BYS[index], self.real_BYS[index], **options)
        content = self.content_BYS[index]
        mean = logp.double().masked_fill(~content, 0).sum(-1) / content.sum(-1)
        return [(own, donor) for own, donor in mean.tolist()]

    def readout(self, state: State, numbers: Sequence[int]) -> tuple[list[tuple[float, float]], Tensor]:
        """The same scores, and the contrast (B, K) of the recipient's over the donor's answer."""
        probe = Probe(columns=state.slots)
        scores = self.scores(state, numbers, probes=[probe])
        content = self.content_BYS[_index(self.backbone, numbers)]
        r_BYK = credit.readout(probe.stack(), credit.own_rows(content))
        return scores, credit.selective(r_BYK[:, 0], r_BYK[:, 1])


class Spans:
    """Mixed spans to be answered, each distinct one once."""

    def __init__(self, backbone: Backbone, views: Views, answers: Answers, options: SpanOptions) -> None:
        self.backbone, self.views, self.answers, self.options = backbone, views, answers, options
        self.recipients: list[Recipient] = []
        self.latents: list[Tensor] = []
        self.answered: list[Answered] = []
        self._tickets: dict[tuple[int, bytes], int] = {}

    def add(self, recipient: Recipient, donor: int | None, positions: Sequence[int]) -> int:
        """Ticket of the recipient's span with the donor row's latents at these positions."""
        assert self.views.latents_RKD is not None
        mixed = self.views.latents_RKD[recipient.row].clone()
        if positions and donor is not None:
            mixed[list(positions)] = self.views.latents_RKD[donor, list(positions)]
        return self.put(recipient, mixed)

    def put(self, recipient: Recipient, mixed: Tensor) -> int:
        """Ticket of a recipient with these latents (K, D)."""
        # Equal inputs must give equal numbers: two rows of one batch may differ in the last bit.
        key = (recipient.number, mixed.double().cpu().numpy().tobytes())
        if key not in self._tickets:
            self._tickets[key] = len(self.latents)
            self.latents.append(mixed)
            self.recipients.append(recipient)
        return self._tickets[key]

    def run(self) -> None:
        """Answer every span, at most ``options.rows`` at a time."""
        assert self.views.prompt is not None
        limits = _limits(self.backbone, self.views, self.recipients, self.options)
        for start in range(0, len(self.latents), self.options.rows):
            part = slice(start, start + self.options.rows)
            recipients = self.recipients[part]
            state = self.views.prompt.select(_index(self.backbone, [r.row for r in recipients]))
            state, _ = splice(self.backbone, state, torch.stack(self.latents[part]))
            scores = self.answers.scores(state, [r.number for r in recipients])
            replies = decode(self.backbone, state, 1, self.options.sampling, 0, limits[part])
            self.answered += [Answered(reply[0], pair) for reply, pair in zip(replies, scores, strict=True)]


def _record(
    recipient: Recipient,
    condition: Condition,
    positions: Sequence[int],
    answered: Answered,
    options: ExchangeOptions,
    prompt: str,
) -> Record:
    """One line of exchange.jsonl. ``positions`` count slots from 1, as t does in the paper."""
    own, donor = answered.scores
    text, choices = answered.completion.text, recipient.pair.original.choices
    reader = parser(options.policy, "evaluation")
    return {
        "pair": recipient.pair.id,
        "edit": recipient.pair.edit,
        "direction": recipient.direction,
        **asdict(condition),
        "latents": options.latents,
        "positions": [position + 1 for position in positions],
        "recipient_truth": recipient.truths[0],
        "donor_truth": recipient.truths[1],
        "extracted": reader.read(text, choices),
        "text": text,
        "recipient_score": own,
        "donor_score": donor,
        "margin": donor - own,
        "choices": list(choices),
        "policy": options.policy,
        "parser": str(reader),
        "judge": JUDGE,
        "prompt": prompt,
        "unrelated": recipient.control.id if isinstance(recipient.control, Pair) else None,
        "finish": answered.completion.finish,
        "new_tokens": len(answered.completion.ids),
        "error": None,
    }
