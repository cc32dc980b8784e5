"""Short runs on one device, through the public API, as the tests need them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig

from lit_fsdp import CausalLMModule, Checkpoint, fsdp_strategy
from lit_fsdp.callbacks.throughput import Throughput
from tests.dist.reference import LEARNING_RATE, TINY, global_batch, loop, save_tiny, step_loss
from tests.gpu.conftest import DRY_RUN

DEVICE, ACCELERATOR = ("cpu", "cpu") if DRY_RUN else ("cuda", "gpu")


def save_model(folder: Path, **changes: Any) -> Path:
    """A Llama with random weights and a tokenizer, as a model folder."""
    tiny = {name: value for name, value in TINY.to_dict().items() if name != "head_dim"}
    return save_tiny(folder, LlamaConfig(**{**tiny, "hidden_size": 64, "intermediate_size": 128, **changes}))


class Batches(LightningDataModule):
    """One global batch per step, from the Trainer's step on."""

    def __init__(self, rows: int = 12, length: int = 14) -> None:
        super().__init__()
        self.shape = (rows, length)

    def train_dataloader(self) -> DataLoader[Any]:
        """Twenty steps."""
        assert self.trainer is not None
        batches = [global_batch(step, *self.shape) for step in range(self.trainer.global_step, 20)]
        return DataLoader(batches, batch_size=None, generator=torch.Generator())  # type: ignore[arg-type]


class Watch(Callback):
    """Losses of the steps, and the largest allocation of the device after the first one; 0 bytes on a CPU."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.peak_bytes = 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """The first step makes the optimizer state."""
        self.losses.append(float(trainer.callback_metrics["train_loss"]))
        if torch.cuda.is_available():
            if len(self.losses) == 1:
                torch.cuda.reset_peak_memory_stats()
            self.peak_bytes = torch.cuda.max_memory_allocated()


def train(
    folder: Path,
    strategy: dict[str, Any],
    max_steps: int = 6,
    data: LightningDataModule | None = None,
    model: dict[str, Any] | None = None,
    saving: Checkpoint | None = None,
    ckpt_path: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Losses, realized dtypes, logged metrics, backend and peak memory of a run in a process group of its own."""
    torch.manual_seed(7)
    watch = Watch()
    trainer = Trainer(
        accelerator=ACCELERATOR,
        devices=1,
        strategy=fsdp_strategy(**strategy),
        callbacks=[watch, Throughput(), *([saving] if saving else [])],
        logger=False,
        enable_checkpointing=saving is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        log_every_n_steps=1,
        max_epochs=-1,
        max_steps=max_steps,
        **options,
    )
    optim = {"lr": LEARNING_RATE, "schedule": "constant", "weight_decay": 0.1}
    try:
        module = CausalLMModule(name=str(folder), optim=optim, **(model or {}))
        trainer.fit(module, datamodule=data or Batches(), ckpt_path=ckpt_path)
        live: Any = trainer.strategy
        return {
            "losses": watch.losses,
            "realized": {what: set(found) for what, found in live.contract.report()["realized"].items()},
            "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
            "backend": torch.distributed.get_backend(),
            "peak_bytes": watch.peak_bytes,
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
