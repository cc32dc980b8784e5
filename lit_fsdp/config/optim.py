"""Optimizer and learning-rate schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from lit_fsdp.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW (decoupled weight decay) with a linear warm-up and one of three schedules."""

    lr: float = 1e-5
    """Peak learning rate."""
    weight_decay: float = 0.0
    """Decay per step relative to the learning rate, for parameters of two or more dimensions only."""
    beta1: float = 0.9
    """Decay of the first moment per step."""
    beta2: float = 0.95
    """Decay of the second moment per step."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate falls from its peak to min_lr_ratio of it over the run."""
    warmup_steps: int = 0
    """Optimizer steps over which the learning rate rises linearly to its peak."""
    min_lr_ratio: float = 0.0
    """Learning rate at the end of the run as a share of the peak, 0 to 1."""

    def __post_init__(self) -> None:
        for field in ("lr", "weight_decay", "eps", "warmup_steps"):
            value = getattr(self, field)
            if value < 0 or value == float("inf"):
                raise ConfigError(field, value, "a finite number >= 0", f"write {field}: 0 or more")
        for field in ("beta1", "beta2"):
            if not 0 <= getattr(self, field) < 1:
                raise ConfigError(field, getattr(self, field), "0 <= beta < 1", f"write {field}: 0.9")
        if not 0 <= self.min_lr_ratio <= 1:
            raise ConfigError("min_lr_ratio", self.min_lr_ratio, "0 to 1", "write min_lr_ratio: 0.1")


def schedule_factor(optim: OptimConfig, step: int, total_steps: int) -> float:
    """The learning rate of optimizer step ``step`` (from 0) as a share of its peak.

    Warm-up rises linearly and reaches the peak at step ``warmup_steps - 1``; the schedule then falls and would reach
    ``min_lr_ratio`` at step ``total_steps``, where training has ended.
    """
    if step < optim.warmup_steps:
        return (step + 1) / optim.warmup_steps
    if optim.schedule == "constant":
        return 1.0
    done = min(1.0, (step - optim.warmup_steps) / max(1, total_steps - optim.warmup_steps))
    fall = 0.5 * (1 + math.cos(math.pi * done)) if optim.schedule == "cosine" else 1.0 - done
    return optim.min_lr_ratio + (1 - optim.min_lr_ratio) * fall
