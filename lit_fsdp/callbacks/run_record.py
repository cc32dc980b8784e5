"""What the run declares and what it does, written to the run folder: units, dtypes, memory of the load."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.table import Table

from lit_fsdp.metrics.memory import GIB, peak_host_bytes, reset_peak_host_bytes
from lit_fsdp.parallel.sharded import ShardedStrategy


class RunRecord(Callback):
    """Prints the FSDP units before step 1 and writes ``audit.json`` and ``dtypes.json``."""

    def __init__(self) -> None:
        self._before_bytes = 0
        self._dtypes_written = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Note the memory before the model is built."""
        reset_peak_host_bytes()  # converting a model or tokenising may have needed more
        self._before_bytes = peak_host_bytes()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The audit: the plan was compared with the live units already, in the strategy's set-up."""
        strategy = trainer.strategy
        if not isinstance(strategy, ShardedStrategy):
            return
        mine = {"before_bytes": self._before_bytes, "after_bytes": peak_host_bytes()}
        ranks: list[Any] = [None] * trainer.world_size
        dist.all_gather_object(ranks, mine)
        if trainer.is_global_zero:
            record = {**strategy.audit, "peak_host_memory_per_rank": ranks}
            write_json(Path(trainer.default_root_dir) / "audit.json", record)
            print_audit(record)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write the realised dtypes once the first optimizer step has been compared with the declared ones."""
        strategy = trainer.strategy
        if self._dtypes_written or not isinstance(strategy, ShardedStrategy) or strategy.contract.watching:
            return
        self._dtypes_written = True
        if trainer.is_global_zero:
            report = strategy.contract.report()
            write_json(Path(trainer.default_root_dir) / "dtypes.json", report)
            print_dtypes(report)


def print_audit(record: dict[str, Any]) -> None:
    """The FSDP units as a table on standard error; equal neighbours share a line."""
    table = Table(title=f"FSDP units by {record['wrapped_by']}", title_justify="left")
    for column in ("unit", "class", "parameters", "GiB", "share", "tied", "recompute"):
        table.add_column(column, justify="right" if column in ("parameters", "GiB", "share") else "left")
    for first, last, count in _runs(record["units"]):
        name = first["name"] if count == 1 else f"{first['name']} … {last['name']}"
        table.add_row(
            name,
            first["class"] if count == 1 else f"{count} × {first['class']}",
            f"{first['num_params']:,}",
            f"{first['num_bytes'] / GIB:.3f}",
            f"{first['share'] * count:.1%}",
            ", ".join(first["tied"]) or "-",
            "yes" if first["activation_checkpointing"] else "no",
        )
    console = _console()
    console.print(table)
    memory = [
        f"{r['before_bytes'] / GIB:.2f} → {r['after_bytes'] / GIB:.2f}" for r in record["peak_host_memory_per_rank"]
    ]
    console.print(
        f"{record['num_params']:,} parameters in {record['num_units']} units, "
        f"{record['num_params_on_this_rank']:,} on rank 0; peak host memory per rank while loading: "
        f"{', '.join(memory)} GiB"
    )


def print_dtypes(report: dict[str, Any]) -> None:
    """Declared and realised dtypes as a table on standard error."""
    declared = ", ".join(f"{k} {v}" for k, v in report["declared"].items())
    table = Table()
    table.add_column("what")
    table.add_column("found")
    for what, found in report["realised"].items():
        table.add_row(what, ", ".join(f"{count} × {dtype}" for dtype, count in found.items()))
    console = _console()
    console.print(f"Realised dtypes; precision {report['mode']} declares {declared}", highlight=False)
    console.print(table)


def _console() -> Console:
    """Standard error; wide enough for the tables where it is a file."""
    console = Console(stderr=True)
    return console if console.is_terminal else Console(stderr=True, width=120)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write through a temporary file, so that a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(temporary, path)


def _runs(units: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any], int]]:
    """Neighbouring units that differ only in their names, as (first, last, count)."""
    runs: list[tuple[dict[str, Any], dict[str, Any], int]] = []
    for unit in units:
        same = {k: v for k, v in unit.items() if k != "name"}
        if runs and {k: v for k, v in runs[-1][0].items() if k != "name"} == same:
            runs[-1] = (runs[-1][0], unit, runs[-1][2] + 1)
        else:
            runs.append((unit, unit, 1))
    return runs
