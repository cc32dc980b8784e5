"""Building on meta: no memory, ties, and refusals."""

from __future__ import annotations

import logging

import pytest
from transformers import AutoConfig

from lit_fsdp.audit import audit_recipe
from lit_fsdp.errors import ConfigError
from lit_fsdp.models.build import build_on_meta
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


def test_an_audit_needs_no_package(tiny):
    def audited(family, attention):
        model = {"name": tiny(family).to_dict(), "attn_implementation": attention}
        return audit_recipe(check_recipe({"model": model, "trainer": {"devices": 2, "max_steps": 1}}, "audit"))

    gpu_only = ("flex_attention", "flash_attention_2", "flash_attention_3")
    assert all(audited("llama", attention) == audited("llama", "sdpa") for attention in gpu_only)
    with pytest.raises(ConfigError, match="flash_attention_2 for bloom"):
        audited("bloom", "flash_attention_2")
