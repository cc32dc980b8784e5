"""Bytes and steps of rings, against values worked out by hand."""

from __future__ import annotations

import pytest

from lit_fsdp.plan.communication import Layout, Weights, step_traffic

SMALL = Weights(num_params=800, num_units=3)


def test_two_nodes():
    """16 ranks; 800 parameters: 1,600 B gathered, 3,200 B reduced."""
    for sharding, shard_ranks, rank_bytes, node_bytes, ring_steps in (
        ("full_shard", None, 6400 * 15 / 16, 6400 * 15 / 16, 3 * 3 * 15),
        ("shard_grad_op", None, 4800 * 15 / 16, 4800 * 15 / 16, 3 * 2 * 15),
        # one ring over everybody, which leaves each node once
        ("no_shard", None, 2 * 3200 * 15 / 16, 2 * 3200 * 15 / 16, 3 * 2 * 15),
        # a copy per node: eight rings of two ranks, each with 400 B
        ("hybrid_shard", None, 6400 * 7 / 8 + 2 * 400 / 2, 8 * 2 * 400 / 2, 3 * 2),
        ("hybrid_shard_zero2", None, 4800 * 7 / 8 + 2 * 400 / 2, 8 * 2 * 400 / 2, 3 * 2),
        # two copies in each node: four rings of four ranks, each with 800 B
        ("hybrid_shard", 4, 6400 * 3 / 4 + 2 * 800 * 3 / 4, 4 * 2 * 800 * 3 / 4, 3 * 2 * 3),
        ("hybrid_shard", 16, 6400 * 15 / 16, 6400 * 15 / 16, 3 * 3 * 15),
    ):
        found = step_traffic(SMALL, Layout(sharding=sharding, ranks=16, shard_ranks=shard_ranks))
        assert (found.rank_bytes, found.node_bytes) == (pytest.approx(rank_bytes), pytest.approx(node_bytes))
        assert found.ring_steps == ring_steps


def test_one_node_sends_nothing_over_the_network():
    for sharding in ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard"):
        found = step_traffic(SMALL, Layout(sharding=sharding, ranks=8))
        assert (found.node_bytes, found.ring_steps, found.seconds(1.0)) == (0, 0, 0)
        assert found.rank_bytes > 0
        assert step_traffic(SMALL, Layout(sharding=sharding, ranks=1)).rank_bytes == 0
