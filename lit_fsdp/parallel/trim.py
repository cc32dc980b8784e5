"""On CPUs, return free memory of a fragmented heap to the system, near the peak of resident memory."""

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
    """Trims the heap between blocks, in both passes, if the resident set exceeds its largest value after a trim.

    glibc keeps freed memory (up to 32 MiB per allocation) for later, but before 2.39 much of it cannot be reused for
    tensors, at long rows half as much as is in use (``findings/heap-grows-to-twice-the-tensors-by-thread-caches.sh``).
    Returned memory costs page faults when it is used again, so only that near the peak is returned: the limit rises
    during the first step. The constant ``_SLACK`` is the accepted share above the limit. Delete this class when glibc
    2.39 is the oldest release to support.
    """

    def __init__(self) -> None:
        self.limit = 0.0

    def __call__(self, *_: Any) -> None:
        """Trim if the resident set is above the limit."""
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
