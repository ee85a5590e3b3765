"""Decoding and latent steps in static shapes, against the plain ones: the same texts, log-probabilities and latents.

Recorded steps are tried with a stand-in for CUDA graphs (`op_tape`), which repeats operations on the same tensors.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor

import op_tape
from helpers import DEVICE, DTYPE, ask, difference, mixed_prompts
from pair import Pair
from realvr.backbone import Backbone, Prompt, Turn
from realvr.backbone.notices import notice_once
from realvr.backbone.prompts import tail
from realvr.data.sample import Sample
from realvr.errors import UserError
from realvr.evaluation.model_responder import ModelResponder
from realvr.evaluation.responder import Plan, Request
from realvr.latent import extend, prefill, room, score, think
from realvr.latent.fast import FastDecode, fast_decode
from realvr.latent.graphs import why_not_modules
from realvr.latent.group_rollout import Rollout, decode, rollout
from realvr.latent.sampling import Sampling, choose
from realvr.training.adapters import Adapters
from realvr.training.sections import LoraSettings

pytestmark = pytest.mark.skipif(torch.float32 != DTYPE, reason="in float64; half precision flips near ties")

CLOSE = 1e-9
"""In float64. Where a stock router computes in float32, see `close`."""


def close(backbone: Backbone) -> float:
    return 1e-5 if backbone.family.name == "qwen3-vl-moe" else CLOSE


def small(backbone: Backbone, **options: Any) -> FastDecode:
    """With buffers so narrow that prompts and completions cross their sizes."""
    return FastDecode(backbone, **{"columns": 8, "tokens": 4, "compact": 0, **options})


def assert_same(one: Rollout, other: Rollout, tolerance: float) -> None:
    for ours, plain in zip(one.completions, other.completions, strict=True):
        for a, b in zip(ours, plain, strict=True):
            assert (a.ids, a.text, a.finish) == (b.ids, b.text, b.finish)
            assert len(a.logprobs) == len(b.logprobs)
            assert max(abs(x - y) for x, y in zip(a.logprobs, b.logprobs, strict=True)) <= tolerance
    assert difference(one.latents_BKD, other.latents_BKD) <= tolerance
    assert one.temperature == other.temperature


@contextmanager
def ends_often(backbone: Backbone) -> Iterator[None]:
    """A sixth of the vocabulary ends a completion."""
    before, backbone.eos_ids = backbone.eos_ids, [*backbone.eos_ids, *range(300, 420)]
    try:
        yield
    finally:
        backbone.eos_ids = before


@pytest.fixture(scope="module")
def ours(exact: Pair) -> Backbone:
    return exact.ours


@pytest.fixture(scope="module")
def one(build_tiny: Callable[[str], Path]) -> Backbone:
    """For what does not depend on the family, in float32."""
    return Backbone.load(build_tiny("qwen2.5-vl"), dtype=DTYPE, device=DEVICE)


CASES = {
    "greedy, no span": (1, 0, Sampling(temperature=0.0, max_new=9, stop=None)),
    "eight completions": (8, 8, Sampling(temperature=1.0, max_new=10, stop=None)),
    "top-p and top-k": (3, 1, Sampling(temperature=0.7, top_p=0.8, top_k=40, max_new=7, stop=None)),
}


@pytest.mark.parametrize("case", CASES)
def test_the_same_rollout(ours: Backbone, case: str) -> None:
    """Prompts of unequal length, with and without images; lengths that are and are not multiples of the buffers'."""
    group, latents, sampling = CASES[case]
    prompts = mixed_prompts(ours)
    asked: dict[str, Any] = {"group": group, "latents": latents, "sampling": sampling, "seed": 3}
    plain = rollout(ours, prompts, **asked)
    fast = small(ours)
    assert_same(rollout(ours, prompts, fast=fast, **asked), plain, close(ours))
    assert fast.counts["plain"] == 0
    assert fast.counts["eager"] == (latents + 2 if latents else 0) + sampling.max_new - 1
    wide = FastDecode(ours, every=3)
    assert_same(rollout(ours, prompts[:1], fast=wide, **asked), rollout(ours, prompts[:1], **asked), close(ours))


