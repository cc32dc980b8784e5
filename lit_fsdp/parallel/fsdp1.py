"""Engine 1: torch's ``FullyShardedDataParallel`` under Lightning's ``FSDPStrategy``."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.plugins import FSDPPrecision
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy

from lit_fsdp.config.sharding import Sharding
from lit_fsdp.parallel.grad_norm import ClipsShardedGradients
from lit_fsdp.parallel.materialize import Materializer
from lit_fsdp.parallel.precision import TORCH_DTYPES
from lit_fsdp.parallel.sharded import ShardedStrategy
from lit_fsdp.parallel.units import UnitPlan

_SHARDING: dict[Sharding, ShardingStrategy] = {
    "full_shard": ShardingStrategy.FULL_SHARD,
    "shard_grad_op": ShardingStrategy.SHARD_GRAD_OP,
    "no_shard": ShardingStrategy.NO_SHARD,
    "hybrid_shard": ShardingStrategy.HYBRID_SHARD,
}


class _Precision(ClipsShardedGradients, FSDPPrecision):
    """Casts nothing (the engine does); clips over shards."""

    def __init__(self) -> None:
        super().__init__("32-true")

    def convert_input(self, data: Any) -> Any:
        """Batches as they come."""
        return data

    def convert_output(self, data: Any) -> Any:
        """Outputs as they come."""
        return data


class FSDP1Strategy(ShardedStrategy, FSDPStrategy):
    """``FullyShardedDataParallel`` around every unit and the LightningModule, always with original parameters.

    Built by :func:`lit_fsdp.fsdp_strategy`.
    """

    precision_class = _Precision

    def setup_environment(self) -> None:
        """Start the process group and build the mesh."""
        self._check_environment()
        super().setup_environment()
        self._build_mesh()

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Nothing is wrapped while the model is built; :meth:`setup` wraps."""
        yield

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Reduce in every micro-batch: ``no_sync`` would accumulate whole gradients in the compute dtype."""
        yield

    def _shard(self, module: nn.Module, plan: UnitPlan, materializer: Materializer) -> nn.Module:
        row = self.config.precision_config.row
        mixed = None
        if row.compute != row.param or row.reduce != row.param:
            mixed = MixedPrecision(
                param_dtype=TORCH_DTYPES[row.compute],
                reduce_dtype=TORCH_DTYPES[row.reduce],
                cast_forward_inputs=True,
                cast_root_forward_inputs=True,
            )
        is_meta = any(p.is_meta for p in module.parameters())
        on_cpu = self.root_device.type == "cpu"
        if on_cpu and not is_meta:
            self._broadcast(module)  # sync_module_states refuses CPU tensors
        units = set(plan.modules.values())
        with warnings.catch_warnings():
            # One rank shards nothing, and no_shard is deprecated in favour of DDP: both are said by the recipe.
            warnings.filterwarnings("ignore", message=".*(NO_SHARD|switching to use).*")
            return FullyShardedDataParallel(
                module,
                device_mesh=self._fsdp1_mesh(),
                sharding_strategy=_SHARDING[self._realised_sharding()],
                auto_wrap_policy=CustomPolicy(lambda child: child in units),
                mixed_precision=mixed,
                device_id=self.root_device,
                param_init_fn=materializer.fill if is_meta else None,
                sync_module_states=not is_meta and not on_cpu,
                use_orig_params=True,
            )

    def _realised_sharding(self) -> Sharding:
        """What hybrid sharding is at its ends: FSDP1 would not average copies of one rank, nor accept a single copy."""
        if self.mesh.size(self.mesh.ndim - 1) == 1:
            return "no_shard"
        is_one_copy = self.config.sharding == "hybrid_shard" and self.mesh.ndim == 1
        return "full_shard" if is_one_copy else self.config.sharding

    def _fsdp1_mesh(self) -> Any:
        """The 2-D mesh only for hybrid sharding; FSDP1 replicates ``no_shard`` over a 1-D mesh."""
        from torch.distributed.device_mesh import init_device_mesh

        if self.mesh.ndim == 1 or self._realised_sharding() == "hybrid_shard":
            return self.mesh
        return init_device_mesh(self.root_device.type, (self.world_size,))

    def realised_units(self) -> list[str]:
        """Names of the modules that really are FSDP units, the root as ``""``."""
        assert self._root is not None
        return [
            ".".join(part for part in name.split(".") if part and part != "_fsdp_wrapped_module")
            for name, module in self._root.named_modules()
            if isinstance(module, FullyShardedDataParallel)
        ]
