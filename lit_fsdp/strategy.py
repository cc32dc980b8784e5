"""The strategy factory: one vocabulary for two engines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Literal

from lightning.pytorch.strategies import Strategy

from lit_fsdp.checkpoint import retention, store
from lit_fsdp.config.activation import ActivationConfig, ActivationMode
from lit_fsdp.config.precision import PrecisionConfig, PrecisionMode
from lit_fsdp.config.sharding import Engine, Sharding, StateDict, WrapConfig, strategy_config
from lit_fsdp.parallel.fsdp1 import FSDP1Strategy
from lit_fsdp.parallel.fsdp2 import FSDP2Strategy


def fsdp_strategy(
    engine: Engine = "fsdp2",
    sharding: Sharding = "full_shard",
    replicate_degree: int | None = None,
    wrap: Literal["auto"] | list[str] | WrapConfig = "auto",
    precision: PrecisionMode | PrecisionConfig = "mixed",
    activation_checkpointing: ActivationMode | ActivationConfig = "none",
    state_dict: StateDict = "sharded",
) -> Strategy:
    """A strategy for Lightning's Trainer that shards any LightningModule, on CPU (gloo) or CUDA (NCCL).

    The strategy wraps by itself, before the optimizers are configured; weights that are there already are broadcast
    from rank 0, weights on meta are filled shard by shard. It scales no gradients: the engines average them over
    ranks, and Lightning's own settings (accumulation, clipping) hold.

    Args:
        engine: ``fsdp2`` (``fully_shard``) or ``fsdp1`` (``FullyShardedDataParallel``).
        sharding: ``full_shard`` splits parameters, gradients and optimizer state over all ranks; ``shard_grad_op``
            keeps parameters gathered between forward and backward; ``no_shard`` replicates; ``hybrid_shard`` shards
            inside a group of neighbouring ranks and replicates across groups.
        replicate_degree: Number of groups for ``hybrid_shard``; default: the number of nodes.
        wrap: ``auto``, a list of block class names, or a mapping ``{min_num_params: N}``.
        precision: ``mixed`` (fp32 weights, bf16 compute, fp32 reduction), ``low_precision`` (bf16), ``fp32``.
        activation_checkpointing: ``none``, or ``full``: keep only the inputs of each block.
        state_dict: Checkpoints with one file per rank (``sharded``) or one in all (``full``).

    Returns:
        A subclass of Lightning's ``ModelParallelStrategy`` (fsdp2) or ``FSDPStrategy`` (fsdp1).

    Raises:
        ConfigError: A value that does not exist, or values that do not go together.
    """
    options: dict[str, Any] = {
        "engine": engine,
        "sharding": sharding,
        "replicate_degree": replicate_degree,
        "wrap": wrap,
        "precision": precision,
        "activation_checkpointing": activation_checkpointing,
        "state_dict": state_dict,
    }
    config = strategy_config(options, "trainer.strategy.init_args")
    storage = SimpleNamespace(
        save=store.save_checkpoint,
        load_tensors=store.load_tensors,
        load_state=store.load_state,
        load_rank_state=store.load_rank_state,
        tensor_names=store.tensor_names,
        remove=retention.remove,
    )
    return FSDP2Strategy(config, storage) if config.engine == "fsdp2" else FSDP1Strategy(config, storage)