def test_completions_that_end_at_different_steps(ours: Backbone) -> None:
    """Ended rows run on as fillers; with ``compact`` the others move to smaller buffers. Limits are each prompt's
    own. The host may look at the tokens late, and after later steps have begun; tokens that left before a move are
    those of the old rows."""
    prompts = [*mixed_prompts(ours), *(ours.prompt(ask(n)) for n in range(3))]
    sampling = Sampling(temperature=1.0, max_new=12, stop=None)
    seeds = list(range(5, 5 + len(prompts)))
    with torch.no_grad(), ends_often(ours):
        state, _ = prefill(ours, ours.batch(prompts))
        for group, limits in ((1, None), (3, [12, 1, 7, 2, 12, 3, 9])):
            plain = decode(ours, state, group, sampling, seeds, limits)
            ends = {len(c.ids) for row in plain for c in row}
            assert len(ends) > 3 and (limits is None or {c.finish for row in plain for c in row} == {"eos", "length"})
            for options in (
                {},
                {"every": 5},
                {"every": 2, "ahead": 1},
                {"every": 3, "ahead": 2},
                {"compact": 2},
                {"compact": 2, "every": 2, "shapes": 1},
                {"compact": 2, "ahead": 1},
                {"compact": 2, "every": 2, "ahead": 2, "shapes": 1},
            ):
                fast = small(ours, **options)
                done = decode(ours, state, group, sampling, seeds, limits, fast=fast)
                assert_same(_as_rollout(done), _as_rollout(plain), close(ours))
                assert (fast.counts["moved"] > 1) == ("compact" in options)


def _as_rollout(completions: Any) -> Rollout:
    return Rollout(completions, torch.zeros(0), 1.0)


def test_a_stop_text(ours: Backbone) -> None:
    """Written by one of two completions, in a step after which the host does not look."""
    prompts = [ours.prompt(ask(0)), ours.prompt([Turn("user", "No")])]
    script = ours.tokenizer("Say <answer>red</answer>", add_special_tokens=False)["input_ids"]
    calls = 0

    def say(_: Any, args: Any, out: Tensor) -> Tensor:
        nonlocal calls
        bias = torch.zeros_like(out)
        if len(out) == 2:  # the other row says what it likes, also when it is the only one left
            bias[0, script[calls] if calls < len(script) else 50] = 1e4
        calls += 1
        return out + bias

    results = []
    for fast in (None, small(ours, every=4), small(ours, every=2, ahead=1)):
        calls = 0
        hook = ours.model.lm_head.register_forward_hook(say)
        try:
            results.append(rollout(ours, prompts, sampling=Sampling(max_new=30), latents=2, seed=1, fast=fast))
        finally:
            hook.remove()
    for result in results[1:]:
        assert_same(result, results[0], close(ours))
    first, second = (group[0] for group in results[2].completions)
    assert (first.finish, first.text) == ("stop", "Say <answer>red</answer>")
    assert second.finish != "stop"


def test_beyond_the_sliding_window(ours: Backbone) -> None:
    """More tokens than Gemma's window, alone and beside a long prompt; the span crosses it too."""
    if not ours.windowed:
        pytest.skip("this family has no sliding window")
    window = int(ours.text_config.sliding_window)
    prompts = [ours.prompt([Turn("user", "No")]), ours.prompt(ask(1, 2, 3))]
    sampling = Sampling(temperature=0.0, max_new=window + 8, stop=None)
    asked: dict[str, Any] = {"sampling": sampling, "latents": window + 2}
    for chosen in (prompts[:1], prompts):
        assert_same(rollout(ours, chosen, fast=small(ours), **asked), rollout(ours, chosen, **asked), close(ours))


