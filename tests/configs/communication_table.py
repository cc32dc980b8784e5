"""The tables of recipes/README.md on what an optimizer step sends over the network, made anew."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast, get_args

from lit_fsdp.config.strategy import Sharding
from lit_fsdp.models.build import num_parameters
from lit_fsdp.parallel.units import plan_units
from lit_fsdp.plan.memory import Traffic, step_traffic
from tests.configs.arithmetic import GIB, STATE_BYTES, Holder, checked, gib_per_rank, meta_model

ROOT = Path(__file__).parents[2]
SIZES = (8, 64, 512, 4096)
ROOM_GIB = 0.85 * 80e9 / GIB
"""Of a GPU of 80 GB, for what the arithmetic knows."""
NEARLY_AS_FAST = 1.05


@dataclass(frozen=True)
class Row:
    """One way of sharding at one size."""

    sharding: Sharding
    copies: int
    degree: int
    """Ranks that share one copy."""
    traffic: Traffic
    gib: float
    """On each GPU."""

    @property
    def fits(self) -> bool:
        """Into 80 GB."""
        return self.gib < ROOM_GIB


def rows(recipe: str, ranks: int, shard_ranks: int | None) -> list[Row]:
    """All ways of sharding the model of a recipe over so many GPUs, eight per node, one forward per step."""
    run = checked(ROOT / "recipes" / f"{recipe}.yaml")
    model = meta_model(str(run.model.name))
    params = num_parameters(model)
    num_units = len(plan_units(Holder(model), run.strategy.wrap_config).units)
    transient = sum(gib for kind, gib in gib_per_rank(run, model).items() if kind not in ("state", "host"))
    found = []
    for sharding in cast(tuple[Sharding, ...], get_args(Sharding)):
        is_hybrid = sharding.startswith("hybrid")
        if is_hybrid and ranks <= (shard_ranks or 8):
            continue  # one copy: that is full_shard, or shard_grad_op
        degree = 1 if sharding == "no_shard" else (shard_ranks or 8) if is_hybrid else ranks
        copies = ranks // degree
        gathered = 2 * params if sharding in ("shard_grad_op", "hybrid_shard_zero2") else 0
        gib = (STATE_BYTES * params / degree + gathered) / GIB + transient
        traffic = step_traffic(params, num_units, sharding, (copies, degree))
        found.append(Row(sharding, copies, degree, traffic, gib))
    return found


def picked(found: list[Row]) -> Row | None:
    """The one with the least memory of those that fit and are nearly as fast as the fastest at 400 GB/s."""
    fitting = [row for row in found if row.fits]
    fastest = min((row.traffic.seconds(400e9) for row in fitting), default=0.0)
    near = [row for row in fitting if row.traffic.seconds(400e9) <= NEARLY_AS_FAST * fastest]
    return min(near, key=lambda row: row.gib, default=None)


def lines(recipe: str, shard_ranks: int | None) -> Iterator[str]:
    """The table of one recipe."""
    yield "| GPUs | sharding | GiB per GPU | GB out of each node | ring steps | s at 50 GB/s | s at 400 GB/s | |"
    yield "|---|---|---|---|---|---|---|---|"
    for ranks in SIZES:
        found = rows(recipe, ranks, shard_ranks)
        best = picked(found)
        for row in found:
            traffic = row.traffic
            name = f"`{row.sharding}`" + (", `ddp`" if row.sharding == "no_shard" else "")
            if row.sharding.startswith("hybrid"):
                name += f", {row.copies} × {row.degree}"
            verdict = "**picked**" if row is best else "" if row.fits else "does not fit"
            yield (
                f"| {ranks:,} | {name} | {row.gib:.0f} | {traffic.node_bytes / 1e9:.0f} | {traffic.ring_steps:,} | "
                f"{traffic.seconds(50e9):.2f} | {traffic.seconds(400e9):.2f} | {verdict} |"
            )
