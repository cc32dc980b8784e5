"""A configuration of Accelerate, run by Accelerate itself, as a job for the workers."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from tests.dist.jobs import Rows
from tests.dist.reference import LEARNING_RATE

_STATE = ("FSDP_", "ACCELERATE_")


def train_with_accelerate(
    folder: str, env: dict[str, str], mixed_precision: str, steps: int, forced: bool
) -> dict[str, Any]:
    """Losses of a plain loop around ``Accelerator.prepare`` on the CPU, its units and dtypes at rest.

    On a CPU it quietly trains with DDP, whatever was asked for; ``forced`` tells it that it has FSDP.
    The loss is the mean over the supervised tokens of the global batch, and weight decay spares vectors, as ours.
    """
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import FSDPModule

    before = dict(os.environ)
    os.environ.update(env)
    try:
        accelerator = Accelerator(cpu=True, mixed_precision=mixed_precision)
        if forced:
            plugin = FullyShardedDataParallelPlugin()
            if mixed_precision != "no":
                plugin.set_mixed_precision(mixed_precision)
            for state in (PartialState(), accelerator.state):  # the second is refreshed from the first
                state.distributed_type = DistributedType.FSDP
            accelerator.state.fsdp_plugin = plugin
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").train()
        decays = [p for p in model.parameters() if p.ndim >= 2]
        plain = [p for p in model.parameters() if p.ndim < 2]
        groups = [{"params": decays, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
        prepared: Any = accelerator.prepare(model, torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95)))
        model, optimizer = prepared
        rows = Rows(accelerator.process_index, accelerator.num_processes, 1)
        losses = []
        for step in range(steps):
            losses.append(_step(model, optimizer, accelerator, rows[step]))
        return {
            "losses": losses,
            "units": sorted(name for name, module in model.named_modules() if isinstance(module, FSDPModule)),
            "dtypes": sorted({str(p.dtype) for p in model.parameters()}),
            "sharded": all(hasattr(p, "to_local") for p in model.parameters()),
            "type": str(accelerator.distributed_type.value),
        }
    finally:
        for state in (AcceleratorState, PartialState, GradientState):
            state._reset_state()
        for name in [name for name in os.environ if name.startswith(_STATE)]:
            os.environ.pop(name)
        os.environ.update(before)


def _step(model: nn.Module, optimizer: Any, accelerator: Any, batch: dict[str, torch.Tensor]) -> float:
    labels = batch["labels"][:, 1:].flatten()
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
    total = nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), labels, ignore_index=-100, reduction="sum"
    )
    sums = torch.stack([total.detach().double(), (labels != -100).sum().double()])
    torch.distributed.all_reduce(sums)
    accelerator.backward(total * accelerator.num_processes / sums[1].float())
    optimizer.step()
    optimizer.zero_grad()
    return float(sums[0] / sums[1])
