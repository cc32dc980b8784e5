"""How the loss is computed from the last hidden states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lit_fsdp.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The ``model.loss`` section: the same loss and gradients, by different ways of getting there.

    ``train_loss`` and all of validation are the plain cross-entropy, whatever is added here; what backward runs on then
    is ``train_objective``, and its z-loss ``train_z_loss``.
    """

    backend: Literal["chunked", "plain", "liger", "cce"] = "chunked"
    """chunked: head and cross-entropy a few rows at a time; plain: all logits at once; liger, cce: their kernels."""
    chunk_tokens: int | None = None
    """Supervised tokens per chunk; default: as many as keep a chunk's fp32 logits at about 96 MiB, or
    at a quarter of the fp32 gradient of the head where that is more."""
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
        if self.backend in ("liger", "cce") and self.label_smoothing:
            lacks = "cce knows none" if self.backend == "cce" else "liger does not tell the plain loss beside it"
            raise ConfigError("label_smoothing", f"{self.label_smoothing}: {lacks}", "0 here", "set backend: chunked")
        if self.backend == "cce" and self.z_loss:
            raise ConfigError("z_loss", f"{self.z_loss}: cce knows none", "0 here", "set backend: chunked, or liger")
        if self.backend != "chunked" and self.chunk_tokens is not None:
            raise ConfigError(
                "chunk_tokens", f"{self.chunk_tokens} with backend {self.backend}", "null here", "drop chunk_tokens"
            )
