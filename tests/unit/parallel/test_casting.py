"""Buffers, outputs and norms: what is cast, and what is left alone."""

from __future__ import annotations

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from lit_fsdp.config.strategy import PrecisionConfig, StrategyConfig
from lit_fsdp.parallel.casting import cast_buffers, cast_outputs, norm_modules, output_module
from lit_fsdp.parallel.prepare import plan_for

_CONFIG = LlamaConfig(
    hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=32, head_dim=8
)


class Wrapper(nn.Module):
    """As a LightningModule holds its model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: object) -> object:
        return self.model(*args)


def test_floating_buffers_are_cast_and_others_are_not() -> None:
    net = nn.BatchNorm1d(3)
    cast_buffers(net, torch.bfloat16)
    assert (net.running_mean.dtype, net.running_var.dtype) == (torch.bfloat16, torch.bfloat16)
    assert net.num_batches_tracked.dtype == torch.int64
    assert net.weight.dtype == torch.float32


def test_outputs_in_containers_are_cast() -> None:
    net = nn.Identity()
    cast_outputs(net, torch.bfloat16)
    found = net({"a": [torch.ones(2), torch.ones(2, dtype=torch.long)], "b": "text"})
    assert (found["a"][0].dtype, found["a"][1].dtype, found["b"]) == (torch.bfloat16, torch.int64, "text")


def test_the_output_of_a_model_is_its_logits_tied_or_not() -> None:
    for tied in (True, False):
        model = LlamaForCausalLM(LlamaConfig(**{**_CONFIG.to_dict(), "tie_word_embeddings": tied}))
        wrapper = Wrapper(model)
        assert output_module(wrapper) is model
        cast_outputs(output_module(wrapper), torch.bfloat16)
        assert model(torch.zeros(1, 3, dtype=torch.long)).logits.dtype == torch.bfloat16


def test_a_module_with_parts_beside_each_other_is_its_own_output() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert output_module(Wrapper(net)) is net


def test_norms_become_units_of_their_own() -> None:
    with torch.device("meta"):
        module = Wrapper(LlamaForCausalLM(_CONFIG))
    assert len(norm_modules(module)) == 5  # two in each block, one at the end
    plain = plan_for(module, StrategyConfig(), "strategy")
    kept = StrategyConfig(precision=PrecisionConfig(keep_norms_fp32=True))
    plan = plan_for(module, kept, "strategy")
    assert not any(unit.keeps_fp32 for unit in plain.units)
    assert [unit.name for unit in plan.units if unit.keeps_fp32] == [
        *(f"model.model.layers.{i}.{name}" for i in (0, 1) for name in ("input_layernorm", "post_attention_layernorm")),
        "model.model.norm",
    ]
    assert sum(unit.num_params for unit in plan.units) == sum(unit.num_params for unit in plain.units)
    assert plan.num_params == plain.num_params
    sizes = {unit.name: unit.num_params for unit in plan.units}
    assert sizes["model.model.layers.0"] == {u.name: u.num_params for u in plain.units}["model.model.layers.0"] - 32
