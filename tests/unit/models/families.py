"""Tiny models of all causal language models of transformers, of which plain transformers knows nothing wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lit_fsdp.models.attention import by_sample
from lit_fsdp.models.miniature import shrink
from lit_fsdp.models.tokenizers import miniature_tokenizer

_NOT = ["hrm_text"] + ["recurrent_gemma"] * (Version(transformers.__version__) < Version("5.24"))
FAMILIES = tuple(name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in _NOT)
"""All but one, whose weights share storage in a way that safetensors refuses, and one that older releases (seen: 5.3)
leave without rotary frequencies."""
_UNLIKE = "llama gemma2 gpt_oss gemma4_text openai-gpt modernbert-decoder diffllama recurrent_gemma bamba nemotron_h"
FEW = tuple(name for name in f"{_UNLIKE} qwen3_next deepseek_v3 bloom".split() if name in FAMILIES)
"""Each of these, as far as the release has them, is unlike the others in its initial values, ties, or attention."""


def tiny(model_type: str) -> PretrainedConfig:
    """The default config of a family, as ``model.miniature: true`` makes it, as a decoder; logits of Granite scaled."""
    config = shrink(AutoConfig.for_model(model_type), miniature_tokenizer())
    if model_type == "granite":
        config.logits_scaling = 8.0
    if hasattr(config, "is_decoder"):  # BERT and its kin; others ignore it
        config.is_decoder = True
    if model_type == "xlm":
        config.causal = True
    return config


def saved(model_type: str, folder: Path) -> PreTrainedModel:
    """A tiny model of random weights in a folder of its own, as plain transformers loads it again.

    Raises:
        Exception: The sizes of this family depend on each other in ways that :func:`tiny` does not know.
    """
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny(model_type)).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def random_model(family: str, is_split: bool = False, **changes: Any) -> Any:
    """A tiny model in which much depends on attention, which goes sample by sample if it is split."""
    config = tiny(family)
    config.update({"use_cache": False, **changes})
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config).eval()
    if is_split:
        by_sample(model, True)
    for param in model.parameters():
        if param.ndim > 1:  # else attention is nearly uniform, and nothing much depends on anything
            torch.nn.init.normal_(param, std=0.15)
    return model
