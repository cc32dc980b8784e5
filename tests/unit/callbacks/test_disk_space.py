"""How far the check for disk space looks ahead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader, IterableDataset

from lit_fsdp.config.run import validation_steps


class Net(LightningModule):
    """As little as Lightning trains."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).sum()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        return

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Stream(IterableDataset[torch.Tensor]):
    """Without a length."""

    def __iter__(self) -> Any:
        while True:
            yield torch.ones(2)


class Steps(Callback):
    """After which a validation came."""

    def __init__(self) -> None:
        self.found: list[int] = []

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.found.append(trainer.global_step)


@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning", "ignore:.*does not have many workers")
def test_validations_come_after_the_steps_foretold(tmp_path: Path) -> None:
    for rows, steps, interval, accumulate, every_n in (
        (12, 9, 4, 2, 1),
        (13, 20, 5, 3, 1),  # the last window of an epoch is short
        (7, 12, 5, 2, None),  # over the epochs
        (None, 9, 6, 2, 1),
    ):
        data = Stream() if rows is None else torch.ones(rows, 2)
        seen = Steps()
        trainer = Trainer(
            accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, max_epochs=-1,
            enable_model_summary=False, num_sanity_val_steps=0, default_root_dir=tmp_path, callbacks=[seen],
            max_steps=steps, val_check_interval=interval, accumulate_grad_batches=accumulate,
            check_val_every_n_epoch=every_n,
        )  # fmt: skip
        trainer.fit(Net(), DataLoader(data, batch_size=None), DataLoader(torch.ones(1, 2)))
        case = (rows, steps, interval, accumulate, every_n)
        assert validation_steps(steps, interval, accumulate, rows, every_n) == set(seen.found) - {0}, case
