"""The job of test_samples.py: a run of our module and data module that may ask for samples."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lit_fsdp import CausalLMDataModule, CausalLMModule, Checkpoint, Samples
from tests.dist.jobs import fit, here


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
    asked = [] if samples is None else [Samples(**samples)]
    loggers = [TensorBoardLogger(run, "tb", "0"), Tables(run)] if has_loggers else False
    options |= {"val_check_interval": 2, "check_val_every_n_epoch": None, "default_root_dir": run, "logger": loggers}
    module = CausalLMModule(name=folder, optim={"lr": 3e-3, "schedule": "constant"})
    batches = {"global_batch_size": 4, "micro_batch_size": 4 // here()[1]}
    data = CausalLMDataModule(
        train="generated:24", val="generated:6", max_seq_length=160, seed=3, cache_dir=f"{run}/../cache", **batches
    )
    callbacks = [*asked, Checkpoint(every_steps=2, keep_last=-1)]
    trainer, found = fit(module, {"precision": "fp32", **strategy}, callbacks, data, ckpt_path, steps, 5, **options)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    tables = getattr(trainer.loggers[-1], "tables", []) if has_loggers else []
    return {"losses": found["losses"], "metrics": metrics, "digest": found["digest"], "tables": tables}
