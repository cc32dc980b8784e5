"""What is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lit_fsdp.config.lora import LoraConfig
from lit_fsdp.config.loss import LossConfig
from lit_fsdp.config.optim import OptimConfig
from lit_fsdp.errors import ConfigError

FLASH_ATTENTION = ("flash_attention_2", "flash_attention_3")
"""Attention backends that compute in bf16 or fp16 only, and come in packages of their own."""
GPU_ATTENTION = ("flex_attention", *FLASH_ATTENTION)
"""Attention backends that have a backward pass on GPUs only."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The ``model`` section: arguments of :class:`lit_fsdp.CausalLMModule`."""

    name: str | dict | None = None
    """Hub name, model folder or GGUF file to start from; a config .json file or mapping for random init."""
    tokenizer: str | None = None
    """Folder or hub name of the tokenizer; default: beside the model."""
    optim: OptimConfig = OptimConfig()
    """Optimizer and learning-rate schedule."""
    loss: LossConfig = LossConfig()
    """Backend of the cross-entropy, z-loss and label smoothing."""
    lora: LoraConfig | None = None
    """Train adapters beside the frozen model instead of the model; {} for all defaults."""
    freeze: list[str] | None = None
    """Patterns of parameters that are not trained, e.g. [model.embed_tokens.*]; * stands for anything."""
    train_only: list[str] | None = None
    """Patterns of the only parameters that are trained."""
    add_tokens: list[str] | None = None
    """Tokens added to the tokenizer as special ones; embedding and head grow by as many rows."""
    pad_token: str | None = None
    """Token put where a batch has none; only needed for tokenizers without one, whose end of text is taken else."""
    attn_implementation: (
        Literal["sdpa", "eager", "by_sample", "flex_attention", "flash_attention_2", "flash_attention_3"] | None
    ) = None
    """Attention backend of transformers, default: sdpa, or eager for models without it; by_sample is our own, the
    fastest one for short samples on CPUs."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    miniature: bool = False
    """Random init of the same architecture shrunk to about a million parameters, for trying a recipe out."""

    def __post_init__(self) -> None:
        if self.name is not None and not self.name:
            raise ConfigError("name", repr(self.name), "a hub name, folder, GGUF file or config", "name a model")
        for field in ("freeze", "train_only"):
            if getattr(self, field) == []:
                raise ConfigError(field, "[]", "at least one pattern, or null", f"drop {field}")
        if self.add_tokens is not None and (
            not all(self.add_tokens) or len(set(self.add_tokens)) < max(1, len(self.add_tokens))
        ):
            raise ConfigError("add_tokens", self.add_tokens, "different tokens, none of them empty", "drop add_tokens")
        if self.lora is not None and self.train_only is not None:
            fix = "drop train_only, or name whole modules in lora.modules_to_save"
            raise ConfigError("train_only", self.train_only, "nothing beside lora, which freezes the base", fix)


def gpu_attention_on_cpu(name: str) -> ConfigError:
    """What is said of an attention backend that only trains on GPUs, on a CPU."""
    fix = "leave attn_implementation out"
    return ConfigError("model.attn_implementation", f"{name} on a CPU", "sdpa | eager | by_sample without a GPU", fix)
