"""A recording on trial: what lost its work, or computes something else, is refused, and the plain path runs instead.

Recordings are those of `op_tape`, in which single operations are broken: what a graph does whose memory has become
somebody else's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import op_tape
from helpers import ask, mixed_prompts
from pair import gradients, relative
from realvr.backbone import Backbone
from realvr.latent import trial
from realvr.latent.fast import FastDecode
from realvr.latent.group_rollout import Rollout, rollout
from realvr.latent.recorded_span import RecordedSpan
from realvr.latent.sampling import Sampling
from realvr.training import gradients as deferring
from span_cases import batch_of, exact_backbone, value

# ---------------------------------------------------------------------- the comparison


@pytest.mark.parametrize(
    ("found", "right", "expected"),
    [
        ([[1.0, 2.0]], [[1.0, 2.0]], 0.0),
        ([[3.0, 4.5]], [[3.0, 4.0]], 0.1),
        ([[float("nan"), 1.0]], [[2.0, 1.0]], float("inf")),
        ([[float("nan"), 1.0]], [[float("nan"), 1.0]], 0.0),  # a model that has diverged is no fault of a recording
        ([[float("inf"), 1.0]], [[float("inf"), 1.0]], 0.0),
        ([[float("inf"), 1.0]], [[2.0, 1.0]], float("inf")),
        ([[7]], [[7]], 0.0),
        ([[2700]], [[2701]], float("inf")),  # a counter
        ([[5, 6, 7, 8]], [[5, 6, 9, 9]], 0.0),  # tokens
        ([[5, 6, 7, 8]], [[5, 9, 9, 9]], float("inf")),
        ([[True, False]], [[True, True]], float("inf")),
        ([[1.0]], [[1.0, 1.0]], float("inf")),
        ([], [[1.0]], float("inf")),
        ([[0.0, 0.0]], [[0.0, 0.0]], 0.0),
        ([[0.0, 1.0]], [[0.0, 0.0]], float("inf")),
    ],
)
def test_gap(found: Any, right: Any, expected: float) -> None:
    mine, theirs = ([[torch.tensor(x) for x in kind] for kind in each] for each in ([found], [right]))
    if mine == [[]]:
        mine = []
    assert trial.gap(mine, theirs) == pytest.approx(expected)


def test_a_small_tensor_is_on_the_scale_of_its_kind() -> None:
    """The gradient of what changes nothing is all rounding."""
    large, small = torch.full((4,), 10.0), torch.full((4,), 1e-3)
    assert trial.gap([[large, -small]], [[large, small]]) == pytest.approx(0.004 / (200**0.5 / 10), rel=1e-3)
    assert trial.gap([[large], [-small]], [[large], [small]]) == pytest.approx(2)


def test_parts_cover_a_tensor() -> None:
    x = torch.arange(4 * 8 * 128 * 64).reshape(4, 8, 128, 64)
    ((part,),) = trial.parts([[x]])
    assert trial.PART <= len(part) <= 2 * trial.PART
    for size, dim in ((4, 65536), (8, 8192), (128, 64), (64, 1)):  # of every row, head, column and place in a head
        assert len((part // dim % size).unique()) == size
    ((few,),) = trial.parts([[x[0, 0, 0].T if x[0, 0, 0].ndim > 1 else x[0, 0, 0]]])
    assert few.tolist() == list(range(64)) and few.data_ptr() != x.data_ptr()


# ---------------------------------------------------------------------- recordings with a broken operation


class Broken:
    """Recordings in which one operation of one step fills its results with something else: that of ``share`` in the
    ``number``-th recording."""

    def __init__(self, number: int, share: float) -> None:
        self.number, self.share, self.made, self.name = number, share, 0, ""

    def __call__(self, step: Callable[[], None], reset: Callable[[], None]) -> Callable[[], None]:
        self.made += 1
        step()
        reset()
        tape = op_tape.Tape()
        with tape:
            step()
        if self.made - 1 == self.number:
            places = [i for i, call in enumerate(tape.calls) if _computes(call)]
            place = places[int(self.share * (len(places) - 1))]
            func, args, kwargs, out = tape.calls[place]
            self.name = str(func)
            tape.calls[place] = (_Other(func), args, kwargs, out)
        return tape.replay


class _Other:
    def __init__(self, func: Any) -> None:
        self.func, self._schema = func, func._schema

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = self.func(*args, **kwargs)
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.is_floating_point():
                x.data.copy_(x.data.flip(0) * 0.5 + 0.3)
        return out


def _computes(call: tuple[Any, ...]) -> bool:
    """Whether an operation makes new floating-point numbers: no view, nothing in place."""
    func, _, _, out = call
    alias = any(result.alias_info is not None for result in func._schema.returns)
    made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
    return not alias and bool(made) and all(x.is_floating_point() and x.numel() > 1 for x in made)


SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


@pytest.fixture(scope="module")
def one(build_tiny: Callable[[str], Path]) -> Backbone:
    return Backbone.load(build_tiny("qwen2.5-vl"), dtype=torch.float32, device="cpu")


def texts(found: Rollout) -> list[list[list[int]]]:
    return [[completion.ids for completion in group] for group in found.completions]


@pytest.mark.parametrize("number", [0, 1], ids=["latent step", "decoding"])
def test_a_broken_step_is_refused(one: Backbone, number: int) -> None:
    """Whichever operation it is: refused, or of no effect."""
    prompts = mixed_prompts(one)[:2]
    asked: dict[str, Any] = {"group": 2, "latents": 2, "sampling": Sampling(temperature=1.0, max_new=4, stop=None)}
    plain, refused = rollout(one, prompts, **asked), 0
    for share in SHARES:
        broken = Broken(number, share)
        fast = FastDecode(one, columns=8, tokens=4, recorded=True, record=broken)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = rollout(one, prompts, fast=fast, **asked)
        assert broken.name
        refused += any("differs from the step" in str(each.message) for each in said)
        assert texts(found) == texts(plain), (share, broken.name)
        torch.testing.assert_close(found.latents_BKD, plain.latents_BKD, rtol=0, atol=1e-4)
    assert refused > len(SHARES) // 2  # what chooses a token may be broken and choose the same


@pytest.mark.parametrize("number", [0, 1], ids=["forward", "backward"])
@pytest.mark.parametrize("split", [False, True])
def test_a_broken_span_is_refused(build_tiny: Callable[[str], Path], tmp_path: Path, number: int, split: bool) -> None:
    backbone = exact_backbone(build_tiny("qwen2.5-vl"), tmp_path / "model")
    batch, refused = batch_of(backbone), 0
    plain = value(backbone, batch, 2, None, split=split)
    right = gradients(backbone.model, plain)
    for share in SHARES:
        broken = Broken(number, share)
        recorded = RecordedSpan(backbone, columns=16, record=broken)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            ours = value(backbone, batch, 2, recorded, split=split)
        assert broken.name
        refused += any("differs from the step" in str(each.message) for each in said)
        assert relative(gradients(backbone.model, ours), right) <= 1e-9, (share, broken.name)
    assert refused >= len(SHARES) - 1  # nobody reads the first of the last two columns


@pytest.mark.parametrize("split", [False, True])
def test_what_a_span_leaves_for_later_is_compared(
    build_tiny: Callable[[str], Path], tmp_path: Path, split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inputs and output gradients of deferred weights and, where steps join nothing, queries behind the trunk: each is
    a joined tensor of all steps, and the backward pass ends with them."""
    backbone = exact_backbone(build_tiny("qwen2.5-vl"), tmp_path / "model")
    monkeypatch.setattr(deferring, "LEAST", 0)
    assert deferring.defer_gradients(backbone.model) is not None
    batch = batch_of(backbone)
    right = gradients(backbone.model, value(backbone, batch, 2, None, split=split))
    layers = sum(isinstance(module, deferring.DeferredLinear) for module in backbone.decoder.modules())
    pieces = 2 * layers + split * 4 * len(backbone.decoder.layers)
    for place in range(1, pieces + 1, 5):

        def other(calls: list[Any], place: int = place) -> None:
            joined = [i for i, (func, *_) in enumerate(calls) if func.overloadpacket is torch.ops.aten.cat]
            func, *rest = calls[joined[-place]]
            calls[joined[-place]] = (_Other(func), *rest)

        recorded = RecordedSpan(backbone, columns=16, record=changed(1, other))
        with pytest.warns(UserWarning, match="differs from the step"):
            ours = value(backbone, batch, 2, recorded, split=split)
        assert relative(gradients(backbone.model, ours), right) <= 1e-9


