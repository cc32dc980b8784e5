"""Building on meta: no memory, ties, and refusals."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import logging

import pytest
import torch
from transformers import AutoConfig

from lit_fsdp.audit import audit_recipe
from lit_fsdp.errors import ConfigError
from lit_fsdp.models.build import attention_words, build_on_meta, check_attention
from lit_fsdp.module import CausalLMModule
from tests.runs import check_recipe


def test_what_cannot_be_built_and_attention_that_the_model_lacks(tiny, caplog):
    with pytest.raises(ConfigError, match="a model of type t5"):
        build_on_meta(AutoConfig.for_model("t5"))
    with pytest.raises(ConfigError, match=r"bloom with sdpa(.|\n)*leave attn_implementation out"):
        build_on_meta(tiny("bloom"), "sdpa")
    with caplog.at_level(logging.INFO):
        assert CausalLMModule(name=tiny("bloom").to_dict()).build().attn_implementation == "eager"
        assert CausalLMModule(name=tiny("llama").to_dict()).build().attn_implementation == "sdpa"
    (said,) = [r.message for r in caplog.records if "attn" in r.message]
    assert said == "model.attn_implementation: eager, as bloom does not work with sdpa"


def test_attention_on_gpus_is_said_and_refused_where_it_is_not_there(monkeypatch):
    there, sdpa = importlib.machinery.ModuleSpec("there", None), "leave attn_implementation out, which takes sdpa"
    for name, capability, package, fix in (
        ("flash_attention_2", (9, 0), None, f"pip install flash-attn --no-build-isolation, or {sdpa}"),
        ("flash_attention_3", (9, 0), None, "build the folder hopper of"),
        ("flash_attention_2", (7, 5), there, sdpa),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda found=capability: found)
        monkeypatch.setattr(importlib.util, "find_spec", lambda _, found=package: found)
        with pytest.raises(ConfigError, match=r"model\.attn_implementation: got flash_attention_") as caught:
            check_attention(name, "cuda")
        assert caught.value.fix.startswith(fix)
    sdpa = "torch's memory-efficient kernel; the flash kernel takes bf16 or fp16, on Ampere or newer"
    assert attention_words("sdpa", None, "llama", "fp16") == f"sdpa ({sdpa}), as llama is built by default"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    for name in (None, "sdpa", "flex_attention", "flash_attention_2"):
        check_attention(name, "cuda")
    assert attention_words("sdpa", None, "llama", "bf16").startswith("sdpa (torch's flash kernel without a mask, ")
    said = "flash_attention_2 (the kernel of flash_attn), as model.attn_implementation says"
    assert attention_words("flash_attention_2", "flash_attention_2", "llama", "bf16") == said


def test_an_audit_needs_no_package(tiny):
    def audited(family, attention):
        model = {"name": tiny(family).to_dict(), "attn_implementation": attention}
        return audit_recipe(check_recipe({"model": model, "trainer": {"devices": 2, "max_steps": 1}}, "audit"))

    gpu_only = ("flex_attention", "flash_attention_2", "flash_attention_3")
    assert all(audited("llama", attention) == audited("llama", "sdpa") for attention in gpu_only)
    with pytest.raises(ConfigError, match="flash_attention_2 for bloom"):
        audited("bloom", "flash_attention_2")
