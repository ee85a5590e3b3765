"""Direct-SFT with the evidence as an auxiliary loss: the control that sees what LVR-SFT sees, without a span."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor, nn
from typing_extensions import override

from realvr.backbone.backbone import Backbone
from realvr.training.methods.lvr_sft import LvrSft, LvrSftConfig
from realvr.training.settings import SftSettings
from realvr.training.sft_batch import SftBatch


class DirectAuxConfig(LvrSftConfig):
    """Reconstruction of the evidence from one state, and packed rows."""

    auxiliary_targets: int = Field(default=8, ge=1)
    """Targets of an example: one for each box, the last repeated, as in a span of that many slots."""


class DirectAux(LvrSft):
    """Direct-SFT, and reconstruction of the evidence from the state before the response.

    Not in the paper: the control for "LVR-SFT was shown the ordered evidence, Direct-SFT was not". Rows, targets and
    error are those of LVR-SFT with ``span: fixed``. A linear head reads all targets from the state at the last position
    of the prompt, which also predicts the first token of the response. The head is not exported: the model answers as
    Direct does. Earlier turns have no targets.
    """

    name, order, Config = "direct-aux", 2, DirectAuxConfig
    fixed = {"model.latents": 0, "span": "fixed"}
    config: DirectAuxConfig

    def __init__(self, backbone: Backbone, config: DirectAuxConfig) -> None:
        super().__init__(backbone, config)
        self.auxiliary = config.auxiliary_targets
        width = backbone.width
        self.head = nn.Linear(width, self.auxiliary * width, device=backbone.device, dtype=backbone.dtype)

    @override
    def modules(self) -> dict[str, nn.Module]:
        return {**super().modules(), "head": self.head}

    @classmethod
    @override
    def targets_each(cls, settings: SftSettings) -> int:
        config = settings.method
        return config.auxiliary_targets if isinstance(config, DirectAuxConfig) else 0

    def target_states(self, hidden_RTD: Tensor, b: SftBatch) -> tuple[Tensor, Tensor]:
        """What the head makes of the last state of each prompt, target by target."""
        row_E, column_E = b.predict_M2[b.opens_E].unbind(-1)  # each predicts the first token of a response
        read_EKD = self.head(hidden_RTD[row_E, column_E]).unflatten(-1, (self.auxiliary, -1))
        number_N = torch.arange(len(b.slot_example_N), device=hidden_RTD.device) % self.auxiliary
        return read_EKD[b.slot_example_N, number_N], number_N == 0
