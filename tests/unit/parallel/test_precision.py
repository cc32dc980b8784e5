"""The realized-dtype contract names the tensor that differs, and observes what the engines really do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lit_fsdp.config.strategy import StrategyConfig
from lit_fsdp.errors import ContractError
from lit_fsdp.parallel.precision import DtypeContract, apply_float8, cast_inputs


@pytest.fixture
def contract() -> DtypeContract:
    return DtypeContract(StrategyConfig())


def test_a_tensor_of_another_dtype_is_named(contract: DtypeContract, caplog: pytest.LogCaptureFixture):
    named = [("ids", torch.zeros(2, dtype=torch.int64)), ("a", torch.zeros(2))]  # whole numbers are nobody's business
    contract.check("parameters", named, "fp32")
    contract.check("buffers", [("b", torch.zeros(2, dtype=torch.bfloat16))], None)
    with pytest.raises(ContractError) as caught:
        contract.check("gradients", [*named, ("b", torch.zeros(2, dtype=torch.bfloat16))], "fp32")
    assert str(caught.value).splitlines()[:2] == [
        "precision contract broken: gradients: b is bf16",
        "  declared: fp32 (mode mixed)",
    ]
    assert contract.report() == {
        "mode": "mixed",
        "declared": {"param": "fp32", "compute": "bf16", "reduce": "fp32"},
        "realized": {"parameters": {"fp32": 1}, "buffers": {"bf16": 1}},
    }
    contract.is_error = False
    for _ in range(2):
        contract.check("gradients", [("b", torch.zeros(2, dtype=torch.bfloat16))], "fp32")
    (record,) = caplog.records  # said once
    assert record.getMessage().startswith("precision contract broken: gradients: b is bf16\n")
    assert contract.realized["gradients"] == {"bf16": 2}


def test_inputs_by_name_are_cast_too():
    layer = nn.Linear(2, 2).bfloat16()
    cast_inputs(layer, torch.bfloat16)
    assert layer(input=torch.ones(1, 2)).dtype == layer(torch.ones(1, 2)).dtype == torch.bfloat16


def test_layers_that_fp8_skips_stay():
    for skip, found in ((None, {"proj"}), (["proj"], {"lm_head"})):
        model = nn.ModuleDict(
            {name: nn.Linear(size, 32) for name, size in (("proj", 32), ("lm_head", 32), ("odd", 33))}
        )
        apply_float8(model, skip, "precision")
        assert {name for name, layer in model.items() if type(layer) is not nn.Linear} == found


def test_a_frozen_weight_of_another_dtype_is_named(contract: DtypeContract):
    contract.frozen = "bf16"
    net = nn.Linear(2, 2)
    net.weight.requires_grad_(False)
    with pytest.raises(ContractError, match="frozen parameters after set-up: weight is fp32\n  declared: bf16"):
        contract.check_parameters("parameters after set-up", net.named_parameters())
    net.weight.data = net.weight.data.bfloat16()
    contract.check_parameters("parameters after set-up", net.named_parameters())
    assert contract.realized["frozen parameters after set-up"] == {"bf16": 1}
