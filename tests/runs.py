"""Recipes given as mappings, and what a run folder holds, as tests of every folder read them."""

from __future__ import annotations

import csv
import tempfile
from pathlib import Path
from typing import Any

import yaml

from lit_fsdp.checkpoint.run_folder import checkpoints, damaged
from lit_fsdp.checkpoint.store import verify_files
from lit_fsdp.config.parser import load_recipe
from lit_fsdp.config.run import RunConfig


def check_recipe(values: dict[str, Any], verb: str) -> RunConfig:
    """The checked recipe of a file with these values."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "recipe.yaml")
        file.write_text(yaml.safe_dump(values), encoding="utf-8")
        return load_recipe(["--config", str(file)], verb).run


def losses(run: Path) -> dict[int, float]:
    """Training loss by step; of a run that has not logged yet, none."""
    path = run / "metrics.csv"
    rows = list(csv.DictReader(path.read_text().splitlines())) if path.is_file() else []
    return {int(row["step"]): float(row["train_loss"]) for row in rows if row.get("train_loss")}


def whole_steps(run: Path, may_hide: bool = False) -> list[int]:
    """Steps of the checkpoints, each of which is whole; beside them is nothing, or what a kill has left hidden."""
    assert damaged(run) == []
    found = checkpoints(run)
    for entry in found:
        verify_files(entry.path)
    beside = {path.name for path in (run / "checkpoints").iterdir()} - {entry.path.name for entry in found}
    assert all(may_hide and name.startswith(".") for name in beside), beside
    return [entry.step for entry in found]
