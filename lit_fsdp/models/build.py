"""The module tree of a causal LM without its memory: everything on the meta device."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from lit_fsdp.errors import ConfigError
from lit_fsdp.models.attention import check_architecture, check_package


def build_on_meta(
    hf_config: PretrainedConfig, attn_implementation: str | None = None, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The causal LM of ``hf_config`` in train mode with every parameter and buffer on the meta device.

    Floating-point parameters are declared fp32 whatever the config says: the dtype at rest is the precision mode's
    business. Tied parameters are one object. The key-value cache is switched off, as training never reads it.

    Args:
        hf_config: Not changed; the model gets a copy.
        attn_implementation: ``sdpa``, ``eager``, ``flex_attention``, ...; a model that lacks it is refused, and so is
            one whose package is missing (see :func:`lit_fsdp.models.attention.check_package`). None is ``sdpa``, or
            ``eager`` for models without it.
        trust_remote_code: Run Python code that comes with the model.

    Raises:
        ConfigError: The architecture is no causal LM, needs code that may not run, or lacks the attention.
    """
    config = copy.deepcopy(hf_config)
    config.use_cache = False
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": attn_implementation}
    check_package(attn_implementation)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code, **options)
    except (ValueError, ImportError) as error:
        raise _refusal(config, attn_implementation, error) from error
    left = [name for name, buffer in model.named_buffers() if not buffer.is_meta]
    if left:  # made from data in __init__, which nothing makes again
        raise ConfigError(
            "model.name",
            f"{config.model_type}, which creates {', '.join(left[:3])} outside the meta device",
            "a model whose constructor follows the default device",
            "use the architecture that transformers itself ships",
        )
    model.to("meta")  # parameters that __init__ draws on the CPU; a file or _init_weights has their values
    model.tie_weights()
    check_architecture(model, attn_implementation)
    return model.train()


def num_parameters(model: torch.nn.Module) -> int:
    """Parameters of ``model``, a tied one counted once."""
    return sum(p.numel() for p in model.parameters())


def _refusal(config: PretrainedConfig, attn_implementation: str | None, error: Exception) -> ConfigError:
    text = " ".join(str(error).split())
    given, fix = f"a model of type {config.model_type} ({text[:200]})", "name a decoder-only language model"
    if "attention implementation" in text or "does not support Flash Attention" in text:
        given, fix = f"{attn_implementation} for {config.model_type}", "leave attn_implementation out"
        return ConfigError("model.attn_implementation", given, "an attention backend that the model has", fix)
    if "trust_remote_code" in text:
        given, fix = "false for a model that comes with its own code", "set trust_remote_code: true"
        return ConfigError("model.trust_remote_code", given, "true, after you have read that code", fix)
    return ConfigError("model.name", given, "an architecture that AutoModelForCausalLM can build", fix)
