"""The model that a recipe trains: built on meta, with adapters where it asks for them, and frozen as it says."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from lit_fsdp.config.model import ModelConfig
from lit_fsdp.models.build import build_on_meta
from lit_fsdp.models.freeze import freeze_parameters
from lit_fsdp.models.lora import apply_lora


def build_trainable(
    hf_config: PretrainedConfig, config: ModelConfig, hub_name: str | None = None
) -> tuple[PreTrainedModel, dict[str, Any] | None]:
    """The causal LM of ``hf_config`` on meta with the adapters and frozen parameters of the ``model`` section.

    Args:
        hf_config: The architecture.
        config: The ``model`` section.
        hub_name: Name of the base model on the hub, noted in the adapters' configuration.

    Returns:
        The model, and the content of ``adapter_config.json`` or None.

    Raises:
        ConfigError: The architecture cannot be built, or a layer or pattern named does not exist.
    """
    model = build_on_meta(hf_config, config.attn_implementation, config.trust_remote_code)
    adapter_config = None if config.lora is None else apply_lora(model, config.lora, hub_name)
    freeze_parameters(model, config.freeze, config.train_only)
    return model, adapter_config
