"""Gradient clipping over sharded gradients, one implementation for both engines.

Lightning refuses norm clipping under its FSDP strategy (https://github.com/Lightning-AI/pytorch-lightning/issues/19235);
here the norm is the one an unsharded model would have.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def total_norm(grads: Iterable[torch.Tensor], shard_group: dist.ProcessGroup | None) -> torch.Tensor:
    """The 2-norm of all gradients together, as an fp32 scalar, equal on all ranks.

    Args:
        grads: DTensors, or the local shards; parts of a tensor that other ranks of ``shard_group`` hold are not here.
        shard_group: Ranks that together hold one copy of the gradients; ``None`` when each rank holds all of it.
    """
    local = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
    local = [g for g in local if g.numel()]
    device = local[0].device if local else torch.device("cuda" if torch.cuda.is_available() else "cpu")
    norms = list(torch._foreach_norm(local, 2, dtype=torch.float32)) if local else []
    squared = torch.stack(norms).square().sum() if norms else torch.zeros((), device=device)
    if shard_group is not None and dist.get_world_size(shard_group) > 1:
        dist.all_reduce(squared, group=shard_group)
    return squared.sqrt()


def clip_by_norm(grads: Iterable[torch.Tensor], max_norm: float, shard_group: dist.ProcessGroup | None) -> torch.Tensor:
    """Scale the gradients in place so that their 2-norm is at most ``max_norm``; the norm before is returned.

    Non-finite norms are not clipped away: the gradients become non-finite everywhere, which the loss will show.
    """
    grads = list(grads)
    norm = total_norm(grads, shard_group)
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    local = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
    if local:
        torch._foreach_mul_(local, scale.to(local[0].device))
    return norm


def clip_by_value(grads: Iterable[torch.Tensor], max_value: float) -> None:
    """Clamp every gradient element to ``[-max_value, max_value]`` in place; shards need nothing from each other."""
    for grad in grads:
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        local.clamp_(-max_value, max_value)


class ClipsShardedGradients:
    """Gradient clipping for a Lightning precision plugin, equal to the unsharded result."""

    shard_group: dist.ProcessGroup | None = None
    last_grad_norm: torch.Tensor | None = None

    def clip_grad_by_norm(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        """Scale all gradients so that their common 2-norm is at most ``clip_val``."""
        self.last_grad_norm = clip_by_norm(_grads(optimizer), clip_val, self.shard_group)

    def clip_grad_by_value(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        """Clamp every gradient element to ``[-clip_val, clip_val]``."""
        clip_by_value(_grads(optimizer), clip_val)


def _grads(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from (p.grad for p in group["params"] if p.grad is not None)
