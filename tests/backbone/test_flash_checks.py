"""The comparison of flash attention with its definition: it passes what is right and notices what is not.

The operators of a GPU are those of `gpu_flash`, by their formulas in float64.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gpu_flash import Gpu, OnGpu
from pair import gradients, relative
from realvr.backbone import flash_checks, packed_attention, split_attention
from realvr.backbone.noise import Noise
from realvr.backbone.notices import notice_once
from realvr.backbone.span_attention import Trunk
from realvr.backbone.split_attention import Split
from realvr.latent import prefill, score
from span_cases import batch_of, exact_backbone, value

DENSE, SEQUENCES = "_scaled_dot_product_flash_attention", "_flash_attention_forward"
WIDTH = 16


@pytest.fixture(autouse=True)
def _smaller(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(flash_checks, "TRUNK", 60)
    flash_checks._agrees.cache_clear()
    notice_once.cache_clear()
    yield
    flash_checks._agrees.cache_clear()


def gap(measure: Callable[..., float], dtype: torch.dtype = torch.float64) -> float:
    return measure(Noise(torch.device("cpu")), dtype, WIDTH)


@pytest.mark.parametrize(("dtype", "most"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.02)])
def test_of_a_cpu_is_right(dtype: torch.dtype, most: float) -> None:
    assert gap(flash_checks._merged_gap, dtype) <= most < flash_checks.TOLERANCE


# ---------------------------------------------------------------------- operators that have changed


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, **changed: Callable[..., Any]) -> Gpu:
    gpu = Gpu()
    for name, change in changed.items():
        monkeypatch.setattr(gpu, name, change(getattr(gpu, name)), raising=True)
    monkeypatch.setattr(split_attention, "aten", gpu)
    monkeypatch.setattr(split_attention, "has_flash", lambda query: True)
    return gpu


def test_of_a_gpu_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = on_a_gpu(monkeypatch)
    assert gap(flash_checks._merged_gap) <= 1e-12
    # Trunk and own columns of branches, then of two steps; first without anything hidden.
    assert gpu.called == ["dense"] * 2 + ["sequences", "dense"] + ["dense"] * 4 + ["sequences", "dense"] * 2


def other_base(stock: Any) -> Any:
    return lambda *a, **k: (lambda found: (found[0], found[1] / 0.6931, *found[2:]))(stock(*a, **k))


def heads_last(stock: Any) -> Any:
    """Log-sum-exp in the same shape, of other queries: laid out by query first."""
    return lambda *a, **k: (lambda found: (found[0], found[1].T.reshape(found[1].shape), *found[2:]))(stock(*a, **k))


def unscaled(stock: Any) -> Any:
    return lambda *a, scale, **k: stock(*a, scale=1.0, **k)


def never_causal(stock: Any) -> Any:
    return lambda q, k, v, p, causal, *rest, **options: stock(q, k, v, p, False, *rest, **options)


def own_sum(stock: Any) -> Any:
    """A backward pass for its own log-sum-exp, whatever it is given."""
    return lambda g, q, k, v, out, lse, *rest, **options: stock(g, q, k, v, out, lse - 0.5, *rest, **options)


def no_query(stock: Any) -> Any:
    return lambda *a, **k: (lambda found: (torch.zeros_like(found[0]), *found[1:]))(stock(*a, **k))


def unfilled(stock: Any) -> Any:
    return lambda *a, **k: (lambda found: (*found[:2], torch.full_like(found[2], torch.nan)))(stock(*a, **k))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (DENSE, other_base),
        (DENSE, unscaled),
        (DENSE, never_causal),
        (f"{DENSE}_backward", own_sum),
        (f"{DENSE}_backward", unfilled),
        (SEQUENCES, other_base),
        (SEQUENCES, heads_last),
        (SEQUENCES, unscaled),
        ("_flash_attention_backward", own_sum),
        ("_flash_attention_backward", no_query),
        ("_flash_attention_backward", unfilled),
    ],
)
def test_what_has_changed_is_noticed(name: str, change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_gpu(monkeypatch, **{name: change})
    assert not gap(flash_checks._merged_gap) <= flash_checks.TOLERANCE
    query = torch.empty(0, WIDTH, dtype=torch.float64)
    with pytest.warns(UserWarning, match="split attention: flash attention computes something else .* apart"):
        assert not flash_checks.merges(query)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not flash_checks.merges(query)


@pytest.mark.parametrize("where", ["branches", "span"])
def test_it_is_not_used_where_it_fails(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where torch takes other arguments."""

    def refuses(*_: Any) -> float:
        raise TypeError("_flash_attention_forward() takes 9 positional arguments\nbut 10 were given")

    monkeypatch.setattr(packed_attention, "_recent", lambda device: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(flash_checks, "Noise", lambda device: Noise(torch.device("cpu")))
    monkeypatch.setattr(flash_checks, "_merged_gap", refuses)
    used: Any = Split(8, 2, 3) if where == "branches" else Trunk(8, span=6)
    with pytest.warns(UserWarning, match=r"does not run on this machine \(TypeError: .* arguments but 10 were"):
        assert not used.takes(OnGpu(torch.bfloat16), None)
    flash_checks._agrees.cache_clear()
    monkeypatch.setattr(flash_checks, "_merged_gap", lambda *_: flash_checks.TOLERANCE)
    assert used.takes(OnGpu(torch.bfloat16), None)
    flash_checks._agrees.cache_clear()
    monkeypatch.setattr(flash_checks, "_merged_gap", lambda *_: float("nan"))
    with pytest.warns(UserWarning, match="nan apart"):
        assert not used.takes(OnGpu(torch.bfloat16), None)


@pytest.mark.parametrize("what", ["replay", "span"])
def test_a_first_use_inside_a_checkpointed_layer(
    what: str, build_tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint counts what is saved inside it, and the layer is run again with the answer known."""
    for kind in (Split, Trunk):
        monkeypatch.setattr(kind, "takes", lambda self, query, window: flash_checks.merges(query))
    backbone = exact_backbone(build_tiny("qwen2.5-vl"), tmp_path / "model")
    batch = batch_of(backbone)

    def gradient(split: bool) -> dict[str, Tensor]:
        if what == "span":
            return gradients(backbone.model, value(backbone, batch, 2, None, split=split, memory="checkpointed"))
        prompt, _ = prefill(backbone, batch, checkpointed=1.0)
        ids = torch.randint(5, 200, (2, 2, 4), generator=torch.Generator().manual_seed(2))
        logp, _, _ = score(backbone, prompt, ids, split=split, checkpointed=1.0)
        return gradients(backbone.model, logp.sum())

    assert relative(gradient(True), gradient(False)) <= 1e-9
    assert flash_checks._agrees.cache_info().misses == 1
    assert flash_checks.merges(torch.empty(0, backbone.decoder.layers[0].self_attn.head_dim, dtype=torch.float64))


@pytest.mark.parametrize(
    "mode",
    [
        torch.inference_mode,
        torch.no_grad,
        lambda: torch.autocast("cpu"),
        lambda: torch.autograd.graph.disable_saved_tensors_hooks("not here"),
    ],
)
def test_whatever_the_caller_is_in(mode: Any) -> None:
    with mode():
        assert flash_checks.merges(torch.empty(0, WIDTH, dtype=torch.float64))


def test_nothing_is_compared_while_a_step_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="recorded without having run before"):
        flash_checks.merges(OnGpu(torch.bfloat16))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=["torch", "cuBLAS"],
)
def test_no_memory_is_no_fault_of_the_operators(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> float:
        raise error

    monkeypatch.setattr(flash_checks, "_merged_gap", full)
    query = torch.empty(0, WIDTH)
    with pytest.raises(type(error)):
        flash_checks.merges(query)
    monkeypatch.setattr(flash_checks, "_merged_gap", lambda *_: 0.0)
    assert flash_checks.merges(query)


# ---------------------------------------------------------------------- sequences one behind the other


def varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
    scale: float | None = None, window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """torch's function, by stock attention of each sequence."""
    parts = zip(*(x.transpose(0, 1).split(cu_seq_q.diff().tolist(), 1) for x in (query, key, value)), strict=True)
    causal = window_size == (-1, 0)
    attend = torch.nn.functional.scaled_dot_product_attention
    found = [attend(*part, is_causal=causal, scale=scale, enable_gqa=enable_gqa) for part in parts]
    return torch.cat(found, dim=1).transpose(0, 1)


CHANGES: dict[str, Callable[..., Any]] = {
    "never causal": lambda *a, **k: varlen(*a, **{**k, "window_size": (-1, -1)}),
    "always causal": lambda *a, **k: varlen(*a, **{**k, "window_size": (-1, 0)}),
    "unscaled": lambda *a, **k: varlen(*a, **{**k, "scale": 1.0}),
    "one sequence": lambda q, k, v, ends, *a, **o: varlen(q, k, v, ends[[0, -1]], *a, **o),
    "no gradient": lambda *a, **k: varlen(a[0], a[1].detach(), *a[2:], **k) + 0 * a[1].sum(),
}


@pytest.mark.parametrize("change", [None, *CHANGES])
def test_sequences(change: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    names = frozenset(inspect.signature(varlen).parameters)
    function = varlen if change is None else CHANGES[change]
    monkeypatch.setattr(packed_attention, "_varlen", lambda: (function, names))
    monkeypatch.setattr(packed_attention, "has_flash", lambda query: True)
    far = gap(flash_checks._packed_gap)
    assert far <= 1e-12 if change is None else far > flash_checks.TOLERANCE
    query = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float64, shape=(0, WIDTH))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert packed_attention.has_varlen(query) == (change is None)  # type: ignore[arg-type]
    assert [("variable-length" in str(each.message)) for each in said] == [True] * (change is not None)
