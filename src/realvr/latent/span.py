"""The latent span, once: prefill, K latent steps, extension by tokens or embeddings, teacher-forced scores, attention
rows.

Training, rollout, evaluation and diagnostics all use these functions. Order of a turn: prompt, ``<|lvr_start|>``, z_1
… z_K, ``<|lvr_end|>``, answer text. ``z_t`` is the hidden state after the final norm at the position before slot t,
fed raw as the input of slot t; ``z_1`` is the state at ``<|lvr_start|>``. The span is forced and closed: no token is
ever sampled inside it. K = 0 means no span and no markers.

Departure from the paper's wording: none. Departure from the plain schedule: ``z_K`` and ``<|lvr_end|>`` enter in one
pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from realvr.backbone.attention import Columns, Matrix, Pass, Probe
from realvr.backbone.backbone import Backbone, VisualTokens
from realvr.backbone.batch import Batch
from realvr.backbone.packed_attention import Packed
from realvr.backbone.span_attention import Trunk
from realvr.backbone.split_attention import Split
from realvr.errors import UserError
from realvr.latent.layer_checkpoints import layers_checkpointed
from realvr.latent.state import State, join_columns
from realvr.latent.steps import check_steps

Interventions = Mapping[int, Tensor]
"""Latents that are put into a running span: step t, counted from 1, to one vector (D,) or one for each row (B, D)."""


def span_tokens(latents: int) -> int:
    """Columns that a span of K latents takes: K slots and two markers; none without latents."""
    return latents + 2 if latents else 0


def decoder_pass(
    backbone: Backbone,
    state: State | None,
    embeds_BTD: Tensor,
    positions: Tensor,
    *,
    next_B: Tensor | None = None,
    real_BT: Tensor | None = None,
    segment_BT: Tensor | None = None,
    window_position_BT: Tensor | None = None,
    image_visibility_BT: Tensor | None = None,
    image_BT: Tensor | None = None,
    deepstack: Sequence[Tensor] = (),
    probes: Sequence[Probe] = (),
    matrix: Matrix | None = None,
    packed: Packed | None = None,
    branches: int = 0,
    trunk: Trunk | None = None,
    checkpointed: float = 0.0,
    join: bool = False,
) -> tuple[State, Tensor]:
    """One pass of the decoder over new columns; returns the longer state and the hidden states (B, T, D) of these
    columns.

    ``positions`` is (B, T), or (3, B, T) with images. ``real_BT`` marks padding (None: no padding in these columns);
    ``segment_BT`` isolates branches or packed examples, see :class:`realvr.backbone.attention.Columns`.
    ``window_position_BT`` matters to families with sliding windows only, where positions are not consecutive; by
    default it is the position. ``packed`` says where the examples of packed rows lie; they are then attended one by one
    where that is the same as the mask (see :class:`realvr.backbone.attention.Pass`). ``branches`` says that the new
    columns are as many runs of one size behind the state (1: they continue it), with padding at their ends only; trunk
    and branches are then attended one by one, where that is the same as the mask. ``trunk`` says that they are a step
    of a span behind the state's first piece of keys and values, to which they then attend without a joined copy.
    ``checkpointed`` layers are recomputed in the backward pass: all of them, or a share.
    """
    if state is not None and state.columns.segment is not None and segment_BT is None:
        raise ValueError(
            "this state ends in branches (or packed examples), and new columns without a segment would see none of "
            "them: extend the state before the branches, or give segment_BT and positions"
        )
    rows, new, _ = embeds_BTD.shape
    device = embeds_BTD.device
    no_image = torch.zeros(rows, new, dtype=torch.bool, device=device) if image_BT is None else image_BT
    block = None
    if backbone.two_way_images and image_BT is not None:
        block = _blocks(image_BT, 0 if state is None else state.length)
    window_position = positions if backbone.windowed and window_position_BT is None else window_position_BT
    fresh = Columns(new, real_BT, segment_BT, block, window_position, image_visibility_BT)
    columns = join_columns(None if state is None else state.columns, fresh, rows, device)
    past = [] if state is None else state.kv
    split = None
    if branches and state is not None and image_BT is None and state.one_trunk:
        split = Split.build(state.length, state.columns.real, branches, new, real_BT)
    carried = Pass(past, columns, tuple(probes), matrix, device, packed, join, split, trunk)
    with layers_checkpointed(backbone, checkpointed):
        hidden = backbone.decode(embeds_BTD, positions, carried, image_BT, deepstack)
    if next_B is None:
        flat = positions if positions.ndim == 2 else positions.amax(0)
        next_B = (flat if real_BT is None else flat.masked_fill(~real_BT, -1)).amax(-1) + 1
        if state is not None:
            next_B = torch.maximum(next_B, state.next_B)
    longer = State(
        kv=carried.close(),
        columns=columns,
        next_B=next_B,
        last_BD=_last(hidden, real_BT, state),
        image_BT=no_image if state is None else torch.cat([state.image_BT, no_image], dim=1),
        span=None if state is None else state.span,
        left_padded=real_BT is None and (state is None or state.left_padded),
    )
    return longer, hidden


def _blocks(image_BT: Tensor, offset: int) -> Tensor:
    """Number of the image that each column belongs to (-1: none): the absolute column at which its run of tokens
    starts."""
    column = torch.arange(image_BT.shape[1], device=image_BT.device) + offset
    starts = image_BT & ~torch.nn.functional.pad(image_BT, (1, 0))[:, :-1]
    first = torch.where(starts, column, -1).cummax(-1).values
    return torch.where(image_BT, first, -1)


def _last(hidden_BTD: Tensor, real_BT: Tensor | None, state: State | None) -> Tensor:
    """Hidden state at each row's last real column; a row without a new token keeps the one it had."""
    if real_BT is None:
        return hidden_BTD[:, -1]
    column = torch.arange(hidden_BTD.shape[1], device=hidden_BTD.device)
    last_B = torch.where(real_BT, column, -1).amax(-1)
    picked = hidden_BTD.gather(1, last_B.clamp(min=0)[:, None, None].expand(-1, 1, hidden_BTD.shape[2]))[:, 0]
    return picked if state is None else torch.where((last_B >= 0)[:, None], picked, state.last_BD)


