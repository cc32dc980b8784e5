"""Low-rank adapters: which layers get one and how large it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from lit_fsdp.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """The ``model.lora`` section: the base model is frozen, and ``B @ A * alpha / r`` is learnt beside its layers."""

    r: int = 16
    """Rank of the adapters."""
    alpha: float = 32.0
    """The product of the two factors is scaled by alpha / r (by alpha / sqrt(r) with use_rslora)."""
    dropout: float = 0.0
    """Share of a layer's inputs dropped before its adapter, 0 to 1."""
    target_modules: list[str] | Literal["all-linear"] | None = None
    """Names of layers (their ends: q_proj), all-linear (all but the head), or null for peft's choice for the model."""
    use_dora: bool = False
    """Learn the length of each weight vector apart from its direction (DoRA)."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(r), which keeps large ranks stable."""
    modules_to_save: list[str] | None = None
    """Names of modules trained whole beside the adapters and kept with them, e.g. [lm_head]."""
    bias: Literal["none", "all", "lora_only"] = "none"
    """Which biases are trained: none, all of the model, or those of layers with an adapter."""
    quantize: Literal["nf4", "int8"] | None = None
    """Only null: adapters over quantized base weights (QLoRA) are refused."""

    def __post_init__(self) -> None:
        if self.r < 1:
            raise ConfigError("r", self.r, ">= 1", "write r: 16")
        if not 0 < self.alpha < float("inf"):
            raise ConfigError("alpha", self.alpha, "a finite number > 0", "write alpha: 32")
        if not 0 <= self.dropout < 1:
            raise ConfigError("dropout", self.dropout, "0 <= dropout < 1", "write dropout: 0.05")
        for field in ("target_modules", "modules_to_save"):
            if getattr(self, field) == []:
                raise ConfigError(field, "[]", "at least one name, or null", f"drop {field}")
        if self.quantize is not None:
            raise ConfigError(
                "quantize",
                self.quantize,
                "null: the base weights are kept as bf16 or fp32 numbers and sharded over the ranks",
                "drop it, and set trainer.strategy.init_args.precision: low_precision for a base of 2 bytes per weight",
            )

    def check_checkpoint(self, manifest: Any) -> None:
        """Raise ConfigError where the adapters of a checkpoint are of another rank or scale.

        Args:
            manifest: A :class:`lit_fsdp.checkpoint.manifest.Manifest`.
        """
        saved = manifest.extra.get("model", {}).get("adapter") or {}
        for name, key in (("r", "r"), ("alpha", "lora_alpha"), ("use_rslora", "use_rslora")):
            before = saved.get(key, getattr(self, name))
            if before != getattr(self, name):
                allowed = f"{before}, as in {manifest.folder}: it is a part of the model"
                fix = f"set {name}: {before}, or begin a new run"
                raise ConfigError(f"model.lora.{name}", getattr(self, name), allowed, fix)
