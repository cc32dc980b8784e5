"""A small checkpoint to read, damage and remove."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_fsdp.checkpoint.files import FileEntry
from lit_fsdp.checkpoint.manifest import Manifest
from lit_fsdp.checkpoint.run_folder import step_folder
from lit_fsdp.checkpoint.store import save_checkpoint

TENSORS = {
    "model/model.weight": torch.arange(15, dtype=torch.float32).reshape(5, 3) / 7,
    "model/model.transposed": torch.arange(12, dtype=torch.bfloat16).reshape(3, 4).t(),
    "model/model.number": torch.tensor(2.5),
    "model/model.empty": torch.empty(0, 4),
    "model/model.flags": torch.tensor([True, False, True]),
    "optim/model.weight/counts": torch.arange(7, dtype=torch.int8),
}


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """A function that saves step ``step`` in the run folder ``tmp_path`` and returns the checkpoint."""

    def write(step: int = 1, layout: Any = "sharded", **changes: Any) -> Path:
        folder = step_folder(tmp_path, step)
        parts: dict[str, Any] = {
            "tensors": TENSORS,
            "state": {"epoch": 1},
            "manifest": {"global_step": step, "model": {"prefix": "model.", "tied": {}}},
            "files": {"hf/config.json": b'{"model_type": "toy"}'},
            **changes,
        }
        save_checkpoint(folder, layout=layout, **parts)
        return folder

    return write


def make(run: Path, step: int, name: str | None = None, **metrics: float) -> Path:
    """A complete checkpoint of one file, written without torch: what finding and keeping look at."""
    folder = step_folder(run, step) if name is None else run / "checkpoints" / name
    folder.mkdir(parents=True)
    (folder / "data").write_bytes(b"1234")
    manifest = Manifest(
        folder=folder, layout="full", global_step=step, world_size=1, created="2026-01-01T00:00:00+00:00", versions={},
        tensors={}, files={"data": FileEntry(4, "0" * 64)}, metrics=metrics,
    )  # fmt: skip
    (folder / "manifest.json").write_bytes(manifest.dumps())
    return folder


def flip(path: Path) -> None:
    """One bit in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
