"""Group rollout against stock ``generate`` and a slow reference without cache; sampling against its definition."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers import DEVICE, DTYPE, ask, difference, load_stock, mixed_prompts, stock_inputs, tolerance
from realvr.backbone import Backbone, Prompt, Turn
from realvr.errors import UserError
from realvr.latent.completions import stop_test
from realvr.latent.group_rollout import Rollout, rollout
from realvr.latent.sampling import GREEDY, Sampling, choose, draws
from realvr.latent.span import prefill, score, splice, think

pytestmark = pytest.mark.skipif(torch.float32 != DTYPE, reason="the best token is a toss-up in half precision")


class Pair(NamedTuple):
    ours: Backbone
    stock: Any
    """A plain transformers model with eager attention and the same weights."""


def pair(backbone: Backbone, directory: Path) -> Pair:
    return Pair(backbone, load_stock(backbone.save(directory)))


@pytest.fixture(scope="module")
def models(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """With markers that differ: new ones all start at the mean embedding, which would hide a mix-up."""
    backbone = Backbone.load(checkpoint, dtype=DTYPE, device=DEVICE)
    markers = [backbone.markers.start, backbone.markers.slot, backbone.markers.end]
    weight = backbone.model.get_input_embeddings().weight
    with torch.no_grad():
        weight[markers] = torch.randn(3, weight.shape[1], generator=torch.Generator().manual_seed(1)).to(weight) * 0.1
    return pair(backbone, tmp_path_factory.mktemp("marked"))


@pytest.fixture(scope="module")
def ending(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """With a sixth of the vocabulary as end-of-sequence ids: sequences end after a few tokens, each at its own time."""
    directory = tmp_path_factory.mktemp("ending")
    shutil.copytree(checkpoint, directory, dirs_exist_ok=True)
    file = directory / "generation_config.json"
    settings = json.loads(file.read_text())
    settings["eos_token_id"] += range(300, 420)
    file.write_text(json.dumps(settings))
    backbone = Backbone.load(directory, dtype=DTYPE, device=DEVICE)
    assert set(range(300, 420)) < set(backbone.eos_ids)
    return pair(backbone, tmp_path_factory.mktemp("ending_saved"))


def greedy(max_new: int, stop: str | None = None) -> Sampling:
    return Sampling(temperature=0.0, max_new=max_new, stop=stop)


def ids_of(result: Rollout) -> list[list[list[int]]]:
    return [[completion.ids for completion in group] for group in result.completions]


def logprobs_of(result: Rollout) -> Tensor:
    return torch.tensor([value for group in result.completions for c in group for value in c.logprobs])


# ---------------------------------------------------------------------- references


def marker(models: Pair, name: str) -> int:
    return models.ours.tokenizer.get_vocab()[name]


def stock_generate(models: Pair, prompts: Sequence[Prompt], max_new: int) -> list[list[int]]:
    """Greedy ids of stock ``generate``, cut after the first end-of-sequence id."""
    inputs = stock_inputs(models.ours, prompts)
    out = models.stock.generate(
        **inputs, do_sample=False, max_new_tokens=max_new, suppress_tokens=models.ours.forbidden_ids().tolist()
    )
    eos = models.stock.generation_config.eos_token_id
    found = []
    for row in out[:, inputs["input_ids"].shape[1] :].tolist():
        end = next((place for place, token in enumerate(row) if token in eos), len(row))
        found.append(row[: end + 1])
    return found


@torch.no_grad()
def slow_hidden(models: Pair, prompt: Prompt, tail: Sequence[int | Tensor]) -> Tensor:
    """States (T, D) after the final norm of ``prompt`` and ``tail`` (ids and latents), by one stock forward."""
    stock, slot = models.stock, marker(models, "<|lvr|>")
    ids = torch.cat([prompt.ids, torch.tensor([i if isinstance(i, int) else slot for i in tail], dtype=torch.long)])
    inputs = stock_inputs(models.ours, [Prompt(ids, prompt.images)])
    embeds = stock.get_input_embeddings()(inputs["input_ids"]).clone()
    for place, item in enumerate(tail, len(prompt)):
        if not isinstance(item, int):
            embeds[0, place] = item
    if "mm_token_type_ids" in inputs:
        inputs["position_ids"], _ = stock.model.get_rope_index(
            inputs["input_ids"], inputs.pop("mm_token_type_ids"), image_grid_thw=inputs.get("image_grid_thw")
        )
    del inputs["input_ids"]
    return stock.model(inputs_embeds=embeds, use_cache=False, **inputs).last_hidden_state[0]


@torch.no_grad()
def slow_logprobs(models: Pair, hidden: Tensor, temperature: float) -> Tensor:
    logits = models.stock.lm_head(hidden).float() / temperature
    logits[..., models.ours.forbidden_ids()] = -torch.inf
    return logits.log_softmax(-1)


def slow_span(models: Pair, prompt: Prompt, count: int) -> list[int | Tensor]:
    """Start marker, latents and end marker, every latent from a forward over all that precedes it."""
    tail: list[int | Tensor] = [marker(models, "<|lvr_start|>")]
    for _ in range(count):
        tail.append(slow_hidden(models, prompt, tail)[-1])
    return [*tail, marker(models, "<|lvr_end|>")]


# ---------------------------------------------------------------------- greedy decoding


def test_without_latents_greedy_equals_stock_generate(models: Pair) -> None:
    prompts = [*mixed_prompts(models.ours), models.ours.prompt([Turn("user", "No")])]
    for chosen in (prompts[:1], prompts[-1:], prompts):
        result = rollout(models.ours, chosen, sampling=greedy(32), latents=0)
        assert [group[0] for group in ids_of(result)] == stock_generate(models, chosen, 32)
        assert result.latents_BKD.shape == (len(chosen), 0, models.ours.width)
        assert max(len(group[0]) for group in ids_of(result)) >= 24


def test_greedy_equals_stock_generate_where_sequences_end(ending: Pair) -> None:
    prompts = [*mixed_prompts(ending.ours), *(ending.ours.prompt(ask(n)) for n in range(6))]
    result = rollout(ending.ours, prompts, sampling=greedy(24), latents=0)
    assert [group[0] for group in ids_of(result)] == stock_generate(ending, prompts, 24)
    finished = [group[0].finish for group in result.completions]
    for finish, (completion,) in zip(finished, result.completions, strict=True):
        assert finish == ("eos" if completion.ids[-1] in ending.ours.eos_ids else "length")
        assert len(completion.ids) == len(completion.logprobs) <= 24
    assert "eos" in finished and len({len(group[0].ids) for group in result.completions}) > 1


def test_generation_passes_the_sliding_window(models: Pair) -> None:
    """A short prompt and more tokens than Gemma's window; alone and beside a long prompt."""
    short, long = models.ours.prompt([Turn("user", "No")]), models.ours.prompt(ask(1, 2, 3))
    window = getattr(models.ours.text_config, "sliding_window", None) or 24
    assert len(short) < window or models.ours.family.name != "gemma3"
    expected = stock_generate(models, [short], 2 * window)[0]
    assert len(expected) == 2 * window
    for chosen in ([short], [long, short]):
        assert ids_of(rollout(models.ours, chosen, sampling=greedy(2 * window), latents=0))[-1][0] == expected


