"""``metrics.csv`` in the run folder, which a resumed run continues instead of deleting.

Lightning's CSVLogger removes the file of an earlier start in the same folder.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only


class RunCSVLogger(Logger):
    """One row per logged step; a new column rewrites the file, rows at or after a resumed step are replaced.

    Args:
        run_folder: Where ``metrics.csv`` lives.
        resumed: Whether the rows that are there already belong to this run; otherwise they are replaced.
    """

    def __init__(self, run_folder: str | Path, resumed: bool = False) -> None:
        super().__init__()
        self._resumed = resumed
        self.path = Path(run_folder) / "metrics.csv"
        self._rows: list[dict[str, Any]] = []
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
        step = 0 if step is None else int(step)
        if not self._opened:
            self._open(step)
        values = {name: float(value) for name, value in metrics.items()}
        known = [name for name in values if name not in self._columns]
        self._columns.extend(known)
        same = bool(self._rows) and int(self._rows[-1]["step"]) == step
        if same:
            self._rows[-1].update(values)
        else:
            self._rows.append({"step": step, **values})
        if known or same:
            self._rewrite()
        else:
            with self.path.open("a", newline="") as file:
                csv.DictWriter(file, self._columns).writerow(self._rows[-1])

    def _open(self, step: int) -> None:
        """Take over the rows of an earlier start up to this step."""
        self._opened = True
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self._resumed and self.path.is_file():
            with self.path.open(newline="") as file:
                reader = csv.DictReader(file)
                rows = list(reader)
                self._columns = list(reader.fieldnames or self._columns)
            kept = [row for row in rows if (row.get("step") or "").isdigit() and int(row["step"]) < step]
            self._rows = [{name: value for name, value in row.items() if value not in ("", None)} for row in kept]
        self._rewrite()

    def _rewrite(self) -> None:
        temporary = self.path.with_name(".metrics.csv.tmp")
        with temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, self._columns)
            writer.writeheader()
            writer.writerows(self._rows)
        os.replace(temporary, self.path)
