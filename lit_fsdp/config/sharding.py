"""What the strategy factory is told: engine, sharding, units, precision, activation checkpointing, state dict."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from lit_fsdp.config.activation import ActivationConfig, ActivationMode
from lit_fsdp.config.precision import PrecisionConfig, PrecisionMode
from lit_fsdp.config.typed import build
from lit_fsdp.errors import ConfigError

Engine = Literal["fsdp2", "fsdp1"]
Sharding = Literal["full_shard", "shard_grad_op", "no_shard", "hybrid_shard"]
StateDict = Literal["sharded", "full"]


@dataclass(frozen=True, kw_only=True)
class WrapConfig:
    """Which modules become FSDP units: found from the model, named classes, or by size."""

    classes: list[str] | None = None
    """Module class names, each instance of which is one FSDP unit."""
    min_num_params: float | None = None
    """Smallest unit in parameters: modules are grouped bottom-up until they hold this many."""
    max_root_share: float = 0.5
    """Largest share of all parameters that may stay in the root unit, 0 to 1."""

    def __post_init__(self) -> None:
        if self.classes is not None and self.min_num_params is not None:
            raise ConfigError("min_num_params", self.min_num_params, "classes or min_num_params, not both", "drop one")
        if self.classes is not None and not self.classes:
            raise ConfigError("classes", "[]", "at least one class name", "write wrap: auto, or name a block class")
        number = self.min_num_params
        if number is not None and (number < 1 or number != int(number)):
            raise ConfigError("min_num_params", number, "a whole number >= 1", "write min_num_params: 1.0e6")
        if not 0 <= self.max_root_share <= 1:
            raise ConfigError("max_root_share", self.max_root_share, "0 to 1", "write max_root_share: 0.5")


@dataclass(frozen=True, kw_only=True)
class StrategyConfig:
    """Every argument of :func:`lit_fsdp.fsdp_strategy`; a word is short for the mapping with its defaults."""

    engine: Engine = "fsdp2"
    """fsdp2 is torch's fully_shard, fsdp1 its FullyShardedDataParallel."""
    sharding: Sharding = "full_shard"
    """What is split over the ranks: everything, gradients and optimizer state, nothing, or all inside a replica."""
    replicate_degree: int | None = None
    """Copies of the model for hybrid_shard; default: the number of nodes."""
    wrap: Literal["auto"] | list[str] | WrapConfig = "auto"
    """FSDP units: auto (from the model), a list of block classes, or {min_num_params: N}."""
    precision: PrecisionMode | PrecisionConfig = "mixed"
    """Storage, compute, reduction and optimizer dtypes."""
    activation_checkpointing: ActivationMode | ActivationConfig = "none"
    """Which activations are recomputed in the backward pass."""
    state_dict: StateDict = "sharded"
    """Checkpoints as one file per rank (sharded) or one file in all (full)."""

    def __post_init__(self) -> None:
        if self.wrap == []:
            raise ConfigError(
                "wrap", "[]", "auto, or at least one class name", "write wrap: auto, or name a block class"
            )
        if self.replicate_degree is not None and self.replicate_degree < 1:
            raise ConfigError("replicate_degree", self.replicate_degree, ">= 1", "write the number of model copies")
        if self.replicate_degree not in (None, 1) and self.sharding != "hybrid_shard":
            raise ConfigError(
                "replicate_degree",
                f"{self.replicate_degree} with sharding {self.sharding}",
                "only with sharding: hybrid_shard",
                "set sharding: hybrid_shard, or drop replicate_degree",
            )

    @property
    def wrap_config(self) -> WrapConfig:
        """``wrap`` as its mapping."""
        if isinstance(self.wrap, WrapConfig):
            return self.wrap
        return WrapConfig() if self.wrap == "auto" else WrapConfig(classes=list(self.wrap))

    @property
    def precision_config(self) -> PrecisionConfig:
        """``precision`` as its mapping."""
        return self.precision if isinstance(self.precision, PrecisionConfig) else PrecisionConfig(mode=self.precision)

    @property
    def activation_config(self) -> ActivationConfig:
        """``activation_checkpointing`` as its mapping."""
        given = self.activation_checkpointing
        return given if isinstance(given, ActivationConfig) else ActivationConfig(mode=given)


def mesh_shape(config: StrategyConfig, num_nodes: int, world_size: int, path: str = "") -> tuple[int, int]:
    """``(replicate_degree, shard_degree)``: copies of the model and ranks over which each copy is split.

    Args:
        config: ``sharding`` and ``replicate_degree`` decide.
        num_nodes: The default number of copies for ``hybrid_shard``.
        world_size: All ranks of the run.
        path: Where the strategy's arguments stand in the recipe, for the error.

    Raises:
        ConfigError: The copies do not divide the ranks, or ``hybrid_shard`` on one node is not told how many to make.
    """
    if config.sharding == "no_shard":
        return world_size, 1
    if config.sharding != "hybrid_shard":
        return 1, world_size
    field = f"{path}.replicate_degree" if path else "replicate_degree"
    given = config.replicate_degree or num_nodes
    divisors = [d for d in range(1, world_size + 1) if world_size % d == 0]
    if world_size % given:
        raise ConfigError(
            field,
            f"{given} on {world_size} ranks",
            f"a divisor of the ranks: {', '.join(map(str, divisors))}",
            f"set replicate_degree: {max(d for d in divisors if d <= given)}",
        )
    if config.replicate_degree is None and num_nodes == 1:
        raise ConfigError(
            field,
            "null on one node, which leaves one copy: that is full_shard",
            f"a divisor of the ranks: {', '.join(map(str, divisors))}",
            "set replicate_degree: 2, or sharding: full_shard",
        )
    return given, world_size // given


def strategy_config(options: dict[str, Any], path: str = "") -> StrategyConfig:
    """The checked arguments of the factory from plain values, e.g. ``init_args`` of a recipe."""
    return build(StrategyConfig, options, path)


def strategy_fields() -> list[str]:
    """Names of the factory's arguments."""
    return [field.name for field in dataclasses.fields(StrategyConfig)]
