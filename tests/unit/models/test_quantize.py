"""Which layers of a base are kept in 4 bits, and what is said where that cannot be."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from torch import nn

from lit_fsdp.config.model import LoraConfig
from lit_fsdp.config.strategy import StrategyConfig
from lit_fsdp.errors import ConfigError
from lit_fsdp.models.build import build_on_meta
from lit_fsdp.models.lora import apply_lora
from lit_fsdp.models.quantize import apply_nf4, pack
from lit_fsdp.parallel.precision import cast_parameters
from lit_fsdp.parallel.units import quantized_layers


def test_linear_layers_but_the_head_and_what_is_trained_whole_are_packed(tiny):
    plain = build_on_meta(tiny("llama"))
    linears = {name: m.weight.numel() for name, m in plain.named_modules() if isinstance(m, nn.Linear)}
    model = build_on_meta(tiny("llama"))
    apply_lora(model, LoraConfig(quantize="nf4", target_modules=["q_proj"], modules_to_save=["down_proj"]))
    cast_parameters(model, StrategyConfig())
    found = {name.replace(".base_layer", ""): layer for name, layer in quantized_layers(model).items()}
    assert set(found) == {name for name in linears if name != "lm_head" and "down_proj" not in name}
    for name, layer in found.items():
        assert (layer.weight.shape, layer.weight.dtype) == ((math.ceil(linears[name] / 4), 1), torch.bfloat16), name
        assert not layer.weight.requires_grad
    others = {n: p.dtype for n, p in model.named_parameters() if not any(p is one.weight for one in found.values())}
    trained = {name for name, dtype in others.items() if dtype == torch.float32}
    assert trained == {name for name in others if "lora_" in name or "modules_to_save" in name}
    assert set(others.values()) == {torch.float32, torch.bfloat16}


def test_what_is_packed_is_the_weight_again_to_four_bits():
    weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(3)) * 0.02
    for double in (False, True):
        layer = nn.Module()
        layer.double_quantization = double
        packed = [pack(weight, layer, torch.device("cpu")) for _ in range(2)]
        assert torch.equal(*(one.view(torch.uint8) for one in packed))
        again = dequantize_4bit(packed[0], layer.quant_state)
        assert (again - weight).abs().max() < 0.16 * weight.abs().max()  # half of the widest gap between two levels
        assert layer.quant_state.nested == double


def test_what_cannot_be_quantized_is_refused(tiny, monkeypatch):
    with pytest.raises(ConfigError, match="nf4 for GPT2LMHeadModel, which has no linear layer but the head"):
        apply_nf4(build_on_meta(tiny("gpt2")), [], False)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r"pip install 'lit-fsdp\[qlora\]'"):
        apply_nf4(build_on_meta(tiny("llama")), [], False)
