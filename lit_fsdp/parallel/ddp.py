"""Whole models on every rank (``ddp``) or on a single rank (``single``); the mode ``mixed`` uses torch's autocast."""

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lit_fsdp.metrics.hardware import is_accelerator
from lit_fsdp.parallel.base import EngineStrategy
from lit_fsdp.parallel.materialize import Materializer, has_meta
from lit_fsdp.parallel.precision import TORCH_DTYPES
from lit_fsdp.parallel.units import UnitPlan


class ReplicatedStrategy(EngineStrategy, DDPStrategy):
    """``DistributedDataParallel`` around the LightningModule, or with ``single`` the unwrapped LightningModule."""

    restore_checkpoint_after_setup = True  # tensors are loaded into the model on its device
    lightning_restore_optimizer = False  # the strategy loads optimizer tensors itself

    def load_model_state_dict(self, *_: Any, **__: Any) -> None:
        """Do nothing: :meth:`load_checkpoint` has already loaded it."""

    def teardown(self) -> None:
        """Same as Lightning's, which moves the model to the host, except a model that an error left on meta."""
        module = self._lightning_module
        self._lightning_module = None if module is not None and has_meta(module) else module
        super().teardown()
        self._lightning_module = module

    def _no_sync(self) -> AbstractContextManager[Any]:
        return self._root.no_sync() if isinstance(self._root, DistributedDataParallel) else nullcontext()

    def _shard(self, module: nn.Module, plan: UnitPlan, materializer: Materializer) -> nn.Module:
        row = self.config.precision_config.row
        if row.compute != row.param:
            self._plugin.autocast = (self.root_device.type, TORCH_DTYPES[row.compute])
        self._broadcast(module)  # existing tensors; each rank reads the others itself
        materializer.fill_all()
        if self.config.engine == "single" or not any(p.requires_grad for p in module.parameters()):
            return module
        on_device = [self.root_device] if is_accelerator(self.root_device) else None
        # find_unused_parameters keeps the buckets. Otherwise DDP rebuilds them after the first step of a process, which
        # changes the order of summation: a resumed run would not be bit-equal.
        warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
        unused = self.config.find_unused_parameters
        wrapped = DistributedDataParallel(module, device_ids=on_device, init_sync=False, find_unused_parameters=unused)
        wrapped.broadcast_buffers = False  # torch 2.13 renamed the argument
        wrapped.register_comm_hook(TORCH_DTYPES[row.reduce], _average)
        return wrapped


def _average(dtype: torch.dtype, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Mean over ranks in the reduce dtype; issued from Python, so that the dtype contract observes it."""
    buffer = bucket.buffer()
    work = dist.all_reduce((buffer / dist.get_world_size()).to(dtype), async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0].to(buffer.dtype))
