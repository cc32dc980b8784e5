"""Room in the run folder for a run that goes on from a checkpoint which is not its newest."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

from lit_fsdp.checkpoint.aside import move_newer_aside
from lit_fsdp.checkpoint.ranks import Ranks

_log = logging.getLogger(__name__)


def make_room(trainer: Trainer) -> None:
    """Move the checkpoints of steps that this run has yet to reach aside, and say so; collective, when training starts.

    Raises:
        CheckpointError: On every rank; one cannot be renamed.
    """
    strategy: Any = trainer.strategy
    damaged = list(getattr(strategy, "damaged_checkpoints", ()))
    folder, step = Path(trainer.default_root_dir), trainer.global_step
    moved = Ranks().first(f"making room in {folder}", lambda: move_newer_aside(folder, step, damaged))
    for old, new in moved.items() if trainer.is_global_zero else ():
        _log.warning("moved aside: %s is %s now, because this run goes on from step %d", old, new.name, step)
