"""The device mesh of a run, and the process groups of ranks that divide experts."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

REPLICATE, SHARD = "dp_replicate", "dp_shard"


def build_mesh(device_type: str, replicate_degree: int, shard_degree: int, timeout: timedelta) -> DeviceMesh:
    """Build a ``(dp_shard)`` or ``(dp_replicate, dp_shard)`` mesh; neighboring ranks of a node form a shard group."""
    if replicate_degree == 1:
        return init_device_mesh(device_type, (shard_degree,), mesh_dim_names=(SHARD,))
    ranks = torch.arange(replicate_degree * shard_degree).reshape(replicate_degree, shard_degree)
    # created here because groups that torch creates have its default timeout
    groups: list[Any] = [
        dist.new_subgroups_by_enumeration(along.tolist(), timeout=timeout)[0] for along in (ranks.T, ranks)
    ]
    return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=(REPLICATE, SHARD))


def build_expert_groups(
    device_type: str, copies: int, shards: int, degree: int, timeout: timedelta
) -> tuple[dist.ProcessGroup, DeviceMesh]:
    """Build the group of ranks that divide experts, and the mesh over which each shards and replicates its part."""
    options: Any = {"timeout": timeout}
    ranks = torch.arange(copies * shards).view(copies, -1, degree)
    names = (REPLICATE, "expert_shard")
    groups: list[Any] = [
        dist.new_subgroups_by_enumeration(along.reshape(-1, along.shape[-1]).tolist(), **options)[0]
        for along in (ranks, ranks.transpose(1, 2), ranks.permute(1, 2, 0))
    ]
    group, shard_group, copy_group = groups
    if copies == 1:
        return group, DeviceMesh.from_group(shard_group, device_type, mesh_dim_names=names[1:])
    mesh: Any = ranks[:, :, dist.get_rank(group)]
    return group, DeviceMesh.from_group([copy_group, shard_group], device_type, mesh=mesh, mesh_dim_names=names)
