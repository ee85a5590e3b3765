"""Static buffers where memory is short: they never cost a rollout or an evaluation what the plain path could do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import DEVICE, DTYPE, ask
from realvr.backbone import Backbone, Turn
from realvr.data.sample import Sample
from realvr.evaluation.model_responder import ModelResponder
from realvr.evaluation.responder import Plan, Request
from realvr.latent import fast as fast_module
from realvr.latent.fast import FastDecode
from realvr.latent.group_rollout import rollout
from realvr.latent.modes import FastMode, is_static
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
    monkeypatch.setattr(fast_module, "_free_bytes", lambda device: alone.held_bytes - fast.held_bytes)
    for text in texts:
        assert ids(one, text, fast=fast) == ids(one, text)
    assert fast.counts["dropped"] == 2 and not fast.counts["plain"]


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
    monkeypatch.setattr(fast_module, "_free_bytes", lambda device: 1 << 40 if room or not fast.held_bytes else 0)
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
