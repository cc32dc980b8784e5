"""What an engine cannot do, refused before any process starts: one list of rules on the strategy's arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lit_fsdp.config.sharding import StrategyConfig
from lit_fsdp.config.typed import build
from lit_fsdp.errors import ConfigError


def _numbers(config: StrategyConfig) -> None:
    for name in ("shard_degree", "replicate_degree"):
        given = getattr(config, name)
        if given is not None and given != -1 and given < 1:
            raise ConfigError(name, given, ">= 1, or -1 for the rest", f"write {name}: -1")
    if config.shard_degree == -1 and config.replicate_degree == -1:
        raise ConfigError("shard_degree", "-1 with replicate_degree -1", "one -1 at most", "write shard_degree: 8")
    if config.wrap == []:
        raise ConfigError("wrap", "[]", "auto, or at least one class name", "write wrap: auto, or name a block class")
    skipped = config.max_skipped_steps
    if skipped is not None and config.nonfinite_gradients != "skip":
        raise ConfigError(
            "max_skipped_steps",
            f"{skipped} with nonfinite_gradients error",
            "only with skip",
            "set nonfinite_gradients: skip",
        )
    if skipped is not None and skipped < 1:
        raise ConfigError("max_skipped_steps", config.max_skipped_steps, ">= 1", "write max_skipped_steps: 10")
    if config.timeout_seconds <= 0 or config.timeout_seconds > 7 * 86400:
        raise ConfigError(
            "timeout_seconds", config.timeout_seconds, "above 0, at most a week", "write timeout_seconds: 1800"
        )
    given_backend = "gloo" if config.process_group_backend is None else config.process_group_backend
    backends = {part.rpartition(":")[2] for part in given_backend.split(",")}
    if not backends <= {"gloo", "nccl"}:
        raise ConfigError(
            "process_group_backend",
            repr(config.process_group_backend),
            "null | gloo | nccl | cpu:gloo,cuda:nccl",
            "drop process_group_backend: the device decides",
        )


def _degrees_need_their_sharding(config: StrategyConfig) -> None:
    if config.is_hybrid or not config.is_sharded:
        return
    kind = f"sharding {config.sharding}"
    if config.replicate_degree not in (None, 1, -1) and not config.is_replicated:
        raise ConfigError(
            "replicate_degree",
            f"{config.replicate_degree} with {kind}",
            "only with sharding: hybrid_shard or hybrid_shard_zero2",
            "set sharding: hybrid_shard, or drop replicate_degree",
        )
    if config.is_replicated and config.shard_degree not in (None, 1, -1):
        raise ConfigError(
            "shard_degree",
            f"{config.shard_degree} with {kind}, which splits nothing",
            "1, or a sharding that splits",
            "set sharding: full_shard, or drop shard_degree",
        )


def _whole_models(config: StrategyConfig) -> None:
    """Ddp and single: what would change the arithmetic; the rest is replaced, see :attr:`StrategyConfig.replaced`."""
    if config.is_sharded:
        return
    engine = f"engine {config.engine}"
    if config.engine == "single" and config.precision_config.reduce_dtype is not None:
        raise ConfigError(
            "precision.reduce_dtype",
            f"{config.precision_config.reduce_dtype} with {engine}, which reduces nothing",
            "an engine with several ranks",
            "drop reduce_dtype",
        )
    if config.precision_config.keep_norms_fp32:
        raise ConfigError(
            "precision.keep_norms_fp32",
            f"true with {engine}, where autocast decides op by op",
            "fsdp1 | fsdp2",
            "drop keep_norms_fp32: autocast keeps norms in fp32 where torch says so",
        )
    if config.wrap_config.manual:
        raise ConfigError("wrap", f"manual with {engine}", "fsdp1 | fsdp2", "drop wrap")


def _prefetch(config: StrategyConfig) -> None:
    backward, forward = config.backward_prefetch, config.forward_prefetch
    for name, given in (("backward_prefetch", backward), ("forward_prefetch", forward)):
        if isinstance(given, int) and not isinstance(given, bool):
            if given < 1:
                raise ConfigError(name, given, "a number of units >= 1", f"write {name}: 1")
            if config.engine == "fsdp1":
                raise ConfigError(
                    name, f"{given} with engine fsdp1", "pre | post | none, true | false", "set engine: fsdp2"
                )
    if config.engine != "fsdp2":
        return
    if backward == "post":
        raise ConfigError(
            "backward_prefetch",
            "post with engine fsdp2, which can only gather before",
            "pre | none | a number of units",
            "write backward_prefetch: pre, or engine: fsdp1",
        )
    if not config.limit_all_gathers:
        raise ConfigError(
            "limit_all_gathers",
            "false with engine fsdp2, which bounds its gathers by streams and never blocks the CPU",
            "true",
            "drop limit_all_gathers, or set engine: fsdp1",
        )


def _accumulation(config: StrategyConfig) -> None:
    row = config.precision_config.row
    if config.sync_each_micro_batch or config.engine != "fsdp1":
        return
    if row.compute != row.param:
        raise ConfigError(
            "sync_each_micro_batch",
            f"false with engine fsdp1 and precision {config.precision_config.mode}, which would add up gradients in "
            f"{row.compute}",
            "true, or precision fp32 or low_precision",
            "set sync_each_micro_batch: true, or engine: fsdp2, which adds them up in the reduce dtype",
        )
    if config.cpu_offload:
        raise ConfigError(
            "sync_each_micro_batch",
            "false with engine fsdp1 and cpu_offload",
            "true",
            "set sync_each_micro_batch: true, or engine: fsdp2",
        )


def _manual(config: StrategyConfig) -> None:
    precision = config.precision_config
    if config.wrap_config.manual and (precision.keep_norms_fp32 or precision.mode == "fp8"):
        what = "keep_norms_fp32" if precision.keep_norms_fp32 else "fp8"
        raise ConfigError(
            "wrap",
            f"manual with precision {what}, which has to come before wrapping",
            "auto, names or a size",
            "drop wrap, or do it in configure_model",
        )


def _compiled(config: StrategyConfig) -> None:
    """Units inside a compiled block break its graph, and it would run as it is without a word."""
    what = "wrap experts" if config.wrap_config.experts else "precision keep_norms_fp32"
    if config.compile and config.is_sharded and (config.wrap_config.experts or config.precision_config.keep_norms_fp32):
        raise ConfigError(
            "compile",
            f"true with {what}, which makes FSDP units inside blocks",
            "blocks without units inside",
            "drop compile, or the units inside",
        )


def _loading(config: StrategyConfig) -> None:
    if not config.use_orig_params:
        raise ConfigError(
            "use_orig_params",
            "false",
            "true: parameter names, frozen parts and checkpoints of both engines rely on it",
            "drop use_orig_params",
        )
    if config.cpu_ram_efficient_loading and not config.sync_module_states:
        raise ConfigError(
            "cpu_ram_efficient_loading",
            "true with sync_module_states false",
            "true only with sync_module_states: true",
            "set sync_module_states: true, or cpu_ram_efficient_loading: false",
        )


def _activation(config: StrategyConfig) -> None:
    activation = config.activation_config  # complains itself about a word that needs details
    if activation.mode == "memory_budget" and not config.compile:
        raise ConfigError(
            "activation_checkpointing",
            "memory_budget without compile: the budget is the compiler's",
            "memory_budget with compile: true",
            "set compile: true, or activation_checkpointing: selective",
        )


STRATEGY_RULES: list[Callable[[StrategyConfig], None]] = [
    _numbers,
    _degrees_need_their_sharding,
    _whole_models,
    _prefetch,
    _accumulation,
    _manual,
    _compiled,
    _loading,
    _activation,
]
"""Rules within the strategy section; each raises ConfigError."""


def strategy_config(options: dict[str, Any], path: str = "") -> StrategyConfig:
    """The checked arguments of the factory from plain values, e.g. ``init_args`` of a recipe."""
    return build(StrategyConfig, options, path, STRATEGY_RULES)