def test_with_latents_greedy_equals_the_slow_reference(models: Pair) -> None:
    count, steps = 3, 6
    prompts = mixed_prompts(models.ours)
    result = rollout(models.ours, prompts, sampling=greedy(steps), latents=count)
    assert result.temperature == 1.0
    for row, prompt in enumerate(prompts):
        tail = slow_span(models, prompt, count)
        z_KD = torch.stack([item for item in tail if not isinstance(item, int)])
        assert difference(result.latents_BKD[row], z_KD) <= tolerance(1e-5)
        expected, logprobs = [], []
        for _ in range(steps):
            logp = slow_logprobs(models, slow_hidden(models, prompt, tail)[-1], 1.0)
            expected.append(int(logp.argmax()))
            logprobs.append(logp.max())
            tail.append(expected[-1])
            if expected[-1] in models.ours.eos_ids:
                break
        completion = result.completions[row][0]
        assert completion.ids == expected
        assert difference(torch.tensor(completion.logprobs), torch.stack(logprobs)) <= tolerance(1e-5)


def test_latents_change_the_answer(models: Pair) -> None:
    """Control of the tests above: a span, its length and its content matter."""
    prompt = models.ours.prompt(ask(0))
    state, _ = prefill(models.ours, models.ours.batch([prompt]))
    ids = torch.arange(5, 15, device=DEVICE)[None, None]
    after, z_BKD = think(models.ours, state, 3)
    reference, _, _ = score(models.ours, after, ids)
    others = {
        "no span": state,
        "another length": think(models.ours, state, 4)[0],
        "slots exchanged": splice(models.ours, state, z_BKD[:, [1, 0, 2]])[0],
        "the state before the marker": splice(models.ours, state, torch.cat([state.last_BD[:, None], z_BKD[:, :2]], 1))[
            0
        ],
    }
    assert difference(score(models.ours, splice(models.ours, state, z_BKD)[0], ids)[0], reference) <= tolerance(1e-5)
    for name, other in others.items():
        assert difference(score(models.ours, other, ids)[0], reference) > 1e-3, name


