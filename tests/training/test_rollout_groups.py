"""All prompts of a step rolled out together: the same texts in any groups and microbatches, within memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import reference
from helpers import mixed_prompts
from plain_engine import PlainEngine
from realvr.backbone import Backbone, Prompt
from realvr.backbone.backbone import VisualTokens
from realvr.latent import room as fast_room
from realvr.latent.fast import FastDecode
from realvr.latent.group_rollout import Rollout, rollout
from realvr.latent.recorded_span import RecordedSpan
from realvr.latent.sampling import Sampling
from realvr.training import rollout_groups, rollouts
from realvr.training.adapters import Adapters
from realvr.training.configuration import KINDS
from realvr.training.engine import EngineSettings
from realvr.training.estimate import Setup, Workload, decoder_of, weights_of
from realvr.training.estimate.peak import GIB, recorded_bytes
from realvr.training.prompts import PromptBatch
from realvr.training.rollout_groups import Grouping, encoded, evened, similar
from realvr.training.rollouts import Rollouts, Sampled
from realvr.training.sections import LoraSettings
from stage_runs import configure, make, world, write

SAMPLING = Sampling(temperature=1.0, max_new=9, stop=None)
GROUP, SEED, STEP, LATENTS = 3, 5, 2, 3


class Ranks(PlainEngine):
    """One process that is not in lockstep."""

    lockstep = False


@pytest.fixture(scope="module")
def exact(marked: Path) -> Backbone:
    """In float64, with a sixth of the vocabulary as end-of-sequence ids: completions end at different times."""
    backbone = Backbone.load(marked, dtype=torch.float64, device="cpu", latents=LATENTS)
    reference.double(backbone.model)
    backbone.eos_ids = tuple(range(300, 420))
    return backbone


def made(backbone: Backbone, most: int | None, ranks: Any = None, room: float | None = None) -> Rollouts:
    """Rollouts of a run with ``rollout_batch`` set to ``most``."""
    ranks = ranks or Ranks()
    settings = KINDS["rl"].model_validate(configure("rl", Path("model"), Path("data"), Path("out")))
    grouping = Grouping(backbone, settings, ranks, (GROUP, SAMPLING.max_new, most))
    if room is not None:
        grouping.__dict__["_left"] = room
    adapters = Adapters(backbone, LoraSettings(rank=0))
    return Rollouts(backbone, adapters, ranks, SAMPLING, GROUP, SEED, grouping)


def microbatches(prompts: Sequence[Prompt], size: int, place: int = 0) -> list[PromptBatch]:
    return [PromptBatch([], list(prompts[i : i + size]), place + i) for i in range(0, len(prompts), size)]


def same(found: Sequence[Sampled], expected: Sequence[Rollout]) -> None:
    """The same texts, log-probabilities and latents, prompt by prompt."""
    groups = [group for sampled in found for group in sampled.rollout.completions]
    latents = torch.cat([sampled.rollout.latents_BKD for sampled in found])
    assert len(groups) == len(expected)
    for group, z_KD, alone in zip(groups, latents, expected, strict=True):
        assert [(c.ids, c.text, c.finish) for c in group] == [(c.ids, c.text, c.finish) for c in alone.completions[0]]
        for one, other in zip(group, alone.completions[0], strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-9)
        assert float((z_KD - alone.latents_BKD[0]).abs().max()) < 1e-9


@pytest.fixture(scope="module")
def alone(exact: Backbone) -> list[Rollout]:
    """Each prompt by itself, its pictures encoded in the rollout."""
    prompts = mixed_prompts(exact)
    seeds = [rollouts._seed(SEED, STEP, 4 + i) for i in range(len(prompts))]
    found = [
        rollout(exact, [prompt], group=GROUP, sampling=SAMPLING, seed=[seed])
        for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    lengths = {len(c.ids) for made in found for c in made.completions[0]}
    assert len(lengths) > 2  # they end at different times
    return found


@pytest.mark.parametrize(("most", "size"), [(None, 1), (None, 4), (1, 2), (3, 1), (2, 4)])
def test_texts_do_not_depend_on_groups_and_microbatches(
    exact: Backbone, alone: list[Rollout], most: int | None, size: int
) -> None:
    """Prompts of one picture, of three, of none, and of two turns: padded, sorted and cut in every way."""
    prompts = mixed_prompts(exact)
    assert len({len(prompt) for prompt in prompts}) == 4
    found = made(exact, most).sample(microbatches(prompts, size, place=4), STEP)
    assert [len(sampled.prompts) for sampled in found] == [size] * (4 // size)
    same(found, alone)
    for sampled in found:  # each microbatch has its own visual tokens
        expected = exact.encode_images(sampled.prompts.images)
        assert sampled.visual.grids == expected.grids and len(sampled.visual.deepstack) == len(expected.deepstack)
        ours, stock = ((v.features_ND, *v.deepstack) for v in (sampled.visual, expected))
        pairs = zip(ours, stock, strict=True)
        assert all(torch.allclose(one, other, rtol=0, atol=1e-10) for one, other in pairs)


def test_static_shapes_give_the_same_texts(exact: Backbone, alone: list[Rollout]) -> None:
    """Buffers are kept from step to step, or dropped after the rollouts of each."""
    rolls = made(exact, 2)
    rolls.fast = FastDecode(exact, columns=16, tokens=4)
    for rolls.release in (False, True):
        same(rolls.sample(microbatches(mixed_prompts(exact), 2, place=4), STEP), alone)
        assert (rolls.fast.held_bytes == 0) == rolls.release
    assert rolls.fast.counts["plain"] == 0 and rolls.fast.counts["eager"] > 0


def test_pictures_are_encoded_once_and_not_all_at_a_time(exact: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [*mixed_prompts(exact), mixed_prompts(exact)[1]]
    images = [image for prompt in prompts for image in prompt.images]
    monkeypatch.setattr(rollout_groups, "ENCODED_TOGETHER", 2 * max(image.tokens for image in images))
    plain, seen = Backbone.encode_images, []
    monkeypatch.setattr(
        Backbone, "encode_images", lambda self, images: (seen.append(list(images)), plain(self, images))[1]
    )
    found = encoded(exact, prompts)
    lots = [lot for lot in seen if lot]
    assert len(lots) >= 2 and all(sum(i.tokens for i in lot) <= rollout_groups.ENCODED_TOGETHER for lot in lots)
    keys = [image.key for lot in lots for image in lot]
    assert len(keys) == len(set(keys)) == len({image.key for image in images})
    monkeypatch.undo()
    for prompt, visual in zip(prompts, found, strict=True):
        expected = exact.encode_images(prompt.images)
        assert visual.grids == expected.grids and torch.allclose(visual.features_ND, expected.features_ND, atol=1e-10)
    joined = VisualTokens.join(found)
    assert joined.grids == tuple(image.grid for image in images)


# ---------------------------------------------------------------------- which prompts


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=20),
    limit=st.integers(50, 200),
    waste=st.sampled_from([None, 1.0, 1.5]),
    more=st.integers(0, 5),
)
def test_groups_hold_every_prompt_once_and_keep_their_limits(
    lengths: list[int], limit: int, waste: float | None, more: int
) -> None:
    groups = similar(lengths, lambda size, tokens: size * tokens <= limit, waste)
    assert sorted(place for group in groups for place in group) == list(range(len(lengths)))
    for group in groups:
        assert group == sorted(group)
        padded, real = len(group) * max(lengths[i] for i in group), sum(lengths[i] for i in group)
        assert len(group) == 1 or (padded <= limit and (waste is None or padded <= waste * real))
    for before, after in zip(groups, groups[1:], strict=False):  # similar lengths, and no group that had room
        assert min(lengths[i] for i in before) >= max(lengths[i] for i in after)
        assert waste is not None or (len(before) + 1) * max(lengths[i] for i in before) > limit
    cut = evened(groups, min(len(groups) + more, len(lengths)))
    assert len(cut) == min(len(groups) + more, len(lengths)) and all(cut)
    assert sorted(place for group in cut for place in group) == list(range(len(lengths)))


def counted(monkeypatch: pytest.MonkeyPatch, limit: int = 10**9) -> list[int]:
    """Sizes of the groups that pass through `rollout`; larger ones than ``limit`` run out of memory."""
    plain, sizes = rollouts.rollout, []

    def run(backbone: Backbone, prompts: Sequence[Prompt], **options: Any) -> Rollout:
        sizes.append(len(prompts))
        if len(prompts) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return plain(backbone, prompts, **options)

    monkeypatch.setattr(rollouts, "rollout", run)
    return sizes


@pytest.fixture(scope="module")
def one(untrained: Path) -> Backbone:
    return Backbone.load(untrained, dtype=torch.float32, device="cpu")


def several(backbone: Backbone, count: int) -> list[Prompt]:
    first = mixed_prompts(backbone)[0]
    return [first] * count


def test_memory_makes_groups_smaller(
    one: Backbone, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As many as the room holds, said once; all of them where there is enough."""
    prompts, sizes = several(one, 6), counted(monkeypatch)
    made(one, None).sample(microbatches(prompts, 2), 0)
    assert sizes == [6] and not capsys.readouterr().err
    sizes.clear()
    tight = made(one, None)
    images = sum(image.tokens for image in prompts[0].images)
    room = tight.grouping._need(4, len(prompts[0]), images, 6)
    tight.grouping.__dict__["_left"] = room
    for step in range(2):
        tight.sample(microbatches(prompts, 2), step)
    assert sizes == [4, 2, 4, 2]
    said = capsys.readouterr().err
    assert said.count("6 prompts of a step are rolled out in 2 groups of at most 4") == said.count("\n") == 1
    sizes.clear()
    made(one, None, room=0).sample(microbatches(prompts[:2], 2), 0)  # one prompt is tried whatever the estimate says
    assert sizes == [1, 1]


