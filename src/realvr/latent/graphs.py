"""CUDA graphs of a step: its kernels are recorded once and replayed without the host's work.

A recorded step uses the storage of the parameters and buffers that it was recorded with. An optimizer that updates in
place is fine; any other change shows in a `Survey`, and the step is recorded again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from realvr.backbone import small_kernels
from realvr.backbone.backbone import Backbone
from realvr.latent import room, trial

Replay = Callable[[], None]
Record = Callable[[Callable[[], None], Callable[[], None]], Replay]
"""``record(step, reset)`` runs the step at least once, with ``reset`` after each run; the result repeats it."""

_STATIC_EXPERTS = ("grouped_mm", "batched_mm")
_WARM_UPS = 2
_ADAPTERS = ("merged_adapters", "_disable_adapters", "_active_adapter", "scaling")
"""Of peft's layers: which adapter is on, merged, and how strong it is."""


class CudaGraphs:
    """Records steps on one device as CUDA graphs in one memory pool. They never run at the same time, and what they
    return is in buffers outside the pool. A pool ends with the last graph in it: the next graph gets another."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool = torch.cuda.graph_pool_handle()
        # One for all of them: a backward pass is recorded where its forward pass was.
        self._stream = torch.cuda.Stream(device)
        # cuBLAS keeps memory for every stream that it has seen.
        self._side = torch.cuda.Stream(device)
        self._alive: weakref.WeakSet[_Recorded] = weakref.WeakSet()

    def __call__(self, step: Callable[[], None], reset: Callable[[], None]) -> Replay:
        """See `Record`. Whatever happens, the caller goes on with the stream that it came with."""
        with torch.cuda.device(self.device):
            here = torch.cuda.current_stream(self.device)
            self._warm_up(step, reset, here)
            if not self._alive:
                self.pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            # thread_local: a loader's thread that pins memory meanwhile does not spoil the recording
            options: dict[str, Any] = {"stream": self._stream, "capture_error_mode": "thread_local"}
            try:
                with torch.cuda.graph(graph, pool=self.pool, **options):
                    step()
            finally:  # torch stays on its own stream where a recording fails
                torch.cuda.set_stream(here)
        replay = _Recorded(graph, self.device)
        self._alive.add(replay)
        return replay

    def _warm_up(self, step: Callable[[], None], reset: Callable[[], None], here: torch.cuda.Stream) -> None:
        """Lazy initialisation, such as that of cuBLAS, must not be recorded."""
        side = self._side
        side.wait_stream(here)
        try:
            with torch.cuda.stream(side):
                for _ in range(_WARM_UPS):
                    step()
                    reset()
        finally:  # also after an error: the caller puts back what the step has changed
            here.wait_stream(side)

    @property
    def held_bytes(self) -> int:
        """Of the pool."""
        return room.pool_bytes(self.pool) if self._alive else 0


class _Recorded:
    """A graph, for as long as somebody may replay it."""

    def __init__(self, graph: torch.cuda.CUDAGraph, device: torch.device) -> None:
        self._graph, self._device = graph, device

    def __call__(self) -> None:
        with torch.cuda.device(self._device):
            self._graph.replay()


def record_step(
    record: Record,
    step: Callable[[], None],
    changed: Sequence[Tensor] = (),
    tried: trial.Trial | None = None,
    forget: Callable[[], None] | None = None,
) -> Replay:
    """Record a step and leave ``changed``, all that it changes, as it was. It is replayed once on trial, as ``tried``
    says; a recording whose results differ from the step's is made again, and the second time refused. ``forget`` drops
    what a run has made: else there would be no room for the recording beside it."""
    before = [x.clone() for x in changed]
    right: trial.Made | None = None

    def reset() -> None:
        for x, old in zip(changed, before, strict=True):
            x.copy_(old)

    def clear() -> None:
        if forget is not None:
            forget()
        reset()

    def between() -> None:
        nonlocal right
        if tried is not None:
            right = tried.made().kept()
        clear()

    def recorded() -> tuple[Replay, float]:
        with small_kernels.recorded():
            replay = record(step, between)
        if tried is None:
            return replay, 0
        reset()
        assert right is not None, "a step runs before it is recorded"
        return replay, _distance(replay, tried, right)

    try:
        replay, off = recorded()
        if tried is not None and not off <= tried.tolerance:
            del replay
            right = None
            clear()
            replay, off = recorded()
            if not off <= tried.tolerance:
                raise RuntimeError(f"a replay differs from the step by {off:.2g}, and {tried.tolerance:.2g} is allowed")
        return replay
    finally:
        reset()


@torch.no_grad()
def _distance(replay: Replay, tried: trial.Trial, right: trial.Made) -> float:
    tried.spoil()
    replay()
    return trial.gap(tried.made().kept(), right)


# ---------------------------------------------------------------------- what is recorded


@dataclass(frozen=True)
class Survey:
    """What recordings depend on in decoder and LM head, found in one walk: adapters make thousands of modules."""

    devices: tuple[torch.device, ...]
    """Of their parameters."""
    fingerprint: tuple[object, ...]
    """Changes with anything that a recorded step has taken for granted: modules, modes, adapters, and the addresses of
    parameters and buffers."""
    trained: tuple[bool, ...]
    """Which parameters have a gradient."""
    rotary: tuple[Any, ...]
    """Rotary embeddings whose frequencies may depend on the positions they are asked for."""
    unable: str | None
    """Why a module cannot be recorded."""
    backward_hooks: bool

    @classmethod
    def of(cls, backbone: Backbone) -> Survey:
        """Of a backbone as it is now."""
        facts: list[object] = []
        devices: dict[torch.device, None] = {}
        trained: list[bool] = []
        rotary: list[Any] = []
        unable, backward_hooks = None, False
        for module in modules(backbone):
            own = vars(module)
            facts += [id(module), type(module), module.training, id(own.get("forward"))]
            if _ADAPTERS[0] in own:
                facts.append(repr([own.get(name) for name in _ADAPTERS]))
            for parameter in module._parameters.values():
                if parameter is not None:
                    facts += [parameter.data_ptr(), parameter.shape, parameter.dtype]
                    devices[parameter.device] = None
                    trained.append(parameter.requires_grad)
            for buffer in module._buffers.values():
                if buffer is not None:
                    facts += [buffer.data_ptr(), buffer.shape, buffer.dtype]
            if "rope_type" in own and any(kind in str(own["rope_type"]) for kind in ("dynamic", "longrope")):
                rotary.append(module)
            unable = unable or _unable(module)
            backward_hooks = backward_hooks or bool(module._backward_hooks or module._backward_pre_hooks)
        return cls(tuple(devices), tuple(facts), tuple(trained), tuple(rotary), unable, backward_hooks)


def _unable(module: nn.Module) -> str | None:
    hooks = module._forward_hooks, module._forward_pre_hooks
    if any(hooks) and any(_acts(hook) for each in hooks for hook in each.values()):
        return f"a hook on {type(module).__name__} would not run in a CUDA graph"
    if isinstance(module, nn.Dropout) and module.training and module.p > 0:
        return "dropout is on"
    return None


def _acts(hook: object) -> bool:
    """Whether a hook may do something in a step. Those that transformers leaves behind once somebody has asked it for
    hidden states or attention do nothing unless asked again."""
    return getattr(hook, "__module__", "") != "transformers.utils.output_capturing"


def why_not(backbone: Backbone, longest: int, survey: Survey | None = None) -> str | None:
    """Why the steps of this model cannot be recorded, for sequences of ``longest`` tokens; None where they can."""
    if backbone.device.type != "cuda":
        return f"CUDA graphs need a CUDA device, and the model is on {backbone.device.type}"
    if torch.is_autocast_enabled("cuda"):
        return "a CUDA graph must not keep autocast's copies of the weights"
    return why_not_modules(backbone, longest, survey)


def why_not_modules(backbone: Backbone, longest: int, survey: Survey | None = None) -> str | None:
    """The part of `why_not` that does not depend on the device."""
    survey = survey or Survey.of(backbone)
    config = backbone.text_config
    if getattr(config, "num_experts", None):
        experts = getattr(config, "_experts_implementation", None)
        if experts not in _STATIC_EXPERTS:
            return f"the experts run as '{experts}', in shapes that depend on the routing"
    for module in survey.rotary:
        if not isinstance(module.rope_type, str) or "longrope" in module.rope_type:
            return "the rotary frequencies depend on the longest sequence"
        if max(module.max_seq_len_cached, longest) > module.original_max_seq_len:
            return "the rotary frequencies are stretched for a sequence beyond the context"
    return survey.unable


def fingerprint(backbone: Backbone) -> tuple[object, ...]:
    """That of a `Survey`."""
    return Survey.of(backbone).fingerprint


def modules(backbone: Backbone) -> list[nn.Module]:
    """Those of decoder and LM head; `nn.Module.modules` takes several times as long."""
    found: list[nn.Module] = [backbone.decoder, backbone.model.lm_head]
    for module in found:
        found += [child for child in module._modules.values() if child is not None]
    return found


@contextmanager
def still_frequencies(backbone: Backbone) -> Iterator[None]:
    """Without the check of "dynamic" rotary frequencies, which waits for the device to learn the largest position.

    Nothing changes as long as no position reaches the context length; see `why_not`.
    """
    rotary = Survey.of(backbone).rotary
    before = [module.rope_type for module in rotary]
    for module in rotary:
        module.rope_type = "default"
    try:
        yield
    finally:
        for module, kind in zip(rotary, before, strict=True):
            module.rope_type = kind
