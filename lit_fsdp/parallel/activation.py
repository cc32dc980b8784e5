"""Activation checkpointing, offload to the host and compilation of blocks, in the same way for all engines.

The block's ``forward`` is replaced: parameter names do not change, and recomputation inside the engine's hooks repeats
no all-gather. From the outside in: host copies, ``torch.compile``, the checkpointed region, the model's forward.
"""

import dataclasses
import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lit_fsdp.config.strategy import ActivationConfig
from lit_fsdp.errors import require
from lit_fsdp.models.attention import BY_SAMPLE, kept_by
from lit_fsdp.parallel.tiles import apply_tiles
from lit_fsdp.parallel.units import UnitPlan

BACKEND = "inductor"  # any backend name of torch.compile
# Which of these exist depends on the build of torch.
_ATTENTION_OPS = """
aten._scaled_dot_product_flash_attention aten._scaled_dot_product_flash_attention_for_cpu
aten._scaled_dot_product_efficient_attention aten._scaled_dot_product_cudnn_attention
aten._scaled_dot_product_fused_attention_overrideable aten._flash_attention_forward aten._efficient_attention_forward
torch_attn._varlen_attn higher_order.flex_attention
""".split()
# Matrix products and collectives, which selective also keeps; not products of batches, whose results are attention's
# scores (quadratic in the length) or, in Gemma 3n, changed in place.
_PRODUCT_OPS = """
aten.mm aten.addmm aten._scaled_mm aten._grouped_mm aten._scaled_grouped_mm aten.convolution
_c10d_functional.all_reduce _c10d_functional.reduce_scatter_tensor _c10d_functional.all_gather_into_tensor
_c10d_functional.all_to_all_single
""".split()
# Before torch 2.15 kept results are not offloaded and stay on the device: delete when the minimum is 2.15.
_OFFLOADS_KEPT: Any = dict.fromkeys({"respect_saved_tensors_hooks"} & signature(checkpoint).parameters.keys(), True)

_hosts: list[Any] = []  # offload contexts of the running blocks
host_copies: list[Any] = []
"""Of a running simulation: functions that replace the copy of a tensor to the host, and the copy back."""


def prepare_blocks(
    blocks: Iterable[nn.Module],
    config: ActivationConfig,
    compile: bool = False,
    path: str = "trainer.strategy.init_args.activation_checkpointing",
) -> None:
    """Apply an activation checkpointing mode, offload and compilation to the blocks, replacing earlier settings.

    The mode ``every_n`` recomputes blocks 0, n, 2n, ...: recomputing the last block would not lower the peak.

    Raises:
        ConfigError: Tiles are set, but no block has a feed-forward layer that can be tiled.
    """
    blocks, num_tiled = list(blocks), 0
    what: str = "no" if config.mode == "none" else config.mode
    backend: Any = BACKEND if compile else None
    if config.mode == "memory_budget":
        budget = 0.5 if config.memory_budget is None else config.memory_budget
        what, backend = f"budget {budget}", backend and _within(budget)
    for index, block in enumerate(blocks):
        if config.mode == "every_n":
            what = "no" if index % (config.n or 2) else "full"
        forward: Any = getattr(block.forward, "_original", block.forward)
        original, words = forward, what
        if apply_tiles(block, config.tiles if what == "full" else None):
            num_tiled, words = num_tiled + 1, f"{what}, {config.tiles} tiles"
        if what in ("full", "selective"):
            forward = _recomputed(block, forward, what)
        if backend is not None:
            forward = torch.compile(forward, backend=backend)
        if config.offload_activations:
            # pinned copies lose the strides that compiled code expects
            pin_memory = torch.accelerator.is_available() and backend is None
            forward, words = _offloaded(block, forward, pin_memory), f"{words}, offloaded"
        if forward is not original:
            forward._activations, forward._original = words, original
        if forward is not original or hasattr(block.forward, "_original"):
            block.forward = forward
    classes = ", ".join(sorted({type(child).__name__ for block in blocks for child in block.children()}))
    given = f"{config.tiles}, but no block has a feed-forward layer that can be tiled (submodules: {classes})"
    allowed = "a model whose blocks have a feed-forward layer, named mlp or similar, without experts"
    require(num_tiled or not config.tiles, f"{path}.tiles", given, allowed, "drop tiles")


def recomputes(block: nn.Module) -> str:
    """Recomputation mode of a block: ``no``, ``full, 4 tiles``, ``selective``; with ``, offloaded`` if applicable."""
    return getattr(block.forward, "_activations", "no")


