"""Engine 2: torch's ``fully_shard`` under Lightning's ``ModelParallelStrategy``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from lit_fsdp.parallel.base import EngineStrategy
from lit_fsdp.parallel.materialize import Materializer
from lit_fsdp.parallel.precision import TORCH_DTYPES
from lit_fsdp.parallel.units import UnitPlan, last_unit


class _Root(nn.Module):
    """Carries the root's hooks, so that ``training_step`` runs between them and ``self(...)`` inside it does not."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class FSDP2Strategy(EngineStrategy, ModelParallelStrategy):
    """``fully_shard`` on every unit and on the LightningModule as the root, with parameters as DTensors.

    Built by :func:`lit_fsdp.fsdp_strategy`.
    """

    def _start_process_group(self) -> None:
        ParallelStrategy.setup_environment(self)  # Lightning's own would build a second mesh
        self._setup_distributed()

    def setup_environment(self) -> None:
        """Start the process group and build the mesh; ``device_mesh`` of the LightningModule has Lightning's names."""
        super().setup_environment()
        world: Any = dist.group.WORLD  # so that no further group is made
        self._device_mesh = DeviceMesh.from_group(world, self.root_device.type, mesh_dim_names=("data_parallel",))
        self.lightning_module._device_mesh = self._device_mesh

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Every rank takes its own samples, whatever the mesh."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def reshard(self) -> None:
        assert self._root is not None
        for module in self._root.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _no_sync(self) -> AbstractContextManager[Any]:
        return _without_gradient_sync(self._root)

    def unit_options(self) -> dict[str, Any]:
        """Keyword arguments of ``fully_shard`` for one unit, for modules that wrap themselves (``wrap: manual``)."""
        row, config = self.config.precision_config.row, self.config
        policy = MixedPrecisionPolicy()
        if row.compute != row.param or row.reduce != row.param:
            policy = MixedPrecisionPolicy(TORCH_DTYPES[row.compute], TORCH_DTYPES[row.reduce], cast_forward_inputs=True)
        options: dict[str, Any] = {"mesh": self.mesh, "mp_policy": policy}
        if config.sharding in ("shard_grad_op", "hybrid_shard_zero2"):
            options["reshard_after_forward"] = False
        if config.cpu_offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
        return options

    def _shard(self, module: nn.Module, plan: UnitPlan, materializer: Materializer) -> nn.Module:
        options = {**self.unit_options(), "ignored_params": set(self.replicated)}
        reduce = TORCH_DTYPES[self.config.precision_config.row.reduce]
        norms = MixedPrecisionPolicy(TORCH_DTYPES["fp32"], reduce, cast_forward_inputs=True)
        for unit in plan.units[:-1]:
            child = plan.modules[unit.name]
            if isinstance(child, FSDPModule):  # wrap: manual
                continue
            self._broadcast(child)
            fully_shard(child, **{**options, "mp_policy": norms} if unit.keeps_fp32 else options)
        self._broadcast(module)
        root: Any = _Root(module)
        policy = dataclasses.replace(options["mp_policy"], cast_forward_inputs=False)
        fully_shard(root, **{**options, "mp_policy": policy})
        if hasattr(root, "set_reduce_scatter_unused_params"):  # torch >= 2.13
            # Ranks that use different parameters would reduce different lists of gradients, and mix them up.
            root.set_reduce_scatter_unused_params(True)
        for child in module.modules():
            materializer.fill(child)
        if not self.config.wrap_config.manual and (last := last_unit(plan, module)) is not None:
            last.set_reshard_after_forward(False, recurse=False)
        self._set_prefetch([child for child in module.modules() if child in set(plan.modules.values())])
        return root

    def _set_prefetch(self, ordered: list[Any]) -> None:
        """Explicit prefetching, ahead in the order of the module tree, which blocks are called in."""
        backward, forward = self.config.backward_prefetch, int(self.config.forward_prefetch)
        for i, unit in enumerate(ordered):
            if forward and ordered[i + 1 : i + 1 + forward]:
                unit.set_modules_to_forward_prefetch(ordered[i + 1 : i + 1 + forward])
            if backward == "none":  # an empty list would mean the default; a unit itself is there already
                unit.set_modules_to_backward_prefetch([unit])
            elif isinstance(backward, int) and i:
                unit.set_modules_to_backward_prefetch(ordered[max(0, i - backward) : i][::-1])


@contextmanager
def _without_gradient_sync(root: Any) -> Iterator[None]:
    root.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        root.set_requires_gradient_sync(True)