def test_a_second_turn(ours: Backbone) -> None:
    """The state after a static span is a state like any other: read a reply and a new image onto it, think again."""
    first = [ours.prompt(ask(0)), ours.prompt(ask(1, text="Which of the two shapes is larger?"))]
    sampling = Sampling(temperature=1.0, max_new=6, stop=None)
    fast, found = small(ours), []
    with torch.no_grad():
        for way in (None, fast):
            state, _ = prefill(ours, ours.batch(first))
            state, z = think(ours, state, 3) if way is None else way.think(state, 3)
            reply = torch.tensor([[5, 6, 7], [8, 9, 0]], device=DEVICE)
            state, _ = extend(ours, state, reply, real_BS=reply > 0)
            seen = [len(p) + 5 + n for p, n in zip(first, (3, 2), strict=True)]
            longer = [_longer(ours, turn, z[row], reply[row]) for row, turn in enumerate((ask(0), _second()))]
            rest = [tail(p, n, ours.image_id, ours.markers.slot) for p, n in zip(longer, seen, strict=True)]
            batch = ours.batch(rest, start_B=state.next_B)
            state, _ = prefill(ours, batch, state=state)
            state, z = think(ours, state, 2) if way is None else way.think(state, 2)
            for buffer in _tensors(fast):  # a state has tensors of its own, whatever becomes of the buffers
                buffer.fill_(math.inf)
            logp, _, _ = score(ours, state, torch.arange(5, 17, device=DEVICE).view(2, 2, 3))
            texts = decode(ours, state, 2, sampling, [1, 2], None, fast=way)
            found.append((z, logp, texts, state))
    (plain_z, plain_logp, plain_texts, plain_state), (z, logp, texts, state) = found
    assert max(difference(z, plain_z), difference(logp, plain_logp)) <= close(ours)
    assert_same(_as_rollout(texts), _as_rollout(plain_texts), close(ours))
    assert state.slots == plain_state.slots and torch.equal(state.image_BT, plain_state.image_BT)
    for mine, right in zip(state.columns.facts(), plain_state.columns.facts(), strict=True):
        assert (mine is None) == (right is None) and (mine is None or torch.equal(mine, right))


def _second() -> list[Turn]:
    return ask(1, text="Which of the two shapes is larger?")


def _longer(backbone: Backbone, first: list[Turn], z_KD: Tensor, reply: Tensor) -> Prompt:
    said = Turn("assistant", latents=z_KD, ids=reply[reply > 0].tolist())
    return backbone.prompt([*first, said, *ask(4, text="And in this one?")])


def test_buffers_are_used_again(ours: Backbone) -> None:
    """A rollout of the same shape finds the leftovers of the last one, here infinities; none shows."""
    fast = small(ours, columns=64, tokens=8)
    prompts = mixed_prompts(ours)
    asked: dict[str, Any] = {"group": 2, "latents": 2, "sampling": Sampling(temperature=1.0, max_new=6, stop=None)}
    rollout(ours, prompts[:2], fast=fast, **asked)
    held = fast.held_bytes
    assert held > 0
    for tensor in _tensors(fast):
        tensor.fill_(math.inf)
    again = rollout(ours, prompts[1::-1], seed=9, fast=fast, **asked)
    assert_same(again, rollout(ours, prompts[1::-1], seed=9, **asked), close(ours))
    assert fast.held_bytes == held
    fast.release()
    assert fast.held_bytes == 0
    assert_same(rollout(ours, prompts[:2], fast=fast, **asked), rollout(ours, prompts[:2], **asked), close(ours))


def _tensors(fast: FastDecode) -> list[Tensor]:
    kept = [*fast._buffers.trunks.values(), *fast._buffers.branches.values()]
    return [x for each in kept for pair in each.kv for x in pair]