# ---------------------------------------------------------------------- log-probabilities and latents


def test_rollout_logprobs_are_the_teacher_forced_ones(models: Pair) -> None:
    count, temperature = 3, 0.6
    prompts = mixed_prompts(models.ours)
    sampling = Sampling(temperature=temperature, max_new=10)
    result = rollout(models.ours, prompts, group=3, sampling=sampling, seed=5, latents=count)
    assert result.temperature == temperature
    ids, real, recorded = result.tensors(DEVICE)
    with torch.no_grad():
        state, _ = prefill(models.ours, models.ours.batch(prompts))
        state, before = splice(models.ours, state, result.latents_BKD)
        forced, _, _ = score(
            models.ours, state, ids, real, temperature=temperature, forbidden=models.ours.forbidden_ids()
        )
    assert difference(before, result.latents_BKD) <= tolerance(1e-5)  # recorded = replayed
    assert difference(recorded, forced) <= tolerance(2e-5)
    start, end = marker(models, "<|lvr_start|>"), marker(models, "<|lvr_end|>")
    for row, prompt in enumerate(prompts):
        for completion in result.completions[row]:
            span = [start, *result.latents_BKD[row], end]
            hidden = slow_hidden(models, prompt, [*span, *completion.ids])[-len(completion.ids) - 1 : -1]
            logp = slow_logprobs(models, hidden, temperature)
            expected = logp.gather(1, torch.tensor(completion.ids, device=DEVICE)[:, None])[:, 0]
            assert difference(torch.tensor(completion.logprobs), expected) <= tolerance(2e-5)
    assert len({tuple(c.ids) for group in result.completions for c in group}) > len(prompts)
    at_one, _, _ = score(models.ours, state, ids, real, forbidden=models.ours.forbidden_ids())
    assert difference(recorded, at_one) > 1e-2  # control: another temperature is noticed


def test_top_p_and_top_k_do_not_change_the_recorded_logprobs(models: Pair) -> None:
    """Log-probabilities are those of the policy before any truncation."""
    prompts = mixed_prompts(models.ours)[:2]
    sampling = Sampling(temperature=0.6, max_new=6, top_k=5, top_p=0.5)
    result = rollout(models.ours, prompts, group=2, sampling=sampling, latents=2)
    start, end = marker(models, "<|lvr_start|>"), marker(models, "<|lvr_end|>")
    for row, prompt in enumerate(prompts):
        for completion in result.completions[row]:
            span = [start, *result.latents_BKD[row], end]
            hidden = slow_hidden(models, prompt, [*span, *completion.ids])[-len(completion.ids) - 1 : -1]
            expected = slow_logprobs(models, hidden, 0.6).gather(
                1, torch.tensor(completion.ids, device=DEVICE)[:, None]
            )
            assert difference(torch.tensor(completion.logprobs), expected[:, 0]) <= tolerance(2e-5)


