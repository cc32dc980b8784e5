"""A run that goes on from a checkpoint, in words: from which step, and what its recipe has changed since."""

from __future__ import annotations

from typing import Any

import yaml
from lightning.pytorch import Trainer

from lit_fsdp.config.parser import changed_values


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
