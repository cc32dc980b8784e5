"""Gradient norms by parameter, equal to those of a single process."""

import logging
import sys
import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.grads import grad_norm
from torch import nn
from torch.distributed.tensor import DTensor

from lit_fsdp.checkpoint.state import local_part
from lit_fsdp.errors import require
from lit_fsdp.models.attention import source_of
from lit_fsdp.parallel.units import clean_name

_log = logging.getLogger(__name__)
STRATEGIES: Any = weakref.WeakSet()
"""Live strategies; each one knows its parameters."""


def grad_norms(module: nn.Module, norm_type: float | str, group_separator: str = "/") -> dict[str, torch.Tensor]:
    """Compute the gradient norm of each parameter of a module and of all together, equal to those of one process.

    Keys and values match ``lightning.pytorch.utilities.grad_norm``, which sees only this rank's shards. Every rank must
    call it, e.g. in ``on_before_optimizer_step``; with :class:`lit_fsdp.CausalLMModule` after its own hook.

    Args:
        module: The LightningModule, or any part of it.
        norm_type: The p of the norms, above 0, or ``inf``.
        group_separator: Between ``grad_{p}_norm`` and the name of a parameter.

    Returns:
        Scalars, equal on all ranks: ``grad_{p}_norm/NAME`` of each parameter with a gradient, ``grad_{p}_norm_total``.

    Raises:
        ConfigError: The argument ``norm_type`` is not above 0.
    """
    power = float(norm_type)
    require(power > 0, "norm_type", norm_type, "a number above 0, or inf")
    strategy = _strategy_of(module)
    params = {clean_name(name): param for name, param in module.named_parameters() if param.requires_grad}
    if strategy is None:
        has_grad = [param.grad is not None for param in params.values()]
    else:
        has_grad = strategy.have_gradients(list(params.values()))
    names = [name for name, has in zip(params, has_grad, strict=True) if has]
    if not names:
        return {}
    group = None if strategy is None else strategy.shard_group
    norms = torch.stack([_own_norm(params[name], power, group, strategy) for name in names])
    if group is not None:
        dist.all_reduce(norms, dist.ReduceOp.MAX if power == float("inf") else dist.ReduceOp.SUM, group=group)
    norms = (norms if power == float("inf") else norms ** (1 / power)).float()
    key = f"grad_{power}_norm"
    found = {f"{key}{group_separator}{name}": norm for name, norm in zip(names, norms.unbind(), strict=True)}
    return {**found, f"{key}_total": norms.norm(power)}


def _strategy_of(module: nn.Module) -> Any:
    """The sharding strategy that owns the module's parameters; None if they are whole on every rank."""
    first = next(module.parameters(), None)
    return next((one for one in STRATEGIES if one.config.is_sharded and id(first) in one._names), None)


def _own_norm(param: nn.Parameter, power: float, group: Any, strategy: Any) -> torch.Tensor:
    """This rank's contribution to the norm of a gradient, in fp64: for a finite ``power`` the norm to that power."""
    grad: Any = param.grad
    local = local_part(grad)
    is_whole = not isinstance(grad, DTensor) and (strategy is None or any(param is one for one in strategy.replicated))
    device = param.device if strategy is None else strategy.root_device
    if local is None or not local.numel() or (is_whole and group is not None and dist.get_rank(group)):
        return torch.zeros((), dtype=torch.float64, device=device)  # another rank adds it
    norm = torch.linalg.vector_norm(local, power, dtype=torch.float32).to(device).double()
    return norm if power == float("inf") else norm**power


def warn_of_local_norms(parts: Iterable[Any], is_flat: bool) -> None:
    """Warn if the code of these objects computes norms that see only this rank's shards.

    These are Lightning's function and, for the plain tensors of fsdp1 (``is_flat``), torch's clipping.
    """
    kinds: list[Any] = list(dict.fromkeys(type(part) for part in parts))
    for cls in kinds if is_flat else ():
        if "clip_grad_norm_(" in source_of(cls):
            text = "%s calls clip_grad_norm_, which on fsdp1 clips by the norm of this rank's shards; use "
            text += "self.clip_gradients(...), Trainer(gradient_clip_val=...) or the engine fsdp2"
            _log.warning(text, cls.__name__)
    for module in dict.fromkeys(cls.__module__ for cls in kinds):
        if any(value is grad_norm for value in vars(sys.modules[module]).values()):
            text = "%s imports lightning.pytorch.utilities.grad_norm, which sees only this rank's shards and fails on "
            _log.warning(
                f"{text}DTensors; use lit_fsdp.grad_norms on every rank, with the same result as on one rank", module
            )