def prefill(
    backbone: Backbone,
    batch: Batch,
    visual: VisualTokens | None = None,
    *,
    state: State | None = None,
    image_visibility_BT: Tensor | None = None,
    probes: Sequence[Probe] = (),
    matrix: Matrix | None = None,
    checkpointed: float = 0.0,
) -> tuple[State, Tensor]:
    """Read a batch of prompts; returns the state and the hidden states (B, T, D).

    ``visual`` are the visual tokens of ``batch.images``; they are computed here when not given. With ``state``, the
    batch continues it (a later turn): build it with ``backbone.batch(prompts, start_B=state.next_B)``.
    ``image_visibility_BT`` hides visual tokens from some of the text (`Columns`).
    """
    if (state is not None) != batch.continues:
        raise ValueError(
            "this batch starts at position 0, but continues a state: build it with start_B=state.next_B"
            if state is not None
            else "this batch continues a state (start_B), but none was given"
        )
    visual = backbone.encode_images(batch.images) if visual is None else visual
    has_images = bool(batch.images)
    after, hidden = decoder_pass(
        backbone,
        state,
        backbone.embed_batch(batch, visual),
        batch.positions,
        next_B=batch.next_B,
        real_BT=batch.real_BT if batch.padded else None,
        image_visibility_BT=image_visibility_BT,
        image_BT=batch.image_BT if has_images else None,
        deepstack=visual.deepstack if has_images else (),
        probes=probes,
        matrix=matrix,
        checkpointed=checkpointed,
    )
    return (after if state is not None else replace(after, left_padded=True)), hidden


def extend(
    backbone: Backbone,
    state: State,
    ids_BS: Tensor | None = None,
    *,
    embeds_BSD: Tensor | None = None,
    real_BS: Tensor | None = None,
    **options: Any,
) -> tuple[State, Tensor]:
    """Append token ids, or raw embeddings such as latents; returns the longer state and the hidden states (B, S, D).

    ``real_BS`` marks right padding of rows with fewer tokens.
    """
    if ids_BS is not None and embeds_BSD is None:
        embeds = backbone.embed(ids_BS)
    elif embeds_BSD is not None and ids_BS is None:
        embeds = embeds_BSD
    else:
        raise ValueError("give either ids_BS or embeds_BSD")
    if real_BS is None:
        step = torch.arange(embeds.shape[1], device=embeds.device)
        positions = state.next_B[:, None] + step
    else:
        positions = state.next_B[:, None] + (real_BS.long().cumsum(-1) - 1).clamp(min=0)
    return decoder_pass(backbone, state, embeds, positions, real_BT=real_BS, **options)


