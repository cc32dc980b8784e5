"""Peak rates of the hardware, and peak memory of this process.

Rates are the vendors' figures: dense, without sparsity, at boost clock.
"""

import contextlib
import functools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One row of ``hardware.yaml``, with its name on the command line (``h100-80gb``)."""

    name: str
    words: str
    """All of these words must be in the device name; the row with most words wins."""
    memory_gib: float
    tflops: dict[str, float]
    """By ``fp8``, ``bf16``, ``fp16``, ``tf32``, ``fp32``; dtypes that the device lacks are missing."""
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
"""A name with one of these words (Q is from Max-Q) is another device, or a part of one, whose rate is unknown."""


def peak_flops(device_name: str, multiplies: str) -> float | None:
    """Peak FLOP/s of a device, dense, in ``fp8``, ``bf16``, ``fp16``, ``tf32`` or ``fp32``; None if not in the table.

    The ``device_name`` is the result of ``torch.cuda.get_device_name``, e.g. ``NVIDIA H100 80GB HBM3``.
    """
    words = set(re.split(r"[\s_-]+", device_name.upper()))
    rows = [row for row in gpus() if words.isdisjoint(_SLOWER) and words.issuperset(row.words.upper().split())]
    rate = max(rows, key=lambda row: len(row.words.split())).tflops.get(multiplies) if rows else None
    return None if rate is None else rate * 1e12


def host_bytes(groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Physical memory of this host in bytes, or a lower limit of this process's control groups (cgroup v2)."""
    found = re.search(r"^0::/(.*)$", own.read_text(encoding="utf-8"), re.M) if own.is_file() else None
    folder = groups / (found[1] if found else "")
    files = [one / "memory.max" for one in (folder, *folder.parents) if one.is_relative_to(groups)]
    limits = [file.read_text(encoding="ascii").strip() for file in files if file.is_file()]
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *(int(limit) for limit in limits if limit.isdecimal())])  # max: no limit


def swap_bytes() -> int:
    """Swap space of this host in bytes; 0 if the kernel does not report it."""
    file = Path("/proc/meminfo")
    found = re.search(r"^SwapTotal: *(\d+) kB", file.read_text(encoding="ascii"), re.M) if file.is_file() else None
    return int(found[1]) * 1024 if found else 0


def peak_host_bytes() -> int:
    """Largest resident set of this process so far, in bytes (``VmHWM``); 0 if the kernel does not report it."""
    # not getrusage: there a fork starts with its parent's peak
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s+(\d+)", status.read_text()) if status.is_file() else None
    return int(found[1]) * 1024 if found else 0


def reset_peak_host_bytes() -> None:
    """Reset :func:`peak_host_bytes` to the memory resident now, if the kernel allows it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def is_accelerator(device: torch.device | str) -> bool:
    """Whether a device or device type is not the CPU, so that ``torch.get_device_module`` applies."""
    return torch.device(device).type != "cpu"


def to_device(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Copy host numbers to a tensor on a device asynchronously."""
    found = torch.tensor(numbers, dtype=dtype)
    return found.pin_memory().to(device, non_blocking=True) if is_accelerator(device) else found


def device_name(device: torch.device) -> str:
    """Name of a device, or ``CPU``."""
    return torch.get_device_module(device).get_device_name(device) if is_accelerator(device) else "CPU"


def peak_device_bytes(device: torch.device) -> int:
    """Peak allocated memory of an accelerator so far in bytes, or peak host memory on CPU."""
    return torch.get_device_module(device).max_memory_allocated(device) if is_accelerator(device) else peak_host_bytes()


def peak_reserved_bytes(device: torch.device) -> int | None:
    """Peak memory reserved by torch's allocator on an accelerator so far, in bytes; None on CPU."""
    return torch.get_device_module(device).max_memory_reserved(device) if is_accelerator(device) else None
