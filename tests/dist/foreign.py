"""Somebody else's modules under the factory, and the job that trains them."""

from __future__ import annotations

import os
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from tests.dist.jobs import trainer_for


def foreign_rows(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight rows of a regression."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, 12, generator=generator)
    return x, x.sum(dim=1, keepdim=True).sin()


class ForeignNet(LightningModule):
    """Somebody's module: knows nothing of ours, holds a parameter itself and calls itself in its step."""

    def __init__(self) -> None:
        super().__init__()
        blocks = (torch.nn.Sequential(torch.nn.Linear(12, 12), torch.nn.Tanh()) for _ in range(3))
        self.layers = torch.nn.ModuleList(blocks)
        self.head = torch.nn.Linear(12, 1)
        self.scale = torch.nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A prediction per row."""
        for layer in self.layers:
            x = layer(x)
        return self.head(x) * self.scale.mean()

    def reset_parameters(self) -> None:
        """For those who build it on meta."""
        torch.nn.init.ones_(self.scale)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """The mean over this rank's rows."""
        x, y = batch
        loss = torch.nn.functional.mse_loss(self(x), y)
        self.log("loss", loss.detach(), sync_dist=True)
        return loss

    def test_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> None:
        """After fit, in the same Trainer."""
        x, y = batch
        self.log("test_loss", torch.nn.functional.mse_loss(self(x), y), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class MetaForeignNet(LightningModule):
    """The same, built on meta in configure_model."""

    def configure_model(self) -> None:
        """On meta; the strategy fills it."""
        if not hasattr(self, "net"):
            with torch.device("meta"):
                self.net = ForeignNet()

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """The mean over this rank's rows."""
        loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss.detach(), sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class StepLosses(Callback):
    """The mean of the micro-batch losses of each optimizer step."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self._window: list[float] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Once per micro-batch."""
        self._window.append(float(trainer.callback_metrics["loss"]))
        if len(self._window) == trainer.accumulate_grad_batches:
            self.values.append(sum(self._window) / len(self._window))
            self._window = []


def train_foreign(
    strategy: dict[str, Any], steps: int, accumulate_grad_batches: int = 1, meta: bool = False, **options: Any
) -> dict[str, Any]:
    """Train somebody's module; on rank 1 it starts from other weights, which must not matter."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(11 if meta else 11 + rank)
    losses = StepLosses()
    trainer = trainer_for(
        strategy, [losses], max_steps=steps, accumulate_grad_batches=accumulate_grad_batches, **options
    )
    size = 8 // ranks // accumulate_grad_batches
    batches = []
    for step in range(steps):
        for micro in range(accumulate_grad_batches):
            start = (micro * ranks + rank) * size
            batches.append(tuple(part[start : start + size] for part in foreign_rows(step)))
    module = MetaForeignNet() if meta else ForeignNet()
    trainer.fit(module, DataLoader(batches, batch_size=None))
    live: Any = trainer.strategy
    found = {"losses": losses.values, "units": [unit["name"] for unit in live.audit["units"]]}
    if not meta:
        tested = trainer.test(module, DataLoader(batches[:1], batch_size=None), verbose=False)
        found["test_loss"] = tested[0]["test_loss"]
    return found


def train_foreign_with_checkpoints(
    strategy: dict[str, Any], run: str, steps: int, ckpt_path: str | None = None
) -> list[float]:
    """Losses of steps on the same rows, with Lightning's own ModelCheckpoint every two steps."""
    torch.manual_seed(11 + int(os.environ["RANK"]) + steps)
    losses = StepLosses()
    saving = ModelCheckpoint(dirpath=run, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    trainer = trainer_for(strategy, [losses, saving], max_steps=steps, enable_checkpointing=True, default_root_dir=run)
    trainer.fit(ForeignNet(), DataLoader([foreign_rows(0)] * steps, batch_size=None), ckpt_path=ckpt_path)
    return losses.values
