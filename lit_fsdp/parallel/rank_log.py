"""What each rank has and does, in a file of its own: for the day on which one rank is not like the others.

``debug/rank-N.jsonl`` in the run folder, one JSON object per line, appended to by a resumed run:

- ``set_up``: host, process, device, place in the mesh, and each parameter with its whole shape, how it is split and
  how much of it is here
- ``step``: number, seconds, sum of the weights and norm of the gradients held here (float64, after clipping),
  parameters without a gradient or with one that is not finite, peak memory. Ranks that hold copies of the same weights
  show the same sums.
- ``failed``: the exception

A hanging rank tells where it is when it gets SIGUSR2: the Python stack of each of its threads is then appended to
``debug/rank-N.stacks.txt``.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import resource
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from lit_fsdp.parallel.live_units import clean_name
from lit_fsdp.redaction import redact_values

FOLDER = "debug"


class RankLog:
    """Writes the lines of one rank.

    Args:
        run_folder: ``debug/`` is made in it.
        mesh: Copies and shards.
        device: Of this rank.
    """

    def __init__(self, run_folder: Path, mesh: DeviceMesh, device: torch.device) -> None:
        self._device = device
        *copy, shard = mesh.get_coordinate() or [0]
        rank = mesh.get_rank()
        self.summary: dict[str, Any] = {
            "rank": rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "device": str(device),
            "copy": copy[0] if copy else 0,
            "shard": shard,
            "shards": mesh.size(mesh.ndim - 1),
        }
        """Where this rank is and, after :meth:`set_up`, how much it holds."""
        self.path = run_folder / FOLDER / f"rank-{rank}.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._last = time.monotonic()
        self._stacks = self.path.with_suffix(".stacks.txt").open("a", encoding="utf-8")
        faulthandler.unregister(signal.SIGUSR2)  # Lightning has undone that of an earlier fit, unnoticed
        faulthandler.register(signal.SIGUSR2, file=self._stacks, all_threads=True)

    def set_up(self, module: nn.Module, shapes: Mapping[str, tuple[int, ...]], units: Sequence[str]) -> None:
        """The state after sharding.

        Args:
            module: Sharded.
            shapes: Of its parameters before, see :func:`whole_shapes`.
            units: Names of the FSDP units, the root as ``""``.
        """
        states = parameter_states(module, shapes, units)
        split = [state for state in states if state["is_split"]]
        self.summary |= {
            "parameters": len(states),
            "split": len(split),
            "elements": sum(state["elements"] for state in states),
            "bytes": sum(state["bytes"] for state in states),
        }
        self._write("set_up", {**self.summary, "states": states})
        self._last = time.monotonic()

    def step(self, number: int, module: nn.Module) -> None:
        """What is true of this rank after an optimizer step, while the gradients are still there."""
        held = [
            (clean_name(name), _local(p), _local(p.grad)) for name, p in module.named_parameters() if p.requires_grad
        ]
        grads = [grad for _, _, grad in held if grad is not None]
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        self._write(
            "step",
            {
                "step": number,
                "seconds": round(seconds, 6),
                "weights_sum": _number(
                    sum(weight.double().sum().item() for _, weight, _ in held if weight is not None)
                ),
                "gradients_norm": _number(sum(grad.double().square().sum().item() for grad in grads) ** 0.5),
                "without_gradient": [
                    name for name, weight, grad in held if grad is None and weight is not None and weight.numel()
                ],
                "not_finite": [name for name, _, grad in held if grad is not None and not bool(grad.isfinite().all())],
                "peak_bytes": _peak_bytes(self._device),
            },
        )

    def failed(self, error: BaseException) -> None:
        """The exception that ended this rank's part."""
        self._write("failed", {"error": f"{type(error).__name__}: {error}"})

    def _write(self, event: str, values: Mapping[str, Any]) -> None:
        line = json.dumps(redact_values({"event": event, "time": round(time.time(), 3), **values}))
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def whole_shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes by name, of a module that is not sharded yet."""
    return {clean_name(name): tuple(param.shape) for name, param in module.named_parameters()}


def parameter_states(
    module: nn.Module, shapes: Mapping[str, tuple[int, ...]], units: Sequence[str]
) -> list[dict[str, Any]]:
    """How each parameter is held on this rank; arguments as of :meth:`RankLog.set_up`.

    Returns:
        By parameter: ``name``, ``unit``, ``shape`` (whole; ``null`` of one that the module had wrapped itself),
        ``elements`` and ``bytes`` held here, ``how`` (``Shard(dim=0)`` under FSDP2, ``flat`` under FSDP1, ``whole``),
        ``is_split`` (``null`` with the shape), ``dtype``, ``device``, ``is_trained``.
    """
    is_flat = any(isinstance(inner, FullyShardedDataParallel) for inner in module.modules())
    states = []
    for name, param in module.named_parameters():
        local, clean = _local(param), clean_name(name)
        assert local is not None
        shape = shapes.get(clean)
        how = "flat" if is_flat else "whole"
        if isinstance(param, DTensor):
            shape = tuple(param.shape)
            how = ", ".join(str(placement) for placement in param.placements)
        states.append(
            {
                "name": clean,
                "unit": max((unit for unit in units if clean.startswith(f"{unit}.")), key=len, default=""),
                "shape": None if shape is None else list(shape),
                "elements": local.numel(),
                "bytes": local.numel() * local.element_size(),
                "how": how,
                "is_split": None if shape is None else local.numel() < math.prod(shape),
                "dtype": str(param.dtype).removeprefix("torch."),
                "device": str(local.device),
                "is_trained": param.requires_grad,
            }
        )
    return states


def _peak_bytes(device: torch.device) -> int:
    """Allocated on a GPU at most; on a CPU the largest resident set of this process, the load included."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _number(value: float) -> float | str:
    """JSON has no word for what is not finite."""
    return value if math.isfinite(value) else str(value)


def _local(tensor: torch.Tensor | None) -> torch.Tensor | None:
    if tensor is None:
        return None
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
