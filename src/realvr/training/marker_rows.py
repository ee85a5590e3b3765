"""The markers' rows of the input and output embeddings, trained while the tables around them stay frozen.

LoRA leaves both tables as they are, and new markers all start at the mean embedding: without this, Stage 1 would teach
a model to reason behind tokens that it cannot tell apart. The rows are parameters of their own, put in the place of the
table's at each call: gradients, moments and 32-bit copies have the size of three rows, and no table is ever copied.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from realvr.backbone.backbone import Backbone
from realvr.errors import UserError
from realvr.families import Stock

NAME = "marker_rows"
"""The parameter, on the table whose rows it replaces; a tied head reads those of the embedding."""


def train_marker_rows(backbone: Backbone) -> None:
    """Make the rows of the three markers trainable, in the embedding and, unless they are tied, in the head."""
    markers, model = backbone.markers, backbone.model
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(embedding, nn.Embedding):
        raise UserError("lora.targets names the token embedding, whose marker rows are trained already: leave it out")
    ids = torch.tensor([markers.start, markers.slot, markers.end], device=embedding.weight.device)
    tied = head.weight is embedding.weight
    for table in (embedding,) if tied else (embedding, head):
        table.register_parameter(NAME, nn.Parameter(table.weight.detach()[ids].clone()))
    embedding.register_forward_hook(_Input(ids, embedding))
    head.register_forward_hook(_Output(ids, embedding if tied else head))


@torch.no_grad()
def fold_marker_rows(model: Stock, state: dict[str, Tensor]) -> None:
    """Put trained rows into the tables of ``state``, the weights of the model by name. The model's own stay as they
    are."""
    copies: dict[int, Tensor] = {}  # a tied head has the table of the embedding
    for name, table in model.named_modules():
        for hook in table._forward_hooks.values():
            if isinstance(hook, _Input | _Output):
                weight = state[f"{name}.weight"]
                if weight.data_ptr() not in copies:
                    copies[weight.data_ptr()] = weight.to("cpu", copy=True)
                state[f"{name}.weight"] = copies[weight.data_ptr()]
                state[f"{name}.weight"][hook.ids.cpu()] = hook.rows.detach().to(weight.dtype).cpu()


class _Hook:
    """A hook as an object, so that a copied model has hooks that read its own rows."""

    def __init__(self, ids: Tensor, owner: nn.Module) -> None:
        self.ids, self.owner = ids, owner

    @property
    def rows(self) -> Tensor:
        found: Tensor = getattr(self.owner, NAME)
        return found


class _Input(_Hook):
    """Embeddings of markers come from the rows. They stay in the graph where there is no marker: ranks must agree."""

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        scale: Any = getattr(module, "embed_scale", None)  # Gemma scales inside its embedding
        rows = self.rows.to(output.dtype)  # an engine may keep them in 32 bits
        rows = rows if scale is None else rows * scale.to(rows.dtype)
        place = args[0][..., None] == self.ids.to(args[0].device)
        return torch.where(place.any(-1, keepdim=True), place.to(rows.dtype) @ rows, output)


class _Output(_Hook):
    """Logits of markers come from the rows."""

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        # In place, on the fresh result of the head: a copy of all logits would be the largest tensor of the step.
        rows = self.rows.to(args[0].dtype)
        return output.index_copy_(-1, self.ids.to(output.device), nn.functional.linear(args[0], rows))
