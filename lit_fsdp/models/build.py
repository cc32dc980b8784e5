"""Build the model that a recipe trains on meta, with its adapters and frozen parameters."""

import copy
import importlib.util
import logging
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from lit_fsdp.config.model import GPU_ATTENTION, ModelConfig, gpu_attention_on_cpu
from lit_fsdp.errors import ConfigError, require
from lit_fsdp.models.attention import by_sample, check_causal
from lit_fsdp.models.experts import choose_eager, prepare_experts
from lit_fsdp.models.lora import apply_lora
from lit_fsdp.models.pointwise import apply_single_functions
from lit_fsdp.models.weights import tied_groups

_log = logging.getLogger(__name__)
_FLASH_MAJOR = 8  # compute capability
_FLASH_PACKAGES = {
    "flash_attention_2": ("flash_attn", "pip install flash-attn --no-build-isolation"),
    "flash_attention_3": ("flash_attn_interface", "build the folder hopper of github.com/Dao-AILab/flash-attention"),
}


def build_on_meta(
    hf_config: PretrainedConfig, attn_implementation: str | None = None, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Build the causal LM of ``hf_config`` in train mode with every parameter and buffer on the meta device.

    Floating-point parameters are fp32 whatever the config says: the precision mode decides the storage dtype. Tied
    parameters are one object. The key-value cache is switched off.
    """
    config = copy.deepcopy(hf_config)
    config.use_cache = False
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": attn_implementation}
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code, **options)
    except (ValueError, ImportError) as error:
        field, kind = "trust_remote_code" if "trust_remote_code" in str(error) else "name", config.model_type
        if attn_implementation:
            field, kind = "attn_implementation", f"{kind} with {attn_implementation}"
        raise ConfigError(
            f"model.{field}",
            f"a model of type {kind} ({' '.join(str(error).split())[:300]})",
            "a decoder-only language model that AutoModelForCausalLM can build, with an attention that it supports",
            "name another model, or leave attn_implementation out",
        ) from error
    model.to("meta")  # some tensors of __init__ ignore the device; files or _init_weights provide their values
    model.tie_weights()
    if attn_implementation is None:
        by_sample(model, True)
    return model.train()


def num_parameters(model: nn.Module) -> int:
    """Number of parameters of ``model``; a tied parameter counts once."""
    return sum(p.numel() for p in model.parameters())


def check_attention(attn_implementation: str | None, device_type: str) -> None:
    """Refuse an attention backend that is not installed or has no CPU backward pass (FlexAttention in torch 2.13).

    If the FlashAttention package is missing, transformers would run a kernel from the hub, which no recipe allows.
    """
    if device_type == "cpu" and attn_implementation in GPU_ATTENTION:
        raise gpu_attention_on_cpu(attn_implementation)
    if attn_implementation in _FLASH_PACKAGES:
        package, how = _FLASH_PACKAGES[attn_implementation]
        field, otherwise = "model.attn_implementation", "leave attn_implementation out to use sdpa"
        found, given = importlib.util.find_spec(package), f"{attn_implementation} without the package {package}"
        require(found, field, given, "sdpa | eager | flex_attention, which need no package", f"{how}, or {otherwise}")
        major, minor = torch.cuda.get_device_capability()
        given = f"{attn_implementation} on a GPU of compute capability {major}.{minor}"
        require(major >= _FLASH_MAJOR, field, given, "8.0 (Ampere) or newer", otherwise)


def attention_words(chosen: str, named: str | None, computes_in: str) -> str:
    """Describe the attention backend on this GPU, and why; torch uses the first kernel that supports the mask."""
    is_new = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= _FLASH_MAJOR
    has_flash = computes_in != "fp32" and is_new
    without = "memory-efficient: flash needs bf16 or fp16, on Ampere or newer"
    kernels = "flash without a mask, memory-efficient or cuDNN's with one" if has_flash else without
    of_torch = f" (torch's kernels: {kernels})" if chosen.startswith("sdpa") else ""
    return f"{chosen}{of_torch}, {'as model.attn_implementation says' if named else 'the default of this model'}"


def build_trainable(
    hf_config: PretrainedConfig, config: ModelConfig, base: str | None = None
) -> tuple[PreTrainedModel, dict[str, Any] | None]:
    """Build the causal LM of ``hf_config`` on meta with the adapters and frozen parameters of the ``model`` section.

    With ``add_tokens`` and adapters, embedding and head are fully trained, as with peft's ``modules_to_save``, but in
    place. Also returns the content of ``adapter_config.json``, which names ``base``.
    """
    model = build_on_meta(hf_config, config.attn_implementation, config.trust_remote_code)
    check_causal(model)
    if choose_eager(model):
        _log.warning("experts run sequentially (eager): grouped matrix products need sizes that are multiples of 8")
    vocabulary = vocabulary_modules(model) if config.add_tokens else {}
    adapter_config = None
    if config.lora is not None:
        adapter_config = apply_lora(model, config.lora, base)
        inside = {module: name for name, module in model.named_modules()}
        for name, module in vocabulary.items():  # low-rank factors cannot set a single row independently
            given = f"{name.rpartition('.')[2]} with add_tokens, which fully trains it"
            fits, allowed = not inside[module].endswith(".base_layer"), "layers other than embedding and head"
            require(fits, "model.lora.target_modules", given, allowed, "leave it out")
            if inside[module] == name:  # else modules_to_save made a trained copy
                module.requires_grad_(True)
    prepare_experts(model)
    apply_single_functions(model)
    freeze_parameters(model, config.freeze or [])
    frozen = [name for name in vocabulary_tensors(model) if not model.get_parameter(name).requires_grad]
    if config.add_tokens and frozen:
        _log.warning("model.add_tokens: not trained, so new tokens keep their initial values: %s", frozen)
    return model, adapter_config


def vocabulary_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Input embedding and head by name."""
    ends = {model.get_input_embeddings(), model.get_output_embeddings()}
    return {name: module for name, module in model.named_modules() if module in ends}


def vocabulary_tensors(model: PreTrainedModel) -> list[str]:
    """Names of the parameters with one row per token: those of the embedding and the head, including its bias."""
    modules = vocabulary_modules(model).items()
    return [f"{name}.{own}" for name, module in modules for own, _ in module.named_parameters(recurse=False)]


def kept_with_adapters(model: PreTrainedModel, config: ModelConfig, has_new_rows: bool) -> list[str]:
    """Names of base parameters that an exported adapter must include: embedding and head if tokens were added.

    These are the trained ones, or with new rows all of them, because other copies of the base lack these rows.
    """
    if config.lora is None or not config.add_tokens:
        return []
    return [name for name in vocabulary_tensors(model) if has_new_rows or model.get_parameter(name).requires_grad]


def freeze_parameters(model: nn.Module, patterns: list[str]) -> None:
    """Freeze parameters by name patterns (``*`` matches anything; any name of a tied parameter matches), in place."""
    for pattern in patterns:
        groups = [group for group in tied_groups(model) if any(fnmatchcase(name, pattern) for name in group)]
        params = [param for name, param in model.named_parameters() if any(name in group for group in groups)]
        some = ", ".join(name for name, _ in list(model.named_parameters())[:3])
        allowed = f"names of parameters, such as {some}; * matches anything"
        require(params, "model.freeze", f"{pattern!r}, which matches no parameter", allowed)
        for param in params:
            param.requires_grad_(False)
    is_trained = any(param.requires_grad for param in model.parameters())
    require(is_trained, "model.freeze", patterns, "patterns that leave trainable parameters", "drop a pattern")
