"""``verbose``: write the shards of each rank to ``debug/rank-N.json`` in the run folder."""

import json
import os
import socket
from pathlib import Path

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lit_fsdp.checkpoint.state import local_part
from lit_fsdp.parallel.units import clean_name, unsharded_numels


def write_rank(folder: Path, module: nn.Module, root: nn.Module, mesh: DeviceMesh) -> None:
    """Write this rank's file."""
    path = folder / f"rank-{mesh.get_rank()}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    states, whole = [], unsharded_numels(root)
    for name, param in module.named_parameters():
        local = local_part(param)
        sizes = {"num_whole": whole.get(id(param), param.numel()), "num_here": local.numel(), "bytes": local.nbytes}
        kind = {"dtype": str(param.dtype), "device": str(local.device), "is_trained": param.requires_grad}
        states.append({"name": clean_name(name), **sizes, **kind})
    place = {"rank": mesh.get_rank(), "mesh": mesh.get_coordinate(), "host": socket.gethostname(), "pid": os.getpid()}
    path.write_text(json.dumps({**place, "states": states}, indent=1) + "\n")
