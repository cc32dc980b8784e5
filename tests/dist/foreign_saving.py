"""Somebody else's module and what saves and loads its checkpoints, as jobs for the workers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lit_fsdp import Checkpoint
from tests.dist.foreign import ForeignNet
from tests.dist.foreign_options import own_part
from tests.dist.jobs import trainer_for


class OwnMetric(ForeignNet):
    """Logs what each rank has been told at each validation, and nothing for ``None``; nobody averages it."""

    def __init__(self, told: list[float | None]) -> None:
        super().__init__()
        self.told = told

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """The next value."""
        value = self.told[self.trainer.global_step - 1]
        if value is not None:
            self.log("val_loss", value)


def train_with_own_metrics(
    strategy: dict[str, Any], run: str, told: list[list[float | None]], lightnings: dict[str, Any] | None = None
) -> dict[str, Any]:
    """A step per value, each with a validation; what is there at the end, and which one is the best."""
    rank = int(os.environ["RANK"])
    steps = len(told[rank])
    saving = ModelCheckpoint(run, monitor="val_loss", **lightnings) if lightnings else Checkpoint(keep_last=1)
    trainer = trainer_for(
        {"timeout_seconds": 20, "precision": "fp32", **strategy}, [saving], enable_checkpointing=True,
        max_steps=steps, val_check_interval=1, num_sanity_val_steps=0, default_root_dir=run,
    )  # fmt: skip
    trainer.fit(OwnMetric(told[rank]), _loader(range(steps)), _loader([0]))
    place = Path(run) if lightnings else Path(run) / "checkpoints"
    return {
        "there": sorted(path.name for path in place.iterdir() if path.name.startswith("step")),
        "best": Path(saving.best_model_path).name,
    }


def _loader(steps: Any) -> DataLoader[Any]:
    return DataLoader([own_part(step) for step in steps], batch_size=None)