def recompute_by_unit(plan: UnitPlan) -> dict[str, str]:
    """Recomputation mode of each unit, from the block around it or from blocks inside it that are not units."""
    around = {module: block for block in plan.blocks for module in block.modules()}
    found = {name: recomputes(around[m]) if m in around else "no" for name, m in plan.modules.items()}
    inside: Counter[tuple[str, str]] = Counter()
    for block in set(plan.blocks).difference(plan.modules.values()):
        units = (name for name, module in plan.modules.items() if block in set(module.modules()))
        inside[max(units, key=len, default=""), recomputes(block)] += 1
    return found | {unit: f"{count} blocks {word}" for (unit, word), count in inside.items() if word != "no"}


def _kept_ops(what: str) -> list[Any]:
    names = [*_ATTENTION_OPS, *(_PRODUCT_OPS if what == "selective" else [])]
    found = [getattr(getattr(torch.ops, space), op, None) for space, op in (name.split(".") for name in names)]
    return [getattr(op, "default", op) for op in found if op is not None]


def _in_training(block: nn.Module, forward: Callable[..., Any], changed: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (changed if block.training and torch.is_grad_enabled() else forward)(*args, **kwargs)

    return call


def _recomputed(block: nn.Module, forward: Callable[..., Any], what: str) -> Callable[..., Any]:
    keep = _kept_ops(what)
    attends = {getattr(getattr(m, "config", None), "_attn_implementation", None) for m in block.modules()} - {None}
    has_ops = not attends or bool(attends & {"sdpa", BY_SAMPLE})  # other backends do not use torch's operators

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        options: dict[str, Any] = {}
        if torch.compiler.is_compiling():
            if what == "selective":
                # created here and not outside, because the compiler must see the parts
                contexts: Any = functools.partial(create_selective_checkpoint_contexts, list(keep))
                options = {"context_fn": contexts, **_OFFLOADS_KEPT}
        elif what == "selective":
            options = {"context_fn": lambda: (_ResultsKept(keep, is_called=False, keeps_short=True),) * 2}
        elif has_ops:
            options = {"context_fn": lambda: (_ResultsKept(keep, is_called=BY_SAMPLE in attends),) * 2}
        return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)

    return _in_training(block, forward, checkpointed)


class _ResultsKept:
    """The context of a recomputed region in both passes, which reuses the results of chosen operators.

    torch's context for selected operators supports one backward pass, and gives wrong gradients without an error if
    code changes a kept result in place (findings/selective-checkpoint-misses-in-place-change-behind-a-view.sh). With
    ``is_called`` lit_fsdp's attention enters this context, so that it intercepts only attention's operators; otherwise
    it intercepts the whole region, which is slower.
    """

    def __init__(self, ops: list[Any], is_called: bool, keeps_short: bool = False) -> None:
        self._mode, self._is_called = _Keeping(ops, keeps_short), is_called

    def __enter__(self) -> None:
        self._mode.position = 0
        if self._is_called:
            kept_by.append(self._mode)
        else:
            self._mode.__enter__()

    def __exit__(self, *raised: Any) -> None:
        if self._is_called:
            kept_by.pop()
        else:
            self._mode.__exit__(*raised)


