"""When checkpoints are written and which are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lit_fsdp.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """The ``checkpoint`` section: arguments of :class:`lit_fsdp.Checkpoint`."""

    every_steps: int | None = None
    """Optimizer steps between checkpoints; one is also saved at the end, on a signal and at the best validation."""
    keep_last: int = 2
    """How many of the newest checkpoints are kept; -1 keeps all."""
    monitor: str = "val_loss"
    """Logged metric that decides which checkpoint is the best; the best one is always kept."""
    mode: Literal["min", "max"] = "min"
    """Whether a smaller (min) or a larger (max) value of the metric is better."""
    async_save: Literal[False] = False
    """Saving in the background is not available yet: only false."""

    def __post_init__(self) -> None:
        if self.every_steps is not None and self.every_steps < 1:
            raise ConfigError("every_steps", self.every_steps, ">= 1, or null", "write every_steps: 100")
        if self.keep_last != -1 and self.keep_last < 1:
            raise ConfigError("keep_last", self.keep_last, ">= 1, or -1 for all", "write keep_last: 2")