def test_an_evaluation_gets_the_same_replies(one: Backbone) -> None:
    """Own latents, none, and given ones, behind one prefill."""
    requests = [Request(Sample("x", [], [], ""), ask(n), seed=n) for n in range(3)]
    plans = [Plan(2), Plan(0), Plan(2, given=torch.randn(3, 2, one.width, generator=torch.Generator().manual_seed(0)))]
    sampling = Sampling(temperature=1.0, max_new=8)
    fast = small(one)
    plain = ModelResponder(one, sampling).reply(requests, plans)
    ours = ModelResponder(one, sampling, fast=fast).reply(requests, plans)
    for mine, right in zip([r for row in ours for r in row], [r for row in plain for r in row], strict=True):
        assert (mine.text, mine.ids, mine.finish) == (right.text, right.ids, right.finish)
        assert (mine.latents is None) == (right.latents is None)
        assert mine.latents is None or difference(mine.latents, right.latents) <= 1e-4
    assert len({reply.text for row in ours for reply in row}) > 3
    assert fast.counts["plain"] == 0 and fast.counts["eager"] > 4


# ---------------------------------------------------------------------- recorded steps


def test_a_recorded_step_repeats_itself(ours: Backbone) -> None:
    """Nothing of a step is left to Python: counters, columns, positions and random numbers advance on the device."""
    if ours.family.name == "qwen3-vl-moe":  # in float64 its experts run one by one
        assert "routing" in (why_not_modules(ours, 100) or "")
        return
    assert why_not_modules(ours, 100) is None
    prompts = mixed_prompts(ours)[:3]
    fast = small(ours, columns=64, tokens=8, recorded=True, record=op_tape.record)
    asked: dict[str, Any] = {"group": 3, "latents": 3, "sampling": Sampling(temperature=1.0, max_new=8, stop=None)}
    for seed in (1, 2):
        recorded = rollout(ours, prompts, seed=seed, fast=fast, **asked)
        assert_same(recorded, rollout(ours, prompts, seed=seed, **asked), close(ours))
    assert fast.counts["recorded"] == 2 and fast.counts["eager"] == 0 and fast.counts["replayed"] == 2 * (5 + 7)
    asked["sampling"] = Sampling(temperature=0.5, top_p=0.9, max_new=8, stop=None)  # in the step: another recording
    assert_same(rollout(ours, prompts, fast=fast, **asked), rollout(ours, prompts, **asked), close(ours))
    assert fast.counts["recorded"] == 3


def test_experts_in_static_shapes_can_be_recorded(backbone: Backbone) -> None:
    """In float32, where experts run as one grouped product."""
    if backbone.family.name != "qwen3-vl-moe":
        pytest.skip("this family has no experts")
    assert why_not_modules(backbone, 100) is None
    fast = small(backbone, recorded=True, record=op_tape.record)
    asked: dict[str, Any] = {"group": 2, "latents": 2, "sampling": Sampling(temperature=1.0, max_new=5, stop=None)}
    prompts = mixed_prompts(backbone)[:2]
    assert_same(rollout(backbone, prompts, fast=fast, **asked), rollout(backbone, prompts, **asked), 1e-4)
    assert fast.counts["replayed"] == 8


def test_recorded_steps_follow_the_weights(fresh: Backbone) -> None:
    """An update in place needs nothing; a parameter in a new place, a mode or a hook is noticed. Shapes are bounded."""
    prompts = [fresh.prompt(ask(0)), fresh.prompt([Turn("user", "No")])]
    fast = small(fresh, recorded=True, record=op_tape.record, shapes=2)
    asked: dict[str, Any] = {"latents": 1, "sampling": Sampling(temperature=0.0, max_new=5, stop=None)}

    def check(recorded: int, chosen: list[Prompt] = prompts) -> None:
        assert_same(rollout(fresh, chosen, fast=fast, **asked), rollout(fresh, chosen, **asked), 1e-4)
        assert fast.counts["recorded"] == recorded

    check(2)
    weight = fresh.decoder.layers[0].mlp
    parameter = next(p for p in weight.parameters() if p.ndim > 1)
    with torch.no_grad():
        parameter.mul_(3)
    check(2)
    parameter.data = parameter.data.clone() * -2
    check(4)
    check(6, prompts[:1])
    check(8, [fresh.prompt(ask(0, text="No, no, no " * 24))])
    assert len(fast._buffers.trunks) == 2 and fast.counts["dropped"] >= 1
    assert why_not_modules(fresh, 100) is None
    hook = fresh.decoder.layers[0].register_forward_hook(lambda *_: None)
    assert "hook" in (why_not_modules(fresh, 100) or "")
    hook.remove()