def test_latents_are_recorded_and_their_number_is_the_checkpoints(models: Pair, saved: Path, tmp_path: Path) -> None:
    prompts = mixed_prompts(models.ours)[:2]
    result = rollout(models.ours, prompts, sampling=greedy(2))
    assert models.ours.latents == 8 and result.latents_BKD.shape == (2, 8, models.ours.width)
    assert not result.latents_BKD.requires_grad
    assert len({tuple(z.tolist()) for z in result.latents_BKD[0]}) == 8
    Backbone.load(saved, dtype=DTYPE, device=DEVICE, latents=3).save(tmp_path)
    other = Backbone.load(tmp_path, dtype=DTYPE, device=DEVICE)
    assert rollout(other, prompts, sampling=greedy(2)).latents_BKD.shape == (2, 3, models.ours.width)
    assert rollout(other, prompts, sampling=greedy(2), latents=1).latents_BKD.shape == (2, 1, models.ours.width)
    with pytest.raises(UserError, match="-1"):
        rollout(other, prompts, sampling=greedy(2), latents=-1)


# ---------------------------------------------------------------------- seeds and independence


def test_same_seed_same_result(models: Pair) -> None:
    prompts = mixed_prompts(models.ours)[:2]
    sampling = Sampling(max_new=10)
    first, again, other = (
        rollout(models.ours, prompts, group=3, sampling=sampling, seed=s, latents=2) for s in (7, 7, 8)
    )
    assert ids_of(first) == ids_of(again)
    assert torch.equal(logprobs_of(first), logprobs_of(again))
    assert torch.equal(first.latents_BKD, again.latents_BKD)
    assert ids_of(first) != ids_of(other)
    torch.manual_seed(99)  # the global generator has no part in it
    assert ids_of(rollout(models.ours, prompts, group=3, sampling=sampling, seed=7, latents=2)) == ids_of(first)
    # Members of a group differ, and so do equal prompts of a batch, which get seeds of their own.
    twins = ids_of(rollout(models.ours, [prompts[0]] * 2, group=3, sampling=sampling, seed=7, latents=2))
    assert len({tuple(ids) for group in twins for ids in group}) == 6


def test_greedy_is_deterministic_and_ignores_the_seed(models: Pair) -> None:
    prompts = mixed_prompts(models.ours)
    runs = [rollout(models.ours, prompts, group=2, sampling=greedy(8), seed=s, latents=2) for s in (0, 1)]
    assert ids_of(runs[0]) == ids_of(runs[1])
    assert all(group[0] == group[1] for group in ids_of(runs[0]))
    assert GREEDY.temperature == 0


def test_top_k_1_equals_greedy(models: Pair) -> None:
    prompts = mixed_prompts(models.ours)
    best = rollout(models.ours, prompts, sampling=greedy(8), latents=2)
    only = rollout(models.ours, prompts, sampling=Sampling(top_k=1, max_new=8, stop=None), latents=2)
    assert ids_of(best) == ids_of(only)
    tiny = rollout(models.ours, prompts, sampling=Sampling(top_p=1e-9, max_new=8, stop=None), latents=2)
    assert ids_of(best) == ids_of(tiny)


