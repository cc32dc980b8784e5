"""Recipes given as mappings, what a run folder holds, and ports, for tests of every folder."""

from __future__ import annotations

import csv
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_fsdp.checkpoint.run_folder import survey
from lit_fsdp.checkpoint.store import verify_files
from lit_fsdp.config.parser import load_recipe
from lit_fsdp.config.run import RunConfig
from lit_fsdp.host import free_port

MORE = pytest.mark.long("each value of the case is met in `make test` in another combination")


def check_recipe(values: dict[str, Any], verb: str) -> RunConfig:
    """The checked recipe of a file with these values."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "recipe.yaml")
        file.write_text(yaml.safe_dump(values), encoding="utf-8")
        return load_recipe(["--config", str(file)], verb).run


def records(path: Path) -> list[dict[str, str]]:
    """The rows of a table such as ``metrics.csv``; of one that is not there yet, none."""
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def content(folder: Path) -> dict[str, bytes]:
    """Every file below a folder by its path in there, byte for byte."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def losses(run: Path) -> dict[int, float]:
    """Training loss by step; of a run that has not logged yet, none."""
    found = records(run / "metrics.csv")
    return {int(row["step"]): float(row["train_loss"]) for row in found if row.get("train_loss")}


def whole_steps(run: Path, may_hide: bool = False) -> list[int]:
    """Steps of the checkpoints, each of which is whole; beside them is nothing, or what a kill has left hidden."""
    found = survey(run / "checkpoints")
    for entry in found:
        verify_files(entry.path)
    beside = {path.name for path in (run / "checkpoints").iterdir()} - {entry.path.name for entry in found}
    assert all(may_hide and name.startswith(".") for name in beside), beside
    return [entry.step for entry in found]


def own_port() -> int:
    """A free port that no other process of this test run chooses, however long it takes until somebody listens."""
    index = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return next(port for port in iter(free_port, None) if port % count == index % count)
