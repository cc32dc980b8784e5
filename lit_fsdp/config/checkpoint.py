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
    """How many of the newest checkpoints are kept; -1 keeps all; of those saved only on a signal, one counts."""
    keep_best: int = 1
    """How many of the checkpoints with the best values of the metric are kept; 0 neither saves nor keeps for that."""
    keep_every: int | None = None
    """Checkpoints of every so many optimizer steps are kept for ever; a multiple of every_steps."""
    monitor: str = "val_loss"
    """Logged metric that decides which checkpoint is the best."""
    mode: Literal["min", "max"] = "min"
    """Whether a smaller (min) or a larger (max) value of the metric is better."""
    async_save: bool | None = None
    """Whether training waits only until the state is copied to the host, and goes on while it is written; needs host
    memory for one copy; null: true on CUDA, false elsewhere."""
    max_total_gib: float | None = None
    """GiB that the checkpoints of the run may take together, the one being written included; null: all that is free."""

    def __post_init__(self) -> None:
        if self.every_steps is not None and self.every_steps < 1:
            raise ConfigError("every_steps", self.every_steps, ">= 1, or null", "write every_steps: 100")
        if self.keep_last != -1 and self.keep_last < 1:
            raise ConfigError("keep_last", self.keep_last, ">= 1, or -1 for all", "write keep_last: 2")
        if self.keep_best < 0:
            raise ConfigError("keep_best", self.keep_best, ">= 0", "write keep_best: 1")
        if self.keep_every is not None:
            every = self.every_steps
            if self.keep_every < 1 or every is None or self.keep_every % every:
                given = f"{self.keep_every} with every_steps {'null' if every is None else every}"
                allowed = "a multiple of every_steps, since only what is saved can be kept; or null"
                fix = f"write keep_every: {10 * every}" if every else "set every_steps: 100 and keep_every: 1000"
                raise ConfigError("keep_every", given, allowed, fix)
        if self.max_total_gib is not None and not 0 < self.max_total_gib < float("inf"):
            raise ConfigError(
                "max_total_gib", self.max_total_gib, "a number of GiB > 0, or null", "write max_total_gib: null"
            )
