"""Engine 1: torch's ``FullyShardedDataParallel`` under Lightning's ``FSDPStrategy``."""

import dataclasses
import functools
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp._runtime_utils import _reshard
from torch.distributed.fsdp.wrap import CustomPolicy, enable_wrap
from torch.utils._pytree import tree_map_only

from lit_fsdp.metrics.hardware import is_accelerator
from lit_fsdp.parallel.base import EngineStrategy
from lit_fsdp.parallel.materialize import Materializer
from lit_fsdp.parallel.precision import TORCH_DTYPES, cast_inputs
from lit_fsdp.parallel.units import UnitPlan, last_unit

_PREFETCH = {"pre": BackwardPrefetch.BACKWARD_PRE, "post": BackwardPrefetch.BACKWARD_POST, "none": None}


class FSDP1Strategy(EngineStrategy, FSDPStrategy):
    """``FullyShardedDataParallel`` around every unit and the LightningModule, always with original parameters."""

    def model_sharded_context(self) -> AbstractContextManager[Any]:  # type: ignore[override]
        """Enable ``wrap()`` for ``wrap: manual`` only; otherwise :meth:`setup` wraps the finished model."""
        manual = self.config.wrap_config.manual
        return enable_wrap(wrapper_cls=FullyShardedDataParallel, **self.unit_options()) if manual else nullcontext()

    def _no_sync(self) -> AbstractContextManager[Any]:
        root: Any = self._root
        return root.no_sync()

    def _shard(self, module: nn.Module, plan: UnitPlan, materializer: Materializer) -> nn.Module:
        is_meta, on_cpu = any(p.is_meta for p in module.parameters()), not is_accelerator(self.root_device)
        if on_cpu or is_meta:
            self._broadcast(module)  # sync_module_states refuses tensors on the CPU and on meta
        own: Any = self.unit_options()
        row, mixed = self.config.precision_config.row, own["mixed_precision"]
        options: dict[nn.Module, Any] = {}
        for unit in plan.units[:-1]:
            dtype, wrapped = TORCH_DTYPES["fp32" if unit.keeps_fp32 else row.compute], plan.modules[unit.name]
            options[wrapped] = {"mixed_precision": mixed and dataclasses.replace(mixed, param_dtype=dtype)}
            if row.compute != row.param:  # FSDP1 casts no inputs during backward, when blocks are recomputed
                cast_inputs(wrapped, dtype)
        if (last := last_unit(plan, module)) is not None:  # the backward pass needs it immediately
            options[last]["sharding_strategy"] = self._sharding(stays=True)
        if mixed is not None:
            mixed = dataclasses.replace(mixed, cast_forward_inputs=False, cast_root_forward_inputs=False)
        policy = None if self.config.wrap_config.manual else CustomPolicy(lambda child: options.get(child, False))
        root = FullyShardedDataParallel(
            module,
            auto_wrap_policy=policy,
            param_init_fn=materializer.fill if is_meta else None,
            sync_module_states=self.config.sync_module_states and not is_meta and not on_cpu,
            ignored_states=self.replicated,
            **{**own, "mixed_precision": mixed},
        )
        units = {m.module: m for m in root.modules() if isinstance(m, FullyShardedDataParallel)}
        for parent in list(root.modules()):  # torch wraps a shared module only at its first occurrence
            for name, child in parent._modules.items():
                if child in units and parent is not units[child]:
                    parent._modules[name] = units[child]
        return root

    def unit_options(self) -> dict[str, Any]:
        """Keyword arguments of FSDP1 for one unit, also for ``wrap()`` in ``configure_model``."""
        row, config, mixed = self.config.precision_config.row, self.config, None
        # Warnings that one rank shards nothing and that no_shard is deprecated: the recipe already decides both.
        warnings.filterwarnings("ignore", message=".*(NO_SHARD|switching to use).*")
        if row.compute != row.param or row.reduce != row.param:
            mixed = MixedPrecision(
                param_dtype=TORCH_DTYPES[row.compute],
                reduce_dtype=TORCH_DTYPES[row.reduce],
                cast_forward_inputs=True,
                _module_classes_to_ignore=(),  # else FSDP1 makes batch norms separate units
            )
        assert not isinstance(config.backward_prefetch, int)
        return {
            "device_mesh": self._fsdp1_mesh,
            "sharding_strategy": self._sharding(config.keeps_gathered),
            "mixed_precision": mixed,
            "cpu_offload": CPUOffload(offload_params=True) if config.cpu_offload else None,
            "backward_prefetch": _PREFETCH[config.backward_prefetch],
            "forward_prefetch": bool(config.forward_prefetch),
            "limit_all_gathers": config.limit_all_gathers,
            "device_id": self.root_device,
            "use_orig_params": True,
        }

    def _sharding(self, stays: bool) -> ShardingStrategy:
        """Sharding strategy for the mesh; ``stays``: keep gathered from the forward to the backward pass."""
        if self.mesh.size(self.mesh.ndim - 1) == 1:
            return ShardingStrategy.NO_SHARD
        if self.mesh.ndim == 2:
            return ShardingStrategy._HYBRID_SHARD_ZERO2 if stays else ShardingStrategy.HYBRID_SHARD
        return ShardingStrategy.SHARD_GRAD_OP if stays else ShardingStrategy.FULL_SHARD

    @functools.cached_property
    def _fsdp1_mesh(self) -> Any:
        """The mesh for FSDP1, which replicates ``no_shard`` over a 1-D mesh."""
        fits = self.mesh.ndim == 1 or self.mesh.size(1) > 1
        return self.mesh if fits else init_device_mesh(self.root_device.type, (self.world_size,))

    def reshard(self) -> None:
        """Free gathered parameters."""
        root: Any = self._root
        units = FullyShardedDataParallel.fsdp_modules(root) if root._is_root else ()  # None before the first forward
        for unit in units:
            handle: Any = unit._handle
            if handle is not None and handle.uses_sharded_strategy and not handle.needs_unshard():
                _reshard(unit, handle, free_unsharded_flat_param=True)

    def optimizer_state(self, optimizer: Any, is_template: bool = False) -> dict[str, Any]:
        """Same as other engines; works around torch refusing parameters that are unused or in no optimizer."""
        own = getattr(optimizer, "_optimizer", optimizer)
        params = [p for p in self.lightning_module.parameters() if p.requires_grad]
        held = {id(p) for group in own.param_groups for p in group["params"]}
        # a rank without a part of a parameter has no state for it
        is_held = self._on_any_rank([id(p) in held for p in params]).tolist()
        has_state = self._on_any_rank([p in own.state for p in params]).tolist()
        found = list(zip(params, is_held, has_state, strict=True))
        alone = [p for p, here, _ in found if not here]
        unused = [p for p, here, has in found if here and not has and any(has_state)]
        like: Any = next((own.state[p] for p in params if p in own.state and p.dim()), {})
        buffers = [key for key, value in like.items() if torch.is_tensor(value) and value.dim()]
        others = {key: value for key, value in like.items() if key not in buffers}
        if unused:  # a rank may have parts of unused parameters only
            every: list[Any] = [None] * self.world_size
            dist.all_gather_object(every, (buffers, tree_map_only(torch.Tensor, torch.Tensor.cpu, others)))
            buffers, others = (buffers, others) if like else next((one for one in every if any(one)), every[0])
        for param in unused:
            own.state[param] = {**{key: torch.zeros_like(param) for key in buffers}, **others}
        try:
            for param in alone:
                param.requires_grad_(False)
            state = super().optimizer_state(optimizer, is_template)
        finally:
            for param in unused:
                del own.state[param]
            for param in alone:
                param.requires_grad_(True)
        for param in unused:
            state["state"].pop(self._names[id(param)], None)
        return state
