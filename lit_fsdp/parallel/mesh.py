"""The device mesh both engines shard over."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

REPLICATE, SHARD = "dp_replicate", "dp_shard"


def build_mesh(device_type: str, replicate_degree: int, shard_degree: int, timeout: timedelta) -> DeviceMesh:
    """A 1-D ``(dp_shard)`` mesh, or a 2-D ``(dp_replicate, dp_shard)`` one when there are several copies.

    Neighbouring ranks form a shard group, so that a group stays inside a node. One rank gets a 1-D mesh of one. The
    groups of a 2-D mesh are made here because those that torch makes wait for its own default timeout.

    Args:
        device_type: ``cpu`` or ``cuda``.
        replicate_degree: Copies of the model.
        shard_degree: Ranks over which one copy is split.
        timeout: How long a collective of these groups may wait for a rank.

    Raises:
        AssertionError: The degrees do not multiply to the world size; the recipe's rules refuse that earlier.
    """
    assert replicate_degree * shard_degree == dist.get_world_size()
    if replicate_degree == 1:
        return init_device_mesh(device_type, (shard_degree,), mesh_dim_names=(SHARD,))
    ranks = torch.arange(replicate_degree * shard_degree).reshape(replicate_degree, shard_degree)
    groups = []
    for along in (ranks.T, ranks):  # ranks that hold the same shard of different copies; ranks that share one copy
        own, _ = dist.new_subgroups_by_enumeration(along.tolist(), timeout=timeout)
        groups.append(own)
    return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=(REPLICATE, SHARD))
