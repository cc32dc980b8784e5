"""``metrics.csv`` in the run folder, which a resumed run continues instead of deleting; other verbs write beside it.

Lightning's CSVLogger removes the file of an earlier start in the same folder.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only


def beside(name: str, verb: str) -> str:
    """The name of a file that ``fit`` calls ``name`` for any other verb: ``validate-metrics.csv``."""
    return name if verb == "fit" else f"{verb}-{name}"


class RunCSVLogger(Logger):
    """One row per logged step; a new column rewrites the file.

    ``fit`` writes ``metrics.csv``: row k is of optimizer step k, counted from 0, and a validation stands in the row of
    the last step that was taken before it (-1: none). A run that goes on from a checkpoint keeps the rows before its
    step and replaces the rest. ``validate`` and ``test`` add one row per call to a file of their own; its step is that
    of the checkpoint.

    Args:
        run_folder: Where the file lies.
        verb: Whose file it is.
    """

    trainer: Trainer | None = None
    """Whose steps are counted; ``None``: rows are of the step that they are logged with."""
    loaded_step: int | None = None
    """Of the checkpoint that was loaded, if any."""

    def __init__(self, run_folder: str | Path, verb: str = "fit") -> None:
        super().__init__()
        self._is_training = verb == "fit"
        self.path = Path(run_folder) / beside("metrics.csv", verb)
        self._rows: list[dict[str, Any]] = []
        self._num_closed = 0
        self._columns: list[str] = ["step"]
        self._opened = False

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

    @property
    def save_dir(self) -> str:
        """The run folder."""
        return str(self.path.parent)

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing: the resolved recipe stands beside this file."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Append one row, or fill the last one if it is of the same step."""
        step = self._row_of(0 if step is None else int(step))
        if not self._opened:
            self._open()
        values = {name: float(value) for name, value in metrics.items() if self._is_training or name != "epoch"}
        known = [name for name in values if name not in self._columns]
        self._columns.extend(known)
        same = len(self._rows) > self._num_closed and int(self._rows[-1]["step"]) == step
        if same:
            self._rows[-1].update(values)
        else:
            self._rows.append({"step": step, **values})
        if known or same:
            self._rewrite()
        else:
            with self.path.open("a", newline="") as file:
                csv.DictWriter(file, self._columns).writerow(self._rows[-1])

    def _row_of(self, step: int) -> int:
        """Lightning counts a validation inside an accumulation to the step to come, and one of ``validate`` to none."""
        if not self._is_training:
            return self.loaded_step or 0
        return step if self.trainer is None else min(step, self.trainer.global_step - 1)

    def _open(self) -> None:
        """Take over the rows of earlier starts that still hold."""
        self._opened = True
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.is_file() and not (self._is_training and self.loaded_step is None):
            with self.path.open(newline="") as file:
                reader = csv.DictReader(file)
                rows = [row for row in reader if (row.get("step") or "").removeprefix("-").isdigit()]
                self._columns = list(reader.fieldnames or self._columns)
            kept = [row for row in rows if not self._is_training or int(row["step"]) < (self.loaded_step or 0)]
            self._rows = [{name: value for name, value in row.items() if value not in ("", None)} for row in kept]
            self._num_closed = 0 if self._is_training else len(kept)
        self._rewrite()

    def _rewrite(self) -> None:
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        with temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, self._columns)
            writer.writeheader()
            writer.writerows(self._rows)
        os.replace(temporary, self.path)
