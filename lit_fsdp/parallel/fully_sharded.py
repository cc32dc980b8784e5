"""Apply torch's ``fully_shard`` to a model: units, dtypes, prefetching; used by runs and by memory plans."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from lit_fsdp.config.strategy import StrategyConfig
from lit_fsdp.metrics.hardware import is_accelerator
from lit_fsdp.parallel.expert_units import shard_experts
from lit_fsdp.parallel.precision import TORCH_DTYPES
from lit_fsdp.parallel.units import UnitPlan, last_unit


class _Root(nn.Module):
    """Carries the root's hooks, so that ``training_step`` runs between them and ``self(...)`` inside it does not."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class _OneRank:
    """A reduce-scatter of one rank on a CPU: torch gets the same buffer as input and output.

    On an accelerator the output must belong to another stream: memory freed during a copy could be overwritten.
    """

    _buffer: torch.Tensor | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if (buffer := self._buffer) is None:
            self._buffer = torch.empty(size, dtype=dtype, device=device)
            return self._buffer
        self._buffer = None
        return buffer

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: input and output are the same buffer."""


def unit_options(config: StrategyConfig, mesh: DeviceMesh) -> dict[str, Any]:
    """Keyword arguments of ``fully_shard`` for one unit."""
    row = config.precision_config.row
    policy = MixedPrecisionPolicy()
    if row.compute != row.param or row.reduce != row.param:
        policy = MixedPrecisionPolicy(TORCH_DTYPES[row.compute], TORCH_DTYPES[row.reduce], cast_forward_inputs=True)
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    if config.keeps_gathered:
        options["reshard_after_forward"] = False
    if config.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=is_accelerator(mesh.device_type))
    return options


def apply_fully_shard(
    module: nn.Module,
    plan: UnitPlan,
    config: StrategyConfig,
    options: dict[str, Any],
    replicated: Collection[nn.Parameter],
    prepare: Callable[[nn.Module], None],
    on_accelerator: bool,
    expert_mesh: DeviceMesh | None = None,
) -> nn.Module:
    """Call ``prepare`` on each unit and shard it, in place, and return the root to call.

    Under expert parallel, the mesh of experts is ``expert_mesh``.
    """
    options = {**options, "ignored_params": set(replicated)}
    reduce = TORCH_DTYPES[config.precision_config.row.reduce]
    norms = MixedPrecisionPolicy(TORCH_DTYPES["fp32"], reduce, cast_forward_inputs=True)
    for unit in plan.units[:-1]:
        child = plan.modules[unit.name]
        if isinstance(child, FSDPModule):  # wrap: manual
            continue
        prepare(child)
        if hasattr(child, "expert_group"):
            assert expert_mesh is not None
            shard_experts(child, expert_mesh, options)
            continue
        fully_shard(child, **{**options, "mp_policy": norms} if unit.keeps_fp32 else options)
    prepare(module)
    root: Any = _Root(module)
    policy = dataclasses.replace(options["mp_policy"], cast_forward_inputs=False)
    fully_shard(root, **{**options, "mp_policy": policy})
    _reduce_unused(root)
    if not config.wrap_config.manual and (last := last_unit(plan, module)) is not None:
        last.set_reshard_after_forward(False, recurse=False)
    for unit in root.modules() if not on_accelerator else ():
        mesh: Any = expert_mesh if hasattr(unit, "expert_group") else options["mesh"]
        if isinstance(unit, FSDPModule) and mesh.size() == 1:
            comm: Any = _OneRank()
            unit.set_custom_reduce_scatter(comm)
    units = set(plan.modules.values())
    _set_prefetch([child for child in module.modules() if child in units], config)
    return root


def _reduce_unused(root: Any) -> None:
    """Reduce zeros for parameters that this rank did not use, because all ranks must reduce the same parameters."""
    if hasattr(root, "set_reduce_scatter_unused_params"):
        root.set_reduce_scatter_unused_params(True)
        return
    # torch < 2.13, the last with these private names: delete when the minimum is 2.13
    for unit in root.modules():
        group: Any = unit._get_fsdp_state()._fsdp_param_group if isinstance(unit, FSDPModule) else None
        if group is not None:  # the unit has parameters of its own
            group.post_backward = functools.partial(_post_backward_with_zeros, group)


def _post_backward_with_zeros(group: Any, *unused: Any) -> None:
    params = [p for p in group.fsdp_params if hasattr(p, "_unsharded_param") and p.unsharded_param.requires_grad]
    for param in params if group.reduce_grads else ():
        if param.unsharded_param.grad is None and param.unsharded_accumulated_grad is None:
            param.unsharded_param.grad = torch.zeros_like(param.unsharded_param)
    type(group).post_backward(group, *unused)


def _set_prefetch(ordered: list[Any], config: StrategyConfig) -> None:
    """Set explicit prefetching in the order of the module tree, in which blocks are called."""
    backward, forward = config.backward_prefetch, int(config.forward_prefetch)
    for i, unit in enumerate(ordered):
        if forward and ordered[i + 1 : i + 1 + forward]:
            unit.set_modules_to_forward_prefetch(ordered[i + 1 : i + 1 + forward])
        if backward == "none":  # an empty list means the default; the unit itself is already gathered
            unit.set_modules_to_backward_prefetch([unit])
        elif isinstance(backward, int) and i:
            unit.set_modules_to_backward_prefetch(ordered[max(0, i - backward) : i][::-1])