def think(
    backbone: Backbone,
    state: State,
    latents: int | None = None,
    *,
    interventions: Interventions | None = None,
    checkpointed: bool = False,
    markers_B2D: Tensor | None = None,
    trunk: Trunk | None = None,
) -> tuple[State, Tensor]:
    """The latent span: markers and K free-running latents. Returns the state after ``<|lvr_end|>`` and z (B, K, D).

    ``interventions`` replace z_t by a given vector, from which the recurrence goes on; z then holds what was fed.
    Gradients flow through the whole recurrence and the prompt's keys and values. ``markers_B2D``: `marker_embeds`.
    ``trunk`` (`State.trunk`): with a graph, steps attend to the state and to the span by themselves, so that no step
    keeps a joined copy of keys and values. The state after them has those of the trunk apart.
    """
    count = backbone.latents if latents is None else latents
    if count < 0:
        raise UserError(f"latents is {count}: the number of latent slots cannot be negative")
    put = _checked(interventions or {}, count, state.last_BD)
    if count == 0:
        return state, state.last_BD.new_zeros(state.rows, 0, state.last_BD.shape[-1])
    # Attention keeps the joined keys and values of every step, unless it is recomputed.
    passes: dict[str, Any] = {"checkpointed": checkpointed, "join": not checkpointed}
    if trunk is not None and torch.is_grad_enabled():
        state, passes["trunk"] = state.in_one_piece(), trunk
    start, end = (marker_embeds(backbone, state) if markers_B2D is None else markers_B2D).split(1, dim=1)
    state, _ = extend(backbone, state, embeds_BSD=start, **passes)
    first = state.length
    latents_z = []
    for step in range(1, count + 1):
        z_BD = put.get(step, state.last_BD)
        latents_z.append(z_BD)
        embeds = z_BD[:, None]
        if step == count:
            embeds = torch.cat([embeds, end.to(embeds.dtype)], dim=1)
        state, _ = extend(backbone, state, embeds_BSD=embeds, **passes)
    return replace(state, span=(first, first + count)), torch.stack(latents_z, dim=1)


def _checked(interventions: Interventions, latents: int, like_BD: Tensor) -> dict[int, Tensor]:
    """The vectors (B, D) to feed, in the span's own type."""
    check_steps(interventions, latents)
    for step, vector in interventions.items():
        if vector.shape not in (like_BD.shape, like_BD.shape[-1:]):
            sizes = f"{tuple(like_BD.shape[-1:])} or {tuple(like_BD.shape)}"
            raise ValueError(f"the intervention at step {step} is {tuple(vector.shape)}, not {sizes}")
    return {step: vector.to(like_BD).expand_as(like_BD) for step, vector in interventions.items()}


def splice(
    backbone: Backbone, state: State, latents_BKD: Tensor, *, checkpointed: float = 0.0, **options: Any
) -> tuple[State, Tensor]:
    """A span whose latents are given (replay, exchange), in one pass. Returns the state after ``<|lvr_end|>`` and the
    hidden states (B, K, D) one position before each slot: for recorded latents, the latents themselves."""
    count = latents_BKD.shape[1]
    if count == 0:
        return state, latents_BKD
    start, end = marker_embeds(backbone, state).split(1, dim=1)
    embeds = torch.cat([start, latents_BKD.to(start.dtype), end], dim=1)
    first = state.length + 1
    state, hidden = extend(backbone, state, embeds_BSD=embeds, checkpointed=checkpointed, **options)
    return replace(state, span=(first, first + count)), hidden[:, :count]


def marker_embeds(backbone: Backbone, state: State) -> Tensor:
    """Input embeddings (B, 2, D) of ``<|lvr_start|>`` and ``<|lvr_end|>``."""
    start, end = backbone.markers.start, backbone.markers.end
    ids_2 = start + (end - start) * torch.arange(2, device=state.next_B.device)  # nothing is sent from the host
    return backbone.embed(ids_2.expand(state.rows, -1))


# ---------------------------------------------------------------------- log-probabilities


def log_softmax_rows(
    backbone: Backbone, hidden_ND: Tensor, temperature: float = 1.0, forbidden: Tensor | None = None
) -> Tensor:
    """Compute log softmax(logits / T) of the given rows (N, V), in float32 or wider, with forbidden ids at -inf.

    The one place where the policy's distribution is defined: rollout, replay and scoring all call it.
    """
    logits = backbone.logits(hidden_ND)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    if forbidden is not None and forbidden.numel():
        logits.index_fill_(-1, forbidden.to(logits.device), float("-inf"))  # the quotient is nobody else's
    return logits.log_softmax(-1)


