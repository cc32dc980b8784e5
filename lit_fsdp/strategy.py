"""The strategy factory: one vocabulary for two engines."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lightning.pytorch.core import saving
from lightning.pytorch.strategies import Strategy

from lit_fsdp.checkpoint import background, retention, sound, state_json, store
from lit_fsdp.checkpoint.importing import lightning_source
from lit_fsdp.config.parser import strategy_config
from lit_fsdp.config.strategy import (
    ActivationConfig,
    ActivationMode,
    BackwardPrefetch,
    Engine,
    NonFinite,
    PrecisionConfig,
    PrecisionWord,
    Sharding,
    StateDict,
    WrapConfig,
    WrapWord,
)
from lit_fsdp.parallel.fsdp1 import FSDP1Strategy
from lit_fsdp.parallel.fsdp2 import FSDP2Strategy
from lit_fsdp.parallel.python_words import spoken_to
from lit_fsdp.parallel.replicated import ReplicatedStrategy


def fsdp_strategy(
    engine: Engine = "fsdp2",
    sharding: Sharding = "full_shard",
    shard_degree: int | None = None,
    replicate_degree: int | None = None,
    wrap: WrapWord | list[str] | WrapConfig = "auto",
    precision: PrecisionWord | PrecisionConfig | None = None,
    activation_checkpointing: ActivationMode | ActivationConfig = "none",
    compile: bool = False,
    cpu_offload: bool = False,
    backward_prefetch: BackwardPrefetch | int = "pre",
    forward_prefetch: bool | int = False,
    limit_all_gathers: bool = True,
    sync_each_micro_batch: bool = True,
    nonfinite_gradients: NonFinite = "error",
    max_skipped_steps: int | None = None,
    use_orig_params: bool = True,
    sync_module_states: bool = True,
    cpu_ram_efficient_loading: bool = True,
    process_group_backend: str | None = None,
    timeout_seconds: float = 1800.0,
    state_dict: StateDict = "sharded",
    verbose: bool = False,
) -> Strategy:
    """A strategy for Lightning's Trainer that shards any LightningModule, on CPU (gloo) or CUDA (NCCL).

    The strategy wraps by itself, before the optimizers are configured; weights that are there already are broadcast
    from rank 0, weights on meta are filled shard by shard. It scales no gradients: the engines average them over
    ranks, and Lightning's own settings (accumulation, clipping) hold.

    Args:
        engine: ``fsdp2`` (``fully_shard``) or ``fsdp1`` (``FullyShardedDataParallel``); ``ddp`` and ``single`` keep
            the whole model on every rank, for comparison and for models that fit.
        sharding: ``full_shard`` splits parameters, gradients and optimizer state over all ranks; ``shard_grad_op``
            keeps parameters gathered between forward and backward; ``no_shard`` replicates; ``hybrid_shard`` and
            ``hybrid_shard_zero2`` do the first two inside a group of neighbouring ranks and replicate across groups.
        shard_degree: Ranks that share one copy; -1 for all that ``replicate_degree`` leaves.
        replicate_degree: Number of copies; -1 for the rest; default for hybrid sharding: the number of nodes.
        wrap: ``auto``; a list of block class names and path patterns (``model.layers.*.mlp``); ``manual`` for a
            module that wraps itself in ``configure_model``; or a :class:`~lit_fsdp.config.strategy.WrapConfig`.
        precision: ``mixed`` (fp32 weights, bf16 compute, fp32 reduction), ``low_precision`` (bf16), ``fp32``,
            ``fp16_mixed`` (with a loss scale), ``fp8`` (Hopper), ``auto`` (``mixed`` where the devices of all ranks
            have bf16 instructions, else ``fp32``), one of Lightning's words (``bf16-mixed``, ``bf16-true``,
            ``16-mixed``, ``32-true``), or a mapping that overrides parts; default: ``mixed``.
        activation_checkpointing: ``none``, ``full``, ``every_n``, ``selective``, ``memory_budget``, or a mapping.
        compile: Compile each block with ``torch.compile``.
        cpu_offload: Shards of parameters, gradients and optimizer state live, and the optimizer steps, on the host.
        backward_prefetch: ``pre``, ``post`` (fsdp1), ``none``, or units ahead (fsdp2).
        forward_prefetch: Whether, or (fsdp2) how many units ahead, gathers are issued early in the forward pass.
        limit_all_gathers: fsdp1's rate limiter; fsdp2 has its own.
        sync_each_micro_batch: ``False`` keeps whole gradients through an accumulation and reduces once.
        nonfinite_gradients: ``error`` raises, ``skip`` leaves parameters as they are; all ranks do the same.
        max_skipped_steps: With ``skip``: steps skipped in a row that end the run; default 10.
        use_orig_params: Always true; FSDP1's name is accepted.
        sync_module_states: Broadcast weights that are there already from rank 0.
        cpu_ram_efficient_loading: Read only this rank's shards of weights that are not there yet.
        process_group_backend: ``gloo`` or ``nccl``; default: by device.
        timeout_seconds: How long a collective waits.
        state_dict: Checkpoints with one file per rank (``sharded``) or one in all (``full``).
        verbose: Write what each rank holds and does to ``debug/rank-N.jsonl``
            (see :mod:`lit_fsdp.parallel.rank_log`).

    Returns:
        A subclass of Lightning's ``ModelParallelStrategy`` (fsdp2), ``FSDPStrategy`` (fsdp1) or ``DDPStrategy``.

    Raises:
        ConfigError: A value that does not exist, or values that do not go together.
    """
    options = dict(locals())
    with spoken_to(in_recipe=False):
        config = strategy_config(options, "trainer.strategy.init_args")
    storage = SimpleNamespace(
        save=store.save_checkpoint,
        background=background.BackgroundSaver,
        sound=sound.sound_checkpoint,
        load_file=lightning_source.read_lightning_file,
        load_tensors=store.load_tensors,
        load_state=store.load_state,
        load_rank_state=store.load_rank_state,
        tensor_names=store.tensor_names,
        remove=retention.try_to_remove,
        refused=state_json.refused,
    )
    engines: dict[str, Callable[..., Strategy]] = {"fsdp2": FSDP2Strategy, "fsdp1": FSDP1Strategy}
    return engines.get(config.engine, ReplicatedStrategy)(config, storage)


def _read_folders_too(read: Callable[..., Any]) -> Callable[..., Any]:
    """Lightning's reader behind ``MyModule.load_from_checkpoint``, which knows files alone, for checkpoints of ours."""

    @functools.wraps(read)
    def read_either(path: Any, *args: Any, **options: Any) -> Any:
        if not isinstance(path, (str, Path)) or not Path(path).is_dir():
            return read(path, *args, **options)
        return {**store.load_state(Path(path)), "state_dict": store.whole_model(path)}

    return read_either


saving.pl_load = _read_folders_too(saving.pl_load)
