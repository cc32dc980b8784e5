"""What torch sees on this machine, printed as one line of JSON by a process of its own.

A driver that hangs then ends a child and not the doctor, and no CUDA context stays behind.
"""

from __future__ import annotations

import ctypes
import glob
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from typing import Any

MARK = "\x1e"
_SECONDS = 120
_LIBRARY_PLACES = ("LD_LIBRARY_PATH", "LD_PRELOAD")


def ask_torch(seconds: float = _SECONDS) -> dict[str, Any]:
    """The facts of :func:`gather`, or ``{"error": why}`` if torch cannot be loaded or does not answer."""
    words = [sys.executable, "-m", "lit_fsdp.launch.checks.torch_facts"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=seconds, check=False)  # noqa: S603
    except subprocess.TimeoutExpired:
        return {"error": f"no answer in {seconds:.0f} s"}
    # the mark itself ends a line for splitlines
    line = next((line for line in done.stdout.split("\n") if line.startswith(MARK)), None)
    if line is None:
        said = " ".join(done.stderr.split())[-400:]
        return {"error": said or f"ended with exit code {done.returncode}"}
    return json.loads(line.removeprefix(MARK))


def gather() -> dict[str, Any]:
    """Builds of torch and NCCL, the driver, and every GPU that this process may use."""
    import torch
    import torch.distributed as dist

    count = torch.cuda.device_count()
    devices = []
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        capability = [properties.major, properties.minor]
        devices.append({"name": properties.name, "memory_bytes": properties.total_memory, "capability": capability})
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    return {
        "torch": torch.__version__,
        "cuda_build": torch.version.cuda,
        "hip_build": torch.version.hip,
        "available": torch.cuda.is_available(),
        "driver_cuda": _driver_cuda(),
        "nvidia_files": sorted(glob.glob("/dev/nvidia[0-9]*")),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "devices": devices,
        "bf16": bool(count) and torch.cuda.is_bf16_supported(including_emulation=False),
        "no_peer": [[a, b] for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)],
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "nccl": dist.is_available() and dist.is_nccl_available(),
        "nccl_runs": _nccl_that_runs() if count else None,
        "nccl_package": _nccl_package(torch.version.cuda),
        "nccl_loaded": _loaded("libnccl"),
        "nccl_elsewhere": _elsewhere("libnccl.so"),
    }


def _driver_cuda() -> str | None:
    """Newest CUDA that the driver can run, ``12.8``; ``None`` without a driver."""
    version = ctypes.c_int()
    try:
        library = ctypes.CDLL("libcuda.so.1")
        if library.cuDriverGetVersion(ctypes.byref(version)):
            return None
    except OSError:
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def _nccl_that_runs() -> str | None:
    import torch

    try:
        found: Any = torch.cuda.nccl.version()
    except (RuntimeError, AttributeError):  # a build without NCCL
        return None
    return ".".join(map(str, found)) if isinstance(found, tuple) else str(found)


def _nccl_package(cuda: str | None) -> str | None:
    """Version of the wheel that torch brings NCCL in; ``None``: it is compiled in, or comes from the system."""
    if cuda is None:
        return None
    try:
        return importlib.metadata.version(f"nvidia-nccl-cu{cuda.split('.')[0]}")
    except importlib.metadata.PackageNotFoundError:
        return None


def _loaded(name: str) -> list[str]:
    """Files of a library that this process has mapped."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            return sorted({line.split()[-1] for line in maps if name in line})
    except OSError:
        return []


def _elsewhere(name: str) -> list[str]:
    """Files of a library in the places that the environment puts before all others."""
    folders = [place for key in _LIBRARY_PLACES for place in re.split("[: ]", os.environ.get(key, "")) if place]
    found = [path for place in folders for path in ([place] if name in place else glob.glob(f"{place}/{name}*"))]
    return sorted(set(found))


if __name__ == "__main__":
    print(MARK + json.dumps(gather()), flush=True)