def test_a_result_does_not_depend_on_the_batch_or_the_group(ending: Pair) -> None:
    """Rows that end early leave the batch; those that go on must not notice."""
    prompts = mixed_prompts(ending.ours)
    seeds = [11, 12, 13, 14]
    sampling = Sampling(temperature=1.0, max_new=16, stop=None)
    together = rollout(ending.ours, prompts, group=4, sampling=sampling, seed=seeds, latents=2)
    for row, prompt in enumerate(prompts):
        alone = rollout(ending.ours, [prompt], group=4, sampling=sampling, seed=[seeds[row]], latents=2)
        assert ids_of(alone)[0] == ids_of(together)[row]
        mine = torch.tensor([v for c in together.completions[row] for v in c.logprobs])
        assert difference(logprobs_of(alone), mine) <= tolerance(2e-5)
        smaller = rollout(ending.ours, [prompt], group=2, sampling=sampling, seed=[seeds[row]], latents=2)
        assert ids_of(smaller)[0] == ids_of(together)[row][:2]
    lengths = [len(ids) for group in ids_of(together) for ids in group]
    assert len(set(lengths)) > 3  # otherwise nothing ended early
    backwards = rollout(ending.ours, prompts[::-1], group=4, sampling=sampling, seed=seeds[::-1], latents=2)
    assert ids_of(backwards)[::-1] == ids_of(together)


def test_a_long_neighbour_at_the_context_limit_does_not_change_a_result(fresh: Backbone) -> None:
    """The token limit of a prompt is its own: that of a longer neighbour may be tighter."""
    short, long = fresh.prompt([Turn("user", "Hi")]), fresh.prompt(ask(1, 2, 3))
    fresh.text_config.max_position_embeddings = len(long) + 4
    sampling = Sampling(temperature=1.0, max_new=12, stop=None)
    together = rollout(fresh, [short, long], group=2, sampling=sampling, seed=[1, 2], latents=0)
    for row, prompt in enumerate((short, long)):
        alone = rollout(fresh, [prompt], group=2, sampling=sampling, seed=[row + 1], latents=0)
        assert ids_of(alone)[0] == ids_of(together)[row]