def test_out_of_memory_halves_the_group(
    one: Backbone, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = several(one, 7)
    expected = made(one, 1).sample(microbatches(prompts, 1), 0)
    sizes, short = counted(monkeypatch, limit=2), made(one, None)
    found = short.sample(microbatches(prompts, 7), 0)
    assert sizes == [7, 4, 2, 2, 2, 1]
    groups = [group for sampled in expected for group in sampled.rollout.completions]
    assert [[c.ids for c in group] for group in found[0].rollout.completions] == [[c.ids for c in g] for g in groups]
    short.sample(microbatches(prompts, 7), 1)  # remembered
    assert sizes[6:] == [2, 2, 2, 1]
    said = capsys.readouterr().err
    assert said.count("7 prompts together ran out of memory in the rollout") == said.count("\n") == 1
    monkeypatch.undo()
    counted(monkeypatch, limit=0)
    with pytest.raises(torch.OutOfMemoryError):  # one prompt cannot be halved
        made(one, None).sample(microbatches(prompts[:2], 1), 0)
    with pytest.raises(torch.OutOfMemoryError):  # ranks in lockstep would wait for each other
        made(one, None, PlainEngine()).sample(microbatches(prompts, 1), 0)


@pytest.mark.parametrize("fits", [True, False])
def test_one_prompt_out_of_memory_goes_on_without_its_buffers(
    one: Backbone, monkeypatch: pytest.MonkeyPatch, fits: bool
) -> None:
    """A single prompt cannot be halved: it is tried once more without static buffers, and what is recorded for the
    passes with gradient makes room too."""
    prompts, plain, ways = several(one, 2), rollouts.rollout, []
    (expected,) = made(one, 1).sample(microbatches(prompts, 2), 0)

    def run(*args: Any, fast: FastDecode | None = None, **options: Any) -> Rollout:
        ways.append(fast is not None)
        found = plain(*args, fast=fast, **options)
        if fast is not None or not fits:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return found

    monkeypatch.setattr(rollouts, "rollout", run)
    rolls = made(one, 1)
    rolls.fast, rolls.recorded = FastDecode(one, columns=16, tokens=4), RecordedSpan(one)
    released = []
    monkeypatch.setattr(rolls.recorded, "release", lambda: released.append(1))
    with pytest.warns(UserWarning, match="one prompt beside static buffers") as said:
        if not fits:
            with pytest.raises(torch.OutOfMemoryError):
                rolls.sample(microbatches(prompts, 2), 0)
            return
        (found,) = rolls.sample(microbatches(prompts, 2), 0)
    assert len(said) == 1 and ways == [True, False] * 2 and len(released) == 2 and not rolls.fast.held_bytes
    assert rolls.fast.counts["plain"] == 2
    ours, right = ([[c.ids for c in g] for g in each.rollout.completions] for each in (found, expected))
    assert ours == right


def test_groups_in_which_static_buffers_fit(
    one: Backbone, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fewer prompts in static shapes rather than all of them in the plain way, down to a quarter; said once."""
    prompts, sizes = several(one, 8), counted(monkeypatch)
    largest = FastDecode(one, columns=16, tokens=4)
    alone = made(one, 2)
    alone.fast = largest
    expected = alone.sample(microbatches(prompts[:2], 2), 0)
    for share, groups in ((1.0, [8, 4, 2, 2, 2, 2]), (0.1, [8, 4, 2, 2, 2, 2])):
        sizes.clear()
        rolls = made(one, None)
        rolls.fast = fast = FastDecode(one, columns=16, tokens=4)
        free = int(share * largest.held_bytes)
        monkeypatch.setattr(fast_room, "free_bytes", lambda *_, free=free, fast=fast: free - fast.held_bytes)
        with pytest.warns(UserWarning, match="GiB are free") if share < 1 else nullcontext():
            (found,) = rolls.sample(microbatches(prompts, 8), 0)
        assert sizes == groups and (fast.counts["plain"] == 0) == (share == 1)
        texts = [[c.ids for c in group] for group in found.rollout.completions]
        assert texts[:2] == [[c.ids for c in group] for group in expected[0].rollout.completions]
        said = capsys.readouterr().err
        assert said.count("8 prompts together ran out of memory in the rollout") == said.count("\n") == 1


def test_ranks_in_lockstep_agree_on_the_number_of_groups(one: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    class Two(PlainEngine):
        def gather_objects(self, value: Any) -> list[Any]:
            return [value, 3] if isinstance(value, int) and not isinstance(value, bool) else [value]

    sizes = counted(monkeypatch)
    made(one, None, Two()).sample(microbatches(several(one, 5), 5), 0)
    assert sizes == [2, 1, 2]


def test_room_on_a_gpu_is_what_weights_and_optimizer_leave(one: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decision is made from shapes: neither gradients nor what happens to be free are in it."""

    class OnGpu(Ranks):
        device = torch.device("cuda")

        def __init__(self) -> None:
            super().__init__(settings=EngineSettings(type="ddp"))

    total = 10 * GIB
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7 * GIB, total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * GIB)
    one.freeze_vision()
    weights = sum(p.numel() * p.element_size() for p in one.model.parameters())
    states = sum(2 * p.numel() * p.element_size() for p in one.model.parameters() if p.requires_grad)
    assert made(one, None, OnGpu()).grouping._left == pytest.approx(0.92 * total - weights - states)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 1 * GIB)  # another process has 2 GiB
    assert made(one, None, OnGpu()).grouping._left == pytest.approx(8 * GIB - weights - states)


