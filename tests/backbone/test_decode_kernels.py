"""Our Triton kernels on the CPU: run by Triton's interpreter against the definitions, and compiled for GPUs. What they
compute on a GPU, in 16 bits too, is looked at by `scripts/device_parity.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pretend_cuda import Machine
from realvr.backbone import decode_kernels, side_streams, small_kernels
from realvr.backbone.notices import notice_once
from realvr.backbone.side_streams import beside

BROKEN = (
    "one column late",
    "all columns seen",
    "columns lost",
    "heads exchanged",
    "nothing written",
    "empty pieces",
    "not a number",
)
PARTS = ("branches", "latent step", "latent step of one prompt")
CASES = Path(__file__).parents[1] / "kernel_cases.py"


def cases(*what: str, script: Path = CASES, **variables: str) -> list[str]:
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), *what],
        capture_output=True,
        text=True,
        env={**os.environ, **variables},
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def test_numbers() -> None:
    found = [line.rsplit(" ", 1) for line in cases("numbers", TRITON_INTERPRET="1")]
    assert [name for name, _ in found] == [
        "branches",
        "many pieces",
        "several tiles of rows",
        "one query a branch",
        "latent step",
        "latent step in the last column",
        "as many pieces as on a GPU",
        "small pieces",
        "few pieces",
        "rotary, queries",
        "rotary, keys",
        "rotary of one column, queries",
        "rotary of one column, keys",
        "norm, offset False",
        "norm, offset True",
        "norm of every other number, offset False",
        "norm of every other number, offset True",
        "not finite",
        *(f"gap, {name}" for part in PARTS for name in (part, *(f"{part}, {x}" for x in BROKEN))),
        "gap, rotary",
        "gap, rotary backwards",
        *(f"gap, norm{what} {offset}" for offset in (False, True) for what in (", offset", " with the other offset")),
    ]
    assert all(float(error) < 2e-6 for _, error in found), found


@pytest.mark.slow
def test_where_the_package_calls_them() -> None:
    """Attention with windows and fillers, and whole rollouts with fused layers, beside the same through torch."""
    found = [line.rsplit(" ", 1) for line in cases("wired", TRITON_INTERPRET="1")]
    assert len(found) == 6 + 3 * 3
    assert all(float(error) < (1e-4 if "log-probs" in name else 1e-5) for name, error in found), found


def rounding(*what: str) -> dict[str, float]:
    found = cases(*what, script=CASES.with_name("rounding_cases.py"), TRITON_INTERPRET="1")
    return {name: float(number) for name, number in (line.rsplit(" ", 1) for line in found)}


def test_attention_in_16_bits_is_nearer_to_exact_than_through_torch() -> None:
    found = rounding("attention")
    assert 1e-4 < found["kernel"] < 0.85 * found["torch"] < 5e-3


@pytest.mark.slow
def test_rollouts_of_experts_are_nearer_to_their_replay_than_through_torch() -> None:
    """Why a mixture has the kernel for attention in its recorded steps; with stock layers it has no other."""
    found = rounding("qwen3-vl-moe", "2")
    assert found["kernel, median"] < 0.8 * found["torch, median"] and found["kernel, mean"] < found["torch, mean"]
    assert {name for name in found if "launched" in name} == {"attention, launched"}


@pytest.mark.slow
def test_they_compile_for_gpus(tmp_path: Path) -> None:
    """Within what a multiprocessor has on the chip: 163 KiB of an A100, 99 of an RTX 3090, 227 of an H200."""
    for line in cases("compile", TRITON_CACHE_DIR=str(tmp_path)):
        _, arch, *_, shared = line.split()
        assert int(shared) <= {"80": 163, "86": 99, "90": 227}[arch] * 2**10, line


def test_where_they_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a recorded step on a GPU without gradient, in known types and widths; each condition by itself."""
    monkeypatch.setattr(decode_kernels, "_broken", {})

    def query(width: int = 64, **changes: Any) -> Any:
        facts = {"is_cuda": True, "dtype": torch.bfloat16, "shape": (1, 2, 1, width), "device": "cuda:0"}
        return SimpleNamespace(**facts | changes, element_size=lambda: 4 if "dtype" in changes else 2)

    def taken(*given: Any) -> bool:
        return decode_kernels.takes_heads("attention", query(*given))

    with torch.no_grad():
        assert not taken()
        with small_kernels.recorded():
            assert taken() and taken(256)
            assert not taken(512) and not taken(96) and not taken(8)
            assert decode_kernels.takes_heads("attention", query(128, dtype=torch.float32))
            assert not decode_kernels.takes_heads("attention", query(256, dtype=torch.float32))
            assert not decode_kernels.takes_heads("attention", query(dtype=torch.float64))
            assert not decode_kernels.takes_heads("attention", query(is_cuda=False))
            with torch.enable_grad():
                assert not taken()
            monkeypatch.setattr(decode_kernels, "_installed", lambda: False)
            notice_once.cache_clear()
            with pytest.warns(UserWarning, match="decoding kernels: there is no Triton"):
                assert not taken() and decode_kernels.why_not() == "there is no Triton"


