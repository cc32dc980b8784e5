"""Bytes that an optimizer step sends over the network, for each way of sharding.

Every collective is counted as a ring over its ranks, neighbors in the same node side by side, as NCCL lays them: an
all-gather or reduce-scatter of S bytes over n ranks makes each rank pass on S (n-1)/n bytes in n-1 steps, an all-reduce
twice that. A ring leaves a node once, so these are also the bytes that leave the node, however many of its ranks are in
the ring; rings of different ranks of a node (the copies of hybrid sharding) add up.

Source: ZeRO, arXiv:1910.02054, section 7; hybrid sharding: PyTorch FSDP, arXiv:2304.11277, section 3.2.2.
"""

from __future__ import annotations

from dataclasses import dataclass

from lit_fsdp.config.strategy import Sharding

RING_STEP_SECONDS = 1e-5
"""Assumed for one step of a ring whatever it carries; a network of InfiniBand class."""
_GATHERS = {"full_shard": 2, "shard_grad_op": 1, "no_shard": 0, "hybrid_shard": 2, "hybrid_shard_zero2": 1}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How ranks share copies of the model: whole nodes, or a part of one."""

    sharding: Sharding
    ranks: int
    ranks_per_node: int = 8
    shard_ranks: int | None = None
    """Ranks that share one copy under hybrid sharding; default: those of a node."""

    @property
    def degree(self) -> int:
        """Ranks that share one copy."""
        if self.sharding == "no_shard":
            return 1
        if self.sharding in ("full_shard", "shard_grad_op"):
            return self.ranks
        return min(self.ranks, self.shard_ranks or self.ranks_per_node)

    @property
    def copies(self) -> int:
        """Copies of the model."""
        return self.ranks // self.degree


@dataclass(frozen=True)
class Traffic:
    """What one optimizer step sends."""

    rank_bytes: float
    """From each rank to its neighbor, over whatever link is between them."""
    node_bytes: float
    """Out of each node over the network; 0 on one node."""
    ring_steps: int
    """One after another, in rings that leave a node."""

    def seconds(self, bytes_per_second: float) -> float:
        """Time on the network at this rate per node and direction, if nothing hides it."""
        return self.node_bytes / bytes_per_second + self.ring_steps * RING_STEP_SECONDS


def step_traffic(
    num_params: int, num_units: int, layout: Layout, gather_bytes: int = 2, reduce_bytes: float = 4, forwards: int = 1
) -> Traffic:
    """Count what an optimizer step sends.

    Parameters are gathered for the forward and, unless they stay gathered (``shard_grad_op``, ``hybrid_shard_zero2``),
    again for the backward pass; gradients are reduce-scattered over the ranks of a copy and all-reduced over copies.

    Args:
        num_params: Of the model.
        num_units: FSDP units; each is gathered and reduced by itself.
        layout: Sharding and ranks.
        gather_bytes: Per parameter: compute dtype.
        reduce_bytes: Per parameter: reduce dtype, times the share of what is trained.
        forwards: Forward passes of each rank per step; everything is repeated (``sync_each_micro_batch: true``).

    Returns:
        Upper bounds where less is sent: the root unit stays gathered, and NCCL all-reduces small messages in trees,
        which take fewer steps.
    """
    degree, copies, gathers = layout.degree, layout.copies, _GATHERS[layout.sharding]
    reduced = num_params * reduce_bytes
    inside = (num_params * gather_bytes * gathers + reduced) * (degree - 1) / degree
    across = 2 * (copies - 1) / copies * reduced / degree
    node_bytes, steps = 0.0, 0
    if degree > layout.ranks_per_node:
        node_bytes += inside
        steps += (gathers + 1) * (degree - 1)
    if layout.ranks > layout.ranks_per_node and copies > 1:
        node_bytes += across * min(degree, layout.ranks_per_node)
        steps += 2 * (copies - 1)
    return Traffic((inside + across) * forwards, node_bytes * forwards, steps * num_units * forwards)
