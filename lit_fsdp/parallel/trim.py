"""On CPUs: return the gaps in glibc's heap between blocks, where they would raise the peak of resident memory."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from lit_fsdp.host import return_freed_memory

_SLACK = 0.15
_STATM = Path("/proc/self/statm")


class Trimmer:
    """Trims the heap at the borders of blocks, in both passes, if more is resident than at any border after a trim.

    glibc keeps freed memory of up to 32 MiB each for later. Between the inputs of recomputed blocks, which stay until
    the backward pass, it becomes gaps, which at long rows are half as large as everything in use. Gaps that are
    returned cost page faults when they are used again, so only those around the peak are: the limit rises to it in the
    first step. ``_SLACK`` is the share above the limit that is accepted.
    """

    def __init__(self) -> None:
        self.limit = 0.0

    def __call__(self, *_: Any) -> None:
        """Trim if it is worth it."""
        if _resident() > self.limit * (1 + _SLACK):
            return_freed_memory()
            self.limit = max(self.limit, _resident())

    def add_to(self, blocks: Iterable[nn.Module]) -> None:
        """Call this after the forward and before the backward pass of each block in training."""
        for block in blocks:
            block.register_forward_hook(self._after_forward)

    def _after_forward(self, block: nn.Module, args: Any, out: Any) -> None:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        self()
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(self)
                break


def _resident() -> int:
    """Resident set of this process in bytes; 0 if the kernel does not report it, so that nothing is trimmed."""
    if not _STATM.is_file():
        return 0
    return int(_STATM.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