def token_logprobs(
    backbone: Backbone,
    hidden_ND: Tensor,
    ids_N: Tensor,
    *,
    temperature: float = 1.0,
    forbidden: Tensor | None = None,
    chunk: int | None = None,
    entropy: bool = True,
) -> tuple[Tensor, Tensor]:
    """Log-probability (N,) of each id under its row, and the entropy (N,, detached) of the row; 0 where ``entropy`` is
    not asked for.

    Rows pass the LM head in chunks; with gradients each chunk is recomputed in backward, so that no more than
    ``chunk`` rows of vocabulary size are ever alive (by default 1,024, or as many as hold 2^24 logits).
    """
    chunk = chunk or max(1024, 2**24 // backbone.model.lm_head.out_features)

    def run(hidden: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        logp = log_softmax_rows(backbone, hidden, temperature, forbidden)
        chosen = logp.gather(-1, ids[:, None])[:, 0]
        if not entropy:
            return chosen, torch.zeros_like(chosen, requires_grad=False)
        with torch.no_grad():
            return chosen, -(logp.exp() * logp.masked_fill(logp == float("-inf"), 0)).sum(-1)

    graph = torch.is_grad_enabled() and (hidden_ND.requires_grad or backbone.model.lm_head.weight.requires_grad)
    step = partial(checkpoint, run, use_reentrant=False) if graph else run
    parts = [step(hidden_ND[i : i + chunk], ids_N[i : i + chunk]) for i in range(0, len(ids_N), chunk)]
    if not parts:
        empty = hidden_ND.new_zeros(0, dtype=torch.promote_types(hidden_ND.dtype, torch.float32))
        return empty, empty
    return torch.cat([logp for logp, _ in parts]), torch.cat([each for _, each in parts])


def score(
    backbone: Backbone,
    state: State,
    ids_BGS: Tensor,
    real_BGS: Tensor | None = None,
    *,
    temperature: float = 1.0,
    forbidden: Tensor | None = None,
    split: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor, State]:
    """Teacher-forced log-probabilities (B, G, S) of G continuations of each row, their entropies, and the state after
    them.

    The G continuations are branches of one trunk: they share its keys and values without copies and do not see each
    other. Only real tokens pass the LM head; padding gets 0. Probe rows count the flattened (G * S) columns. ``split``
    attends to the trunk and inside each branch by itself, where that is the same: ``real_BGS`` is then False only
    behind the last token of a branch.
    """
    if state.columns.segment is not None:
        raise ValueError("this state ends in branches already: score continuations of the state before them")
    batch, group, size = ids_BGS.shape
    real = torch.ones_like(ids_BGS, dtype=torch.bool) if real_BGS is None else real_BGS
    device = ids_BGS.device
    offset = (real.long().cumsum(-1) - 1).clamp(min=0)
    positions = (state.next_B[:, None, None] + offset).flatten(1)
    segment = torch.arange(group, device=device)[None, :, None].expand_as(ids_BGS).flatten(1)
    after, hidden = decoder_pass(
        backbone,
        state,
        backbone.embed(ids_BGS.flatten(1)),
        positions,
        real_BT=None if real_BGS is None else real.flatten(1),
        segment_BT=segment if group > 1 else None,
        branches=group if split else 0,
        **options,
    )
    hidden = hidden.view(batch, group, size, -1)
    first = state.last_BD[:, None, None].expand(-1, group, 1, -1)
    predicting = torch.cat([first, hidden[:, :, :-1]], dim=2)
    predicting_ND, ids_N = predicting.flatten(0, 2), ids_BGS.flatten()
    if real_BGS is not None:
        place_N = real.flatten().nonzero()[:, 0]  # once: on a GPU the host waits for their number
        predicting_ND, ids_N = predicting_ND.index_select(0, place_N), ids_N.index_select(0, place_N)
    logp_N, entropy_N = token_logprobs(backbone, predicting_ND, ids_N, temperature=temperature, forbidden=forbidden)
    zeros = torch.zeros(real.shape, dtype=logp_N.dtype, device=device)
    logp = zeros.masked_scatter(real, logp_N)
    return logp, zeros.masked_scatter(real, entropy_N.to(zeros.dtype)), after
