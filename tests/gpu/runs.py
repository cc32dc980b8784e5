"""Short runs on one device, through the public API, as the tests need them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from lit_fsdp import CausalLMModule, Checkpoint, fsdp_strategy
from lit_fsdp.models.tokenizers import miniature_tokenizer
from tests.dist.jobs import Losses, TinyData
from tests.dist.reference import LEARNING_RATE, TINY, global_batch

STEPS_PER_CHECKPOINT = 5


class Peak(Callback):
    """Largest allocation of the device after the first step, in bytes; 0 on a CPU."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """The first step makes the optimizer state; the peak is taken over those after it."""
        if not torch.cuda.is_available():
            return
        if batch_idx == 0:
            torch.cuda.reset_peak_memory_stats()
        else:
            self.num_bytes = torch.cuda.max_memory_allocated()


class State(Callback):
    """A hash over all parameters and optimizer tensors at the end of training, bit for bit."""

    def __init__(self) -> None:
        self.digest = ""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Before Lightning moves anything off the device."""
        found = hashlib.sha256()
        optimizer = trainer.optimizers[0]
        for group in optimizer.param_groups:
            for param in group["params"]:
                for tensor in (param, *(v for v in optimizer.state[param].values() if torch.is_tensor(v))):
                    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
                    values = local.detach().cpu().contiguous().reshape(-1)
                    found.update(values.view(torch.uint8).numpy().tobytes())
        self.digest = found.hexdigest()


class LongRows(LightningDataModule):
    """Batches whose activations outweigh the model's weights."""

    def train_dataloader(self) -> DataLoader[Any]:
        """The same rows over and over: 8 of 256 tokens."""
        return DataLoader([global_batch(step, rows=8, length=256) for step in range(4)], batch_size=None)


def save_model(folder: Path, changes: dict[str, Any]) -> Path:
    """The tiny Llama of the distributed tests, changed, with random weights and a tokenizer, as a model folder."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**{**TINY.to_dict(), **changes})).save_pretrained(folder)
    miniature_tokenizer().save_pretrained(folder)
    return folder


def train(
    folder: Path,
    accelerator: str,
    strategy: dict[str, Any],
    run: Path | None = None,
    data: LightningDataModule | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Losses, realized dtypes, peak memory and final state of a run; with a run folder it saves every five steps."""
    torch.manual_seed(7)
    losses, peak, state = Losses(), Peak(), State()
    callbacks: list[Callback] = [losses, peak, state]
    if run is not None:
        callbacks.append(Checkpoint(every_steps=STEPS_PER_CHECKPOINT, keep_last=-1))
        options["default_root_dir"] = str(run)
    ckpt_path, model = options.pop("ckpt_path", None), options.pop("model", {})
    trainer = Trainer(
        accelerator=accelerator,
        devices=1,
        strategy=fsdp_strategy(**strategy),
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=run is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        max_epochs=-1,
        **options,
    )
    optim = {"lr": LEARNING_RATE, "schedule": "constant", "weight_decay": 0.1}
    module = CausalLMModule(name=str(folder), optim=optim, **model)
    trainer.fit(module, datamodule=data or TinyData(), ckpt_path=ckpt_path)
    live: Any = trainer.strategy
    return {
        "losses": losses.values,
        "realized": {what: set(found) for what, found in live.contract.report()["realized"].items()},
        "device": live.root_device.type,
        "peak_bytes": peak.num_bytes,
        "digest": state.digest,
    }


def plain_losses(folder: Path, device: str, steps: int) -> list[float]:
    """Losses of a plain fp32 PyTorch loop on the same batches, on the same device."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).train()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True)
    losses = []
    for step in range(steps):
        loss = plain_loss(model, step, device)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def plain_loss(model: torch.nn.Module, step: int, device: str) -> torch.Tensor:
    """Mean loss over the supervised tokens of a global batch, by transformers and torch alone."""
    batch = {name: tensor.to(device) for name, tensor in global_batch(step).items()}
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)
