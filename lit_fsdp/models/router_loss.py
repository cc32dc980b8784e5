"""The auxiliary loss of a mixture of experts that shall use all of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lit_fsdp.models.head import UnknownHead, owner_of_head


def router_loss(model: nn.Module, out: Any) -> torch.Tensor | None:
    """What the model itself would add to its mean loss if it were given labels, or None.

    Models compute it only where their configuration says ``output_router_logits: true``.
    """
    aux = getattr(out, "aux_loss", None)
    if not torch.is_tensor(aux):
        return None
    try:
        owner: Any = owner_of_head(model)
    except UnknownHead:
        return None
    for holder in (owner, owner.config):
        for name in ("router_aux_loss_coef", "aux_loss_coef"):
            factor = getattr(holder, name, None)
            if isinstance(factor, (int, float)):
                return aux * factor
    raise ValueError(f"{type(owner).__name__} returns a router loss, but says no factor for it")
