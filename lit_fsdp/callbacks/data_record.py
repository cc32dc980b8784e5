"""The supervision proof of a run: shown once before step 1, and kept in the run folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_fsdp.callbacks.run_record import write_json
from lit_fsdp.errors import DataError
from lit_fsdp.report.data_tables import print_data


class DataRecord(Callback):
    """Prints what is about to be trained on and writes ``data.json``, on rank 0 and once per process.

    The command line shows it before any process group exists. In somebody's own Trainer with a
    :class:`lit_fsdp.CausalLMDataModule` it is shown while the Trainer sets up, still before step 1.
    """

    def __init__(self) -> None:
        self.shown = False

    def show(self, datamodule: Any, stage: str, folder: Path) -> None:
        """Show what a data module of ours is about to give, and note it; for rank 0.

        Args:
            datamodule: A :class:`lit_fsdp.CausalLMDataModule`.
            stage: ``fit``, ``validate``, ``test`` or ``predict``; only training leaves a record.
            folder: Of the run.

        Raises:
            DataError: The first rows of a stream cannot be trained on.
        """
        record = datamodule.describe()
        if stage == "fit":
            write_json(folder / "data.json", record)
        print_data(record, sys.stderr)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Show it, unless that was done before; the data module is set up already.

        Raises:
            DataError: On every rank, what rank 0 has met: the others would wait for it.
        """
        datamodule = getattr(trainer, "datamodule", None)
        if self.shown or not hasattr(datamodule, "describe"):
            return
        self.shown, refused = True, None
        if trainer.is_global_zero:
            try:
                self.show(datamodule, stage, Path(trainer.default_root_dir))
            except DataError as error:
                refused = str(error)
        refused = trainer.strategy.broadcast(refused)
        if refused is not None:
            raise DataError(refused)
