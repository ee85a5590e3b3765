"""Static buffers where memory is short: they never cost a rollout or an evaluation what the plain path could do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import op_tape
from helpers import DEVICE, DTYPE, ask
from realvr.backbone import Backbone, Turn
from realvr.data.sample import Sample
from realvr.evaluation.model_responder import ModelResponder
from realvr.evaluation.responder import Plan, Request
from realvr.latent import graphs
from realvr.latent import room as fast_room
from realvr.latent.buffers import KINDS, PATIENCE
from realvr.latent.fast import FastDecode
from realvr.latent.group_rollout import rollout
from realvr.latent.modes import FastMode, bucket, is_static
from realvr.latent.sampling import Sampling

pytestmark = pytest.mark.skipif(torch.float32 != DTYPE, reason="half precision flips near ties")

GREEDY = Sampling(temperature=0.0, max_new=6, stop=None)


@pytest.fixture(scope="module")
def one(build_tiny: Callable[[str], Path]) -> Backbone:
    return Backbone.load(build_tiny("qwen2.5-vl"), dtype=torch.float32, device=DEVICE, announce=False)


def small(backbone: Backbone, **options: Any) -> FastDecode:
    return FastDecode(backbone, **{"columns": 8, "tokens": 4, "compact": 0, **options})


def ids(backbone: Backbone, *texts: str, fast: FastDecode | None = None) -> list[list[int]]:
    prompts = [backbone.prompt([Turn("user", text)]) for text in texts]
    made = rollout(backbone, prompts, latents=2, sampling=GREEDY, fast=fast)
    return [completion.ids for (completion,) in made.completions]


def test_one_notice_whatever_its_numbers(one: Backbone) -> None:
    """What is needed and free differs from batch to batch."""
    fast = small(one)
    with pytest.warns(UserWarning) as said:
        for needed in (1.5, 2.25):
            fast._say(f"static buffers need {needed} GiB, and 0.1 GiB are free", "plain")
        fast._say("latents are replaced by interventions", "plain")
    assert [str(each.message).split()[2] for each in said] == ["static", "latents"]


def test_other_shapes_make_room(one: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for the buffers of one shape: each takes the place of the one before, and nothing is plain."""
    texts = ("No", "No, no, no " * 8, "No")
    alone = small(one)
    ids(one, texts[1], fast=alone)
    fast = small(one)
    monkeypatch.setattr(fast_room, "free_bytes", lambda *_: alone.held_bytes - fast.held_bytes)
    for text in texts:
        assert ids(one, text, fast=fast) == ids(one, text)
    assert fast.counts["dropped"] == 2 and not fast.counts["plain"]


def test_larger_buffers_serve_once_all_places_are_taken(one: Backbone) -> None:
    """Fewer prompts, shorter prompts and shorter texts in buffers with room to spare, on top of their leftovers."""
    fast = small(one, shapes=1, recorded=True, record=op_tape.record)
    texts = ("No, no, no, no, no", "Yes", "And why is that?")
    ids(one, *texts, fast=fast)
    for tensor in (x for trunk in fast._buffers.trunks.values() for pair in trunk.kv for x in pair):
        tensor.fill_(torch.inf)
    for fewer in (texts[1:], texts[:2], texts[::-1]):
        assert ids(one, *fewer, fast=fast) == ids(one, *fewer)
    assert fast.counts["recorded"] == 2 and not fast.counts["dropped"]
    assert ids(one, "No", fast=fast) == ids(one, "No")  # a third of it would be used
    assert fast.counts["recorded"] == 4 and fast.counts["dropped"] == 1
    apart = small(one, shapes=2)
    ids(one, *texts, fast=apart)
    ids(one, *texts[1:], fast=apart)
    assert len(apart._buffers.trunks) == 2  # as long as there is a place, each shape has its own


def test_the_latents_of_fewer_prompts_in_larger_buffers(one: Backbone) -> None:
    """Rows behind those of the state are nobody's: latents and state have the rows of the prompts."""
    fast = small(one, shapes=1)
    ids(one, "No", "Yes", fast=fast)
    prompts = [one.prompt([Turn("user", "Yes")])]
    ours, plain = (rollout(one, prompts, latents=2, sampling=GREEDY, fast=way) for way in (fast, None))
    assert ours.latents_BKD.shape == plain.latents_BKD.shape == (1, 2, one.width)
    assert torch.allclose(ours.latents_BKD, plain.latents_BKD, atol=1e-4)
    assert len(fast._buffers.trunks) == 1 and not fast.counts["dropped"]


def test_shapes_that_change_every_time(one: Backbone) -> None:
    """Nothing is used again: after some of them no more buffers are made, said once and counted. What is there goes on
    to be used, and that makes good for what was dropped."""
    fast = small(one, columns=1, shapes=1)
    texts = ["No " * 2**n + "so" for n in (0, 6)]
    with pytest.warns(UserWarning, match="shapes change too often") as said:
        for n in range(PATIENCE + 2):
            assert ids(one, texts[n % 2], fast=fast) == ids(one, texts[n % 2])
    assert len(said) == 1
    assert fast.counts["dropped"] == PATIENCE and fast.counts["plain"] == 2
    kept = fast.counts["eager"]
    for _ in range(2):
        ids(one, texts[0], fast=fast)
    assert fast.counts["eager"] > kept and fast.counts["plain"] == 2
    assert ids(one, texts[1], fast=fast) == ids(one, texts[1])
    assert fast.counts["dropped"] == PATIENCE + 1  # another try


