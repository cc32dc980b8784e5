"""What the hardware can do, and how much memory this process has used of it.

Peak rates are those that the makers state: dense, without sparsity, at boost clock.
"""

from __future__ import annotations

import contextlib
import functools
import re
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One row of ``hardware.yaml``, under the name that the command line gives it (``h100-80gb``)."""

    name: str
    words: str
    """All of them are in the name that the device gives itself; the row with most words wins."""
    memory_gib: float
    tflops: dict[str, float]
    """By ``fp8``, ``bf16``, ``fp16``, ``tf32``, ``fp32``; what the device lacks is not there."""
    link_gb_per_second: float
    """To the other devices of its node, in each direction, in 10**9 bytes."""
    host_gb_per_second: float
    """From and to host memory, in each direction, in 10**9 bytes."""
    source: str


@functools.cache
def gpus() -> tuple[Gpu, ...]:
    """All rows of ``hardware.yaml``."""
    text = Path(__file__).with_name("hardware.yaml").read_text(encoding="utf-8")
    return tuple(Gpu(**row) for row in yaml.safe_load(text))


_SLOWER = {"LAPTOP", "MIG", "D", "Q"}
"""A name with one of these words (of Max-Q the last) is another or a part of the device, whose rate is not here."""


def peak_flops(device_name: str, multiplies: str) -> float | None:
    """Peak FLOP/s of a device, dense, in ``fp8``, ``bf16``, ``fp16``, ``tf32`` or ``fp32``; None if not in the table.

    ``device_name`` is what ``torch.cuda.get_device_name`` says, e.g. ``NVIDIA H100 80GB HBM3``.
    """
    words = set(re.split(r"[\s_-]+", device_name.upper()))
    rows = [row for row in gpus() if words.isdisjoint(_SLOWER) and words.issuperset(row.words.upper().split())]
    rate = max(rows, key=lambda row: len(row.words.split())).tflops.get(multiplies) if rows else None
    return None if rate is None else rate * 1e12


def peak_host_bytes() -> int:
    """Largest resident set of this process so far, in bytes (``VmHWM``); 0 where the kernel does not tell."""
    # not getrusage: a fork starts with its parent's peak there
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s+(\d+)", status.read_text()) if status.is_file() else None
    return int(found[1]) * 1024 if found else 0


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
