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
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lit_fsdp.config.strategy import ActivationConfig
from lit_fsdp.parallel.units import UnitPlan

BACKEND = "inductor"
"""Of ``torch.compile``; any name that it knows."""
_EVERY_N_DEFAULT = 2
# Matrix products and attention in all their kernels; which of them exist depends on the build of torch. Collectives
# inside a block (tensor or expert parallel layers) are dear too.
_KEPT_OPS = """
aten.mm aten.addmm aten.bmm aten.baddbmm aten._scaled_mm aten._grouped_mm aten._scaled_grouped_mm aten.convolution
aten._scaled_dot_product_flash_attention aten._scaled_dot_product_flash_attention_for_cpu
aten._scaled_dot_product_efficient_attention aten._scaled_dot_product_cudnn_attention
aten._scaled_dot_product_fused_attention_overrideable aten._flash_attention_forward aten._efficient_attention_forward
higher_order.flex_attention _c10d_functional.all_reduce _c10d_functional.reduce_scatter_tensor
_c10d_functional.all_gather_into_tensor _c10d_functional.all_to_all_single
""".split()

Op = Any  # torch._ops.OpOverload or HigherOrderOperator


def prepare_blocks(blocks: Iterable[nn.Module], config: ActivationConfig, compile: bool = False) -> None:
    """Apply an activation checkpointing mode, offload and compilation to the blocks, in place of an earlier one.

    ``every_n`` recomputes blocks 0, n, 2n, ... of the order given: the last block's activations are used first and
    freed first, so recomputing it would save nothing at the peak. Eager losses and gradients are bit-equal in all
    modes: recomputation restores the RNG state of the forward.
    """
    keep = kept_ops() if config.mode == "selective" else ()
    for index, block in enumerate(blocks):
        forward: Any = getattr(block.forward, "_original", block.forward)
        original = forward
        words = {"full": "full", "selective": "selective", "memory_budget": f"budget {config.memory_budget}"}
        if config.mode == "every_n":
            words["every_n"] = "no" if index % (config.n or _EVERY_N_DEFAULT) else "full"
        what = words.get(config.mode, "no")
        if what in ("full", "selective"):
            forward = _recompute(block, forward, _without_products_of_experts(keep, block))
        if compile:
            backend = BACKEND if config.memory_budget is None else _within_budget(BACKEND, config.memory_budget)
            forward = torch.compile(forward, backend=backend)
        if config.offload_activations:
            # pinned copies lose the strides that compiled code counts on
            forward = _offload(block, forward, pin_memory=torch.cuda.is_available() and not compile)
            what = f"{what}, offloaded"
        if forward is not original:
            forward._activations, forward._original = what, original
            block.forward = forward
        elif hasattr(block.forward, "_original"):
            block.forward = original


def recomputes(block: nn.Module) -> str:
    """What a block does in the backward pass: ``no``, ``full``, ``selective``, ``budget 0.5``; with ``, offloaded``."""
    return getattr(block.forward, "_activations", "no")


def recompute_by_unit(plan: UnitPlan) -> dict[str, str]:
    """What each unit does again in the backward pass: a unit inside a block shares its word, see :func:`recomputes`.

    One around blocks that are no units says how many of them do what.
    """
    around = {module: block for block in plan.blocks for module in block.modules()}
    found = {name: recomputes(around[m]) if m in around else "no" for name, m in plan.modules.items()}
    units = set(plan.modules.values())
    enclosed: dict[str, Counter[str]] = {}
    for block in plan.blocks:
        if block not in units:
            enclosing = [name for name, m in plan.modules.items() if m is not block and block in set(m.modules())]
            enclosed.setdefault(max(enclosing, key=len, default=""), Counter())[recomputes(block)] += 1
    for name, words in enclosed.items():
        if set(words) != {"no"}:
            found[name] = ", ".join(f"{count} blocks {word}" for word, count in words.items())
    return found


def _without_products_of_experts(keep: tuple[Op, ...], block: nn.Module) -> tuple[Op, ...]:
    """Of experts with biases (GPT-OSS) transformers adds these in place, and what is kept must not change."""
    if not any(getattr(module, "has_bias", False) is True for module in block.modules()):
        return keep
    return tuple(op for op in keep if op not in (torch.ops.aten._grouped_mm.default, torch.ops.aten.bmm.default))


def _recompute(block: nn.Module, forward: Callable[..., Any], keep: tuple[Op, ...]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not (block.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        if not keep:
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        # put together here and not outside: the compiler must see the parts
        contexts: Any = functools.partial(create_selective_checkpoint_contexts, list(keep))
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return checkpointed


def _offload(block: nn.Module, forward: Callable[..., Any], pin_memory: bool) -> Callable[..., Any]:
    @functools.wraps(forward)
    def offloaded(*args: Any, **kwargs: Any) -> Any:
        if not (block.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        with _SaveOnHost(block, pin_memory):
            return forward(*args, **kwargs)

    return offloaded


class _SaveOnHost(torch.autograd.graph.save_on_cpu):
    """Torch's ``save_on_cpu`` that leaves parameters, which the engine frees and gathers by itself, where they are."""

    def __init__(self, block: nn.Module, pin_memory: bool) -> None:
        super().__init__(pin_memory=pin_memory)
        own = {p.untyped_storage().data_ptr() for p in block.parameters()}
        pack, unpack = self.pack_hook, self.unpack_hook
        self.pack_hook = lambda t: t if t.untyped_storage().data_ptr() in own else pack(t)
        self.unpack_hook = lambda packed: packed if torch.is_tensor(packed) else unpack(packed)


@functools.lru_cache
def _within_budget(backend: str, budget: float) -> Callable[..., Any]:
    """A backend under the budget, a global setting of torch that is read while a block is compiled.

    One object per budget, since compiled code is not shared between backends.
    """
    import torch._functorch.config as functorch_config
    from torch._dynamo.backends.registry import lookup_backend

    compiler: Any = lookup_backend(backend)

    def compile_within_budget(graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        with functorch_config.patch(activation_memory_budget=budget):
            return compiler(graph, inputs, **options)

    return compile_within_budget


@functools.lru_cache
def kept_ops() -> tuple[Op, ...]:
    """What ``selective`` does not compute again: matrix products, attention, collectives, as far as torch has them."""
    names = (name.split(".") for name in _KEPT_OPS)
    found = [getattr(getattr(torch.ops, namespace), name, None) for namespace, name in names]
    return tuple(getattr(op, "default", op) for op in found if op is not None)


def resolve_gradient_checkpointing(
    module: nn.Module, config: ActivationConfig, path: str = "trainer.strategy.init_args.activation_checkpointing"
) -> ActivationConfig:
    """The mode to apply when the model has transformers' own ``gradient_checkpointing`` switched on, which goes off.

    Both at once would compute every block three times. ``none`` becomes ``full``, any other mode of ours holds.
    """
    flagged = [m for m in module.modules() if getattr(m, "gradient_checkpointing", False) is True]
    if not flagged:
        return config
    for child in flagged:
        child.gradient_checkpointing = False  # type: ignore[assignment]
    ours = dataclasses.replace(config, mode="full") if config.mode == "none" else config
    if not dist.is_initialized() or dist.get_rank() == 0:
        warnings.warn(
            f"gradient checkpointing is set in two places, and {path} decides: {ours.mode}. The model's own "
            f"(gradient_checkpointing_enable() or its config; {len(flagged)} modules) is switched off: drop it, and "
            f"write activation_checkpointing: {ours.mode}",
            stacklevel=2,
        )
    return ours
