"""Checkpoints that Lightning's own strategies and Accelerate really write, and what they would have done next.

Beside each checkpoint stands ``truth.pt``: the whole weights and moments by parameter name, gathered by torch.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from lit_fsdp import Checkpoint
from tests.dist.jobs import Rows, TinyData, fit, module_for, trainer_for
from tests.dist.reference import LEARNING_RATE

BETAS = (0.9, 0.95)


def plain_model(folder: str) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").train()


def plain_optimizer(model: nn.Module, groups: int) -> torch.optim.Optimizer:
    """AdamW with weight decay on matrices only (two groups), or with one group."""
    params = [p for p in model.parameters() if p.requires_grad]
    if groups == 1:
        return torch.optim.AdamW(params, lr=LEARNING_RATE, betas=BETAS, weight_decay=0.0)
    decays, plain = [p for p in params if p.ndim >= 2], [p for p in params if p.ndim < 2]
    split = [{"params": decays, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(split, lr=LEARNING_RATE, betas=BETAS)


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, float]:
    """This rank's share of the mean over the supervised tokens of the global batch, and that mean."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
    labels = batch["labels"][:, 1:].flatten()
    total = nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), labels, ignore_index=-100, reduction="sum"
    )
    sums = torch.stack([total.detach().double(), (labels != -100).sum().double()])
    ranks = 1
    if dist.is_initialized():
        dist.all_reduce(sums)
        ranks = dist.get_world_size()
    return total * ranks / sums[1].float(), float(sums[0] / sums[1])


class Stock(LightningModule):
    """A LightningModule that knows nothing of lit_fsdp."""

    def __init__(self, folder: str, groups: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = plain_model(folder)
        self.groups = groups
        self.losses: list[float] = []

    def configure_model(self) -> None:
        """For ModelParallelStrategy, which leaves the sharding to the module."""
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            for unit in (*self.net.model.layers, self.net):
                fully_shard(unit, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss, mean = loss_of(self.net, batch)
        self.losses.append(mean)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = plain_optimizer(self, self.groups)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)]


def _keep_truth(model: Any, optimizer: Any, out: str) -> None:
    whole = dcp_state.StateDictOptions(full_state_dict=True)
    weights = dcp_state.get_model_state_dict(model, options=whole)
    state = dcp_state.get_optimizer_state_dict(model, getattr(optimizer, "_optimizer", optimizer), options=whole)
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save({"weights": weights, "moments": state["state"]}, f"{out}.truth.pt")


class CPUFSDPStrategy(FSDPStrategy):
    """Lightning refuses its own class on a CPU, not a subclass of it, and torch a device without a number."""

    def model_sharded_context(self) -> Any:
        """Nothing is wrapped before :meth:`_setup_model`."""
        return nullcontext()

    def _setup_model(self, model: nn.Module) -> nn.Module:
        self.model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), **self.kwargs)
        return self.model


def _stock_strategy(name: str) -> Any:
    if name == "single":
        return "auto"
    if name == "fsdp2":
        return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")
    return CPUFSDPStrategy(state_dict_type="sharded", auto_wrap_policy={LlamaDecoderLayer}, use_orig_params=True)


def train_with_stock_lightning(
    folder: str, out: str, strategy: str, save_at: int, steps: int, groups: int
) -> list[float]:
    """The losses of all steps; ``out`` is what Lightning saved after step ``save_at``."""
    torch.manual_seed(0)
    module = Stock(folder, groups)

    def save(trainer: Trainer, *rest: Any) -> None:
        if trainer.global_step == save_at:
            trainer.save_checkpoint(out)
            owner = trainer.strategy.model if isinstance(trainer.strategy, FSDPStrategy) else module
            _keep_truth(owner, trainer.optimizers[0], out)

    trainer = trainer_for(_stock_strategy(strategy), [LambdaCallback(on_train_batch_end=save)], max_steps=steps)
    trainer.fit(module, datamodule=TinyData())
    return module.losses


def train_with_stock_accelerate(
    folder: str, steps: int, groups: int, out: str = "", save_at: int = 0, mixed_precision: str = "no"
) -> dict[str, Any]:
    """The losses of all steps, units and dtypes; ``out`` is what ``Accelerator.save_state`` wrote after a step."""
    from accelerate import Accelerator
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    accelerator = Accelerator(cpu=True, mixed_precision=mixed_precision)
    plugin = FullyShardedDataParallelPlugin()
    if mixed_precision != "no":
        plugin.set_mixed_precision(mixed_precision)
    for state in (PartialState(), accelerator.state):  # on a CPU it would quietly fall back to DDP
        state.distributed_type = DistributedType.FSDP
        state.device = torch.device("cpu")  # not cpu:0, which version 1 takes for another device
    accelerator.state.fsdp_plugin = plugin
    torch.manual_seed(0)
    model: Any = plain_model(folder)
    if plugin.fsdp_version == 1:
        plugin.optim_state_dict_config.offload_to_cpu = False
        model = accelerator.prepare(model)
        optimizer: Any = accelerator.prepare(plain_optimizer(model, groups))
    else:
        model, optimizer = accelerator.prepare(model, plain_optimizer(model, groups))
    scheduler: Any = accelerator.prepare(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0))
    rows = Rows(accelerator.process_index, accelerator.num_processes, 1)
    losses = []
    for step in range(steps):
        loss, mean = loss_of(model, rows[step])
        losses.append(mean)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step + 1 == save_at:
            # with several processes it would offload to the CPU, on which FSDP 1 fails where there is nothing else
            alone = property(lambda self: 1) if plugin.fsdp_version == 1 else Accelerator.num_processes
            with mock.patch.object(Accelerator, "num_processes", alone):
                accelerator.save_state(out)
            _keep_truth(model, optimizer.optimizer, out)
    return {
        "losses": losses,
        "units": sorted(name for name, module in model.named_modules() if isinstance(module, FSDPModule)),
        "dtypes": sorted({str(p.dtype) for p in model.parameters()}),
        "sharded": all(hasattr(p, "to_local") for p in model.parameters()),
    }


def continue_imported(
    folder: str, run: str, ckpt: str, strategy: dict[str, Any], steps: int, **optim: Any
) -> dict[str, Any]:
    """A run of ours from an imported folder; the losses and learning rates of its steps."""
    saving = Checkpoint(every_steps=steps)
    _, found = fit(module_for(folder, **optim), strategy, [saving], None, ckpt, steps, default_root_dir=run)
    return {**found, "rates": [groups[0]["lr"] for groups in found["groups"]]}
