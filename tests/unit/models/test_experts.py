"""Adapters on fused experts against the weights that peft sums: output and gradients, eager and compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lit_fsdp.config.model import LoraConfig
from lit_fsdp.models.experts import prepare_experts
from lit_fsdp.models.lora import apply_lora
from tests.unit.models.families import tiny


@pytest.mark.filterwarnings("ignore")  # of torch about itself and about transformers
def test_grouped_factors_are_as_peft_sums_eager_and_compiled():
    """torch 2.15 refuses the grouped products of the factors in compiled code, which sums as peft does."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(tiny("qwen3_moe"))
    apply_lora(model, LoraConfig(r=4, target_modules="all-linear"))
    experts = model.model.layers[0].mlp.experts.to_empty(device="cpu")
    for param in experts.parameters():
        torch.nn.init.normal_(param, std=0.1)
    x = torch.randn(12, model.config.hidden_size)
    chosen = torch.stack([torch.randperm(4)[:2] for _ in range(12)])

    def results(call: Any, is_bf16: bool = False) -> list[torch.Tensor]:
        experts.zero_grad()
        own = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=is_bf16):
            out = call(own, chosen, torch.full((12, 2), 0.5))
        out.square().sum().backward()
        grads = [param.grad for name, param in experts.named_parameters() if "lora_" in name]
        return [out.detach(), own.grad, *grads]

    wanted = results(experts)
    prepare_experts(experts)
    for is_bf16, allowed in ((False, 1e-5), (True, 0.02)):
        for call in (experts, torch.compile(experts)):
            for ours, theirs in zip(results(call, is_bf16), wanted, strict=True):
                assert float((ours - theirs).norm() / theirs.norm()) < allowed
