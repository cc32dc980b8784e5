"""The model that a recipe trains: built on meta, with adapters where it asks for them, and frozen as it says."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from lit_fsdp.config.model import ModelConfig
from lit_fsdp.models.added_tokens import (
    train_beside_adapters,
    vocabulary_modules,
    vocabulary_tensors,
    warn_of_frozen_rows,
)
from lit_fsdp.models.build import build_on_meta
from lit_fsdp.models.freeze import freeze_parameters
from lit_fsdp.models.lora import apply_lora


def build_trainable(
    hf_config: PretrainedConfig, config: ModelConfig, base: str | None = None
) -> tuple[PreTrainedModel, dict[str, Any] | None]:
    """The causal LM of ``hf_config`` on meta with the adapters and frozen parameters of the ``model`` section.

    With ``add_tokens`` beside adapters the embedding and the head are trained whole, as the rows of new tokens must be
    learnt and the others move with them (as with peft's ``modules_to_save``, but in place: no second copy in memory,
    and tied weights stay tied). ``freeze`` takes them out again.

    Args:
        hf_config: The architecture, with rows for added tokens.
        config: The ``model`` section.
        base: Name of the base model on the hub, or its folder, noted in the adapters' configuration.

    Returns:
        The model, and the content of ``adapter_config.json`` or None.

    Raises:
        ConfigError: The architecture cannot be built, or a layer or pattern named does not exist.
    """
    model = build_on_meta(hf_config, config.attn_implementation, config.trust_remote_code)
    vocabulary = vocabulary_modules(model) if config.add_tokens else {}
    adapter_config = None if config.lora is None else apply_lora(model, config.lora, base)
    if adapter_config is not None:
        train_beside_adapters(model, vocabulary)
    freeze_parameters(model, config.freeze, config.train_only)
    warn_of_frozen_rows(model, config)
    return model, adapter_config


def kept_with_adapters(model: PreTrainedModel, config: ModelConfig, has_new_rows: bool) -> list[str]:
    """Names of the parameters of the base that an exported adapter needs beside it: embedding and head.

    Those that are trained, and with new rows all of them: nobody else's copy of the base model has these rows.
    """
    if config.lora is None or not config.add_tokens:
        return []
    return [name for name in vocabulary_tensors(model) if has_new_rows or model.get_parameter(name).requires_grad]
