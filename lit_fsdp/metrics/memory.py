"""How much memory this process has used at most."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch

GIB = 2**30


def peak_host_bytes() -> int:
    """Largest resident set of this process so far, in bytes (``VmHWM``); 0 where the kernel does not tell.

    ``getrusage`` would do on Linux only until the first fork: a child starts with its parent's peak.
    """
    status = Path("/proc/self/status")
    if not status.is_file():
        return 0
    lines = (line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
    return next((int(line.split()[1]) * 1024 for line in lines), 0)


def reset_peak_host_bytes() -> None:
    """Start :func:`peak_host_bytes` again from what is resident now, where the kernel lets us."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_device_bytes(device: torch.device) -> int:
    """Largest allocation on a CUDA device so far in bytes, or the peak of the host's memory on CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_host_bytes()


def peak_reserved_bytes(device: torch.device) -> int | None:
    """Largest memory that torch's allocator has held on a CUDA device so far, in bytes; None on CPU."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None
