"""Which checkpoints may go, and how one goes without ever being half there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from lit_fsdp.checkpoint.disk import naming, sync_folder
from lit_fsdp.checkpoint.find import Found, best
from lit_fsdp.checkpoint.manifest import MANIFEST, not_a_checkpoint
from lit_fsdp.checkpoint.staging import hidden_name
from lit_fsdp.errors import CheckpointError


def to_remove(found: Sequence[Found], keep_last: int, monitor: str, mode: Literal["min", "max"]) -> list[Found]:
    """The checkpoints that are neither among the ``keep_last`` newest nor the best, oldest first.

    Args:
        found: The complete checkpoints of a run.
        keep_last: >= 1, or -1 for all.
        monitor: Metric that decides which one is the best.
        mode: Whether a smaller (min) or a larger (max) value is better.
    """
    ordered = sorted(found, key=lambda entry: entry.step)
    kept = ordered if keep_last == -1 else ordered[-keep_last:]
    top = best(ordered, monitor, mode)
    return [entry for entry in ordered if entry not in kept and entry is not top]


def remove(folder: Path) -> None:
    """Delete one checkpoint; it is hidden by a rename first, so a kill in between leaves nothing half visible.

    Raises:
        CheckpointError: ``folder`` is no checkpoint, or cannot be renamed or deleted.
    """
    folder = Path(folder)
    if folder.is_symlink() or not (folder / MANIFEST).is_file():
        what = f"{folder}: a symbolic link" if folder.is_symlink() else not_a_checkpoint(folder)
        raise CheckpointError(f"not removed: {what}")
    hidden = hidden_name(folder, "removed")
    with naming(folder):
        os.rename(folder, hidden)
    sync_folder(folder.parent)
    with naming(hidden):
        shutil.rmtree(hidden)
