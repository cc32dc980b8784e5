"""The supervision proof of a run: shown once before step 1, and kept in the run folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_fsdp.callbacks.run_record import write_json
from lit_fsdp.report.data_tables import print_data


class DataRecord(Callback):
    """Prints what is about to be trained on and writes ``data.json``, on rank 0 and once per process.

    The command line shows it before any process group exists. In somebody's own Trainer with a
    :class:`lit_fsdp.CausalLMDataModule` it is shown while the Trainer sets up, still before step 1.
    """

    def __init__(self) -> None:
        self._shown = False

    def show(self, datamodule: Any, stage: str, folder: Path, speaks: bool) -> None:
        """Show what a data module of ours is about to give.

        Args:
            datamodule: A :class:`lit_fsdp.CausalLMDataModule`.
            stage: ``fit``, ``validate``, ``test`` or ``predict``; only training leaves a record.
            folder: Of the run.
            speaks: Whether this is rank 0; the others only look into a stream, which must stop all of them or none.

        Raises:
            DataError: The first rows of a stream cannot be trained on.
        """
        self._shown = True
        if not speaks and not datamodule.config.streaming:
            return
        record = datamodule.describe()
        if not speaks:
            return
        if stage == "fit":
            write_json(folder / "data.json", record)
        print_data(record, sys.stderr)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Show it, unless that was done before; the data module is set up already."""
        datamodule = getattr(trainer, "datamodule", None)
        if not self._shown and hasattr(datamodule, "describe"):
            self.show(datamodule, stage, Path(trainer.default_root_dir), trainer.is_global_zero)
