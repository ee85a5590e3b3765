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
from helpers import mixed_prompts
from pair import gradients, relative
from realvr.backbone import Backbone
from realvr.latent import prefill, trial
from realvr.latent.fast import FastDecode
from realvr.latent.group_rollout import Rollout, rollout
from realvr.latent.recorded_span import RecordedSpan
from realvr.latent.sampling import Sampling
from realvr.latent.trial import Made
from realvr.training import gradients as deferring
from span_cases import batch_of, exact_backbone, value

# ---------------------------------------------------------------------- the comparison


INF, NAN = float("inf"), float("nan")


def numbers(*kinds: list[list[float]]) -> Made:
    return Made([[torch.tensor(x) for x in kind] for kind in kinds])


@pytest.mark.parametrize(
    ("found", "right", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([3.0, 4.5], [3.0, 4.0], 0.1),
        ([NAN, 1.0], [2.0, 1.0], INF),
        ([NAN, 1.0], [NAN, 1.0], 0.0),  # a model that has diverged is no fault of a recording
        ([INF, 1.0], [INF, 1.0], 0.0),
        ([INF, 1.0], [2.0, 1.0], INF),
        ([1.0], [1.0, 1.0], INF),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([0.0, 1.0], [0.0, 0.0], INF),
    ],
)
def test_gap_of_numbers(found: list[float], right: list[float], expected: float) -> None:
    assert trial.gap(numbers([found]), numbers([right])) == pytest.approx(expected)
    assert trial.gap(numbers([[1.0]], [found]), numbers([[1.0]], [right])) == pytest.approx(expected)
    assert trial.gap(numbers([found], []), numbers([right])) == INF


@pytest.mark.parametrize(("found", "right"), [([2700], [2701]), ([True, False], [True, True]), ([1, 2], [1])])
def test_counters_and_masks_are_exact(found: list[int], right: list[int]) -> None:
    mine, theirs = (Made([], [torch.tensor([0]), torch.tensor(x)]) for x in (found, right))
    assert trial.gap(mine, theirs) == INF and trial.gap(mine, mine) == 0


def test_rounding_may_decide_a_token() -> None:
    def chosen(ids: list[int], logp: list[float]) -> Made:
        return Made([], [], (torch.tensor([ids]), torch.tensor([logp])))

    ids, logp = list(range(32)), [-1.0] * 32
    right = chosen(ids, logp)
    assert trial.gap(chosen([99, 98, *ids[2:]], [-9.0, -8.0, *logp[2:]]), right) == 0
    assert trial.gap(chosen([99, 98, 97, *ids[3:]], logp), right) == INF
    assert trial.gap(chosen(ids, [-2.0] * 32), right) == pytest.approx(1)
    assert trial.gap(chosen(ids, [-1.12e-6] * 32), chosen(ids, [-1e-6] * 32)) == pytest.approx(1.2e-7)
    assert trial.gap(chosen(ids, [-1e-7] * 32), chosen(ids, [0.0] * 32)) == pytest.approx(1e-7)
    assert trial.gap(chosen([99], [-1.0]), chosen([1], [-1.0])) == INF


def test_a_small_tensor_is_on_the_scale_of_its_kind() -> None:
    """The gradient of what changes nothing is all rounding."""
    large, small = [10.0] * 4, [1e-3] * 4
    other = [-x for x in small]
    assert trial.gap(numbers([large, other]), numbers([large, small])) == pytest.approx(
        0.004 / (200**0.5 / 10), rel=1e-3
    )
    assert trial.gap(numbers([large], [other]), numbers([large], [small])) == pytest.approx(2)