def test_recorded_steps_with_adapters(fresh: Backbone) -> None:
    """As Stage 2 with LoRA rolls out: updates in place need nothing, an adapter that is switched off is noticed."""
    if fresh.family.name != "qwen2.5-vl":
        pytest.skip("one family is enough")
    adapters = Adapters(fresh, LoraSettings(rank=4, alpha=8, dropout=0.1))
    fresh.model.train()
    lora = [(name, p) for name, p in fresh.model.named_parameters() if "lora_" in name]
    generator = torch.Generator().manual_seed(8)
    fast = small(fresh, columns=64, recorded=True, or_plain=True, record=op_tape.record)
    prompts = [fresh.prompt(ask(0)), fresh.prompt([Turn("user", "No")])]
    asked: dict[str, Any] = {"group": 2, "latents": 2, "sampling": Sampling(temperature=0.0, max_new=5, stop=None)}
    latents = []
    for recorded in (2, 2, 4):
        with torch.no_grad():
            for _, parameter in lora:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
        if recorded == 4:
            for module in fresh.decoder.modules():
                if isinstance(module, LoraLayer):
                    module.enable_adapters(False)
        with adapters.still():  # without dropout, which could not be recorded
            mine, plain = (rollout(fresh, prompts, fast=way, **asked) for way in (fast, None))
        assert_same(mine, plain, 1e-4)
        assert fast.counts["recorded"] == recorded and not fast.counts["plain"] and not fast.counts["eager"]
        latents.append(mine.latents_BKD)
    assert min(difference(a, b) for a, b in zip(latents, latents[1:], strict=False)) > 1e-3


