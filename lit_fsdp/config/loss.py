"""How the loss is computed from the last hidden states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lit_fsdp.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The ``model.loss`` section: the same loss and gradients, by different ways of getting there."""

    backend: Literal["chunked", "plain", "liger", "cce"] = "chunked"
    """chunked: head and cross-entropy a few rows at a time; plain: all logits at once; liger, cce: their kernels."""
    chunk_tokens: int | None = None
    """Supervised tokens per chunk; default: as many as keep a chunk's logits at about 64 MiB."""
    z_loss: float = 0.0
    """Weight of the squared log-partition function that is added per supervised token (PaLM uses 1e-4)."""
    label_smoothing: float = 0.0
    """Share of the target's probability spread evenly over the vocabulary, 0 to 1."""

    def __post_init__(self) -> None:
        if self.chunk_tokens is not None and self.chunk_tokens < 1:
            raise ConfigError("chunk_tokens", self.chunk_tokens, ">= 1, or null", "drop chunk_tokens")
        if not 0 <= self.z_loss < float("inf"):
            raise ConfigError("z_loss", self.z_loss, "a finite number >= 0", "write z_loss: 1.0e-4")
        if not 0 <= self.label_smoothing < 1:
            raise ConfigError("label_smoothing", self.label_smoothing, "0 <= label_smoothing < 1", "write 0.1")
