"""Activation checkpointing: what is recomputed in the backward pass instead of kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ActivationMode = Literal["none", "full"]


@dataclass(frozen=True, kw_only=True)
class ActivationConfig:
    """An activation checkpointing mode."""

    mode: ActivationMode = "none"
    """none keeps all activations; full keeps only the input of each block and recomputes the rest."""
