"""The device mesh of a run, and the process groups of ranks that divide experts."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lit_fsdp.config.strategy import StrategyConfig

REPLICATE, SHARD, CONTEXT = "dp_replicate", "dp_shard", "context"


def build_mesh(device_type: str, replicate_degree: int, shard_degree: int, timeout: timedelta) -> DeviceMesh:
    """Build a ``(dp_shard)`` or ``(dp_replicate, dp_shard)`` mesh; neighboring ranks of a node form a shard group."""
    if replicate_degree == 1:
        return init_device_mesh(device_type, (shard_degree,), mesh_dim_names=(SHARD,))
    ranks = torch.arange(replicate_degree * shard_degree).reshape(replicate_degree, shard_degree)
    groups: list[Any] = [_group_along(ranks, dim, timeout) for dim in range(2)]
    return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=(REPLICATE, SHARD))


def build_context_mesh(device_type: str, copies: int, shards: int, degree: int, timeout: timedelta) -> DeviceMesh:
    """Build the mesh ``(dp_replicate, dp_shard, context)``; other dimensions than the last are left out if they are 1.

    Parameters are sharded over the last two, which are the ``dp_shard`` of :func:`build_mesh`.
    """
    sizes = {REPLICATE: copies, SHARD: shards // degree, CONTEXT: degree}
    sizes = {name: size for name, size in sizes.items() if size > 1}
    ranks = torch.arange(copies * shards).reshape(*sizes.values())
    groups: list[Any] = [_group_along(ranks, dim, timeout) for dim in range(ranks.ndim)]
    # from one group, torch builds a mesh of one dimension and does not accept its ranks
    given = (groups, device_type, ranks) if ranks.ndim > 1 else (groups[0], device_type)
    return DeviceMesh.from_group(*given, mesh_dim_names=tuple(sizes))


def data_ranks(trainer: Any) -> tuple[int, int]:
    """Return the number of data-parallel ranks, and the index of this one; a context group shares an index."""
    config = getattr(trainer.strategy, "config", None)
    degree = config.context_config.degree if isinstance(config, StrategyConfig) else 1
    return trainer.world_size // degree, trainer.global_rank // degree


def _group_along(ranks: torch.Tensor, dim: int, timeout: timedelta) -> dist.ProcessGroup:
    """This rank's group along a dimension of a mesh; groups that torch creates have its default timeout."""
    along = ranks.movedim(dim, -1).reshape(-1, ranks.shape[dim]).tolist()
    options: Any = {"timeout": timeout}
    return dist.new_subgroups_by_enumeration(along, **options)[0]  # type: ignore[return-value]


def build_expert_groups(
    device_type: str, copies: int, shards: int, degree: int, timeout: timedelta
) -> tuple[dist.ProcessGroup, DeviceMesh]:
    """Build the group of ranks that divide experts, and the mesh over which each shards and replicates its part."""
    ranks = torch.arange(copies * shards).view(copies, -1, degree)
    names = (REPLICATE, "expert_shard")
    groups: list[Any] = [_group_along(ranks, dim, timeout) for dim in (2, 1, 0)]
    group, shard_group, copy_group = groups
    if copies == 1:
        return group, DeviceMesh.from_group(shard_group, device_type, mesh_dim_names=names[1:])
    mesh: Any = ranks[:, :, dist.get_rank(group)]
    return group, DeviceMesh.from_group([copy_group, shard_group], device_type, mesh=mesh, mesh_dim_names=names)
