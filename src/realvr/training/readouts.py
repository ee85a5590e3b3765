"""How much each answer reads each latent: one pass over all answers as branches behind the trajectory."""

from __future__ import annotations

import torch
from torch import Tensor

from realvr.backbone.attention import Probe
from realvr.backbone.backbone import Backbone
from realvr.latent.span import decoder_pass
from realvr.latent.state import State
from realvr.maths import credit
from realvr.training.rl_batch import RlBatch


def readouts(
    backbone: Backbone,
    after: State,
    b: RlBatch,
    *,
    gradient: bool = False,
    checkpointed: bool = False,
    split: bool = False,
) -> Tensor:
    """``r`` of the correct answer and of each wrong one, (B, Y, K). ``split``: see `realvr.latent.span.score`."""
    answers, real = b.answers_BYS.shape[1], b.answers_real_BYS
    state = after if gradient else after.detach()
    probe = Probe(columns=state.slots, gradient=gradient)
    offset = (real.long().cumsum(-1) - 1).clamp(min=0)
    segment = torch.arange(answers, device=real.device)[None, :, None].expand_as(real)
    with torch.set_grad_enabled(gradient and torch.is_grad_enabled()):
        decoder_pass(
            backbone,
            state,
            backbone.embed(b.answers_BYS.flatten(1)),
            (state.next_B[:, None, None] + offset).flatten(1),
            real_BT=real.flatten(1),
            segment_BT=segment.flatten(1),
            probes=[probe],
            branches=answers if split else 0,
            checkpointed=checkpointed and gradient,
        )
        return credit.readout(probe.stack(), credit.own_rows(b.content_BYS))
