"""CUDA graphs of a step: its kernels are recorded once and replayed without the host's work.

A recorded step uses the storage of parameters and buffers that it was recorded with. An optimizer that updates in place
is fine; anything else shows in the `fingerprint`, and the step is recorded again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from realvr.backbone import small_kernels
from realvr.backbone.backbone import Backbone

Replay = Callable[[], None]
Record = Callable[[Callable[[], None], Callable[[], None]], Replay]
"""``record(step, reset)`` runs the step as often as it needs to, with ``reset`` after each run; the result repeats
it."""

_STATIC_EXPERTS = ("grouped_mm", "batched_mm")
_WARM_UPS = 2
_ADAPTERS = ("merged_adapters", "_disable_adapters", "_active_adapter", "scaling")
"""Of peft's layers: which adapter is on, merged, and how strong it is."""


class CudaGraphs:
    """Records steps as CUDA graphs in one memory pool. They never run at the same time, and what they return is in
    buffers outside the pool. A pool ends with the last graph in it: the next graph gets another."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self._alive: weakref.WeakSet[_Recorded] = weakref.WeakSet()

    def __call__(self, step: Callable[[], None], reset: Callable[[], None]) -> Replay:
        """See `Record`."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):  # lazy initialisation, such as that of cuBLAS, must not be recorded
                step()
                reset()
        torch.cuda.current_stream().wait_stream(side)
        if not self._alive:
            self.pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # thread_local: a loader's thread that pins memory meanwhile does not spoil the recording
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            step()
        replay = _Recorded(graph)
        self._alive.add(replay)
        return replay


class _Recorded:
    """A graph, for as long as somebody may replay it."""

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph = graph

    def __call__(self) -> None:
        self._graph.replay()


def record_step(record: Record, step: Callable[[], None], changed: Sequence[Tensor]) -> Replay:
    """Record a step and leave ``changed``, all that it changes, as it was."""
    before = [x.clone() for x in changed]

    def reset() -> None:
        for x, old in zip(changed, before, strict=True):
            x.copy_(old)

    try:
        with small_kernels.recorded():
            return record(step, reset)
    finally:
        reset()


def why_not(backbone: Backbone, longest: int) -> str | None:
    """Why the steps of this model cannot be recorded, for sequences of ``longest`` tokens; None where they can."""
    if backbone.device.type != "cuda":
        return f"CUDA graphs need a CUDA device, and the model is on {backbone.device.type}"
    if torch.is_autocast_enabled("cuda"):
        return "a CUDA graph must not keep autocast's copies of the weights"
    return why_not_modules(backbone, longest)


def why_not_modules(backbone: Backbone, longest: int) -> str | None:
    """The part of `why_not` that does not depend on the device."""
    config = backbone.text_config
    if getattr(config, "num_experts", None):
        experts = getattr(config, "_experts_implementation", None)
        if experts not in _STATIC_EXPERTS:
            return f"the experts run as '{experts}', in shapes that depend on the routing"
    for module in _rotary(backbone):
        if not isinstance(module.rope_type, str) or "longrope" in module.rope_type:
            return "the rotary frequencies depend on the longest sequence"
        if max(module.max_seq_len_cached, longest) > module.original_max_seq_len:
            return "the rotary frequencies are stretched for a sequence beyond the context"
    for module in modules(backbone):
        if any(map(_acts, (*module._forward_hooks.values(), *module._forward_pre_hooks.values()))):
            return f"a hook on {type(module).__name__} would not run in a CUDA graph"
        if isinstance(module, nn.Dropout) and module.training and module.p > 0:
            return "dropout is on"
    return None


def _acts(hook: object) -> bool:
    """Whether a hook may do something in a step. Those that transformers leaves behind once somebody has asked it for
    hidden states or attention do nothing unless asked again."""
    return getattr(hook, "__module__", "") != "transformers.utils.output_capturing"


def fingerprint(backbone: Backbone) -> tuple[object, ...]:
    """Changes with anything that a recorded step has taken for granted: modules, modes, adapters, and the addresses of
    parameters and buffers."""
    facts: list[object] = []
    for module in modules(backbone):
        own = vars(module)
        facts += [id(module), type(module), module.training, id(own.get("forward"))]
        if _ADAPTERS[0] in own:
            facts.append(repr([own.get(name) for name in _ADAPTERS]))
        for tensors in (module._parameters, module._buffers):
            for x in tensors.values():
                if x is not None:
                    facts += [x.data_ptr(), x.shape, x.dtype]
    return tuple(facts)


def modules(backbone: Backbone) -> list[nn.Module]:
    """Those of decoder and LM head. Before every rollout they are gone through several times, and adapters make
    thousands of them: `nn.Module.modules` takes several times as long."""
    found: list[nn.Module] = [backbone.decoder, backbone.model.lm_head]
    for module in found:
        found += [child for child in module._modules.values() if child is not None]
    return found


def _rotary(backbone: Backbone) -> list[Any]:
    """Rotary embeddings whose frequencies may depend on the positions they are asked for."""
    kinds = ("dynamic", "longrope")
    named = ((module, str(vars(module).get("rope_type", ""))) for module in modules(backbone))
    return [module for module, name in named if any(kind in name for kind in kinds)]


@contextmanager
def still_frequencies(backbone: Backbone) -> Iterator[None]:
    """Without the check of "dynamic" rotary frequencies, which waits for the device to learn the largest position.

    Nothing changes as long as no position reaches the context length; see `why_not`.
    """
    rotary = _rotary(backbone)
    before = [module.rope_type for module in rotary]
    for module in rotary:
        module.rope_type = "default"
    try:
        yield
    finally:
        for module, kind in zip(rotary, before, strict=True):
            module.rope_type = kind
