"""Adapters on fused experts against the weights that peft sums: output and gradients, eager and compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations import moe

from lit_fsdp.config.model import LoraConfig, ModelConfig
from lit_fsdp.models.build import build_on_meta, build_trainable
from lit_fsdp.models.experts import choose_eager, prepare_experts
from lit_fsdp.models.lora import apply_lora
from lit_fsdp.models.quantize import PackedExperts, pack
from lit_fsdp.models.special_layers import router_layers
from tests.unit.models.families import FAMILIES, tiny


@pytest.mark.parametrize(
    "is_compiled",
    [
        False,
        pytest.param(True, marks=pytest.mark.long("20 s of compilation; other compiled layers are in `make test`")),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of torch about itself and about transformers
def test_grouped_factors_are_as_peft_sums_eager_and_compiled(is_compiled: bool):
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
    call = torch.compile(experts) if is_compiled else experts
    for is_bf16, allowed in ((False, 1e-5),) if is_compiled else ((False, 1e-5), (True, 0.02)):
        for ours, theirs in zip(results(call, is_bf16), wanted, strict=True):
            assert float((ours - theirs).norm() / theirs.norm()) < allowed


def test_a_router_with_adapters_still_tells_its_logits():
    """transformers records them with hooks, for the router loss."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(tiny("qwen3_moe")).eval()
    ids = torch.arange(3, 23)[None]
    wanted = model(input_ids=ids, output_router_logits=True).aux_loss
    apply_lora(model, LoraConfig(r=4, target_modules=["q_proj", "mlp.gate.weight"]))
    prepare_experts(model)
    for module in [*model.modules()]:
        if "lora" in type(module).__name__.lower() or any(param.is_meta for param in module.parameters(recurse=False)):
            module.to_empty(device="cpu", recurse=False)
    for name, param in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.zeros_(param)
    torch.testing.assert_close(model(input_ids=ids, output_router_logits=True).aux_loss, wanted)


@pytest.mark.parametrize("is_double", [False, True])
@pytest.mark.parametrize(("shape", "most"), [((6, 32, 80), 1), ((6, 5, 24), 6)])
def test_experts_are_packed_one_by_one_into_the_bits_of_the_whole(shape, most, is_double):
    """Unless a block of 64 weights would belong to two experts; then all are read at once."""
    torch.manual_seed(0)
    weight, read = torch.randn(shape).bfloat16(), []

    def rows(chosen: slice) -> torch.Tensor:
        read.append(len(weight[chosen]))
        return weight[chosen]

    layer = PackedExperts(weight.shape, is_double)
    options = {"quant_type": "nf4", "compress_statistics": is_double, "quant_storage": torch.bfloat16}
    wanted, state = quantize_4bit(weight, **options)
    found = pack(rows, layer, torch.device("cpu"))
    assert torch.equal(found.view(torch.int16), wanted.view(torch.int16))
    layer.weight = torch.nn.Parameter(found, requires_grad=False)
    assert torch.equal(layer.unpacked(torch.bfloat16), dequantize_4bit(wanted, state))
    assert (max(read), sum(read)) == (most, len(weight))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])  # the second with biases
def test_tokens_of_an_expert_are_whole_blocks_in_bf16(family, monkeypatch):
    """Or oneDNN builds, and keeps, a kernel for every number of tokens; experts without tokens stay empty."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(tiny(family))
    experts = model.model.layers[0].mlp.experts
    for param in experts.parameters():
        torch.nn.init.normal_(param, std=0.1)
    own, seen, x = moe._grouped_mm, [], torch.randn(150, model.config.hidden_size)
    monkeypatch.setattr(moe, "_grouped_mm", lambda x, w, offs: seen.append(offs.tolist()) or own(x, w, offs))
    chosen = torch.stack([1 + torch.randperm(3)[:2] for _ in range(len(x))])
    weights = torch.rand(len(x), 2)

    def results(is_bf16: bool) -> list[torch.Tensor]:
        experts.zero_grad()
        begin, shares = x.clone().requires_grad_(), weights.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=is_bf16):
            out = experts(begin, chosen, shares)
        out.square().sum().backward()
        return [out.detach(), begin.grad, shares.grad, *(param.grad for param in experts.parameters())]

    wanted = results(False)
    prepare_experts(experts)
    for is_bf16, allowed in ((False, 1e-6), (True, 0.02)):
        seen.clear()
        for ours, theirs in zip(results(is_bf16), wanted, strict=True):
            assert float((ours - theirs).norm() / theirs.norm()) < allowed
        assert len(seen) == 2
        assert all(ends[0] == 0 for ends in seen)
        assert all(end % 64 == 0 for ends in seen for end in ends) == is_bf16
        assert (seen[0][-1] == 2 * len(x)) != is_bf16


def test_sizes_that_grouped_products_refuse_run_one_after_the_other():
    """Rows of 16 bytes: 44 values are enough in fp32, not in bf16, in which plain transformers raises."""
    for size, chosen in ((44, "eager"), (48, "grouped_mm")):
        config = tiny("qwen3_moe").to_dict() | {"moe_intermediate_size": size}
        model, _ = build_trainable(AutoConfig.for_model(**config), ModelConfig(name="any", lora=LoraConfig()))
        assert model.config._experts_implementation == chosen
    torch.manual_seed(0)
    config = AutoConfig.for_model(**tiny("qwen3_moe").to_dict() | {"moe_intermediate_size": 44})
    model = AutoModelForCausalLM.from_config(config)
    assert choose_eager(model) == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    prepare_experts(model)
    with torch.autocast("cpu", torch.bfloat16):
        model(input_ids=torch.arange(3, 23)[None], labels=torch.arange(3, 23)[None]).loss.backward()
    grads = [param.grad for name, param in model.named_parameters() if "experts" in name]
    assert all(grad is not None and grad.any() for grad in grads)


@pytest.mark.skipif("gemma4_text" not in FAMILIES, reason="not a family of this release")
def test_a_gate_of_something_else_than_experts_is_no_router():
    config = tiny("gemma4_text")
    config.update({"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32})
    model = build_on_meta(config)
    gates = {name for name, _ in model.named_modules() if name.endswith("per_layer_input_gate")}
    assert gates
    assert {name.rpartition("router.")[2] for name in router_layers(model)} == {"proj"}
