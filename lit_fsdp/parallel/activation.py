"""What a block does with its activations, the same way for all engines: kept, recomputed, moved to the host, compiled.

The block's own ``forward`` is replaced instead of wrapping the module: parameter names stay the model's own, and
the recomputation happens inside the engine's hooks, so that it repeats no all-gather. From the outside in:
host copies (hooks on saved tensors, which see what compiled code saves too), ``torch.compile``, the checkpointed
region (the compiler must see it to recompute inside its own backward), the model's forward.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from lit_fsdp.config.strategy import ActivationConfig
from lit_fsdp.parallel.compile_blocks import compile_forward
from lit_fsdp.parallel.host_copies import OffloadedForward
from lit_fsdp.parallel.selective import keep_ops, resolve_ops

_EVERY_N_DEFAULT = 2


def prepare_blocks(
    blocks: Iterable[nn.Module],
    config: ActivationConfig,
    compile: bool = False,
    path: str = "activation_checkpointing",
) -> None:
    """Apply an activation checkpointing mode, offload and compilation to the blocks, in place; twice is once.

    ``every_n`` recomputes blocks 0, n, 2n, ... of the order given, ``ceil(blocks / n)`` of them: the last block's
    activations are used first and freed first, so recomputing it would save nothing at the peak. Eager losses and
    gradients are bit-equal in all modes: recomputation restores the RNG state of the forward.

    Args:
        blocks: In the order they run; none is inside another.
        config: The mode; ``memory_budget`` is for compiled blocks only.
        compile: Compile each block with ``torch.compile``.
        path: Where the mode stands in the recipe, for errors.

    Raises:
        ConfigError: An op in ``config.ops`` that does not exist.
    """
    ops = resolve_ops(config.ops, f"{path}.ops") if config.mode == "selective" else ()
    keep = keep_ops(ops, config.offload_activations and not compile) if ops else ()
    for index, block in enumerate(blocks):
        if hasattr(block.forward, "_activations"):
            continue
        words = {"full": "full", "selective": "selective", "memory_budget": f"budget {config.memory_budget}"}
        if config.mode == "every_n":
            words["every_n"] = "no" if index % (config.n or _EVERY_N_DEFAULT) else "full"
        what = words.get(config.mode, "no")
        forward = original = block.forward
        if what in ("full", "selective"):
            forward = _recompute(block, forward, keep)
        if compile:
            forward = compile_forward(forward, config.memory_budget)
        if config.offload_activations:
            forward = OffloadedForward(block, forward)
            what = f"{what}, offloaded"
        if forward is not original:
            forward._activations = what  # type: ignore[attr-defined]
            block.forward = forward


def recomputes(block: nn.Module) -> str:
    """What a block does in the backward pass: ``no``, ``full``, ``selective``, ``budget 0.5``; with ``, offloaded``."""
    return getattr(block.forward, "_activations", "no")


def is_checkpointed(block: nn.Module) -> bool:
    """Whether this block recomputes activations."""
    return recomputes(block).partition(",")[0] != "no"


def _recompute(block: nn.Module, forward: Callable[..., Any], keep: tuple[Any, ...]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not (block.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        if not keep:
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        # put together here and not outside: the compiler must see the parts
        contexts: Any = functools.partial(keep[0], keep[1])
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return checkpointed


def resolve_gradient_checkpointing(
    module: nn.Module, config: ActivationConfig, path: str = "trainer.strategy.init_args.activation_checkpointing"
) -> ActivationConfig:
    """The mode to apply when the model has transformers' own ``gradient_checkpointing`` switched on, which goes off.

    Both at once would compute every block three times. Whoever switched it on wants to recompute: ``none`` becomes
    ``full``; any other mode of ours holds. Says so in one warning, on rank 0.

    Args:
        module: The LightningModule; flags of all modules in it are switched off in place.
        config: The recipe's mode.
        path: Where the mode stands, for the warning.
    """
    flagged = [(name, m) for name, m in module.named_modules() if getattr(m, "gradient_checkpointing", False) is True]
    if not flagged:
        return config
    for _, child in flagged:
        child.gradient_checkpointing = False
    ours = dataclasses.replace(config, mode="full") if config.mode == "none" else config
    if not dist.is_initialized() or dist.get_rank() == 0:
        where = f"{flagged[0][0] or type(module).__name__!r}"
        warnings.warn(
            f"gradient checkpointing is set in two places: in the model (model.gradient_checkpointing_enable() or "
            f"its config; {len(flagged)} modules, first {where}) and in {path} "
            f"({config.mode}). The model's is switched off, {path} decides: {ours.mode}. Drop the model's, "
            f"and write activation_checkpointing: {ours.mode}",
            stacklevel=2,
        )
    return ours
