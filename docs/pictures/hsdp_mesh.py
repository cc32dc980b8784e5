"""The mesh of hybrid sharding on two nodes of four ranks; python docs/pictures/hsdp_mesh.py.

Degrees are those that the strategy takes by default.
"""

from __future__ import annotations

from drawing import BLUE, GREY, ORANGE, figure, save


def main() -> None:
    """A box per rank; rows are copies."""
    from lit_fsdp.config.strategy import StrategyConfig, mesh_shape

    nodes, ranks = 2, 8
    copies, shards = mesh_shape(StrategyConfig(sharding="hybrid_shard"), nodes, ranks)
    drawn, axes = figure(6.4, 2.7)
    for rank in range(ranks):
        copy, shard = divmod(rank, shards)
        box = {"boxstyle": "round,pad=0.5", "facecolor": "#eef3fb", "edgecolor": BLUE}
        axes.text(shard, -copy, f"rank {rank}\nshard {shard + 1} of {shards}", ha="center", va="center", bbox=box)
    for copy in range(copies):
        axes.text(-1.0, -copy, f"node {copy + 1}:\ncopy {copy + 1} of {copies}", ha="center", va="center", color=GREY)
        end = {"arrowstyle": "<->", "color": BLUE}
        axes.annotate("", (shards - 0.55, -copy + 0.36), (-0.45, -copy + 0.36), arrowprops=end)
    axes.text((shards - 1) / 2, 0.5, "all-gather, reduce-scatter: shards of one copy", ha="center", color=BLUE)
    for shard in range(shards):
        end = {"arrowstyle": "<->", "color": ORANGE}
        axes.annotate("", (shard + 0.46, -copies + 0.8), (shard + 0.46, 0.2), arrowprops=end)
    axes.text((shards - 1) / 2, -copies + 0.5, "all-reduce: the same shard of all copies", ha="center", color=ORANGE)
    axes.set(xlim=(-1.5, shards - 0.3), ylim=(-copies + 0.4, 0.7))
    axes.axis("off")
    save(drawn, "hsdp-mesh")


if __name__ == "__main__":
    main()
