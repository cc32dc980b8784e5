"""The job of test_samples.py: a run of our module and data module that may ask for samples."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lit_fsdp import CausalLMDataModule, CausalLMModule, Checkpoint, Samples
from tests.dist.jobs import Losses, digest, trainer_for


class Tables(CSVLogger):
    """A logger with tables, as W&B's."""

    tables: list[Any]

    def log_table(self, key: str, columns: list[str], data: list[list[Any]], step: int) -> None:
        self.tables = [*getattr(self, "tables", []), [key, step, columns, data]]


def sampled_run(
    folder: str,
    run: str,
    strategy: dict[str, Any],
    steps: int = 4,
    samples: dict[str, Any] | None = None,
    ckpt_path: str | None = None,
    has_loggers: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Train with dropout and validate after every second step; losses, what was logged, and a hash of the state."""
    torch.manual_seed(5)
    losses = Losses()
    asked = [] if samples is None else [Samples(**samples)]
    loggers = [TensorBoardLogger(run, "tb", "0"), Tables(run)] if has_loggers else False
    trainer = trainer_for(
        {"precision": "fp32", **strategy},
        [losses, *asked, Checkpoint(every_steps=2, keep_last=-1)],
        max_steps=steps,
        val_check_interval=2,
        check_val_every_n_epoch=None,
        default_root_dir=run,
        logger=loggers,
        **options,
    )
    module = CausalLMModule(name=folder, optim={"lr": 3e-3, "schedule": "constant"})
    batches = {"global_batch_size": 4, "micro_batch_size": 4 // trainer.world_size}
    data = CausalLMDataModule(
        train="generated:24", val="generated:6", max_seq_length=160, seed=3, cache_dir=f"{run}/../cache", **batches
    )
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    tables = getattr(trainer.loggers[-1], "tables", []) if has_loggers else []
    state = digest(module, trainer.optimizers[0])
    return {"losses": losses.values, "metrics": metrics, "digest": state, "tables": tables}