class _Keeping(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, ops: list[Any], keeps_short: bool) -> None:
        super().__init__()
        self._pack: Any = _hosts[-1].pack_hook if _hosts else torch.Tensor.detach
        self._unpack: Any = _hosts[-1].unpack_hook if _hosts else torch.Tensor.detach
        self._ops, self._keeps_short, self.position = frozenset(ops), keeps_short, 0
        self._kept: list[Any] = []
        self._number_of: dict[int, int] = {}  # of a kept result, by the address of its storage; not of copies on hosts

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if op not in self._ops or not _is_worth_keeping(op, args, kwargs, self._keeps_short):
            for tensor in _written(op, args, kwargs) if self._number_of else ():
                self._copy_kept(tensor)
            return op(*args, **kwargs)
        self.position += 1
        if self.position <= len(self._kept):
            return tree_map_only(functools.partial, lambda again: again().detach(), self._kept[self.position - 1])
        out = op(*args, **kwargs)
        self._kept.append(self._all_kept(out, len(self._kept)))
        return out

    def _all_kept(self, out: Any, number: int) -> Any:
        if self._pack is torch.Tensor.detach:
            self._number_of |= {_address(tensor): number for tensor in tree_leaves(out) if torch.is_tensor(tensor)}
        return tree_map_only(torch.Tensor, self._keep, out)

    def _keep(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        return functools.partial(self._unpack, self._pack(tensor.detach()))

    def _copy_kept(self, tensor: torch.Tensor) -> None:
        """Keep a copy of a result that is about to be changed in place."""
        number = self._number_of.pop(_address(tensor), None)
        if number is not None:
            copies = tree_map_only(functools.partial, lambda again: again().clone(), self._kept[number])
            self._kept[number] = self._all_kept(copies, number)


def _address(tensor: torch.Tensor) -> int:
    return 0 if isinstance(tensor, DTensor) else tensor.untyped_storage()._cdata


def _written(op: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that an operator changes in place."""
    if not isinstance(op, torch._ops.OpOverload) or not op._schema.is_mutable:
        return []
    given = zip(op._schema.arguments, [*args, *([None] * len(op._schema.arguments))], strict=False)
    values = [
        kwargs.get(argument.name, value)
        for argument, value in given
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [tensor for tensor in tree_leaves(values) if torch.is_tensor(tensor)]


def _is_worth_keeping(op: Any, args: Any, kwargs: Any, keeps_short: bool) -> bool:
    """Whether to keep a result: unless ``keeps_short``, if rows are at least twice as long as all heads are wide.

    Attention of shorter rows is cheap to recompute. Calls with dropout are not kept: later random numbers are
    reproduced only if they are computed again.
    """
    arguments = op._schema.arguments if hasattr(op, "_schema") else ()
    place = next((i for i, argument in enumerate(arguments) if argument.name == "dropout_p"), len(args))
    drops = kwargs.get("dropout_p", args[place] if place < len(args) else 0)
    if drops or keeps_short:
        return not drops
    query = args[0]  # (B, H, T, D), or (N, H, D) for joined samples, where the sixth argument is the longest length
    num_tokens = query.shape[2] if query.dim() == 4 else args[5]
    return bool(num_tokens >= 2 * query.shape[1] * query.shape[-1])


def _offloaded(block: nn.Module, forward: Callable[..., Any], pin_memory: bool) -> Callable[..., Any]:
    def offloaded(*args: Any, **kwargs: Any) -> Any:
        _hosts.append(_SaveOnHost(block, pin_memory))
        try:
            with _hosts[-1]:
                return forward(*args, **kwargs)
        finally:
            _hosts.pop()

    return _in_training(block, forward, offloaded)


def _pinned(tensor: torch.Tensor) -> tuple[torch.device, torch.Tensor]:
    """Copy a tensor to pinned memory with its strides.

    The pinned copies of ``save_on_cpu`` are contiguous (torch 2.15), so that recomputation with ``selective`` would run
    other operations than the forward pass: delete when they keep strides.
    """
    copied = torch.empty_like(tensor, device="cpu", pin_memory=True)
    copied.copy_(tensor)
    return tensor.device, copied


class _SaveOnHost(torch.autograd.graph.save_on_cpu):
    """torch's ``save_on_cpu`` that does not copy parameters, because the engine frees and gathers them itself."""

    def __init__(self, block: nn.Module, pin_memory: bool) -> None:
        super().__init__(pin_memory=pin_memory)
        pack, unpack = host_copies[-1] if host_copies else (_pinned if pin_memory else self.pack_hook, self.unpack_hook)

        def is_own(tensor: torch.Tensor) -> bool:
            where = tensor.untyped_storage()._cdata  # units inside the block are gathered now, or never
            gathered = (p for p in block.parameters() if not isinstance(p, DTensor))
            return any(p.untyped_storage()._cdata == where for p in gathered)

        self.pack_hook = lambda t: t if is_own(t) else pack(t)
        self.unpack_hook = lambda packed: packed if torch.is_tensor(packed) else unpack(packed)


def _within(budget: float) -> Callable[..., Any]:
    """A backend with a memory budget, which is a global torch setting that is read while a block is compiled."""
    import torch._functorch.config as functorch_config
    from torch._dynamo.backends.registry import lookup_backend

    def compile_within_budget(graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        with functorch_config.patch(activation_memory_budget=budget):
            return lookup_backend(BACKEND)(graph, inputs, **options)

    return compile_within_budget


def resolve_gradient_checkpointing(module: nn.Module, config: ActivationConfig, path: str) -> ActivationConfig:
    """Disable transformers' ``gradient_checkpointing``; if it was enabled, our mode ``none`` becomes ``full``."""
    flagged: list[Any] = [m for m in module.modules() if getattr(m, "gradient_checkpointing", False) is True]
    if not flagged:
        return config
    for child in flagged:
        child.gradient_checkpointing = False
    ours = dataclasses.replace(config, mode="full") if config.mode == "none" else config
    if dist.get_rank() == 0:
        text = f"the model's gradient_checkpointing is disabled, because {path} applies: {ours.mode}"
        warnings.warn(text, stacklevel=2)
    return ours
