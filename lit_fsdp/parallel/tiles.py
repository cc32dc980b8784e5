"""Compute feed-forward layers in tiles over positions, so that their wide activations exist for one tile only."""

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.utils.checkpoint import checkpoint

_FEED_FORWARD = re.compile("mlp|ffn|feed_?forward", re.IGNORECASE)
_OTHERS = re.compile("expert|router|attn|attention", re.IGNORECASE)  # mixtures count tokens, attention mixes them
_MIXES = (_ConvNd, _BatchNorm, nn.RNNBase)


def apply_tiles(block: nn.Module, tiles: int | None) -> bool:
    """Compute the feed-forward layers of a block in tiles, in place; returns whether any layer is tiled.

    Backward recomputes each layer, one tile at a time. Without ``tiles`` the original layers are restored.
    """
    found = [child for name, child in block.named_children() if _is_by_position(name, child)]
    for layer in found:
        forward: Any = getattr(layer.forward, "_whole", layer.forward)
        if tiles is not None:
            layer.forward = _tiled(layer, forward, tiles)
        elif forward is not layer.forward:
            layer.forward = forward
    return bool(found) and tiles is not None


def _is_by_position(name: str, layer: nn.Module) -> bool:
    """Whether a layer takes only the activations, and is a feed-forward layer by its name or class name."""
    names = [f"{inner} {type(module).__name__}" for inner, module in layer.named_modules()]
    takes = inspect.signature(layer.forward).parameters
    return (
        _FEED_FORWARD.search(f"{name} {names[0]}") is not None
        and not any(_OTHERS.search(one) for one in (name, *names))
        and not any(isinstance(module, _MIXES) for module in layer.modules())
        and len(takes) == 1
        and sum(p.dim() == 2 for p in layer.parameters()) >= 2 == max(p.dim() for p in layer.parameters())
    )


def _tiled(layer: nn.Module, forward: Callable[..., Any], tiles: int) -> Callable[..., Any]:
    @functools.wraps(forward)
    def call(x_BTD: torch.Tensor) -> Any:
        parts = x_BTD.chunk(tiles, dim=-2)
        if len(parts) == 1 or not (layer.training and torch.is_grad_enabled()):
            return forward(x_BTD)
        return torch.cat([checkpoint(forward, part, use_reentrant=False) for part in parts], dim=-2)

    call._whole = forward  # type: ignore[attr-defined]
    return call
