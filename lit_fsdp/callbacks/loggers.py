"""``metrics.csv``, and the runs of other loggers: a run that is resumed goes on in both.

Lightning's CSVLogger removes the file of an earlier start in the same folder; TensorBoard, W&B, MLflow and Comet would
each begin a new run at every start.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from lit_fsdp.callbacks.records import write_json
from lit_fsdp.checkpoint.manifest import read_manifest

_log = logging.getLogger(__name__)
_NAME = "loggers.json"
_ARGUMENTS = {
    "TensorBoardLogger": "version",
    "WandbLogger": "id",
    "MLFlowLogger": "run_id",
    "CometLogger": "experiment_key",
}
"""By class, the argument that takes what its ``version`` says."""


class RunCSVLogger(Logger):
    """One row per logged step, appended; only a new column rewrites the file.

    ``fit`` writes ``metrics.csv``: row k is of optimizer step k, counted from 0, and a validation stands in the row of
    the last step that was taken before it (-1: none). A run that goes on from a checkpoint keeps the rows before its
    step and replaces the rest. ``validate`` and ``test`` add one row per call to a file of their own, at the step of
    the checkpoint.
    """

    trainer: Trainer | None = None
    """Whose steps are counted; ``None``: rows are of the step that they are logged with."""
    loaded_step: int | None = None
    """Of the checkpoint that was loaded, if any."""

    def __init__(self, run_folder: str | Path, verb: str = "fit") -> None:
        super().__init__()
        self._is_training = verb == "fit"
        self.path = Path(run_folder) / ("metrics.csv" if self._is_training else f"{verb}-metrics.csv")
        self._columns: list[str] = []
        self._last: dict[str, Any] = {}
        self._last_begins = 0

    @property
    def name(self) -> str:
        """Nothing: the run folder is the name."""
        return ""

    @property
    def version(self) -> str:
        """Nothing: a run is resumed in place."""
        return ""

    @property
    def log_dir(self) -> str:
        """The run folder."""
        return str(self.path.parent)

    save_dir = log_dir

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing: the resolved recipe stands beside this file."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Append one row, or write the last one again if it is of the same step."""
        step = self._row_of(step or 0)
        if not self._columns:
            self._open()
        if self._last.get("step") != step:
            self._last, self._last_begins = {"step": step}, self.path.stat().st_size
        self._last.update({n: float(value) for n, value in metrics.items() if self._is_training or n != "epoch"})
        new = [name for name in self._last if name not in self._columns]
        if new:
            rows = list(csv.DictReader(io.StringIO(self.path.read_bytes()[: self._last_begins].decode(), newline="")))
            self._columns += new
            self._rewrite(rows)
        text = io.StringIO(newline="")
        csv.DictWriter(text, self._columns).writerow(self._last)
        with self.path.open("r+b") as file:
            file.seek(self._last_begins)
            file.write(text.getvalue().encode())
            file.truncate()

    def _row_of(self, step: int) -> int:
        """Lightning counts a validation inside an accumulation to the step to come, and one of ``validate`` to none."""
        if not self._is_training:
            return self.loaded_step or 0
        return step if self.trainer is None else min(step, self.trainer.global_step - 1)

    def _open(self) -> None:
        """Take over the rows of earlier starts that still hold; a kill may have left half a row."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._columns = ["step"]
        rows: list[dict[str, str]] = []
        if self.path.is_file() and not (self._is_training and self.loaded_step is None):
            with self.path.open(newline="") as file:
                reader = csv.DictReader(file)
                rows = [row for row in reader if (row.get("step") or "").removeprefix("-").isdigit()]
                self._columns = list(reader.fieldnames or self._columns)
        self._rewrite(row for row in rows if not self._is_training or int(row["step"]) < (self.loaded_step or 0))

    def _rewrite(self, rows: Iterable[Mapping[str, str]]) -> None:
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        with temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, self._columns, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)
        self._last_begins = temporary.stat().st_size
        os.replace(temporary, self.path)


class LoggerRuns(Callback):
    """Tells ``metrics.csv`` where the run is; ``loggers.json`` has class and run of each logger that can go on."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let the rows of ``metrics.csv`` be those of this run's steps."""
        for logger in _csv_loggers(trainer):
            logger.trainer = trainer

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Say where ``metrics.csv`` goes on."""
        for logger in _csv_loggers(trainer):
            logger.loaded_step = checkpoint["global_step"]

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Write the row of this step now: Lightning logs after the callbacks, and a kill in between would lose it."""
        connector = trainer._logger_connector
        is_step = trainer.training and connector._first_loop_iter is not None
        if is_step and connector.should_update_logs and not trainer.fit_loop._should_accumulate():
            metrics = {**convert_tensors_to_scalars(connector.metrics["log"]), "epoch": trainer.current_epoch}
            for logger in _csv_loggers(trainer):
                logger.log_metrics(metrics, trainer.fit_loop.epoch_loop._batches_that_stepped)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write it on rank 0."""
        named = [(type(logger).__name__, logger) for logger in trainer.loggers if trainer.is_global_zero]
        entries = [{"class": name, "run": _run_of(logger)} for name, logger in named if name in _ARGUMENTS]
        if entries:
            write_json(Path(trainer.default_root_dir) / _NAME, entries)


def _csv_loggers(trainer: Trainer) -> list[RunCSVLogger]:
    return [logger for logger in trainer.loggers if isinstance(logger, RunCSVLogger)]


def _run_of(logger: Any) -> int | str | None:
    _ = logger.experiment  # only then does it have one
    return logger.version


def go_on_logging(config: Any, run_folder: Path, resumed_from: str | Path | None) -> None:
    """Give the loggers of a parsed ``trainer`` section the runs that a run folder has noted, in place.

    An argument that the recipe gives wins. TensorBoard is told from which step on to hide what a killed run has logged
    beyond ``resumed_from``, the checkpoint that the run goes on from, if any.
    """
    path = run_folder / _NAME
    given = config.get("logger")
    if not path.is_file() or given is None or isinstance(given, bool):
        return
    noted = json.loads(path.read_text(encoding="utf-8"))
    for logger in given if isinstance(given, list) else [given]:
        name = logger.class_path.rpartition(".")[2]
        entry = next((entry for entry in noted if entry["class"] == name), None)
        if entry is None:
            continue
        noted.remove(entry)
        argument = _ARGUMENTS[name]
        if name == "TensorBoardLogger" and logger.init_args.get("purge_step", 0) is None:
            logger.init_args["purge_step"] = read_manifest(resumed_from).global_step if resumed_from else 0
        if logger.init_args.get(argument) is None:
            logger.init_args[argument] = entry["run"]
            _log.info("%s goes on in its run %s (%s)", name, entry["run"], path)
