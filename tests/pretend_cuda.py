"""What `realvr.latent.graphs` asks of ``torch.cuda``, on a machine without it: streams and graphs that say where they
are. A graph is an `op_tape.Tape`, and records nothing where its stream is not on the device of the tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import op_tape


class Stream:
    def __init__(self, machine: Machine, device: int) -> None:
        self.machine, self.device = machine, device

    def wait_stream(self, other: Stream) -> None:
        assert other.device == self.device
        self.machine.log.append(("wait", self, other))


class Machine:
    """Two devices; ``log`` is what was asked of them. The tensors of the test count as those of ``home``."""

    def __init__(self, home: int = 1) -> None:
        self.home, self.current = home, 0
        self.streams = [Stream(self, 0), Stream(self, 1)]
        """The current one of each device."""
        self.log: list[tuple[Any, ...]] = []
        self.broken = False
        """Whether the next recording fails, as torch has it: on the stream of the recording."""
        self.captured: list[Stream] = []
        self.replayed: list[int] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("device", "stream", "graph", "set_stream", "current_stream", "graph_pool_handle"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "Stream", self.new_stream)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Graph(self))

    def index(self, device: Any) -> int:
        found = torch.device(device).index if device is not None else None
        return self.current if found is None else found

    def new_stream(self, device: Any = None) -> Stream:
        return Stream(self, self.index(device))

    def current_stream(self, device: Any = None) -> Stream:
        return self.streams[self.index(device)]

    def set_stream(self, stream: Stream) -> None:
        self.streams[stream.device] = stream

    def graph_pool_handle(self) -> tuple[int, int]:
        return (0, 1)

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before, self.current = self.current, self.index(device)
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before = self.streams[stream.device]
        self.streams[stream.device] = stream
        try:
            yield
        finally:
            self.streams[stream.device] = before

    @contextmanager
    def graph(self, graph: Graph, *, pool: Any, stream: Stream | None = None, **_: Any) -> Iterator[None]:
        stream = stream or self.new_stream()
        before = self.streams[stream.device]
        self.streams[stream.device] = stream
        self.captured.append(stream)
        try:
            if stream.device != self.home:
                yield  # kernels go to the stream of another device: none is recorded
            else:
                with graph.tape:
                    yield
        finally:
            if self.broken:
                raise RuntimeError("operation failed due to a previous error during capture")
            self.streams[stream.device] = before  # not reached by torch where capture_end raises


class Graph:
    def __init__(self, machine: Machine) -> None:
        self.machine, self.tape = machine, op_tape.Tape()

    def replay(self) -> None:
        self.machine.replayed.append(self.machine.current)
        self.tape.replay()