@pytest.mark.parametrize("shape", [(4, 8, 128, 64), (8, 4, 1, 128), (9, 31), (64,)])
def test_parts_cover_a_tensor(shape: tuple[int, ...]) -> None:
    """Of every row, head, column and place in a head there is one."""
    x = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
    made = Made([[x.mT if len(shape) > 1 else x]], [x[0]], (x, x)).kept()
    ((part,),) = made.numbers
    assert min(len(part), 2 * trial.PART) == len(part) and len(part) >= min(x.numel(), trial.PART / 2)
    place, left = part.long(), x.numel()
    for size in shape:
        left //= size
        assert len((place // left % size).unique()) == size
    for own in (part, *made.exact, *(made.chosen or ())):
        assert own.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


# ---------------------------------------------------------------------- recordings with a broken operation


class Recorder:
    """Recordings of which those of the ``number``-th step are changed: its operations are (operator, arguments,
    options, result). ``times``: how often it is recorded like that."""

    def __init__(self, number: int, change: Callable[[list[Any]], None], times: int = 2) -> None:
        self.number, self.change, self.times = number, change, times
        self.steps: list[Callable[[], None]] = []
        self.changed = 0

    def __call__(self, step: Callable[[], None], reset: Callable[[], None]) -> Callable[[], None]:
        if step not in self.steps:
            self.steps.append(step)
        step()
        reset()
        tape = op_tape.Tape()
        with tape:
            step()
        if self.steps.index(step) == self.number and self.changed < self.times:
            self.change(tape.calls)
            self.changed += 1
        return tape.replay


def broken(number: int, place: float | int) -> tuple[Recorder, list[str]]:
    """One operation of a step fills its results with something else: the one at ``place``, or at that share of them."""
    names: list[str] = []

    def change(calls: list[Any]) -> None:
        places = [i for i, call in enumerate(calls) if _computes(call)]
        at = places[int(place * (len(places) - 1)) if isinstance(place, float) else place]
        func, *rest = calls[at]
        names.append(f"{func} of {len(places)}")
        calls[at] = (_Other(func), *rest)

    return Recorder(number, change), names


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


def logps(found: Rollout) -> list[float]:
    return [x for group in found.completions for completion in group for x in completion.logprobs]


def decoded(backbone: Backbone, record: Recorder, columns: int = 8, **asked: Any) -> tuple[bool, float]:
    """Whether a notice says that a recording differed; and the largest difference from the plain rollout, of which the
    texts are the same."""
    asked = {"group": 2, "latents": 2, "sampling": Sampling(temperature=1.0, max_new=4, stop=None)} | asked
    prompts = mixed_prompts(backbone)[:2]
    plain = rollout(backbone, prompts, **asked)
    fast = FastDecode(backbone, columns=columns, tokens=4, recorded=True, record=record)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = rollout(backbone, prompts, fast=fast, **asked)
    assert texts(found) == texts(plain)
    off = max(abs(a - b) for a, b in zip(logps(found), logps(plain), strict=True))
    off = max(off, float((found.latents_BKD - plain.latents_BKD).abs().max()))
    return any("differs from the step" in str(each.message) for each in said), off


@pytest.mark.parametrize("number", [0, 1], ids=["latent step", "decoding"])
def test_a_broken_step_is_refused(one: Backbone, number: int) -> None:
    """Whichever operation it is: refused, or of no effect."""
    refused = 0
    for share in SHARES:
        record, names = broken(number, share)
        differs, off = decoded(one, record)
        assert off <= 1e-4, names
        assert len(names) == 1 + differs
        refused += differs
    assert refused > len(SHARES) // 2  # what chooses a token may be broken and choose the same


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2.5-vl", "gemma3", "qwen3-vl-moe"])
@pytest.mark.parametrize("number", [0, 1], ids=["latent step", "decoding"])
def test_every_operation_of_a_step(build_tiny: Callable[[str], Path], family: str, number: int) -> None:
    """One after the other."""
    backbone, place, refused = Backbone.load(build_tiny(family), dtype=torch.float32, device="cpu"), 0, 0
    if family == "qwen3-vl-moe":
        backbone.text_config._experts_implementation = "batched_mm"
    while True:
        record, names = broken(number, place)
        differs, off = decoded(backbone, record, latents=1, sampling=Sampling(1.0, max_new=2, stop=None))
        assert off <= 1e-4, (place, names)
        refused += differs
        place += 3
        if place >= int(names[0].split()[-1]):
            break
    assert refused > 0.7 * place / 3


def test_a_recording_that_differs_once_is_made_again(one: Backbone) -> None:
    """Chance is no reason to give up recordings for a whole run."""
    record, names = broken(0, 0.5)
    record.times = 1
    assert decoded(one, record) == (False, pytest.approx(0, abs=1e-4)) and len(names) == 1


@pytest.mark.parametrize("number", [0, 1], ids=["forward", "backward"])
@pytest.mark.parametrize("split", [False, True])
def test_a_span_that_differs_once_is_recorded_again(
    build_tiny: Callable[[str], Path], tmp_path: Path, number: int, split: bool
) -> None:
    backbone = exact_backbone(build_tiny("qwen2.5-vl"), tmp_path / "model")
    batch = batch_of(backbone)
    right = gradients(backbone.model, value(backbone, batch, 2, None, split=split))
    record, names = broken(number, 0.5)
    record.times = 1
    recorded = RecordedSpan(backbone, columns=16, record=record)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "recorded span")
        for _ in range(2):
            ours = value(backbone, batch, 2, recorded, split=split)
            assert relative(gradients(backbone.model, ours), right) <= 1e-9
    assert len(names) == 1 and recorded.counts == {"recorded": 1, "replayed": 2}


@pytest.mark.parametrize("number", [0, 1], ids=["forward", "backward"])
@pytest.mark.parametrize("split", [False, True])
def test_a_broken_span_is_refused(build_tiny: Callable[[str], Path], tmp_path: Path, number: int, split: bool) -> None:
    backbone = exact_backbone(build_tiny("qwen2.5-vl"), tmp_path / "model")
    batch, refused = batch_of(backbone), 0
    plain = value(backbone, batch, 2, None, split=split)
    right = gradients(backbone.model, plain)
    for share in SHARES:
        record, names = broken(number, share)
        recorded = RecordedSpan(backbone, columns=16, record=record)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            ours = value(backbone, batch, 2, recorded, split=split)
        assert names
        refused += any("differs from the step" in str(each.message) for each in said)
        assert relative(gradients(backbone.model, ours), right) <= 1e-9, (share, names)
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

        recorded = RecordedSpan(backbone, columns=16, record=Recorder(1, other))
        with pytest.warns(UserWarning, match="differs from the step"):
            ours = value(backbone, batch, 2, recorded, split=split)
        assert relative(gradients(backbone.model, ours), right) <= 1e-9


# ---------------------------------------------------------------------- single losses


def left_out(*names: str, that: Callable[[Tensor], bool]) -> Callable[[list[Any]], None]:
    """The last operation of these names whose first argument is like ``that`` is not there."""

    def change(calls: list[Any]) -> None:
        places = [i for i, (func, args, *_) in enumerate(calls) if _named(func, names) and that(args[0])]
        del calls[places[-1]]

    return change


def _named(func: Any, names: tuple[str, ...]) -> bool:
    return str(func.overloadpacket).removeprefix("aten.").rstrip("_") in names


@pytest.mark.parametrize(
    ("number", "lost"),
    [
        (0, left_out("index_copy", that=lambda x: x.is_floating_point() and x.ndim > 3)),
        (1, left_out("index_copy", that=lambda x: x.is_floating_point() and x.ndim > 3)),
        (1, left_out("index_copy", that=lambda x: x.dtype == torch.long and x.ndim == 3)),
        (1, left_out("index_copy", that=lambda x: x.is_floating_point() and x.ndim == 3)),
        (1, left_out("copy", that=lambda x: x.dtype == torch.long and x.ndim == 2)),
        (0, left_out("add", that=lambda x: x.dtype == torch.long and x.ndim == 1)),
        (1, left_out("add", that=lambda x: x.dtype == torch.long and x.ndim == 1)),
    ],
    ids=["keys of a latent", "keys of a token", "token", "log-probability", "token that is fed", "position", "step"],
)
def test_what_is_not_written_is_noticed(one: Backbone, number: int, lost: Any) -> None:
    """What the step had written before it was recorded still lies there, and everything else is right."""
    assert decoded(one, Recorder(number, lost)) == (True, pytest.approx(0, abs=1e-4))


@pytest.mark.parametrize("mark", ["visible", "place"])
def test_marks_of_a_column_are_noticed_in_16_bits(build_tiny: Callable[[str], Path], mark: str) -> None:
    """Behind a trunk so long that few of its columns are compared."""
    backbone = Backbone.load(build_tiny("gemma3"), dtype=torch.bfloat16, device="cpu")
    lost = {
        "visible": left_out("index_fill", that=lambda x: x.dtype == torch.bool),
        "place": left_out("index_copy", that=lambda x: x.dtype == torch.long and x.ndim == 2),
    }[mark]
    fast = FastDecode(backbone, columns=2048, tokens=4, recorded=True, record=Recorder(0, lost))
    with pytest.warns(UserWarning, match="differs from the step by inf"):
        rollout(backbone, mixed_prompts(backbone)[:1], group=1, latents=1, sampling=Sampling(max_new=2), fast=fast)


def test_a_model_that_has_diverged_hides_nothing(build_tiny: Callable[[str], Path]) -> None:
    """Its states are NaN: so must be those of a replay, and nothing is what a replay of nothing leaves."""
    backbone = Backbone.load(build_tiny("qwen2.5-vl"), dtype=torch.float32, device="cpu")
    with torch.no_grad():
        backbone.decoder.norm.weight.fill_(torch.nan)
    state, _ = prefill(backbone, backbone.batch(mixed_prompts(backbone)[:1]))

    def empty(calls: list[Any]) -> None:
        del calls[: len(calls) - 2]  # but for the counters

    for record, refused in ((op_tape.record, False), (Recorder(0, empty), True)):
        fast = FastDecode(backbone, columns=8, tokens=4, recorded=True, record=record)
        with warnings.catch_warnings(record=True) as said, torch.no_grad():
            warnings.simplefilter("always")
            fast.think(state, 1)
        assert [("differs from the step" in str(each.message)) for each in said] == [True] * refused


@pytest.mark.parametrize("product", range(3))
@pytest.mark.parametrize("family", ["qwen2.5-vl", "gemma3"])
def test_a_latent_step_is_tried_on_real_input(build_tiny: Callable[[str], Path], family: str, product: int) -> None:
    """Of zeros the first layer makes nothing: no product of it could be wrong."""
    backbone = Backbone.load(build_tiny(family), dtype=torch.float32, device="cpu")

    def scale(calls: list[Any]) -> None:
        places = [i for i, (func, *_) in enumerate(calls) if _named(func, ("mm", "addmm"))]
        func, *rest = calls[places[product]]
        calls[places[product]] = (_Scaled(func), *rest)

    assert decoded(backbone, Recorder(0, scale))[1] <= 1e-4


def test_other_hidden_states_are_noticed(one: Backbone) -> None:
    """Also where keys, values and the tokens chosen are the same: the largest logit stays the largest."""

    def scale(calls: list[Any]) -> None:
        width = one.model.lm_head.weight.shape[0]
        head = next(i for i, call in enumerate(calls) if torch.is_tensor(call[3]) and call[3].shape[-1] == width)
        before = max(i for i in range(head) if _computes(calls[i]))
        func, *rest = calls[before]
        calls[before] = (_Scaled(func), *rest)

    greedy = Sampling(temperature=0.0, max_new=4, stop=None)
    assert decoded(one, Recorder(1, scale), sampling=greedy) == (True, pytest.approx(0, abs=1e-4))


class _Scaled(_Other):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = self.func(*args, **kwargs)
        out.data.mul_(1.1)
        return out
