"""What ``auto`` means for fast paths that change numbers by rounding. This is the only place that decides it.

They are on where they were compared with the plain path, gradients included: on an NVIDIA GPU, for dense models that
one GPU holds whole. They are off for mixtures of experts, which send a token that is rounded differently to other
experts; under engines that cut the model up and gather weights in hooks; and on a CPU, where results stay the same to
the bit. Kernels for adapters were compared under FSDP2 too, on CPU ranks.

Recorded steps have their own ``auto`` (`realvr.latent.modes`). Our kernels for one column (`decode_kernels`) are part
of them, with experts too: a step of one column never rounds like the replay of a whole text, and the attention kernel
rounds once, so that its log-probabilities are closer to the replay's than torch's (docs/training.md). The kernels for
norms and rotary embeddings come with fused layers, which are decided here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from realvr.errors import UserError

if TYPE_CHECKING:
    from realvr.backbone.backbone import Backbone

Switch = bool | Literal["auto"]

TITLES = {
    "fused_layers": "fused layers",
    "variable_length": "variable-length attention",
    "split_attention": "split attention",
    "recorded_span": "recorded span",
    "kernels": "adapter kernels",
}
"""Settings that may be ``auto``, and what a run calls them."""


@dataclass(frozen=True)
class Where:
    """Where a model runs, as far as the choice depends on it."""

    cuda: bool
    """On an NVIDIA GPU."""
    flash: bool
    """With flash attention: a GPU that has it, 16 bits."""
    dense: bool
    """No mixture of experts."""
    whole: bool
    """On one device, and nothing of it elsewhere. Several processes with a model each are as many such places."""
    packs: bool = True
    """Whether packed rows can be attended example by example in one kernel: torch has it, and no image needs a mask."""
    merges: bool = True
    """Whether its flash attention can be merged out of parts."""
    bfloat16: bool = True
    """The format of the model."""

    @classmethod
    def of(cls, backbone: Backbone) -> Where:
        """That of a loaded model."""
        import torch

        from realvr.backbone import flash_checks
        from realvr.backbone.packed_attention import has_flash, has_varlen

        head = getattr(backbone.decoder.layers[0].self_attn, "head_dim", 0)
        query = torch.empty(0, head, dtype=backbone.dtype, device=backbone.device)
        return cls(
            cuda=backbone.device.type == "cuda" and torch.version.hip is None,
            flash=has_flash(query),
            merges=has_flash(query) and flash_checks.merges(query),
            dense=not any(".experts." in name for name, _ in backbone.decoder.named_parameters()),
            whole=backbone.whole and len(backbone.devices) == 1,
            packs=has_varlen(query) and not backbone.two_way_images,
            bfloat16=backbone.dtype == torch.bfloat16,
        )

    def takes(self, name: str) -> bool:
        """Whether the fast path of this setting is on here by itself."""
        needed = {
            "kernels": self.bfloat16,
            "split_attention": self.whole and self.flash and self.merges,
            "variable_length": self.whole and self.flash and self.packs,
        }
        return self.cuda and self.dense and needed.get(name, self.whole)

    def settle(self, name: str, switch: Switch) -> bool:
        """The value of a setting: its own, or what ``auto`` stands for here."""
        if switch not in (True, False, "auto"):
            raise UserError(f"{name} is {switch!r}: it is true, false or auto")
        return self.takes(name) if switch == "auto" else bool(switch)


def is_on(switch: Switch) -> bool:
    """A setting that was settled. ``auto`` is neither on nor off, and counts as true where Python asks for a bool."""
    if switch == "auto":
        raise ValueError("'auto' was not settled: see realvr.backbone.automatic")
    return switch


def announcement(names: Sequence[str]) -> str:
    """What a run says about the settings that ``auto`` has switched on."""
    return "fast paths: " + ", ".join(title for name, title in TITLES.items() if name in names)


def spelled_out(flags: Sequence[str], free: bool = False) -> list[str]:
    """Command line with ``True``, ``False`` or ``auto`` behind every such setting, for which it takes the words of a
    settings file (``on``, ``off``, ``yes``, …). Its flag alone means true and with ``no-`` false. ``free``: values that
    belong to no flag may follow it."""
    found: list[str] = []
    for index, flag in enumerate(flags):
        name, equals, value = flag.partition("=")
        *sections, last = name.removeprefix("--").replace("-", "_").split(".")
        if name.startswith("--") and last.removeprefix("no_") in TITLES:
            if last not in TITLES:
                found += ["--" + ".".join([*sections, last.removeprefix("no_")]), "False"]
            elif equals:
                found += [name, _word(value)]
            else:
                found.append(name)
                following = flags[index + 1] if index + 1 < len(flags) else "--"
                alone = following.startswith("--") or (free and following.lower() not in _WORDS)
                found += ["True"] * alone
            continue
        before = found[-1].removeprefix("--").replace("-", "_").split(".")[-1] if found else ""
        found.append(_word(flag) if before in TITLES and found[-1].startswith("--") else flag)
    return found


_WORDS = {
    **dict.fromkeys(("true", "yes", "on", "y", "t", "1"), "True"),
    **dict.fromkeys(("false", "no", "off", "n", "f", "0"), "False"),
    "auto": "auto",
}
"""What may be written for such a setting, as in a settings file: capitals or not. And what the command line reads."""


def _word(value: str) -> str:
    return _WORDS.get(value.lower(), value)
