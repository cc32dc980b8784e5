"""What a rank measures: all-reduce, all-gather and, between nodes, one pair at a time.

Every function is collective and runs in a process of its own (see :mod:`lit_fsdp.launch.rank_processes`), which says
before each size what it begins: when it hangs, its parent knows where.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lit_fsdp.launch.bandwidth_report import pair_rounds

Say = Callable[[dict[str, Any]], None]
_PAIR_BYTES = 16 * 2**20
_PAIR_ROUNDS = 32
"""Partners that a node is measured with at most: with more nodes it takes minutes."""


def measure_collectives(device: torch.device, sizes: Sequence[int], repeats: int, say: Say) -> None:
    """Time all-reduce and all-gather and compare every element of what they give.

    Args:
        device: Of this rank.
        sizes: Bytes of the tensor that is reduced, or of the gathered whole; rounded down to whole float32 per rank.
        repeats: Timed after one that is not.
        say: Gets ``{"phase": ...}`` before and ``{"rate": {"op", "bytes", "ms"}}`` (median of this rank) after.
    """
    for op, prepare in (("all-reduce", _all_reduce), ("all-gather", _all_gather)):
        for size in sizes:
            elements = max(1, size // 4 // dist.get_world_size()) * dist.get_world_size()
            say({"phase": f"{op} of {elements * 4} bytes"})
            call, is_right = prepare(device, elements)
            milliseconds = statistics.median(_timed(call, device, repeats))
            if not is_right():
                raise RuntimeError(f"{op} of {elements * 4} bytes gave wrong numbers")
            say({"rate": {"op": op, "bytes": elements * 4, "ms": milliseconds}})


def _all_reduce(device: torch.device, elements: int) -> tuple[Callable[[], Any], Callable[[], bool]]:
    rank, world = dist.get_rank(), dist.get_world_size()
    tensor = torch.empty(elements, device=device)

    def is_right() -> bool:
        tensor.fill_(rank + 1)
        dist.all_reduce(tensor)
        return bool((tensor == world * (world + 1) / 2).all())

    tensor.zero_()  # sums of zeros stay finite however often they are repeated
    return lambda: dist.all_reduce(tensor), is_right


def _all_gather(device: torch.device, elements: int) -> tuple[Callable[[], Any], Callable[[], bool]]:
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = torch.full((elements // world,), float(rank), device=device)
    whole = torch.empty(elements, device=device)

    def is_right() -> bool:
        expected = torch.arange(world, device=device, dtype=torch.float32).repeat_interleave(elements // world)
        return bool((whole == expected).all())

    return lambda: dist.all_gather_into_tensor(whole, mine), is_right


def _timed(call: Callable[[], Any], device: torch.device, repeats: int) -> list[float]:
    """Milliseconds of each call, from a common start."""
    times = []
    for index in range(repeats + 1):
        dist.barrier()
        _finish(device)
        start = time.perf_counter()
        call()
        _finish(device)
        if index:  # the first makes connections and buffers
            times.append((time.perf_counter() - start) * 1000)
    return times


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_pairs(device: torch.device, leaders: Sequence[int], say: Say) -> None:
    """Send 16 MiB both ways between the first ranks of every two nodes, disjoint pairs at the same time.

    Args:
        device: Of this rank.
        leaders: Rank of one process of each node, in the order of nodes.
        say: On the lower rank of a pair gets ``{"pair": {"nodes": [a, b], "ms", "bytes"}}``.
    """
    rank = dist.get_rank()
    mine = torch.zeros(_PAIR_BYTES // 4, device=device)
    theirs = torch.empty_like(mine)
    for pairs in pair_rounds(len(leaders))[:_PAIR_ROUNDS]:
        partner = next(
            (_other(pair, leaders, rank) for pair in pairs if rank in (leaders[pair[0]], leaders[pair[1]])), None
        )
        if partner is not None:
            node, other, peer = partner
            say({"phase": f"pair of nodes {min(node, other)} and {max(node, other)}"})
            times = []
            for _ in range(3):
                start = time.perf_counter()
                ops = [dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, theirs, peer)]
                for work in dist.batch_isend_irecv(ops if rank < peer else ops[::-1]):
                    work.wait()
                _finish(device)
                times.append((time.perf_counter() - start) * 1000)
            if rank < peer:
                say({"pair": {"nodes": [node, other], "ms": min(times[1:]), "bytes": _PAIR_BYTES}})
        say({"phase": "waiting for pairs of other nodes"})
        dist.barrier()


def _other(pair: tuple[int, int], leaders: Sequence[int], rank: int) -> tuple[int, int, int]:
    """(my node, the other node, its rank)."""
    node, other = pair if leaders[pair[0]] == rank else pair[::-1]
    return node, other, leaders[other]