def test_what_does_not_compile_is_left_out_with_a_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    """That kernel for that type and width; the others go on."""
    broken: dict[tuple[object, ...], str] = {}
    monkeypatch.setattr(decode_kernels, "_broken", broken)
    x = torch.zeros(2, 64)

    def fail(error: Exception) -> float:
        raise error

    def tried(kernel: str, error: Exception) -> torch.Tensor | None:
        return decode_kernels.tried(kernel, (x,), lambda: x, lambda: fail(error))

    with pytest.warns(UserWarning, match=r"decoding kernels: norm does not run .*no such instruction"):
        assert tried("norm", ValueError("no such instruction")) is None
    assert "norm does not run on this machine (ValueError: no such instruction)" in str(decode_kernels.why_not())
    assert decode_kernels._kind("norm", x) in broken
    assert not {decode_kernels._kind("norm", x[:, :32]), decode_kernels._kind("attention", x)} & broken.keys()
    for error in (
        torch.OutOfMemoryError("full"),
        RuntimeError("Triton Error [CUDA]: out of memory"),  # which may be another time
    ):
        with pytest.raises(type(error)):
            tried("attention", error)
    assert len(broken) == 1


def test_a_kernel_is_compared_once_a_shape_and_left_out_where_it_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    broken: dict[tuple[object, ...], str] = {}
    monkeypatch.setattr(decode_kernels, "_broken", broken)
    monkeypatch.setattr(decode_kernels, "_compared", set())
    monkeypatch.setattr(decode_kernels, "launched", Counter())
    asked: list[tuple[int, ...]] = []

    def tried(kernel: str, x: torch.Tensor, gap: float) -> torch.Tensor | None:
        def compared() -> float:
            asked.append(tuple(x.shape))
            return gap

        return decode_kernels.tried(kernel, (x,), lambda: x + 1, compared)

    for x in (torch.zeros(2, 64), torch.zeros(2, 64), torch.zeros(3, 64)):
        assert torch.equal(tried("norm", x, 1e-6), x + 1)  # type: ignore[arg-type]
    assert asked == [(2, 64), (3, 64)] and decode_kernels.launched["norm"] == 3
    for kernel, gap in (("attention", 0.3), ("rotary embedding", float("nan"))):
        with pytest.warns(UserWarning, match=f"decoding kernels: {kernel} computes something else on this machine"):
            assert tried(kernel, torch.zeros(2, 64), gap) is None
    assert len(broken) == 2 and not decode_kernels.launched["attention"]


def test_an_error_in_a_recording_is_no_fault_of_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warm-ups have run it. It is neither compared nor compiled there, and what fails is not tried in another way."""
    broken: dict[tuple[object, ...], str] = {}
    monkeypatch.setattr(decode_kernels, "_broken", broken)
    monkeypatch.setattr(decode_kernels, "_compared", set())
    monkeypatch.setattr(torch.cuda, "device_of", lambda _: nullcontext())
    recording = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: recording)
    facts = {"is_cuda": True, "dtype": torch.bfloat16, "shape": (2, 64), "device": "cuda:0", "stride": lambda: (64, 1)}
    x: Any = SimpleNamespace(**facts)
    asked: list[float] = []

    def gap() -> float:
        asked.append(1e-6)
        return 1e-6

    def fail(*_: object) -> torch.Tensor:
        raise ValueError("operation not permitted when stream is capturing")

    recording = True
    with pytest.raises(RuntimeError, match="without having run before"):
        decode_kernels.tried("norm", (x,), lambda: 1, gap)
    recording = False
    assert decode_kernels.tried("norm", (x,), lambda: 1, gap) == 1 and len(asked) == 1
    recording = True
    assert decode_kernels.tried("norm", (x,), lambda: 2, gap) == 2 and len(asked) == 1
    with pytest.raises(ValueError, match="not permitted"):
        decode_kernels.tried("norm", (x,), fail, gap)
    assert not broken
    gate: Any = small_kernels._Compiled(lambda x: (x,))
    monkeypatch.setattr(gate, "_version", lambda args: fail)
    with pytest.raises(ValueError, match="not permitted"):
        gate(SimpleNamespace(data=x))
    assert gate.usable
    recording = False
    notice_once.cache_clear()
    with pytest.warns(UserWarning, match="not compiled on this machine"):
        assert gate(SimpleNamespace(data=x)) is None
    assert not gate.usable


def test_beside_is_one_after_the_other_elsewhere() -> None:
    x = torch.arange(3.0)
    with torch.no_grad(), small_kernels.recorded():
        found = beside(x, lambda x: x + 1, lambda x: x * 2)
    assert [each.tolist() for each in found] == [[1, 2, 3], [0, 2, 4]]


def test_side_streams_wait_for_the_caller_and_the_caller_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after an error, but for a stream that has not begun: in a recording it would be none of its streams."""
    machine = Machine(home=0)
    machine.install(monkeypatch)
    monkeypatch.setattr(side_streams, "_stream", cache(lambda device, number: machine.new_stream(device)))
    x: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0))
    ran: list[Any] = []

    def call(result: object) -> Any:
        def run(_: object) -> object:
            ran.append(machine.current_stream())
            if isinstance(result, Exception):
                raise result
            return result

        return run

    with torch.no_grad(), small_kernels.recorded():
        here = machine.current_stream()
        assert beside(x, call("q"), call("k"), call("v")) == ["q", "k", "v"]
        first, second = ran[:2]
        assert ran == [first, second, here] and len({first, second, here}) == 3
        assert machine.log == [
            ("wait", first, here),
            ("wait", second, here),
            ("wait", here, first),
            ("wait", here, second),
        ]
        machine.log.clear()
        with pytest.raises(torch.OutOfMemoryError):
            beside(x, call("q"), call(torch.OutOfMemoryError("full")), call("v"))
    assert machine.log == [("wait", first, here), ("wait", here, first)]
    assert machine.current_stream() is here
