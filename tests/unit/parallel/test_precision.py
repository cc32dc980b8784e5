"""The realized-dtype contract names the tensor that differs, and observes what the engines really do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lit_fsdp.config.strategy import StrategyConfig
from lit_fsdp.errors import ContractError
from lit_fsdp.parallel.precision import DtypeContract, apply_float8, cast_inputs


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


def test_a_weight_of_another_dtype_is_named(caplog: pytest.LogCaptureFixture):
    contract, net = DtypeContract(StrategyConfig()), nn.Linear(2, 2)
    net.weight.requires_grad_(False)
    contract.frozen = "bf16"
    with pytest.raises(ContractError, match="frozen parameters: weight is fp32\n  declared: bf16"):
        contract.check_parameters("parameters", net.named_parameters())
    contract.is_error = False
    for _ in range(2):
        contract.check_parameters("parameters", net.named_parameters())
    assert len(caplog.records) == 1  # said once
    net.weight.data = net.weight.data.bfloat16()
    contract.check_parameters("parameters", net.named_parameters())
    assert contract.realized["frozen parameters"]["bf16"] == 1
