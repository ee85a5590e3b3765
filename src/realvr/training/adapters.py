"""Full fine-tuning or low-rank adapters (peft), behind one small surface."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from realvr.backbone.backbone import Backbone
from realvr.errors import UserError


class Adapters:
    """With ``rank`` 0 every decoder weight is trained; otherwise adapters on the named linear layers of the decoder."""

    def __init__(self, backbone: Backbone, settings: Any) -> None:
        self.rank = int(settings.rank)
        self.peft: Any = None
        backbone.freeze_vision()
        if not self.rank:
            return
        from peft import LoraConfig, get_peft_model

        suffixes = tuple(settings.targets)
        names = [
            name
            for name, _ in backbone.model.named_modules()
            if name.endswith(suffixes) and ".language_model." in f".{name}."
        ]
        if not names:
            raise UserError(f"lora.targets {list(settings.targets)} match no layer of the language model")
        config = LoraConfig(r=self.rank, lora_alpha=settings.alpha, lora_dropout=settings.dropout, target_modules=names)
        # peft replaces the layers in place: the backbone keeps its model object and its call paths.
        self.peft = get_peft_model(backbone.model, config)

    @contextmanager
    def reference(self) -> Iterator[None]:
        """The policy without its adapters."""
        with self.peft.disable_adapter():
            yield

    @contextmanager
    def still(self) -> Iterator[None]:
        """Without the adapters' dropout: what is sampled is the policy itself."""
        noisy = [m for m in self.peft.modules() if isinstance(m, nn.Dropout) and m.training] if self.peft else []
        for module in noisy:
            module.eval()
        try:
            yield
        finally:
            for module in noisy:
                module.train()

    def export(self, backbone: Backbone, directory: Path) -> None:
        """Write a plain HF directory, adapters merged into a copy so that training can go on."""
        if self.peft is None:
            backbone.save(directory)
            return
        merged = copy.deepcopy(self.peft).merge_and_unload()
        plain = copy.copy(backbone)
        plain.model = merged
        plain.save(directory)
