"""Building on meta: no memory, ties, and refusals."""

from __future__ import annotations

import importlib.util
import logging
import re
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from lit_fsdp.audit import audit_recipe
from lit_fsdp.config.model import ModelConfig
from lit_fsdp.errors import ConfigError
from lit_fsdp.models.build import attention_words, build_on_meta, build_trainable, check_attention
from lit_fsdp.models.miniature import shrink
from lit_fsdp.models.tokenizers import miniature_tokenizer
from lit_fsdp.module import CausalLMModule
from tests.runs import check_recipe


def test_what_cannot_be_built_and_attention_that_the_model_lacks(tiny, caplog):
    with pytest.raises(ConfigError, match="a model of type t5"):
        build_on_meta(AutoConfig.for_model("t5"))
    with pytest.raises(ConfigError, match=r"bloom with sdpa(.|\n)*leave attn_implementation out"):
        build_on_meta(tiny("bloom"), "sdpa")
    with caplog.at_level(logging.INFO):
        assert CausalLMModule(name=tiny("bloom").to_dict()).build().attn_implementation == "eager"
        assert CausalLMModule(name=tiny("llama").to_dict()).build().attn_implementation == "sdpa_by_sample"
    (said,) = [r.message for r in caplog.records if "attn" in r.message]
    assert said == "model.attn_implementation: eager, as bloom does not work with sdpa"


def test_attention_on_gpus_is_said_and_refused_where_it_is_not_there(monkeypatch):
    sdpa, kernels = "leave attn_implementation out to use sdpa", "sdpa (torch's kernels: "
    for name, major, package, fix, said in (
        ("flash_attention_2", 9, None, f"pip install flash-attn --no-build-isolation, or {sdpa}", ""),
        ("flash_attention_3", 9, None, "build the folder hopper of", ""),
        ("flash_attention_2", 7, "there", sdpa, ""),
        ("flash_attention_2", 8, "there", None, "flash_attention_2, as model.attn_implementation says"),
        (None, 7, None, None, f"{kernels}memory-efficient: flash needs bf16 or fp16, on Ampere or newer), the default"),
        (None, 9, None, None, f"{kernels}flash without a mask, memory-efficient or cuDNN's with one), the default"),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda found=major: (found, 0))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(importlib.util, "find_spec", lambda _, found=package: found)
        with nullcontext() if fix is None else pytest.raises(ConfigError) as caught:
            check_attention(name, "cuda")
        assert fix is None or caught.value.fix.startswith(fix)
        assert attention_words(name or "sdpa", name, "bf16").startswith(said)


def test_an_audit_needs_no_package(tiny):
    def audited(family, attention):
        model = {"name": tiny(family).to_dict(), "attn_implementation": attention}
        return audit_recipe(check_recipe({"model": model, "trainer": {"devices": 2, "max_steps": 1}}, "audit"))

    gpu_only = ("flex_attention", "flash_attention_2", "flash_attention_3")
    assert all(audited("llama", attention) == audited("llama", "sdpa") for attention in gpu_only)
    with pytest.raises(ConfigError, match="flash_attention_2 for bloom"):
        audited("bloom", "flash_attention_2")


@pytest.mark.parametrize(
    ("family", "changes", "fix"),
    [
        ("bert", {}, "set model.config_overrides: {is_decoder: true}"),
        ("bert", {"is_decoder": True}, ""),
        ("xlm", {}, "set model.config_overrides: {causal: true}"),
        ("doge", {"is_moe": True, "num_experts": 16}, "use a Doge model without is_moe"),
        ("doge", {}, ""),
        ("gemma", {"use_bidirectional_attention": True}, "config_overrides: {use_bidirectional_attention: false}"),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, "{use_bidirectional_attention: false}"),
        ("gemma", {}, ""),
        ("llama", {}, ""),
    ],
)
def test_a_model_whose_tokens_see_later_tokens_is_refused_by_name(family: str, changes: dict[str, Any], fix: str):
    config = AutoConfig.for_model(family, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, **changes)
    if not fix:
        build_trainable(config, ModelConfig(name=family))
        return
    with pytest.raises(ConfigError, match=f"a token depends on later tokens(?s:.*){re.escape(fix)}"):
        build_trainable(config, ModelConfig(name=family))


def test_the_miniature_of_a_hybrid_has_a_block_of_each_kind():
    small = shrink(AutoConfig.for_model("nemotron_h"), miniature_tokenizer())
    assert len(set(small.layers_block_type)) == len(small.layers_block_type) == small.num_hidden_layers >= 2
