"""What the run declares and what it does, written to the run folder: units, dtypes, memory of the load."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from lit_fsdp.callbacks.csv_log import RunCSVLogger
from lit_fsdp.callbacks.resume import resumed_from
from lit_fsdp.metrics.memory import GIB, peak_host_bytes, reset_peak_host_bytes
from lit_fsdp.parallel.base import EngineStrategy
from lit_fsdp.redaction import redact_values
from lit_fsdp.report.tables import dtypes_table, parameter_counts, places_table, units_table, wide_console

PENDING_RECIPE = ".recipe.yaml"
"""The recipe of a run that resumes, until its checkpoint is loaded."""


class RunRecord(Callback):
    """Prints the FSDP units before step 1 and writes ``audit.json`` and ``dtypes.json``."""

    def __init__(self) -> None:
        self._before_bytes = 0
        self._dtypes_written = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Note the memory before the model is built."""
        for logger in _csv_loggers(trainer):
            logger.trainer = trainer
        reset_peak_host_bytes()  # converting a model or tokenizing may have needed more
        self._before_bytes = peak_host_bytes()

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Say from which step the run goes on, on the screen and to ``metrics.csv``."""
        for logger in _csv_loggers(trainer):
            logger.loaded_step = checkpoint["global_step"]
        if trainer.state.fn == "fit" and trainer.is_global_zero:
            pending = Path(trainer.default_root_dir) / PENDING_RECIPE
            if pending.is_file():
                pending.replace(pending.with_name("recipe.yaml"))
            print(resumed_from(trainer, checkpoint["global_step"]), file=sys.stderr)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The audit: the plan was compared with the live units already, in the strategy's set-up."""
        strategy = trainer.strategy
        if not isinstance(strategy, EngineStrategy):
            return
        mine = {"before_bytes": self._before_bytes, "after_bytes": peak_host_bytes()}
        ranks: list[Any] = [None] * trainer.world_size
        dist.all_gather_object(ranks, mine)
        if trainer.is_global_zero:
            record = {**strategy.audit, "peak_host_memory_per_rank": ranks}
            write_json(Path(trainer.default_root_dir) / "audit.json", record)
            print_audit(record)
        if strategy.rank_summary is not None:
            dist.all_gather_object(ranks, strategy.rank_summary)
            if trainer.is_global_zero:
                wide_console(sys.stderr).print(places_table(ranks))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write the realised dtypes once the first optimizer step has been compared with the declared ones."""
        strategy = trainer.strategy
        if self._dtypes_written or not isinstance(strategy, EngineStrategy) or strategy.contract.watching:
            return
        self._dtypes_written = True
        if trainer.is_global_zero:
            report = strategy.contract.report()
            write_json(Path(trainer.default_root_dir) / "dtypes.json", report)
            print_dtypes(report)


def _csv_loggers(trainer: Trainer) -> list[RunCSVLogger]:
    return [logger for logger in trainer.loggers if isinstance(logger, RunCSVLogger)]


def print_audit(record: dict[str, Any]) -> None:
    """The FSDP units as a table on standard error, and the memory of the load."""
    console = wide_console(sys.stderr)
    console.print(units_table(record))
    memory = [
        f"{r['before_bytes'] / GIB:.2f} → {r['after_bytes'] / GIB:.2f}" for r in record["peak_host_memory_per_rank"]
    ]
    console.print(
        f"{parameter_counts(record)} in {record['num_units']} units, "
        f"{record['num_params_on_this_rank']:,} on rank 0; peak host memory per rank while loading: "
        f"{', '.join(memory)} GiB"
    )
    for name, text in record["replaced"].items():
        console.print(f"replaced: {name}: {text}", highlight=False, markup=False)


def print_dtypes(report: dict[str, Any]) -> None:
    """Declared and realised dtypes as a table on standard error."""
    declared = ", ".join(f"{k} {v}" for k, v in report["declared"].items())
    console = wide_console(sys.stderr)
    console.print(f"Realised dtypes; precision {report['mode']} declares {declared}", highlight=False)
    console.print(dtypes_table(report))


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write through a temporary file, so that a reader never sees half of it; secrets as ``***``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(redact_values(content), indent=1) + "\n")
    os.replace(temporary, path)
