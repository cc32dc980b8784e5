"""The realized-dtype contract names the tensor that differs, and observes what the engines really do."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lit_fsdp.config.strategy import PrecisionConfig, StrategyConfig
from lit_fsdp.errors import ContractError
from lit_fsdp.parallel.precision import (
    DtypeContract,
    cast_buffers,
    cast_outputs,
    cast_parameters,
)
from lit_fsdp.parallel.units import plan_for
from tests.unit.parallel.test_units import llama


@pytest.fixture
def contract() -> DtypeContract:
    return DtypeContract(StrategyConfig())


def test_the_rows_of_the_modes():
    found = {mode: PrecisionConfig(mode=mode).row for mode in ("mixed", "low_precision", "fp32")}
    assert {m: (r.param, r.compute, r.reduce) for m, r in found.items()} == {
        "mixed": ("fp32", "bf16", "fp32"),
        "low_precision": ("bf16", "bf16", "bf16"),
        "fp32": ("fp32", "fp32", "fp32"),
    }


def test_a_parameter_of_another_dtype_is_named(contract: DtypeContract):
    good, bad = torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16)
    with pytest.raises(ContractError) as caught:
        contract.check_parameters([("a.weight", good), ("b.weight", bad)], "after set-up")
    text = str(caught.value)
    assert text.splitlines()[0] == "precision contract broken: parameters after set-up: b.weight is bf16"
    assert text.splitlines()[1] == "  declared: fp32 (mode mixed)"
    assert "parameters after set-up" not in contract.report()["realized"]


def test_integers_are_nobodys_business(contract: DtypeContract):
    contract.check_parameters([("ids", torch.zeros(2, dtype=torch.int64)), ("w", torch.zeros(2))], "after set-up")
    assert contract.report() == {
        "mode": "mixed",
        "declared": {"param": "fp32", "compute": "bf16", "reduce": "fp32"},
        "realized": {"parameters after set-up": {"fp32": 1}},
    }


def test_gradients_and_moments_are_those_of_the_parameter(contract: DtypeContract):
    param = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([param])
    param.grad = torch.ones(2)
    optimizer.step()
    contract.check_gradients([("w", param), ("frozen", torch.zeros(1))])
    contract.check_optimizer(optimizer, {id(param): "w"})
    assert contract.realized == {"gradients": {"fp32": 1}, "optimizer state after the first step": {"fp32": 2}}
    optimizer.state[param]["exp_avg_sq"] = optimizer.state[param]["exp_avg_sq"].half()
    with pytest.raises(ContractError, match=r"optimizer state after resume: w\.exp_avg_sq is fp16"):
        contract.check_optimizer(optimizer, {id(param): "w"}, "after resume")


def test_the_forward_is_watched_until_the_first_step(contract: DtypeContract):
    block = nn.Linear(2, 2)
    contract.watch({"block": block})
    with pytest.raises(ContractError, match=r"gathered parameters in the forward: block\.weight is fp32"):
        block(torch.zeros(1, 2))
    block.bfloat16()  # as the engine gathers it
    block(torch.zeros(1, 2, dtype=torch.bfloat16))
    assert contract.realized == {"gathered parameters in the forward": {"bf16": 2}, "activations": {"bf16": 1}}
    assert contract.watching
    contract.finish_first_step()
    assert not contract.watching
    block.float()(torch.zeros(1, 2))
    assert not block._forward_hooks
    assert not block._forward_pre_hooks


def test_reductions_are_recorded_where_they_are_issued(contract: DtypeContract, monkeypatch: pytest.MonkeyPatch):
    issued: list[torch.Tensor] = []

    def collective(tensor: torch.Tensor) -> None:
        issued.append(tensor)

    monkeypatch.setattr(dist, "all_reduce", collective)
    with contract.watch_reductions():
        dist.all_reduce(torch.zeros(2))
        dist.all_reduce(torch.zeros(2, dtype=torch.int64))
    assert dist.all_reduce is collective
    assert contract.realized == {"reductions": {"fp32": 1}}
    with pytest.raises(ContractError, match="reductions: all_reduce is bf16"), contract.watch_reductions():
        dist.all_reduce(torch.zeros(2, dtype=torch.bfloat16))
    assert dist.all_reduce is collective
    contract.finish_first_step()
    with contract.watch_reductions():
        assert dist.all_reduce is collective  # later steps cost nothing
    assert len(issued) == 3


def test_casting_keeps_ties_buffers_and_integers():
    net = nn.Module()
    net.a, net.b, net.norm = nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2)
    net.b.weight = net.a.weight
    net.a.bias.requires_grad_(False)
    cast_parameters(net, torch.bfloat16)
    assert net.a.weight is net.b.weight
    assert {p.dtype for p in net.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in net.buffers()} == {torch.float32, torch.int64}
    assert not net.a.bias.requires_grad
    same = net.a.weight
    cast_parameters(net, torch.bfloat16)
    assert net.a.weight is same


def test_a_warning_names_a_difference_once_and_goes_on(caplog: pytest.LogCaptureFixture):
    contract = DtypeContract(StrategyConfig(contract="warn"))
    bad = [("w", torch.zeros(2, dtype=torch.bfloat16))]
    for _ in range(2):
        contract.check_parameters(bad, "after set-up")
    (record,) = caplog.records
    assert record.getMessage().startswith("precision contract broken: parameters after set-up: w is bf16\n")
    assert contract.realized == {"parameters after set-up": {"bf16": 2}}


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


def test_norms_become_units_of_their_own() -> None:
    module = llama(tied=False)
    plain = plan_for(module, StrategyConfig(), "strategy")
    plan = plan_for(module, StrategyConfig(precision=PrecisionConfig(keep_norms_fp32=True)), "strategy")
    assert not any(unit.keeps_fp32 for unit in plain.units)
    norms = [f"model.model.layers.{i}.{name}layernorm" for i in (0, 1) for name in ("input_", "post_attention_")]
    assert [unit.name for unit in plan.units if unit.keeps_fp32] == [*norms, "model.model.norm"]
    assert plan.num_params == sum(unit.num_params for unit in plan.units) == plain.num_params
