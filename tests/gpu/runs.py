"""Short runs on one device, through the public API, as the tests need them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from lit_fsdp import CausalLMModule, Checkpoint, fsdp_strategy
from lit_fsdp.callbacks.throughput import Throughput
from lit_fsdp.models.tokenizers import miniature_tokenizer
from tests.gpu.conftest import DRY_RUN

DEVICE, ACCELERATOR = ("cpu", "cpu") if DRY_RUN else ("cuda", "gpu")
LEARNING_RATE = 3e-3
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "initializer_range": 0.08,
}


def save_model(folder: Path, **changes: Any) -> Path:
    """A Llama with random weights and a tokenizer, as a model folder."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**{**TINY, **changes})).save_pretrained(folder)
    miniature_tokenizer().save_pretrained(folder)
    return folder


def global_batch(step: int, rows: int = 12, length: int = 16) -> dict[str, torch.Tensor]:
    """Rows that count upwards from a random start, each with another number of supervised tokens."""
    starts = torch.randint(0, 40, (rows, 1), generator=torch.Generator().manual_seed(step))
    ids = (starts + torch.arange(length)) % 40
    labels = ids.clone()
    for row in range(rows):
        labels[row, : 1 + (row * 5 + step) % length] = -100
    return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}


class Batches(LightningDataModule):
    """One global batch per step, from the Trainer's step on."""

    def __init__(self, rows: int = 12, length: int = 16) -> None:
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
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True)
    losses = []
    for step in range(steps):
        batch = {name: tensor.to(DEVICE) for name, tensor in global_batch(step).items()}
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses
