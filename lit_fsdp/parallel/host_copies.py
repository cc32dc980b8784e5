"""Saved activations in host memory between forward and backward.

Copies run on the stream that computes, in order with it: nothing waits on the CPU, and nothing overlaps either.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves


class HostCopy:
    """A tensor's values in host memory (pinned where they come from an accelerator), and how to get it back."""

    __slots__ = ("device", "num_bytes", "stride", "values")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.device, self.stride = tensor.device, tensor.stride()
        self.values = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False)
        # non-blocking is safe: the host never reads the values, and the copy back is queued behind this one
        self.values.copy_(tensor.detach(), non_blocking=True)
        self.num_bytes = self.values.nbytes

    def restore(self) -> torch.Tensor:
        """The tensor on its device again, with the strides it had."""
        if self.values.stride() == self.stride:
            return self.values.to(self.device, non_blocking=True)
        tensor = torch.empty_strided(self.values.shape, self.stride, dtype=self.values.dtype, device=self.device)
        return tensor.copy_(self.values, non_blocking=True)


def to_host(tensor: torch.Tensor) -> HostCopy | torch.Tensor:
    """A copy in host memory; expanded views and tensors that are not plain strided ones stay as they are."""
    is_plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout == torch.strided
    if not is_plain or any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)):
        return tensor
    return HostCopy(tensor)


class OffloadedForward:
    """A block's forward whose saved tensors wait in host memory.

    Parameters never move, nor do views of them: the engine frees and gathers their storage by itself, and a copy would
    keep whole weights alive. Inputs without gradient (masks, position embeddings) stay too, as all blocks share them.

    Args:
        block: The module, for its parameters at the time of the call.
        forward: What is called.
    """

    def __init__(self, block: nn.Module, forward: Callable[..., Any]) -> None:
        functools.update_wrapper(self, forward)
        self._parameters_of, self._forward = block.parameters, forward
        self._is_training: Callable[[], bool] = lambda: block.training
        self.num_bytes = 0
        """Bytes that the last forward moved through hooks."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the block; in evaluation nothing is moved."""
        if not (self._is_training() and torch.is_grad_enabled()):
            return self._forward(*args, **kwargs)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        stays = [*self._parameters_of(), *(tensor for tensor in inputs if not tensor.requires_grad)]
        pointers = {_pointer(tensor) for tensor in stays}
        self.num_bytes = 0

        def pack(tensor: torch.Tensor) -> HostCopy | torch.Tensor:
            # the base finds parameters of units inside the block, which are gathered only later
            if isinstance(tensor._base, nn.Parameter) or _pointer(tensor) in pointers:
                return tensor
            packed = to_host(tensor)
            if isinstance(packed, HostCopy):
                self.num_bytes += packed.num_bytes
            return packed

        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            return self._forward(*args, **kwargs)


def _unpack(packed: HostCopy | torch.Tensor) -> torch.Tensor:
    return packed.restore() if isinstance(packed, HostCopy) else packed


def _pointer(tensor: torch.Tensor) -> int:
    """Address of the storage; 0 for what has none (on meta, freed, or empty)."""
    return 0 if type(tensor) not in (torch.Tensor, nn.Parameter) else tensor.untyped_storage().data_ptr()
