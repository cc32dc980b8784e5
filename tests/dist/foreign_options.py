"""Somebody else's module with the Trainer's own options and callbacks, as jobs for the workers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lit_fsdp.errors import ConfigError
from tests.dist.foreign import ForeignNet, StepLosses, foreign_rows
from tests.dist.jobs import trainer_for

_CALLBACKS = {
    "EarlyStopping": EarlyStopping,
    "LearningRateMonitor": LearningRateMonitor,
    "ModelCheckpoint": ModelCheckpoint,
    "StochasticWeightAveraging": StochasticWeightAveraging,
    "WeightAveraging": WeightAveraging,
}


class ForeignNetWithValidation(ForeignNet):
    """Adds what people add: a validation step and a schedule."""

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> None:
        """The mean over ranks of the mean over rows."""
        self.log("val_loss", torch.nn.functional.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        """The learning rate halves after every step."""
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class ValidationBatches(Callback):
    """How many there were."""

    def __init__(self) -> None:
        self.count = 0

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        """Once per batch and rank."""
        self.count += 1


def own_part(step: int) -> tuple[torch.Tensor, ...]:
    """This rank's share of eight rows."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    size = 8 // ranks
    return tuple(part[rank * size : (rank + 1) * size] for part in foreign_rows(step))


def train_with_options(
    strategy: dict[str, Any],
    callbacks: dict[str, dict[str, Any]] | None = None,
    folder: str | None = None,
    validates: bool = False,
    ckpt_path: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Four batches per epoch under Lightning's own callbacks and options; what a plain loop can be compared with."""
    torch.manual_seed(11)
    losses, validations = StepLosses(), ValidationBatches()
    named = [_CALLBACKS[name](**arguments) for name, arguments in (callbacks or {}).items()]
    saves = any(isinstance(one, ModelCheckpoint) for one in named)
    if folder is not None:
        options |= {"logger": CSVLogger(folder, name="", version=""), "log_every_n_steps": 1}
    options |= {"enable_checkpointing": saves, "num_sanity_val_steps": 0}
    trainer = trainer_for(strategy, [losses, validations, *named], **options)
    module = ForeignNetWithValidation() if validates else ForeignNet()
    loaders = [DataLoader([own_part(step) for step in steps], batch_size=None) for steps in (range(4), range(100, 105))]
    trainer.fit(module, loaders[0], loaders[1] if validates else None, ckpt_path=ckpt_path)
    saver: Any = next((one for one in named if isinstance(one, ModelCheckpoint)), None)
    return {
        "losses": losses.values,
        "steps": trainer.global_step,
        "epochs": trainer.current_epoch,
        "val_loss": float(trainer.callback_metrics["val_loss"]) if validates else None,
        "validation_batches": validations.count,
        "best": Path(saver.best_model_path).name if saver else None,
        "kept": sorted(Path(path).name for path in saver.best_k_models) if saver else None,
    }


def refusal_of(**arguments: Any) -> str:
    """What :func:`train_with_options` refuses to do."""
    try:
        train_with_options(**arguments)
    except ConfigError as error:
        return str(error)
    return "nothing was refused"
