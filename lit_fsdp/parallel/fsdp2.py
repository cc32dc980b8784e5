"""Engine 2: torch's ``fully_shard`` under Lightning's ``ModelParallelStrategy``."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from lit_fsdp.parallel.grad_norm import ClipsShardedGradients
from lit_fsdp.parallel.materialize import Materializer
from lit_fsdp.parallel.precision import TORCH_DTYPES
from lit_fsdp.parallel.sharded import ShardedStrategy
from lit_fsdp.parallel.units import UnitPlan


class _Precision(ClipsShardedGradients, Precision):
    """Casts nothing (the engine does); clips over shards."""


class _Root(nn.Module):
    """Carries the root's hooks, so that ``training_step`` runs between them and ``self(...)`` inside it does not."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class FSDP2Strategy(ShardedStrategy, ModelParallelStrategy):
    """``fully_shard`` on every unit and on the LightningModule as the root, with parameters as DTensors.

    Built by :func:`lit_fsdp.fsdp_strategy`.
    """

    precision_class = _Precision

    def setup_environment(self) -> None:
        """Start the process group and build the mesh."""
        self._check_environment()
        self._data_parallel_size, self._tensor_parallel_size = self.num_nodes * self.num_processes, 1
        super().setup_environment()
        self._build_mesh()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Every rank takes its own samples, whatever the mesh."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def _shard(self, module: nn.Module, plan: UnitPlan, materializer: Materializer) -> nn.Module:
        row = self.config.precision_config.row
        policy = MixedPrecisionPolicy()
        if row.compute != row.param or row.reduce != row.param:
            policy = MixedPrecisionPolicy(
                param_dtype=TORCH_DTYPES[row.compute], reduce_dtype=TORCH_DTYPES[row.reduce], cast_forward_inputs=True
            )
        kwargs: dict[str, Any] = {"mesh": self.mesh, "mp_policy": policy}
        if self.config.sharding == "shard_grad_op":
            kwargs["reshard_after_forward"] = False
        for unit in plan.units[:-1]:
            self._broadcast(plan.modules[unit.name])
            fully_shard(plan.modules[unit.name], **kwargs)
        self._broadcast(module)
        root: nn.Module = _Root(module)
        fully_shard(root, **kwargs)
        for child in module.modules():
            materializer.fill(child)
        return root

    def realised_units(self) -> list[str]:
        """Names of the modules that really are FSDP units, the root as ``""``."""
        assert self._root is not None
        found = [name for name, module in self._root.named_modules() if isinstance(module, FSDPModule)]
        return [name.removeprefix("module.") if name else "" for name in found]
