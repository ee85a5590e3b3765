"""Decoding and latent steps in static shapes, eagerly or as CUDA graphs: the same texts as the plain path.

`FastDecode` belongs to one backbone and lives as long as a run: the next rollout of similar shape uses its buffers and
recorded steps again. Where it does not apply, the plain path runs, and each reason is printed once as a notice.

Departure from the plain schedule: ``z_K`` and ``<|lvr_end|>`` enter in two steps, so that one recorded step serves the
whole span.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import get_args

import torch
from torch import Tensor

from realvr.backbone.backbone import Backbone
from realvr.backbone.notices import notice_once
from realvr.errors import UserError, ran_out
from realvr.latent import graphs, room, trial
from realvr.latent.buffers import Buffers
from realvr.latent.completions import Branch, Completion, finish, stop_test
from realvr.latent.modes import COLUMNS, TOKENS, FastMode, is_static, round_up
from realvr.latent.sampling import Sampling, draws, prompt_seeds
from realvr.latent.span import span_tokens
from realvr.latent.state import State
from realvr.latent.static import Branches, Chunk, Trunk, choose_next, decode_step, latent_step

COUNTS = ("recorded", "replayed", "eager", "plain", "dropped", "moved")
"""What `FastDecode.counts` counts: steps recorded, replayed and run eagerly; spans and texts that went the plain way;
buffers and recorded steps that were dropped for others; moves to smaller buffers."""


class NoRoom(MemoryError):
    """There is no memory for static buffers, and a smaller group may do; see ``or_smaller`` of `FastDecode`."""


def fast_decode(
    backbone: Backbone, mode: FastMode, *, sharded: bool = False, announce: bool = True
) -> FastDecode | None:
    """What ``rollout`` and ``decode`` take as ``fast``; None is the plain path. ``sharded``: as in `is_static`; so is a
    model on several devices. ``announce``: say where ``auto`` means the plain path on a GPU; one process of several
    is enough."""
    if mode not in get_args(FastMode):
        raise UserError(f"fast_decode is '{mode}': choose one of {', '.join(get_args(FastMode))}")
    spread = len(backbone.devices)
    if not is_static(mode, backbone.device.type, sharded=sharded or spread > 1):
        if announce and mode == "auto" and backbone.device.type == "cuda":
            why = "parameters are sharded" if spread == 1 else f"the model lies on {spread} devices"
            notice_once(f"fast decoding: {why}; texts are decoded in the plain way")
        return None
    return FastDecode(backbone, recorded=mode != "static", or_plain=mode == "auto")


class FastDecode:
    """Latent steps and decoding of one backbone in static shapes.

    ``recorded`` steps are CUDA graphs; where they cannot be recorded, steps run in the same buffers without a graph, or
    with ``or_plain`` in the plain way. ``columns`` and ``tokens`` are what lengths of prompts and completions are
    rounded up to. ``shapes`` bounds the buffers kept, and with them the recorded steps: the least recently used go
    first. The host looks at the tokens of ``every`` steps (2 where steps are recorded, otherwise 1) while ``ahead``
    more such lots run (1, otherwise 0), so that the device does not wait for it. Steps after the end of the last
    completion are wasted: a few of them, and more the larger either is.

    ``compact``: once half of the prompts have ended, the others move to buffers of half the rows, as long as there are
    at least so many rows; 0 never moves them. A step at real size reads weights more than anything else, and a new
    shape has to be recorded, so that few rows are not worth it.

    ``or_smaller``: where there is no memory for the buffers of several prompts, raise `NoRoom` instead of going the
    plain way. The caller then tries fewer prompts.
    """

    def __init__(
        self,
        backbone: Backbone,
        *,
        recorded: bool = False,
        or_plain: bool = False,
        columns: int = COLUMNS,
        tokens: int = TOKENS,
        shapes: int = 4,
        every: int | None = None,
        ahead: int | None = None,
        compact: int = 0,
        record: graphs.Record | None = None,
    ) -> None:
        self.backbone, self.recorded, self.or_plain = backbone, recorded, or_plain
        self.tokens, self.compact, self.or_smaller = tokens, compact, False
        self.every = every or (2 if recorded else 1)
        self.ahead = (1 if recorded else 0) if ahead is None else ahead
        self.counts: Counter[str] = Counter()
        """See `COUNTS`."""
        self._record = record
        self._given = record is not None
        self._buffers = Buffers(columns, tokens, shapes, self.counts)
        self._survey: graphs.Survey | None = None
        self._settled = False
        self._fingerprint: tuple[object, ...] = ()
        self._forbidden = self._forbidden_host = torch.empty(0, dtype=torch.long)
        self._said: set[str] = set()

    # ------------------------------------------------------------------ does it apply?

    def applies(self, state: State, *, new: int, group: int = 0, go_on: object = None, put: object = None) -> bool:
        """Whether ``new`` columns behind ``state``, of ``group`` branches each or in the trunk itself, can be run
        here. Otherwise a notice says why not."""
        reason = self._why_not(state, new, group, go_on, put)
        if reason is None:
            reason = self._buffers.no_room(state, new, group)
            if reason is not None and self.or_smaller and state.rows > 1:
                raise NoRoom(reason)
        if reason is not None:
            self.plain(reason)
        return reason is None

    def plain(self, reason: str) -> None:
        """Count and say, once for each reason, that something is decoded in the plain way."""
        self.counts["plain"] += 1
        self._say(reason, "this part is decoded in the plain way")

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Inside, weights and modules stay as they are: they are looked at once."""
        before, self._settled = self._settled, True
        try:
            yield
        finally:
            self._settled = before
            if not before:
                self._survey = None

    def _look(self) -> graphs.Survey:
        if self._survey is None or not self._settled:
            self._survey = graphs.Survey.of(self.backbone)
        return self._survey

    def _why_not(self, state: State, new: int, group: int, go_on: object, put: object) -> str | None:
        if go_on is not None:
            return "processes that share sharded parameters decode in step with each other"
        if put:
            return "latents are replaced by interventions"
        if torch.is_grad_enabled():
            return "gradients are asked for"
        survey = self._look()
        if len(survey.devices) > 1:
            return f"the model lies on {len(survey.devices)} devices"
        if state.columns.segment is not None:
            return "the state ends in branches"
        device = self.backbone.device.type
        if self.recorded and not self._given and device != "cuda":
            return f"CUDA graphs need a CUDA device, and the model is on {device}"
        if self.or_plain:
            length = state.length + round_up(new, self.tokens)
            unable = (graphs.why_not_modules if self._given else graphs.why_not)(self.backbone, length, survey)
            if unable is not None or not self.recorded:
                return unable or "steps could not be recorded"
        return self._buffers.why_not(state, new, group)

    def _say(self, reason: str, instead: str) -> None:
        kind = re.sub(r"\d+(\.\d+)?", "", reason)  # once, whatever its numbers
        if kind not in self._said:
            self._said.add(kind)
            warnings.warn(f"fast decoding: {reason}; {instead}", stacklevel=4)

    # ------------------------------------------------------------------ the span and the text

    @torch.no_grad()
    def think(self, state: State, latents: int) -> tuple[State, Tensor]:
        """`realvr.latent.span.think` without interventions: the state after the span and z (B, K, D)."""
        new = span_tokens(latents)
        trunk = self._buffers.trunk(state, state.length + new)
        trunk.load(state)
        start, end = (
            self.backbone.embed(torch.full_like(trunk.column, marker)).to(trunk.input_BD.dtype)
            for marker in (self.backbone.markers.start, self.backbone.markers.end)
        )
        trunk.input_BD.copy_(start.expand_as(trunk.input_BD))  # what a recording is tried with
        step = self._latent_step(trunk, state.length + new)
        self._feed(trunk, start, step)
        latents_z = []
        for _ in range(latents):
            latents_z.append(trunk.last_BD[: state.rows].clone())
            self._feed(trunk, trunk.last_BD, step)
        self._feed(trunk, end, step)
        after = trunk.longer(state, new, self.backbone.windowed)
        first = state.length + 1
        return replace(after, span=(first, first + latents)), torch.stack(latents_z, dim=1)

    @staticmethod
    def _feed(trunk: Trunk, embeds_BD: Tensor, step: Callable[[], None]) -> None:
        trunk.input_BD.copy_(embeds_BD.expand_as(trunk.input_BD))
        step()

    @torch.no_grad()
    def decode(
        self,
        state: State,
        group: int,
        sampling: Sampling,
        seed: int | Sequence[int] = 0,
        limits: Sequence[int] | None = None,
    ) -> list[list[Completion]]:
        """`realvr.latent.group_rollout.decode` without ``go_on``."""
        limits = [sampling.max_new] * state.rows if limits is None else limits
        completions = [[Completion() for _ in range(group)] for _ in range(state.rows)]
        rows = [[Branch(p, g, completions[p][g], limits[p]) for g in range(group)] for p in range(state.rows)]
        steps = max(limits, default=0)
        if steps > 0:
            trunk = self._buffers.trunk(state, state.length)
            trunk.load(state)
            branches = self._buffers.own(trunk, group, round_up(steps, self.tokens))
            self._buffers.used(trunk)
            branches.begin(draws(prompt_seeds(seed, state.rows), group, steps), limits)
            self._generate(state, branches, rows, sampling)
        for row in completions:
            for completion in row:
                completion.text = self.backbone.tokenizer.decode(completion.reply_ids, skip_special_tokens=False)
        return completions

    def _generate(self, state: State, branches: Branches, rows: list[list[Branch]], sampling: Sampling) -> None:
        """Decode until every branch has ended. ``rows[p]`` are the unfinished ones of prompt p."""
        forbidden = self._forbidden_ids()
        stopped = stop_test(self.backbone, sampling.stop)
        longest = state.length + branches.size
        choose_next(self.backbone, branches, branches.trunk.last_BD, sampling, forbidden)
        step = self._decode_step(branches, sampling, forbidden, longest)
        place = {prompt: prompt for prompt in range(len(rows))}  # where prompts are in the buffers
        flying, chosen = deque([(Chunk.send(branches, 0, 1), place)]), 1
        while any(rows):
            most = max(branch.limit for row in rows for branch in row)
            while len(flying) <= self.ahead and chosen < most:
                first, chosen = chosen, min(chosen + self.every, most)
                for _ in range(first, chosen):
                    step()
                flying.append((Chunk.send(branches, first, chosen), place))
            rows = self._told(rows, *flying.popleft(), stopped)
            left = max((branch.limit for row in rows for branch in row), default=0)
            if chosen < left and (fewer := self._halved(rows, branches)) is not None:
                branches, place = self._moved(state, branches, rows, place, fewer)
                step = self._decode_step(branches, sampling, forbidden, longest)

    def _told(
        self, rows: list[list[Branch]], chunk: Chunk, place: dict[int, int], stopped: Callable[[list[int]], bool]
    ) -> list[list[Branch]]:
        """The branches that go on after the tokens of a chunk."""
        ids, logp = chunk.read()
        for column in range(chunk.ids_BGS.shape[-1]):
            for branch in (branch for row in rows for branch in row):
                row = place[branch.prompt]
                branch.completion.ids.append(ids[row][branch.number][column])
                branch.completion.logprobs.append(logp[row][branch.number][column])
            rows = finish(self.backbone, rows, stopped)
        return rows

    def _halved(self, rows: list[list[Branch]], branches: Branches) -> int | None:
        """Rows of smaller buffers that are worth moving to, and for which there is memory."""
        held = branches.trunk.rows
        live, fewer = sum(map(bool, rows)), held
        while self.compact and fewer >= max(self.compact, 2) and live <= (fewer + 1) // 2:
            fewer = (fewer + 1) // 2
        if not live or fewer == held:
            return None
        needed = (branches.bytes + branches.trunk.bytes) * fewer // held
        free = room.free_bytes(branches.step.device, needed)
        return fewer if free is None or needed <= free else None

    def _moved(
        self, state: State, branches: Branches, rows: list[list[Branch]], place: dict[int, int], fewer: int
    ) -> tuple[Branches, dict[int, int]]:
        """Buffers of ``fewer`` rows with the prompts that go on, and where they are; a row without a prompt repeats the
        first."""
        live = [prompt for prompt, row in enumerate(rows) if row]
        kept = [place[prompt] for prompt in live]
        index = torch.tensor(kept + kept[:1] * (fewer - len(kept)), device=branches.step.device)
        trunk = self._buffers.smaller(state, fewer, branches.trunk)
        own = self._buffers.own(trunk, branches.group, branches.size)
        self._buffers.used(trunk)
        trunk.take(branches.trunk, index)
        own.take(branches, index)
        self.counts["moved"] += 1
        return own, {prompt: row for row, prompt in enumerate(live)}

    # ------------------------------------------------------------------ buffers and recorded steps

    def release(self) -> None:
        """Drop all buffers and recorded steps, to make room for training."""
        self._buffers.release()
        self._fingerprint = ()

    @property
    def held_bytes(self) -> int:
        """Size of the static buffers; what recorded steps need between their kernels comes on top."""
        return self._buffers.bytes

    def _forbidden_ids(self) -> Tensor:
        """On the device, in one place for as long as they are the same: recorded steps read them there."""
        ids = self.backbone.forbidden_ids()
        if self._forbidden.device != self.backbone.device or not torch.equal(ids, self._forbidden_host):
            self._forbidden_host, self._forbidden = ids, ids.to(self.backbone.device)
            self._buffers.forget(latents=False)
        return self._forbidden

    def _latent_step(self, trunk: Trunk, longest: int) -> Callable[[], None]:
        def eager() -> None:
            latent_step(self.backbone, trunk)

        recorded = self._records(longest)
        if recorded and trunk.replay is None:
            trunk.replay = self._recorded(eager, trunk)
        return self._counted(eager, trunk.replay if recorded else None)

    def _decode_step(
        self, branches: Branches, sampling: Sampling, forbidden: Tensor, longest: int
    ) -> Callable[[], None]:
        def eager() -> None:
            decode_step(self.backbone, branches, sampling, forbidden)

        kind = (sampling.temperature, sampling.top_p, sampling.top_k)
        recorded = self._records(longest)
        if recorded:
            if branches.replays.get(kind) is None:
                branches.replays[kind] = self._recorded(eager, branches)
                branches.hidden_BGD = None  # memory of the recording
            self._buffers.kept_kind(branches, kind)
        return self._counted(eager, branches.replays.get(kind) if recorded else None)

    def _counted(self, eager: Callable[[], None], replay: Callable[[], None] | None) -> Callable[[], None]:
        def step() -> None:
            self.counts["eager" if replay is None else "replayed"] += 1
            (replay or eager)()

        return step

    def _records(self, longest: int) -> bool:
        """Whether steps are recorded. What was recorded with other weights or modules is dropped."""
        if not self.recorded:
            return False
        survey = self._look()
        if not self._given:
            reason = graphs.why_not(self.backbone, longest, survey)
            if reason is not None:
                self._say(reason, "steps run one kernel at a time")
                return False
        if survey.fingerprint != self._fingerprint:
            self._fingerprint = survey.fingerprint
            self._buffers.forget()
        return True

    def _recorded(self, step: Callable[[], None], over: Trunk | Branches) -> Callable[[], None] | None:
        try:
            self._record = self._record or graphs.CudaGraphs(self.backbone.device)
            with graphs.still_frequencies(self.backbone):
                tried = trial.Trial(over.made, over.spoil, trial.tolerance(self.backbone.dtype))
                replay = graphs.record_step(self._record, step, over.changed, tried)
        except RuntimeError as error:  # a device or a kernel that cannot be recorded
            self.recorded = ran_out(error)  # which may be another time
            reason = str(error).strip().splitlines()
            self._say(f"a step could not be recorded ({reason[0] if reason else error})", "steps run one at a time")
            return None
        self.counts["recorded"] += 1
        return replay
