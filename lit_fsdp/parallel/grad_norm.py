"""Norms and clipping over sharded gradients, one implementation for all engines.

Lightning refuses norm clipping under its FSDP strategy (https://github.com/Lightning-AI/pytorch-lightning/issues/19235);
here the norm is the one an unsharded model would have.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def local_tensors(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """This rank's parts, without the empty ones."""
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return [t for t in local if t.numel()]


def total_norm(
    grads: Iterable[torch.Tensor], shard_group: dist.ProcessGroup | None, comm_device: torch.device | None = None
) -> torch.Tensor:
    """The 2-norm of all gradients together, as an fp32 scalar, equal on all ranks.

    Args:
        grads: DTensors, or the local shards; parts of a tensor that other ranks of ``shard_group`` hold are not here.
        shard_group: Ranks that together hold one copy of the gradients; ``None`` when each rank holds all of it.
        comm_device: Where the group reduces, if the gradients live elsewhere (offloaded to the host).
    """
    local = local_tensors(grads)
    if shard_group is not None and dist.get_rank(
        shard_group
    ):  # those without dimensions are not split: count them once
        local = [t for t in local if t.dim()]
    device = comm_device or (local[0].device if local else torch.device("cpu"))
    norms = list(torch._foreach_norm(local, 2, dtype=torch.float32)) if local else []
    squared = torch.stack(norms).square().sum().to(device) if norms else torch.zeros((), device=device)
    if shard_group is not None and dist.get_world_size(shard_group) > 1:
        dist.all_reduce(squared, group=shard_group)
    return squared.sqrt()


def clip_by_norm(
    grads: Iterable[torch.Tensor],
    max_norm: float,
    shard_group: dist.ProcessGroup | None,
    comm_device: torch.device | None = None,
) -> torch.Tensor:
    """Scale the gradients in place so that their 2-norm is at most ``max_norm``; the norm before is returned.

    Non-finite norms are not clipped away: the gradients become non-finite everywhere, and the step is not taken.
    """
    grads = list(grads)
    norm = total_norm(grads, shard_group, comm_device)
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    local = local_tensors(grads)
    if local:
        torch._foreach_mul_(local, scale.to(local[0].device))
    return norm


def clip_by_value(grads: Iterable[torch.Tensor], max_value: float) -> None:
    """Clamp every gradient element to ``[-max_value, max_value]`` in place; shards need nothing from each other."""
    for local in local_tensors(grads):
        local.clamp_(-max_value, max_value)
