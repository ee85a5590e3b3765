"""Recording on the model's own device, whatever the current one is, and what a failed recording leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import op_tape
from pretend_cuda import Machine
from realvr.backbone import Backbone, loading
from realvr.latent import graphs, room
from realvr.latent.trial import Made, Trial


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine()
    found.install(monkeypatch)
    return found


def counting() -> tuple[torch.Tensor, Callable[[], None]]:
    count = torch.zeros(1, dtype=torch.long)
    return count, lambda: [count.add_(1)].clear()


def counted(count: torch.Tensor) -> Trial:
    """That a replay counts on, as the step does."""
    return Trial(lambda: Made([], [count]), lambda: None, 0.0)


def test_everything_is_on_the_device_of_the_model(machine: Machine) -> None:
    """The current device is another, as for the processes of an evaluation."""
    before = list(machine.streams)
    count, step = counting()
    record = graphs.CudaGraphs(torch.device("cuda", 1))
    replay = graphs.record_step(record, step, [count], counted(count))
    assert {stream.device for stream in machine.captured} == {1} and machine.streams == before
    assert {stream.device for _, *both in machine.log for stream in both} == {1}
    replay()
    assert count.item() == 1 and set(machine.replayed) == {1} and machine.current == 0
    graphs.record_step(record, step, [count], counted(count))
    assert len(set(machine.captured)) == 1  # a backward pass is recorded where its forward pass was


def test_a_recording_without_effect_is_refused(machine: Machine) -> None:
    """As one that was made on another device, where none of the kernels run."""
    count, step = counting()
    with pytest.raises(RuntimeError, match="differs from the step by inf"):
        graphs.record_step(graphs.CudaGraphs(torch.device("cuda", 0)), step, [count], counted(count))
    assert count.item() == 0


def test_a_failed_recording_gives_the_stream_back(machine: Machine) -> None:
    """`torch.cuda.graph` stays on its own stream where the recording cannot be ended."""
    before = list(machine.streams)
    count, step = counting()
    machine.broken = True
    with pytest.raises(RuntimeError, match="during capture"):
        graphs.record_step(graphs.CudaGraphs(torch.device("cuda", 1)), step, [count], counted(count))
    assert machine.streams == before and count.item() == 0


def test_a_failed_warm_up_is_waited_for(machine: Machine) -> None:
    """What it has changed is put back by the caller, on the stream that it came with."""
    here = machine.streams[1]

    def fails() -> None:
        raise RuntimeError("no such kernel")

    with pytest.raises(RuntimeError, match="no such kernel"):
        graphs.record_step(graphs.CudaGraphs(torch.device("cuda", 1)), fails, [])
    kind, waits, side = machine.log[-1]
    assert kind == "wait" and waits is here and side is not here and machine.streams[1] is here


def test_a_gpu_named_by_number_becomes_the_current_one(
    build_tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``realvr eval --processes`` gives process r GPU r; what asks for no device would be on GPU 0."""
    chosen, plain = [], loading._load_model
    monkeypatch.setattr(loading, "_device", lambda name: torch.device(name))
    monkeypatch.setattr(loading, "_load_model", lambda source, dtype, _: plain(source, dtype, torch.device("cpu")))
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for device in ("cpu", "cuda", "cuda:1"):
        Backbone.load(build_tiny("qwen2.5-vl"), device=device, announce=False)
    assert chosen == [torch.device("cuda", 1)]


def test_memory_of_graphs_is_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reserved and unused memory counts as free, unless it is in the pool of a graph, or of another device."""
    segments = [
        {"device": 1, "segment_pool_id": (0, 0), "total_size": 500, "allocated_size": 200},
        {"device": 1, "segment_pool_id": (0, 7), "total_size": 400, "allocated_size": 100},
        {"device": 0, "segment_pool_id": (0, 8), "total_size": 9000, "allocated_size": 0},
    ]
    looked: list[int] = []
    said: dict[str, Any] = {
        "mem_get_info": lambda device: (1000, 4000),
        "memory_reserved": lambda device: 900,
        "memory_allocated": lambda device: 300,
        "memory_snapshot": lambda: looked.append(1) or segments,
    }
    for name, function in said.items():
        monkeypatch.setattr(torch.cuda, name, function)
    device = torch.device("cuda", 1)
    assert room.free_bytes(device) == int(0.9 * (1000 + 300))
    assert room.free_bytes(device, 901) == int(0.9 * (1000 + 300)) and len(looked) == 2
    assert room.free_bytes(device, 900) == 900 and len(looked) == 2  # enough without
    assert room.pool_bytes((0, 7)) == 400
    assert room.free_bytes(torch.device("cpu")) is None


def test_a_tape_is_tried_too() -> None:
    """The stand-in of other tests: a replay that counts on passes, one that does not is refused."""
    count, step = counting()
    graphs.record_step(op_tape.record, step, [count], counted(count))()
    assert count.item() == 1

    def idle(step: Any, reset: Any) -> Any:
        op_tape.record(step, reset)
        return lambda: None

    with pytest.raises(RuntimeError, match="differs from the step by inf"):
        graphs.record_step(idle, step, [count], counted(count))
    assert count.item() == 1
