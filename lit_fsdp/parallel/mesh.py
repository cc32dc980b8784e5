"""The device mesh both engines shard over."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

REPLICATE, SHARD = "dp_replicate", "dp_shard"


def build_mesh(device_type: str, replicate_degree: int, shard_degree: int) -> DeviceMesh:
    """A 1-D ``(dp_shard)`` mesh, or a 2-D ``(dp_replicate, dp_shard)`` one when there are several copies.

    Neighbouring ranks form a shard group, so that a group stays inside a node. One rank gets a 1-D mesh of one.

    Raises:
        AssertionError: The degrees do not multiply to the world size; the recipe's rules refuse that earlier.
    """
    assert replicate_degree * shard_degree == dist.get_world_size()
    if replicate_degree == 1:
        return init_device_mesh(device_type, (shard_degree,), mesh_dim_names=(SHARD,))
    return init_device_mesh(device_type, (replicate_degree, shard_degree), mesh_dim_names=(REPLICATE, SHARD))
