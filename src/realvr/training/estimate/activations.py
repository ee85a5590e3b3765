"""Bytes that autograd keeps of a pass through the decoder, and what else is alive in each phase of a step.

Derived from the layers: which tensors each operation saves for its backward pass. Nothing here is fitted.
Letters: t tokens of all rows, D width, F width of the MLP, b bytes of a number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from realvr.backbone import small_kernels
from realvr.backbone.automatic import is_on
from realvr.latent.modes import COLUMNS, bucket, recomputed_layers
from realvr.training.estimate.shape import Decoder

Memory = Literal["cached", "checkpointed-prefill", "checkpointed"]
Gradients = Literal["none", "head", "but a table", "all"]
"""Of no weight, of the head, of all but one of embedding and head, of all."""
FOLD_ROWS = 32
"""Query rows up to which a masked pass does not repeat keys and values (see ``backbone.attention``)."""
LOGIT_BYTES = 17
"""Per logit while a chunk passes the head: log-probabilities and three temporary tensors of 32 bits, and one mask."""
LOGIT_BACKWARD = 12
"""Per logit while a chunk goes back, without the entropy: log-probabilities and two gradients of 32 bits."""
ADAPTED = 7
"""Linear layers of a dense decoder layer, each with an adapter."""


@dataclass(frozen=True)
class Workload:
    """What one microbatch of one rank passes through the model, and how."""

    stage: Literal["sft", "rl"]
    rows: int = 1
    """Prompts, or packed rows, of a microbatch."""
    tokens: int = 2709
    """Of a prompt, visual tokens included; or of a packed row."""
    visual: int = 2560
    """Visual tokens of a row."""
    labelled: int = 512
    """Tokens of a packed row that are learned."""
    latents: int = 8
    group: int = 8
    answer: int = 192
    """Tokens of a completion."""
    evidence: bool = True
    """Whether the latents are regenerated with gradients (ReaLVR)."""
    readout: int = 160
    """Tokens of the answers whose attention is read."""
    memory: Memory = "checkpointed-prefill"
    """In Stage 1, everything but ``cached`` recomputes the layers."""
    recompute: float = 1.0
    """Share of the layers of long passes that are recomputed, unless ``memory`` is ``cached``."""
    microbatches: int = 1
    """Of one step and rank."""
    padded: bool = False
    """Whether rows differ in length, so that a mask is needed."""
    together: int | None = None
    """Prompts that are rolled out together; None: as many as fit."""
    static: int = 0
    """Tokens of a completion that static buffers have room for (``fast_decode``); 0: there are none."""
    released: bool = False
    """Whether they are dropped before training goes on (``release_decode``)."""
    recorded: bool = False
    """Whether latents are regenerated as CUDA graphs where they can be (setting ``recorded_span``)."""
    split: bool = False
    """Whether completions and latent steps attend to the prompt as it lies (setting ``split_attention``)."""

    @property
    def prompts(self) -> int:
        """Rows of a step on one rank."""
        return self.rows * self.microbatches

    @property
    def rollouts(self) -> int:
        """Groups in which they are rolled out."""
        return math.ceil(self.prompts / (self.together or self.prompts))

    @property
    def span(self) -> int:
        """Columns of the latent span."""
        return self.latents + 2 if self.latents else 0

    @property
    def recomputed(self) -> float:
        """The share that is."""
        return 0.0 if self.memory == "cached" else self.recompute

    @property
    def recorded_span(self) -> bool:
        """Whether they are: with gradient, and not recomputed in the backward pass."""
        return self.recorded and self.evidence and self.latents > 0 and self.memory != "checkpointed"


def regeneration(config: Any, device: str, sharded: bool, itemsize: int) -> dict[str, Any]:  # noqa: ANN401
    """How a run with the settings of a method regenerates latents on a device of this type, as parts of a `Workload`.
    Numbers have ``itemsize`` bytes. No setting is ``auto`` any more."""
    return {
        "evidence": bool(getattr(config, "lambda_ev", 0.0) and getattr(config, "on_policy", True)),
        "memory": config.memory,
        "recompute": config.recompute,
        # On a GPU there is no flash attention in 32 bits.
        "split": is_on(config.split_attention) and (device == "cpu" or itemsize < 4),
        "recorded": is_on(getattr(config, "recorded_span", False)) and device == "cuda" and not sharded,
    }


@dataclass(frozen=True)
class Phase:
    """A moment of the step at which memory may be fullest."""

    name: str
    activations: int
    gradients: Gradients = "none"
    """Of which weights a gradient exists by now. In Stage 2 these are autograd's own sums: a weight's gradients of all
    passes are added up there before they reach ``.grad``."""
    table: bool = False
    """Whether one more gradient of the whole embedding table is being made: its lookup gives one per pass."""
    steps_only: bool = False
    """Whether no pass but latent steps has gone backward: deferred gradients are not multiplied out yet."""


def large_gate(d: Decoder, tokens: int) -> bool:
    """Whether the gate of a pass over so many tokens keeps nothing but its inputs."""
    return d.fused_gates and tokens * d.ffn >= small_kernels.FEW


def copies(d: Decoder, adapters: bool, tokens: int, width: int) -> bool:
    """Whether the adapter of a layer with so many inputs keeps a copy of them in 32 bits, not the input itself, in a
    pass over ``tokens``. Where the model has 32 bits the two are one."""
    large = d.narrow_adapters and tokens * width >= small_kernels.FEW
    return adapters and d.itemsize < 4 and not large


def product_bytes(d: Decoder, adapters: bool, tokens: int, recomputed: bool) -> int:
    """What the last layer of a dense MLP keeps of a token: its input, the output of the gate. Behind a large gate it is
    made again, but in a layer that is recomputed (``backbone.gate_memory``); a copy is kept."""
    if copies(d, adapters, tokens, d.ffn):
        return 4 * d.ffn
    return 0 if large_gate(d, tokens) and not recomputed else d.ffn * d.itemsize


def token_bytes(d: Decoder, adapters: bool, tokens: int, recomputed: bool) -> int:
    """Saved per token in one layer, keys and values of the token included, in a pass over ``tokens`` of all rows."""
    b, narrow = d.itemsize, d.itemsize < 4
    wide = 4 if narrow else b
    scaled = wide if d.wide_norms else b
    trained = 0 if adapters else 1
    # A norm keeps its input in 32 bits and, where its weight is trained, the normalised input; a fused one its input.
    norm = b if d.fused_norms and not d.wide_norms else wide + trained * scaled
    norms = d.norms * d.width * norm
    if d.head_norms:
        norms += (d.query + d.key) * norm
    # Queries, keys, values, the output (which is also the input of the next layer), log-sum-exp.
    attention = b * (2 * d.query + 2 * d.key) + 4 * d.heads
    # Inputs of linear layers: the two normalised states, once for all that read them, and the output of attention,
    # which is counted. Or a copy for each adapter.
    inputs = 2 * b * d.width
    if copied := copies(d, adapters, tokens, d.width):
        inputs = 4 * 3 * d.width + (0 if d.experts else 4 * 2 * d.width)
    if copies(d, adapters, tokens, d.query):
        inputs += 4 * d.query
    if d.experts:
        k, e = d.experts_per_token, d.ffn
        inputs += b * d.width * copied
        # Gathered input, both halves, their product's factors, output before its weight; indices and router.
        mlp = k * (b * (trained * d.width + 2 * e + e + trained * e + d.width) + 26) + 4 * d.experts
    else:
        # Both inputs of the gate and, if it is not large, the activated one.
        mlp = (2 if large_gate(d, tokens) else 3) * b * d.ffn + product_bytes(d, adapters, tokens, recomputed)
    return norms + attention + inputs + mlp


def layer_bytes(
    d: Decoder, rows: int, new: int, past: int, masked: bool, adapters: bool, recomputed: bool = False
) -> int:
    """Saved by one layer in a pass over ``new`` columns of each row behind ``past`` ones. ``recomputed``: of a
    checkpointed layer, while it runs again."""
    b, length, tokens = d.itemsize, past + new, rows * new
    total = tokens * token_bytes(d, adapters, tokens, recomputed)
    grouped = d.heads > d.kv_heads
    repeated = masked and new > FOLD_ROWS and grouped
    if past or repeated:
        total += rows * length * 2 * b * (d.query if repeated else d.key)
    if masked:
        folds = d.heads // d.kv_heads if grouped and not repeated else 1
        total += rows * new * folds * length * b
        if folds > 1:
            total += rows * new * 2 * b * d.query
    return total


def pass_bytes(
    d: Decoder,
    rows: int,
    new: int,
    past: int,
    masked: bool,
    adapters: bool,
    recomputed: float,
    keys_only: bool = False,
    alone: bool = False,
) -> int:
    """Kept by a whole pass until its backward: everything, or of the share of layers that is recomputed, the first
    ones, only the inputs and what other passes read (keys and values). ``keys_only``: nothing but these is read, so
    that the last layer has no more to keep. ``alone``: no other pass reads anything."""
    tokens, b = rows * new, d.itemsize
    wide = 4 if b < 4 else b
    ends = tokens * (d.width * (wide + 2 * b) + 2 * b * d.head_dim + 8) + rows * new * (past + new) * masked
    if d.wide_norms:  # Gemma: the last norm keeps its 32-bit product, and windows have rotary tables of their own
        ends += tokens * (d.width * wide + 2 * b * d.head_dim)
    layers = d.layers - 1 if keys_only else d.layers
    if keys_only:
        ends = tokens * d.width * (wide + 2 * b)
    again = recomputed_layers(recomputed, d.layers)
    inputs = again * tokens * b * (d.width + 2 * d.key * (not alone))
    if again == d.layers:
        return inputs + (0 if keys_only else ends)
    return inputs + (layers - again) * layer_bytes(d, rows, new, past, masked, adapters) + ends


def backward_bytes(d: Decoder, tokens: int, adapters: bool, recomputed: bool) -> int:
    """Gradients of activations that are alive while one layer goes backward: when the last layer of the MLP does, or
    later a large gate, whose output and inputs all have one when the input of that layer is gone."""
    b, k = d.itemsize, max(d.experts_per_token, 1)
    mlp = (b + (4 if adapters else 0)) * d.ffn * k
    if large_gate(d, tokens):
        mlp = max(mlp, 3 * b * d.ffn - product_bytes(d, adapters, tokens, recomputed))
    return tokens * (mlp + 2 * b * d.width)


def reading_bytes(d: Decoder, rows: int, readout: int, length: int, adapters: bool) -> int:
    """Of the pass whose attention is read, a layer at its widest: scores of all heads, and their softmax in 32 bits."""
    scores = rows * d.heads * readout * length * (d.itemsize + 4)
    return scores + layer_bytes(d, rows, readout, length - readout, True, adapters)


def vision_bytes(d: Decoder, visual: int) -> int:
    """Of the vision tower, without gradient: its widest moment."""
    patches = visual * d.patches_per_token
    return patches * (d.itemsize * (3 * d.vision_ffn + 4 * d.vision_width) + 8 * d.vision_width)


def head_rows(d: Decoder, rows: int) -> int:
    """States that the output layer reads, collected and picked out."""
    return 2 * rows * d.width * d.itemsize


def chunk_rows(d: Decoder, rows: int) -> int:
    """Rows that pass the head at a time (``latent.span.token_logprobs``)."""
    return min(rows, max(1024, 2**24 // d.vocab))


def phases(d: Decoder, work: Workload, adapters: bool) -> list[Phase]:
    """The moments of forward and backward of one microbatch, in order."""
    features = work.rows * work.visual * d.width * d.itemsize * (1 + d.deepstack)
    found = (_packed if work.stage == "sft" else _free_running)(d, work, adapters)
    return [replace(phase, activations=phase.activations + features) for phase in found]


def _packed(d: Decoder, w: Workload, adapters: bool) -> list[Phase]:
    """Stage 1: one pass over packed rows."""
    recomputed = w.recomputed > 0
    kept = pass_bytes(d, w.rows, w.tokens, 0, True, adapters, recomputed, alone=True)
    layer = layer_bytes(d, w.rows, w.tokens, 0, True, adapters, recomputed)
    backward = backward_bytes(d, w.rows * w.tokens, adapters, recomputed)
    logits = LOGIT_BYTES * d.vocab * chunk_rows(d, w.rows * w.labelled)
    return [
        Phase("vision", vision_bytes(d, w.rows * w.visual)),
        Phase("output layer", kept + logits, "head"),
        Phase("last layer, backward", kept + (layer if recomputed else 0) + backward, "head"),
        Phase("first layer, backward", kept // d.layers * recomputed + layer + backward, "but a table"),
    ]


def latent_steps(d: Decoder, w: Workload, adapters: bool) -> tuple[int, int]:
    """Kept by the marker and all latents but the last, and by the last one with its marker. Split steps join nothing
    but the columns of the span, and need no mask."""
    again, trunk = w.memory == "checkpointed", 0 if w.split else w.tokens

    def saved(new: int, past: int, masked: bool) -> int:
        return pass_bytes(d, w.rows, new, trunk + past, masked and not w.split, adapters, again)

    return sum(saved(1, t, w.padded) for t in range(w.latents)), saved(2, w.latents, True)


def joined_layers(d: Decoder, w: Workload) -> int:
    """Layers in which the replay joins keys and values of prompt and completions, and needs a mask. Split attention
    does not, but where a sliding window hides a part of the prompt."""
    if not w.split:
        return d.layers
    return d.windowed if d.window < w.tokens + w.span + w.answer else 0


def replay_bytes(d: Decoder, w: Workload, adapters: bool) -> int:
    """Kept by the replay of the completions, with the rows that its output layer reads."""
    new = w.group * w.answer
    if not new:
        return 0
    joined, apart = (
        pass_bytes(d, w.rows, new, past, past > 0, adapters, w.recomputed) for past in (w.tokens + w.span, 0)
    )
    return apart + (joined - apart) * joined_layers(d, w) // d.layers + head_rows(d, w.rows * new)


def _free_running(d: Decoder, w: Workload, adapters: bool) -> list[Phase]:
    """Stage 2: prompt, replay of the completions, and the recurrence. Backward goes the other way round."""
    recomputed, steps_recomputed = w.recomputed, w.memory == "checkpointed"
    needs_mask = w.padded or d.windowed > 0  # Gemma 3, whose images attend both ways
    columns, replay = w.tokens + w.span, w.group * w.answer

    def saved(new: int, past: int, masked: bool, again: float, keys_only: bool = False) -> int:
        return pass_bytes(d, w.rows, new, past, masked, adapters, again, keys_only)

    def layer(new: int, past: int, masked: bool, again: float, keys_only: bool = False) -> int:
        """Of the last one, or of the last that is recomputed: what the layers behind it kept is gone by then."""
        count = recomputed_layers(again, d.layers)
        last = 0 if count == d.layers else backward_bytes(d, w.rows * new, adapters, False)
        if not count:
            return last
        kept = max(d.layers - keys_only - count, 0) * layer_bytes(d, w.rows, new, past, masked, adapters)
        whole = layer_bytes(d, w.rows, new, past, masked, adapters, recomputed=True)
        return max(last, whole + backward_bytes(d, w.rows * new, adapters, True) - kept)

    prompt = saved(w.tokens, 0, needs_mask, recomputed, keys_only=True)
    span = saved(w.span, w.tokens, True, recomputed) if w.latents and replay else 0
    branches = replay_bytes(d, w, adapters)
    behind = columns if joined_layers(d, w) else 0
    logits = d.vocab * chunk_rows(d, w.rows * replay)
    before = prompt + span + branches
    # As long as the forward pass runs, its last states are there too.
    ahead = saved(w.tokens, 0, needs_mask, recomputed) + span + branches
    free = w.evidence and w.latents > 0
    # Gradients of the prompt's keys and values, once the latent steps have gone backward. Later they take the place of
    # these themselves.
    length = bucket(w.tokens, COLUMNS) if w.recorded_span and w.split else w.tokens
    trunk = w.rows * length * 2 * d.key * d.itemsize * d.layers if free else 0
    found = [
        Phase("vision", vision_bytes(d, w.rows * w.visual)),
        Phase("output layer, forward", ahead + LOGIT_BYTES * logits),
    ]
    if free:
        reading = reading_bytes(d, w.rows, w.readout, columns + w.readout, adapters)
        steps = end = one = 0
        if not w.recorded_span:  # of which the graphs hold everything (``peak.recorded_bytes``)
            # What follows all latents but the last is only read, without gradient.
            steps, end = latent_steps(d, w, adapters)
            # After one step has gone backward every layer has a gradient, and the other steps are still there.
            one = layer(1, w.span if w.split else columns, w.padded and not w.split, steps_recomputed)
        backward = before + steps * (w.latents - 1) // w.latents + one
        found += [
            Phase("readout", ahead + steps + end + reading),
            Phase("latent steps, backward", backward + trunk, "but a table", steps_only=True),
        ]
    last: Gradients = "all" if free else "head"
    found += [
        Phase("output layer, backward", before + trunk + LOGIT_BACKWARD * logits, last, steps_only=free),
        Phase("replay, backward", prompt + span + trunk + layer(replay, behind, behind > 0, recomputed), "all", True),
        Phase("prompt, backward", prompt + layer(w.tokens, 0, needs_mask, recomputed, keys_only=True), "all"),
    ]
    return found
