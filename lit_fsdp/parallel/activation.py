"""Activation checkpointing on whole FSDP units, the same way for both engines.

The unit's own ``forward`` is replaced instead of wrapping the module: parameter names stay the model's own, and
the recomputation happens inside the engine's hooks, so that it repeats no all-gather.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lit_fsdp.config.activation import ActivationConfig


def apply_activation_checkpointing(blocks: Iterable[nn.Module], config: ActivationConfig) -> None:
    """Make each block keep only its inputs in training and recompute the rest in the backward pass, in place.

    Losses and gradients are bit-equal to ``none``: the recomputation restores the RNG state of the forward.
    """
    if config.mode == "none":
        return
    for block in blocks:
        if not is_checkpointed(block):
            block.forward = _recompute(block, block.forward)


def is_checkpointed(block: nn.Module) -> bool:
    """Whether this block recomputes its activations."""
    return hasattr(block.forward, "_recomputes")


def _recompute(block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not (block.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    checkpointed._recomputes = True  # type: ignore[attr-defined]
    return checkpointed
