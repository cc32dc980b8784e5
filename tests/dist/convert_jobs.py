"""A configuration of Accelerate, run by Accelerate itself."""

from __future__ import annotations

from typing import Any

import torch

from tests.dist.import_jobs import loss_of, plain_model, plain_optimizer
from tests.dist.jobs import Rows


def train_with_accelerate(folder: str, mixed_precision: str, steps: int, forced: bool) -> dict[str, Any]:
    """Losses of a plain loop around ``Accelerator.prepare`` on the CPU, its units and dtypes at rest.

    On a CPU it quietly trains with DDP, whatever was asked for; ``forced`` tells it that it has FSDP.
    The loss is the mean over the supervised tokens of the global batch, and weight decay spares vectors, as ours.
    """
    from accelerate import Accelerator
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import FSDPModule

    accelerator = Accelerator(cpu=True, mixed_precision=mixed_precision)
    if forced:
        plugin = FullyShardedDataParallelPlugin()
        if mixed_precision != "no":
            plugin.set_mixed_precision(mixed_precision)
        for state in (PartialState(), accelerator.state):  # the second is refreshed from the first
            state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
    torch.manual_seed(0)
    model: Any = plain_model(folder)
    prepared: Any = accelerator.prepare(model, plain_optimizer(model, 2))
    model, optimizer = prepared
    rows, losses = Rows(accelerator.process_index, accelerator.num_processes, 1), []
    for step in range(steps):
        loss, mean = loss_of(model, rows[step])
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean)
    return {
        "losses": losses,
        "units": sorted(name for name, module in model.named_modules() if isinstance(module, FSDPModule)),
        "dtypes": sorted({str(p.dtype) for p in model.parameters()}),
        "sharded": all(hasattr(p, "to_local") for p in model.parameters()),
        "type": str(accelerator.distributed_type.value),
    }
