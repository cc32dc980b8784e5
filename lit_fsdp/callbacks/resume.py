"""A run that goes on from a checkpoint: what has changed since, and room in its folder if it is not the newest."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import Trainer

from lit_fsdp.checkpoint.aside import move_newer_aside
from lit_fsdp.checkpoint.ranks import Ranks
from lit_fsdp.config.parser import changed_values

_log = logging.getLogger(__name__)


def resumed_from(trainer: Trainer, step: int) -> str:
    """From which step a run goes on, and each value of its recipe that is another one than the checkpoint's."""
    strategy: Any = trainer.strategy
    folder = getattr(strategy, "loaded_checkpoint", None)
    if folder is None:  # of somebody else's strategy
        return f"resumed from step {step}"
    now = strategy.checkpoint_files.get("recipe.yaml")
    lines = [f"resumed from step {step}: {folder}"]
    before = folder / "recipe.yaml"
    if now is not None and before.is_file():  # an imported checkpoint has none
        old, new = (yaml.safe_load(path.read_text(encoding="utf-8")) for path in (before, now))
        lines += [f"  {line}" for line in changed_values({**old, "ckpt_path": new["ckpt_path"]}, new)]
    return "\n".join(lines)


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
