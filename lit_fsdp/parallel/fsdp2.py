"""Engine 2: torch's ``fully_shard`` under Lightning's ``ModelParallelStrategy``."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from lit_fsdp.metrics.hardware import is_accelerator
from lit_fsdp.parallel.base import EngineStrategy
from lit_fsdp.parallel.fully_sharded import apply_fully_shard, unit_options
from lit_fsdp.parallel.materialize import Materializer
from lit_fsdp.parallel.units import UnitPlan


class FSDP2Strategy(EngineStrategy, ModelParallelStrategy):
    """``fully_shard`` on every unit and on the LightningModule as the root, with parameters as DTensors."""

    def _start_process_group(self) -> None:
        ParallelStrategy.setup_environment(self)  # Lightning's own would build a second mesh
        self._setup_distributed()
        # Lightning's name for ranks with different samples: all ranks, in the existing group
        world: Any = dist.group.WORLD
        self._device_mesh = DeviceMesh.from_group(world, self.root_device.type, mesh_dim_names=("data_parallel",))
        self.lightning_module._device_mesh = self._device_mesh

    def reshard(self) -> None:
        """Free gathered parameters."""
        assert self._root is not None
        for module in self._root.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @contextmanager
    def _no_sync(self) -> Iterator[None]:
        root: Any = self._root
        root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            root.set_requires_gradient_sync(True)

    def unit_options(self) -> dict[str, Any]:
        """Keyword arguments of ``fully_shard`` for one unit, for modules that wrap themselves (``wrap: manual``)."""
        return unit_options(self.config, self.mesh)

    def _shard(self, module: nn.Module, plan: UnitPlan, materializer: Materializer) -> nn.Module:
        how = self.unit_options(), self.replicated, self._broadcast, is_accelerator(self.root_device)
        root = apply_fully_shard(module, plan, self.config, *how, expert_mesh=self.expert_mesh)
        materializer.fill_all()
        return root
