"""What the hardware can do, and how much memory this process has used of it.

Peak rates are those that the makers state: dense, without sparsity, at boost clock.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import NamedTuple

import torch


class PeakRate(NamedTuple):
    """One device; TFLOP/s by what multiplies, summed in fp32 where the maker tells the sums apart."""

    words: str
    """All of them are in the device's name; the row with most words wins."""
    rates: dict[str, float]
    """TFLOP/s by ``fp8``, ``bf16``, ``fp16``, ``tf32``, ``fp32``; what the device lacks is not there."""
    source: str


def _ampere_on(bf16: float, tf32: float, fp32: float, fp8: float | None = None) -> dict[str, float]:
    """NVIDIA from Ampere on: fp16 and bf16 at one rate."""
    rates = {"bf16": bf16, "fp16": bf16, "tf32": tf32, "fp32": fp32}
    return rates if fp8 is None else {**rates, "fp8": fp8}


_H100_SXM = _ampere_on(989.4, 494.7, 66.9, 1978.9)
_H100_NVL = _ampere_on(835.5, 417.5, 60.0, 1670.5)
_MI300 = {"bf16": 1307.4, "fp16": 1307.4, "tf32": 653.7, "fp32": 163.4, "fp8": 2614.9}

PEAK_RATES = (
    PeakRate("V100 SXM2", {"fp16": 125.0, "fp32": 15.7}, "NVIDIA V100 data sheet, 2020"),
    PeakRate("V100 PCIE", {"fp16": 112.0, "fp32": 14.0}, "NVIDIA V100 data sheet, 2020"),
    PeakRate("T4", {"fp16": 65.0, "fp32": 8.1}, "NVIDIA T4 data sheet, 2019"),
    PeakRate("A100", _ampere_on(312.0, 156.0, 19.5), "NVIDIA A100 data sheet, 2021"),
    PeakRate("A10", _ampere_on(125.0, 62.5, 31.2), "NVIDIA A10 data sheet, 2021"),
    PeakRate("A10G", _ampere_on(70.0, 35.0, 31.52), "NVIDIA A10G data sheet for AWS, 2022"),
    PeakRate("RTX 3090", _ampere_on(71.0, 35.6, 35.6), "NVIDIA GA102 white paper, appendix A"),
    PeakRate("L4", _ampere_on(121.0, 60.0, 30.3, 242.5), "NVIDIA L4 data sheet, 2023; sparse figures halved"),
    PeakRate("L40S", _ampere_on(362.05, 183.0, 91.6, 733.0), "NVIDIA L40S data sheet, 2023"),
    PeakRate("RTX 4090", _ampere_on(165.2, 82.6, 82.6, 330.3), "NVIDIA Ada white paper, appendix A, fp32 sums"),
    PeakRate("H100 HBM3", _H100_SXM, "NVIDIA H100 white paper, table 2 (SXM5)"),
    PeakRate("H100 PCIe", _ampere_on(756.5, 378.0, 51.2, 1513.0), "NVIDIA H100 white paper, table 2 (PCIe)"),
    PeakRate("H100 NVL", _H100_NVL, "NVIDIA H100 data sheet, 2024 (NVL); sparse figures halved"),
    PeakRate("GH200", _H100_SXM, "NVIDIA GH200 data sheet, 2024: the H100 in it; sparse figures halved"),
    PeakRate("H200", _H100_SXM, "NVIDIA H200 data sheet, 2024 (SXM): compute as H100 SXM"),
    PeakRate("H200 NVL", _H100_NVL, "NVIDIA H200 data sheet, 2024 (NVL); sparse figures halved"),
    PeakRate("B200", _ampere_on(2250.0, 1125.0, 75.0, 4500.0), "NVIDIA HGX B200 data sheet, an eighth, halved"),
    PeakRate("GB200", _ampere_on(2500.0, 1250.0, 80.0, 5000.0), "NVIDIA GB200 NVL72 data sheet, 1/72, halved"),
    PeakRate("MI300X", _MI300, "AMD Instinct MI300X data sheet, 2023"),
    PeakRate("MI325X", _MI300, "AMD Instinct MI325X data sheet, 2024"),
)
_SLOWER = ("LAPTOP", "MIG", "D", "Q")
"""A name with one of these words (of Max-Q the last) is another or a part of the device, whose rate is not here."""


def peak_flops(device_name: str, multiplies: str) -> float | None:
    """Peak FLOP/s of a device, dense; None for one that is not in the table.

    Args:
        device_name: As ``torch.cuda.get_device_name`` says it, e.g. ``NVIDIA H100 80GB HBM3``.
        multiplies: ``fp8``, ``bf16``, ``fp16``, ``tf32`` or ``fp32``.
    """
    words = re.split(r"[\s_-]+", device_name.upper())
    if any(word in words for word in _SLOWER):
        return None
    rows = [row for row in PEAK_RATES if all(word in words for word in row.words.upper().split())]
    rate = max(rows, key=lambda row: len(row.words.split())).rates.get(multiplies) if rows else None
    return None if rate is None else rate * 1e12


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
