"""The precision is the strategy's alone; its contract names the tensor that differs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import nn

from lit_fsdp.config.strategy import StrategyConfig
from lit_fsdp.errors import ConfigError, ContractError
from lit_fsdp.parallel.precision import DtypeContract, apply_float8, cast_inputs, settle_precision
from lit_fsdp.strategy import fsdp_strategy


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


def test_gpus_without_bf16(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    """V100 and T4: what auto is there, and what is said of bf16 that is written out."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    slow = "mixed computes in bf16, which is emulated and slower than fp32, as not every GPU has bf16 instructions"
    for given, has_bf16, mode, said in (
        ("auto", False, "fp32", "precision auto: fp32, as not every GPU has bf16 instructions"),
        ("auto", True, "mixed", "precision auto: mixed, as every GPU has bf16 instructions"),
        ("mixed", False, "mixed", f"precision {slow}; set it to auto, fp32 or fp16_mixed"),
        ("mixed", True, "mixed", ""),
        ("fp16_mixed", False, "fp16_mixed", ""),
    ):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, has=has_bf16: has)
        caplog.clear()
        with caplog.at_level("INFO"):
            settled = settle_precision(StrategyConfig(precision=given), "cuda", lambda own: own)  # type: ignore[arg-type]
        assert (settled.precision_config.mode, caplog.messages) == (mode, [said] if said else [])


def test_fp8_takes_any_number_of_rows(monkeypatch: pytest.MonkeyPatch):
    """Where CUDA's kernel takes multiples of 16, forward and backward give what bf16 gives, within the eighth bit."""
    multiply, inner = torch._scaled_mm, []

    def as_on_cuda(a: torch.Tensor, b: torch.Tensor, **options: Any) -> torch.Tensor:
        assert not any(size % 16 for size in b.shape), tuple(b.shape)
        inner.append(b.shape[0])
        return multiply(a, b, **options)

    monkeypatch.setattr(torch, "_scaled_mm", as_on_cuda)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32, bias=False)).bfloat16()
    model = copy.deepcopy(plain)
    apply_float8(model, None, "precision")
    for shape in ((3, 5, 32), (17, 32), (4, 8, 32)):
        rows = torch.randn(shape).bfloat16()
        for one in (model, plain):
            one.zero_grad()
            one(rows).float().square().sum().backward()
        for (name, found), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
            error: Any = torch.dist(found.grad, wanted.grad)  # type: ignore[arg-type]
            assert error < 0.125 * torch.linalg.vector_norm(wanted.grad), name  # type: ignore[arg-type]
    assert inner.count(16) == 2  # the gradients of two weights, of 15 rows


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


def test_wrong_values_are_refused():
    for field, value in (("engine", "ddp2"), ("backward_prefetch", "post"), ("precision", "bf16")):
        with pytest.raises(ConfigError, match=rf"fsdp_strategy\.{field}: got {value}"):
            fsdp_strategy(**{field: value})  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:.*GPU available but not used", "ignore:.*bf16.*")
def test_precision_is_the_strategys_alone():
    options: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "logger": False}
    for engine, precision in (("fsdp2", "bf16-mixed"), ("fsdp1", "16-true")):
        with pytest.raises(ConfigError, match=r"Trainer\(precision=...\): got " + precision):
            Trainer(strategy=fsdp_strategy(engine=engine), precision=precision, **options)
        trainer = Trainer(strategy=fsdp_strategy(engine=engine), precision=32, **options)
        assert trainer.precision == "32-true"  # Lightning's default