# ---------------------------------------------------------------------- in a run


def batches(task: Any) -> list[Any]:
    return task.collect(0).microbatches


def texts(b: Any) -> list[list[int]]:
    rows = zip(b.ids_BGS.flatten(0, 1), b.real_BGS.flatten(0, 1), strict=True)
    return [ids[real].tolist() for ids, real in rows]


def test_a_killed_run_takes_its_rollouts_into_other_groups(
    untrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was rolled out three at a time in microbatches of two comes back as one of four, and nothing is sampled."""
    data = write(world(4), tmp_path / "data")

    def task(out: str, **changes: Any) -> Any:
        size = changes.pop("microbatch")
        optim = {"steps": 2, "batch": 4, "microbatch": size}
        raw = configure("rl", untrained, data, tmp_path / out, optim=optim, updates_per_rollout=2, **changes)
        return make("rl", raw)[0]

    first = task("a", microbatch=2, rollout_batch=3)
    before = batches(first)
    state = first.state_dict()
    second = task("b", microbatch=4)
    second.load_state_dict(state)
    counted(monkeypatch, limit=0)
    (after,) = second.collect(1).microbatches
    assert [text for b in before for text in texts(b)] == texts(after)
    assert torch.equal(torch.cat([b.latents_BKD for b in before]), after.latents_BKD)
    assert [name for b in before for name in b.names] == after.names


def test_one_rollout_of_all_microbatches_of_a_step(
    untrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, sizes = write(world(4), tmp_path / "data"), counted(monkeypatch)
    for name, asked, expected in (("a", None, [4]), ("b", 3, [3, 1])):
        raw = configure(
            "rl", untrained, data, tmp_path / name, optim={"batch": 4, "microbatch": 1}, rollout_batch=asked
        )
        assert len(batches(make("rl", raw)[0])) == 4 and sizes == expected
        sizes.clear()


def test_how_rollouts_are_decoded_is_a_setting(untrained: Path, tmp_path: Path) -> None:
    data = write(world(2), tmp_path / "data")
    optim = {"batch": 2, "microbatch": 1}
    plain = make("rl", configure("rl", untrained, data, tmp_path / "a", optim=optim))[0]
    static = make(
        "rl",
        configure("rl", untrained, data, tmp_path / "b", optim=optim, fast_decode="static", release_decode=True),
    )[0]
    assert plain.rollouts.fast is None and static.rollouts.release
    assert [texts(b) for b in batches(static)] == [texts(b) for b in batches(plain)]
    assert static.rollouts.fast.counts["eager"] > 0 and static.rollouts.fast.counts["plain"] == 0


@pytest.mark.parametrize(("recorded", "device"), [(True, "cuda"), (False, "cuda"), (True, "cpu")])
def test_groups_leave_room_for_a_recorded_span(one: Backbone, recorded: bool, device: str) -> None:
    """As the estimate counts it, for the prompts of a microbatch."""
    method = {"type": "realvr", "recorded_span": recorded}
    changes: dict[str, Any] = {"method": method, "optim": {"microbatch": 3, "batch": 6}}
    settings = KINDS["rl"].model_validate(configure("rl", Path("model"), Path("data"), Path("out"), **changes))
    ranks: Any = SimpleNamespace(device=torch.device(device), shards=False, lockstep=False)
    grouping = Grouping(one, settings, ranks, (GROUP, SAMPLING.max_new, None))
    grouping.__dict__["_setup"] = setup = Setup(deferred=True)
    decoder, weights = decoder_of(one.model), weights_of(one.model)
    latents = one.latents
    work = Workload("rl", 3, 70, 0, latents=latents, group=GROUP, answer=SAMPLING.max_new, recorded=True)
    span = recorded_bytes(decoder, weights, work, setup)
    assert span > 0
    assert grouping._span(70) == (span if recorded and device == "cuda" else 0)
    needed = [grouping._need(size, 70, 0, 6) for size in (1, 2)]
    grouping.__dict__["_work"] = replace(grouping._work, recorded=False)
    assert needed == [
        grouping._need(size, 70, 0, 6) + (span if recorded and device == "cuda" else 0) for size in (1, 2)
    ]