def changed(number: int, change: Callable[[list[Any]], None]) -> Callable[..., Any]:
    """Recordings of which the ``number``-th is changed: its operations are (operator, arguments, options, result)."""
    made: list[int] = []

    def record(step: Callable[[], None], reset: Callable[[], None]) -> Callable[[], None]:
        step()
        reset()
        tape = op_tape.Tape()
        with tape:
            step()
        if len(made) == number:
            change(tape.calls)
        made.append(1)
        return tape.replay

    return record


def check_refused(one: Backbone, record: Callable[..., Any]) -> None:
    fast = FastDecode(one, columns=8, tokens=4, recorded=True, record=record)
    prompts = [one.prompt(ask(0))]
    asked: dict[str, Any] = {"latents": 2, "sampling": Sampling(temperature=0.0, max_new=4, stop=None)}
    with pytest.warns(UserWarning, match="differs from the step"):
        found = rollout(one, prompts, fast=fast, **asked)
    assert texts(found) == texts(rollout(one, prompts, **asked))


@pytest.mark.parametrize("number", [0, 1], ids=["latent step", "decoding"])
def test_a_step_that_leaves_its_keys_unwritten_is_refused(one: Backbone, number: int) -> None:
    """What the step had written before it was recorded still lies there, and everything else is right."""

    def forget(calls: list[Any]) -> None:
        wide = [i for i, (func, args, *_) in enumerate(calls) if _writes(func) and args[0].is_floating_point()]
        del calls[[i for i in wide if calls[i][1][0].ndim > 3][-1]]

    check_refused(one, changed(number, forget))


def test_a_step_with_other_hidden_states_is_refused(one: Backbone) -> None:
    """Also where keys, values and the tokens chosen are the same: the largest logit stays the largest."""

    def scale(calls: list[Any]) -> None:
        width = one.model.lm_head.weight.shape[0]
        head = next(i for i, call in enumerate(calls) if torch.is_tensor(call[3]) and call[3].shape[-1] == width)
        before = max(i for i in range(head) if _computes(calls[i]))
        func, *rest = calls[before]
        calls[before] = (_Scaled(func), *rest)

    check_refused(one, changed(1, scale))


class _Scaled(_Other):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = self.func(*args, **kwargs)
        out.data.mul_(1.1)
        return out


def _writes(func: Any) -> bool:
    return func.overloadpacket in (torch.ops.aten.index_copy_, torch.ops.aten.index_copy)
