"""Attention backends that this machine, device or model cannot train with."""

from __future__ import annotations

import importlib.util

import pytest

from lit_fsdp.audit import audit_recipe
from lit_fsdp.config.parser import check_recipe
from lit_fsdp.errors import ConfigError
from lit_fsdp.models import attention
from lit_fsdp.models.attention import check_attention
from lit_fsdp.models.build import build_on_meta

GPU_ONLY = ("flex_attention", "flash_attention_2", "flash_attention_3")


@pytest.mark.parametrize("name", GPU_ONLY)
def test_refused_on_a_cpu(name):
    with pytest.raises(ConfigError, match=rf"{name} on a CPU(.|\n)*leave attn_implementation out"):
        check_attention(name, "cpu")
    for other in ("sdpa", "eager"):
        check_attention(other, "cpu")


@pytest.mark.parametrize(
    ("name", "package"), [("flash_attention_2", "flash_attn"), ("flash_attention_3", "flash-attn-3")]
)
def test_a_missing_package_is_named_before_anything_is_downloaded(name, package, tiny, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        attention.importlib.util, "find_spec", lambda module: None if module.startswith("flash_attn") else find(module)
    )
    for refused in (lambda: check_attention(name, "cuda"), lambda: build_on_meta(tiny("llama"), name)):
        with pytest.raises(ConfigError, match=package) as raised:
            refused()
        assert "install" in raised.value.fix


def _recipe(config, attn, precision="mixed", **trainer):
    strategy = {"class_path": "lit_fsdp.fsdp_strategy", "init_args": {"precision": precision}}
    model = {"name": config.to_dict(), "attn_implementation": attn}
    return {"model": model, "trainer": {"devices": 2, "max_steps": 1, "strategy": strategy, **trainer}}


def test_an_audit_needs_no_package(tiny):
    asked = {attn: audit_recipe(check_recipe(_recipe(tiny("llama"), attn), "audit")) for attn in ("sdpa", *GPU_ONLY)}
    for attn in GPU_ONLY:
        assert asked[attn] == asked["sdpa"]
    with pytest.raises(ConfigError, match="flash_attention_2 for bloom"):
        audit_recipe(check_recipe(_recipe(tiny("bloom"), "flash_attention_2"), "audit"))


@pytest.mark.parametrize("accelerator", ["cpu", "gpu"])
def test_the_miniature_replaces_them_on_a_cpu(tiny, accelerator):
    values = _recipe(tiny("llama"), "flex_attention", accelerator=accelerator)
    values["model"]["miniature"] = True
    found = check_recipe(values, "audit").model.attn_implementation
    assert found == (None if accelerator == "cpu" else "flex_attention")