def test_recorded_steps_are_bounded_and_counted(one: Backbone) -> None:
    """By kind of sampling; branches of another number or size, too."""
    fast = small(one, recorded=True, record=op_tape.record)
    prompts = [one.prompt([Turn("user", "No")])]

    def run(temperature: float, group: int = 1, max_new: int = 4) -> None:
        sampling = Sampling(temperature=temperature, max_new=max_new, stop=None)
        rollout(one, prompts, latents=0, sampling=sampling, fast=fast, group=group)

    for number in range(KINDS + 2):
        run(1 + number)
    (branches,) = fast._buffers.branches.values()
    assert len(branches.replays) == KINDS and fast.counts["dropped"] == 2
    run(KINDS + 2)
    assert fast.counts["recorded"] == KINDS + 2  # the newest are kept
    run(1.0, group=2)
    run(1.0, group=2, max_new=16)
    run(1.0, group=2, max_new=9)  # half of them at least are used
    assert fast.counts["dropped"] == 4 and [b.size for b in fast._buffers.branches.values()] == [16]


def test_buckets() -> None:
    """Multiples up to 16 of them, then eight sizes to a doubling."""
    assert [bucket(n, 256) for n in (1, 256, 257, 4096, 4097, 8192, 8193)] == [256, 256, 512, 4096, 4608, 8192, 9216]
    sizes = [bucket(n, 8) for n in range(1, 5000)]
    assert sizes == sorted(sizes) and all(n <= size < max(1.125 * n, n + 8) for n, size in enumerate(sizes, 1))
    assert len(set(sizes)) < 90


def test_one_walk_a_rollout(one: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters make thousands of modules, and going through them takes the host's time."""
    walks, plain = [], graphs.modules
    monkeypatch.setattr(graphs, "modules", lambda backbone: walks.append(1) or plain(backbone))
    fast = small(one, recorded=True, or_plain=True, record=op_tape.record)
    for _ in range(2):
        walks.clear()
        ids(one, "No", fast=fast)
    assert len(walks) == 1
    walks.clear()
    ModelResponder(one, GREEDY, fast=fast).reply([Request(Sample("x", [], [], ""), ask(0))], [Plan(2), Plan(0)])
    assert len(walks) <= 1 + fast.counts["recorded"] - 2  # recording looks for rotary frequencies


def test_who_has_buffers() -> None:
    """As the estimate has it: `graphs.why_not` refuses the hooks of sharded engines, `FastDecode.applies` lockstep."""
    sharded, lockstep = {"sharded": True}, {"sharded": True, "lockstep": True}
    table: dict[FastMode, list[bool]] = {
        "off": [False, False, False],
        "auto": [True, False, False],
        "graph": [True, True, False],
        "static": [True, True, False],
    }
    for mode, expected in table.items():
        assert [is_static(mode, "cuda", **how) for how in ({}, sharded, lockstep)] == expected
    assert not is_static("auto", "cpu") and is_static("static", "cpu")


@pytest.mark.parametrize("room", [True, False])
def test_prompts_move_where_there_is_memory(one: Backbone, monkeypatch: pytest.MonkeyPatch, room: bool) -> None:
    texts, limited = ("No", "Yes", "And", "But"), Sampling(temperature=1.0, max_new=12, stop=None)
    prompts = [one.prompt([Turn("user", text)]) for text in texts]
    monkeypatch.setattr(one, "eos_ids", [*one.eos_ids, *range(300, 420)])
    plain = rollout(one, prompts, latents=0, sampling=limited, seed=3)
    lengths = sorted(len(completion.ids) for (completion,) in plain.completions)
    assert lengths[1] < lengths[3]  # half of them end before the last
    fast = small(one, compact=2)
    monkeypatch.setattr(fast_room, "free_bytes", lambda *_: 1 << 40 if room or not fast.held_bytes else 0)
    made = rollout(one, prompts, latents=0, sampling=limited, seed=3, fast=fast)
    assert [c.ids for (c,) in made.completions] == [c.ids for (c,) in plain.completions]
    assert (fast.counts["moved"] > 0) == room and not fast.counts["plain"]


def test_an_evaluation_goes_on_without_its_buffers(one: Backbone) -> None:
    """Where a prompt does not fit beside them; where it does not fit at all, the batch is too large."""
    requests, plans = [Request(Sample("x", [], [], ""), ask(n), seed=n) for n in range(2)], [Plan(2)]
    plain = ModelResponder(one, GREEDY).reply(requests, plans)
    fast = small(one)
    responder = ModelResponder(one, GREEDY, fast=fast)
    tried = []

    def full(module: Any, args: Any) -> None:
        if args[0].shape[1] > 1:  # a prompt
            tried.append(fast.held_bytes > 0)
            if tried[-1] or never:
                raise torch.OutOfMemoryError("no room")

    hook, never = one.decoder.layers[0].register_forward_pre_hook(full), False
    try:
        for _ in range(2):
            found = responder.reply(requests, plans)
            assert [reply.ids for reply in found[0]] == [reply.ids for reply in plain[0]]
        assert tried == [False, True, False] and fast.held_bytes and not fast.counts["plain"]
        never = True
        with pytest.raises(torch.OutOfMemoryError):
            responder.reply(requests, plans)
        assert not fast.held_bytes
    finally:
        hook.remove()
