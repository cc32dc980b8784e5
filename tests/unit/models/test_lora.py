"""Adapters and the base below them: what is trained, where values come from, which layers are kept in 4 bits."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lit_fsdp.config.model import LoraConfig, ModelConfig
from lit_fsdp.errors import ConfigError
from lit_fsdp.models.build import build_on_meta, freeze_parameters
from lit_fsdp.models.lora import LoraWeights, apply_lora
from lit_fsdp.models.quantize import apply_nf4
from lit_fsdp.models.resolve import resolve_model
from lit_fsdp.models.weights import open_weights

IDS = torch.arange(20).reshape(2, 10)


def filled(folder: Path, fill: Any, seed: int = 5, **lora: Any):
    """A model folder's model with adapters, filled from its files; and the adapters' configuration."""
    source = resolve_model(ModelConfig(name=str(folder)), 0)
    model = build_on_meta(source.hf_config, "eager")
    adapter = apply_lora(model, LoraConfig(**lora))
    base = open_weights(source, build_on_meta(source.hf_config, "eager"), seed)
    return fill(LoraWeights(base, model, seed), model), adapter


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS, use_cache=False).logits  # a cache changes the layout, and with it the last bit


def test_the_first_logits_are_the_base_models(saved, fill):
    for family, targets in (("llama", None), ("gpt2", "all-linear"), ("bloom", None), ("gemma3_text", "all-linear")):
        folder = saved(family)
        model, _ = filled(folder, fill, target_modules=targets)
        base = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        assert torch.equal(logits(model), logits(base)), family
        assert trained(model)
        assert all(".lora_A." in name or ".lora_B." in name for name in trained(model))


def trained(model: torch.nn.Module) -> set[str]:
    return {name for name, param in model.named_parameters() if param.requires_grad}


def test_names_that_cannot_be_meant_are_refused(tiny):
    for lora, field, text in (
        ({"target_modules": ["q_projj"]}, "target_modules", "'q_projj'"),
        ({"target_modules": ["q_proj", "query"]}, "target_modules", "layers of this model: down_proj,"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save", "share no weight"),
        ({"target_modules": ["norm"]}, "target_modules", "not supported"),
    ):
        with pytest.raises(ConfigError, match=text) as error:
            apply_lora(build_on_meta(tiny("llama")), LoraConfig(**lora))
        assert error.value.field == f"model.lora.{field}"
    for pattern, text in (("model.embed_token.*", "such as model.embed_tokens.weight"), ("*", "something to train")):
        with pytest.raises(ConfigError, match=text):
            freeze_parameters(build_on_meta(tiny("llama")), [pattern])


def test_what_cannot_be_quantized_is_refused(tiny, monkeypatch):
    with pytest.raises(ConfigError, match="nf4 for GPT2LMHeadModel, which has no linear layer but the head"):
        apply_nf4(build_on_meta(tiny("gpt2")), [], False)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r"pip install 'lit-fsdp\[qlora\]'"):
        apply_nf4(build_on_meta(tiny("llama")), [], False)