def test_rows_move_between_recorded_steps(one: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    """A smaller shape is recorded in the middle of a text, and used again by the next one."""
    monkeypatch.setattr(one, "eos_ids", [*one.eos_ids, *range(300, 420)])
    prompts, sampling = [one.prompt(ask(n)) for n in range(6)], Sampling(temperature=1.0, max_new=12, stop=None)
    fast = small(one, columns=64, compact=2, every=2, ahead=1, recorded=True, record=op_tape.record)
    for seed in (3, 4):
        plain = rollout(one, prompts, latents=1, sampling=sampling, seed=seed)
        assert_same(rollout(one, prompts, latents=1, sampling=sampling, seed=seed, fast=fast), plain, 1e-4)
    assert fast.counts["moved"] >= 2 and not fast.counts["eager"]
    assert fast.counts["recorded"] <= 1 + 4  # one latent step, and one of decoding for each number of rows


def test_prompts_that_end_at_the_last_token_do_not_move(one: Backbone) -> None:
    """No step would run in the smaller buffers, and to record one there would ask for a token behind their end."""
    state, _ = prefill(one, one.batch([one.prompt(ask(0))] * 4))
    for limit in (5, 6, 7):
        fast = small(one, tokens=8, compact=1, every=2, ahead=1, recorded=True, record=op_tape.record)
        with torch.no_grad():
            found = fast.decode(state, 1, Sampling(temperature=0.0, max_new=8, stop=None), limits=[limit] * 3 + [8])
        assert [len(completion.ids) for row in found for completion in row] == [limit] * 3 + [8]


def test_a_step_that_cannot_be_recorded_runs_eagerly(one: Backbone) -> None:
    def fails(step: Any, reset: Any) -> Any:
        step()
        raise RuntimeError("operation not permitted when stream is capturing")

    prompts = mixed_prompts(one)[:2]
    fast = small(one, recorded=True, record=fails)
    asked: dict[str, Any] = {"group": 2, "latents": 2, "sampling": Sampling(temperature=1.0, max_new=5, stop=None)}
    plain = rollout(one, prompts, **asked)
    with pytest.warns(UserWarning, match="stream is capturing") as said:
        for _ in range(2):
            assert_same(rollout(one, prompts, fast=fast, **asked), plain, 1e-4)
    assert len(said) == 1 and fast.counts["recorded"] == fast.counts["replayed"] == 0


def test_plain_where_steps_cannot_be_recorded(one: Backbone) -> None:
    """As ``auto`` decodes: recorded, or in the plain way with a notice, never in static shapes without a graph."""
    prompts, asked = [one.prompt(ask(0))], {"latents": 2, "sampling": Sampling(temperature=0.0, max_new=5, stop=None)}
    plain = rollout(one, prompts, **asked)
    fast = small(one, recorded=True, or_plain=True, record=op_tape.record)
    assert_same(rollout(one, prompts, fast=fast, **asked), plain, 1e-4)
    assert fast.counts["replayed"] and not fast.counts["eager"]
    hooked, hook = (
        small(one, recorded=True, or_plain=True, record=op_tape.record),
        one.decoder.layers[0].register_forward_hook(lambda *_: None),
    )
    try:
        with pytest.warns(UserWarning, match="hook .* plain way"):
            assert_same(rollout(one, prompts, fast=hooked, **asked), plain, 0.0)
    finally:
        hook.remove()
    assert set(+hooked.counts) == {"plain"}

    def broken(step: Any, reset: Any) -> Any:
        raise RuntimeError("no recording here")

    never = small(one, recorded=True, or_plain=True, record=broken)
    with pytest.warns(UserWarning) as said:
        rollout(one, prompts, fast=never, **asked)
    assert [("no recording here" in str(each.message), "plain way" in str(each.message)) for each in said] == [
        (True, False),  # the span, which had begun
        (False, True),  # the text behind it
    ]
    before = never.counts["eager"]
    assert_same(rollout(one, prompts, fast=never, **asked), plain, 0.0)
    assert never.counts["eager"] == before


def test_dynamic_rotary_frequencies(fresh: Backbone) -> None:
    """Their check waits for the device. It is left out of a recording where it would change nothing, and only there."""
    rotary = fresh.decoder.rotary_emb
    if not isinstance(rotary.rope_type, str):
        pytest.skip("frequencies by type of layer")
    rotary.rope_type = "dynamic"
    context = int(rotary.original_max_seq_len)
    assert why_not_modules(fresh, context) is None
    assert "frequencies" in (why_not_modules(fresh, context + 1) or "")
    fast = small(fresh, recorded=True, record=op_tape.record)
    asked: dict[str, Any] = {"latents": 1, "sampling": Sampling(temperature=0.0, max_new=5, stop=None)}
    prompts = [fresh.prompt(ask(0))]
    assert_same(rollout(fresh, prompts, fast=fast, **asked), rollout(fresh, prompts, **asked), 1e-4)
    assert fast.counts["replayed"] == 7 and rotary.rope_type == "dynamic"


# ---------------------------------------------------------------------- where it does not apply


def test_the_plain_path_runs_where_static_shapes_do_not_apply(one: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = mixed_prompts(one)[:2]
    asked: dict[str, Any] = {"group": 2, "latents": 2, "sampling": Sampling(temperature=1.0, max_new=4, stop=None)}
    plain = rollout(one, prompts, **asked)
    vector = torch.ones(one.width, dtype=one.dtype, device=DEVICE)

    def run(fast: FastDecode, reason: str, expected: Rollout = plain, **more: Any) -> None:
        with pytest.warns(UserWarning, match=reason) as said:
            for _ in range(2):
                assert_same(rollout(one, prompts, fast=fast, **asked, **more), expected, 0)
        assert len(said) == 1  # once, not once a rollout

    run(small(one), "in step with each other", go_on=lambda decoding: decoding)
    if DEVICE == "cpu":
        run(small(one, recorded=True), "CUDA device")
    monkeypatch.setattr(room, "free_bytes", lambda *_: 1000)
    run(small(one), "GiB are free")
    monkeypatch.undo()
    monkeypatch.setitem(one.decoder._modules, "spare", torch.nn.Linear(1, 1, device="meta"))
    run(small(one), "2 devices")
    monkeypatch.undo()
    # Interventions concern the span only: the text behind it is decoded in static shapes.
    fast = small(one)
    put = rollout(one, prompts, interventions={1: vector}, **asked)
    assert difference(put.latents_BKD, plain.latents_BKD) > 1e-3
    with pytest.warns(UserWarning, match="interventions"):
        assert_same(rollout(one, prompts, interventions={1: vector}, fast=fast, **asked), put, 1e-4)
    assert fast.counts["eager"] == 3


def test_gradients_are_refused(one: Backbone) -> None:
    state, _ = prefill(one, one.batch([one.prompt([Turn("user", "No")])]))
    with pytest.warns(UserWarning, match="gradients"):
        assert not small(one).applies(state, new=4)


def test_modes(one: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fast_decode(one, "off") is None
        static = fast_decode(one, "static")
        assert static is not None and not static.recorded and static.every == 1
        automatic = fast_decode(one, "auto")
        assert fast_decode(one, "auto", sharded=True) is None or DEVICE != "cpu"  # on a CPU without a notice
        assert fast_decode(one, "static", sharded=True) is not None
    assert (automatic is not None and automatic.recorded) == (DEVICE != "cpu")
    notice_once.cache_clear()
    monkeypatch.setattr(Backbone, "device", torch.device("cuda", 1))
    for devices, sharded, why in ((1, True, "parameters are sharded"), (2, False, "lies on 2 devices")):
        monkeypatch.setattr(Backbone, "devices", [torch.device("cuda", n) for n in range(devices)])
        with warnings.catch_warnings():  # another process says it
            warnings.simplefilter("error")
            assert fast_decode(one, "auto", sharded=sharded, announce=False) is None
        with pytest.warns(UserWarning, match=f"{why}.*plain way") as said:
            for _ in range(2):  # rollouts and validation
                assert fast_decode(one, "auto", sharded=sharded) is None
        assert len(said) == 1
    with pytest.raises(UserError, match="'fast'.*off, static, graph, auto"):
        fast_decode(one, "fast")  # type: ignore[arg-type]


# ---------------------------------------------------------------------- choosing


@pytest.mark.parametrize("size", [7, 512, 1100, 20_000])
def test_choosing_block_by_block_is_choosing_by_one_sum(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    logits = torch.randn(400, size, generator=generator) * 4
    logits[:, ::3] = -torch.inf
    logits[::5, : size // 2] = -torch.inf  # blocks without any mass
    logp = logits.log_softmax(-1).to(DEVICE)
    uniform = torch.rand(400, dtype=torch.float64, generator=generator).to(DEVICE)
    uniform[0], uniform[1] = 0.0, 1 - 2**-53
    total = logp.exp().double().cumsum(-1)
    right = (total <= uniform[:, None] * total[:, -1:]).sum(-1).clamp(max=size - 1)
    chosen = choose(logp, uniform, Sampling(temperature=1.0))
    assert torch.equal(chosen[2:], right[2:])
    assert bool((logp.gather(1, chosen[:, None]) > -torch.inf).all())
