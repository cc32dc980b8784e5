"""How many copies of the model there are, and over how many ranks each copy is split."""

from __future__ import annotations

from lit_fsdp.config.sharding import StrategyConfig
from lit_fsdp.errors import ConfigError


def mesh_shape(config: StrategyConfig, num_nodes: int, world_size: int, path: str = "") -> tuple[int, int]:
    """``(replicate_degree, shard_degree)``: copies of the model and ranks over which each copy is split.

    Args:
        config: ``engine``, ``sharding`` and the two degrees decide; -1 is what the other leaves.
        num_nodes: The default number of copies for hybrid sharding.
        world_size: All ranks of the run.
        path: Where the strategy's arguments stand in the recipe, for the error.

    Raises:
        ConfigError: The degrees do not multiply to the ranks, or hybrid sharding on one node is not told how many
            copies to make, or ``single`` has company.
    """
    if config.engine == "single" and world_size != 1:
        raise ConfigError(
            _join(path, "engine"), f"single on {world_size} ranks", "one rank", "set trainer.devices: 1, or engine: ddp"
        )
    copies, shards = _wanted(config, num_nodes, world_size, path)
    if not config.is_sharded:  # degrees are replaced, see StrategyConfig.replaced
        return copies, shards
    given = {"replicate_degree": config.replicate_degree, "shard_degree": config.shard_degree}
    for name, found in (("replicate_degree", copies), ("shard_degree", shards)):
        if given[name] not in (None, -1, found):
            other = "shard_degree" if name == "replicate_degree" else "replicate_degree"
            raise ConfigError(
                _join(path, name),
                f"{given[name]} with sharding {config.sharding} on {world_size} ranks",
                f"{found}, or -1 for all ranks that {other} leaves"
                + ("" if config.is_hybrid else "; several copies need hybrid_shard"),
                f"set {name}: {found}" + ("" if config.is_hybrid else ", or sharding: hybrid_shard"),
            )
    return copies, shards


def _wanted(config: StrategyConfig, num_nodes: int, world_size: int, path: str) -> tuple[int, int]:
    if config.is_replicated:
        return world_size, 1
    if not config.is_hybrid:
        return 1, world_size
    copies = config.replicate_degree if config.replicate_degree != -1 else None
    shards = config.shard_degree if config.shard_degree != -1 else None
    divisors = [d for d in range(1, world_size + 1) if world_size % d == 0]
    allowed = f"a divisor of the ranks: {', '.join(map(str, divisors))}"
    for name, given in (("replicate_degree", copies or num_nodes), ("shard_degree", shards or 1)):
        if world_size % given:
            fitting = max(d for d in divisors if d <= given)
            raise ConfigError(_join(path, name), f"{given} on {world_size} ranks", allowed, f"set {name}: {fitting}")
    if copies and shards and copies * shards != world_size:
        raise ConfigError(
            _join(path, "shard_degree"),
            f"{shards} with replicate_degree {copies} on {world_size} ranks",
            f"shard_degree * replicate_degree == {world_size}, or -1 for all ranks left",
            f"set shard_degree: -1, or shard_degree: {world_size // copies} with replicate_degree: {copies}",
        )
    if not copies and not shards and num_nodes == 1:
        raise ConfigError(
            _join(path, "replicate_degree"),
            f"{'null' if config.replicate_degree is None else config.replicate_degree} on one node, "
            "which leaves one copy: that is full_shard",
            allowed,
            "set replicate_degree: 2, or sharding: full_shard",
        )
    copies = copies or (world_size // shards if shards else num_nodes)
    return copies, world_size // copies


def _join(path: str, field: str) -> str:
    return f"{path}.{field}" if path else field