def test_finished_prompts_leave_the_batch(ending: Pair) -> None:
    prompts = [*mixed_prompts(ending.ours), *(ending.ours.prompt(ask(n)) for n in range(4))]
    fed: list[tuple[int, int]] = []

    def count(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        fed.append(tuple(kwargs["inputs_embeds"].shape[:2]))

    hook = ending.ours.decoder.register_forward_pre_hook(count, with_kwargs=True)
    try:
        result = rollout(ending.ours, prompts, group=3, sampling=Sampling(temperature=1.0, max_new=16), latents=0)
    finally:
        hook.remove()
    lengths = torch.tensor([[len(c.ids) for c in group] for group in result.completions])
    expected = []
    for step in range(1, int(lengths.max())):
        alive = lengths > step  # branches that still need a token after feeding number ``step``
        expected.append((int(alive.any(1).sum()), int(alive.sum(1).max())))
    assert fed == [(len(prompts), max(map(len, prompts))), *expected]
    assert len({rows for rows, _ in expected}) > 2


# ---------------------------------------------------------------------- how completions end


@contextmanager
def logits_changed(backbone: Backbone, change: Any) -> Iterator[None]:
    """Add something to what the LM head returns; ``change(call)`` is (V,) for the call-th pass through it."""
    calls = 0

    def hook(_: Any, args: Any, out: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return out + change(calls - 1).to(out)

    handle = backbone.model.lm_head.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def says(backbone: Backbone, ids: Sequence[int]) -> Any:
    """Makes ``ids`` the certain next tokens, one per step, then token 50 for ever."""

    def change(call: int) -> Tensor:
        bias = torch.zeros(backbone.model.lm_head.out_features)
        bias[ids[call] if call < len(ids) else 50] = 1e4
        return bias

    return logits_changed(backbone, change)


def plain_ids(backbone: Backbone, text: str) -> list[int]:
    return backbone.tokenizer(text, add_special_tokens=False)["input_ids"]


def test_finish_reasons(models: Pair) -> None:
    backbone = models.ours
    prompt = backbone.prompt(ask(0))
    answer = plain_ids(backbone, "<answer>red</answer>")
    stops = [backbone.tokenizer.convert_tokens_to_ids(token) for token in _ends(backbone)]
    for eos in stops:
        with says(backbone, [*answer[:4], eos]):
            done = rollout(backbone, [prompt], sampling=Sampling(max_new=30), latents=2).completions[0][0]
        assert (done.finish, done.ids) == ("eos", [*answer[:4], eos])
        assert done.reply_ids == answer[:4]
        assert done.text == backbone.tokenizer.decode(answer[:4])
    with says(backbone, answer):
        done = rollout(backbone, [prompt], sampling=Sampling(max_new=30), latents=2).completions[0][0]
    assert (done.finish, done.ids, done.reply_ids) == ("stop", answer, answer)
    assert done.text == "<answer>red</answer>"
    with says(backbone, answer):
        done = rollout(backbone, [prompt], sampling=Sampling(max_new=len(answer) - 1), latents=2).completions[0][0]
    assert (done.finish, done.ids) == ("length", answer[:-1])
    with says(backbone, answer):
        done = rollout(backbone, [prompt], sampling=Sampling(max_new=30, stop=None), latents=2).completions[0][0]
    assert (done.finish, len(done.ids)) == ("length", 30)
    # The limit and the stop text in the same step: the text was written, so it is a stop.
    with says(backbone, answer):
        done = rollout(backbone, [prompt], sampling=Sampling(max_new=len(answer)), latents=2).completions[0][0]
    assert done.finish == "stop"


def _ends(backbone: Backbone) -> tuple[str, str]:
    return ("<eos>", "<end_of_turn>") if backbone.family.name == "gemma3" else ("<|im_end|>", "<|endoftext|>")


@pytest.mark.parametrize("stop", ["swer i", "e answer is l", "r", ". Th"])
def test_a_stop_text_that_starts_and_ends_inside_tokens(models: Pair, stop: str) -> None:
    """Merges across the boundary: the text ends with the token that completes the stop text, not before, not after."""
    backbone = models.ours
    script = plain_ids(backbone, "Look. The answer is left. The answer is right.")
    spoken = [backbone.tokenizer.decode(script[: n + 1]) for n in range(len(script))]
    first = next(n for n, text in enumerate(spoken) if stop in text)
    with says(backbone, script):
        result = rollout(backbone, [backbone.prompt(ask(0))], sampling=Sampling(max_new=40, stop=stop), latents=0)
    done = result.completions[0][0]
    assert (done.finish, done.ids, done.text) == ("stop", script[: first + 1], spoken[first])


@pytest.mark.parametrize("stop", ["</answer>", "answer is", "\n\n", "é", "ö ", "日"])
def test_the_stop_test_equals_decoding_everything(models: Pair, stop: str) -> None:
    backbone = models.ours
    text = "The answer is <answer>é</answer>\n\n日 ö then."
    ids = plain_ids(backbone, text)
    stopped = stop_test(backbone, stop)
    ends = [n for n in range(1, len(ids) + 1) if stop in backbone.tokenizer.decode(ids[:n])]
    assert [n for n in range(1, len(ids) + 1) if stopped(ids[:n])][0] == ends[0]


def test_the_answer_tag_merged_with_its_neighbours(fresh: Backbone) -> None:
    """A vocabulary in which both borders of the tag lie inside a token."""
    fresh.tokenizer.add_tokens(["ed</", ">\n\n"])
    head, tail = fresh.tokenizer.convert_tokens_to_ids(["ed</", ">\n\n"])
    if tail >= fresh.model.lm_head.out_features:
        fresh.model.resize_token_embeddings(len(fresh.tokenizer), mean_resizing=False)
    script = [*plain_ids(fresh, "<answer>r"), head, *plain_ids(fresh, "answer"), tail, 60, 60]
    with says(fresh, script):
        done = rollout(fresh, [fresh.prompt(ask(0))], sampling=Sampling(max_new=20), latents=0).completions[0][0]
    assert (done.finish, done.text) == ("stop", "<answer>red</answer>\n\n")
    assert done.ids == script[:-2]


def test_forbidden_ids_are_never_sampled(models: Pair) -> None:
    """Even when they are all the model wants; what it then says is what it would say without them."""
    backbone = models.ours
    prompts = mixed_prompts(backbone)
    forbidden = backbone.forbidden_ids()
    bias = torch.zeros(backbone.model.lm_head.out_features)
    bias[forbidden] = 1e4
    for sampling in (
        Sampling(max_new=12),
        Sampling(max_new=12, temperature=0),
        Sampling(max_new=12, top_k=3, top_p=0.9),
    ):
        plain = rollout(backbone, prompts, group=2, sampling=sampling, latents=2)
        with logits_changed(backbone, lambda _: bias):
            pushed = rollout(backbone, prompts, group=2, sampling=sampling, latents=2)
        assert set(forbidden.tolist()).isdisjoint(i for group in ids_of(pushed) for ids in group for i in ids)
        assert ids_of(pushed) == ids_of(plain)
        assert torch.equal(logprobs_of(pushed), logprobs_of(plain))


# ---------------------------------------------------------------------- processes in step


@contextmanager
def counted(backbone: Backbone) -> Iterator[dict[str, int]]:
    """How often the last decoder layer, the head and the embedding are run."""
    passes = {"layer": 0, "head": 0, "embedding": 0}
    modules = {
        "layer": backbone.decoder.layers[-1],
        "head": backbone.model.lm_head,
        "embedding": backbone.model.get_input_embeddings(),
    }

    def count(name: str) -> Any:
        def hook(*_: Any) -> None:
            passes[name] += 1

        return hook

    handles = [module.register_forward_hook(count(name)) for name, module in modules.items()]
    yield passes
    for handle in handles:
        handle.remove()


def test_processes_that_decode_in_step_make_equally_many_passes(ending: Pair) -> None:
    """Two processes with prompts of their own, one of which may write three tokens only; each is told what the other
    one would say."""
    prompts, passes, alone = mixed_prompts(ending.ours), [], []
    shares = [(prompts[:1], Sampling(max_new=3)), (prompts[1:], Sampling(max_new=20))]
    for share, sampling in shares:
        with counted(ending.ours) as found:
            alone.append(rollout(ending.ours, share, group=3, sampling=sampling, seed=4))
        passes.append(found)
    steps = [max(len(ids) for group in ids_of(result) for ids in group) - 1 for result in alone]
    assert steps[0] < steps[1] and passes[0] != passes[1], "the test needs one that ends first"
    together = []
    for (share, sampling), own, other in zip(shares, alone, reversed(steps), strict=True):
        asked: list[bool] = []

        def go_on(mine: bool, asked: list[bool] = asked, other: int = other) -> bool:
            asked.append(mine)
            return mine or len(asked) <= other

        with counted(ending.ours) as found:
            result = rollout(ending.ours, share, group=3, sampling=sampling, seed=4, go_on=go_on)
        together.append(found)
        assert len(asked) == max(steps) + 1
        assert ids_of(result) == ids_of(own) and torch.equal(logprobs_of(result), logprobs_of(own))
    assert together == [passes[1], passes[1]]


# ---------------------------------------------------------------------- the context


def test_the_context_limits_what_is_decoded(fresh: Backbone) -> None:
    prompt = fresh.prompt(ask(0))
    for latents, span in ((0, 0), (3, 5)):
        fresh.text_config.max_position_embeddings = len(prompt) + span + 4
        result = rollout(fresh, [prompt], sampling=greedy(50), latents=latents)
        assert len(result.completions[0][0].ids) == 4 and result.completions[0][0].finish == "length"
        fresh.text_config.max_position_embeddings = len(prompt) + span
        with pytest.raises(UserError, match="no room") as caught:
            rollout(fresh, [prompt], sampling=greedy(50), latents=latents)
        assert "\n" not in str(caught.value) and str(len(prompt)) in str(caught.value)


def test_no_prompts(models: Pair) -> None:
    result = rollout(models.ours, [], latents=2)
    assert result.completions == [] and result.latents_BKD.shape == (0, 2, models.ours.width)


# ---------------------------------------------------------------------- choosing a token

LOGITS = st.lists(st.integers(-60, 60), min_size=2, max_size=12, unique=True).map(lambda x: [v / 10 for v in x])


def allowed(probabilities: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """Which ids remain, by definition: the best k, then the fewest whose renormalised mass reaches p."""
    order = np.argsort(-probabilities, kind="stable")
    keep = np.zeros(len(probabilities), dtype=bool)
    best = order[: top_k or None]
    mass = probabilities[best] / probabilities[best].sum()
    reached = 0.0
    for place, token in enumerate(best):
        if probabilities[token] == 0 or (top_p < 1 and reached >= top_p):
            break
        keep[token] = True
        reached += mass[place]
    return keep


@settings(deadline=None, max_examples=200)
@given(
    logits=LOGITS,
    top_k=st.integers(0, 6),
    top_p=st.sampled_from([1.0, 0.93, 0.71, 0.5, 0.13]),
    banned=st.sets(st.integers(0, 11)),
)
def test_choose_inverts_the_distribution_function(
    logits: list[float], top_k: int, top_p: float, banned: set[int]
) -> None:
    banned = {i for i in banned if i < len(logits)}
    if len(banned) == len(logits):
        banned.pop()
    masked = torch.tensor(logits).index_fill(0, torch.tensor(sorted(banned), dtype=torch.long), -torch.inf)
    logp = masked.log_softmax(-1)
    full = logp.double().exp().numpy()
    keep = allowed(full, top_k, top_p)
    kept = np.where(keep, full, 0)
    bounds = np.cumsum(kept) / kept.sum()
    middle = (np.concatenate([[0.0], bounds[:-1]]) + bounds) / 2
    uniform = np.concatenate([middle[keep], (bounds[keep] - 1e-5).clip(0), [0.0, 1 - 2**-53]])
    chosen = choose(logp.expand(len(uniform), -1), torch.tensor(uniform), Sampling(top_k=top_k, top_p=top_p)).numpy()
    assert keep[chosen].all()
    assert chosen[: keep.sum()].tolist() == np.flatnonzero(keep).tolist()
    assert chosen[-2] == np.flatnonzero(keep)[0] and chosen[-1] == np.flatnonzero(keep)[-1]
    wide = kept[keep] / kept.sum() > 1e-4  # than the step below the upper bound
    assert (chosen[keep.sum() : -2][wide] == np.flatnonzero(keep)[wide]).all()


def test_sampled_frequencies_follow_the_distribution() -> None:
    logp = torch.randn(40, generator=torch.Generator().manual_seed(3)).index_fill(
        0, torch.tensor([0, 7, 39]), -torch.inf
    )
    logp = logp.log_softmax(-1)
    uniform = draws([5], 200, 100).flatten()
    counts = torch.bincount(choose(logp.expand(len(uniform), -1), uniform, Sampling()), minlength=40).double()
    possible = logp > -torch.inf
    assert counts[~possible].sum() == 0
    expected = logp.double().exp()[possible] * len(uniform)
    assert scipy.stats.chisquare(counts[possible], expected * counts.sum() / expected.sum()).pvalue > 1e-3
    uneven = expected.flip(0) * counts.sum() / expected.sum()  # control: another distribution is noticed
    assert scipy.stats.chisquare(counts[possible], uneven).pvalue < 1e-9


def test_draws_are_uniform_and_depend_on_their_own_seed() -> None:
    both = draws([3, 4], 20, 50)
    assert both.shape == (2, 20, 50) and both.min() >= 0 and both.max() < 1
    assert torch.equal(both[1], draws([4], 20, 50)[0])
    assert torch.equal(both[0, :7], draws([3], 7, 50)[0])
    assert scipy.stats.kstest(both.flatten().numpy(), "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(both[0].flatten(), both[1].flatten())[0, 1]) < 0.1


def test_draws_do_not_depend_on_the_token_limit() -> None:
    """A completion cut shorter by a limit is the beginning of the longer one, for every member of the group."""
    assert torch.equal(draws([3], 4, 50)[:, :, :20], draws([3], 4, 20))


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": 1e-45},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"max_new": 0},
    ],
)
def test_bad_sampling_settings(options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(options))) as caught:
        Sampling(**options)
    assert "\n" not in str(caught.value)
