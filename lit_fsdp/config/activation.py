"""Activation checkpointing: what is recomputed in the backward pass instead of kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lit_fsdp.errors import ConfigError

ActivationMode = Literal["none", "full", "every_n", "selective", "memory_budget"]


@dataclass(frozen=True, kw_only=True)
class ActivationConfig:
    """An activation checkpointing mode and its details."""

    mode: ActivationMode = "none"
    """none keeps all; full only block inputs; every_n does so in every n-th block; selective keeps chosen ops."""
    n: int | None = None
    """With every_n: one block in n recomputes; default 2."""
    ops: list[str] | None = None
    """With selective: ops whose results are kept, as aten.mm; default: matrix products and attention."""
    memory_budget: float | None = None
    """With memory_budget: share of activation memory the compiler may keep, 0 (as full) to 1 (as none)."""
    offload_activations: bool = False
    """Keep saved activations in host memory between forward and backward."""

    def __post_init__(self) -> None:
        for field, mode in (("n", "every_n"), ("ops", "selective"), ("memory_budget", "memory_budget")):
            if getattr(self, field) is not None and self.mode != mode:
                raise ConfigError(
                    field, f"{getattr(self, field)} with mode {self.mode}", f"only with mode: {mode}", "drop one"
                )
        if self.n is not None and self.n < 1:
            raise ConfigError("n", self.n, "a whole number >= 1 (1 is full)", "write n: 2")
        if self.ops == []:
            raise ConfigError("ops", "[]", "at least one op, or null for the default list", "write mode: full")
        if self.mode == "memory_budget" and self.memory_budget is None:
            raise ConfigError("memory_budget", "null", "0 to 1", "write memory_budget: 0.5")
        if self.memory_budget is not None and not 0 <= self.memory_budget <= 1:
            raise ConfigError("memory_budget", self.memory_budget, "0 to 1", "write memory_budget: 0.5")
