"""Which kernels a run launches, how long the device is busy with them, and what the host does meanwhile."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

SHOWN = 14
"""Kernels or operations that are listed, those that take most time first."""


def kernels(name: str, run: Callable[[], object], steps: int = 1) -> list[str]:
    """Lines on one warm run: of each step the kernels, the time in which at least one of them ran, and wall time."""
    run()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    run()
    torch.cuda.synchronize()
    wall = (time.perf_counter() - begun) / steps * 1e3
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    events = [each for each in seen.events() or () if each.device_type == torch.autograd.DeviceType.CUDA]
    busy = busy_microseconds(events) / steps / 1e3
    lines = [f"{name}: {len(events) / steps:.0f} kernels, {busy:.2f} ms busy, {wall:.2f} ms in all"]
    times: dict[str, list[float]] = defaultdict(list)
    for each in events:
        times[each.name[:90]].append(each.time_range.elapsed_us())
    for kernel, found in sorted(times.items(), key=lambda item: -sum(item[1]))[:SHOWN]:
        lines.append(f"  {len(found) / steps:7.1f} x {sum(found) / len(found):7.1f} µs  {kernel}")
    return lines


def busy_microseconds(events: Iterable[Any]) -> float:
    """Time in which at least one kernel ran: what runs side by side counts once."""
    busy = end = 0.0
    for each in sorted(events, key=lambda each: each.time_range.start):
        busy += max(0.0, each.time_range.end - max(end, each.time_range.start))
        end = max(end, each.time_range.end)
    return busy


def host(name: str, run: Callable[[], object]) -> list[str]:
    """Operations of one run by the host's own time for them. The profiler itself takes time of each: compare them with
    each other only."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    averages = sorted(seen.key_averages(), key=lambda each: -each.self_cpu_time_total)
    calls, total = (sum(values) for values in zip(*((e.count, e.self_cpu_time_total) for e in averages), strict=True))
    lines = [f"{name}: {calls} operations on the host, {total / 1e3:.0f} ms with the profiler"]
    for each in averages[:SHOWN]:
        lines.append(f"  {each.count:7d} x {each.self_cpu_time_total / each.count:7.1f} µs  {each.key[:90]}")
    return lines
