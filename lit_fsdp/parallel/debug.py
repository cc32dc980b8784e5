"""``verbose``: what each rank holds, in ``debug/rank-N.json`` of the run folder.

A hanging rank that gets SIGUSR2 appends the Python stack of each of its threads to ``debug/rank-N.stacks.txt``.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lit_fsdp.parallel.units import clean_name, unsharded_numels
from lit_fsdp.redaction import redact_values


def write_rank(run_folder: Path, module: nn.Module, root: nn.Module, mesh: DeviceMesh, device: str) -> dict[str, Any]:
    """Write this rank's file, let SIGUSR2 write its stacks, and return the file without the single parameters."""
    *replica, shard = mesh.get_coordinate() or [0]
    path = run_folder / "debug" / f"rank-{mesh.get_rank()}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    states: list[dict[str, Any]] = []
    whole = unsharded_numels(root)
    for name, param in module.named_parameters():
        local = param.to_local() if isinstance(param, DTensor) else param
        states.append(
            {
                "name": clean_name(name),
                "shape": list(param.shape),
                "num_whole": whole.get(id(param), param.numel()),
                "num_here": local.numel(),
                "bytes": local.nbytes,
                "placements": [str(placement) for placement in getattr(param, "placements", ())],
                "dtype": str(param.dtype).removeprefix("torch."),
                "device": str(local.device),
                "is_trained": param.requires_grad,
            }
        )
    summary = {
        "rank": mesh.get_rank(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "device": device,
        "copy": replica[0] if replica else 0,
        "shard": shard,
        "shards": mesh.size(mesh.ndim - 1),
        "parameters": len(states),
        "split": sum(state["num_here"] < state["num_whole"] for state in states),
        "elements": sum(state["num_here"] for state in states),
        "bytes": sum(state["bytes"] for state in states),
    }
    path.write_text(json.dumps(redact_values({**summary, "states": states}), indent=1) + "\n")
    stacks = path.with_suffix(".stacks.txt").open("a", encoding="utf-8")
    faulthandler.unregister(signal.SIGUSR2)  # Lightning has undone that of an earlier fit, unnoticed
    faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
    return summary
