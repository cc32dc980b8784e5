"""Selective activation checkpointing: the results of some ops are kept, everything between them is recomputed."""

from __future__ import annotations

import difflib
import functools
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from lit_fsdp.errors import ConfigError
from lit_fsdp.parallel.host_copies import HostCopy, to_host

# Matrix products and attention in all their kernels; which of them exist depends on the build of torch. Collectives
# inside a block (tensor or expert parallel layers) are dear too.
_DEFAULT_OPS = """
aten.mm aten.addmm aten.bmm aten.baddbmm aten._scaled_mm aten._grouped_mm aten._scaled_grouped_mm aten.convolution
aten._scaled_dot_product_flash_attention aten._scaled_dot_product_flash_attention_for_cpu
aten._scaled_dot_product_efficient_attention aten._scaled_dot_product_cudnn_attention
aten._scaled_dot_product_fused_attention_overrideable aten._flash_attention_forward aten._efficient_attention_forward
higher_order.flex_attention _c10d_functional.all_reduce _c10d_functional.reduce_scatter_tensor
_c10d_functional.all_gather_into_tensor _c10d_functional.all_to_all_single
""".split()

Op = Any  # torch._ops.OpOverload or HigherOrderOperator


def default_ops() -> tuple[Op, ...]:
    """The ops kept without a list: matrix products, attention and collectives, as far as this torch has them."""
    found = (_find(name) for name in _DEFAULT_OPS)
    return tuple(op for op in found if op is not None)


def resolve_ops(names: Sequence[str] | None, path: str = "activation_checkpointing.ops") -> tuple[Op, ...]:
    """The torch ops of names like ``aten.mm`` or ``aten.mm.default``; ``None`` gives the default list.

    Args:
        names: ``namespace.op`` means its default overload.
        path: Where the list stands in the recipe, for errors.

    Raises:
        ConfigError: A name this torch does not know; names near to it are listed.
    """
    if names is None:
        return default_ops()
    found: dict[Op, None] = {}
    for name in names:
        op = _find(name)
        if op is None:
            near = _near(name)
            raise ConfigError(
                path,
                f"{name!r}, which torch {torch.__version__} does not know",
                f"ops as aten.mm or aten.mm.default; near: {', '.join(near)}",
                f"write {near[0]}, or drop ops for matrix products and attention",
            )
        found[op] = None
    return tuple(found)


def _find(name: str) -> Op | None:
    namespace, _, rest = name.partition(".")
    packet_name, _, overload = rest.partition(".")
    if not packet_name:
        return None
    packet = getattr(getattr(torch.ops, namespace), packet_name, None)
    if isinstance(packet, torch._ops.HigherOrderOperator):
        return None if overload else packet
    op = getattr(packet, overload or "default", None)
    # aten.add.default exists too, but only TorchScript's strings have it
    return op if isinstance(op, torch._ops.OpOverload) and op.name().replace("::", ".") in _registered() else None


@functools.lru_cache
def _registered() -> frozenset[str]:
    return frozenset(name.replace("::", ".") for name in torch._C._dispatch_get_all_op_names())


def _near(name: str) -> list[str]:
    """Existing names nearest to one, the most likely first; overloads only where there is no default one."""
    known = sorted(full for full in _registered() if full.startswith(("aten.", "_c10d_functional.")))
    namespace, _, rest = name.partition(".")
    packet = f"{namespace}.{rest.partition('.')[0]}" if rest else f"aten.{namespace}"
    overloads = [full for full in known if full.startswith(f"{packet}.") and ".out" not in full]
    near = [
        one for one in (packet, *overloads, *difflib.get_close_matches(packet, known, n=5, cutoff=0.5)) if _find(one)
    ]
    return (list(dict.fromkeys(near)) or ["aten.mm", "aten.addmm", "aten.bmm"])[:5]


def keep_ops(ops: tuple[Op, ...], offload: bool) -> tuple[Any, ...]:
    """A function and its argument, which make the ``context_fn`` of ``torch.utils.checkpoint``.

    Args:
        ops: From :func:`resolve_ops`; their results are not computed again.
        offload: Results wait in host memory. Not for compiled blocks, whose saved tensors pass through hooks.
    """
    return (_offloading_contexts, frozenset(ops)) if offload else (create_selective_checkpoint_contexts, list(ops))


def _offloading_contexts(ops: frozenset[Op]) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    kept: dict[Op, deque[Any]] = defaultdict(deque)
    return _Keep(ops, kept), _Reuse(ops, kept)


class _Keep(TorchDispatchMode):
    """In the forward pass: results of the ops go to the host. Torch's own contexts hold them where they are."""

    def __init__(self, ops: frozenset[Op], kept: dict[Op, deque[Any]]) -> None:
        super().__init__()
        self.ops, self.kept = ops, kept

    def __torch_dispatch__(self, func: Op, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in self.ops:
            self.kept[func].append(tree_map_only(torch.Tensor, to_host, result))
        return result


class _Reuse(TorchDispatchMode):
    """In the recomputation: the ops are not run again, their results come back in the order they were made."""

    def __init__(self, ops: frozenset[Op], kept: dict[Op, deque[Any]]) -> None:
        super().__init__()
        self.ops, self.kept = ops, kept

    def __torch_dispatch__(self, func: Op, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in self.ops:
            return func(*args, **(kwargs or {}))
        if not self.kept[func]:
            raise RuntimeError(f"{func}: a second backward pass through blocks with selective activation checkpointing")
        return tree_map_only(HostCopy, HostCopy.restore, self.kept[func].popleft())
