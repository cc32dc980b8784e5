"""Short runs on one device, through the public API, as the tests need them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig

from lit_fsdp import Checkpoint
from lit_fsdp.callbacks.throughput import Throughput
from tests.dist.jobs import Losses, TinyData, module_for, trainer_for
from tests.dist.reference import TINY, global_batch, loop, save_tiny, step_loss
from tests.gpu.conftest import DRY_RUN

DEVICE, ACCELERATOR = ("cpu", "cpu") if DRY_RUN else ("cuda", "gpu")


def save_model(folder: Path, **changes: Any) -> Path:
    """The tiny model of other tests with these changes, as a folder."""
    tiny = {name: value for name, value in TINY.to_dict().items() if name != "head_dim"}
    return save_tiny(folder, LlamaConfig(**{**tiny, "hidden_size": 64, "intermediate_size": 128, **changes}))


class Batches(LightningDataModule):
    """One global batch of this shape per step."""

    def __init__(self, rows: int, length: int) -> None:
        super().__init__()
        self.shape = (rows, length)

    def train_dataloader(self) -> DataLoader[Any]:
        batches = [global_batch(step, *self.shape) for step in range(20)]
        return DataLoader(batches, batch_size=None, generator=torch.Generator())  # type: ignore[arg-type]


class Peak(Callback):
    """The largest allocation of the device after the first step, which makes the optimizer state; 0 on a CPU."""

    num_bytes = 0

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if torch.cuda.is_available():
            if trainer.global_step == 1:
                torch.cuda.reset_peak_memory_stats()
            self.num_bytes = torch.cuda.max_memory_allocated()


def train(
    folder: Path,
    strategy: dict[str, Any],
    max_steps: int = 6,
    data: LightningDataModule | None = None,
    model: dict[str, Any] | None = None,
    saving: Checkpoint | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Losses, realized dtypes, logged metrics, backend and peak memory of a run in a process group of its own."""
    torch.manual_seed(7)
    losses, peak = Losses(), Peak()
    options |= {"accelerator": ACCELERATOR, "log_every_n_steps": 1, "max_steps": max_steps}
    trainer = trainer_for(strategy, [losses, peak, Throughput(), *([saving] if saving else [])], **options)
    try:
        trainer.fit(module_for(str(folder), model), datamodule=data or TinyData())
        live: Any = trainer.strategy
        return {
            "losses": losses.values,
            "realized": {what: set(found) for what, found in live.contract.report()["realized"].items()},
            "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
            "backend": torch.distributed.get_backend(),
            "peak_bytes": peak.num_bytes,
        }
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def plain_losses(folder: Path, steps: int = 6) -> list[float]:
    """Losses of a plain fp32 PyTorch loop on the same batches, on the same device."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(DEVICE).train()

    def loss_of(step: int) -> torch.Tensor:
        return step_loss(model, {name: tensor.to(DEVICE) for name, tensor in global_batch(step).items()})

    return loop(model, loss_of, steps)
